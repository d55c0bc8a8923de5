"""Healthy runs with odd features: none of them may be called wrong, and none may stop `verify`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode

WIDTH, OUT = 5, 3
Batches = Callable[[int, int], Any]
"""By rank and step."""


def rows(rank: int, step: int, count: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7 + 10 * step + rank)
    return tuple(torch.randn(count, width, generator=draw, dtype=torch.float64) for width in (WIDTH, OUT))  # type: ignore[return-value]


@dataclass(frozen=True)
class Odd:
    """A model, and what is odd about its run."""

    model: Callable[[], nn.Module]
    batches: Batches = rows
    criterion: Any = field(default_factory=nn.MSELoss)
    optimizer: Callable[[nn.Module], Any] = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = field(default_factory=dict)
    before: Callable[[Any], None] = lambda engine: None
    dtype: torch.dtype = torch.float64


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, OUT))


class Made(nn.Module):
    """An `mlp` whose forward is a function of it and the input."""

    def __init__(self, forward: Callable[[Any, Any], Any], **more: nn.Module) -> None:
        super().__init__()
        self.body = mlp()
        for name, module in more.items():
            self.add_module(name, module)
        self._forward = forward

    def forward(self, x: Any) -> Any:
        return self._forward(self, x)


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT))
    model[2].weight = model[0].weight
    return model


class OneNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x[:, :OUT]


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, OUT).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, OUT, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(WIDTH, 6, batch_first=True), nn.Linear(6, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.unsqueeze(1))[0][:, 0])


class SumAndCount(nn.Module):
    """Gives (sum, count)."""

    def forward(self, out: Tensor, label: Tensor) -> tuple[Tensor, int]:
        return F.mse_loss(out, label, reduction="sum"), label.numel()


class OwnOptimizer(torch.optim.Optimizer):
    """Has an argument that is needed, and keeps a state."""

    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, {"rate": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    seen = self.state[parameter].setdefault("seen", torch.zeros_like(parameter))
                    seen += parameter.grad
                    parameter -= group["rate"] * seen


def groups(model: nn.Module) -> Any:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.3}, {"params": biases, "lr": 0.05, "weight_decay": 0.0}], lr=0.01
    )


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, WIDTH, padding_idx=0), nn.Linear(WIDTH, OUT))


def words(rank: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step * 10 + rank)
    return torch.randint(9, (4,), generator=draw), torch.randint(OUT, (4,), generator=draw)


def train_some(engine: Any) -> None:
    """Steps before the comparison begins: the optimizer has a state by then."""
    for step in range(3):
        engine.zero_grad()
        engine.execute_schedule(iter([rows(engine.context.get_global_rank(), 50 + step)]))
        engine.step()


adam = lambda model: torch.optim.Adam(model.parameters(), lr=0.01)  # noqa: E731
momentum = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # noqa: E731

BEGUN: dict[str, Odd] = {
    "Adam": Odd(mlp, optimizer=adam, before=train_some),
    "momentum, ZeRO 1": Odd(mlp, optimizer=momentum, settings={"zero": 1}, before=train_some),
}
"""Runs that cannot be compared: the optimizer has a state already."""
RUNS: dict[str, Odd] = {
    "frozen": Odd(frozen),
    "frozen, ZeRO 1": Odd(frozen, settings={"zero": 1}),
    "frozen, ZeRO 3": Odd(frozen, settings={"zero": 3}),
    "unused": Odd(lambda: Made(lambda self, x: self.body(x), unused=nn.Linear(2, 2))),
    "unused, clipped, ZeRO 2": Odd(
        lambda: Made(lambda self, x: self.body(x), unused=nn.Linear(2, 2)),
        optimizer=adam,
        settings={"zero": 2, "clip_grad_norm": 0.1},
    ),
    "tied": Odd(tied),
    "tied, ZeRO 3": Odd(tied, optimizer=adam, settings={"zero": 3}),
    "one number": Odd(OneNumber),
    "one number, ZeRO 1": Odd(OneNumber, optimizer=adam, settings={"zero": 1}),
    "one number, ZeRO 3": Odd(OneNumber, settings={"zero": 3}),
    "LoRA": Odd(LoRA, optimizer=lambda model: torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()))),
    "LSTM": Odd(Recurrent, optimizer=adam),
    "weight norm": Odd(lambda: nn.Sequential(weight_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), nn.Linear(8, OUT))),
    "uneven": Odd(mlp, lambda rank, step: rows(rank, step, 2 + 3 * rank), SumAndCount()),
    "an empty rank": Odd(mlp, lambda rank, step: rows(rank, step, 4 * (1 - rank)), SumAndCount()),
    "uneven, accumulation": Odd(
        mlp,
        lambda rank, step: [rows(rank, step, 2 + rank), rows(rank, 20 + step, 3)],
        SumAndCount(),
        settings={"gradient_accumulation": 2},
    ),
    "groups": Odd(mlp, optimizer=groups),
    "groups, ZeRO 2, clipped": Odd(mlp, optimizer=groups, settings={"zero": 2, "clip_grad_norm": 0.01}),
    "clipped per group": Odd(
        mlp, settings={"clip_grad_norm": {"max_norm": 0.1, "groups": {"first": {"params": "0.*", "max_norm": 0.01}}}}
    ),
    "clipped per parameter": Odd(mlp, settings={"clip_grad_norm": {"max_norm": 0.1, "per": "parameter"}}),
    "own optimizer": Odd(mlp, optimizer=lambda model: OwnOptimizer(model.parameters(), rate=0.05)),
    "huge": Odd(mlp, lambda rank, step: (rows(rank, step)[0] * 1e20, rows(rank, step)[1] * 1e100)),
    "tiny": Odd(mlp, lambda rank, step: (rows(rank, step)[0] * 1e-20, rows(rank, step)[1] * 1e-30)),
    "no gradient at all": Odd(lambda: Made(lambda self, x: 0 * self.body(x))),
    "batch norm that rests": Odd(
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, OUT)),
        before=lambda engine: engine.model[1].eval(),
    ),
    "words": Odd(sparse, words, nn.CrossEntropyLoss()),
    "a dict": Odd(
        lambda: Made(lambda self, x: self.body(x)), lambda rank, step: ({"x": rows(rank, step)[0]}, rows(rank, step)[1])
    ),
    "called twice": Odd(
        lambda: Made(
            lambda self, x: self.again(self.again(x)) @ torch.ones(WIDTH, OUT, dtype=x.dtype) + self.body(x),
            again=nn.Linear(WIDTH, WIDTH),
        )
    ),
    "in place": Odd(lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, OUT))),
    "recomputed": Odd(lambda: Made(lambda self, x: checkpoint(self.body, x, use_reentrant=False))),
    "called twice, recomputed": Odd(
        lambda: Made(
            lambda self, x: (
                checkpoint(self.again, checkpoint(self.again, x, use_reentrant=False), use_reentrant=False)[:, :OUT]
                + self.body(x)
            ),
            again=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        )
    ),
    "dropout by function": Odd(lambda: Made(lambda self, x: self.body(F.dropout(x, 0.3, self.training)))),
    "single precision inside": Odd(lambda: Made(lambda self, x: self.body(x.float().softmax(-1).to(x.dtype)))),
    "begun, no state": Odd(mlp, before=train_some),
    "bf16": Odd(mlp, settings={"bf16": True}, dtype=torch.float32),
    "fp16": Odd(mlp, settings={"fp16": {}}, dtype=torch.float32, optimizer=adam),
    "fp16, ZeRO 2, clipped": Odd(mlp, settings={"fp16": {}, "zero": 2, "clip_grad_norm": 0.1}, dtype=torch.float32),
    "Adagrad": Odd(mlp, optimizer=lambda model: torch.optim.Adagrad(model.parameters())),
    "RMSprop": Odd(mlp, optimizer=lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01)),
}


def said(name: str) -> str:
    """On a rank: nothing where the run is found equal to one process; else what is said, or the error."""
    odd, context = {**RUNS, **BEGUN}[name], ParallelContext()
    with colonnade.launch(dict(odd.settings), context=context, verbose=False), torch.random.fork_rng():
        torch.manual_seed(0)
        model = odd.model().to(odd.dtype)
        try:
            engine = colonnade.initialize(model, odd.optimizer(model), odd.criterion, context=context)[0]
            try:
                odd.before(engine)
                report = colonnade.verify(
                    engine, reference=partial(_whole, odd), batches=[_batches(odd, context, s) for s in range(2)]
                )
            finally:
                engine.close()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "" if report.ok else str(report)


def _whole(odd: Odd) -> nn.Module:
    return odd.model().to(odd.dtype)


def _batches(odd: Odd, context: ParallelContext, step: int) -> list[Any]:
    found = odd.batches(context.get_local_rank(ParallelMode.DATA), step)
    found = found if isinstance(found, list) else [found]
    cast = lambda leaf: leaf.to(odd.dtype) if leaf.is_floating_point() else leaf  # noqa: E731
    return torch.utils._pytree.tree_map_only(Tensor, cast, found)


def said_of_all(names: list[str]) -> dict[str, str]:
    return {name: said(name) for name in names}

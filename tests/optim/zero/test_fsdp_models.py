"""Models that FSDP2 alone does not take, or takes wrongly, under stage 3: each equals one process, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import ColonnadeError, GradientError
from colonnade.models.gpt import GPT
from colonnade.testing import compare, gather_gradients, gather_weights, run_world
from tests.gradients.scenarios import numbers
from tests.models.grid import Case, trained
from tests.optim.zero.cases import run_all
from tests.ranks import on_ranks


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def tokens(rows: int, seed: int) -> Tensor:
    return torch.randint(11, (rows, 5), generator=torch.Generator().manual_seed(seed))


def floats(rows: int, seed: int) -> Tensor:
    return numbers(rows, 6, seed=seed)


def check_parity(
    build: Callable[[], nn.Module],
    make: Callable[[Any], Any] = adamw,
    data: Callable[[int, int], Tensor] = floats,
    zero: Any = 3,
    accumulation: int = 1,
    between: Callable[[nn.Module, int], None] = lambda model, step: None,
    before: bool = False,
    steps: int = 4,
) -> None:
    """Gradients, norm and weights of four clipped steps on each half of the data, and in one process on all of it."""
    config = {"zero": zero, "clip_grad_norm": 0.5, "gradient_accumulation": accumulation}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model, plain, rank = build(), build(), gpc.get_global_rank()
        engine = initialize(model, make(model.parameters()) if before else make, context=gpc)[0]
        reference = make(plain.parameters())
        for step in range(steps):
            between(model, step)
            between(plain, step)
            engine.zero_grad()
            reference.zero_grad()
            for micro in range(accumulation):
                seed = 100 * step + 10 * micro
                engine.backward(engine(data(3, seed + rank)).square().mean())
                if micro + 1 < accumulation:
                    engine.step()
                x = torch.cat([data(3, seed + part) for part in range(gpc.world_size)])
                (plain(x).square().mean() / accumulation).backward()
            outcome = engine._sum_gradients()
            whole = {name: p.grad.to_dense() for name, p in plain.named_parameters() if p.grad is not None}
            if not any(p.grad is not None and p.grad.is_sparse for p in plain.parameters()):
                compare(real(whole), real(gather_gradients(engine.model, gpc)), 1e-10)
                norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()
            else:
                norm = torch.cat([grad.flatten() for grad in whole.values()]).norm().item()
                for parameter in plain.parameters():
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad * min(1.0, 0.5 / (norm + 1e-6))
            engine._finish_step(outcome)
            assert engine.grad_norm.item() == pytest.approx(norm, rel=1e-10)
            reference.step()
        compare(real(dict(plain.named_parameters())), real(gather_weights(engine.model, gpc)), 1e-10)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            if theirs.is_complex():  # the gathering above gives real parts
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)
        engine.close()


def real(found: Any) -> dict[str, Tensor]:
    return {name: value.real if value.is_complex() else value for name, value in found.items()}


def gpt(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return GPT(11, 5, 8, 2, 2, **options).double()


class Tied(nn.Module):
    """A weight shared inside a block, between two blocks, a module in two lists, and one called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))
        self.blocks[0][2].weight = self.blocks[0][0].weight
        self.blocks[2][0].weight = self.blocks[1][2].weight
        self.again = nn.ModuleList([self.blocks[1], nn.Linear(6, 6)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.again, self.blocks[1]):
            x = torch.tanh(block(x))
        return x


def _tied() -> None:
    """Tied weights."""
    check_parity(Tied)
    check_parity(Tied, sgd, accumulation=2, zero={"stage": 3, "prefetch": 2}, before=True)
    check_parity(Tied, zero={"stage": 3, "wrap": "Linear", "reshard": False})
    check_parity(gpt, data=tokens)
    check_parity(lambda: gpt(tied=False), data=tokens, accumulation=2)


def triple(parameter: Any) -> None:
    parameter.grad.mul_(3.0)


def mask_whole(parameter: Any) -> None:
    parameter.grad.mul_(torch.ones(6, 6).double())


class Hooked(nn.Module):
    """Hooks of both kinds, on parameters of the root and of inner modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.double()
        mask = (numbers(6, 6, seed=5) > 0).double()
        self.layers[0].weight.register_hook(lambda grad: grad * mask)
        self.layers[0].weight.register_hook(lambda grad: grad.mul(2.0))
        self.removed = self.layers[1].weight.register_hook(lambda grad: grad * 0)
        self.head.weight.register_post_accumulate_grad_hook(triple)
        self.head.bias.register_hook(lambda grad: None)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def _more_hooks(model: Any, step: int) -> None:
    if step == 2:
        model.removed.remove()
    if step == 3:
        model.layers[1].bias.register_hook(lambda grad: grad * 5)


def _hooks() -> None:
    """Gradient hooks are kept."""
    for accumulation in (1, 2):
        check_parity(Hooked, between=_more_hooks, accumulation=accumulation)
    with launch({"zero": 3}, context=ParallelContext(), verbose=False) as gpc:
        model = Hooked()
        model.layers[1].weight.register_post_accumulate_grad_hook(mask_whole)
        model.head.weight.flag = "mine"  # type: ignore[assignment]
        engine = initialize(model, adamw, context=gpc)[0]
        assert model.head.weight.flag == "mine"
        with pytest.raises(GradientError, match=r"hook of layers\.1\.weight failed.*register_hook"):
            engine.backward(engine(floats(3, 0)).sum())


class Odd(nn.Module):
    """Parameters that FSDP2 cannot shard."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.double()
        if kind == "empty":
            self.layers[0].empty = nn.Parameter(torch.empty(0, 6).double())
        if kind == "complex":
            self.layers[1].turn = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        if kind == "sparse":
            self.rows = nn.Embedding(7, 6, sparse=True).double()
            self.layers.append(nn.EmbeddingBag(7, 6, sparse=True, mode="sum").double())
        if kind == "column":
            self.layers[0].weight = nn.Parameter(self.layers[0].weight.detach().t())

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sparse":
            picked = (x[:, :1] > 0).long()
            x = x + self.rows(picked).squeeze(1) + self.layers[2](picked)
        for layer in list(self.layers)[:2]:
            x = torch.tanh(layer(x))
        if self.kind == "empty":
            x = x + self.layers[0].empty.sum()
        return (x * self.layers[1].turn).abs() if self.kind == "complex" else x


def _odd() -> None:
    """Parameters that fsdp cannot shard."""
    for kind, make in (("empty", adamw), ("complex", adamw), ("column", adamw), ("sparse", sgd)):
        try:
            check_parity(lambda kind=kind: Odd(kind), make)
        except Exception as error:
            raise AssertionError(f"{kind}: {error}") from error


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def narrow_net() -> nn.Module:
    """Its first weight has one row: the second rank holds none of it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 1), nn.Tanh(), nn.Linear(1, 6)).double()


def rprop(parameters: Any) -> Any:
    return torch.optim.Rprop(parameters)


def adafactor(parameters: Any) -> Any:
    return torch.optim.Adafactor(parameters)


def lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters)


class Local(torch.optim.SGD):
    """Divides by a norm of what it happens to have: nonsense on shards."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                    (p.to_local() if hasattr(p, "to_local") else p).sub_(local / local.norm())


def mixed_net() -> nn.Module:
    net = plain_net()
    net[2].float()
    return nn.ModuleDict({"one": net})


def _refused() -> None:
    """Optimizers that cannot step on shards are refused."""
    cases: list[tuple[Callable[[], nn.Module], Any, str]] = [
        (plain_net, rprop, "Rprop could not step on a shard"),
        (plain_net, adafactor, "Adafactor could not step on a shard"),
        (plain_net, lbfgs, r"LBFGS\.step\(\) needs 'closure'"),
        (plain_net, lambda p: Local(p, lr=0.1), "Local updates the shards"),
        (mixed_net, adamw, r"one\.0\.weight is torch\.float64; one\.2\.weight is torch\.float32"),
    ]
    for build, make, message in cases:
        gpc, refused = ParallelContext(), pytest.raises(ColonnadeError, match=message)
        with launch({"zero": 3}, context=gpc, verbose=False), refused:
            initialize(build(), make, context=gpc)
    for make in (torch.optim.Adadelta, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adagrad):
        check_parity(plain_net, lambda p, make=make: make(p, lr=0.01), steps=2, before=True)
    check_parity(narrow_net, lambda p: torch.optim.Adagrad(p, lr=0.01), steps=2, before=True)


def _groups() -> None:
    """Parameters that come after initialize."""
    with launch({"zero": 3}, context=ParallelContext(), verbose=False) as gpc:
        model: Any = plain_net()
        model[2].weight.requires_grad_(False)
        engine = initialize(model, lambda p: adamw([q for q in p if q.requires_grad]), context=gpc)[0]
        model[2].weight.requires_grad_(True)
        engine.optimizer.add_param_group({"params": [model[2].weight]})  # the model's: sharded already
        x = floats(3, gpc.get_global_rank())
        engine.zero_grad()
        engine.backward(engine(x).square().mean())
        assert model[2].weight.grad is not None
        engine.step()
        model.append(nn.Linear(6, 6).double())
        engine.optimizer.add_param_group({"params": model[3].parameters()})
        before = [p.detach().clone() for p in model[3].parameters()]
        engine.zero_grad()
        engine.backward(engine(x).square().mean())
        with pytest.raises(GradientError, match=r"3\.weight of shape \(6, 6\) was added to optimizer group 2"):
            engine.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model[3].parameters(), strict=True))


class Borrows(nn.Module):
    """Uses a weight that another module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6).double()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) @ self.layers[0].weight


def _borrows() -> None:
    """A weight used outside its module is explained."""
    with launch({"zero": 3}, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(Borrows(), adamw, context=gpc)[0]
        with pytest.raises(RuntimeError) as error:
            engine(floats(3, 1))
        assert "zero.wrap" in "".join(error.value.__notes__)


class Frozen(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1][0].weight.requires_grad_(False)


def _thaw(model: Any, step: int) -> None:
    if step == 2:
        model.blocks[0].requires_grad_(True)
        model.again[1].weight.requires_grad_(False)


def _evaluate(model: Any, step: int) -> None:
    """With and without gradients, in the middle of things, and once not to the end."""
    if step:
        with torch.no_grad():
            model(floats(3, step))
        model(floats(3, step))
        with pytest.raises(RuntimeError, match=r"shape|size"):
            model(numbers(3, 5, seed=1))
        with pytest.raises(KeyError):
            _fail_inside(model)


def _fail_inside(model: Any) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("inside")

    handle = model.blocks[2][1].register_forward_hook(fail)
    try:
        model(floats(3, 1))
    finally:
        handle.remove()


def _no_gradients(model: Any) -> None:
    with torch.no_grad():
        model(floats(3, 1))
    assert all(hasattr(parameter, "to_local") for parameter in model.parameters())


def _no_backward(model: Any) -> None:
    model(floats(3, 1))


def _no_end(model: Any) -> None:
    with pytest.raises(KeyError):
        _fail_inside(model)
    if hasattr(model, "reset_iter_state"):  # before torch 2.12, parameters stay gathered until the step frees them
        assert all(hasattr(parameter, "to_local") for parameter in model.parameters())


def _stale() -> None:
    """Whatever runs between backward and step: the step is one process's, and the next pass has its weights."""
    for between in (_no_gradients, _no_backward, _no_end):
        for zero in ({"stage": 3}, {"stage": 3, "prefetch": 1}, {"stage": 3, "reshard": False}):
            with launch({"zero": zero}, context=ParallelContext(), verbose=False) as gpc:
                model, plain, x = Tied(), Tied(), floats(3, 1)
                engine, reference = initialize(model, sgd, context=gpc)[0], sgd(plain.parameters())
                for _ in range(3):
                    reference.zero_grad()
                    plain(x).square().mean().backward()
                    reference.step()
                    engine.zero_grad()
                    engine.backward(engine(x).square().mean())
                    between(model)
                    engine.step()
                    with torch.no_grad():
                        torch.testing.assert_close(engine(x), plain(x), rtol=1e-10, atol=1e-12, msg=f"{between} {zero}")


def _brothers() -> None:
    """Frozen parameters and evaluations."""
    check_parity(Frozen, between=_thaw)
    check_parity(Tied, between=_evaluate)
    check_parity(Tied, between=_evaluate, zero={"stage": 3, "reshard": False, "prefetch": 1}, accumulation=2)
    _stale()


@pytest.mark.parametrize(
    "case",
    [
        Case("GPT, tied", {"data": 2}, 2),
        Case("MoE-GPT", {"expert": 2}, 2),
        pytest.param(Case("GPT, tied", {"data": 2, "pipeline": 2}, 4), marks=pytest.mark.slow),
        pytest.param(Case("MoE-GPT", {"expert": 2}, 4), marks=pytest.mark.slow),
        pytest.param(Case("GPT, tied", {"data": 2, "tensor": {"size": 2, "mode": "1d"}}, 4), marks=pytest.mark.slow),
        pytest.param(Case("MoE-GPT", {"data": 4, "expert": 2, "pipeline": 2}, 8), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_own_models(case):
    run_world(case.ranks, trained, case, 3, timeout=100)


def _units() -> None:
    """Blocks of a sequential model are gathered one by one."""
    with launch({"zero": 3}, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(gpt(), adamw, context=gpc)[0]
        units = [name for name, module in engine.model.named_modules() if hasattr(module, "unshard")]
        assert units == ["", "blocks.0", "blocks.1"]  # embedding and head share a weight, which is the root's
        assert all(hasattr(parameter, "to_local") for parameter in engine.model.parameters())
        engine.close()


def _saved(folder: str, stage: int, steps: range, load: bool) -> dict[str, Tensor]:
    with launch({"zero": stage, "clip_grad_norm": 0.5}, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(gpt(), adamw, context=gpc)[0]
        with CheckpointManager(folder, gpc) as manager:
            if load:
                with torch.no_grad():
                    engine(tokens(3, 1))  # leaves nothing gathered that would not be loaded
                manager.load(engine.model, engine.optimizer)
            for step in steps:
                engine.zero_grad()
                engine.backward(engine(tokens(3, 10 * step + gpc.get_global_rank())).square().mean())
                engine.step()
            if not load:
                manager.save(steps.stop, engine.model, engine.optimizer)
        found = gather_weights(engine.model, gpc)
        engine.close()
    return found


@on_ranks(2)
def test_tied_weights_go_on_under_another_stage(tmp_path):
    folder = str(tmp_path)
    truth = _saved(f"{folder}/all", 0, range(4), False)
    for first, second in ((3, 0), (3, 2), (1, 3), (3, 3)):
        at = f"{folder}/{first}{second}"
        _saved(at, first, range(2), False)
        compare(truth, _saved(at, second, range(2, 4), True), 1e-10)


def test_models_of_every_kind_on_two_ranks():
    """Tied, hooked, odd and frozen parameters; optimizers, parameters that come later, weights used elsewhere."""
    run_world(2, run_all, [_tied, _hooks, _odd, _refused, _groups, _borrows, _brothers, _units], timeout=180)

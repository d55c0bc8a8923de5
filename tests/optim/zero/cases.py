"""Small fp64 models under data, tensor, pipeline and expert parallelism, trained under ZeRO and in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.optim.zero import ZeroOptimizer
from colonnade.parallel.placement import Shard, place
from colonnade.testing import compare, gather_gradients, gather_weights
from tests.engine import test_pipeline
from tests.gradients.scenarios import Gather, Plain, Split, SumRows, numbers, route

RTOL = 1e-10
STEPS = 5
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.002, momentum=0.9, nesterov=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1),
}


class Experts(nn.Module):
    """Some of the experts' matrices; a token goes to one of them."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        return sum((to == expert).unsqueeze(1) * (x @ self.weight[expert]) for expert in range(len(self.weight)))


class Moe(nn.Module):
    """Tokens go to one of four experts; with a context, two of them are on each rank of an expert group."""

    def __init__(self, gpc: ParallelContext | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()
        weight, self.group = numbers(4, 6, 6, seed=3), None
        if gpc is not None:
            self.group, self.at = gpc.get_group(ParallelMode.EXPERT), gpc.get_local_rank(ParallelMode.EXPERT)
            weight = weight[2 * self.at : 2 * self.at + 2].clone()
        self.experts = Experts(weight)
        if gpc is not None:
            place(self.experts.weight, {ParallelMode.EXPERT: Shard(0)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        to = route(x)
        if self.group is None:
            return self.head(self.experts(x, to))
        everyone, their = Gather.apply(x, self.group), Gather.apply(to.double(), self.group).long()
        out = SumRows.apply(self.experts(everyone, their - 2 * self.at), self.group)
        return self.head(out[len(x) * self.at : len(x) * (self.at + 1)])


@dataclass(frozen=True)
class Case:
    """A layout, and the model on it and in one process."""

    world: int
    parallel: dict[str, Any]
    parts: int
    kind: str = "plain"

    @property
    def is_pipe(self) -> bool:
        return self.kind == "pipe"

    def build(self, gpc: ParallelContext) -> nn.Module:
        if self.kind == "pipe":
            return test_pipeline.build(gpc, "loop1", tied=True)
        return {"plain": lambda _: Plain(), "split": Split, "moe": Moe}[self.kind](gpc)

    def whole(self) -> nn.Module:
        if self.kind == "pipe":
            return test_pipeline.Stage(test_pipeline.all_parts(None, True))
        return Moe() if self.kind == "moe" else Plain()

    def batch(self, step: int, micro: int, part: int) -> tuple[Tensor, Tensor]:
        if self.is_pipe:
            return test_pipeline.batch(10 * step + micro, part, rows=8)
        seed = 1000 * step + 100 * micro + part
        return numbers(6, 6, seed=seed), numbers(6, 3, seed=50_000 + seed)

    def run_pass(self, engine: Any, gpc: ParallelContext, step: int, micro: int) -> Tensor:
        """One pass on this rank's batch; the loss."""
        x, y = self.batch(step, micro, gpc.get_local_rank(ParallelMode.DATA))
        if self.is_pipe:
            return engine.execute_schedule(iter([(x, y)]))[2]
        loss = F.mse_loss(engine(x), y)
        engine.backward(loss)
        return loss.detach()


CASES = {
    "data 2": Case(2, {}, 2),
    "data 4": Case(4, {}, 4),
    "data 2 x tensor 2": Case(4, {"tensor": 2}, 2, "split"),
    "data 2 x pipe 2": Case(4, {"pipeline": 2}, 2, "pipe"),
    "data 2 x expert 2": Case(4, {"expert": 2}, 4, "moe"),
}


@dataclass(frozen=True)
class Way:
    """What is tried on a case."""

    stage: int
    optimizer: str
    clip: Any = None
    accumulation: int = 1
    shared_memory: Any = "auto"
    more: tuple[tuple[str, Any], ...] = ()

    def config(self, case: Case) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, **dict(self.more)}
        if self.stage in (1, 2):
            zero.setdefault("bucket_mb", 0.0004)  # several buckets even of these models
        config: dict[str, Any] = {
            "parallel": case.parallel,
            "zero": zero,
            "sync": {"shared_memory": self.shared_memory},
            "gradient_accumulation": self.accumulation,
        }
        if self.clip is not None:
            config["clip_grad_norm"] = self.clip
        if case.is_pipe:
            config["schedule"] = {"type": "OneFOneB", "num_microbatches": 4}
        return config


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with other options: matrices decay, vectors do not."""
    wide = [p for p in model.parameters() if p.dim() > 1]
    narrow = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0, "lr": 0.003}]


@dataclass
class Truth:
    """One process on the joined batch: first gradients, norms and losses of every step, and weights at the end."""

    gradients: dict[str, Tensor]
    norms: list[float]
    losses: list[float]
    weights: dict[str, Tensor]


def one_process(case: Case, way: Way, steps: int = STEPS) -> Truth:
    model = case.whole()
    optimizer = OPTIMIZERS[way.optimizer](groups_of(model))
    truth = Truth({}, [], [], {})
    for step in range(steps):
        optimizer.zero_grad()
        losses = []
        for micro in range(way.accumulation):
            batches = [case.batch(step, micro, part) for part in range(case.parts)]
            x, y = (torch.cat(column) for column in zip(*batches, strict=True))
            loss = F.mse_loss(model(x), y)
            (loss / way.accumulation).backward()
            losses.append(loss.item())
        truth.losses.append(sum(losses) / len(losses))
        if step == 0:
            truth.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        limit = way.clip if isinstance(way.clip, float) else float("inf")
        truth.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
    truth.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return truth


@contextmanager
def engine_of(case: Case, way: Way) -> Iterator[tuple[Any, ParallelContext]]:
    with launch(way.config(case), context=ParallelContext(), verbose=False) as gpc:
        model = case.build(gpc)
        engine = initialize(model, OPTIMIZERS[way.optimizer](groups_of(model)), nn.MSELoss(), context=gpc)[0]
        yield engine, gpc
        engine.close()


def run_steps(engine: Any, gpc: ParallelContext, case: Case, way: Way, steps: range = range(STEPS)) -> None:
    for step in steps:
        engine.zero_grad()
        for micro in range(way.accumulation):
            case.run_pass(engine, gpc, step, micro)
            engine.step()


def check_parity(name: str, ways: list[Way]) -> int:
    """On a rank: train every way and compare everything with one process."""
    case = CASES[name]
    for way in ways:
        try:
            with engine_of(case, way) as (engine, gpc):
                _compare(engine, gpc, case, way, one_process(case, way))
        except Exception as error:
            raise AssertionError(f"{name}, {way}: {error}") from error
    return len(ways)


def _compare(engine: Any, gpc: ParallelContext, case: Case, way: Way, truth: Truth) -> None:
    for step in range(STEPS):
        engine.zero_grad()
        losses = []
        for micro in range(way.accumulation):
            losses.append(case.run_pass(engine, gpc, step, micro))
            if micro + 1 < way.accumulation:
                assert engine.step() is False
        outcome = engine._sum_gradients()
        if step == 0:
            compare(truth.gradients, named(whole_gradients(engine, gpc), case), RTOL)
        engine._finish_step(outcome)
        mean = torch.stack(losses).mean()
        torch.distributed.all_reduce(mean)
        assert abs(mean.item() / gpc.world_size - truth.losses[step]) <= RTOL * truth.losses[step]
        if way.clip is not None:
            assert abs(engine.grad_norm.item() - truth.norms[step]) <= RTOL * truth.norms[step]
    compare(truth.weights, named(gather_weights(engine.model, gpc), case), RTOL)


def whole_gradients(engine: Any, gpc: ParallelContext) -> dict[str, Tensor]:
    """The final gradients of whole parameters, put together from slices and shards."""
    optimizer = engine.optimizer
    if isinstance(optimizer, ZeroOptimizer) and optimizer.settings.reduce_scatter:
        parameters = list(engine.model.parameters())
        for parameter in parameters:
            assert parameter.grad is None
            parameter.grad = optimizer.whole_gradient(parameter)
        found = gather_gradients(engine.model, gpc)
        optimizer.zero_grad()
        return found
    return gather_gradients(engine.model, gpc)


def named(found: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    return test_pipeline.renamed(found, True) if case.is_pipe else found


def run_all(checks: Sequence[Callable[[], None]]) -> None:
    """On a rank: one check after another, in one world; an error says which."""
    for check in checks:
        try:
            check()
        except Exception as error:
            raise AssertionError(f"{check.__name__}: {error}") from error

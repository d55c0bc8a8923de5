"""Small models under every kind of parallelism, written by hand, each with its one-process truth.

A scenario builds its part of the model on a rank, runs forward and backward on the engine, and gives the
gradients that one process has on the joined batch. Everything is fp64.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.parallel.placement import Replicate, Shard, Tied, place
from colonnade.testing import plain_gradients

MINE = ParallelMode.register("SCENARIO_MINE", "scenario_mine", data="distinct")


class Sum(torch.autograd.Function):
    """Sum in forward, as it is in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Copy(torch.autograd.Function):
    """As it is in forward, sum in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Gather(torch.autograd.Function):
    """All rows of the group in forward; in backward, the sum of everybody's gradient of my rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.at, ctx.rows = group, dist.get_rank(group), len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.at * ctx.rows : (ctx.at + 1) * ctx.rows], None


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Plain(nn.Module):
    """norm -> up -> gelu -> down -> head, the model whose parts the scenarios split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(F.gelu(self.up(self.norm(x)))))


class Scenario:
    """Data parallelism; the base of the others."""

    world = 2
    parallel: dict[str, Any] = {}
    accumulation = 1
    plain: type[nn.Module] = Plain

    @property
    def config(self) -> dict[str, Any]:
        """Driven by hand: a pipeline too."""
        return {
            "parallel": self.parallel,
            "gradient_accumulation": self.accumulation,
            "schedule": "NonPipelineSchedule",
        }

    def build(self, gpc: ParallelContext) -> nn.Module:
        return Plain()

    def batch(self, part: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        return numbers(5, 6, seed=100 * micro + part), numbers(5, 3, seed=5000 + 100 * micro + part)

    def run(self, engine: Any, gpc: ParallelContext) -> None:
        x, y = self.batch(gpc.get_local_rank(ParallelMode.DATA))
        engine.backward(F.mse_loss(engine(x), y))

    def truth(self) -> dict[str, Tensor]:
        model = self.plain()
        batches = [self.batch(part) for part in range(self.parts)]
        x, y = (torch.cat(column) for column in zip(*batches, strict=True))
        return plain_gradients(model, F.mse_loss(model(x), y))

    @property
    def parts(self) -> int:
        return self.world


class Data4(Scenario):
    world = 4


class Split(Plain):
    """`up` by column and `down` by row over the tensor group."""

    def __init__(self, gpc: ParallelContext) -> None:
        super().__init__()
        self.group = gpc.get_group(ParallelMode.TENSOR)
        at, tensor = gpc.get_local_rank(ParallelMode.TENSOR), ParallelMode.TENSOR
        rows = slice(4 * at, 4 * at + 4)
        self.up.weight = place(nn.Parameter(self.up.weight[rows].detach().clone()), {tensor: Shard(0)})
        self.up.bias = place(nn.Parameter(self.up.bias[rows].detach().clone()), {tensor: Shard(0)})
        self.down.weight = place(nn.Parameter(self.down.weight[:, rows].detach().clone()), {tensor: Shard(1)})

    def forward(self, x: Tensor) -> Tensor:
        x = Copy.apply(self.norm(x), self.group)
        x = F.gelu(F.linear(x, self.up.weight, self.up.bias))
        x = Sum.apply(F.linear(x, self.down.weight), self.group) + self.down.bias
        return self.head(x)


class DataTensor(Scenario):
    world = 4
    parallel = {"tensor": 2}
    parts = 2

    def build(self, gpc: ParallelContext) -> nn.Module:
        return Split(gpc)


class PartialNorm(Plain):
    """The norm sees only this tensor rank's rows, as under a split sequence: its gradient is partial over tensor."""

    def __init__(self, gpc: ParallelContext) -> None:
        super().__init__()
        self.group = gpc.get_group(ParallelMode.TENSOR)
        self.at = gpc.get_local_rank(ParallelMode.TENSOR)
        for parameter in self.norm.parameters():
            place(parameter, {ParallelMode.TENSOR: Replicate(owes="sum")})

    def forward(self, x: Tensor) -> Tensor:
        half = len(x) // 2
        mine = self.norm(x[half * self.at : half * (self.at + 1)])
        # Every tensor rank continues with all rows; each takes 1/2 of the gradient, and Gather adds them up.
        x = Gather.apply(mine, self.group)
        x = x * 0.5 + x.detach() * 0.5
        return self.head(self.down(F.gelu(self.up(x))))


class DataPartial(DataTensor):
    def build(self, gpc: ParallelContext) -> nn.Module:
        return PartialNorm(gpc)

    def batch(self, part: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        return numbers(6, 6, seed=part), numbers(6, 3, seed=50 + part)


class PlainMoe(nn.Module):
    """Tokens are sent to an expert by the sign pattern of their first two features; expert 3 never gets one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Linear(6, 6)
        self.experts = nn.Parameter(torch.randn(4, 6, 6))
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        return self.head(self.dispatch(x, route(x)))

    def dispatch(self, x: Tensor, to: Tensor) -> Tensor:
        return sum((to == expert).unsqueeze(1) * (x @ self.experts[expert]) for expert in range(len(self.experts)))


def route(x: Tensor) -> Tensor:
    return ((x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()).detach()


class SplitMoe(PlainMoe):
    """Two experts on each rank of an expert group; tokens of the whole group are gathered."""

    def __init__(self, gpc: ParallelContext) -> None:
        super().__init__()
        self.group = gpc.get_group(ParallelMode.EXPERT)
        size, at = gpc.get_world_size(ParallelMode.EXPERT), gpc.get_local_rank(ParallelMode.EXPERT)
        each = 4 // size
        self.first, self.at = each * at, at
        mine = self.experts[self.first : self.first + each].detach().clone()
        self.experts = place(nn.Parameter(mine), {ParallelMode.EXPERT: Shard(0)})

    def dispatch(self, x: Tensor, to: Tensor) -> Tensor:
        everyone, their = Gather.apply(x, self.group), Gather.apply(to.double(), self.group).long()
        out = super().dispatch(everyone, their - self.first)
        out = SumRows.apply(out, self.group)
        return out[len(x) * self.at : len(x) * (self.at + 1)]


class SumRows(Sum):
    """Sum the experts' rows in forward; in backward each rank's rows come from that rank alone: sum too."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Copy.backward(ctx, grad)


class Expert(Scenario):
    """Expert 2 inside data 4: an expert's gradient is summed over 2 ranks and divided by 4."""

    world = 4
    parallel = {"expert": 2}
    plain = PlainMoe

    def build(self, gpc: ParallelContext) -> nn.Module:
        return SplitMoe(gpc)


class Expert4(Expert):
    """Expert 4 inside data 4: nothing to communicate, and still a division by 4."""

    parallel = {"expert": 4}


class PlainPipe(nn.Module):
    """Four stages; `shared` is used by stages 1 and 3, and only there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.shared = nn.Parameter(torch.randn(6, 6))
        self.double()

    def stage(self, at: int, x: Tensor) -> Tensor:
        x = torch.tanh(self.stages[at](x))
        return x @ self.shared if at in (1, 3) else x

    def forward(self, x: Tensor) -> Tensor:
        for at in range(4):
            x = self.stage(at, x)
        return x


class PipeStage(nn.Module):
    """One stage of PlainPipe, with its parameters under the whole model's names."""

    def __init__(self, at: int) -> None:
        super().__init__()
        whole = PlainPipe()
        self.at = at
        self.stages = nn.ModuleDict({str(at): whole.stages[at]})
        if at in (1, 3):
            self.shared = place(whole.shared, {ParallelMode.PIPELINE: Tied((1, 3), "shared")})

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stages[str(self.at)](x))
        return x @ self.shared if self.at in (1, 3) else x


class Pipeline(Scenario):
    """Weights tied over two of four stages, neither of which is the first; data 2 beside it."""

    world = 8
    parallel = {"pipeline": 4}
    parts = 2
    plain = PlainPipe

    def build(self, gpc: ParallelContext) -> nn.Module:
        return PipeStage(gpc.get_local_rank(ParallelMode.PIPELINE))

    def batch(self, part: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        return numbers(5, 6, seed=part), numbers(5, 6, seed=50 + part)

    def run(self, engine: Any, gpc: ParallelContext) -> None:
        x, y = self.batch(gpc.get_local_rank(ParallelMode.DATA))
        pipe = ParallelMode.PIPELINE
        group = gpc.get_group(pipe)  # not the world's: under DETAIL, p2p counts as collectives of its group
        before, after = gpc.get_prev_global_rank(pipe), gpc.get_next_global_rank(pipe)
        if not gpc.is_first_rank(pipe):
            dist.recv(x, src=before, group=group)
            x.requires_grad_()
        out = engine(x)
        if gpc.is_last_rank(pipe):
            engine.backward(F.mse_loss(out, y))
        else:
            dist.send(out.detach(), dst=after, group=group)
            grad = torch.empty_like(out)
            dist.recv(grad, src=after, group=group)
            engine.backward_by_grad(out, grad)
        if not gpc.is_first_rank(pipe):
            dist.send(x.grad, dst=before, group=group)


class Sequence(Scenario):
    """Each rank sees half of the rows of its data part; the loss is the mean of its own."""

    world = 4
    parallel = {"tensor": {"size": 2, "mode": "sequence"}}
    parts = 2

    def batch(self, part: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        return numbers(6, 6, seed=part), numbers(6, 3, seed=50 + part)

    def run(self, engine: Any, gpc: ParallelContext) -> None:
        x, y = self.batch(gpc.get_local_rank(ParallelMode.DATA))
        at = gpc.get_local_rank(ParallelMode.SEQUENCE)
        rows = slice(3 * at, 3 * at + 3)
        engine.backward(F.mse_loss(engine(x[rows]), y[rows]))


class Registered(Scenario):
    """A mode of the user's own, of distinct data, beside data parallelism."""

    world = 4
    parallel = {"mine": {"size": 2, "mode": "scenario_mine"}}

    def run(self, engine: Any, gpc: ParallelContext) -> None:
        x, y = self.batch(2 * gpc.get_local_rank(ParallelMode.DATA) + gpc.get_local_rank(MINE))
        engine.backward(F.mse_loss(engine(x), y))


class Uneven(Scenario):
    """Three micro-batches with other token counts on every rank, one of them empty; one division at the end."""

    accumulation = 3

    def batch(self, part: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        rows = [[1, 4, 2], [7, 0, 3]][part][micro]
        return numbers(rows, 6, seed=10 * micro + part), numbers(rows, 3, seed=50 + 10 * micro + part)

    def run(self, engine: Any, gpc: ParallelContext) -> None:
        for micro in range(3):
            x, y = self.batch(gpc.get_local_rank(ParallelMode.DATA), micro)
            engine.backward((((engine(x) - y) ** 2).sum(), len(x)))
            if micro < 2:
                assert engine.step() is False

    def truth(self) -> dict[str, Tensor]:
        model = Plain()
        batches = [self.batch(part, micro) for part in range(2) for micro in range(3)]
        x, y = (torch.cat(column) for column in zip(*batches, strict=True))
        return plain_gradients(model, ((model(x) - y) ** 2).sum() / len(x))


SCENARIOS: dict[str, Scenario] = {
    "data 2": Scenario(),
    "data 4": Data4(),
    "data 2 x tensor 2": DataTensor(),
    "data 2 x tensor 2, partial": DataPartial(),
    "expert 2 in data 4": Expert(),
    "expert 4 in data 4": Expert4(),
    "data 2 x pipeline 4, tied": Pipeline(),
    "sequence 2 x data 2": Sequence(),
    "registered 2 x data 2": Registered(),
    "accumulation 3, uneven": Uneven(),
}

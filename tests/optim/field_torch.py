"""Checks of single rows that are about torch's own parallelism: FSDP2, DTensor plans, several meshes, plain tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.errors import GradientError
from colonnade.optim.clip import clip_grad_norm_
from colonnade.parallel.placement import Shard, place
from tests.optim.field_facts import Fact
from tests.optim.field_layouts import OWN
from tests.optim.field_measure import EPSILON, LIMIT, ORDERS, cost_facts, launched, norm_facts
from tests.optim.field_pieces import norm_of
from tests.optim.watch import Operations, collectives

DATA, TENSOR, EXPERT = ParallelMode.DATA, ParallelMode.TENSOR, ParallelMode.EXPERT


def numbers(*shape: int, seed: int) -> Tensor:
    """Seeded, fp64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layers(*widths: int) -> nn.Sequential:
    """Linear layers with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))).double()


def gathered(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The whole gradients, by torch's own gather."""
    grads = [parameter.grad for parameter in parameters]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def by_function(label: str, model: nn.Module, context: ParallelContext | None) -> list[Fact]:
    """Every order, each on the gradient that the clip before has left."""
    facts = []
    for p in ORDERS:
        true = norm_of(gathered(model.parameters()), p)
        with collectives() as called, Operations() as seen:
            norm = clip_grad_norm_(model.parameters(), true / 3, p, context=context)
        after = norm_of(gathered(model.parameters()), p)
        facts += [
            *norm_facts(f"{label}, p={p:g}", norm, true, 1e-12),
            *cost_facts(f"{label}, p={p:g}", called, seen, 0, host_reads=0),
            Fact(f"{label}, p={p:g}: norm after", after, true / 3 * true / (true + EPSILON), 1e-11),
        ]
    return facts


def hybrid_shards() -> list[Fact]:
    """FSDP2 over 2 x 2 ranks, replicas of shards: by an engine, step by step."""
    with launched({"own": {"size": 2, "mode": "field_own"}}, clip_grad_norm=LIMIT) as gpc:
        model = layers(6, 5, 3)
        fully_shard(model, mesh=gpc.device_mesh(DATA, OWN))
        return [*_steps("HSDP", model, gpc), *by_function("HSDP", model, gpc)]


def _steps(label: str, model: nn.Module, gpc: ParallelContext) -> list[Fact]:
    engine = initialize(model, lambda held: torch.optim.SGD(held, lr=1.0), context=gpc)[0]
    facts = []
    for step in range(4):
        engine.zero_grad()
        data = numbers(4, 6, seed=10 * step + gpc.get_global_rank() // gpc.tensor_parallel_size)
        engine.backward(engine(data).square().mean() * (1 + 9 * (step % 2)))
        outcome = engine._sum_gradients()
        true = norm_of(gathered(model.parameters()), 2.0)
        with collectives() as called, Operations() as seen:
            engine._finish_step(outcome)
        after = norm_of(gathered(model.parameters()), 2.0)
        facts += [
            *norm_facts(f"{label}, step {step}", engine.grad_norm, true, 1e-12),
            Fact(f"{label}, step {step}: collectives", called, ["all_reduce"]),
            Fact(f"{label}, step {step}: host reads", seen.host_reads, 1),
            Fact(f"{label}, step {step}: norm after", after, LIMIT * true / (true + EPSILON), 1e-11),
        ]
    engine.close()
    return facts


class PlainExperts(nn.Module):
    """A dense part for FSDP beside plain expert weights, two of four on each rank of an expert group."""

    def __init__(self, gpc: ParallelContext) -> None:
        super().__init__()
        self.dense = layers(6, 5)
        first = 2 * gpc.get_local_rank(EXPERT)
        mine = numbers(4, 5, 3, seed=1)[first : first + 2]
        self.experts = place(nn.Parameter(mine.clone()), {EXPERT: Shard(0)})


def plain_experts_beside_fsdp() -> list[Fact]:
    """Plain expert tensors that no mesh knows count too, beside DTensors that FSDP2 made."""
    facts = []
    with launched({"expert": 2}) as gpc:
        model = PlainExperts(gpc)
        fully_shard(model.dense, mesh=gpc.device_mesh(DATA))
        model.dense(numbers(4, 6, seed=gpc.get_global_rank())).square().mean().backward()
        first = 2 * gpc.get_local_rank(EXPERT)
        for p in ORDERS:
            whole = numbers(4, 5, 3, seed=2)
            model.experts.grad = whole[first : first + 2].clone()
            true = norm_of([*gathered(model.dense.parameters()), whole], p)
            norm = clip_grad_norm_(model.parameters(), math.inf, p, context=gpc)
            facts += norm_facts(f"plain experts, p={p:g}", norm, true, 1e-12)
    return facts


def meshes_without_context() -> list[Fact]:
    """DTensors on a line, on a square and on one side of it, with plain replicas, where no context was launched."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    model = nn.Module()
    made: dict[str, Any] = {
        "on_line": (line, [TorchShard(0)]),
        "on_square": (square, [TorchShard(0), TorchShard(1)]),
        "on_side": (square["columns"], [TorchShard(1)]),
    }
    for at, (name, (mesh, placements)) in enumerate(made.items()):
        parameter = nn.Parameter(distribute_tensor(numbers(5, 6, seed=at), mesh, placements, src_data_rank=None))
        parameter.grad = distribute_tensor(numbers(5, 6, seed=50 + at), mesh, placements, src_data_rank=None)
        setattr(model, name, parameter)
    model.plain = nn.Parameter(numbers(7, seed=8))
    model.plain.grad = numbers(7, seed=9)
    return by_function("no context", model, None)


def fsdp_over_tensor_without_context() -> list[Fact]:
    """FSDP2 over a tensor-parallel plan: its strided shards are shards."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    model = layers(6, 8, 3)
    parallelize_module(model, square["columns"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=square["rows"])
    model(numbers(4, 6, seed=square.get_local_rank("rows"))).square().mean().backward()
    return by_function("FSDP over tensor, no context", model, None)


def sums_that_are_pending() -> list[Fact]:
    """Under sequence parallelism a norm layer's gradient is an unfinished sum: refused by the function, finished by
    the engine before it counts."""
    with launched(
        {"tensor": 2}, clip_grad_norm=LIMIT, compare_batches=False
    ) as gpc:  # each rank has its part of a sequence
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 3)).double()
        plan = {
            "0": SequenceParallel(sequence_dim=0),
            "1": ColwiseParallel(input_layouts=TorchShard(0)),
            "2": RowwiseParallel(),
        }
        parallelize_module(model, gpc.device_mesh(TENSOR), plan)
        engine = initialize(model, lambda held: torch.optim.SGD(held, lr=0.0), context=gpc)[0]
        engine.zero_grad()
        engine.backward(engine(numbers(2, 6, seed=dist.get_rank())).square().mean())
        outcome = engine._sum_gradients()
        true = norm_of(gathered(model.parameters()), 2.0)
        try:
            clip_grad_norm_(model.parameters(), 1.0, context=gpc)
            refused = "nothing"
        except GradientError as error:
            refused = "pending" if "pending sum" in str(error) else str(error)
        engine._finish_step(outcome)
        facts = [Fact("refused", refused, "pending"), *norm_facts("engine", engine.grad_norm, true, 1e-12)]
        engine.close()
        return facts


def mixed_meshes_by_engine() -> list[Fact]:
    """An engine over DTensors of two meshes and plain tensors."""
    with launched({"tensor": 2}, clip_grad_norm=LIMIT) as gpc:
        model = layers(6, 4, 4, 3)
        fully_shard(model[0], mesh=gpc.device_mesh(DATA))
        parallelize_module(model[1], gpc.device_mesh(TENSOR), ColwiseParallel(output_layouts=TorchReplicate()))
        return _steps("two meshes and plain", model, gpc)


def fsdp_over_tensor_by_engine() -> list[Fact]:
    """An engine over FSDP2 over a tensor-parallel plan."""
    with launched({"tensor": 2}, clip_grad_norm=LIMIT) as gpc:
        model = layers(6, 8, 3)
        mesh = gpc.device_mesh(DATA, TENSOR)
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        return _steps("FSDP over tensor", model, gpc)

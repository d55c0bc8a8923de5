"""Clip on real ranks and report what happened: by the function form and by an engine, against the gathered gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.optim.clip import clip_grad_norm_
from colonnade.parallel.placement import Shard, is_dtensor, local_part, place
from tests.optim.field_facts import ALIKE, Fact
from tests.optim.field_pieces import Piece, counted, is_held, norm_of, raw_salt, where, whole
from tests.optim.watch import Operations, collectives

ORDERS = (1.0, 2.0, 3.0, math.inf)
EPSILON = 1e-6
LIMIT = 0.01
"""The limit of engines here; every gradient is longer."""

NORM_RTOL = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}
CLIPPED_RTOL = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""The clipped gradient is rounded to its own dtype, element by element."""


def clipped_rtol(pieces: Sequence[Piece], dtype: torch.dtype) -> float:
    """The tolerance of the coarsest dtype among the pieces."""
    return max(CLIPPED_RTOL[piece.dtype or dtype] for piece in pieces)


@contextmanager
def launched(parallel: Mapping[str, Any], **config: Any) -> Iterator[ParallelContext]:
    """A context of its own in the world that is running; the stages of a pipeline have no schedule, just gradients."""
    settings = {"parallel": dict(parallel), "schedule": "NonPipelineSchedule", **config}
    with launch(settings, context=ParallelContext(), verbose=False) as gpc:
        yield gpc


def parameters(pieces: Sequence[Piece], gpc: ParallelContext, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """This rank's parts of the pieces, zeros, placed."""
    layout, rank = gpc.layout, gpc.get_global_rank()
    made: dict[str, nn.Parameter] = {}
    for piece in pieces:
        if is_held(piece, layout, rank):
            zeros = torch.zeros(piece.shape, dtype=piece.dtype or dtype)
            part = zeros[where(piece, layout, rank)].clone()
            made[piece.name] = nn.Parameter(_placed(piece, part, gpc), requires_grad=not piece.frozen)
            if not piece.mesh:
                place(made[piece.name], {ParallelMode(m): spec for m, spec in piece.on.items()}, _shape(piece))
    return made


def _shape(piece: Piece) -> tuple[int, ...] | None:
    return piece.shape if piece.placement.shards else None


def _placed(piece: Piece, part: Tensor, gpc: ParallelContext) -> Tensor:
    """The part as it is, or as the DTensor that it is a part of."""
    if not piece.mesh:
        return part
    mesh = gpc.device_mesh(*(ParallelMode(mode) for mode in piece.mesh))
    specs = [piece.on.get(mode) for mode in piece.mesh]
    placements = [TorchShard(spec.dim) if isinstance(spec, Shard) else TorchReplicate() for spec in specs]
    stride = torch.empty(piece.shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(piece.shape), stride=stride)


def give_gradients(
    made: Mapping[str, nn.Parameter], pieces: Sequence[Piece], gpc: ParallelContext, dtype: torch.dtype, *salt: object
) -> None:
    """Final gradients: each parameter gets its slice of the whole one."""
    for piece in pieces:
        if piece.name in made and not piece.frozen and not piece.silent:
            part = whole(piece, dtype, *salt)[where(piece, gpc.layout, gpc.get_global_rank())].clone()
            made[piece.name].grad = _placed(piece, part, gpc)


def assembled(pieces: Sequence[Piece], parts: Mapping[str, Tensor], gpc: ParallelContext) -> dict[str, Tensor]:
    """The whole tensors in fp64, from every rank's parts; each element must be somewhere, and alike wherever it is."""
    layout, rank = gpc.layout, gpc.get_global_rank()
    high = {piece.name: torch.full(piece.shape, -math.inf, dtype=torch.float64) for piece in pieces}
    for piece in pieces:
        if piece.name in parts:
            high[piece.name][where(piece, layout, rank)] = local_part(parts[piece.name]).detach().double()
    mine = torch.cat([tensor.flatten() for tensor in high.values()])
    both = torch.stack([mine, torch.where(mine.isinf(), mine, -mine)])  # the largest, and minus the least
    dist.all_reduce(both, dist.ReduceOp.MAX)
    assert torch.equal(both[0], -both[1]), "holders of one element have different values, or nobody holds it"
    flats = both[0].split([tensor.numel() for tensor in high.values()])
    return {piece.name: flat.view(piece.shape) for piece, flat in zip(pieces, flats, strict=True)}


def gradients(made: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradients, zeros for those that are not there."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in made.items()}


def by_function(
    gpc: ParallelContext, pieces: Sequence[Piece], dtype: torch.dtype, p: float, *, with_context: bool = True
) -> list[Fact]:
    """`clip_grad_norm_` to an eighth of the norm."""
    made = parameters(pieces, gpc, dtype)
    give_gradients(made, pieces, gpc, dtype)
    true = norm_of(counted(pieces, dtype), p)
    limit = true / 8 or 1.0
    with collectives() as called, Operations() as seen:
        norm = clip_grad_norm_(iter(made.values()), limit, p, context=gpc if with_context else None)
    label = f"function, {dtype}, p={p:g}{'' if with_context else ', no context'}"
    local_bytes = sum(local_part(parameter).nbytes for parameter in made.values())
    scale, rtol = limit / (true + EPSILON), clipped_rtol(pieces, dtype)
    facts = [
        *norm_facts(label, norm, true, NORM_RTOL[dtype]),
        *cost_facts(label, called, seen, local_bytes // 8, host_reads=0),
        Fact(f"{label}: clipped - gradient", _apart(made, pieces, gpc, dtype, scale), rtol, at_most=True),
    ]
    if p == 2.0:  # for the other orders the elements say it all
        after = norm_of(assembled(pieces, gradients(made), gpc).values(), p)
        facts.append(Fact(f"{label}: norm after", after, true * scale, rtol))
    return facts


def _apart(
    made: Mapping[str, nn.Parameter], pieces: Sequence[Piece], gpc: ParallelContext, dtype: torch.dtype, scale: float
) -> float:
    """How far the clipped elements here are from the whole gradient's, times `scale`, relative to the largest."""
    layout, rank = gpc.layout, gpc.get_global_rank()
    worst = 0.0
    for piece in pieces:
        if piece.name in made and made[piece.name].grad is not None:
            wanted = whole(piece, dtype).double()[where(piece, layout, rank)] * scale
            found = local_part(made[piece.name].grad).double()
            worst = max(worst, norm_of([found - wanted], math.inf) / (norm_of([wanted], math.inf) or 1.0))
    return worst


def norm_facts(label: str, norm: Tensor, true: float, rtol: float) -> list[Fact]:
    """The norm is right, the same bits everywhere, and a plain tensor that holds its final value."""
    return [
        Fact(f"{label}: norm", norm.item(), true, rtol),
        Fact(f"{label}: bits", norm.numpy().tobytes(), ALIKE),
        Fact(f"{label}: type", (type(norm), norm.dim()), (Tensor, 0)),
    ]


def cost_facts(label: str, called: list[str], seen: Operations, room: int, host_reads: int) -> list[Fact]:
    """One collective, no more host reads than promised, no tensor of more than `room` bytes (or 2 KiB) allocated."""
    alone = dist.get_world_size() == 1
    below = sum("c10d" in name for name in seen.names)  # also those that bypass torch.distributed's functions
    return [
        Fact(f"{label}: collectives", (called, below), ([], 0) if alone else (["all_reduce"], 1)),
        Fact(f"{label}: host reads", seen.host_reads, host_reads),
        Fact(f"{label}: largest allocation", seen.largest, max(2048, room), at_most=True),
    ]


class Bag(nn.Module):
    """The pieces as a model whose raw gradients are chosen: each rank's slice of a random whole of its data."""

    def __init__(self, pieces: Sequence[Piece], gpc: ParallelContext, dtype: torch.dtype) -> None:
        super().__init__()
        self.pieces, self.gpc, self.kind = pieces, gpc, dtype
        for name, parameter in parameters(pieces, gpc, dtype).items():
            self.register_parameter(name, parameter)
        self.before = {piece.name: torch.zeros(piece.shape, dtype=torch.float64) for piece in pieces}

    def assembled(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors by name."""
        return assembled(self.pieces, parts, self.gpc)

    def moved(self) -> dict[str, Tensor]:
        """How far the weights have come since this was last asked, each against its gradient."""
        before, self.before = self.before, self.assembled(dict(self.named_parameters()))
        return {name: before[name] - value for name, value in self.before.items()}

    def loss(self, step: int) -> Tensor:
        """Its gradient is the chosen one; a rank without parameters has a loss too."""
        layout, rank = self.gpc.layout, self.gpc.get_global_rank()
        total = torch.zeros((), dtype=torch.float64, requires_grad=True) * 1.0
        for piece in self.pieces:
            if is_held(piece, layout, rank) and not piece.frozen and not piece.silent:
                value = whole(piece, self.kind, step, raw_salt(piece, layout, rank))[where(piece, layout, rank)]
                parameter: Any = self.get_parameter(piece.name)
                total = total + ((parameter.to_local() if is_dtensor(parameter) else parameter) * value).sum()
        return total


def by_engine(
    gpc: ParallelContext, pieces: Sequence[Piece], dtype: torch.dtype, p: float = 2.0, **options: Any
) -> list[Fact]:
    """Steps of SGD with a learning rate of 1, which moves the weights by just the clipped gradient.

    The context was launched with clip_grad_norm of max_norm LIMIT. Buckets find their order in the first steps.
    """
    model = Bag(pieces, gpc, dtype)
    engine = initialize(model, lambda held: torch.optim.SGD(held, lr=1.0, **options), context=gpc)[0]
    facts = [fact for step in range(4) for fact in _step(engine, model, step, p, bool(options.get("fused")))]
    engine.close()
    return facts


def _step(engine: Any, model: Bag, step: int, p: float, fused: bool) -> list[Fact]:
    label, rtol = f"engine, {model.kind}, p={p:g}, step {step}", clipped_rtol(model.pieces, model.kind)
    engine.zero_grad()
    engine.backward(model.loss(step))
    outcome = engine._sum_gradients()
    gradient = model.assembled(gradients(dict(model.named_parameters())))
    true, flat_before = norm_of(gradient.values(), p), engine._stepper._step.flat
    with collectives() as called, Operations() as seen:
        engine._finish_step(outcome)
    moved = model.moved()
    scale = min(1.0, LIMIT / (true + EPSILON))
    error = norm_of((moved[name] - scale * value for name, value in gradient.items()), 2.0)
    flat = engine._stepper._step.flat
    if flat is not flat_before:
        seen.largest = 0  # parameters have just moved into flat buffers, once and for all
    local_bytes = sum(local_part(parameter).nbytes for parameter in model.parameters())
    # torch's fused kernels divide by an fp32 number, so a flat step in fp64 divides a copy instead.
    room = 2 * local_bytes if model.kind is torch.float64 else local_bytes // 8
    return [
        *norm_facts(label, engine.grad_norm, true, NORM_RTOL[model.kind]),
        *cost_facts(label, called, seen, room, host_reads=0 if flat is not None or fused else 1),
        Fact(f"{label}: clipped", scale < 1, True),
        Fact(f"{label}: norm of the step", norm_of(moved.values(), p), true * scale, rtol),
        Fact(f"{label}: step - gradient", error / (scale * norm_of(gradient.values(), 2.0)), rtol, at_most=True),
    ]

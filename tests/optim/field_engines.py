"""Checks of single rows that are about engines: start-up, accumulation, loss scale, groups, optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.engine.build import initialize
from colonnade.errors import PlacementError
from colonnade.optim.clip import grad_norm
from colonnade.parallel.held import held_tensors
from colonnade.parallel.placement import Shard, copy_placement
from colonnade.testing import compare, gather_gradients
from tests.gradients.scenarios import SCENARIOS
from tests.optim.field_facts import Fact
from tests.optim.field_layouts import CASES, COLUMN, DENSE
from tests.optim.field_measure import (
    EPSILON,
    LIMIT,
    Bag,
    by_engine,
    give_gradients,
    gradients,
    launched,
    norm_facts,
    parameters,
)
from tests.optim.field_pieces import Piece, counted, norm_of, where, whole
from tests.optim.watch import collectives

DOUBLE = torch.float64


def master_copies() -> list[Fact]:
    """fp64 copies of bf16 parameters carry the placements along, so their norm is right too."""
    case = CASES["expert 2 over data 2 x tensor 2"]
    with launched(case.parallel) as gpc:
        made = parameters(case.pieces, gpc, torch.bfloat16)
        masters: dict[str, nn.Parameter] = {}
        for name, parameter in made.items():
            masters[name] = nn.Parameter(parameter.detach().double())
            copy_placement(parameter, masters[name])
        give_gradients(masters, case.pieces, gpc, DOUBLE)
        true = norm_of(counted(case.pieces, DOUBLE), 2.0)
        return norm_facts("master copies", grad_norm(masters.values(), context=gpc), true, 1e-12)


def unplaced_shard() -> list[Fact]:
    """A parameter cut by hand without saying so is refused by name at start-up, where the cut can be seen."""
    with launched({"tensor": 2}) as gpc:
        model = nn.Module()
        model.sinks = nn.Parameter(torch.zeros(3 - gpc.get_global_rank()))
        return [_refused("heads 3 and 2, not placed", model, gpc, "sinks")]


def uncovered() -> list[Fact]:
    """Experts cut along the tensor axis twice: parts of them are nowhere, which start-up finds by counting."""
    with launched({"tensor": 2, "pipeline": 2, "expert": {"size": 2, "over": "data*tensor"}}) as gpc:
        pieces = [Piece("experts", (2, 4), {"expert": Shard(0), "tensor": Shard(1)}), *DENSE]
        return [
            _refused("cut twice along one axis", Bag(pieces, gpc, DOUBLE), gpc, "experts: 4 elements found, 8 expected")
        ]


def _refused(what: str, model: nn.Module, gpc: Any, part: str) -> Fact:
    try:
        initialize(model, lambda held: torch.optim.SGD(held, lr=1.0), context=gpc)
    except PlacementError as error:
        return Fact(what, part if part in str(error) else str(error), part)
    return Fact(what, "accepted", "refused")


def one_bucket_of_several_placements() -> list[Fact]:
    """Cut and replicated parameters lie in one flat bucket, and each counts by its own placement."""
    case = CASES["data 2 x tensor 2"]
    with launched(case.parallel, clip_grad_norm=LIMIT, flat_step=True) as gpc:
        engine = initialize(
            Bag(case.pieces, gpc, torch.float32), lambda held: torch.optim.SGD(held, lr=1.0), context=gpc
        )[0]
        holders = {entry.tensor: entry.holding.count for entry in held_tensors(engine.model, gpc)}
        counts = [sorted({holders[p] for p in bucket.parameters}) for bucket in engine._sync.synchroniser.buckets]
        engine.close()
        return [Fact("holders in each bucket", counts, [[2, 4]]), *by_engine(gpc, case.pieces, torch.float32)]


class OwnOptimizer:
    """Not a torch optimizer, but it has what one needs: groups of parameters and a step."""

    def __init__(self, held: Sequence[Tensor]) -> None:
        self.param_groups = [{"params": list(held)}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)


def own_optimizer() -> list[Fact]:
    """An optimizer of one's own gets clipped gradients and takes its step."""
    with launched({}, clip_grad_norm=LIMIT) as gpc:
        model = Bag(CASES["data 2"].pieces, gpc, DOUBLE)
        engine = initialize(model, OwnOptimizer, context=gpc)[0]
        engine.zero_grad()
        engine.backward(model.loss(0))
        engine.step()
        moved = norm_of(model.assembled(dict(model.named_parameters())).values(), 2.0)
        true = engine.grad_norm.item()
        engine.close()
        return [Fact("norm of the step", moved, LIMIT * true / (true + EPSILON), 1e-11)]


def nothing_kept() -> list[Fact]:
    """Gradients that lie in no bucket are freed by `zero_grad`: no measurement of the last step keeps them."""
    with launched({"tensor": 2}, clip_grad_norm=LIMIT) as gpc:
        model = Bag(CASES["tensor 2"].pieces, gpc, DOUBLE)
        engine = initialize(model, lambda held: torch.optim.RMSprop(held, lr=0.1), context=gpc)[0]
        engine.zero_grad()
        engine.backward(model.loss(0))
        engine.step()
        gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
        engine.zero_grad()
        kept = sum(gradient() is not None for gradient in gradients)
        engine.close()
        return [Fact("gradients", len(gradients), 6), Fact("gradients kept", kept, 0)]


def three_micro_batches() -> list[Fact]:
    """The norm is of the sum over micro-batches, taken once; an unused parameter does not disturb it."""
    pieces = CASES["silent and frozen"].pieces
    facts = []
    with launched({}, clip_grad_norm=LIMIT, gradient_accumulation=3) as gpc:
        model = Bag(pieces, gpc, DOUBLE)
        engine = initialize(model, lambda held: torch.optim.SGD(held, lr=1.0), context=gpc)[0]
        for step in range(4):
            means = {piece.name: torch.zeros(piece.shape, dtype=DOUBLE) for piece in pieces}
            with collectives() as called:
                for micro in range(3):
                    engine.zero_grad()
                    engine.backward(model.loss(10 * step + micro))
                    if micro == 2:
                        outcome = engine._sum_gradients()
                        called.clear()
                        engine._finish_step(outcome)
                    else:
                        facts.append(Fact(f"step {step}: pass {micro} steps", engine.step(), False))
            for piece in (piece for piece in pieces if not piece.frozen and not piece.silent):
                for micro in range(3):
                    for rank in range(2):
                        means[piece.name] += whole(piece, DOUBLE, 10 * step + micro, (("data", rank),)) / 6
            facts.append(Fact(f"step {step}: collectives", called, ["all_reduce"]))
            facts += norm_facts(f"step {step}", engine.grad_norm, norm_of(means.values(), 2.0), 1e-12)
        engine.close()
    return facts


def loss_scale() -> list[Fact]:
    """The norm and the limit are of the gradient, not of the gradient times the loss scale."""
    facts = []
    for fp16 in (None, {"init_scale": 1024.0}):
        with launched({}, clip_grad_norm=LIMIT, **({"fp16": fp16} if fp16 else {})) as gpc:
            model = Bag(CASES["data 2"].pieces, gpc, torch.float32)
            engine = initialize(model, lambda held: torch.optim.SGD(held, lr=1.0), context=gpc)[0]
            engine.zero_grad()
            engine.backward(model.loss(0))
            outcome = engine._sum_gradients()
            true = norm_of(model.assembled(gradients(dict(model.named_parameters()))).values(), 2.0) / (
                1024.0 if fp16 else 1.0
            )
            engine._finish_step(outcome)
            moved = norm_of(model.assembled(dict(model.named_parameters())).values(), 2.0)
            facts += norm_facts(f"fp16={fp16}", engine.grad_norm, true, 1e-6)
            facts.append(Fact(f"fp16={fp16}: norm of the step", moved, LIMIT, 1e-4))
            engine.close()
    return facts


def fused_once() -> list[Fact]:
    """A fused optimizer divides once, on the device, and reads nothing on the host."""
    facts = []
    with launched({"tensor": 2}, clip_grad_norm=LIMIT, flat_step=False) as gpc:
        facts += by_engine(gpc, CASES["tensor 2"].pieces, torch.float32, fused=True)
        facts += by_engine(gpc, CASES["tensor 2"].pieces, DOUBLE, fused=True)
        for kind in (torch.optim.AdamW, torch.optim.Adagrad):
            facts.append(_like_torch(gpc, kind))
    return facts


def _like_torch(gpc: Any, kind: Any) -> Fact:
    """Three clipped steps beside torch's own clip and step on the whole parameters in one process."""
    pieces = [*DENSE, *COLUMN]
    ours = Bag(pieces, gpc, torch.float32)
    engine = initialize(ours, lambda held: kind(held, lr=0.1, fused=True), context=gpc)[0]
    theirs = {piece.name: nn.Parameter(torch.zeros(piece.shape)) for piece in pieces}
    optimizer = kind(theirs.values(), lr=0.1)
    for step in range(3):
        engine.zero_grad()
        engine.backward(ours.loss(step))
        engine.step()
        for piece in pieces:
            theirs[piece.name].grad = whole(piece, torch.float32, step, (("data", 0),))
        torch.nn.utils.clip_grad_norm_(theirs.values(), LIMIT)
        optimizer.step()
    engine.close()
    rank = gpc.get_global_rank()
    apart = max(
        (ours.get_parameter(piece.name) - theirs[piece.name][where(piece, gpc.layout, rank)]).abs().max().item()
        for piece in pieces
    )
    return Fact(f"{kind.__name__}: away from torch", apart, 1e-5, at_most=True)


def groups_apart() -> list[Fact]:
    """One group that is neither counted nor clipped, one that is counted only, and the rest by what is counted."""
    groups = {
        "orthogonal": {"params": "up*", "counted": False, "clipped": False},
        "shown": {"params": "norm", "clipped": False},
    }
    case = CASES["tensor 2"]
    with launched(case.parallel, clip_grad_norm={"max_norm": LIMIT, "groups": groups}) as gpc:
        model = Bag(case.pieces, gpc, DOUBLE)
        engine = initialize(model, lambda held: torch.optim.SGD(held, lr=1.0), context=gpc)[0]
        facts = []
        engine.zero_grad()
        engine.backward(model.loss(0))
        outcome = engine._sum_gradients()
        gradient = model.assembled(gradients(dict(model.named_parameters())))
        with collectives() as called:
            engine._finish_step(outcome)
        moved = model.assembled(dict(model.named_parameters()))
        true = norm_of((value for name, value in gradient.items() if not name.startswith("up")), 2.0)
        facts = [Fact("collectives", called, ["all_reduce"]), *norm_facts("counted", engine.grad_norm, true, 1e-12)]
        for name, value in gradient.items():
            free = name.startswith("up") or name == "norm"
            wanted = value.norm().item() * (1.0 if free else LIMIT / (true + EPSILON))
            facts.append(Fact(f"{name} moved by", moved[name].norm().item(), wanted, 1e-11))
        engine.close()
        return facts


def group_without_parameters_here() -> list[Fact]:
    """Clip groups of which a stage has no parameter: it takes part in their norms all the same."""
    case = CASES["pipeline 2, tied"]
    groups = {"first": {"params": "first*"}, "last": {"params": "last*", "max_norm": 0.5}}
    with launched(case.parallel, clip_grad_norm={"max_norm": LIMIT, "groups": groups}) as gpc:
        model = Bag(case.pieces, gpc, DOUBLE)
        engine = initialize(model, lambda held: torch.optim.SGD(held, lr=1.0), context=gpc)[0]
        engine.zero_grad()
        engine.backward(model.loss(0))
        outcome = engine._sum_gradients()
        gradient = model.assembled(gradients(dict(model.named_parameters())))
        engine._finish_step(outcome)
        wanted = {"first": gradient["first"], "last": gradient["last"], "rest": gradient["embed"]}
        facts = [
            Fact(f"norm of {name}", engine.grad_norms()[name].item(), value.norm().item(), 1e-12)
            for name, value in wanted.items()
        ]
        engine.close()
        return facts


def gradients_without_clipping() -> list[Fact]:
    """Clipping hides wrong divisors, so gradients are compared with one process while it is off, and while it is on."""
    scenario = SCENARIOS["data 2 x tensor 2"]
    facts = []
    for clip in (0, LIMIT):
        with launched(scenario.parallel, clip_grad_norm=clip) as gpc:
            engine = initialize(
                lambda gpc=gpc: scenario.build(gpc), lambda held: torch.optim.SGD(held, lr=0.1), context=gpc
            )[0]
            engine.zero_grad()
            scenario.run(engine, gpc)
            engine._sum_gradients()
            found = compare(scenario.truth(), gather_gradients(engine.model, gpc), 1e-12, check=False)
            facts.append(Fact(f"clip {clip}: gradients equal one process", "" if found.ok else str(found), ""))
            engine.close()
    return facts

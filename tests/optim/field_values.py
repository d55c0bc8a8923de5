"""Checks of single rows that are about values: what is not finite, what is left over, what is lost in rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import GradientError
from colonnade.optim.clip import clip_grad_norm_, grad_norm
from colonnade.parallel.placement import Shard
from tests.optim.field_facts import ALIKE, Fact
from tests.optim.field_layouts import CASES
from tests.optim.field_measure import (
    LIMIT,
    ORDERS,
    Bag,
    by_engine,
    by_function,
    give_gradients,
    launched,
    norm_facts,
    parameters,
)
from tests.optim.field_pieces import Piece, counted, norm_of

DOUBLE = torch.float64


def one_bad_element() -> list[Fact]:
    """A NaN or an inf in one element on one rank: the norm is that on all, and the engine drops the step."""
    facts = []
    with launched({"tensor": 2}) as gpc:
        for p in (1.0, 2.0, 3.0, math.inf):
            for bad in (math.nan, math.inf):
                norm = grad_norm(_with_bad(gpc, bad, 1), p, context=gpc)
                facts.append(Fact(f"one element {bad}, p={p:g}", norm.item(), bad))
    groups = {"up": {"params": "up*"}}
    with launched({"tensor": 2}, clip_grad_norm={"max_norm": LIMIT, "groups": groups}) as gpc:
        model = Bag(CASES["tensor 2"].pieces, gpc, DOUBLE)
        engine = initialize(model, lambda held: torch.optim.SGD(held, lr=1.0), context=gpc)[0]
        for step in range(4):
            bad_here = step == 2 and gpc.get_global_rank() == 1
            before = [parameter.detach().clone() for parameter in model.parameters()]
            engine.zero_grad()
            engine.backward(model.loss(step) + (model.up[1, 2] * math.nan if bad_here else 0.0))
            engine.step()
            moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            facts.append(Fact(f"step {step} was taken", moved, step != 2))
            facts.append(Fact(f"step {step}: norm is NaN", engine.grad_norm.isnan().item(), step == 2))
            finite = {name: value.isfinite().item() for name, value in engine.grad_norms().items()}
            facts.append(Fact(f"step {step}: groups", finite, {"up": step != 2, "rest": True}))
        facts.append(Fact("dropped", engine.skipped_steps, 1))
        engine.close()
    return facts


def _with_bad(gpc: ParallelContext, bad: float, culprit: int) -> list[nn.Parameter]:
    made = parameters(CASES["tensor 2"].pieces, gpc, DOUBLE)
    give_gradients(made, CASES["tensor 2"].pieces, gpc, DOUBLE)
    if gpc.get_global_rank() == culprit:
        made["up"].grad[1, 2] = bad
    return list(made.values())


def bad_on_each_rank() -> list[Fact]:
    """A NaN on each rank in turn: a MAX over ranks keeps or drops it by their order, unless it travels apart."""
    facts = []
    case = CASES["flat shards over data 4"]
    with launched(case.parallel) as gpc:
        for culprit in range(3):  # the fourth holds no element of the cut pieces
            for p in (2.0, math.inf):
                made = parameters(case.pieces, gpc, DOUBLE)
                give_gradients(made, case.pieces, gpc, DOUBLE)
                if gpc.get_global_rank() == culprit:
                    made["flat"].grad[0] = math.nan
                norm = grad_norm(made.values(), p, context=gpc)
                facts.append(Fact(f"NaN on rank {culprit}, p={p:g}", norm.item(), math.nan))
    return facts


def raised_everywhere() -> list[Fact]:
    """`error_if_nonfinite` raises after the collective, so on every rank; nobody is left waiting."""
    with launched({"tensor": 2}) as gpc:
        held = _with_bad(gpc, math.inf, 0)
        raised = _raised(lambda: clip_grad_norm_(held, 1.0, error_if_nonfinite=True, context=gpc))
        return [
            Fact("raises", (raised[0], "is inf" in raised[1]), ("GradientError", True)),
            Fact("is torch's kind of error", issubclass(GradientError, RuntimeError), True),
        ]


def _raised(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def large_then_small() -> list[Fact]:
    """A step with norm 100 leaves nothing behind for the next one, also on the rank that holds nothing."""
    facts = []
    piece = Piece("first", (6,), stage=0)
    with launched({"pipeline": 2}) as gpc:
        made = parameters([piece], gpc, DOUBLE)
        for value in (100.0, 1.0, 3.0):
            for parameter in made.values():
                parameter.grad = torch.full((6,), value, dtype=DOUBLE)
            norm = grad_norm(made.values(), math.inf, context=gpc)
            facts.append(Fact(f"largest {value:g}", norm.item(), value))
    return facts


def nothing_to_count() -> list[Fact]:
    """Ranks with an empty list, with no gradients, or with frozen parameters join the collective all the same."""
    facts = []
    case = CASES["data 2 x tensor 2"]
    with launched(case.parallel) as gpc:
        for idle in range(4):
            made = parameters([Piece("cut", (8,), {"data": Shard(0), "tensor": Shard(0)})], gpc, DOUBLE)
            held = [] if gpc.get_global_rank() == idle else list(made.values())
            for parameter in held:
                parameter.grad = torch.ones_like(parameter)
            facts += norm_facts(
                f"rank {idle} has an empty list", clip_grad_norm_(held, 1.0, context=gpc), math.sqrt(6), 1e-12
            )
        empty = clip_grad_norm_([], 1.0, context=gpc)
        silent = clip_grad_norm_([nn.Parameter(torch.ones(3))], 1.0, math.inf, context=gpc)
        facts += [Fact("empty everywhere", empty.item(), 0.0), Fact("no gradients", silent.item(), 0.0)]
    return facts


def many_equal_values() -> list[Fact]:
    """Millions of equal fp32 values, which a plain fp32 sum on a CPU gets wrong by whole per mille."""
    piece = Piece("bucket", (6_000_000,), {"tensor": Shard(0)})
    with launched({"tensor": 2}) as gpc:
        made = parameters([piece], gpc, torch.float32)
        made["bucket"].grad = torch.full_like(made["bucket"], 0.01)
        true = math.sqrt(6_000_000) * float(torch.tensor(0.01).double())
        return norm_facts("equal values", grad_norm(made.values(), context=gpc), true, 1e-6)


def every_dtype() -> list[Fact]:
    """Clipping is on in every dtype: an engine's step has the length of the limit."""
    with launched({}, clip_grad_norm=LIMIT) as gpc:
        kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        return [fact for kind in kinds for fact in by_engine(gpc, CASES["data 2"].pieces, kind)]


def nothing_large_allocated() -> list[Fact]:
    """Gradients of 1.2 MB a rank, cut and copied: no tensor of an eighth of that is made to clip and step."""
    pieces = [Piece("cut", (400, 500), {"tensor": Shard(0)}), Piece("copy", (500, 400))]
    with launched({"tensor": 2}, clip_grad_norm=LIMIT) as gpc:
        kinds = (torch.float32, torch.bfloat16)
        return [
            *(fact for kind in kinds for p in ORDERS for fact in by_function(gpc, pieces, kind, p)),
            *by_engine(gpc, pieces, torch.float32),
        ]


def gradients_for_parameters() -> list[Fact]:
    """Handing over gradients instead of parameters gives a norm of 0, not a right norm that clips nothing."""
    case = CASES["data 2"]
    with launched(case.parallel) as gpc:
        made = parameters(case.pieces, gpc, DOUBLE)
        give_gradients(made, case.pieces, gpc, DOUBLE)
        handed = [parameter.grad for parameter in made.values()]
        return [Fact("norm of gradients handed over", clip_grad_norm_(handed, 1.0, context=gpc).item(), 0.0)]


def weights_do_not_count() -> list[Fact]:
    """Huge weights beside small gradients change nothing."""
    case = CASES["experts 2 + 1"]
    with launched(case.parallel) as gpc:
        made = parameters(case.pieces, gpc, DOUBLE)
        give_gradients(made, case.pieces, gpc, DOUBLE)
        for parameter in made.values():
            parameter.data.fill_(1e9)
        norm: Tensor = grad_norm(made.values(), context=gpc)
        return norm_facts("weights of 1e9", norm, norm_of(counted(case.pieces, DOUBLE), 2.0), 1e-12)


def mixed_devices() -> list[Fact]:
    """Gradients on a CPU beside others on a GPU: one norm, on the device that the world communicates on."""
    with launched({}) as gpc:
        held = [nn.Parameter(torch.zeros(70)), nn.Parameter(torch.zeros(90, device=gpc.device))]
        for parameter in held:
            parameter.grad = torch.full_like(parameter, 0.5)
        norm = clip_grad_norm_(held, 1.0, context=gpc)
        after = [parameter.grad.double().norm().item() for parameter in held]
        return [
            Fact("norm", norm.item(), 0.5 * math.sqrt(160), 1e-6),
            Fact("norm is on", norm.device.type, "cuda"),
            Fact("bits", norm.cpu().numpy().tobytes(), ALIKE),
            Fact("norm after", math.hypot(*after), 1.0, 1e-5),
            Fact("ranks", dist.get_world_size(), 2),
        ]

"""Experts under a plan, beside one process: over tensor ranks, over expert ranks, and over both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from colonnade import initialize, parallelize
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError, PlacementError
from colonnade.parallel.placement import is_dtensor, placement_of
from tests.hf.plans.mixtures import (
    CHOICES,
    EXPERTS,
    INNER,
    TENSOR,
    Every,
    Gated,
    Interleaved,
    WithIdentity,
    both,
    model_of,
)
from tests.hf.plans.models import HIDDEN, build
from tests.hf.plans.training import CLIP, check
from tests.ranks import on_ranks

CONFIG = {"clip_grad_norm": CLIP, "gradient_accumulation": 3}
TENSOR_2 = {"tensor": {"size": 2, "mode": "1d"}}
AT = "blocks.*.mlp.experts"


def _equals(kind: type[nn.Module], plan: Any, gpc: ParallelContext, shape: tuple[int, ...]) -> None:
    try:
        engine = check(plan, gpc, lambda: model_of(kind))
        assert tuple(engine.model.blocks[0].mlp.experts.gate_up_proj.shape) == shape
        engine.close()
    except Exception as error:
        raise AssertionError(f"{kind.__name__} under {gpc.config['parallel']}: {error}") from error


@pytest.mark.slow
@on_ranks(2, timeout=110)
def test_over_tensor_ranks_and_over_expert_ranks():
    with launch({**CONFIG, "parallel": TENSOR_2}, context=ParallelContext(), verbose=False) as gpc:
        for kind in (Gated, Interleaved, WithIdentity, Every):
            whole = (HIDDEN, INNER) if kind in (Interleaved, Every) else (INNER, HIDDEN)
            _equals(kind, TENSOR[kind], gpc, (EXPERTS, *whole))
        _refused_tensor(gpc)
    config = {**CONFIG, "parallel": {"expert": 2}, "zero": 3}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        check(both(Gated), gpc, lambda: model_of(Gated)).close()
        _steps_on_shards_and_whole_experts(gpc)
        _uneven_and_empty(gpc)
        _refused_expert(gpc)


def _steps_on_shards_and_whole_experts(gpc: ParallelContext) -> None:
    """With one rank to each expert nothing is left to shard it over; an optimizer that steps on all at once has both kinds."""
    model: Any = parallelize(build(lambda: model_of(Gated)), both(Gated), context=gpc)
    engine = initialize(model, torch.optim.AdamW(model.parameters(), foreach=True), context=gpc)[0]
    engine.backward(sum(parameter.sum() for parameter in model.parameters() if not is_dtensor(parameter)))
    engine.step()
    engine.close()


def _refused_tensor(gpc: ParallelContext) -> None:
    """What cannot be right is refused by name."""
    for kind, change, message in (
        (Gated, {f"{AT}.gate_up_proj": "colwise"}, "gate and the up projection concatenated"),
        (Interleaved, {f"{AT}.gate_up_proj_bias": "replicate"}, "but not gate_up_proj_bias"),
    ):
        with pytest.raises(PlacementError, match=message):
            parallelize(build(lambda kind=kind: model_of(kind)), {**TENSOR[kind], **change}, context=gpc)


def _refused_expert(gpc: ParallelContext) -> None:
    plan = both(Gated)
    for change, message in (
        ({f"{AT}.down_proj": "replicate"}, "but not down_proj"),
        ({AT: "megamoe_experts"}, "without a backward pass"),
    ):
        with pytest.raises(PlacementError, match=message):
            parallelize(build(lambda: model_of(Gated)), {**plan, **change}, context=gpc)
    three = build(lambda: model_of(Gated))
    for block in three.blocks:
        block.mlp.experts.gate_up_proj = nn.Parameter(torch.zeros(3, 2 * INNER, HIDDEN))
    with pytest.raises(LayoutError, match="3 experts, which cannot be sharded evenly over the 2 ranks"):
        parallelize(three, plan, context=gpc)


def _uneven_and_empty(gpc: ParallelContext) -> None:
    """Ranks with unequal numbers of tokens, with none, and experts that no token chose; a copy has its own weights."""
    plain = build(lambda: model_of(Interleaved))
    model = parallelize(copy.deepcopy(plain), both(Interleaved), context=gpc)
    cut, whole = model.blocks[0].mlp.experts, plain.blocks[0].mlp.experts
    at = gpc.get_local_rank(ParallelMode.EXPERT)
    assert cut.num_experts == 2
    assert placement_of(cut.down_proj_bias).shape == (EXPERTS, HIDDEN)
    for rows in ((5, 3), (0, 4), (2, 0), (0, 0)):
        draw = torch.Generator().manual_seed(3)
        x = torch.randn(sum(rows), HIDDEN, generator=draw, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(sum(rows), CHOICES, generator=draw, dtype=torch.float64, requires_grad=True)
        for index in (torch.rand(sum(rows), EXPERTS, generator=draw).argsort(1)[:, :CHOICES], None):
            index = torch.tensor([[0, 1]]).expand(sum(rows), -1) if index is None else index  # all to the first rank
            mine = slice(0, rows[0]) if at == 0 else slice(rows[0], None)
            found = cut(x[mine], index[mine], weights[mine])
            wanted = whole(x, index, weights) if sum(rows) else x.sum() * x
            torch.testing.assert_close(found, wanted[mine])
            towards = torch.autograd.grad(found.square().sum(), [x, weights, *cut.parameters()])
            # What each rank says of its own tokens; experts hear from all ranks.
            expected = torch.autograd.grad(wanted.square().sum(), [x, weights], allow_unused=True)
            for one, other in zip(towards[:2], expected, strict=True):
                torch.testing.assert_close(one[mine], one[mine] if other is None else other[mine])
            assert sum(rows) or not any(gradient.any() for gradient in towards)


@pytest.mark.slow
@on_ranks(4, timeout=110)
def test_over_tensor_and_expert_ranks_at_once():
    """Also two expert groups beside each other, and expert groups that reach over the tensor ranks."""
    for parallel, kinds, shape in (
        (
            {**TENSOR_2, "expert": 2},
            (Gated, Interleaved, Every),
            lambda kind: (2, *TRANSPOSED.get(kind, (INNER, HIDDEN))),
        ),
        ({"expert": 2}, (Interleaved,), lambda kind: (2, HIDDEN, 2 * INNER)),
        ({**TENSOR_2, "expert": {"size": 4, "over": "data*tensor"}}, (Gated,), lambda kind: (1, 2 * INNER, HIDDEN)),
    ):
        with launch({**CONFIG, "parallel": parallel}, context=ParallelContext(), verbose=False) as gpc:
            for kind in kinds:
                _equals(kind, both(kind), gpc, shape(kind))
            if "over" in str(parallel):
                with pytest.raises(LayoutError, match="span tensor ranks"):
                    parallelize(build(lambda: model_of(Every)), both(Every), context=gpc)


TRANSPOSED = {Interleaved: (HIDDEN, INNER), Every: (HIDDEN, INNER)}

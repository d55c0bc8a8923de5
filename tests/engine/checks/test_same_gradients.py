"""Gradients of parameters that a TP plan leaves replicated: ranks that compute different ones are told so at the first step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade import initialize, parallelize
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.checks import SameGradients
from colonnade.errors import GradientError, PlacementError
from tests.hf.plans.models import HIDDEN, PACKED, build, labels, packed_model, summed_loss, tokens
from tests.ranks import on_ranks


class Hidden(torch.autograd.Function):
    """What no one can look through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Norm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return Hidden.apply(super().forward(x))


CONFIG: dict[str, Any] = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
PLAN = {name: style for name, style in PACKED.items() if "q_norm" not in name}
SUMMED = {**PLAN, "blocks.*.attention.q_norm": "replicated_with_grad_allreduce"}
SAID = r"leaves 'blocks\.0\.attention\.q_norm\.weight' replicated, .*'replicated_with"


def hidden_norms() -> nn.Module:
    """A model whose norms of each head cannot be looked through. Their biases are frozen."""
    model = build(packed_model)
    for block in model.blocks:
        norm = Norm(HIDDEN // 4).double()
        norm.load_state_dict(block.attention.q_norm.state_dict())
        norm.bias.requires_grad_(False)
        block.attention.q_norm = norm
    return model


@pytest.mark.parametrize(("ranks", "zero"), [(2, 0), pytest.param(4, 3, marks=pytest.mark.slow)])
@on_ranks("ranks")
def test_a_norm_of_each_head_that_the_plan_leaves_out(ranks: int, zero: int):
    """Named in the first forward pass, or by its gradients, which at stage 3 FSDP has reduced over the data ranks."""
    with launch({**CONFIG, "zero": zero}, context=ParallelContext(), verbose=False) as gpc:
        for make, plan in ((hidden_norms, PLAN), (hidden_norms, SUMMED), (lambda: build(packed_model), PLAN)):
            cut = parallelize(make(), plan, context=gpc)
            engine = initialize(cut, lambda p: torch.optim.SGD(p, lr=0.1), summed_loss, context=gpc)[0]
            if make is not hidden_norms:
                with pytest.raises(PlacementError, match=r"q_norm.*'replicated_with_grad_allreduce'"):
                    engine(tokens(4))
            else:
                engine.backward(summed_loss(engine(tokens(4)), labels(4)))
                with nullcontext() if plan is SUMMED else pytest.raises(GradientError, match=SAID):
                    assert engine.step()
            engine.close()


@on_ranks(2)
def test_gradients_of_all_passes_are_added_and_compared_when_every_rank_has_made_them():
    with launch(CONFIG, context=ParallelContext(), verbose=False) as gpc:
        cut = parallelize(hidden_norms(), PLAN, context=gpc)
        watch = SameGradients(cut, gpc)
        summed_loss(cut(tokens(4)), labels(4))[0].backward()
        watch.check(complete=gpc.get_global_rank() == 0)  # a pass of rank 1 has failed
        assert watch.is_due
        for factor in (1.0, 0.0):
            (factor * summed_loss(cut(tokens(4)), labels(4))[0]).backward()
        with pytest.raises(GradientError, match=SAID):
            watch.check(complete=True)
        assert not watch.is_due
        summed_loss(cut(tokens(4)), labels(4))[0].backward()
        assert watch._sums == {}  # nothing is looked at any more

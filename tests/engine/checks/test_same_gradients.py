"""Gradients of parameters that a TP plan leaves replicated: ranks that compute different ones are told so at the first step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade import initialize, parallelize
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
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


@pytest.mark.parametrize("accumulation", [1, 2])
@on_ranks(2)
def test_a_norm_of_each_head_that_the_plan_leaves_out(accumulation: int):
    """Named in the first forward pass, or by its gradients: once, when all passes of the first step have come."""
    plan = {name: style for name, style in PACKED.items() if "q_norm" not in name}
    summed = {"blocks.*.attention.q_norm": "replicated_with_grad_allreduce"}
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "gradient_accumulation": accumulation}
    said = (
        r"'blocks\.0\.attention\.q_norm\.weight', 'blocks\.0\.attention\.q_norm\.bias' replicated, .*'replicated_with"
    )
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        for hidden in (False, True):
            model = build(packed_model)
            for block in model.blocks if hidden else ():
                norm = Norm(HIDDEN // 4).double()
                norm.load_state_dict(block.attention.q_norm.state_dict())
                block.attention.q_norm = norm
            for complete in (False, True):
                cut = parallelize(copy.deepcopy(model), {**plan, **(summed if complete else {})}, context=gpc)
                engine = initialize(cut, lambda p: torch.optim.SGD(p, lr=0.1), summed_loss, context=gpc)[0]
                if not complete and not hidden:
                    with pytest.raises(PlacementError, match=r"q_norm.*'replicated_with_grad_allreduce'"):
                        engine(tokens(4))
                    engine.close()
                    continue
                watch = engine._watch._same_gradients
                for last in (False, True)[-accumulation:]:
                    engine.backward(summed_loss(engine(tokens(4)), labels(4)))
                    if last and hidden and not complete:
                        with pytest.raises(GradientError, match=said):
                            engine.step()
                    else:
                        assert engine.step() is last
                    assert watch.is_due is not last
                engine.close()

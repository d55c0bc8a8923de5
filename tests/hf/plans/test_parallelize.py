"""A model of one's own under a plan, beside one process."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade import parallelize
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError
from colonnade.testing import run_world
from tests.hf.plans.models import (
    CASES,
    HIDDEN,
    INNER,
    PLAN,
    SEQUENCE_SPLIT,
    Model,
    build,
    labels,
    summed_loss,
    tokens,
    torch_plan,
)
from tests.hf.plans.training import CLIP, check
from tests.ranks import on_ranks

TENSOR = {"size": 2, "mode": "1d"}
CONFIG = {"clip_grad_norm": CLIP, "gradient_accumulation": 3}


def cases() -> dict[str, Any]:
    torch_plans = {f"torch's styles{', sequence' * split}": (Model, torch_plan(split)) for split in (False, True)}
    return {**CASES, **torch_plans, "sequence split": (Model, SEQUENCE_SPLIT)}


def _equals_one_process(parallel: dict[str, Any], more: dict[str, Any], names: list[str]) -> None:
    with launch({**CONFIG, "parallel": parallel, **more}, context=ParallelContext(), verbose=False) as gpc:
        for name in names:
            made, plan = cases()[name]
            try:
                check(plan, gpc, made).close()
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error


def test_styles_equal_one_process():
    """Gradients, norm and weights after three clipped steps, of 3 micro-batches with uneven counts each: fp64, 1e-10."""
    run_world(2, _equals_one_process, {"tensor": TENSOR}, {}, ["tied, the embedding left out", "packed"])


@pytest.mark.slow
def test_all_styles_equal_one_process():
    known = ["tied, the embedding left out", "packed", "sequence split"]
    run_world(2, _all_styles, [name for name in cases() if name not in known], timeout=110)


def _all_styles(names: list[str]) -> None:
    _equals_one_process({"tensor": TENSOR}, {}, names)
    _equals_one_process({"tensor": {**TENSOR, "sequence_split": True}}, {}, ["sequence split"])


@pytest.mark.slow
@on_ranks(4, timeout=110)
def test_with_data_parallelism_and_zero():
    """With data parallelism, whose ranks count unequally many tokens, and ZeRO."""
    for zero in (0, 1, 2, 3):
        more = {"zero": {"stage": zero}} if zero else {}
        _equals_one_process({"tensor": TENSOR}, more, ["packed"] if zero else ["tied, the head left out"])


@pytest.mark.long
@pytest.mark.timeout(300)
@on_ranks(2, timeout=280)
def test_a_model_that_is_cut_compiles_to_one_graph():
    with launch({"parallel": {"tensor": TENSOR}}, context=ParallelContext(), verbose=False) as gpc:
        model = parallelize(build(CASES["packed"][0]), CASES["packed"][1], context=gpc)
        found = []
        for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            model.zero_grad()
            summed_loss(run(tokens(2)), labels(2))[0].backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_a_copy_of_the_model_and_a_layer_of_torch_that_evaluates_otherwise_compute_with_their_own_weights():
    with launch({"parallel": {"tensor": TENSOR}}, context=ParallelContext(), verbose=False) as gpc:
        model = parallelize(build(), PLAN, context=gpc)
        assert model.blocks[0].mlp.up.weight.shape == (INNER // 2, HIDDEN)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied.blocks[0].mlp.down.weight.zero_()
            assert not torch.equal(copied(tokens(2)), model(tokens(2)))
            plain = nn.TransformerEncoderLayer(HIDDEN, 4, INNER, batch_first=True).double().eval()
            layer = parallelize(copy.deepcopy(plain), {"linear1": "colwise", "linear2": "rowwise"}, context=gpc)
            x = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
            torch.testing.assert_close(layer(x), plain(x), rtol=1e-12, atol=1e-12)
        weights = [weakref.ref(parameter) for parameter in model.parameters()]
        gc.disable()
        del model
        assert [weight for weight in weights if weight() is not None] == []  # no cycle keeps them


class Repeated(nn.Module):
    """One block, three times in a list: as models are that share their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Model().blocks[0]] * 3)
        self.first = self.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(2)
def test_a_module_under_several_names_is_cut_once():
    with launch({"parallel": {"tensor": TENSOR}}, context=ParallelContext(), verbose=False) as gpc:
        plain, x = build(Repeated), torch.randn(2, 3, HIDDEN, dtype=torch.float64)
        plan = {**PLAN, **{name.replace("blocks.*", "first"): style for name, style in PLAN.items()}}
        for each in (PLAN, plan):
            model = parallelize(copy.deepcopy(plain), each, context=gpc)
            assert model.first.mlp.up.weight.shape == (INNER // 2, HIDDEN)
            found, expected = model(x), plain(x)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            plain.zero_grad()
            expected.sum().backward()
            found.sum().backward()
            part = plain.first.mlp.up.weight.grad.chunk(2)[gpc.get_local_rank(ParallelMode.TENSOR)]
            torch.testing.assert_close(model.first.mlp.up.weight.grad, part, rtol=1e-10, atol=1e-12)
        plain.first.attention.heads = 4
        model = parallelize(plain, {**PLAN, "blocks.*.attention": {"divide": ["heads"]}}, context=gpc)
        assert model.first.attention.heads == 2


@pytest.mark.slow
@on_ranks(4)
def test_a_module_on_several_stages_is_cut_once():
    config = {"parallel": {"tensor": TENSOR, "pipeline": 2}, "num_microbatches": 2}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        x = torch.randn(2, 3, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        stages = parallelize(build(Repeated), PLAN, sample=x, context=gpc)  # which compares
        parts = [stage.get_parameter("blocks.1.mlp.up.weight") for stage in stages]  # type: ignore[union-attr]
        assert parts[0] is parts[1]
        assert parts[0].shape == (INNER // 2, HIDDEN)


def test_without_tensor_parallelism_nothing_is_cut():
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        model = build()
        before = copy.deepcopy(model)
        assert parallelize(model, PLAN, context=gpc) is model
        assert torch.equal(model(tokens(2)), before(tokens(2)))
        assert parallelize(before, context=gpc) is before
        with pytest.raises(
            PlacementError, match="already"
        ):  # so that a script fails on no layout that it works on here
            parallelize(model, context=gpc)


def test_the_old_keyword_of_the_plan_still_works_with_a_warning():
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        model = build()
        with pytest.warns(DeprecationWarning, match=r"write parallelize_plan=") as caught:
            assert parallelize(model, plan=PLAN, context=gpc) is model
        assert caught[0].filename == __file__
        with pytest.raises(PlacementError, match="Pass only parallelize_plan="):
            parallelize(build(), PLAN, plan=PLAN, context=gpc)

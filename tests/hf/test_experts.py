"""Experts of transformers' models over tensor and expert ranks at once, and computed in each of transformers' ways."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.hf.plans import plan_of, tensor_plan
from colonnade.parallel.placement import placement_of
from colonnade.testing import compare, gather_gradients, in_double, plain_gradients, run_world
from tests.hf.runs import TENSOR, Layout, run_all, truth_file
from tests.hf.table import QUIET
from tests.hf.zoo import BY_NAME, batch_of, num_rows, reference

pytest.importorskip("transformers", reason="needs transformers")

BOTH = Layout("tensor 2 x expert 2", 4, {"expert": 2, **TENSOR})
NAMES = ["mixtral", "gpt_oss"]


def test_experts_are_cut_as_they_lie() -> None:
    """gpt_oss has no entry for its experts upstream; gate and up lie by turns there, so they are cut as one."""
    at = "model.layers.*.mlp.experts"
    assert {name: style for name, style in tensor_plan(BY_NAME["gpt_oss"].build()).items() if name.startswith(at)} == {
        f"{at}.gate_up_proj": "rowwise",
        f"{at}.gate_up_proj_bias": "rowwise",
        f"{at}.down_proj": "colwise",
        at: "moe_tp_experts",
    }
    for name in ("mixtral", "deepseek_v3", "granitemoe"):
        model: Any = BY_NAME[name].build()
        assert {key: style for key, style in tensor_plan(model).items() if ".experts" in key} == {
            key: style for key, style in model.tp_plan.items() if ".experts" in key
        }


def on_ranks(folder: str) -> None:
    run_all(BOTH, NAMES, folder)
    with colonnade.launch({"parallel": BOTH.parallel}, context=ParallelContext(), verbose=False) as gpc:
        model: Any = BY_NAME["mixtral"].build()
        plan = plan_of(model, gpc)
        assert plan["model.layers.*.mlp.experts.down_proj"] == {"style": "grouped_gemm", "tensor": "rowwise"}
        plain = copy.deepcopy(model)
        experts = colonnade.parallelize(model, context=gpc).model.layers[0].mlp.experts
        assert set(placement_of(experts.gate_up_proj).shards) == {ParallelMode.EXPERT, ParallelMode.TENSOR}
        for way in ("eager", "grouped_mm", "batched_mm"):
            _computed(way, experts.float(), plain.model.layers[0].mlp.experts.float(), gpc)
    for parallel in ({"expert": 2}, {"sequence": 2, **TENSOR}):
        _router_loss(parallel)


def _router_loss(parallel: dict[str, Any]) -> None:
    """The auxiliary loss is that of all ranks' tokens, as are its gradients: rows of unequal lengths, unequally many."""
    whole = batch_of("causal", 0)
    plain: Any = BY_NAME["mixtral"].build().to(whole["input_ids"].device)  # that of the batch: a GPU's in nccl_check
    plain.config.output_router_logits, plain.router_aux_loss_coef = True, 0.5
    with in_double():
        expected = plain(**whole)
        truth = plain_gradients(plain, expected.loss)
    with colonnade.launch({"parallel": parallel}, context=ParallelContext(), verbose=False) as gpc:
        model: Any = BY_NAME["mixtral"].build()
        model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
        engine = colonnade.initialize(
            colonnade.parallelize(model, context=gpc), lambda p: torch.optim.SGD(p, lr=1.0), context=gpc
        )[0]
        data = gpc.get_world_size(ParallelMode.DATA) if gpc.is_initialized(ParallelMode.DATA) else 1
        rows = slice(gpc.get_local_rank(ParallelMode.DATA) if data > 1 else 0, None, data)
        with in_double():
            output = engine(**num_rows(whole, rows))
            torch.testing.assert_close(output.aux_loss, expected.aux_loss, rtol=1e-12, atol=0)
            engine.backward(output.loss)
        engine._sum_gradients()
        compare(truth, gather_gradients(engine.model, gpc), 1e-9)
        engine.close()


def _computed(way: str, experts: Any, plain: Any, gpc: ParallelContext) -> None:
    """In float32, which the ways other than "eager" are for."""
    experts.config._experts_implementation = way
    draw = torch.Generator().manual_seed(gpc.get_local_rank(ParallelMode.DATA))
    x = torch.randn(6, 32, generator=draw, requires_grad=True)
    weights = torch.rand(6, 2, generator=draw, requires_grad=True)
    index = torch.rand(6, 4, generator=draw).argsort(1)[:, :2]
    found, wanted = experts(x, index, weights), plain(x, index, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for one, other in zip(
        *(torch.autograd.grad(out.square().sum(), [x, weights]) for out in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_over_tensor_and_expert_ranks_at_once(tmp_path: Path) -> None:
    for name in NAMES:
        torch.save(reference(BY_NAME[name]), truth_file(str(tmp_path), name, None))
    run_world(4, on_ranks, str(tmp_path), timeout=110, env=QUIET)
    lines = Path(tmp_path, f"{BOTH.name}.jsonl").read_text().splitlines()
    assert lines == [f'["{name}", "ok"]' for name in NAMES]

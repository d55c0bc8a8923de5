"""A pass on fake tensors beside the same pass on real ones, counted by the same recorder."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from colonnade.config.settings import ActivationSettings
from colonnade.engine.activations import apply_activations
from colonnade.engine.schedule.micro_batch import split_into_micro_batches
from colonnade.models import GPT
from colonnade.proof.planner.hardware import Clock, load_hardware
from colonnade.proof.planner.planned_passes import StagePass, fake_module, run_stage
from colonnade.proof.planner.recorder import OperatorRecorder, _attention_backward_flops, _attention_flops


@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize("half", [False, True])
def test_operators_bytes_and_flops_of_a_fake_pass_are_those_of_a_real_one(half: bool, recomputed: str) -> None:
    planned, real = (_run(fake, half, recomputed) for fake in (True, False))
    for one, other in ((planned.forward, real.forward), (planned.backward, real.backward)):
        assert (one.operators, one.moved, one.flops) == (other.operators, other.moved, other.flops)
        assert one.seconds == pytest.approx(other.seconds)
    assert (planned.kept, planned.extra) == (real.kept, real.extra)


def test_look_ups_views_and_what_makes_no_tensor_are_no_operators() -> None:
    recorder = OperatorRecorder(Clock(load_hardware("h200")))
    with FakeTensorMode(), recorder:
        one = torch.empty(4, 6)
        assert one.device.type == "cpu"  # `prim.device` on a fake tensor
        torch.ops.aten.promote_types(torch.float32, torch.bfloat16)
        for same in (one.view(6, 4), one.t(), one.detach(), torch.ops.aten._unsafe_view(one, [24])):
            assert same.numel() == 24
        torch.ops.aten.alias(one)
        torch.ops.aten.lift_fresh(one)
    assert recorder.take().operators == 0
    with FakeTensorMode(), recorder:
        torch._foreach_add_([torch.empty(4), torch.empty(4)], 1.0)  # returns nothing, and computes
    assert recorder.take().operators == 1


def _run(fake: bool, half: bool, recomputed: str) -> StagePass:
    torch.manual_seed(0)
    recorder = OperatorRecorder(Clock(load_hardware("h200")), memory=True)
    model: Any = GPT(512, 64, 64, 4, 2)
    apply_activations(model, ActivationSettings.read(recomputed), [model], True)
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        if fake:
            fake_module(model)
        tokens = torch.zeros(8, 64, dtype=torch.long)
        first, *_ = split_into_micro_batches(tokens, tokens, 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return run_stage(
                0, model, first, tokens, model.criterion(), recorder, False, set(map(id, model.parameters()))
            )


def test_grouped_heads_of_attention_count_as_many_products_as_ungrouped_ones() -> None:
    """On a GPU the kernels take grouped keys and values as they are; torch's formula refuses them up to torch 2.11."""
    q, few = torch.empty(2, 8, 16, 32, device="meta"), torch.empty(2, 2, 16, 32, device="meta")
    many = torch.empty_like(q)
    assert _attention_flops(q, few, few) == _attention_flops(q, many, many) == 2 * (2 * 2 * 8 * 16 * 16 * 32)
    assert _attention_backward_flops(q, q, few, few) == _attention_backward_flops(q, q, many, many) > 0

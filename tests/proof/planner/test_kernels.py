"""Kernel times by a sweep, operators of a GPU on fake tensors, and compiled blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from colonnade.proof.planner.compiled import CompiledBlock
from colonnade.proof.planner.cuda_operators import CudaOperators
from colonnade.proof.planner.hardware import Clock, load_hardware, to_toml
from colonnade.proof.planner.kernels import KernelTimes, Operator, Shaped, Table
from colonnade.proof.planner.planned_passes import fake_module
from colonnade.proof.planner.recorder import OperatorRecorder


def test_samples_come_back_and_powers_are_interpolated_exactly() -> None:
    table = Table([[2**i, 2**j, 2.0 ** (i + 2 * j)] for i in range(0, 6, 2) for j in range(0, 6, 2)])
    for sizes in ((4, 16), (4, 1), (3, 7), (10, 2.5)):
        seconds = sizes[0] * sizes[1] ** 2
        assert 2.718281828459045 ** table.log_seconds(sizes) == pytest.approx(seconds)
    assert 2.718281828459045 ** table.log_seconds((32, 16)) == pytest.approx(2 * 2**12)  # beyond: the rate stays


def test_a_sweep_survives_its_file(tmp_path: Any) -> None:
    machine = load_hardware("h200")
    (tmp_path / "again.toml").write_text(to_toml(machine))
    assert load_hardware(str(tmp_path / "again.toml")).kernels == machine.kernels


def test_products_on_an_h200_take_what_was_measured() -> None:
    times = KernelTimes(load_hardware("h200").kernels)
    seconds = times.product(8192, 4096, 1024, torch.bfloat16, "nt")
    assert seconds == pytest.approx(96e-6, rel=0.1)  # in a GPT's step, by torch's profiler
    left, right = (Shaped((edge, edge), torch.bfloat16, 2 * edge * edge) for edge in (4096, 4096))
    assert times.seconds(Operator("mm", (left, right), (left,))) == times.product(4096, 4096, 4096, torch.bfloat16)


def test_attention_of_a_gpu_keeps_its_inputs_its_output_and_a_number_for_each_row() -> None:
    recorder = OperatorRecorder(Clock(load_hardware("h200")), memory=True)
    with FakeTensorMode(), CudaOperators(recorder):
        q, k, v = (torch.empty(2, 64, 4, 32, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))
        with recorder:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            kept = recorder.live
            out.backward(torch.empty_like(out))
        assert out.transpose(1, 2).is_contiguous()  # in the order of the queries
    assert kept == out.nbytes + 4 * 2 * 4 * 64
    cost = recorder.take()
    assert cost.operators == 2
    assert cost.graded < cost.flops
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_a_compiled_block_moves_and_keeps_less() -> None:
    found = {}
    for compiled in (False, True):
        recorder = OperatorRecorder(Clock(load_hardware("h200")), memory=True)
        block = _Block().to("meta")
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake_module(block)
            if compiled:
                vars(block)["forward"] = CompiledBlock(block, recorder, {})
            x = torch.empty(32, 256, 64, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16), recorder:
                y = block(x)
            kept, forward = recorder.live, recorder.take()
            with recorder:
                y.backward(torch.empty_like(y))
            backward = recorder.take()
            assert all(each.grad is not None and each.grad.shape == each.shape for each in (x, *block.parameters()))
        found[compiled] = kept, forward.moved + backward.moved, forward.flops + backward.flops
    assert found[True][0] <= found[False][0]
    assert found[True][1] < found[False][1]
    assert found[True][2] == found[False][2]  # the same products

"""The kernels of a block on a GPU against exact arithmetic in float64; nothing here runs without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.sequence import Parts, attention_kernels, ring_attention
from colonnade.nn.sequence.attention_kernels import Exact
from colonnade.nn.sequence.masks import Mask, Sight
from colonnade.nn.sequence.ring import attention_over

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SWITCH = {
    attention_kernels.Cudnn: SDPBackend.CUDNN_ATTENTION,
    attention_kernels.Flash: SDPBackend.FLASH_ATTENTION,
    attention_kernels.Efficient: SDPBackend.EFFICIENT_ATTENTION,
}
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
LENGTH, CUT = 192, 128
MASKS = {
    "all": (Mask(), Mask()),
    "causal": (Mask(), Mask(right=0)),
    "window": (Mask(left=20), Mask(40, 0)),
    "documents": (Mask(), Mask(None, 0, (0, 10, 33, LENGTH - CUT))),
}
"""What 64 queries see of 128 keys before them, and of 64 of their own."""


def _numbers(dtype: torch.dtype, heads: int, length: int, seed: int) -> Tensor:
    made = torch.randn(2, heads, length, 64, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).cuda()


def _near(found: Tensor, truth: Tensor) -> None:
    assert found.shape == truth.shape
    apart = (found.double() - truth.double()).norm() / truth.double().norm()
    assert apart <= TOLERANCE[found.dtype], apart.item()


def _blocks(kind: Any, dtype: torch.dtype, kv_heads: int, masks: tuple[Mask, Mask]) -> list[Tensor]:
    """Two blocks put together by hand: the outputs, the sums, and the gradients with the sums over both."""
    count = LENGTH - CUT
    q, grad = _numbers(dtype, 4, count, 1), _numbers(dtype, 4, count, 2)
    keys, values = _numbers(dtype, kv_heads, LENGTH, 3), _numbers(dtype, kv_heads, LENGTH, 4)
    pairs = [(keys[:, :, :CUT], values[:, :, :CUT]), (keys[:, :, CUT:], values[:, :, CUT:])]
    made = [kind(0.125, mask) for mask in masks]
    if kind is not Exact:
        with sdpa_kernel(SWITCH[kind]):
            chosen = [
                type(attention_kernels.kernel_for(q, *pair, 0.125, mask, 0.0))
                for pair, mask in zip(pairs, masks, strict=True)
            ]
        assert chosen == [kind] * 2
    (one, one_lse), (two, two_lse) = (kernel.forward(q, *pair) for kernel, pair in zip(made, pairs, strict=True))
    lse = torch.logaddexp(one_lse, two_lse)
    out = one * (one_lse - lse).exp().unsqueeze(-1) + two * (two_lse - lse).exp().unsqueeze(-1)
    out = out.to(dtype)
    grads = [kernel.backward(grad, q, *pair, out, lse) for kernel, pair in zip(made, pairs, strict=True)]
    dq = grads[0][0].float() + grads[1][0].float()
    return [out, lse, dq.to(dtype), *grads[0][1:], *grads[1][1:]]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("kind", "dtype", "mask"),
    [
        *(
            (attention_kernels.Cudnn, dtype, mask)
            for dtype in (torch.bfloat16, torch.float16)
            for mask in ("all", "causal")
        ),
        *((attention_kernels.Flash, torch.bfloat16, mask) for mask in MASKS),
        *(
            (attention_kernels.Efficient, dtype, mask)
            for dtype in (torch.float32, torch.bfloat16)
            for mask in ("all", "causal")
        ),
    ],
)
def test_a_block_by_each_kernel_equals_exact_arithmetic(kind, dtype, mask, kv_heads):
    found = _blocks(kind, dtype, kv_heads, MASKS[mask])
    truth = _blocks(Exact, torch.float64, kv_heads, MASKS[mask])
    low = _blocks(Exact, dtype, kv_heads, MASKS[mask])
    for mine, exact, same in zip(found, truth, low, strict=True):
        # The inputs are rounded: only arithmetic on the same ones can be near.
        _near(mine, same)
        assert torch.isfinite(exact).all()


@pytest.mark.parametrize("kind", [attention_kernels.Cudnn, attention_kernels.Flash, attention_kernels.Efficient, Exact])
def test_dropout_drops_the_same_weights_in_backward(kind):
    """The output is linear in the values, so <grad, out> = <dv, v> if and only if the weights are the same."""
    q, k, v, grad = (_numbers(torch.bfloat16, 2, 512, seed) for seed in range(4))
    kernel = kind(0.125, Mask(right=0), 0.3)
    out, lse = kernel.forward(q, k, v)
    again = kind(0.125, Mask(right=0), 0.3).forward(q, k, v)[0]
    plain, plain_lse = kind(0.125, Mask(right=0)).forward(q, k, v)
    assert not torch.equal(out, again)
    assert not torch.equal(out, plain)
    torch.testing.assert_close(lse, plain_lse)
    _, _, dv = kernel.backward(grad, q, k, v, out.to(q.dtype), lse)
    left, right = ((a.double() * b.double()).sum().item() for a, b in ((grad, out), (dv, v)))
    scale = out.double().norm().item() * grad.double().norm().item()
    assert abs(left - right) <= 2e-3 * scale, (left, right, scale)


@pytest.mark.parametrize(
    "sight", [Sight(True), Sight(True, 30), Sight(False, 50), Sight(True, None, (0, 7, 100, LENGTH))]
)
def test_whole_attention_in_one_process(sight):
    q, k, v = (_numbers(torch.bfloat16, heads, LENGTH, seed).requires_grad_() for seed, heads in enumerate((4, 2, 2)))
    grad = _numbers(torch.bfloat16, 4, LENGTH, 9)
    answers = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        out = attention_over(*inputs, Parts((LENGTH,)), sight, None, 0.0)
        answers.append([out, *torch.autograd.grad(out, inputs, grad.to(dtype))])
    for found, truth in zip(*answers, strict=True):
        _near(found, truth)


def test_what_no_kernel_takes_is_said_once_and_computed(caplog):
    attention_kernels._warn_slow.cache_clear()
    q = torch.randn(1, 2, 32, 12, device="cuda", requires_grad=True)
    for _ in range(2):
        ring_attention(q, q, q, causal=True, window=5, context=ParallelContext()).sum().backward()
    assert len([record for record in caplog.records if "no kernel of torch supports" in record.message]) == 1


def test_memory_is_linear_in_the_length():
    def peak(length: int) -> int:
        q, k, v = (
            torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        torch.cuda.reset_peak_memory_stats()
        begin = torch.cuda.memory_allocated()
        attention_over(q, k, v, Parts((length,)), Sight(True, length // 2), None, 0.0).sum().backward()
        return torch.cuda.max_memory_allocated() - begin

    peak(1024)
    assert peak(16384) <= 2.1 * peak(8192)

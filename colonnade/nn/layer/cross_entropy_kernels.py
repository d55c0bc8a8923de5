"""Triton kernels for the cross-entropy of rows of logits: statistics of each row, then its gradient in place of the logits.

Each kernel reads the logits once, in their own dtype; the arithmetic is fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits, labels, out, rows, width, BLOCK: tl.constexpr, SUMS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    exps = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        offsets = start + lanes
        inside = offsets < width
        value = tl.load(logits + row * width + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, value)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        exps = exps * tl.exp(largest - shift) + tl.exp(value - shift)
        largest = larger
        if SUMS:
            sums += tl.where(inside, value, 0.0)
    top = tl.max(largest, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    label = tl.load(labels + row)
    picked = tl.load(logits + row * width + label, mask=label >= 0, other=0.0).to(tl.float32)
    tl.store(out + row, top)
    tl.store(out + rows + row, tl.sum(exps * tl.exp(largest - shift), axis=0))
    tl.store(out + 2 * rows + row, picked)
    tl.store(out + 3 * rows + row, tl.sum(sums, axis=0))


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits, labels, log_sums, slopes, share, hit, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    place = logits + row * width + offsets
    slope = tl.load(slopes + row)
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.exp(value - tl.load(log_sums + row)) - tl.load(share)
    gradient -= tl.where(offsets == tl.load(labels + row), hit, 0.0)
    tl.store(place, tl.where(slope == 0.0, 0.0, gradient * slope), mask=inside)


def statistics(logits: Tensor, labels: Tensor, sums: bool) -> Tensor:
    """(4, rows) in fp32: the largest logit, the sum of exp(logit - largest), the label's logit, the sum if `sums`."""
    rows, width = logits.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    _statistics[(rows,)](logits, labels, out, rows, width, _BLOCK, sums, num_warps=8)
    return out


def gradient(logits: Tensor, labels: Tensor, log_sums: Tensor, slopes: Tensor, share: Tensor, hit: float) -> Tensor:
    """slope * (softmax - share - hit at the label) for every row, written over the logits."""
    rows, width = logits.shape
    grid = (rows, triton.cdiv(width, _BLOCK))
    _gradient[grid](logits, labels, log_sums, slopes, share, hit, width, _BLOCK, num_warps=8)
    return logits

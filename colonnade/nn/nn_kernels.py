"""Triton kernels of layers: cross-entropy of rows of logits, and the sums in a mixture of experts.

The cross-entropy computes statistics of each row, then its gradient in place of the logits. Each kernel reads the
logits once, in their own dtype, and computes in fp32. The sums are for eager mode; compiled code fuses plain operators
instead. Import this module only where Triton is installed.
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
    """Return statistics of each row of logits, (4, rows) in fp32.

    The four rows are the largest logit, the sum of exp(logit - largest), the label's logit and, with `sums`, the sum of
    the logits.
    """
    rows, width = logits.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    _statistics[(rows,)](logits, labels, out, rows, width, _BLOCK, sums, num_warps=8)
    return out


def gradient(logits: Tensor, labels: Tensor, log_sums: Tensor, slopes: Tensor, share: Tensor, hit: float) -> Tensor:
    """Overwrite the logits with their gradient: slope * (softmax - share - hit at the label) for every row."""
    rows, width = logits.shape
    grid = (rows, triton.cdiv(width, _BLOCK))
    _gradient[grid](logits, labels, log_sums, slopes, share, hit, width, _BLOCK, num_warps=8)
    return logits


_MOE_BLOCK = 1024
"""Columns per program: 16 bytes for each thread of four warps in half precision."""


def sums(rows: Tensor, places: Tensor, weights: Tensor | None, spare: int | None) -> Tensor:
    """Return the weighted sum of the rows of each token.

    `places` (tokens, choices) are the indices of these rows; places equal to `spare` are left out.
    """
    out = rows.new_empty(len(places), rows.size(1))
    grid = (len(places), triton.cdiv(rows.size(1), _MOE_BLOCK))
    if out.numel():
        with torch.cuda.device_of(rows):
            given = places if weights is None else weights.contiguous()
            options = {"CHOICES": places.size(1), "WEIGHTED": weights is not None, "BLOCK": _MOE_BLOCK}
            left_out = -1 if spare is None else spare
            _sums[grid](rows.contiguous(), places, given, out, rows.size(1), left_out, **options)
    return out


def row_gradients(gradient: Tensor, rows: Tensor, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return (gradients of the rows, gradients of their weights), given the gradient of the tokens' sums."""
    rows = rows.contiguous()
    out, products = torch.empty_like(rows), weights.new_empty(len(rows), dtype=torch.float32)
    if rows.numel():
        with torch.cuda.device_of(rows):
            given = (gradient.contiguous(), rows, tokens, weights, out, products)
            _row_gradients[(len(rows),)](*given, rows.size(1), BLOCK=_MOE_BLOCK)
    return out, products


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    rows, places, weights, out, width, spare, CHOICES: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places + token * CHOICES + choice)
        values = tl.load(rows + place * width + columns, mask=inside & (place != spare), other=0.0).to(tl.float32)
        if WEIGHTED:
            values = values * tl.load(weights + token * CHOICES + choice).to(tl.float32)
        total += values
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row_gradients(  # type: ignore[no-untyped-def]
    gradient, rows, tokens, weights, out, products, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    weight = tl.load(weights + row).to(tl.float32)
    product = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        of_token = tl.load(gradient + token * width + columns, mask=inside, other=0.0).to(tl.float32)
        product += of_token * tl.load(rows + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + columns, (of_token * weight).to(out.dtype.element_ty), mask=inside)
    tl.store(products + row, tl.sum(product, axis=0))

"""Triton kernels for the sums of a mixture of experts, for eager mode; compiled code fuses plain operators instead."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Columns per program: 16 bytes for each thread of four warps in half precision."""


def sums(rows: Tensor, places: Tensor, weights: Tensor | None, spare: int | None) -> Tensor:
    """The weighted sum of the rows at the places (tokens, choices) of each token; places equal to `spare` are left out."""
    out = rows.new_empty(len(places), rows.size(1))
    grid = (len(places), triton.cdiv(rows.size(1), _BLOCK))
    if out.numel():
        with torch.cuda.device_of(rows):
            given = places if weights is None else weights.contiguous()
            options = {"CHOICES": places.size(1), "WEIGHTED": weights is not None, "BLOCK": _BLOCK}
            left_out = -1 if spare is None else spare
            _sums[grid](rows.contiguous(), places, given, out, rows.size(1), left_out, **options)
    return out


def row_gradients(gradient: Tensor, rows: Tensor, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(gradients of the rows, gradients of their weights), given the gradient of the tokens' sums."""
    rows = rows.contiguous()
    out, products = torch.empty_like(rows), weights.new_empty(len(rows), dtype=torch.float32)
    if rows.numel():
        with torch.cuda.device_of(rows):
            given = (gradient.contiguous(), rows, tokens, weights, out, products)
            _row_gradients[(len(rows),)](*given, rows.size(1), BLOCK=_BLOCK)
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

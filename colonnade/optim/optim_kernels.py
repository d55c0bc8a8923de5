"""Triton kernels of the clipped optimizer step on CUDA: the 2-norm, and the steps of Adam and SGD, over flat buffers.

The norm takes sums of squares of chunks of a flat buffer, then the sums of ranges of chunks. A step reads the buffers once,
divides the gradient in registers and writes once. Parameters, moments and gradients may each be fp32 or half precision; the
arithmetic is fp32. The divisor and the skip flag are read from device memory; a skipped step neither reads nor writes the
buffers. Import this module only where Triton is installed.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from colonnade.optim.norm import CHUNK, STEP_CHUNK, UNIT

TILE_BYTES = 1 << 15
"""Bytes of a buffer that one program loads at a time."""

FINISH_TILE = 4096


@triton.jit
def _square_sums(  # type: ignore[no-untyped-def]
    data, addresses, limits, table, out,
    SCATTERED: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = table + program * 3
    start = tl.load(row).to(tl.int64) * UNIT
    stop = tl.load(row + 1).to(tl.int64) * UNIT
    if SCATTERED:
        owner = tl.load(row + 2)
        # The address is that of element 0 of a flat buffer with this gradient in its place; it is aligned, as every span is.
        data = tl.multiple_of(tl.load(addresses + owner).to(data.dtype), 16)
        stop = tl.minimum(stop, tl.load(limits + owner))
    lanes = start + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for tile in tl.static_range(TILES):
        offsets = lanes + tile * TILE
        value = tl.load(data + offsets, mask=offsets < stop, other=0.0).to(tl.float32)
        total += value * value
    tl.store(out + program, tl.sum(total.to(tl.float64), axis=0))


@triton.jit
def _add_ranges(values, ranges, out, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    first = tl.load(ranges + program * 2)
    last = tl.load(ranges + program * 2 + 1)
    lanes = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float64)
    for start in range(first, last, TILE):
        offsets = start + lanes
        total += tl.load(values + offsets, mask=offsets < last, other=0.0)
    result = tl.sum(total, axis=0)
    # inf - inf and NaN - NaN are NaN, which differs from 0.
    finite = (result - result) == 0.0
    tl.store(out + program, result)
    tl.store(out + count + program, tl.where(finite, 0.0, 1.0).to(tl.float64))


def square_sums(data: Tensor, scattered: tuple[Tensor, Tensor] | None, table: Tensor, out: Tensor) -> None:
    """Compute out[i] = the sum of squares of chunk i of `data`; `chunk_table` makes `table`.

    `scattered`: for gradients outside of a flat buffer, the address and the end of each; the table then has the gradient of each
    chunk, and `data` only the dtype.
    """
    tile = TILE_BYTES // data.element_size()
    _square_sums[(len(table),)](
        data, *(scattered or (table, table)), table, out,
        SCATTERED=scattered is not None, UNIT=UNIT, TILE=tile, TILES=CHUNK // tile, num_warps=8,
    )  # fmt: skip


def add_ranges(values: Tensor, ranges: Tensor) -> Tensor:
    """Sum the ranges [first, last) of `values`.

    Returns an fp64 tensor of shape (2, ranges): the sums, and 1 for each sum that is not finite.
    """
    out = torch.empty(2, len(ranges), dtype=torch.float64, device=values.device)
    _add_ranges[(len(ranges),)](values, ranges, out, len(ranges), FINISH_TILE, num_warps=8)
    return out


WARPS = 4

Scattered = tuple[Tensor, Tensor, Tensor] | None


@triton.jit
def _chunk(  # type: ignore[no-untyped-def]
    table, steps, divisor, found_inf, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    """The elements of this program, the mask of those to update, their step count and 1 / divisor."""
    row = table + tl.program_id(0) * 3
    offsets = tl.load(row).to(tl.int64) * UNIT + tl.arange(0, BLOCK)
    stop = tl.load(row + 1).to(tl.int64) * UNIT
    step = tl.load(steps + tl.load(row + 2))
    keep = tl.load(found_inf) == 0.0
    scale = tl.div_rn(1.0, tl.load(divisor).to(tl.float32))
    return offsets, (offsets < stop) & keep, step, scale


@triton.jit
def _gradient(grad, addresses, limits, owners, offsets, mask, SCATTERED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of this program's elements: from the flat buffer, or at the address of its own tensor."""
    if SCATTERED:
        owner = tl.load(owners + tl.program_id(0))
        # The address is that of element 0 of a flat buffer with this gradient in its place; it is aligned, as every span is.
        grad = tl.multiple_of(tl.load(addresses + owner).to(grad.dtype), 16)
        mask = mask & (offsets < tl.load(limits + owner))
    return tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _adam(  # type: ignore[no-untyped-def]
    param, grad, exp_avg, exp_avg_sq, addresses, limits, owners, table, steps, divisor, found_inf, lr,
    beta1, rest1, log1, beta2, rest2, log2, eps, decay,
    DECOUPLED: tl.constexpr, LR_IN_MEMORY: tl.constexpr, SCATTERED: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets, mask, step, scale = _chunk(table, steps, divisor, found_inf, UNIT, BLOCK)
    if LR_IN_MEMORY:
        lr = tl.load(lr).to(tl.float32)
    # 1 - beta^step without cancellation: accurate in fp32 also when beta^step is near 1.
    correction1 = -libdevice.expm1(step * log1)
    correction2 = -libdevice.expm1(step * log2)
    step_size = tl.div_rn(lr, correction1)
    inverse_root2 = tl.div_rn(1.0, tl.sqrt_rn(correction2))

    p = tl.load(param + offsets, mask=mask, other=0.0).to(tl.float32)
    g = _gradient(grad, addresses, limits, owners, offsets, mask, SCATTERED) * scale
    m = tl.load(exp_avg + offsets, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + offsets, mask=mask, other=0.0).to(tl.float32)
    if DECOUPLED:
        p -= lr * decay * p
    else:
        g += decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p -= step_size * tl.div_rn(m, tl.sqrt_rn(v) * inverse_root2 + eps)

    tl.store(param + offsets, p.to(param.dtype.element_ty), mask=mask)
    tl.store(exp_avg + offsets, m.to(exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + offsets, v.to(exp_avg_sq.dtype.element_ty), mask=mask)


@triton.jit
def _sgd(  # type: ignore[no-untyped-def]
    param, grad, buffer, addresses, limits, owners, table, steps, divisor, found_inf, lr, momentum, rest, decay,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, LR_IN_MEMORY: tl.constexpr, SCATTERED: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets, mask, step, scale = _chunk(table, steps, divisor, found_inf, UNIT, BLOCK)
    if LR_IN_MEMORY:
        lr = tl.load(lr).to(tl.float32)
    p = tl.load(param + offsets, mask=mask, other=0.0).to(tl.float32)
    g = _gradient(grad, addresses, limits, owners, offsets, mask, SCATTERED) * scale + decay * p
    if MOMENTUM:
        b = tl.load(buffer + offsets, mask=mask, other=0.0).to(tl.float32)
        b = tl.where(step == 1.0, g, momentum * b + rest * g)
        tl.store(buffer + offsets, b.to(buffer.dtype.element_ty), mask=mask)
        if NESTEROV:
            g += momentum * b
        else:
            g = b
    tl.store(param + offsets, (p - lr * g).to(param.dtype.element_ty), mask=mask)


def adam(
    buffers: tuple[Tensor, Tensor, Tensor, Tensor],
    scattered: Scattered,
    table: Tensor,
    control: tuple[Tensor, Tensor, Tensor],
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    decoupled: bool,
) -> None:
    """Update (param, grad, exp_avg, exp_avg_sq) by one launch of Adam or AdamW; `control` is (steps, divisor, found_inf).

    `scattered` is set for gradients outside of a flat buffer: (addresses, limits, owners) are the address and end of each gradient,
    and the gradient of each row of the table.
    """
    scalars = [number for beta in betas for number in (beta, 1.0 - beta, _log(beta))]
    _adam[(len(table),)](
        *buffers, *(scattered or (table, table, table)), table, *control, lr, *scalars, float(eps), float(decay),
        DECOUPLED=decoupled, LR_IN_MEMORY=isinstance(lr, Tensor), SCATTERED=scattered is not None,
        UNIT=UNIT, BLOCK=STEP_CHUNK, num_warps=WARPS,
    )  # fmt: skip


def sgd(
    buffers: tuple[Tensor, Tensor, Tensor],
    scattered: Scattered,
    table: Tensor,
    control: tuple[Tensor, Tensor, Tensor],
    lr: float | Tensor,
    momentum: float,
    dampening: float,
    decay: float,
    nesterov: bool,
) -> None:
    """Update (param, grad, momentum buffer) by one launch of SGD; other arguments as for `adam`."""
    _sgd[(len(table),)](
        *buffers, *(scattered or (table, table, table)), table, *control, lr, momentum, 1.0 - dampening, float(decay),
        MOMENTUM=momentum != 0, NESTEROV=nesterov, LR_IN_MEMORY=isinstance(lr, Tensor), SCATTERED=scattered is not None,
        UNIT=UNIT, BLOCK=STEP_CHUNK, num_warps=WARPS,
    )  # fmt: skip


def _log(beta: float) -> float:
    """log(beta), -inf for a beta of 0: then beta^step is 0 for any step count."""
    return math.log(beta) if beta > 0 else -math.inf

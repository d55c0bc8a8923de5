"""Operators that torch runs on a GPU otherwise than on a CPU, for passes that are planned on fake CPU tensors.

A pass is planned on fake tensors of the CPU, because torch without CUDA has no fake CUDA tensors that autograd accepts. Most
operators are the same ones on both. Attention and RMSNorm are not: a GPU has one kernel for each, with outputs laid out for the
projections around them. `CudaOperators` replaces these calls of a model by functions that allocate what the kernels of a GPU
allocate, and count one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from colonnade.proof.planner.kernels import Operator, Shaped
from colonnade.proof.planner.recorder import OperatorRecorder


class CudaOperators:
    """Makes F.scaled_dot_product_attention and F.rms_norm run as on a GPU inside the block; `recorder` counts them.

    Not a TorchFunctionMode: torch switches modes off during backward, where checkpointed blocks run again.
    """

    def __init__(self, recorder: OperatorRecorder) -> None:
        self._recorder = recorder
        self._before: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> None:
        self._recorder.workspace = workspace_of
        for name, own in (("scaled_dot_product_attention", self._attention), ("rms_norm", self._rms_norm)):
            self._before[name] = getattr(F, name)
            setattr(F, name, own)

    def __exit__(self, *_: object) -> None:
        self._recorder.workspace = lambda op: 0
        for name, before in self._before.items():
            setattr(F, name, before)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        func = self._before["scaled_dot_product_attention"]
        names = ("attn_mask", "dropout_p", "is_causal")
        options |= dict(zip(names, rest, strict=False))
        if self._recorder.is_paused:  # a block is traced for compilation
            return func(query, key, value, **options)
        if options.get("attn_mask") is not None or query.dim() != 4:  # other kernels, which no sweep measures
            return func(query, key, value, **options)
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (each.to(dtype) for each in (query, key, value))
        if query.dtype not in (torch.bfloat16, torch.float16):
            return func(query, key, value, **options)
        return _CudaAttention.apply(self._recorder, query, key, value, bool(options.get("is_causal")))

    def _rms_norm(
        self, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Any:
        if self._recorder.is_paused:
            return self._before["rms_norm"](x, normalized_shape, weight, eps)
        return _RMSNorm.apply(self._recorder, x, weight, prod(normalized_shape))


_BLOCKS = 8 * 132
"""Blocks that torch starts for a reduction on 132 multiprocessors."""


def workspace_of(op: Operator) -> int:
    """Return the bytes that the kernels of an operator take for themselves while they run.

    A sum over rows that are few columns wide is split over many blocks, which store partial sums (`Reduce.cuh` in torch). The
    backward pass of cuDNN's attention adds up the gradient of the queries in fp32.
    """
    if (
        op.name == "sum"
        and op.outputs
        and len(op.inputs[0].shape) == 2
        and op.inputs[0].shape[-1:] == op.outputs[0].shape[-1:]
    ):
        rows, columns = op.inputs[0].shape
        blocks = min(rows // 128, -(-_BLOCKS * 128 // columns))
        return 4 * 256 * columns * blocks if blocks > 1 else 0
    if op.name.startswith("attention backward"):
        q = op.outputs[0].shape
        return 4 * prod(q) + 4 * prod(q[:3])
    return 0


class _CudaAttention(Function):
    @staticmethod
    def forward(ctx: Any, recorder: OperatorRecorder, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        batch, heads, length = q.shape[:3]
        out = torch.empty_like(q)  # in the order of the queries' dimensions, as cuDNN has it
        sums = q.new_empty(batch, heads, length, 1, dtype=torch.float32)
        shapes = q.shape, _with_heads_of(q, k), _with_heads_of(q, v)
        recorder.add(_operator("attention", causal, (q, k, v), (out, sums), sdpa_flop_count(*shapes)), True)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.recorder, ctx.causal, ctx.shapes = recorder, causal, shapes
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, _ = ctx.saved_tensors
        found = [torch.empty_like(each) for each in (q, k, v)]
        flops = sdpa_backward_flop_count(gradient.shape, *ctx.shapes)
        name = "attention backward"
        ctx.recorder.add(_operator(name, ctx.causal, (gradient, out, q, k, v), tuple(found), flops))
        return None, *found, None


def _operator(name: str, causal: bool, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], flops: int) -> Operator:
    described = [tuple(map(Shaped.of, given)) for given in (inputs, outputs)]
    return Operator(f"{name}, causal" if causal else name, described[0], described[1], int(flops))


def _with_heads_of(q: Tensor, shared: Tensor) -> torch.Size:
    """The shape of keys or values with a head for each head of the queries."""
    return torch.Size((shared.shape[0], q.shape[1], *shared.shape[2:]))


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, recorder: OperatorRecorder, x: Tensor, weight: Tensor | None, width: int) -> Tensor:
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        out = torch.empty_like(x, dtype=dtype)
        roots = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        recorder.add(Operator("rms_norm", (Shaped.of(x),), (Shaped.of(out),)), True)
        ctx.save_for_backward(x, roots, *([] if weight is None else [weight]))
        ctx.recorder = recorder
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, _, *weight = ctx.saved_tensors
        found = torch.empty_like(x)
        of_weight = torch.empty_like(weight[0]) if weight else None
        ctx.recorder.add(Operator("rms_norm_backward", (Shaped.of(gradient), Shaped.of(x)), (Shaped.of(found),)))
        return None, found, of_weight, None

"""Seconds of kernels, interpolated from the samples of a calibration sweep (`sweep.py`).

Between samples, the logarithm of the time is linear in the logarithms of the sizes. Beyond the samples, a kernel has the rate of
the nearest one. For 40 matrix products with random sizes between 256 and 23,000, the median error on an H200 was 9%; sizes that are
multiples of 128, as in most models, are closer to the grid.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import exp, log, prod

import torch
from torch import Tensor

Samples = Mapping[str, Sequence[Sequence[float]]]
"""Name of a table -> rows of (sizes ..., seconds)."""


@dataclass(frozen=True)
class Shaped:
    """A tensor of an operator: its shape, dtype, bytes that it really has (expanded dimensions have one element), and order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    transposed: bool = False
    """Whether its last dimension is not the one that is contiguous in memory."""
    strided: bool = False
    """Whether its elements are in memory in another order than that of its indices, or with gaps."""

    @classmethod
    def of(cls, tensor: Tensor) -> Shaped:
        """Describe a tensor."""
        shape, strides = tuple(tensor.shape), tensor.stride()
        held = dense = 1
        contiguous = True
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            held *= size if stride else 1
            contiguous &= size == 1 or stride == dense
            dense *= size
        turned = len(shape) > 1 and strides[-1] != 1 and shape[-1] > 1
        strided = not contiguous and held == dense
        return cls(shape, tensor.dtype, held * tensor.dtype.itemsize, turned, strided)


@dataclass(frozen=True)
class Operator:
    """One call of an operator: its name without namespace and overload, tensors, and flops of matrix products."""

    name: str
    inputs: tuple[Shaped, ...]
    outputs: tuple[Shaped, ...]
    flops: int = 0

    @property
    def moved(self) -> int:
        """Bytes of all its tensors."""
        return sum(each.nbytes for each in (*self.inputs, *self.outputs))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its first output; float32 without one."""
        return self.outputs[0].dtype if self.outputs else torch.float32


class Table:
    """Samples of one kind of kernel, as points in the logarithms of their sizes."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self.points = {tuple(log(size) for size in row[:-1]): log(row[-1]) for row in rows if row[-1] > 0}
        self.edges = [sorted(set(column)) for column in zip(*self.points, strict=True)]

    def log_seconds(self, sizes: Sequence[float]) -> float:
        """Return the logarithm of the seconds: multilinear between the samples around the sizes."""
        wanted = tuple(log(max(1.0, size)) for size in sizes)
        sides = []
        for value, edges in zip(wanted, self.edges, strict=True):
            at = min(max(bisect_right(edges, value), 1), len(edges) - 1)
            low, high = edges[max(at - 1, 0)], edges[at]
            part = min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0
            sides.append(((low, 1 - part), (high, part)) if part else ((low, 1.0),))
        total = 0.0
        inside = [min(max(value, edges[0]), edges[-1]) for value, edges in zip(wanted, self.edges, strict=True)]
        for corner in product(*sides):
            total += prod(weight for _, weight in corner) * self._at(tuple(edge for edge, _ in corner))
        return total + sum(value - edge for value, edge in zip(wanted, inside, strict=True))

    def _at(self, point: tuple[float, ...]) -> float:
        """The sample at a corner; where the grid has a hole, the nearest sample at the same rate."""
        found = self.points.get(point)
        if found is None:
            near = min(self.points, key=lambda each: sum((a - b) ** 2 for a, b in zip(each, point, strict=True)))
            found = self.points[point] = self.points[near] + sum(point) - sum(near)
        return found


class KernelTimes:
    """Seconds of operators on one device by its sweep."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.tables = {name: Table(rows) for name, rows in samples.items() if rows and not name.startswith("attention")}
        self._by_form: dict[tuple[str, int, bool, bool], Table] = {}
        self._product = lru_cache(1 << 16)(self._product_uncached)

    def seconds(self, op: Operator) -> float:
        """Return the seconds that the device is busy with one call."""
        if op.name in _PRODUCTS:
            return self._matrix_product(op)
        if op.name.startswith("_scaled_dot_product"):  # in fp32, or with a mask: no sweep has these kernels
            return op.flops * _PLAIN_ATTENTION * self.product(4096, 4096, 4096, op.dtype) / (2 * 4096**3)
        if op.name.startswith("attention"):
            return self._attention(op)
        if op.name == "_grouped_mm":
            return self._grouped(op)
        return self._memory_bound(op)

    # -- matrix products ----------------------------------------------------------------------------------

    def _matrix_product(self, op: Operator) -> float:
        left, right = [each for each in op.inputs if len(each.shape) >= 2][-2:]
        batch = prod(left.shape[:-2])
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        layout = ("t" if left.transposed else "n") + ("t" if right.transposed else "n")
        return batch * self.product(m, n, k, left.dtype, layout)

    def product(self, m: int, n: int, k: int, dtype: torch.dtype, layout: str = "nn") -> float:
        """Return the seconds of a product of (m, k) and (k, n); `layout` says which of them is transposed ("t")."""
        return self._product(m, n, k, str(dtype).removeprefix("torch."), layout)

    def _product_uncached(self, m: int, n: int, k: int, dtype: str, layout: str) -> float:
        if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
            dtype = "tf32"
        names = [f"mm {dtype} {layout}", f"mm {dtype} nn", f"mm {dtype} nt", "mm bfloat16 nn"]
        if layout == "tt":  # the product of the transposes, transposed
            return self._product_uncached(n, m, k, dtype, "nn")
        table = next(self.tables[name] for name in names if name in self.tables)
        return exp(table.log_seconds((m, n, k)))

    def _grouped(self, op: Operator) -> float:
        one, other = op.inputs[:2]
        if len(other.shape) == 3:
            experts, rows, inner, columns = other.shape[0], one.shape[0], other.shape[1], other.shape[2]
            table = self.tables.get("grouped_mm")
        else:
            experts, rows = op.outputs[0].shape[0], one.shape[1]
            inner, columns = other.shape[1], one.shape[0]
            table = self.tables.get("grouped_mm weights")
        if table is None:
            return experts * self.product(max(1, rows // experts), columns, inner, one.dtype)
        return exp(table.log_seconds((experts, rows, inner, columns)))

    def _attention(self, op: Operator) -> float:
        """Heads of all sequences of a batch run side by side."""
        q, k = op.inputs[-3:-1] if op.name.startswith("attention backward") else op.inputs[:2]
        batch, heads, length, width = q.shape
        causal, shared = op.name.endswith("causal"), heads // k.shape[1]
        table = self._attentions(
            "attention backward" if "backward" in op.name else "attention", width, causal, shared > 1
        )
        # A few queries against many keys, or the reverse, are a part of the square.
        part = length / k.shape[2]
        seconds = exp(table.log_seconds((batch * heads, k.shape[2])))
        return seconds * part if part != 1 else seconds

    def _attentions(self, name: str, width: int, causal: bool, grouped: bool) -> Table:
        """The samples of the nearest width."""
        found = self._by_form.get((name, width, causal, grouped))
        if found is None:
            rows = self._samples[name]
            near = min({row[3] for row in rows}, key=lambda each: abs(log(each / width)))
            chosen = [row for row in rows if row[3] == near and bool(row[4]) == causal]
            wide = [row for row in chosen if (row[0] != row[1]) == grouped] or chosen
            found = Table([(row[0], row[2], row[-1] * width / near) for row in wide])
            self._by_form[name, width, causal, grouped] = found
        return found

    # -- memory-bound kernels -----------------------------------------------------------------------------

    def _memory_bound(self, op: Operator) -> float:
        return sum(self.moved(kind, nbytes) for kind, nbytes in kernels_of(op))

    def moved(self, kind: str, nbytes: float) -> float:
        """Return the seconds of a memory-bound kernel that reads and writes so many bytes."""
        table = self.tables.get(f"memory {kind}") or self.tables["memory copy fp32"]
        return exp(table.log_seconds((max(nbytes, 1),)))


_PLAIN_ATTENTION = 1.25
"""Seconds of a flop of attention in fp32, in those of a flop of a large product (efficient attention on an H200: 1.2 to 1.3)."""
_STRIDED = 0.7
"""The part of a transposed copy's time that a pointwise operator on strided operands takes (H200: 0.6 to 0.75)."""
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "linear"))


_SAME = {
    "native_layer_norm": "layer norm",
    "native_layer_norm_backward": "layer norm backward",
    "rms_norm": "rms norm",
    "rms_norm_backward": "rms norm backward",
    "_softmax": "softmax",
    "_log_softmax": "softmax",
    "_softmax_backward_data": "softmax",
    "_log_softmax_backward_data": "softmax",
    "gelu": "gelu",
    "gelu_backward": "gelu backward",
    "silu": "silu",
    "silu_backward": "silu backward",
    "cat": "cat",
    "stack": "cat",
    "_fused_adamw_": "fused adamw",
    "linalg_vector_norm": "norm of all",
}
"""Operators with a table of their own."""
_FILLS = frozenset(
    ("zeros", "zero_", "ones", "full", "fill_", "new_zeros", "new_ones", "new_full", "zeros_like", "arange")
)
_LOOKS_UP = frozenset(("embedding", "index_select", "gather", "index"))
_SUMS = frozenset(("sum", "mean", "amax", "var_mean", "logsumexp"))


def kernels_of(op: Operator) -> list[tuple[str, float]]:
    """Return the memory-bound kernels of an operator: (table, bytes that the kernel reads and writes)."""
    read, written = sum(each.nbytes for each in op.inputs), sum(each.nbytes for each in op.outputs)
    dtypes = {each.dtype for each in (*op.inputs, *op.outputs) if each.dtype.is_floating_point}
    half = torch.bfloat16 in dtypes or torch.float16 in dtypes
    if op.name in _SAME:
        return [(_SAME[op.name], read + written)]
    if op.name in _FILLS:
        return [("fill fp32", written)]
    if op.name in _LOOKS_UP:
        return [("embedding", 2 * written)]
    if op.name == "embedding_dense_backward":  # a sort of the indices, and sums of rows that are equal
        return [("fill fp32", written), ("copy fp32", 2 * op.inputs[0].nbytes), *[("copy fp32", 0.0)] * 6]
    if op.name == "nll_loss_forward":
        return [("sum of columns", 4 * op.inputs[1].nbytes)]
    if op.name == "nll_loss_backward":
        return [("fill fp32", written), ("copy fp32", 4 * op.inputs[2].nbytes)]
    if op.name in _SUMS and op.inputs and op.outputs:
        rows = op.inputs[0].shape[-1:] == op.outputs[0].shape[-1:] and len(op.inputs[0].shape) > 1
        return [("sum of rows" if rows else "sum of columns", read + written)]
    if op.name in ("_to_copy", "copy_", "clone"):
        if op.name == "clone" and op.inputs[0].strided:
            return [("transposed copy", read + written)]
        if len(dtypes) == 2 and op.outputs:
            return [("cast fp32 to bf16" if op.outputs[0].dtype.itemsize == 2 else "cast bf16 to fp32", read + written)]
        return [("copy bf16" if half else "copy fp32", read + written)]
    if op.name == "add_":
        return [("add in place fp32", read + written)]
    if op.name in ("masked_fill", "scatter", "scatter_add", "index_add"):  # a copy, and the change
        return [("copy fp32", 2 * written), ("copy fp32", read)]
    if any(each.strided for each in op.inputs) and op.name not in _LOOKS_UP:
        return [("transposed copy", _STRIDED * (read + written))]
    if len(op.inputs) < 2:
        return [("multiply by a number", read + written)]
    return [("add fp32 and bf16" if half and len(dtypes) > 1 else "add bf16" if half else "add fp32", read + written)]

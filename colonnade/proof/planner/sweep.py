"""The calibration sweep of a device: seconds of kernels on a grid of shapes, of host work by kind, and bytes of constants.

`plan --measure` runs it on a GPU, in about a minute, and stores the samples in the hardware file; `kernels.py` interpolates
them. Kernels are timed with CUDA events around many launches, through a CUDA graph where a kernel is shorter than its launch,
so that the host's time is not in them. Operands are random: zeros draw less power and so run at higher clocks.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Samples = dict[str, list[list[float]]]
"""Name of a table -> rows of (sizes ..., seconds)."""
Make = Callable[..., Callable[[], Any]]
"""Makes the call to measure, of sizes."""

_LAYOUTS = ("nt", "nn", "tn")
"""Whether the left and the right operand are transposed, as in x @ w.T (forward), g @ w and g.T @ x (backward)."""
_EDGES = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_COARSE = (256, 1024, 4096, 16384)
_SIZES = tuple(1 << power for power in (12, 15, 18, 20, 21, 22, 23, 24, 26, 28))
"""Elements of the tensors that memory-bound kernels read."""
_WIDTH = 1024
_SHARE = {"products": 0.35, "other products": 0.15, "attention": 0.2, "memory": 0.2, "host": 0.1}


class Sweep:
    """Measures one device. `found` has the samples, `failed` the tables that the device or torch does not support."""

    def __init__(self, seconds: float = 60.0, small: bool = False, parts: Sequence[str] = tuple(_SHARE)) -> None:
        self.found: Samples = {}
        self.failed: dict[str, str] = {}
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._budget, self._small, self._parts = seconds, small, parts
        self._end = math.inf
        self._stream = torch.cuda.Stream() if self.device == "cuda" else None
        self._pool = torch.cuda.graph_pool_handle() if self.device == "cuda" else None

    def run(self) -> Samples:
        """Measure all tables. A part that runs out of its share of the time keeps the samples that it has."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                # A graph that stays keeps the memory pool that all others use.
                self._kept = torch.cuda.CUDAGraph()
                self._kept.capture_begin(pool=self._pool)
                torch.zeros(1, device=self.device)
                self._kept.capture_end()
        parts = {
            "products": self._products,
            "other products": self._other_products,
            "attention": self._attention,
            "memory": self._memory,
            "host": self._host,
        }
        whole = sum(_SHARE[name] for name in self._parts)
        for name in self._parts:
            self._end = time.perf_counter() + self._budget * _SHARE[name] / whole
            self._try(name, parts[name])
        return self.found

    # -- matrix products ----------------------------------------------------------------------------------

    def _products(self) -> None:
        # Shapes that are not on the grid, to state the error of the interpolation.
        generator = torch.Generator().manual_seed(7)
        for _ in range(2 if self._small else 40):
            draw = [int(2 ** (8 + 6.5 * torch.rand((), generator=generator).item())) // 8 * 8 for _ in range(3)]
            if math.prod(draw) < 1 << (24 if self._small else 38):
                at = _LAYOUTS[int(torch.randint(3, (), generator=generator))]
                self._add(f"check mm bfloat16 {at}", draw, partial(_mm, layout=at))
        self._grid("mm bfloat16", _EDGES, 1 << 38, _mm, _LAYOUTS)

    def _other_products(self) -> None:
        fp32 = partial(_mm, dtype=torch.float32)
        self._grid("mm float32", _COARSE, 1 << 33, fp32, ("nn",))
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            self._grid("mm tf32", _COARSE, 1 << 36, fp32, ("nn",))
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        wide = [(rows, 1024, 50304) for rows in (1024, 4096, 8192)] + [(1024, 4096, 32000), (4096, 1536, 32000)]
        for rows, inner, columns in () if self._small else wide:  # weight gradients that a fused loss adds up in fp32
            self._add("addmm fp32 out", (columns, inner, rows), _accumulated)
        self._try("grouped_mm", self._grouped)
        for recipe in ("tensorwise", "rowwise"):
            edges = (1024, 2048, 4096, 8192, 16384)
            self._grid(f"mm float8 {recipe}", edges, 1 << 39, partial(_float8, recipe=recipe), ("nt",))

    def _grid(
        self,
        name: str,
        edges: Sequence[int],
        most: int,
        make: Make,
        layouts: Sequence[str],
    ) -> None:
        edges, most = (edges[:3], 1 << 26) if self._small else (edges, most)
        shapes = [
            shape
            for shape in itertools.product(edges, repeat=3)
            if 1 << 22 <= math.prod(shape) <= most
            and sum(edge < 256 for edge in shape) <= 1
            and max(shape[0] * shape[1], shape[0] * shape[2], shape[1] * shape[2]) <= 1 << 29
        ]
        # Every other power first, so that a grid that is cut short is coarse and not lopsided.
        shapes.sort(key=lambda shape: sum(math.log2(edge) % 2 > 0 for edge in shape))
        for shape in shapes:
            for at in layouts:
                self._add(f"{name} {at}", shape, partial(make, layout=at))

    def _grouped(self) -> None:
        """(experts, rows in all, inner, columns); rows are spread evenly, and then with one expert that has half of them."""
        shapes = itertools.product((8, 64), (2048, 8192, 32768), (768, 2048), (768, 3072))
        for experts, rows, inner, columns in itertools.islice(shapes, 1 if self._small else None):
            for name, even in (("grouped_mm", True), ("grouped_mm skewed", False)):
                self._add(name, (experts, rows, inner, columns), partial(_grouped_mm, even=even))
            self._add("grouped_mm weights", (experts, rows, inner, columns), _grouped_weights)

    # -- attention ----------------------------------------------------------------------------------------

    def _attention(self) -> None:
        """(heads of all sequences, key heads, length, width, causal), forward and backward."""
        lengths = (128, 256) if self._small else (512, 2048, 8192, 32768, 256, 1024, 4096, 16384)
        for length, heads, width, causal in itertools.product(lengths, (12, 48, 128, 512), (128, 64), (1, 0)):
            if not 1 << 22 <= heads * length * length * width <= 1 << 40 or heads * length * width > 1 << 28:
                continue
            for shared in (1, 4) if causal and width == 128 else (1,):
                sizes = (heads, heads // shared, length, width, causal)
                self._add("attention", sizes, _attend)
                self._add("attention backward", sizes, _attend_backward)

    # -- memory-bound kernels -----------------------------------------------------------------------------

    def _memory(self) -> None:
        """(bytes read and written) of each kind of kernel."""
        for name, (make, moved) in _MEMORY_BOUND.items():
            for elements in _SIZES[:2] if self._small else _SIZES:
                self._add(f"memory {name}", (elements * moved,), partial(_of_elements, make, elements))
        for direction, pinned in itertools.product(("to device", "to host"), (True, False)):
            for nbytes in (1 << 12, 1 << 20, 1 << 24, 1 << 27):
                sizes, name = (nbytes,), f"copy {direction}, {'pinned' if pinned else 'pageable'}"
                self._add(name, sizes, partial(_copy, direction=direction, pinned=pinned), False)

    # -- the host -----------------------------------------------------------------------------------------

    def _host(self) -> None:
        """(1): seconds that the host is busy with one call of a kind, while the device keeps up."""
        for name, make in _HOST.items():

            def measure(name: str = name, make: Any = make) -> None:
                call, count = make(self.device)
                times = []
                for _ in range(7):
                    self._wait()
                    begin = time.perf_counter()
                    call()
                    times.append((time.perf_counter() - begin) / count)
                self._wait()
                self.found.setdefault(f"host {name}", []).append([1, median(times[2:])])

            self._try(f"host {name}", measure)

    # -- timing -------------------------------------------------------------------------------------------

    def _add(self, table: str, sizes: Sequence[float], make: Make, graph: bool = True) -> None:
        if time.perf_counter() > self._end:
            self.failed[table] = "cut short: no time left"
            return

        def measure() -> None:
            # A stream of its own from the start: autograd runs a backward pass where its forward pass ran, and the default
            # stream cannot be captured.
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                seconds = self._seconds(make(*sizes), graph)
            self.found.setdefault(table, []).append([*sizes, float(f"{seconds:.4g}")])

        self._try(table, measure)

    def _seconds(self, call: Callable[[], Any], graph: bool) -> float:
        """Seconds of the device for one call."""
        call()
        once = math.inf
        for _ in range(1 if self.device == "cpu" else 3):
            self._wait()
            begin = time.perf_counter()
            call()
            self._wait()
            once = min(once, time.perf_counter() - begin)
        if self.device == "cpu":
            return once
        count = max(3, min(20, int(2e-3 / once)))
        if graph and once < 3e-4:
            with suppress(RuntimeError):
                recorded, calls = torch.cuda.CUDAGraph(), 20 if once < 1e-4 else 8
                # Not torch.cuda.graph, which empties the cache each time.
                recorded.capture_begin(pool=self._pool)
                try:
                    for _ in range(calls):
                        call()
                finally:
                    recorded.capture_end()
                return _between(recorded.replay, 2) / calls
        return _between(call, count)

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _try(self, name: str, measure: Callable[[], Any]) -> None:
        """Run one part; a device without support for it is no reason to lose the others."""
        try:
            measure()
        except (RuntimeError, ValueError, AttributeError, NotImplementedError, TypeError) as error:
            self.failed[name] = f"{type(error).__name__}: {error}"[:300]


def _between(call: Callable[[], Any], count: int) -> float:
    """Seconds of one of `count` calls, the median of three rounds."""
    call()
    times = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / count)
    return median(times)


def _on() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "") -> Tensor:
    return torch.randn(*shape, device=device or _on(), dtype=torch.float32).to(dtype)


def _mm(m: int, n: int, k: int, layout: str, dtype: torch.dtype = torch.bfloat16) -> Callable[[], Any]:
    left = _random(m, k, dtype=dtype) if layout[0] == "n" else _random(k, m, dtype=dtype).t()
    right = _random(k, n, dtype=dtype) if layout[1] == "n" else _random(n, k, dtype=dtype).t()
    out = torch.empty(m, n, dtype=dtype, device=left.device)
    return lambda: torch.mm(left, right, out=out)


def _float8(m: int, n: int, k: int, layout: str, recipe: str) -> Callable[[], Any]:
    left = _random(m, k).to(torch.float8_e4m3fn)
    right = _random(n, k).to(torch.float8_e4m3fn).t()
    rows, columns = (m, n) if recipe == "rowwise" else (1, 1)
    scales = (torch.ones(rows, 1, device=_on()), torch.ones(1, columns, device=_on()))
    if recipe != "rowwise":
        scales = (scales[0].view(()), scales[1].view(()))
    return lambda: torch._scaled_mm(
        left, right, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16, use_fast_accum=recipe != "rowwise"
    )


def _accumulated(m: int, n: int, k: int) -> Callable[[], Any]:
    total, left, right = torch.zeros(m, n, device=_on()), _random(k, m).t(), _random(k, n)
    return lambda: torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)


def _ends(experts: int, rows: int, even: bool) -> Tensor:
    counts = [rows // experts] * experts
    if not even:
        counts = [rows // 2] + [rows // 2 // (experts - 1)] * (experts - 1)
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=_on())
    ends[-1] = rows
    return ends


def _grouped_mm(experts: int, rows: int, inner: int, columns: int, even: bool) -> Callable[[], Any]:
    x, weight, ends = _random(rows, inner), _random(experts, columns, inner), _ends(experts, rows, even)
    return lambda: torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)


def _grouped_weights(experts: int, rows: int, inner: int, columns: int) -> Callable[[], Any]:
    x, gradient, ends = _random(rows, inner), _random(rows, columns), _ends(experts, rows, True)
    return lambda: torch._grouped_mm(gradient.t(), x, offs=ends)


def _heads(heads: int, shared: int, length: int, width: int) -> list[Tensor]:
    """Queries, keys and values that lie as projections give them: (1, length, heads, width), transposed."""
    return [_random(1, length, each, width).transpose(1, 2).requires_grad_() for each in (heads, shared, shared)]


def _attend(heads: int, shared: int, length: int, width: int, causal: int) -> Callable[[], Any]:
    q, k, v = _heads(heads, shared, length, width)
    # With gradients on, as in training: the kernel stores its log-sum-exp.
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), enable_gqa=heads != shared)


def _attend_backward(heads: int, shared: int, length: int, width: int, causal: int) -> Callable[[], Any]:
    q, k, v = _heads(heads, shared, length, width)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), enable_gqa=heads != shared)
    slope = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), slope, retain_graph=True)


def _pointwise(function: Callable[..., Any], *dtypes: torch.dtype) -> Callable[[int, str], Callable[[], Any]]:
    def make(elements: int, device: str) -> Callable[[], Any]:
        given = [_random(max(1, elements // _WIDTH), _WIDTH, dtype=dtype) for dtype in dtypes]
        return lambda: function(*given)

    return make


def _differentiated(function: Callable[..., Any], *dtypes: torch.dtype) -> Callable[[int, str], Callable[[], Any]]:
    """The backward pass of a function of rows."""

    def make(elements: int, device: str) -> Callable[[], Any]:
        given = [_random(max(1, elements // _WIDTH), _WIDTH, dtype=dtype).requires_grad_() for dtype in dtypes]
        weight = torch.ones(_WIDTH, device=_on(), requires_grad=True)
        out = function(*given, weight)
        slope = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (*given, weight), slope, retain_graph=True, allow_unused=True)

    return make


def _of_elements(make: Callable[[int, str], Callable[[], Any]], elements: int, _: float) -> Callable[[], Any]:
    return make(elements, _on())


def _embedded(elements: int, device: str) -> Callable[[], Any]:
    table = _random(50304, _WIDTH, dtype=torch.float32)
    at = torch.randint(0, 50304, (max(1, elements // _WIDTH),), device=_on())
    return lambda: F.embedding(at, table)


def _embedded_backward(elements: int, device: str) -> Callable[[], Any]:
    at = torch.randint(0, 50304, (max(1, elements // _WIDTH),), device=_on())
    gradient = _random(len(at), _WIDTH, dtype=torch.float32)
    return lambda: torch.ops.aten.embedding_dense_backward(gradient, at, 50304, -1, False)


def _adamw(elements: int, device: str) -> Callable[[], Any]:
    tensors = [torch.zeros(elements, device=_on()) for _ in range(4)]
    held, gradient, first, second = ([each] for each in tensors)
    steps = [torch.ones((), device=_on())]
    options: dict[str, Any] = dict(
        amsgrad=False, lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, maximize=False
    )
    return lambda: torch._fused_adamw_(held, gradient, first, second, [], steps, **options)


def _cross_entropy(elements: int, device: str) -> Callable[[], Any]:
    logits, labels = _random(max(1, elements // 32768), 32768, dtype=torch.float32), None
    labels = torch.randint(0, 32768, (len(logits),), device=_on())
    return lambda: F.cross_entropy(logits, labels)


def _norm(rows: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(rows, (_WIDTH,), weight.to(rows.dtype))


def _rms(rows: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(rows, (_WIDTH,), weight.to(rows.dtype))


_BF16, _FP32 = torch.bfloat16, torch.float32
_MEMORY_BOUND: dict[str, tuple[Callable[[int, str], Callable[[], Any]], float]] = {
    "copy bf16": (_pointwise(lambda x: x.clone(), _BF16), 4),
    "copy fp32": (_pointwise(lambda x: x.clone(), _FP32), 8),
    "fill fp32": (_pointwise(lambda x: x.zero_(), _FP32), 4),
    "cast fp32 to bf16": (_pointwise(lambda x: x.to(_BF16), _FP32), 6),
    "cast bf16 to fp32": (_pointwise(lambda x: x.to(_FP32), _BF16), 6),
    "add bf16": (_pointwise(torch.add, _BF16, _BF16), 6),
    "add fp32": (_pointwise(torch.add, _FP32, _FP32), 12),
    "add fp32 and bf16": (_pointwise(torch.add, _FP32, _BF16), 10),
    "add in place fp32": (_pointwise(lambda x, y: x.add_(y), _FP32, _FP32), 12),
    "multiply by a number": (_pointwise(lambda x: x * 1.5, _BF16), 4),
    "gelu": (_pointwise(F.gelu, _BF16), 4),
    "gelu backward": (_pointwise(lambda g, x: torch.ops.aten.gelu_backward(g, x), _BF16, _BF16), 6),
    "silu": (_pointwise(F.silu, _BF16), 4),
    "silu backward": (_pointwise(lambda g, x: torch.ops.aten.silu_backward(g, x), _BF16, _BF16), 6),
    "transposed copy": (_pointwise(lambda x: x.view(-1, 16, 64).transpose(0, 1).contiguous(), _BF16), 4),
    "cat": (_pointwise(lambda x, y: torch.cat([x, y], -1), _BF16, _BF16), 8),
    "sum of rows": (_pointwise(lambda x: x.sum(0), _BF16), 2),
    "sum of columns": (_pointwise(lambda x: x.sum(-1), _BF16), 2),
    "norm of all": (_pointwise(lambda x: torch.linalg.vector_norm(x), _FP32), 4),
    "softmax": (_pointwise(lambda x: x.softmax(-1), _FP32), 8),
    "layer norm": (_pointwise(lambda x: F.layer_norm(x, (_WIDTH,)), _FP32), 8),
    "layer norm backward": (_differentiated(_norm, _FP32), 12),
    "rms norm": (_pointwise(lambda x: F.rms_norm(x, (_WIDTH,)), _FP32), 8),
    "rms norm backward": (_differentiated(_rms, _FP32), 12),
    "embedding": (_embedded, 8),
    "embedding backward": (_embedded_backward, 8),
    "cross entropy": (_cross_entropy, 4),
    "fused adamw": (_adamw, 28),
}
"""How a kernel is called on a number of elements, and the bytes that it reads and writes for each of them."""


def _chain(steps: int, make: Callable[[str], tuple[Callable[[Tensor], Tensor], Tensor]]) -> Callable[[str], Any]:
    def build(device: str) -> tuple[Callable[[], Any], int]:
        function, x = make(device)

        def call() -> Tensor:
            y = x
            for _ in range(steps):
                y = function(y)
            return y

        return call, steps

    return build


def _chain_backward(
    steps: int, make: Callable[[str], tuple[Callable[[Tensor], Tensor], Tensor]]
) -> Callable[[str], Any]:
    def build(device: str) -> tuple[Callable[[], Any], int]:
        call, count = _chain(steps, make)(device)
        y = call()
        slope = torch.ones_like(y)
        return lambda: y.backward(slope, retain_graph=True), count

    return build


def _tiny(device: str, grad: bool = True, width: int = 64) -> Tensor:
    return torch.ones(16, width, device=device, requires_grad=grad)


def _linear(device: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    weight = torch.eye(64, device=device, requires_grad=True)
    bias = torch.zeros(64, device=device, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return F.linear(x, weight, bias)

    return run, _tiny(device)


def _bare_linear(device: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    weight = torch.eye(64, device=device, requires_grad=True)
    return lambda x: F.linear(x, weight), _tiny(device)


def _normalised(device: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    weight, bias = torch.ones(64, device=device, requires_grad=True), torch.zeros(64, device=device, requires_grad=True)
    return lambda x: F.layer_norm(x, (64,), weight, bias), _tiny(device)


def _attended(device: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    x = torch.ones(1, 4, 64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    return lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), x


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * 1.0


def _module(device: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    return nn.Identity(), _tiny(device)


def _module_with_hooks(device: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    module = nn.Identity()
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    return module, _tiny(device)


def _parameters_backward(hooks: bool) -> Callable[[str], Any]:
    """The accumulation of gradients: one sum over many parameters, with and without a hook of each."""

    def build(device: str) -> tuple[Callable[[], Any], int]:
        held = [nn.Parameter(torch.ones(16, device=device)) for _ in range(200)]
        for each in held if hooks else ():
            each.register_post_accumulate_grad_hook(lambda _: None)
        total = torch.stack(list(held)).sum()
        slope = torch.ones_like(total)

        def call() -> None:
            for each in held:
                each.grad = None
            total.backward(slope, retain_graph=True)

        return call, len(held)

    return build


def _reduced(device: str) -> tuple[Callable[[], Any], int]:
    x = torch.ones(1024, device=device)

    def call() -> None:
        for work in [dist.all_reduce(x, async_op=True) for _ in range(50)]:
            work.wait()

    return call, 50


def _stepped(device: str) -> tuple[Callable[[], Any], int]:
    held = [nn.Parameter(torch.ones(16, device=device)) for _ in range(200)]
    for each in held:
        each.grad = torch.ones_like(each)
    optimizer = torch.optim.AdamW(held, fused=device == "cuda")
    return optimizer.step, len(held)


_HOST: dict[str, Callable[[str], tuple[Callable[[], Any], int]]] = {
    "pointwise": _chain(200, lambda device: (lambda x: x * 1.0, _tiny(device))),
    "pointwise without gradients": _chain(200, lambda device: (lambda x: x * 1.0, _tiny(device, False))),
    "pointwise backward": _chain_backward(200, lambda device: (lambda x: x * 1.0, _tiny(device))),
    "view": _chain(200, lambda device: (lambda x: x.transpose(0, 1), _tiny(device))),
    "view backward": _chain_backward(200, lambda device: (lambda x: x.transpose(0, 1), _tiny(device))),
    "new memory": _chain(200, lambda device: (lambda x: torch.empty_like(x), _tiny(device, False))),
    "linear": _chain(200, _bare_linear),
    "linear backward": _chain_backward(200, _bare_linear),
    "linear in autocast": _chain(100, _linear),
    "linear in autocast backward": _chain_backward(100, _linear),
    "layer norm": _chain(200, _normalised),
    "layer norm backward": _chain_backward(200, _normalised),
    "attention": _chain(50, _attended),
    "attention backward": _chain_backward(50, _attended),
    "function": _chain(100, lambda device: (_Same.apply, _tiny(device))),
    "function backward": _chain_backward(100, lambda device: (_Same.apply, _tiny(device))),
    "module": _chain(200, _module),
    "module with hooks": _chain(200, _module_with_hooks),
    "accumulate": _parameters_backward(False),
    "accumulate with a hook": _parameters_backward(True),
    "collective": _reduced,
    "fused adamw of a parameter": _stepped,
}
"""Builds (call, number of units in a call)."""


def collectives(sizes: Sequence[int] = (1 << 10, 1 << 16, 1 << 20, 1 << 23, 1 << 26)) -> Samples:
    """Measure collectives between the ranks of the world: rows of (bytes of the full tensor, seconds). All ranks must call."""
    found: Samples = {}
    size, device = dist.get_world_size(), _on()
    for nbytes in sizes:
        whole = torch.zeros(nbytes // 4, device=device)
        part = torch.zeros(nbytes // 4 // size, device=device)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
            "broadcast": partial(dist.broadcast, whole, 0),
            "send": partial(_passed_on, whole),
        }
        for name, call in calls.items():
            for _ in range(2):
                call()
            times = []
            for _ in range(5 if nbytes < 1 << 25 else 2):
                _until_done()
                dist.barrier()
                _until_done()
                begin = time.perf_counter()
                for _ in range(3):
                    call()
                _until_done()
                times.append((time.perf_counter() - begin) / 3)
            found.setdefault(f"collective {name}", []).append([nbytes, median(times)])
    return found


def _passed_on(x: Tensor) -> None:
    """From rank 0 to rank 1."""
    if dist.get_rank() == 0:
        dist.send(x, 1)
    elif dist.get_rank() == 1:
        dist.recv(x, 0)


def _copy(nbytes: int, direction: str, pinned: bool) -> Callable[[], Any]:
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned and torch.cuda.is_available())
    there = torch.empty(nbytes, dtype=torch.uint8, device=_on())
    source, target = (host, there) if direction == "to device" else (there, host)
    return lambda: target.copy_(source, non_blocking=True)


def _until_done() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def constants() -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of memory that is taken once: the context of the device, and cuBLAS's workspaces."""
    free, total = torch.cuda.mem_get_info()
    yield "context", total - free - torch.cuda.memory_reserved()
    before = torch.cuda.memory_allocated()
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.ones(256, 256, device="cuda", dtype=dtype)
        torch.addmm(one[0], one, one)
    del one
    torch.cuda.synchronize()
    yield "cublas workspace", torch.cuda.memory_allocated() - before
    free, _ = torch.cuda.mem_get_info()
    yield "context with cublas", total - free - torch.cuda.memory_reserved()

"""Records operators: collectives with their bytes, matrix products with their flops, and live memory.

The same recorder is used for a real run and for a plan, which runs on fake tensors.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from math import prod
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from colonnade.engine import Engine
from colonnade.errors import ConfigError
from colonnade.proof.planner.kernels import Operator, Shaped
from colonnade.proof.planner.plan_records import RankClass

OPS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "receive",
}
"""torch's names of collectives, and the names in a plan."""

_WHOLE_OF = {"all_gather": 0, "reduce_scatter": 1, "all_to_all": 1}
"""The index of the larger tensor among the arguments of a call with two tensors; for all_to_all, that of the sent tensor."""


@dataclass(frozen=True)
class PlannedCall:
    """One collective: the bytes of its tensor (of the full tensor for a gather or scatter), and the ranks of its group."""

    op: str
    bytes: int
    ranks: tuple[int, ...]


@dataclass
class Cost:
    """The cost of operators: their estimated seconds, flops, memory traffic and collectives.

    `seconds` are those of the device, `host` those in which the host issues the operators.
    """

    seconds: float = 0.0
    host: float = 0.0
    flops: float = 0.0
    graded: float = 0.0
    """Flops that ran with gradients enabled: in a backward pass, recomputation."""
    moved: float = 0.0
    operators: int = 0
    calls: list[PlannedCall] = field(default_factory=list)


class OperatorRecorder(TorchDispatchMode):
    """Records the operators of this thread while it is active.

    `clock` estimates the seconds of an operator on the device and on the host. `memory`: whether live memory is recorded.
    `resizes`: storages are freed and allocated again under the same tensor, as FSDP2 does.
    """

    def __init__(self, clock: Any = None, memory: bool = False, resizes: bool = False) -> None:
        super().__init__()
        self.cost = Cost()
        self.live = self.peak = 0
        self._clock, self._memory, self._resizes = clock, memory, resizes
        self.is_paused = False
        self.counts_views = True
        """Whether views and new memory cost time of the host, as outside of compiled code."""
        self.events: list[tuple[int, int]] | None = None
        """If a list: (number, bytes) of every allocation, (number, 0) of every free, in order."""
        self.workspace: Callable[[Operator], int] = lambda op: 0
        """Bytes that the device's kernels of an operator take for themselves."""
        self._number = 0
        self._alive: dict[int, tuple[int, Any, int]] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            call = self._call(func, args)
            if call is not None:
                self.cost.calls.append(call)
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _read(args[0])
        grouped = func is _aten._grouped_mm.default and isinstance(args[0], FakeTensor)
        found = _grouped_mm(*args, **kwargs) if grouped else func(*args, **kwargs)
        if _is_view(func):
            if self._clock is not None and self.counts_views:
                self.cost.host += self._clock.host_seconds("view", torch.is_grad_enabled())
        else:
            if self._clock is not None:
                self._count(func, args, kwargs, found)
            if self._memory:
                for tensor in _tensors(found):
                    self.hold(tensor, in_place=func._overloadpacket in _IN_PLACE_ELSEWHERE)
        return found

    def add_call(self, kind: str) -> None:
        """Count work of the host alone."""
        if self._clock is not None and not self.is_paused:
            self.cost.host += self._clock.host_seconds(kind, True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the block."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def take(self) -> Cost:
        """Return the cost since the last call."""
        cost, self.cost = self.cost, Cost()
        return cost

    def start_peak(self) -> None:
        """Reset the peak to the current live memory."""
        self.peak = self.live

    def hold(self, tensor: Tensor, in_place: bool = False) -> None:
        """Count the memory of a tensor until it is freed.

        `in_place`: a real run would write into an input that is freed now, so the peak does not grow.
        """
        if self._resizes:
            self.look_again()
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive:
            return
        size = storage.nbytes()
        self._number += 1
        self._alive[key] = size, weakref.ref(storage, lambda _: self._gone(key)), self._number
        self._note(self._number, size)
        self.live += size
        if not in_place:
            self.peak = max(self.peak, self.live)

    def look_again(self) -> None:
        """Update the sizes of storages that have been resized."""
        for key, (size, reference, number) in list(self._alive.items()):
            storage = reference()
            if storage is not None and (now := storage.nbytes()) != size:
                self._alive[key] = now, reference, number
                self._note(number, 0)
                self._note(number, now)
                self.live += now - size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        size, _, number = self._alive.pop(key, (0, None, 0))
        self._note(number, 0)
        self.live -= size

    def _note(self, number: int, size: int) -> None:
        if self.events is not None:
            self.events.append((number, size))

    def _call(self, func: Any, args: Any) -> PlannedCall | None:
        op = OPS.get(func._opname)
        boxed = next((each for each in args if isinstance(each, torch.ScriptObject)), None)
        if op is None or boxed is None:
            return None
        group = dist.ProcessGroup.unbox(boxed)
        if group.group_name not in self._ranks:
            self._ranks[group.group_name] = tuple(dist.get_process_group_ranks(group))
        return PlannedCall(op, sum(map(_nbytes, _tensors(args[_WHOLE_OF.get(op, 0)]))), self._ranks[group.group_name])

    def _count(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        if _is_free(func):
            if func.namespace != "prim" and self.counts_views:
                self.cost.host += self._clock.host_seconds("new memory", torch.is_grad_enabled())
            return
        counted = _FLOPS.get(func._overloadpacket)
        flops = counted(*args, **kwargs, out_val=found) if counted is not None else 0
        inputs, outputs = (tuple(map(Shaped.of, _tensors(given))) for given in ((args, kwargs), found))
        self.add(Operator(func._opname, inputs, outputs, flops))

    def add(self, op: Operator, forward: bool | None = None, host: str = "") -> None:
        """Count one call of an operator: of torch, or a kernel that several operators share.

        `forward`: whether it belongs to a forward pass; None: if gradients are enabled. `host`: what the host does for it, if that is
        not what it does for an operator of this name.
        """
        cost, forward = self.cost, torch.is_grad_enabled() if forward is None else forward
        if self.is_paused:
            return
        cost.flops += op.flops
        cost.graded += op.flops if forward else 0
        cost.moved += op.moved
        cost.operators += 1
        if taken := self.workspace(op):
            self.peak = max(self.peak, self.live + taken)
            self._number += 1
            self._note(self._number, taken)
            self._note(self._number, 0)
        if self._clock is not None:
            cost.seconds += self._clock.operator(op)
            cost.host += self._clock.host_seconds(host or op.name, forward)


def _read(tensor: Tensor) -> bool:
    """A value that the code asks for, where there are none: checks are assumed to find nothing."""
    if tensor.dtype is torch.bool:
        return False
    raise ConfigError(
        f"the model reads a number of type {tensor.dtype} from a tensor (with .item() or .tolist(), for example), and "
        f"an estimate has no values. Branch on `context.is_simulated` there, and assume a number"
    )


def _grouped_mm(one: Tensor, other: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The form of torch's grouped product; torch's own rule for fake tensors knows bfloat16 alone."""
    if one.dim() == 2:
        shape = (
            (len(one), other.size(-1)) if other.dim() == 3 or offs is None else (len(offs), len(one), other.size(-1))
        )
    else:
        shape = (one.size(1), other.size(-1)) if other.dim() == 2 else (*one.shape[:2], other.size(-1))
    return one.new_empty(shape)


def _grouped_flops(one: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    """Every row goes through one of the groups."""
    rows = one.shape if one.dim() == 2 or other.dim() == 3 else one.shape[1:]
    return int(2 * prod(rows) * other.size(-1))


def _attention_flops(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q.shape, _as_many_heads(q, k), _as_many_heads(q, v)))


def _attention_backward_flops(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, q.shape, _as_many_heads(q, k), _as_many_heads(q, v)))


def _as_many_heads(q: Tensor, shared: Tensor) -> torch.Size:
    """The shape of keys or values with a head for each head of the queries: grouped ones are multiplied that often.

    Torch's formulas refuse grouped heads up to torch 2.11.
    """
    return torch.Size((shared.shape[0], q.shape[1], *shared.shape[2:]))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _nbytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize


_aten = torch.ops.aten
_FLOPS = {
    **flop_registry,
    _aten._grouped_mm: _grouped_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
"""Torch's own counts, and those of ops that it does not count."""
_FREE = frozenset(
    [
        *(_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided),
        *(_aten._unsafe_view, _aten.lift, _aten.detach_, _aten.record_stream),
    ]
)
"""Operators, in addition to views, that touch no memory: allocations without a value, and aliases whose schema shows no
alias.
"""
_IN_PLACE_ELSEWHERE = frozenset(
    [_aten.scatter_add, _aten.scatter, _aten.index_add, _aten.index_put, _aten.masked_fill, _aten.masked_scatter]
)
"""Operators that autograd runs out of place for fake tensors and in place for real ones.

A real run writes into memory that autograd has just allocated. If that input stays alive after all, the peak of the
next tensor includes both.
"""


@cache
def _is_view(func: Any) -> bool:
    """Whether it gives the same memory again, and does nothing to it."""
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


@cache
def _is_free(func: Any) -> bool:
    """Whether it starts nothing on a device: look-ups (`prim.device` comes with every `.device` of a fake tensor), views, new memory."""
    if func.namespace == "prim" or func._overloadpacket in _FREE or torch.Tag.inplace_view in func.tags:
        return True
    returns = func._schema.returns
    return bool(returns) and not any("Tensor" in str(each.type) for each in returns)


# --- The calls of a real step, counted as a plan counts them --------------------------------------
#
# A plan is compared with these.


Calls = Counter[tuple[str, int, int]]
"""(op, bytes, ranks) -> how often a rank calls it in a step."""


@dataclass(frozen=True)
class Observed:
    """The measurements of one rank: collectives of a step, peak memory in bytes, and seconds of a step."""

    rank: int
    calls: Calls
    memory: int
    seconds: float


def observe(engine: Engine, step: Callable[[], Any], warm: int = 3, timed: int = 5, counted: bool = True) -> Observed:
    """Run steps of an engine and measure them. All ranks must call; `step` runs one step, from zero_grad to step.

    The first `warm` steps are not measured, because buckets are arranged and memory is allocated in them. `counted`:
    whether one step runs under an `OperatorRecorder`, which would make compiled code recompile.
    """
    for _ in range(warm):
        step()
    seconds = []
    for _ in range(timed):
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    engine.zero_grad()
    memory = _peak(engine, step)
    recorder = OperatorRecorder()
    with recorder if counted else nullcontext():
        step()
    calls = Counter((call.op, call.bytes, len(call.ranks)) for call in recorder.take().calls if call.op != "receive")
    return Observed(engine.context.get_global_rank(), calls, memory, median(seconds) if seconds else 0.0)


def planned_calls(one: RankClass) -> Calls:
    """Return the collectives of a plan in the form of `Observed.calls`, for a comparison."""
    found: Calls = Counter()
    for call in (call for call in one.collectives if call.op != "receive"):
        found[call.op, call.bytes, call.ranks] += call.count
    return found


def _peak(engine: Engine, step: Callable[[], Any]) -> int:
    """Bytes at the fullest moment of a step: what is held before it, and the most that the allocator gives beyond."""
    held = engine.memory().held.device + sum(buffer.nbytes for buffer in engine.model.buffers()) + _turns(engine)
    if engine.context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(engine.context.device)
        step()
        return int(torch.cuda.max_memory_allocated(engine.context.device))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    now = most = 0
    for size in _allocations(profiled):
        now += size
        most = max(most, now)
    return held + most


def _turns(engine: Engine) -> int:
    """Bytes that buckets without memory of their own take turns in."""
    taken = [
        buffer.flat.untyped_storage()
        for bucket in engine._sync.synchroniser.layout
        if not bucket.keeps_gradients
        for buffer in bucket.buffers
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in taken}.values())


def _allocations(profiled: Any) -> Iterator[int]:
    """What the host's allocator gave (and took back: negative), in the order of time."""
    found, waiting = [], list(profiled.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return (size for _, size in sorted(found, key=lambda each: each[0]))

"""The only file that uses private names of torch, and that handles differences between torch versions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store, _resolve_process_group
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""The timeout of collectives, unless `launch(timeout=)` sets another."""

START_UP_TIMEOUT = timedelta(minutes=2)
"""The timeout at start-up, when all ranks have joined and none has long work to do."""

COMPILES_COLLECTIVES = torch.__version__ >= "2.13"  # a TorchVersion, which compares numbers
"""Whether torch.compile keeps the backward of our autograd functions with collectives. torch 2.11 drops their all-reduces."""

all_gather_flat: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""`all_gather_flat(received, own, group=..., async_op=...)`: the tensors of all ranks, concatenated in one flat tensor."""

reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""`reduce_scatter_flat(shard, full, group=..., async_op=...)`: this rank's shard of the sum of all ranks' flat tensors."""


def gather_rows(own: Tensor, group: Any = None) -> Tensor:
    """The tensors of all ranks, of equal shape, as rows of one tensor. Collective over the group."""
    rows = own.new_empty((dist.get_world_size(group), *own.shape))
    all_gather_flat(rows.view(-1), own.view(-1), group=group)
    return rows


hide_from_dispatch_modes: Any = _disable_current_modes
"""`with hide_from_dispatch_modes():` hides operations from dispatch modes. Selective checkpointing needs this for operations that are not
repeated when it recomputes a layer."""


def is_traced() -> bool:
    """Whether torch is tracing a graph."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def fake_mode() -> Any:
    """A context manager (FakeTensorMode) in which new tensors have shapes but no memory.

    Operations may mix fake and real tensors, also after the block.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def default_store() -> Any:
    """The key-value store of the world."""
    return distributed_c10d._get_default_store()


class _MeetingStore(Store):
    """A store through which the n ranks of a new gloo group exchange addresses with about n instead of n * n reads.

    gloo makes each rank write its address under its number and read the addresses of all ranks. With this store, rank 0 of the
    group reads them all and writes them under one key, which each other rank reads. Other keys are passed to the real store.
    """

    def __init__(self, store: Any, size: int) -> None:
        super().__init__()
        self._store, self._size = store, size
        self._own: dict[str, int] = {}
        self._tables: dict[str, list[bytes]] = {}

    def set(self, key: str, value: Any) -> None:
        """Set a value. A key that ends with a number is this rank's address."""
        self._store.set(key, value)
        base, _, number = key.rpartition("/")
        if number.isdigit() and int(number) < self._size:
            self._own[base] = int(number)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """Wait until the keys exist; for addresses of a group, until the addresses of all ranks exist."""
        for key in keys:
            base, number = self._address(key)
            if number is None:
                self._store.wait([key], *timeout)
            elif base not in self._tables:
                self._tables[base] = self._read(base, *timeout)

    def get(self, key: str) -> bytes:
        """The value of a key."""
        base, number = self._address(key)
        if number is not None and base in self._tables:
            return self._tables[base][number]
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._store.check(keys))

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return bool(self._store.delete_key(key))

    def forget(self) -> None:
        """Free the addresses after the group is created."""
        self._tables.clear()

    def _address(self, key: str) -> tuple[str, int | None]:
        """Split a key: (the key without its number, the number). The number is None unless the key is the address of a rank."""
        base, _, number = key.rpartition("/")
        return base, int(number) if base in self._own and number.isdigit() else None

    def _read(self, base: str, *timeout: Any) -> list[bytes]:
        """The addresses of all ranks. Rank 0 of the group collects and publishes them; the other ranks read them."""
        table = f"{base}/all"
        if self._own[base] == 0:
            keys = [f"{base}/{number}" for number in range(self._size)]
            self._store.wait(keys, *timeout)
            found = [bytes(value) for value in self._store.multi_get(keys)]
            self._store.set(table, json.dumps([value.hex() for value in found]))
            return found
        self._store.wait([table], *timeout)
        return [bytes.fromhex(value) for value in json.loads(self._store.get(table))]


_met: list[_MeetingStore] = []
"""Keeps the stores alive until the world is left: torch's groups refer to their store but do not own a Python object."""


def forget_meeting_stores() -> None:
    """Close the connections to the store of all `meeting_store`s. To be called after all groups are destroyed."""
    _met.clear()


def meeting_store(store: Any, size: int) -> Any:
    """Wrap `store` for the creation of a gloo group.

    The ranks then read about `size` keys in total, not `size` squared.
    """
    _met.append(_MeetingStore(store, size))
    return _met[-1]


@contextmanager
def groups_meet(size: int, backend: str | None = None) -> Iterator[None]:
    """Inside the block, let torch connect gloo through a `meeting_store`.

    The block must create one process group of `size` ranks.

    Has no effect for NCCL: its threads use the store of their group all the time, and would have to take the GIL for a Python
    store.
    """
    group: Any = dist.group.WORLD
    groups: Any = distributed_c10d._world.pg_map
    before = groups.get(group)
    if before is None or (backend or before[0]) != "gloo":
        yield
        return
    store = meeting_store(before[1], size)
    groups[group] = (before[0], store)
    try:
        yield
    finally:
        store.forget()
        if group in groups:
            groups[group] = before


def join_by(store: Any, backend: str, rank: int, world_size: int, timeout: timedelta) -> None:
    """Call `init_process_group` with this store; gloo connects through a `meeting_store`."""
    is_gloo = backend == "gloo"
    given = meeting_store(store, world_size) if is_gloo else store
    dist.init_process_group(backend, store=given, rank=rank, world_size=world_size, timeout=timeout)
    if is_gloo:  # after the connection, torch gets the plain store
        given.forget()
        groups: Any = distributed_c10d._world.pg_map
        groups[dist.group.WORLD] = (groups[dist.group.WORLD][0], PrefixStore("world", store))


@contextmanager
def apart_from_world() -> Iterator[None]:
    """Inside the block, hide the current world from this thread, so that the thread can join another world."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    torch_dist: Any = dist
    before, rank = distributed_c10d._world, dist.get_rank() if dist.is_initialized() else -1
    level = torch_dist.get_debug_level()
    torch_dist.set_debug_level(torch_dist.DebugLevel.OFF)  # the level DETAIL wraps all groups in gloo groups
    world: Any = ThreadLocalWorld()
    world.group_count = 1 << 20  # torch numbers groups by it, and keeps one list of all numbers
    if not hasattr(world, "comms"):  # missing in torch 2.11, whose destroy_process_group reads it
        world.comms = []
    distributed_c10d._world = world
    try:
        yield
    finally:
        distributed_c10d._world = before
        torch_dist.set_debug_level(level)
        torch._C._distributed_c10d._set_global_rank(rank)


def start_fsdp(module: Any) -> None:
    """Run the lazy initialization of an FSDP2 module immediately, instead of before its first forward pass."""
    if hasattr(module, "_get_fsdp_state"):
        module._get_fsdp_state()._lazy_init()


def forget_failed_start() -> None:
    """Reset torch's count of process groups after a failed `init_process_group`.

    The next call derives the name of its group from the count.
    """
    if not dist.is_initialized():
        distributed_c10d._world.group_count = 0


def is_alive(group: Any) -> bool:
    """Whether the group exists and has not been destroyed."""
    return group in distributed_c10d._world.pg_map


def is_wanted(node: Any) -> bool:
    """Whether the backward pass that is running will execute this autograd node. (A pass for some of the leaves skips other
    nodes.)"""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised for a leaf among the inputs of `torch.autograd.grad`
        return True


def group_of_call(args: Sequence[Any]) -> dist.ProcessGroup:
    """The process group in the arguments of a dispatched collective: a group object, or the name of the group in the last
    argument.
    """
    for value in args:
        if isinstance(value, torch.ScriptObject) and str(value._type()).endswith(".ProcessGroup"):
            return dist.ProcessGroup.unbox(value)
    return _resolve_process_group(args[-1])


_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    **{name: name for name in ("broadcast", "reduce", "reduce_scatter", "gather", "scatter", "barrier")},
}
"""Names of torch.distributed for the methods of a process group."""


@contextmanager
def noting_collectives(note: Callable[[str, dist.ProcessGroup, Any], None]) -> Iterator[None]:
    """Call `note` with (name, group, first argument) before every collective that Python code issues inside the block.

    A dispatch mode could do the same, but slows each collective down by 0.1 ms.
    """
    group_class: Any = dist.ProcessGroup
    before = {name: vars(group_class)[name] for name in _COLLECTIVES if name in vars(group_class)}

    def noted(name: str, method: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            note(_COLLECTIVES[name], group, args[0] if args else None)
            return method(group, *args, **kwargs)

        return call

    for name in before:
        setattr(group_class, name, noted(name, getattr(group_class, name)))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(group_class, name, method)


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta:
    """The timeout of collectives of the group (by default the world); `DEFAULT_TIMEOUT` if its backend has no options."""
    return next((backend.options._timeout for backend in _backends(group)), DEFAULT_TIMEOUT)


def _backends(group: dist.ProcessGroup | None = None) -> list[Any]:
    """The backends with options of the group (by default the world), without their debug wrappers."""
    group = group or dist.group.WORLD
    found = [group._get_backend(device) for device in getattr(group, "_device_types", ()) if group is not None]
    found = [getattr(backend, "wrapped_pg", backend) for backend in found]
    return [backend for backend in found if getattr(backend, "options", None) is not None]


@contextmanager
def waiting_at_most(limit: timedelta) -> Iterator[None]:
    """Inside the block, limit the timeout of collectives over the world to `limit`."""
    before = [(backend, backend.options._timeout) for backend in _backends()]
    for backend, longest in before:
        backend._set_default_timeout(min(limit, longest))
    try:
        yield
    finally:
        for backend, longest in before:
            backend._set_default_timeout(longest)


def gloo_all_gather(gloo: Any, received: Tensor, own: Tensor) -> Any:
    """All-gather flat tensors with a `ProcessGroupGloo` that is not registered with torch.distributed.

    Returns the `Work` object.
    """
    return gloo._allgather_base(received, own)


def exchange_tensors(first: Any, second: Any) -> None:
    """Swap the contents of two tensors of the same class, but not their Python attributes.

    torch.utils.swap_tensors also swaps the attributes, and raises for tensors with weak references, as nn.LSTM has.
    """
    torch._C._swap_tensor_impl(first, second)
    if hasattr(first, "_local_tensor"):  # DTensors
        first._local_tensor, second._local_tensor = second._local_tensor, first._local_tensor
        first._spec, second._spec = second._spec, first._spec


def dtensor_like(dtensor: Any, local: Tensor) -> Tensor:
    """A DTensor with the placements of `dtensor` and this local tensor, on the local tensor's device.

    DTensor.from_local would move the tensor to the device of the mesh, for example from the CPU to which FSDP2 offloads.
    """
    from torch.distributed.tensor import DTensor

    return DTensor(local, dtensor._spec, requires_grad=False)


@torch.no_grad()
def refresh_shards(module: Any) -> None:
    """After the memory of parameters was replaced, make their FSDP2 module use the new memory, as FSDP2's own `_apply` does."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()


def leave_out_mixed_precision(model: torch.nn.Module) -> bool:
    """Turn off mixed precision in FSDP2 modules that have not run yet; returns whether any of them used it."""
    found, modules = False, cast(Any, model).modules()
    for module in modules:
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        policy = getattr(state, "_mp_policy", None)  # read by the parameters at the first forward pass
        for key in ("param_dtype", "reduce_dtype", "output_dtype") if policy is not None else ():
            found = found or getattr(policy, key) is not None
            object.__setattr__(policy, key, None)
    return found


BACKWARD = (torch.Tensor.backward, torch.autograd.backward)
"""The functions that start a backward pass, as a torch function mode sees them."""


def backward_inside(mode: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Run a backward pass with the mode enabled, for layers that the pass recomputes.

    Called from the mode's `__torch_function__`, during which torch disables the mode.
    """
    home: Any = torch.autograd
    own = home._engine_run_backward

    def run(*given: Any, **options: Any) -> Any:
        with mode:
            return own(*given, **options)

    home._engine_run_backward = run
    try:
        return function(*args, **kwargs)
    finally:
        home._engine_run_backward = own

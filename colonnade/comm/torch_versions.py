"""Names that torch keeps private, and what differs between its versions: here and nowhere else."""

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
"""How long a rank waits for the others, unless `launch(timeout=)` says otherwise."""

START_UP_TIMEOUT = timedelta(minutes=2)
"""How long at most where all ranks are known to be there, and nobody has anything long to do."""

COMPILES_COLLECTIVES = torch.__version__ >= "2.13"  # a TorchVersion, which compares numbers
"""Whether torch.compile keeps the backward pass of our functions around collectives. torch 2.11 leaves its sums out."""

all_gather_flat: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""`all_gather_flat(received, own, group=..., async_op=...)`: the parts of all ranks, one after another in one tensor."""

reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""`reduce_scatter_flat(part, whole, group=..., async_op=...)`: this rank's part of the sum of all ranks' tensors."""


def gather_rows(mine: Tensor, group: Any = None) -> Tensor:
    """Everybody's tensor, of one shape on all ranks, as rows of one tensor. Collective over the group."""
    everyone = mine.new_empty((dist.get_world_size(group), *mine.shape))
    all_gather_flat(everyone.view(-1), mine.view(-1), group=group)
    return everyone


unwatched: Any = _disable_current_modes
"""`with unwatched():` no mode of torch's dispatcher sees what runs inside: selective checkpointing wants the same ops again."""


def is_traced() -> bool:
    """Whether torch makes a graph of what runs here."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def fake_mode() -> Any:
    """Inside it tensors have shapes and no memory; outside, operations on such tensors and others give such tensors."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def default_store() -> Any:
    """The key-value store of the world."""
    return distributed_c10d._get_default_store()


class _MeetingStore(Store):
    """A store in which the ranks of a new gloo group find each other by reading as many keys as there are ranks.

    Gloo lets each rank leave its address under its number, and read those of all: n * n keys of one store. Here rank 0
    of the group reads them, and leaves one key with all of them, which each other rank reads. Any other key is the
    store's own.
    """

    def __init__(self, store: Any, size: int) -> None:
        super().__init__()
        self._store, self._size = store, size
        self._own: dict[str, int] = {}
        self._tables: dict[str, list[bytes]] = {}

    def set(self, key: str, value: Any) -> None:
        """Leave a value; one under a number is this rank's address."""
        self._store.set(key, value)
        base, _, number = key.rpartition("/")
        if number.isdigit() and int(number) < self._size:
            self._own[base] = int(number)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """Wait until the keys are there; where they are addresses of a group, until all are."""
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
        """Add to a number, and return it."""
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._store.check(keys))

    def delete_key(self, key: str) -> bool:
        """Take a key away."""
        return bool(self._store.delete_key(key))

    def forget(self) -> None:
        """The group is made: no address is asked for again."""
        self._tables.clear()

    def _address(self, key: str) -> tuple[str, int | None]:
        base, _, number = key.rpartition("/")
        return base, int(number) if base in self._own and number.isdigit() else None

    def _read(self, base: str, *timeout: Any) -> list[bytes]:
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
"""Torch's groups refer to their store, and do not keep a Python object alive: this list does, until the world is left."""


def forget_meeting_stores() -> None:
    """After all groups are destroyed: close the connections to the store that the groups were made with."""
    _met.clear()


def meeting_store(store: Any, size: int) -> Any:
    """A store by which a new gloo group of so many ranks connects; reads as many keys as there are ranks, not the square."""
    _met.append(_MeetingStore(store, size))
    return _met[-1]


@contextmanager
def groups_meet(size: int, backend: str | None = None) -> Iterator[None]:
    """In the block, torch creates one group of so many ranks, whose gloo connects by a `meeting_store`.

    Not with NCCL, whose threads use their group's store for as long as it lives, and would wait for Python.
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
    """`init_process_group` with this store; gloo connects by a `meeting_store`."""
    meets = backend == "gloo"
    given = meeting_store(store, world_size) if meets else store
    dist.init_process_group(backend, store=given, rank=rank, world_size=world_size, timeout=timeout)
    if meets:  # what comes next needs no such store
        given.forget()
        groups: Any = distributed_c10d._world.pg_map
        groups[dist.group.WORLD] = (groups[dist.group.WORLD][0], PrefixStore("world", store))


@contextmanager
def apart_from_world() -> Iterator[None]:
    """Inside, this thread has joined no world, whatever it has joined outside, and may join another."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    torch_dist: Any = dist
    before, rank = distributed_c10d._world, dist.get_rank() if dist.is_initialized() else -1
    level = torch_dist.get_debug_level()
    torch_dist.set_debug_level(torch_dist.DebugLevel.OFF)  # it puts groups of gloo around all others
    world: Any = ThreadLocalWorld()
    world.group_count = 1 << 20  # torch numbers groups by it, and keeps one list of all numbers
    if not hasattr(world, "comms"):  # in torch 2.11, whose destroy_process_group reads it all the same
        world.comms = []
    distributed_c10d._world = world
    try:
        yield
    finally:
        distributed_c10d._world = before
        torch_dist.set_debug_level(level)
        torch._C._distributed_c10d._set_global_rank(rank)


def start_fsdp(module: Any) -> None:
    """Let FSDP2 do now what it does before its first forward pass: find all modules that it has wrapped."""
    if hasattr(module, "_get_fsdp_state"):
        module._get_fsdp_state()._lazy_init()


def forget_failed_start() -> None:
    """After an `init_process_group` that failed: the next one names its group as it would have in a new process."""
    if not dist.is_initialized():
        distributed_c10d._world.group_count = 0


def is_alive(group: Any) -> bool:
    """Whether the group exists and was not destroyed."""
    return group in distributed_c10d._world.pg_map


def is_wanted(node: Any) -> bool:
    """In a backward pass: whether it goes on to this node of the graph. A pass may be for some of the leaves only."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf that `torch.autograd.grad` asks for
        return True


def group_of_call(args: Sequence[Any]) -> dist.ProcessGroup:
    """The group among the arguments of a collective as torch's dispatcher sees it: as an object, or (last) by name."""
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
"""Methods of a process group, by what torch.distributed calls them."""


@contextmanager
def noting_collectives(note: Callable[[str, dist.ProcessGroup, Any], None]) -> Iterator[None]:
    """Within the block, (name, group, first argument) of every collective that Python makes, before it is made.

    A dispatch mode sees them too, but makes each slower by a tenth of a millisecond.
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
    """How long collectives of the group (the world by default) wait; torch's default where it does not tell."""
    return next((backend.options._timeout for backend in _backends(group)), DEFAULT_TIMEOUT)


def _backends(group: dist.ProcessGroup | None = None) -> list[Any]:
    """The backends of the group (the world by default) that tell their options, out of their wrappers for debugging."""
    group = group or dist.group.WORLD
    found = [group._get_backend(device) for device in getattr(group, "_device_types", ()) if group is not None]
    found = [getattr(backend, "wrapped_pg", backend) for backend in found]
    return [backend for backend in found if getattr(backend, "options", None) is not None]


@contextmanager
def waiting_at_most(limit: timedelta) -> Iterator[None]:
    """In the block, collectives of the world wait no longer than `limit`."""
    before = [(backend, backend.options._timeout) for backend in _backends()]
    for backend, longest in before:
        backend._set_default_timeout(min(limit, longest))
    try:
        yield
    finally:
        for backend, longest in before:
            backend._set_default_timeout(longest)


def gloo_all_gather(gloo: Any, received: Tensor, own: Tensor) -> Any:
    """`all_gather_flat` by a bare `ProcessGroupGloo` that is no group of torch.distributed; returns the work."""
    return gloo._allgather_base(received, own)


def exchange_tensors(first: Any, second: Any) -> None:
    """Make two tensors of one class each other's, all but their Python attributes.

    torch.utils.swap_tensors takes the attributes along, and refuses tensors with weak references, as an nn.LSTM has.
    """
    torch._C._swap_tensor_impl(first, second)
    if hasattr(first, "_local_tensor"):  # DTensors
        first._local_tensor, second._local_tensor = second._local_tensor, first._local_tensor
        first._spec, second._spec = second._spec, first._spec


def dtensor_like(dtensor: Any, local: Tensor) -> Tensor:
    """A DTensor that lies as `dtensor` does, with this local part, wherever that is.

    DTensor.from_local would move it to the mesh's device, away from the CPU that FSDP2 offloads to.
    """
    from torch.distributed.tensor import DTensor

    return DTensor(local, dtensor._spec, requires_grad=False)


@torch.no_grad()
def refresh_shards(module: Any) -> None:
    """Let a module of FSDP2 take notice of new memory of its parameters, as its own `_apply` does."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()


def leave_out_mixed_precision(model: torch.nn.Module) -> bool:
    """Let modules that FSDP2 has wrapped, and not run yet, compute in the dtype of their weights; whether any did not."""
    found, modules = False, cast(Any, model).modules()
    for module in modules:
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        policy = getattr(state, "_mp_policy", None)  # the object that its parameters read when they first run
        for key in ("param_dtype", "reduce_dtype", "output_dtype") if policy is not None else ():
            found = found or getattr(policy, key) is not None
            object.__setattr__(policy, key, None)
    return found


BACKWARD = (torch.Tensor.backward, torch.autograd.backward)
"""The functions that a torch function mode is asked about before a backward pass."""


def backward_inside(mode: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """A backward pass with the mode on. Torch turns it off to ask it, and modules may be computed again in the pass."""
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

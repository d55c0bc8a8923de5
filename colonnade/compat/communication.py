"""`colossalai.communication`: point-to-point calls for custom pipeline schedules, and collectives over a mode.

`scatter_gather_tensors` is ignored: full tensors are sent.
"""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.groups import ProcessGroups
from colonnade.comm.messages import share_texts
from colonnade.context.layout_builder import NEEDS_WORLD, Build, read_groups
from colonnade.context.parallel_context import LaunchHook, ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import global_context as gpc
from colonnade.errors import ConfigError, LayoutError
from colonnade.parallel import collectives

_SUM = dist.ReduceOp.SUM
_PIPELINE = ParallelMode.PIPELINE
Values = Tensor | list[Tensor]
Shapes = Any
"""A shape, or a list of shapes."""


def recv_forward(
    input_tensor_shape: Shapes,
    prev_rank: int | None = None,
    dtype: torch.dtype = torch.float,
    scatter_gather_tensors: bool = False,
) -> Values | None:
    """Receive the activation from the previous stage and return it; None on the first stage."""
    return _exchange(prev=prev_rank, from_prev=input_tensor_shape, dtype=dtype)[0]


def recv_backward(
    output_grad_shape: Shapes,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float,
    scatter_gather_tensors: bool = False,
) -> Values | None:
    """Receive the gradient from the next stage and return it; None on the last stage."""
    return _exchange(next_=next_rank, from_next=output_grad_shape, dtype=dtype)[1]


def send_forward(output_tensor: Values, next_rank: int | None = None, scatter_gather_tensors: bool = False) -> None:
    _exchange(next_=next_rank, to_next=output_tensor)


def send_backward(
    input_tensor_grad: Values, prev_rank: int | None = None, scatter_gather_tensors: bool = False
) -> None:
    _exchange(prev=prev_rank, to_prev=input_tensor_grad)


def send_forward_recv_backward(
    output_tensor: Values,
    output_grad_shape: Shapes,
    recv_next: bool = True,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float,
    scatter_gather_tensors: bool = False,
) -> Values | None:
    """Send an activation to the next stage and receive its gradient at the same time; None on the last stage."""
    shape = output_grad_shape if recv_next else None
    return _exchange(next_=next_rank, to_next=output_tensor, from_next=shape, dtype=dtype)[1]


def send_backward_recv_forward(
    input_tensor_grad: Values,
    input_tensor_shape: Shapes,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    dtype: torch.dtype = torch.float,
    scatter_gather_tensors: bool = False,
) -> Values | None:
    """Send a gradient to the previous stage and receive an activation at the same time; None on the first stage."""
    shape = input_tensor_shape if recv_prev else None
    return _exchange(prev=prev_rank, to_prev=input_tensor_grad, from_prev=shape, dtype=dtype)[0]


def send_forward_recv_forward(
    output_tensor: Values,
    input_tensor_shape: Shapes,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float,
    scatter_gather_tensors: bool = False,
) -> Values | None:
    """Send to the next rank of the pipeline ring and receive from the previous one."""
    shape = input_tensor_shape if recv_prev else None
    return _exchange(prev_rank, next_rank, to_next=output_tensor, from_prev=shape, dtype=dtype, ring=True)[0]


def send_backward_recv_backward(
    input_tensor_grad: Values,
    output_grad_shape: Shapes,
    recv_next: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float,
    scatter_gather_tensors: bool = False,
) -> Values | None:
    """Send to the previous rank of the pipeline ring and receive from the next one."""
    shape = output_grad_shape if recv_next else None
    return _exchange(prev_rank, next_rank, to_prev=input_tensor_grad, from_next=shape, dtype=dtype, ring=True)[1]


def _exchange(
    prev: int | None = None,
    next_: int | None = None,
    *,
    to_next: Values | None = None,
    to_prev: Values | None = None,
    from_prev: Shapes = None,
    from_next: Shapes = None,
    dtype: torch.dtype = torch.float,
    ring: bool = False,
) -> tuple[Values | None, Values | None]:
    """Send and receive at the same time.

    The first and the last stage exchange nothing with each other, unless `ring` is set.
    """
    if not ring and gpc.is_pipeline_first_stage():
        to_prev = from_prev = None
    if not ring and gpc.is_pipeline_last_stage():
        to_next = from_next = None
    before = gpc.get_prev_global_rank(_PIPELINE) if prev is None else prev
    behind = gpc.get_next_global_rank(_PIPELINE) if next_ is None else next_
    received = [None if shape is None else _buffers(shape, dtype) for shape in (from_prev, from_next)]
    transfers = (
        (dist.isend, to_prev, before),
        (dist.irecv, received[0], before),
        (dist.irecv, received[1], behind),
        (dist.isend, to_next, behind),
    )
    calls = [
        dist.P2POp(call, tensor, peer, gpc.get_group(_PIPELINE))
        for call, values, peer in transfers
        for tensor in _tensors(values, call is dist.isend)
    ]
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
    for tensor in (*_tensors(received[0], False), *_tensors(received[1], False)):
        tensor.requires_grad_()
    return received[0], received[1]


def _buffers(shapes: Shapes, dtype: torch.dtype) -> Values:
    if all(isinstance(size, int) for size in shapes):
        return torch.empty(tuple(shapes), dtype=dtype, device=gpc.device)
    return [torch.empty(tuple(shape), dtype=dtype, device=gpc.device) for shape in shapes]


def _tensors(values: Values | None, sent: bool) -> list[Tensor]:
    if values is None:
        return []
    found = [values] if isinstance(values, Tensor) else list(values)
    return [tensor.detach().contiguous() for tensor in found] if sent else found


def send_obj_meta(obj: Values, need_meta: bool = True, next_rank: int | None = None) -> bool:
    """Send the shapes of the following tensors to the next stage. Returns False, the next `need_meta` of the caller."""
    if need_meta:
        shapes = tuple(obj.shape) if isinstance(obj, Tensor) else [tuple(tensor.shape) for tensor in obj]
        peer = gpc.get_next_global_rank(_PIPELINE) if next_rank is None else next_rank
        text = json.dumps([isinstance(obj, Tensor), shapes]).encode()
        device = _message_device()
        for message in (
            torch.tensor([len(text)], device=device),
            torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device),
        ):
            dist.send(message, peer, group=gpc.get_group(_PIPELINE))
    return False


def recv_obj_meta(obj_shape: Shapes, prev_rank: int | None = None) -> Shapes:
    """Return `obj_shape` if it is given; otherwise receive the shapes from the previous stage."""
    if obj_shape is not None:
        return obj_shape
    peer = gpc.get_prev_global_rank(_PIPELINE) if prev_rank is None else prev_rank
    size = torch.zeros(1, dtype=torch.int64, device=_message_device())
    dist.recv(size, peer, group=gpc.get_group(_PIPELINE))
    text = torch.empty(int(size), dtype=torch.uint8, device=size.device)
    dist.recv(text, peer, group=gpc.get_group(_PIPELINE))
    is_one, shapes = json.loads(bytes(text.tolist()))
    return torch.Size(shapes) if is_one else [torch.Size(shape) for shape in shapes]


def _message_device() -> torch.device:
    """The device of messages over the pipeline: this rank's device with NCCL, else the CPU."""
    return gpc.device if dist.get_backend(gpc.get_group(_PIPELINE)) == "nccl" else torch.device("cpu")


send_tensor_meta, recv_tensor_meta = send_obj_meta, recv_obj_meta


def all_reduce(tensor: Tensor, parallel_mode: ParallelMode, op: Any = _SUM, async_op: bool = False) -> Any:
    """All-reduce in place over the ranks of the mode. Returns the tensor or, with `async_op`, (tensor, work)."""
    work = dist.all_reduce(tensor, op, group=gpc.get_group(parallel_mode), async_op=async_op)
    return (tensor, work) if async_op else tensor


def broadcast(tensor: Tensor, src: int, parallel_mode: ParallelMode, async_op: bool = False) -> Any:
    """Broadcast in place from the global rank `src`. Returns the tensor or, with `async_op`, (tensor, work)."""
    work = dist.broadcast(tensor, src, group=gpc.get_group(parallel_mode), async_op=async_op)
    return (tensor, work) if async_op else tensor


def all_gather(tensor: Tensor, dim: int, parallel_mode: ParallelMode, async_op: bool = False) -> Tensor:
    """Return the tensors of all ranks of the mode, concatenated along `dim`."""
    _refuse_async(async_op)
    return collectives.all_gather(tensor, parallel_mode, dim)


def reduce_scatter(
    tensor: Tensor, dim: int, parallel_mode: ParallelMode, op: Any = _SUM, async_op: bool = False
) -> Tensor:
    """Return this rank's slice along `dim` of the sum over the ranks of the mode."""
    _refuse_async(async_op)
    if op != _SUM:
        raise ConfigError(
            f"reduce_scatter supports only sums, not {op}. Use all_reduce with {op}, and take the slice of this rank."
        )
    return collectives.reduce_scatter(tensor, parallel_mode, dim)


def ring_forward(tensor_send_next: Tensor, parallel_mode: ParallelMode) -> Tensor:
    """Send a tensor to the next rank of the mode, and return the tensor of the previous rank."""
    return collectives.ring(tensor_send_next, parallel_mode)


def _refuse_async(async_op: bool) -> None:
    if async_op:
        raise ConfigError(
            "this collective does not support async_op=True. Leave async_op out, or use torch.distributed."
        )


# --------------------------------------------------------------------------------------------------
# Initializers that create their groups themselves, and a gloo group for the ranks of every group.
# --------------------------------------------------------------------------------------------------


_cpu_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def get_cpu_group(context: ParallelContext, mode: ParallelMode) -> dist.ProcessGroup:
    """Return the gloo group with the ranks of `context.get_group(mode)`: that group itself if its backend is gloo."""
    group = context.get_group(mode)
    return _cpu_groups.get(group, group)


class AncestralGroups(LaunchHook):
    """Supports Colossal-AI's initializers, whose `init_dist_group()` creates the groups itself.

    `init_dist_group()` returns (local_rank, size, group, cpu_group, ranks, mode).
    """

    def adopt_groups(self, build: Build, groups: ProcessGroups) -> bool:
        waiting, build.waiting = build.waiting, []
        for initializer, source, mode, returned in waiting:
            if returned is NEEDS_WORLD:
                returned = (getattr(initializer, "init_dist_group", None) or initializer.init_parallel_groups)()
            items = returned if isinstance(returned, list) else [returned]
            if not items or not all(isinstance(item, tuple) and len(item) == 6 for item in items):
                build.add(read_groups(returned, initializer, source, mode), source)
                continue
            for local_rank, size, group, cpu_group, ranks, group_mode in items:
                if len(ranks) != size or not 0 <= local_rank < size:
                    raise LayoutError(
                        f"{source} returned local_rank={local_rank}, size={size} and ranks={ranks}, but these values "
                        "do not agree. Return the values in the order (local_rank, group_world_size, process_group, "
                        "cpu_group, ranks_in_group, mode)."
                    )
                if dist.get_rank() not in ranks:
                    raise LayoutError(
                        f"{source} returned the group {ranks} on rank {dist.get_rank()}, but the group does not "
                        f"contain rank {dist.get_rank()}. Return the group of the calling rank."
                    )
                # Each rank knows its own group only, but the layout needs the groups of all ranks.
                key = ParallelMode(group_mode)
                texts = share_texts(f"groups/{key.value}", json.dumps(list(ranks)), range(dist.get_world_size()))
                lists = sorted({tuple(json.loads(text)) for text in texts.values()})
                build.add({key: [list(other) for other in lists]}, source)
                groups.adopt(tuple(ranks), group, lists)
                if cpu_group is not None and cpu_group is not group:
                    _cpu_groups[group] = cpu_group
        return bool(waiting)

    def after_groups(self, context: ParallelContext, groups: ProcessGroups) -> None:
        if dist.get_backend() != "gloo":
            for ranks in context.layout.rank_sets():
                cpu_group = groups.create(ranks, "gloo", alone=False)
                if context.get_global_rank() in ranks:
                    _cpu_groups.setdefault(groups.group(ranks), cpu_group)

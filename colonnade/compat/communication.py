"""`colossalai.communication`: what a schedule of one's own sends between stages, and collectives over a mode.

Whole tensors are sent, whatever `scatter_gather_tensors` says.
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
    """What the stage before sends; None on the first."""
    return _exchange(prev=prev_rank, from_prev=input_tensor_shape, dtype=dtype)[0]


def recv_backward(
    output_grad_shape: Shapes,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float,
    scatter_gather_tensors: bool = False,
) -> Values | None:
    """The gradient that the stage behind sends; None on the last."""
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
    """Both at once, with the stage behind; None on the last."""
    wanted = output_grad_shape if recv_next else None
    return _exchange(next_=next_rank, to_next=output_tensor, from_next=wanted, dtype=dtype)[1]


def send_backward_recv_forward(
    input_tensor_grad: Values,
    input_tensor_shape: Shapes,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    dtype: torch.dtype = torch.float,
    scatter_gather_tensors: bool = False,
) -> Values | None:
    """Both at once, with the stage before; None on the first."""
    wanted = input_tensor_shape if recv_prev else None
    return _exchange(prev=prev_rank, to_prev=input_tensor_grad, from_prev=wanted, dtype=dtype)[0]


def send_forward_recv_forward(
    output_tensor: Values,
    input_tensor_shape: Shapes,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float,
    scatter_gather_tensors: bool = False,
) -> Values | None:
    """To the rank behind and from the one before, round the ring."""
    wanted = input_tensor_shape if recv_prev else None
    return _exchange(prev_rank, next_rank, to_next=output_tensor, from_prev=wanted, dtype=dtype, ring=True)[0]


def send_backward_recv_backward(
    input_tensor_grad: Values,
    output_grad_shape: Shapes,
    recv_next: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float,
    scatter_gather_tensors: bool = False,
) -> Values | None:
    """To the rank before and from the one behind, round the ring."""
    wanted = output_grad_shape if recv_next else None
    return _exchange(prev_rank, next_rank, to_prev=input_tensor_grad, from_next=wanted, dtype=dtype, ring=True)[1]


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
    """Send and receive at once; the ends of the pipeline have nobody before or behind them, unless it is a ring."""
    if not ring and gpc.is_pipeline_first_stage():
        to_prev = from_prev = None
    if not ring and gpc.is_pipeline_last_stage():
        to_next = from_next = None
    before = gpc.get_prev_global_rank(_PIPELINE) if prev is None else prev
    behind = gpc.get_next_global_rank(_PIPELINE) if next_ is None else next_
    arrives = [None if shape is None else _buffers(shape, dtype) for shape in (from_prev, from_next)]
    ways = ((dist.isend, to_prev, before), (dist.irecv, arrives[0], before), (dist.irecv, arrives[1], behind))
    calls = [
        dist.P2POp(call, tensor, peer, gpc.get_group(_PIPELINE))
        for call, values, peer in (*ways, (dist.isend, to_next, behind))
        for tensor in _tensors(values, call is dist.isend)
    ]
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
    for tensor in (*_tensors(arrives[0], False), *_tensors(arrives[1], False)):
        tensor.requires_grad_()
    return arrives[0], arrives[1]


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
    """Tell the stage behind the shapes that follow; returns False, so that they are told once."""
    if need_meta:
        shapes = tuple(obj.shape) if isinstance(obj, Tensor) else [tuple(tensor.shape) for tensor in obj]
        peer = gpc.get_next_global_rank(_PIPELINE) if next_rank is None else next_rank
        text = json.dumps([isinstance(obj, Tensor), shapes]).encode()
        where = _message_device()
        for told in (
            torch.tensor([len(text)], device=where),
            torch.frombuffer(bytearray(text), dtype=torch.uint8).to(where),
        ):
            dist.send(told, peer, group=gpc.get_group(_PIPELINE))
    return False


def recv_obj_meta(obj_shape: Shapes, prev_rank: int | None = None) -> Shapes:
    """The shapes that the stage before sends, unless they are known."""
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
    """Where what is told over the pipeline must lie: on the device with NCCL, else on the CPU."""
    return gpc.device if dist.get_backend(gpc.get_group(_PIPELINE)) == "nccl" else torch.device("cpu")


send_tensor_meta, recv_tensor_meta = send_obj_meta, recv_obj_meta


def all_reduce(tensor: Tensor, parallel_mode: ParallelMode, op: Any = _SUM, async_op: bool = False) -> Any:
    """In place, over the ranks of the mode; (tensor, work) with `async_op`."""
    work = dist.all_reduce(tensor, op, group=gpc.get_group(parallel_mode), async_op=async_op)
    return (tensor, work) if async_op else tensor


def broadcast(tensor: Tensor, src: int, parallel_mode: ParallelMode, async_op: bool = False) -> Any:
    """In place, from the global rank `src`; (tensor, work) with `async_op`."""
    work = dist.broadcast(tensor, src, group=gpc.get_group(parallel_mode), async_op=async_op)
    return (tensor, work) if async_op else tensor


def all_gather(tensor: Tensor, dim: int, parallel_mode: ParallelMode, async_op: bool = False) -> Tensor:
    """Everybody's tensor, joined along `dim`."""
    _refuse_async(async_op)
    return collectives.all_gather(tensor, parallel_mode, dim)


def reduce_scatter(
    tensor: Tensor, dim: int, parallel_mode: ParallelMode, op: Any = _SUM, async_op: bool = False
) -> Tensor:
    """This rank's part, along `dim`, of the sum of everybody's tensor."""
    _refuse_async(async_op)
    if op != _SUM:
        raise ConfigError(f"reduce_scatter sums; for {op} use all_reduce, and take this rank's part")
    return collectives.reduce_scatter(tensor, parallel_mode, dim)


def ring_forward(tensor_send_next: Tensor, parallel_mode: ParallelMode) -> Tensor:
    """What the rank before sends, while this one sends to the rank behind."""
    return collectives.ring(tensor_send_next, parallel_mode)


def _refuse_async(asked: bool) -> None:
    if asked:
        raise ConfigError("async_op=True: this one returns when it is done. Leave it out, or use torch.distributed.")


# --------------------------------------------------------------------------------------------------
# Initializers that create their groups themselves, and a gloo twin of every group.
# --------------------------------------------------------------------------------------------------


_twins: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def get_cpu_group(context: ParallelContext, mode: ParallelMode) -> dist.ProcessGroup:
    """The gloo twin of `context.get_group(mode)`; the same object where the backend already is gloo."""
    group = context.get_group(mode)
    return _twins.get(group, group)


class AncestralGroups(LaunchHook):
    """Runs `init_dist_group()` and its tuples (local_rank, size, group, cpu_group, ranks, mode)."""

    def adopt_groups(self, build: Build, groups: ProcessGroups) -> bool:
        waiting, build.waiting = build.waiting, []
        for initializer, source, mode, returned in waiting:
            if returned is NEEDS_WORLD:
                returned = (getattr(initializer, "init_dist_group", None) or initializer.init_parallel_groups)()
            made = returned if isinstance(returned, list) else [returned]
            if made and all(isinstance(item, tuple) and len(item) == 6 for item in made):
                for item in made:
                    _adopt(item, source, build, groups)
            else:
                build.add(read_groups(returned, initializer, source, mode), source)
        return bool(waiting)

    def after_groups(self, context: ParallelContext, groups: ProcessGroups) -> None:
        if dist.get_backend() != "gloo":
            for ranks in context.layout.rank_sets():
                twin = groups.create(ranks, "gloo", alone=False)
                if context.get_global_rank() in ranks:
                    _twins.setdefault(groups.group(ranks), twin)


def _adopt(made: tuple[Any, ...], source: str, build: Build, groups: ProcessGroups) -> None:
    """Use a group as this rank was given it; the layout learns the others from all ranks."""
    local_rank, size, group, cpu_group, ranks, mode = made
    if len(ranks) != size or not 0 <= local_rank < size:
        raise LayoutError(
            f"{source} returned local_rank={local_rank}, size={size} and ranks={ranks}, which disagree. The order is "
            f"(local_rank, group_world_size, process_group, cpu_group, ranks_in_group, mode)."
        )
    if dist.get_rank() not in ranks:
        raise LayoutError(f"{source} gave rank {dist.get_rank()} the group {ranks}, which it is not in")
    mode = ParallelMode(mode)
    texts = share_texts(f"groups/{mode.value}", json.dumps(list(ranks)), range(dist.get_world_size()))
    lists = sorted({tuple(json.loads(text)) for text in texts.values()})
    build.add({mode: [list(other) for other in lists]}, source)
    groups.adopt(tuple(ranks), group, lists)
    if cpu_group is not None and cpu_group is not group:
        _twins[group] = cpu_group

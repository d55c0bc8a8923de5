"""The gradient reductions of one rank in a plan: the code of `initialize` makes them for fake tensors."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.groups import GroupMemory, RankGroup
from colonnade.config.settings import ZeroSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.prepare import prepare_optimizer, prepare_sums
from colonnade.errors import ColonnadeError
from colonnade.gradients.bucket import LARGE_BYTES, Bucket, BucketStorage, in_starting_order, last_over_ranks
from colonnade.gradients.gather import send_slice
from colonnade.gradients.handler import PlannedGradientHandler, plan_sums
from colonnade.gradients.ledger import Ledger, match
from colonnade.gradients.sums import Sum, read_demands, with_groups
from colonnade.gradients.transport import CollectiveTransport, DeviceCollectiveTransport, LocalTransport, Transport
from colonnade.gradients.uneven import by_kind
from colonnade.optim.engine_optimizer import PlainOptimizer, state_dtypes
from colonnade.optim.flat_step import JOINED
from colonnade.parallel.placement import local_part
from colonnade.proof.planner.recorder import OperatorRecorder, PlannedCall

NOTE_BYTES = 16
"""Bytes of the message about its gradients that each rank of a group sends in every step, if the host waits for reductions.
"""


@dataclass(frozen=True)
class BucketCalls:
    """The collectives of one bucket, and whether they may start during backward (`early`)."""

    calls: tuple[PlannedCall, ...]
    early: bool
    numel: int
    every_pass: bool = False
    beside: int = 0
    """Bytes that are held in addition to the bucket while its collectives run."""


@dataclass(frozen=True)
class PendingGradients:
    """The large gradients of one bucket on the CPU, where they are held next to the bucket until it is full.

    `large` are the indices of these parameters in the module, `members` those of all parameters of the bucket; `nbytes`
    is the size of the large gradients.
    """

    large: frozenset[int]
    members: frozenset[int]
    nbytes: int


@dataclass(frozen=True)
class Pieces:
    """The allocations in bytes that hold parameters, gradients and optimizer state after the first step.

    `in_buckets`: `parameters` and `gradients` are those of buckets, which exist from the start. Without buckets, a flat step moves the
    parameters into `parameters` after the first backward pass, or leaves them where they are if there are none.
    """

    parameters: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    in_buckets: bool = False


@dataclass
class GradientPlan:
    """The gradient reductions and the memory of one rank. `rank` represents all ranks of its kind.

    `buckets` are in the order in which they start; `gathers` all-gather parameters (ZeRO).
    """

    ledger: Ledger
    rank: int = 0
    buckets: list[BucketCalls] = field(default_factory=list)
    gathers: list[PlannedCall] = field(default_factory=list)
    notes: list[PlannedCall] = field(default_factory=list)
    parameters: int = 0
    gradients: int = 0
    turns: int = 0
    largest: int = 0
    state: int = 0
    host: int = 0
    stepped: int = 0
    """Bytes that the optimizer's step reads and writes."""
    beside: int = 0
    """Temporary bytes of the last reduction and the gathers, after all passes."""
    stepping: int = 0
    """Temporary bytes of the optimizer's step."""
    loose: frozenset[int] = frozenset()
    """The indices of parameters whose gradients are in no bucket, so that autograd allocates them in each step."""
    loose_bytes: int = 0
    """The part of `gradients` that belongs to `loose`."""
    pieces: Pieces = Pieces()
    pending: tuple[PendingGradients, ...] = ()
    """By bucket, on the CPU.

    On a GPU, all gradients of a bucket are copied when it is full, and `largest` has their memory.
    """
    carries_counts: bool = False
    """Whether a bucket also reduces the counts of losses."""


class _Queued(DeviceCollectiveTransport):
    """The sums of NCCL as they are issued, without a stream."""

    __init__ = CollectiveTransport.__init__
    start = CollectiveTransport.start
    finish = CollectiveTransport.finish


class _Storage(BucketStorage):
    """Buckets of a transport that is known beforehand."""

    def __init__(self, *parts: Any, transport: type[Transport]) -> None:
        super().__init__(*parts)
        self._planned = LocalTransport if self._group.alone else transport

    def _transport(self, shared: bool) -> type[Transport]:
        return self._planned


def plan_gradients(
    model: nn.Module,
    optimizer: Any,
    zero: ZeroSettings,
    context: ParallelContext,
    fake: Any,
    device: str,
    notes: dict[str, None],
    problems: dict[str, None],
) -> GradientPlan:
    """Return the gradient reductions of this rank's part of a model.

    Errors that `initialize` would raise are added to `problems`.
    """
    rank, config = context.get_global_rank(), context.config
    try:
        optimizer = prepare_optimizer(optimizer, model, context)
        settings = prepare_sums(model, optimizer, context, zero, planned_on=device)
        claims = []
        for handler, said in settings.handlers:
            name = type(handler).__name__
            if said is None:
                notes[
                    f"{name} (named in the config) declares no reductions; `initialize` finds them with probe gradients. "
                    f"This estimate does not include its collectives, and uses the automatic handlers for its parameters"
                ] = None
                continue
            if said and not isinstance(handler, PlannedGradientHandler):
                notes[
                    f"{name} reduces gradients itself: the ledger lists its parameters, but this estimate does not include its collectives"
                ] = None
            claims.append((handler, said))
        found = plan_sums(
            model, settings.user_optimizer, context, claims,
            bucket_all=settings.bucket_all, shards=settings.shards,
        )  # fmt: skip
    except ColonnadeError as error:
        problems[str(error)] = None
        return GradientPlan(match(read_demands(model, context.layout, rank), [], context.layout, rank), rank)
    sums = with_groups(found.sums, context)
    plan = GradientPlan(found.ledger, rank)
    states = {
        dtype: state_dtypes(optimizer, dtype) for dtype in {p.dtype for p in model.parameters()} | {torch.float32}
    }
    with fake, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that memory which is not there is asked for its address
        laid_out = _lay_out(sums, plan, device)
    for bucket in laid_out:
        _hold(bucket, plan, states)
    # Not those of sums: these have frozen parameters too, which no bucket holds.
    inside = {id(parameter) for bucket in laid_out for parameter in bucket.parameters}
    rest = {at: p for at, p in enumerate(model.parameters()) if id(p) not in inside}
    _hold_rest(list(rest.values()), plan, states, optimizer_everywhere=settings.shards is None)
    flat = PlainOptimizer(optimizer, model, config.get("flat_step")).is_flat
    plan.stepping = _stepping(optimizer, flat, zero, context, device, notes)
    plan.pieces = _pieces(laid_out, list(rest.values()), plan, states, flat)
    plan.loose = frozenset(at for at, parameter in rest.items() if parameter.requires_grad)
    if device == "cpu":
        places = {id(parameter): at for at, parameter in enumerate(model.parameters())}
        filled = [_pending(bucket, places) for bucket in laid_out if bucket.keeps_gradients]
        plan.pending = tuple(each for each in filled if each.large)
    return plan


def _pieces(
    laid_out: Sequence[Bucket],
    rest: Sequence[Tensor],
    plan: GradientPlan,
    states: dict[torch.dtype, tuple[torch.dtype, ...]],
    flat: bool,
) -> Pieces:
    """The allocations of buckets; of parameters in none, those of a flat step, which joins neighbours up to a limit."""
    if laid_out:
        sizes = [bucket.numel * bucket.layout.dtype.itemsize for bucket in laid_out]
        kept = [size for size, bucket in zip(sizes, laid_out, strict=True) if bucket.keeps_gradients]
        share = plan.state // (2 * len(sizes))
        loose = [each.nbytes for each in rest]
        return Pieces((*sizes, *loose), tuple(kept), (share,) * (2 * len(sizes)), True)
    trained = [local_part(each) for each in rest if each.requires_grad]
    joined: list[list[int]] = []
    for each in trained:
        if not joined or joined[-1][0] + each.numel() > JOINED or not flat:
            joined.append([0, 0])
        joined[-1][0] += each.numel()
        joined[-1][1] += each.nbytes
    dtype = trained[0].dtype if trained else torch.float32
    state = tuple(numel * each.itemsize for numel, _ in joined for each in states[dtype])
    return Pieces(tuple(nbytes for _, nbytes in joined) if flat else (), (), state)


def _pending(bucket: Bucket, places: dict[int, int]) -> PendingGradients:
    """Not asked of the bucket, whose parameters are on the meta device here."""
    large = [parameter for parameter in bucket.parameters if parameter.nbytes >= LARGE_BYTES]
    return PendingGradients(
        frozenset(places[id(parameter)] for parameter in large),
        frozenset(places[id(parameter)] for parameter in bucket.parameters),
        sum(local_part(parameter).nbytes for parameter in large),
    )


def _lay_out(sums: Sequence[Sum], plan: GradientPlan, device: str) -> list[Bucket]:
    """Buckets of all sums, with the calls that each makes."""
    kind = _Queued if device == "cuda" else CollectiveTransport
    groups: dict[tuple[int, ...], RankGroup] = {}
    laid_out: list[list[Bucket]] = []
    for one in sums:
        group = groups.setdefault(one.ranks, RankGroup(one.ranks, one.group))
        kinds = [(parameter.dtype, torch.device("cpu")) for parameter in one.parameters]
        members = by_kind(kinds, [parameter.requires_grad for parameter in one.parameters])
        storages = ((_Storage(one, group, *each, transport=kind), members[each]) for each in sorted(members, key=str))
        laid_out.append([bucket for storage, mine in storages for bucket in storage.lay_out(mine)])
    buckets = in_starting_order(laid_out)
    last, world = last_over_ranks(buckets), dist.get_world_size()
    calls = [_calls(bucket, groups[bucket.sum.ranks], plan) for bucket in buckets]
    for bucket, made in zip(buckets, calls, strict=True):
        if made.calls:
            plan.buckets.append(replace(made, early=made.early and bucket not in last))
    copied = [call.bytes for call in plan.gathers] if kind is CollectiveTransport else []  # gloo gathers into a copy
    plan.beside = max([*(made.beside for made in calls[-1:]), *copied], default=0)
    plan.carries_counts = any(len(bucket.sum.ranks) == world and bucket.carries_counts for bucket in buckets)
    if kind is CollectiveTransport:
        plan.notes = [
            PlannedCall("all_gather", NOTE_BYTES * len(ranks), ranks) for ranks in sorted(groups) if len(ranks) > 1
        ]
    return buckets


def _calls(bucket: Bucket, group: RankGroup, plan: GradientPlan) -> BucketCalls:
    with OperatorRecorder(memory=True) as recorder:
        bucket.transport.start()
        beside = recorder.live
        bucket.transport.finish(1.0)
        calls = recorder.take().calls
        if bucket.is_sharded:
            memory: GroupMemory = bucket.buffers[0].memory
            work = send_slice(group, memory, bucket.own)
            if work is not None:
                work.wait()
            plan.gathers += recorder.take().calls
    if bucket.transport.host_waits:  # gloo reduces and scatters a copy
        beside += sum(call.bytes for call in calls if call.op == "reduce_scatter")
    every_pass = bucket.sum.sharding is not None and bucket.sum.sharding.every_pass
    return BucketCalls(tuple(calls), bucket.transport.early, bucket.numel, every_pass, beside)


def _stepping(
    optimizer: Any,
    flat: bool,
    zero: ZeroSettings,
    context: ParallelContext,
    device: str,
    notes: dict[str, None],
) -> int:
    """What the optimizer's own step takes for a moment: it is run on tensors without memory. A flat step needs nothing."""
    if flat or zero.offload or not isinstance(optimizer, torch.optim.Optimizer):
        return 0
    groups = [dict(group) for group in optimizer.param_groups]
    state, optimizer.state = optimizer.state, defaultdict(dict)
    recorder = OperatorRecorder(memory=True)
    try:
        for group in optimizer.param_groups:
            group["params"] = [_stand_in(p) for p in group["params"] if p.requires_grad]
            if device == "cuda" and "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True  # as torch chooses there
        optimizer.step()  # which makes the state
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kept = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
        for tensor in (*held, *(parameter.grad for parameter in held if parameter.grad is not None), *kept):
            recorder.hold(tensor)
        before = recorder.live
        with recorder:
            optimizer.step()
    except Exception as error:  # the user's own code, and of what is planned the least
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        name = type(optimizer).__name__
        notes[f"the step of {name} cannot run without values ({reason}): its temporary memory is not included"] = None
        return 0
    finally:
        optimizer.state = state
        for group, given in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(given)
    shares = context.get_world_size(ParallelMode.DATA) if zero.stage in (1, 2) else 1
    return (recorder.peak - before) // shares


def _stand_in(parameter: Tensor) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(local_part(parameter), device="meta"))
    made.grad = torch.empty_like(made)
    return made


def _hold(bucket: Bucket, plan: GradientPlan, states: dict[torch.dtype, tuple[torch.dtype, ...]]) -> None:
    """What a bucket keeps: gradients, and of what this rank owns the optimizer's state."""
    dtype = bucket.layout.dtype
    size = bucket.numel * dtype.itemsize
    parameters = size if bucket.is_sharded else sum(local_part(p).nbytes for p in bucket.parameters)
    plan.parameters += parameters
    plan.largest = max(plan.largest, size)
    if bucket.keeps_gradients:
        plan.gradients += size
    else:
        plan.turns = max(plan.turns, len(bucket.buffers) * size)
    owned, elements = dtype, sum(local_part(p).numel() for p in bucket.parameters)
    master = apart = 0
    sharding = bucket.sum.sharding
    if bucket.shard is not None and sharding is not None:
        owned, elements = bucket.shard.flat.dtype, sum(span.numel for span in bucket.spans)
        master = bucket.shard.flat.nbytes if owned is not dtype or sharding.device is not None else 0
        apart = bucket.shard.flat.nbytes if not sharding.keep_full or owned is not dtype or sharding.device else 0
    state = sum(elements * each.itemsize for each in states[owned])
    if sharding is not None and sharding.device is not None:
        plan.host += state + master + apart
    else:
        plan.state += state + master
        plan.gradients += apart
    plan.stepped += 2 * state + 3 * elements * owned.itemsize


def _hold_rest(
    parameters: Sequence[Tensor],
    plan: GradientPlan,
    states: dict[torch.dtype, tuple[torch.dtype, ...]],
    optimizer_everywhere: bool,
) -> None:
    """Parameters that lie in no bucket: their gradients are where autograd puts them."""
    for parameter in parameters:
        local = local_part(parameter)
        plan.parameters += local.nbytes
        if not parameter.requires_grad:
            continue
        plan.gradients += local.nbytes
        plan.loose_bytes += local.nbytes
        state = sum(local.numel() * each.itemsize for each in states[parameter.dtype]) if optimizer_everywhere else 0
        plan.state += state
        plan.stepped += 2 * state + 3 * local.nbytes

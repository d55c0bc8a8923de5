"""The sums of gradients of one rank, planned: handlers, ledger and buckets as `initialize` makes them, on memory that is not there."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.rank_group import GroupMemory, RankGroup
from colonnade.config.settings import ZeroSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_sync import SyncPlan, build_handlers, plan_sync
from colonnade.errors import ColonnadeError
from colonnade.gradients.bucket import Bucket, BucketStorage
from colonnade.gradients.gather import send_slice
from colonnade.gradients.handler import PlannedGradientHandler
from colonnade.gradients.ledger import Ledger, match
from colonnade.gradients.sums import Shards, Sum, make_sums, read_demands
from colonnade.gradients.transport import CollectiveTransport, DeviceCollectiveTransport, LocalTransport, Transport
from colonnade.gradients.uneven import by_kind
from colonnade.optim.bucket_step import wants_flat
from colonnade.optim.zero.zero_optimizer import ZeroOptimizer, state_dtypes
from colonnade.parallel.dtensor import local_part
from colonnade.proof.planner.recorder import OperatorRecorder, PlannedCall

NOTE_BYTES = 16
"""What each rank of a group says of its gradients at every step, where the host waits for sums: the step and a digest."""


@dataclass(frozen=True)
class BucketCalls:
    """The collectives of one bucket, and whether they may start in backward."""

    calls: tuple[PlannedCall, ...]
    early: bool
    numel: int
    every_pass: bool = False
    beside: int = 0
    """Bytes that are held as long as they are under way, beside the bucket."""


@dataclass
class GradientPlan:
    """What one rank sums and holds; `rank` is the one that it was planned for, among those that are alike. `buckets` in the
    order in which they start; `gathers` bring parameters back (ZeRO)."""

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
    """Bytes that the last sum and the gathers keep for a moment, when all passes have ended."""
    stepping: int = 0
    """Bytes that the optimizer's step keeps for a moment."""
    loose: frozenset[int] = frozenset()
    """Places, among the module's parameters, of those whose gradients autograd makes anew in each step: they lie in no bucket."""
    loose_bytes: int = 0
    """Of `gradients`, what these take."""
    carries_counts: bool = False
    """Whether counts of losses ride with a bucket."""


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
    """The sums that this rank's part of a model needs; what `initialize` would refuse goes into `problems`."""
    shards, sharded = None, zero.stage in (1, 2)
    stepper = optimizer
    if sharded:
        stepper = ZeroOptimizer(optimizer, model, zero, context.config.get("flat_step"))
        shards = stepper.shards_of(pipeline=context.pipeline_parallel_size > 1)
    try:
        found = _synchronised(model, stepper, context, device, shards, notes)
    except ColonnadeError as error:
        problems[str(error)] = None
        demands = read_demands(model, context.layout, context.get_global_rank())
        rank = context.get_global_rank()
        return GradientPlan(match(demands, [], context.layout, rank), rank)
    sums = make_sums(found.grouped, context, shards)
    sums = sorted(sums, key=lambda one: (one.ranks, one.divisor, one.sharding is not None, repr(one.options)))
    plan = GradientPlan(found.ledger, context.get_global_rank())
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
    _hold_rest(list(rest.values()), plan, states, optimizer_everywhere=not sharded)
    plan.stepping = _stepping(model, optimizer, zero, context, device, notes)
    plan.loose = frozenset(at for at, parameter in rest.items() if parameter.requires_grad)
    return plan


def _synchronised(
    model: nn.Module,
    optimizer: Any,
    context: ParallelContext,
    device: str,
    shards: Shards | None,
    notes: dict[str, None],
) -> SyncPlan:
    config = context.config
    covered = []
    named = config.get("gradient_handler") or config.get("gradient_handlers") or ()
    for handler, said in build_handlers(named, model, optimizer, context):
        name = type(handler).__name__
        if said is None:
            notes[
                f"{name} (named in the config) sums by hand: what it calls is found by a trial in `initialize`, "
                f"and is not in this plan. What is said of its parameters is what the automatic handlers would do"
            ] = None
            continue
        if said and not isinstance(handler, PlannedGradientHandler):
            notes[
                f"{name} sums gradients itself: which parameters is in the ledger, what it calls is not in this plan"
            ] = None
        covered.append((handler, said))
    flat = shards is None and wants_flat(list(model.parameters()), optimizer, config.get("flat_step"))
    everywhere = flat and not (device == "cuda" and not config.get("graph_step"))
    return plan_sync(model, optimizer, context, covered, dict(config.get("sync") or {}), everywhere, shards)


def _lay_out(sums: Sequence[Sum], plan: GradientPlan, device: str) -> list[Bucket]:
    """Buckets of all sums, with the calls that each makes."""
    kind = _Queued if device == "cuda" else CollectiveTransport
    made: list[tuple[float, Bucket, BucketCalls]] = []
    groups: dict[tuple[int, ...], RankGroup] = {}
    for one in sums:
        group = groups.setdefault(one.ranks, RankGroup(one.ranks, one.group))
        kinds = [(parameter.dtype, torch.device("cpu")) for parameter in one.parameters]
        members = by_kind(kinds, [parameter.requires_grad for parameter in one.parameters])
        total, done = sum(local_part(p).numel() for p in one.parameters) or 1, 0
        for each in sorted(members, key=str):
            for bucket in _Storage(one, group, *each, transport=kind).lay_out(members[each]):
                done += bucket.numel
                made.append((done / total, bucket, _calls(bucket, group, plan)))
    made.sort(key=lambda entry: entry[:1])
    copied = [call.bytes for call in plan.gathers]  # gloo gathers into a copy
    plan.beside = max(
        [*([made[-1][2].beside] if made else []), *(copied if kind is CollectiveTransport else [])], default=0
    )
    last = {entry[1].sum.ranks: entry[1] for entry in made}
    world = dist.get_world_size()
    plan.carries_counts = any(len(bucket.sum.ranks) == world and bucket.carries_counts for _, bucket, _ in made)
    for _, bucket, calls in made:
        early = calls.early and last[bucket.sum.ranks] is not bucket  # the last one waits for the end of backward
        if calls.calls:
            plan.buckets.append(replace(calls, early=early))
    if kind is CollectiveTransport:
        plan.notes = [
            PlannedCall("all_gather", NOTE_BYTES * len(ranks), ranks) for ranks in sorted(groups) if len(ranks) > 1
        ]
    return [bucket for _, bucket, _ in made]


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
    model: nn.Module,
    optimizer: Any,
    zero: ZeroSettings,
    context: ParallelContext,
    device: str,
    notes: dict[str, None],
) -> int:
    """What the optimizer's own step takes for a moment: it is run on tensors without memory. A flat step needs nothing."""
    flat = wants_flat(list(model.parameters()), optimizer, context.config.get("flat_step"))
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
        notes[
            f"the step of {name} cannot be tried without values ({reason}): what it takes for a moment is left out"
        ] = None
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
        apart = bucket.shard.flat.nbytes if not sharding.keep_whole or owned is not dtype or sharding.device else 0
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

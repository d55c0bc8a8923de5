"""From an optimizer and placements to sharded buckets: who shares which parameters, and in whose memory they lie."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import GradientError
from colonnade.optim.zero.bucket import HALVES, Member, ShardedBucket, fill_buckets
from colonnade.optim.zero.flow import Flow
from colonnade.optim.zero.gather import Gather
from colonnade.optim.zero.gradients import ShardedGradients
from colonnade.optim.zero.settings import Travel, ZeroSettings
from colonnade.optim.zero.team import Flat, Means, Team
from colonnade.optim.zero.team_flows import TeamFlows
from colonnade.parallel.agreement import Held, held_tensors
from colonnade.parallel.demand import joint_ranks, owed

_MB = 1 << 20
_BUCKET_MB = {"cpu": 4.0}
_BUCKET_MB_ELSEWHERE = 25.0
ROOMS = 2
"""How many rooms the buckets of a team take turns in at stage 2: one is summed while the next is filled."""


@dataclass(frozen=True)
class Share:
    """The ranks that a parameter's gradient is summed over, and what the sum is divided by."""

    ranks: tuple[int, ...]
    divisor: float


@dataclass(frozen=True, eq=False)
class Shards:
    """All that is sharded on this rank. `flows` belong to `buckets`, in the same order."""

    buckets: list[ShardedBucket]
    gradients: ShardedGradients
    flows: list[Flow]
    gathers: list[Gather]
    teams: list[Team]


def build_shards(
    optimizer: Optimizer,
    model: nn.Module,
    context: ParallelContext,
    settings: ZeroSettings,
    travel: Travel,
    means: Means,
) -> Shards:
    """Shard the parameters of the optimizer that can get a gradient. Collective over the world."""
    shares = _shares(optimizer, model, context)
    context.ensure_groups(share.ranks for share in shares if len(share.ranks) > 1)
    teams = _teams(shares, context, means, travel)
    ranked: list[tuple[float, tuple[int, ...], int, Flow]] = []
    by_team: dict[tuple[int, ...], list[Flow]] = {ranks: [] for ranks in teams}
    for serial, (share, members) in enumerate(_sorted(shares)):
        team = teams[share.ranks]
        flows = _flows(members, share, team, settings)
        # Stages come to a tied weight at different times: to wait for each other amid backward would be for ever.
        if not travel.overlap or len({context.layout.coordinates(rank)["pipeline"] for rank in share.ranks}) > 1:
            for flow in flows:
                flow.early = False
        by_team[share.ranks] += flows
        total = max(1, sum(flow.bucket.numel for flow in flows))
        done = 0
        for flow in flows:
            done += flow.bucket.numel
            # By how far through its share a bucket is: an order that all ranks of two teams agree on.
            ranked.append((done / total, share.ranks, serial, flow))
    flows = [flow for *_, flow in sorted(ranked, key=lambda entry: entry[:3])]
    gathers = {ranks: Gather(teams[ranks], [flow.bucket for flow in mine]) for ranks, mine in by_team.items()}
    _check_alike(by_team, teams)
    gradients = ShardedGradients(
        [TeamFlows(teams[ranks], by_team[ranks], gathers[ranks]) for ranks in sorted(teams)],
        flows,
        # A schedule runs many passes, and would send each gradient as often.
        every_pass=settings.stage == 2 and context.pipeline_parallel_size == 1,
        returned=not settings.reduce_scatter,
    )
    return Shards([flow.bucket for flow in flows], gradients, flows, list(gathers.values()), list(teams.values()))


def _shares(optimizer: Optimizer, model: nn.Module, context: ParallelContext) -> dict[Share, list[Member]]:
    """The members by who shares them, each share in the model's order (tied ones in the order of their keys)."""
    group_of = {id(p): at for at, group in enumerate(optimizer.param_groups) for p in group["params"]}
    held = [entry for entry in held_tensors(model, context) if entry.tensor.requires_grad]
    _check_owned(group_of, model)
    found: dict[Share, list[Member]] = {}
    for entry in sorted(held, key=_tie_key):
        parameter = entry.tensor
        if id(parameter) not in group_of or not isinstance(parameter, nn.Parameter):
            continue
        if not parameter.is_floating_point():
            raise GradientError(f"zero shards real parameters; {entry.name} is {parameter.dtype}")
        share = _share(entry, context)
        member = Member(entry.name, parameter, group_of[id(parameter)], entry.holding.count // len(share.ranks))
        if member.local.numel():
            found.setdefault(share, []).append(member)
    return found


def _check_owned(group_of: Mapping[int, int], model: nn.Module) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    if any(owner not in known for owner in group_of):
        raise GradientError(
            "the optimizer has parameters that are not the model's, so ZeRO does not know how they lie; build it "
            "from model.parameters()"
        )


def _share(entry: Held, context: ParallelContext) -> Share:
    layout, rank = context.layout, context.get_global_rank()
    factors = owed(layout, entry.placement, rank)
    ranks = factors[0].ranks if factors else (rank,)
    if len(factors) > 1:
        ranks = joint_ranks(layout, entry.placement, factors, rank)
    return Share(ranks, float(prod(factor.divisor for factor in factors)))


def _teams(
    shares: Mapping[Share, Sequence[Member]], context: ParallelContext, means: Means, travel: Travel
) -> dict[tuple[int, ...], Team]:
    """One per set of ranks, made in the order of ranks on every rank. Collective."""
    devices = {share.ranks: members[0].local.device for share, members in shares.items()}
    return {
        ranks: Team(ranks, context.group_of_ranks(ranks) if len(ranks) > 1 else None, devices[ranks], means, travel)
        for ranks in sorted(devices)
    }


def _sorted(shares: Mapping[Share, list[Member]]) -> list[tuple[Share, list[Member]]]:
    """Per dtype; in an order that all ranks of a share agree on."""
    split: dict[tuple[tuple[int, ...], float, str], tuple[Share, list[Member]]] = {}
    for share, members in shares.items():
        for member in members:
            key = (share.ranks, share.divisor, str(member.local.dtype))
            split.setdefault(key, (share, []))[1].append(member)
    return [split[key] for key in sorted(split)]


def _flows(members: Sequence[Member], share: Share, team: Team, settings: ZeroSettings) -> list[Flow]:
    """Buckets for these members with their memory. Collective over the team."""
    dtype, device = members[0].local.dtype, members[0].local.device
    size = settings.bucket_mb or _BUCKET_MB.get(device.type, _BUCKET_MB_ELSEWHERE)
    buckets = fill_buckets(members, team, size * _MB)
    masters = (settings.offload and device.type != "cpu") or (settings.master_weights and dtype in HALVES)
    home = torch.device("cpu") if settings.offload else device
    memory = team.allocate(sum(bucket.numel for bucket in buckets), dtype)
    for bucket, flat in zip(buckets, _parts(memory, buckets), strict=True):
        bucket.use_memory(flat, masters, home)
    if settings.stage == 1:
        rooms = [[room] for room in _parts(team.allocate(memory.own.numel(), dtype), buckets)]
    else:
        largest = max(bucket.numel for bucket in buckets)
        both = [team.allocate(largest, dtype) for _ in range(ROOMS)]
        rooms = [[room.first(bucket.numel) for room in both] for bucket in buckets]
    flows = []
    for bucket, mine in zip(buckets, rooms, strict=True):
        in_room = settings.stage == 1 and not masters
        own = mine[0].own[bucket.own][: bucket.used]
        bucket.use_grads(own if in_room else torch.zeros_like(bucket.values))
        flows.append(Flow(bucket, mine, share.divisor, keeps=settings.stage == 1, prompt=settings.stage == 1))
    return flows


def _parts(memory: Flat, buckets: Sequence[ShardedBucket]) -> list[Flat]:
    parts, start = [], 0
    for bucket in buckets:
        stop = start + bucket.numel
        every = [other[start:stop] for other in memory.every] if memory.every is not None else None
        parts.append(Flat(memory.own[start:stop], every))
        start = stop
    return parts


def _check_alike(by_team: Mapping[tuple[int, ...], Sequence[Flow]], teams: Mapping[tuple[int, ...], Team]) -> None:
    """Refuse ranks that would cut their parameters otherwise than their team. Collective."""
    for ranks in sorted(teams):
        members = [member for flow in by_team[ranks] for member in flow.bucket.members]
        table = [[list(member.local.shape), str(member.local.dtype), member.group] for member in members]
        digest = hashlib.sha256(repr(table).encode()).hexdigest()
        told = teams[ranks].party.gather_objects([digest, len(members)])
        if any(other != told[0] for other in told):
            raise GradientError(
                f"ranks {list(ranks)} share parameters but have other ones, or in other groups of the optimizer: "
                f"{', '.join(f'rank {rank}: {count}' for rank, (_, count) in zip(ranks, told, strict=True))}. Build "
                f"the same model and the same parameter groups on each."
            )


def _tie_key(entry: Held) -> str:
    return entry.placement.tied.key if entry.placement.tied is not None else ""

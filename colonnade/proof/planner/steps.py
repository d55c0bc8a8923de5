"""Time and memory of one step: the cost of each pass in schedule order, overlapping collectives, and the peak memory."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from colonnade.config import Config
from colonnade.config.settings import ClipSettings
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.precision import Precision
from colonnade.engine.schedule.actions import GIVES_INPUT_GRADIENT, Action, Kind, Table
from colonnade.engine.schedule.replay import (
    TimedAction,
    add_transfers,
    bubble_of,
    live_counts,
    peer_stage,
    receive_early,
    replay,
    simulate,
)
from colonnade.engine.schedule.transfer import HEADER_BYTES, SENDS_KEPT
from colonnade.engine.stepper import count_slots
from colonnade.gradients.bucket import STAGING_BUFFERS
from colonnade.proof.planner.hardware import Clock
from colonnade.proof.planner.plan_records import (
    Fit,
    Interval,
    MemoryPlan,
    PlannedCollective,
    PlannedTimeline,
    RankClass,
    When,
    Work,
)
from colonnade.proof.planner.planned_sums import GradientPlan
from colonnade.proof.planner.ranks import Kinds
from colonnade.proof.planner.recorder import PlannedCall
from colonnade.proof.planner.reserved_memory import WORKSPACES, reserve
from colonnade.proof.roles import stage_of

_SENT = {Kind.SENT_FORWARD: Kind.SEND_FORWARD, Kind.SENT_BACKWARD: Kind.SEND_BACKWARD}
"""Maps the action that ends a send to the send."""
_IDLE = 0.5
"""The fraction of a message's latency in which a core is free for other ranks (gloo on two cores: 0.45)."""
_PARTS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
"""The kinds of passes in the order of `StagePass.extra`."""
COUNT_BYTES = 16
"""Bytes of the numbers that ranks add up if losses are (sum, count): two numbers in float64."""


@dataclass(frozen=True)
class Times:
    """The seconds of a step and of its parts; `step` is their sum."""

    step: float
    compute: float
    exposed: float
    bubble: float
    optimizer: float


class Steps:
    """Computes the time and memory of a step from the costs of all stages and their order in the schedule."""

    def __init__(self, kinds: Kinds, clock: Clock, config: Config) -> None:
        self.kinds, self.clock = kinds, clock
        self.accumulation = int(config.get("gradient_accumulation") or 1)
        self.table: Table = kinds.table or {0: [Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)]}
        self._precision = Precision.read(config)
        self._clip = ClipSettings.read(config.get("clip_grad_norm"))
        self._world = tuple(range(kinds.layout.world_size))
        self._on_cpu = clock.hardware.device == "cpu"
        first = next(iter(kinds.models.values()))
        own = next((p.dtype for p in first.parameters() if p.is_floating_point()), torch.float32)
        self.peak_flops = clock.peak(self._precision.dtype or own)

    # -- time ---------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> dict[int, list[TimedAction]]:
        """The actions of each pipeline rank with start and end, for one run of the schedule."""
        return replay(self.table, self._cost, self._transfer).rows

    @cached_property
    def makespan(self) -> float:
        return max(row[-1].end for row in self.rows.values())

    def timeline(self) -> PlannedTimeline:
        """Return the timeline of one run of the schedule."""
        rows = tuple(
            tuple(Interval(t.action.kind.value, t.action.stage, t.action.micro_batch, t.start, t.end) for t in row)
            for _, row in sorted(self.rows.items())
        )
        bubble, equal = bubble_of(self.rows), simulate(self.table).bubble
        return PlannedTimeline(self.kinds.schedule, self.kinds.num_microbatches, rows, self.makespan, bubble, equal)

    def times(self) -> Times:
        """Return the parts of a step.

        If ranks share CPU cores, a step takes at least the total work divided by the cores.
        """
        ends = {}
        for rank, gradients in self.kinds.gradients.items():
            ends[rank] = self._row(rank)[-1].end + self._exposed(gradients, rank)
        rank = max(ends, key=lambda each: ends[each])
        gradients, passing = self.kinds.gradients[rank], self.makespan * self.accumulation
        # Of the passes, the mean of the pipeline's ranks: with the bubble it is their makespan.
        taken = [timed for row in self.rows.values() for timed in row]
        passes = [self.kinds.passes[timed.action.stage] for timed in taken if timed.action.kind is Kind.FORWARD]
        inline = sum(self._calls_time(one.forward.calls) + self._calls_time(one.backward.calls) for one in passes)
        inline *= self.accumulation / len(self.rows)
        bubble = bubble_of(self.rows) * passing
        after = ends[rank] - self.makespan + sum(call.exposed for call in self._after(gradients, rank))
        optimizer = self._optimizer(gradients)
        step = max(passing + after + optimizer, self._on_shared_cores(), self._host(rank))
        exposed = inline + after
        return Times(step, step - exposed - bubble - optimizer, exposed, bubble, optimizer)

    def _host(self, rank: int) -> float:
        """Seconds in which the host issues the operators of a step: it works ahead of the device, so the slower of the two counts."""
        row = self._row(rank)
        passes = [self.kinds.passes[timed.action.stage] for timed in row if timed.action.kind is Kind.FORWARD]
        return sum(one.forward.host + one.backward.host for one in passes) * self.accumulation

    def _on_shared_cores(self) -> float:
        """What the work of all ranks takes, where devices of a node are really a few cores: one computes while others wait."""
        cores, layout = self.clock.hardware.at_once, self.kinds.layout
        ranks = min(self.clock.hardware.devices_per_node, layout.world_size)
        if not cores or ranks <= cores:
            return 0.0
        work = sum(self._core_seconds(rank, gradients) for rank, gradients in self.kinds.gradients.items())
        return work / len(self.kinds.gradients) * ranks / cores

    def _core_seconds(self, rank: int, gradients: GradientPlan) -> float:
        """Seconds of a step in which a rank keeps its core busy: it computes and copies, and does not wait for a message."""
        row = self._row(rank)
        passes = [self.kinds.passes[timed.action.stage] for timed in row if timed.action.kind is Kind.FORWARD]
        calls = [call for one in passes for call in (*one.forward.calls, *one.backward.calls)]
        busy = sum(timed.end - timed.start for timed in row) - self._idle(calls)
        sums = [call for bucket in gradients.buckets for call in bucket.calls]
        return busy * self.accumulation + self._calls_time(sums) - self._idle(sums) + self._optimizer(gradients)

    def _idle(self, calls: Iterable[PlannedCall]) -> float:
        return _IDLE * sum(self.clock.collective(call.op, 0, call.ranks) for call in calls)

    def _cost(self, action: Action) -> float:
        one = self.kinds.passes[action.stage]
        forward = one.forward.seconds + self._calls_time(one.forward.calls)
        backward = one.backward.seconds + self._calls_time(one.backward.calls)
        return {
            Kind.FORWARD: forward,
            Kind.BACKWARD: backward,
            Kind.INPUT: backward * one.input_part,
            Kind.WEIGHT: backward * (1 - one.input_part),
        }[action.kind] or 1e-9

    @cached_property
    def _transfer(self) -> float:
        """The time of a message from one stage to the next, the slowest of them."""
        if len(self.table) == 1:
            return 0.0
        ranks = self._pipeline_ranks(self._first_rank(0))
        return max(
            self.clock.collective("send", max(one.sent, one.returned), (ranks[at], ranks[at + 1]))
            for one in self.kinds.passes.values()
            for at in range(len(ranks) - 1)
        )

    def _exposed(self, gradients: GradientPlan, rank: int) -> float:
        """What the sums of gradients take beyond the end of backward: early ones run beside the last pass."""
        last = next((t for t in reversed(self._row(rank)) if t.action.kind is not Kind.FORWARD), None)
        length = 0.0 if last is None else last.end - last.start
        total = sum(bucket.numel for bucket in gradients.buckets) or 1
        overlap, done, free, hidden = self.clock.hardware.overlap, 0, 0.0, 0.0
        for bucket in gradients.buckets:
            done += bucket.numel
            seconds = self._calls_time(bucket.calls)
            start = max(free, length * done / total if bucket.early else length)
            free = start + seconds
            hidden += max(0.0, min(free, length) - start)
        return max(0.0, free - length) + hidden * (1 - overlap)

    def _optimizer(self, gradients: GradientPlan) -> float:
        """Clipping reads gradients once, the step reads and writes parameters, gradients and state."""
        measured = gradients.gradients if self._clip is not None else 0
        return (gradients.stepped + measured) / self.clock.hardware.memory_bandwidth

    def _calls_time(self, calls: Iterable[PlannedCall]) -> float:
        return sum(self.clock.collective(call.op, call.bytes, call.ranks) for call in calls)

    # -- kinds of ranks -----------------------------------------------------------------------------------

    def classes(self) -> Iterator[RankClass]:
        """Yield every kind of rank."""
        layout = self.kinds.layout
        stages = len(self.table)
        for rank, gradients in self.kinds.gradients.items():
            at = stage_of(layout, rank)
            mine = tuple(stage for stage, home in enumerate(self.kinds.stage_ranks) if home == at)
            alike = sum(stage_of(layout, other) == at for other in self.kinds.gradients)
            yield RankClass(
                name=f"stage {at}" if stages > 1 else "every rank",
                rank=rank,
                count=layout.world_size // stages // alike,
                pipeline_rank=at,
                stages=mine,
                parameters=sum(held.elements for held in self.kinds.parameters[rank]),
                memory=self._memory(gradients, rank, at),
                collectives=tuple(self._collectives(gradients, rank)),
                work=tuple(self._work(stage) for stage in mine),
                step_seconds=self._optimizer(gradients),
                live=max(live_counts(self.table[at]), default=0.0),
            )

    def flops(self, one: RankClass) -> float:
        """Return the flops of one rank of this kind in a step."""
        return sum(work.flops for work in one.work) * self.kinds.num_microbatches * self.accumulation

    def recomputed(self, one: RankClass) -> float:
        """Return the part of `flops` that backward passes recompute."""
        return sum(work.recomputed for work in one.work) * self.kinds.num_microbatches * self.accumulation

    def _work(self, stage: int) -> Work:
        one = self.kinds.passes[stage]
        backward = self._cost(Action(stage, Kind.BACKWARD, 0))
        return Work(
            stage=stage,
            forward=self._cost(Action(stage, Kind.FORWARD, 0)),
            backward_input=backward * one.input_part,
            backward_weight=backward * (1 - one.input_part),
            flops=one.forward.flops + one.backward.flops,
            recomputed=one.backward.graded,
            moved=one.forward.moved + one.backward.moved,
            kept=one.kept,
            peak=max(one.extra[:2]),
            output=max(0, one.sent - HEADER_BYTES),
        )

    def _memory(self, gradients: GradientPlan, rank: int, at: int) -> MemoryPlan:
        # On a device a full bucket is filled at once, from gradients that autograd has made; on the CPU so are the large ones.
        mine_stages = [stage for stage, home in enumerate(self.kinds.stage_ranks) if home == at]
        mine = [self.kinds.passes[stage] for stage in mine_stages]
        moved = max(one.pending for one in mine) if self._on_cpu else gradients.largest
        activations, frames, left = self._fullest(at)
        if self.kinds.one_pass:  # the pass has taken gradients that lie in no bucket, as far as they were there
            activations = max(0, activations - gradients.loose_bytes)
        moments = (
            (activations, moved + frames + self._under_way(gradients)),
            (left, gradients.beside),  # the last sum, after all passes
            (left + gradients.stepping, 0),
        )
        activations, communication = max(moments, key=sum)
        capacity = self.clock.hardware.memory
        program = [action for action in self._program(at) if action.stage in mine_stages]
        replay = reserve(self.kinds.models[rank], gradients, self.kinds.passes, program, capacity)
        made = MemoryPlan(
            parameters=gradients.parameters,
            gradients=gradients.gradients,
            state=gradients.state,
            activations=activations,
            communication=gradients.turns + communication,
            buffers=sum(buffer.nbytes for buffer in self.kinds.models[rank].buffers()),
            host=gradients.host,
            workspace=2 * sum(WORKSPACES) if self.clock.kernels is not None else 0,
        )
        if replay is None:
            return replace(made, fit="fits" if made.total <= capacity else "does not fit")
        fit: Fit = (
            "fits" if replay.fits else "fits with expandable segments" if replay.fits_expandable else "does not fit"
        )
        return replace(made, reserved=replay.reserved, expandable=replay.expandable, fit=fit)

    def _under_way(self, gradients: GradientPlan) -> int:
        """What the sums of one pass keep while the next pass runs, where each pass has sums of its own."""
        if self.accumulation == 1:
            return 0
        beside = sorted(bucket.beside for bucket in gradients.buckets if bucket.every_pass)
        return sum(beside[-STAGING_BUFFERS:])

    def _fullest(self, at: int) -> tuple[int, int, int]:
        """(activations, messages) in bytes at the fullest moment: what all micro-batches under way keep, what the running pass
        needs beside, and messages that come, go, or are kept until they have surely gone. And what is left after all passes."""
        passes, homes = self.kinds.passes, self.kinds.stage_ranks
        live, came, most = 0, Counter[Action](), (0, 0)
        going, gone = Counter[Action](), defaultdict[int, deque[int]](lambda: deque(maxlen=SENDS_KEPT))
        for action in self._program(at):
            one = passes[action.stage]
            if action.kind is Kind.RECEIVE_FORWARD:
                came[action._replace(kind=Kind.FORWARD)] = passes[action.stage - 1].sent
            elif action.kind is Kind.RECEIVE_BACKWARD:
                came[action._replace(kind=Kind.BACKWARD)] = passes[action.stage + 1].returned
            elif action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                going[action] = one.sent if action.kind is Kind.SEND_FORWARD else one.returned
            elif action.kind in _SENT:
                sent = action._replace(kind=_SENT[action.kind])
                gone[homes[peer_stage(sent)]].append(going.pop(sent))
            else:
                if action.kind is Kind.FORWARD:
                    came.pop(action, 0)  # it is what the pass keeps of its input
                    live += one.kept
                frames = came.total() + going.total() + sum(map(sum, gone.values()))
                most = max(most, (live + one.extra[_PARTS.index(action.kind)], frames), key=sum)
                if action.kind in GIVES_INPUT_GRADIENT:
                    came.pop(action._replace(kind=Kind.BACKWARD), 0)
                live += self._stays(action) - (one.waiting if action.kind is Kind.WEIGHT else one.kept)
        return *most, max(0, live)

    def _stays(self, action: Action) -> int:
        """Bytes of a micro-batch that are kept when an action has ended."""
        one = self.kinds.passes[action.stage]
        return {Kind.FORWARD: one.kept, Kind.INPUT: one.waiting}.get(action.kind, one.result)

    def _program(self, at: int) -> Sequence[Action]:
        """What a pipeline rank does in a step, with its transfers."""
        program = add_transfers(self.table)[at] if len(self.table) > 1 else self.table[at]
        return receive_early(program) if self._on_cpu else program

    # -- collectives --------------------------------------------------------------------------------------

    def _collectives(self, gradients: GradientPlan, rank: int) -> Iterator[PlannedCollective]:
        at = stage_of(self.kinds.layout, rank)
        stages = [stage for stage, home in enumerate(self.kinds.stage_ranks) if home == at]
        times = self.kinds.num_microbatches * self.accumulation
        for stage in stages:
            one = self.kinds.passes[stage]
            yield from self._gathered(one.forward.calls, one.rank, "forward", times, what=f"stage {stage}")
            yield from self._gathered(one.backward.calls, one.rank, "backward", times, what=f"stage {stage}")
        yield from self._transfers(at, rank)
        calls = [
            call
            for bucket in gradients.buckets
            for call in bucket.calls * (self.accumulation if bucket.every_pass else 1)
        ]
        seconds = self._calls_time(calls)
        exposed = self._exposed(gradients, rank) / seconds if seconds else 0.0
        yield from self._gathered(calls, gradients.rank, "gradients", 1, exposed, "gradients")
        yield from self._after(gradients, rank)

    def _after(self, gradients: GradientPlan, rank: int) -> list[PlannedCollective]:
        """What follows the gradients: agreement, counts of losses, clipping, parameters of ZeRO."""
        planned = gradients.rank
        found = list(self._gathered(gradients.notes, planned, "gradients", 1, what="agreement on gradients"))
        if len(self.table) > 1:
            shared = [PlannedCall("broadcast", COUNT_BYTES, self._pipeline_ranks(rank))]
            found += self._gathered(shared, rank, "step", self.accumulation, what="loss of the last stage")
        counted = any(one.counted for one in self.kinds.passes.values())
        one_mean = len(self.table) == 1 and self.accumulation == 1 and self.kinds.layout.distinct_data == 1
        world = self._world
        carried = gradients.carries_counts and len(self.table) == 1  # in a pipeline they are known when it has ended
        if counted and not one_mean and len(world) > 1 and not carried:
            found += self._gathered(
                [PlannedCall("all_reduce", COUNT_BYTES, world)], rank, "step", 1, what="counts of losses"
            )
        # A loss scaler asks the norm whether all gradients are finite.
        slots = self._slots(self._clip) if self._clip is not None else int(self._precision.scaler is not None)
        if slots and len(world) > 1:
            norm = PlannedCall("all_reduce", 16 * slots, world)
            found += self._gathered([norm], rank, "step", 1, what="norm of the gradients")
        return [*found, *self._gathered(gradients.gathers, planned, "step", 1, what="parameters of the owners")]

    def _slots(self, clip: ClipSettings) -> int:
        """How many norms a step measures."""
        return count_slots({held.name for parameters in self.kinds.parameters.values() for held in parameters}, clip)

    def _transfers(self, at: int, rank: int) -> Iterator[PlannedCollective]:
        """Messages to the stages before and after, as the executor's program has them."""
        if len(self.table) == 1:
            return
        ranks, homes = self._pipeline_ranks(rank), self.kinds.stage_ranks
        calls = []
        for action in add_transfers(self.table)[at]:
            one = self.kinds.passes[action.stage]
            if action.kind is Kind.SEND_FORWARD:
                calls.append(PlannedCall("send", one.sent, (rank, ranks[homes[action.stage + 1]])))
            elif action.kind is Kind.SEND_BACKWARD:
                calls.append(PlannedCall("send", one.returned, (rank, ranks[homes[action.stage - 1]])))
        yield from self._gathered(calls, rank, "pipeline", self.accumulation, 0.0, "activations and their gradients")

    def _gathered(
        self, calls: Iterable[PlannedCall], rank: int, when: When, times: int, exposed: float = 1.0, what: str = ""
    ) -> Iterator[PlannedCollective]:
        """Calls that are alike, as one line."""
        counts: dict[PlannedCall, int] = defaultdict(int)
        for call in calls:
            if len(call.ranks) > 1:
                counts[call] += times
        for call, count in counts.items():
            seconds = self.clock.collective(call.op, call.bytes, call.ranks) * count
            link = self.clock.link(call.ranks)
            mode = "PIPELINE" if when == "pipeline" else self._mode(call.ranks, rank)
            yield PlannedCollective(
                mode, call.op, call.bytes, count, len(call.ranks), link, seconds, seconds * exposed, when, what
            )

    def _mode(self, ranks: tuple[int, ...], rank: int) -> str:
        """The mode whose group these ranks are; else the modes that they join."""
        layout = self.kinds.layout
        if ranks is self._world:
            return ParallelMode.GLOBAL.name
        axes = [axis.mode for axis in layout.axes]
        for mode in (*axes, *layout.modes):
            if layout.has(mode, rank):
                group = layout.group_of(mode, rank)
                if len(group) == len(ranks) and tuple(group) == tuple(sorted(ranks)):
                    return mode.name
        places = [layout.coordinates(each) for each in ranks]
        joined = [axis.mode.name for axis in layout.axes if len({place[axis.name] for place in places}) > 1]
        return " x ".join(joined) or "several modes"

    # -- ranks --------------------------------------------------------------------------------------------

    def _row(self, rank: int) -> list[TimedAction]:
        return self.rows[stage_of(self.kinds.layout, rank)]

    def _pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        return tuple(self.kinds.layout.group_of(ParallelMode.PIPELINE, rank))

    def _first_rank(self, at: int) -> int:
        return next(rank for rank in self.kinds.gradients if stage_of(self.kinds.layout, rank) == at)

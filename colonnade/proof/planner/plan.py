"""`plan`: estimate groups, memory, collectives, timeline and step time of a job before it runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from colonnade.config import Config
from colonnade.context.layout import Layout
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.proof.planner.hardware import Clock
from colonnade.proof.planner.job import Job
from colonnade.proof.planner.plan_records import Hardware, LedgerLine, ModeGroups, Plan, RankClass, Totals
from colonnade.proof.planner.ranks import Kinds, Known, plan_ranks, samples_of
from colonnade.proof.planner.steps import Steps
from colonnade.proof.roles import stage_of
from colonnade.texts import pattern_of

GROUPS_SHOWN = 16
"""The number of groups that are listed of a mode with `digits`."""


def plan(
    config: Config,
    world_size: int,
    hardware: Hardware,
    job: Job | None = None,
    context: ParallelContext | None = None,
    known: Known | None = None,
) -> Plan:
    """Plan a job on `world_size` ranks of a machine. Starts no process and needs no device.

    Without a `job`, the plan has only groups and communicators. `context` simulates each kind of rank in turn while the
    model is built and run; default: the global context, which the model's code may read. `known` caches passes between
    plans of the same job.
    """
    if context is None:
        from colonnade.core import global_context  # what a model's own code asks

        context = global_context
    layout = build_layout(config, world_size)
    clock = Clock(hardware)
    modes = _modes(layout, clock)
    kinds = plan_ranks(config, world_size, job, clock, context, known) if job is not None else None
    steps = Steps(kinds, clock, config) if kinds is not None else None
    classes = tuple(steps.classes()) if steps is not None else ()
    timeline = steps.timeline() if steps is not None else None
    totals = _totals(layout, modes, classes, steps, hardware)
    return Plan(
        config=_plain(dict(config)),
        axes={axis.name: axis.size for axis in layout.axes if axis.size > 1},
        hardware=hardware,
        modes=modes,
        classes=classes,
        timeline=timeline,
        ledger=tuple(_ledger(kinds)) if kinds is not None else (),
        totals=totals,
        notes=tuple(kinds.notes) if kinds is not None else (),
        problems=tuple(kinds.problems) if kinds is not None else (),
    )


def _modes(layout: Layout, clock: Clock) -> tuple[ModeGroups, ...]:
    data = {axis.mode: axis.data for axis in layout.axes}
    found = []
    for mode in layout.modes:
        groups = layout.groups(mode)
        digits = groups.digits
        shown = groups[: len(groups) if digits is None else GROUPS_SHOWN]
        size = max((len(group) for group in shown), default=0)
        if size < 2:
            continue
        far = any(clock.link(group) == "network" for group in shown)
        found.append(
            ModeGroups(
                mode=mode.name,
                size=size,
                count=len(groups),
                data="" if mode is ParallelMode.GLOBAL else data.get(mode, mode.data),
                digits=digits,
                groups=tuple(tuple(group) for group in shown if len(group) <= 4096),
                link="network" if far else "node",
                communicator=True,
            )
        )
    return tuple(found)


def _ledger(kinds: Kinds) -> list[LedgerLine]:
    """Parameters that lie alike and are summed alike, over all kinds of ranks."""
    gathered: dict[Any, dict[int, list[int]]] = {}
    for rank, gradients in kinds.gradients.items():
        rows: dict[str, list[Any]] = {}
        for row in gradients.ledger.rows:
            rows.setdefault(row.parameter, []).append(row)
        alike = kinds.parameters[gradients.rank]  # the same ones under other names, where a stage like it was planned
        for held, planned in zip(kinds.parameters[rank], alike, strict=True):
            for row in rows.get(planned.name) or [None]:
                who = "" if row is None else row.who
                mode, size, divisor = ("", 1, 1.0) if row is None else (row.mode, len(row.ranks), row.divisor)
                key = (pattern_of(held.name), str(held.placement), mode, size, divisor, who)
                one = gathered.setdefault(key, {}).setdefault(stage_of(kinds.layout, rank), [0, 0])
                one[0] += 1
                one[1] += held.elements
    lines = []
    for (pattern, placement, mode, size, divisor, who), stages in gathered.items():
        count, elements = max(stages.values())
        lines.append(LedgerLine(pattern, count, elements, tuple(sorted(stages)), placement, mode, size, divisor, who))
    return lines


def _totals(
    layout: Layout,
    modes: tuple[ModeGroups, ...],
    classes: tuple[RankClass, ...],
    steps: Steps | None,
    hardware: Hardware,
) -> Totals:
    world = layout.world_size
    communicators = len({(each.digits or each.groups, each.count) for each in modes})
    number = sum({(each.digits or each.groups): each.count for each in modes}.values())
    if steps is None:
        return Totals(world, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0, True, 0, 0, number, communicators)
    rows, tokens = samples_of(steps.kinds.data)
    distinct = 1
    for axis in layout.axes:
        if axis.data == "distinct" and axis.mode is not ParallelMode.SEQUENCE:
            distinct *= axis.size
    moved = Counter[str]()
    for one in classes:
        for call in one.collectives:
            moved[call.link] += _sent(call) * call.count * one.count
    flops = sum(one.count * steps.flops(one) for one in classes)
    again = sum(one.count * steps.recomputed(one) for one in classes)
    peak = max(one.memory.total for one in classes)
    times = steps.times()
    most = times.step * world * steps.peak_flops
    return Totals(
        world_size=world,
        parameters=_elements(steps.kinds),
        step_seconds=times.step,
        compute_seconds=times.compute,
        exposed_seconds=times.exposed,
        bubble_seconds=times.bubble,
        optimizer_seconds=times.optimizer,
        samples=rows * distinct * steps.accumulation,
        tokens=tokens * distinct * steps.accumulation,
        flops=flops,
        model_flops=flops - again,
        mfu=(flops - again) / most if most else 0.0,
        hfu=flops / most if most else 0.0,
        peak_memory=peak,
        fits=all(one.memory.fit != "does not fit" for one in classes),
        bytes_inside_nodes=moved["node"],
        bytes_between_nodes=moved["network"],
        communicators=number,
        communicators_per_rank=communicators,
    )


def _sent(call: Any) -> int:
    """Bytes that a rank sends in one call, by a bandwidth-optimal algorithm."""
    share = (call.ranks - 1) / call.ranks
    return int({"all_reduce": 2 * share, "send": 1.0, "receive": 0.0}.get(call.op, share) * call.bytes)


def _elements(kinds: Kinds) -> int:
    """Elements of the whole model: a tied parameter counts once."""
    found = {}
    for parameters in kinds.parameters.values():
        for held in parameters:
            tied = held.placement.tied
            found[tied.key if tied is not None else held.name] = held.whole
    return sum(found.values())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)

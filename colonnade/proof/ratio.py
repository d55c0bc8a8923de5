"""Which bug is this? What a factor in a gradient or a norm can mean in a layout, from the sizes that are in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import isfinite, sqrt
from typing import Literal, NamedTuple

from colonnade.config import Config
from colonnade.context.layout import Layout
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError
from colonnade.parallel.demand import owed
from colonnade.parallel.placement import Placement, Shard

Of = Literal["gradient", "norm"]

NEAR = 0.015
"""How far a ratio may be off: people type two or three digits of a root."""
_PAIRS_SHOWN = 3
_LOSS = "engine.backward(loss) divides by gradient_accumulation itself"


class Meaning(NamedTuple):
    """A factor that a mistake would make: `made_of` says from which sizes, `likely` is lower for what is seen more often."""

    value: float
    cause: str
    made_of: str
    sentence: str
    likely: int


def meanings(config: Config, world_size: int, ratio: float, of: Of = "gradient") -> tuple[list[Meaning], list[Meaning]]:
    """(What makes this ratio, best first; the nearest, where nothing does)."""
    if not isfinite(ratio) or ratio <= 0:
        raise ConfigError(f"--ratio {ratio:g}: give found / expected, a number above 0, such as 4 or 0.25")
    return fitting(*factors(config, world_size, of), ratio)


def factors(config: Config, world_size: int, of: Of = "gradient") -> tuple[list[Meaning], list[Meaning]]:
    """Every factor that (one mistake; two at once) can make in this layout."""
    layout = build_layout(config, world_size)
    single = [*_of_gradients(layout, config), *(_of_norms(layout) if of == "norm" else ())]
    single = [one for one in single if abs(one.value - 1) > NEAR]
    return single, list(_pairs(single))


def fitting(single: list[Meaning], pairs: list[Meaning], ratio: float) -> tuple[list[Meaning], list[Meaning]]:
    """Of these factors (those that make the ratio, best first; the nearest single ones, where none does)."""
    if abs(ratio - 1) <= NEAR:
        return [_right()], []
    found = [one for one in [*single, *pairs] if abs(one.value / ratio - 1) <= NEAR]
    best = sorted(_once(found), key=lambda one: one.likely)
    best = [one for one in best if one.likely < 10] + [one for one in best if one.likely >= 10][:_PAIRS_SHOWN]
    near = sorted(_once(single), key=lambda one: max(one.value / ratio, ratio / one.value))[:3]
    return best, [] if best else near


def _right() -> Meaning:
    return Meaning(1.0, "unknown", "1", "this is as it should be: no size of the layout is in it", 0)


# -- one mistake ------------------------------------------------------------------------------------------


def _of_gradients(layout: Layout, config: Config) -> Iterator[Meaning]:
    for size in _sizes(layout):
        found = _distinct(size.mode, size.size) if size.data == "distinct" else _same(size.mode, size.size)
        yield from (one._replace(likely=one.likely + size.likely) for one in found)
    yield from _world(layout)
    yield from _experts(layout)
    yield from _stages(layout)
    accumulation = int(config.get("gradient_accumulation") or 1)
    if accumulation > 1:
        name = f"accumulation {accumulation}"
        yield Meaning(
            accumulation,
            "scaled-by-accumulation",
            name,
            f"the losses of {accumulation} passes are added and not averaged: {_LOSS}; a loop or schedule that calls "
            f"loss.backward() must do it",
            3,
        )
        yield Meaning(
            1 / accumulation,
            "scaled-by-accumulation",
            f"1 / {name}",
            f"divided by gradient_accumulation twice: {_LOSS}, so the loop must not",
            3,
        )
        yield Meaning(
            1 / accumulation,
            "last-micro-batch-only",
            f"1 / {name}",
            "about this, if only one of the passes is in the gradient: look for zero_grad() between passes, or for sums that "
            "replace .grad instead of adding to it",
            5,
        )
    yield from _micro_batches(config)
    if config.get("fp16"):
        yield from _loss_scale(config)


class _Size(NamedTuple):
    """A number of ranks that can be in a factor: a mode, the ranks of its groups, what they see, and how likely it is."""

    mode: ParallelMode
    size: int
    data: str
    likely: int = 0


def _sizes(layout: Layout) -> list[_Size]:
    """The axes of the world, and modes that lie inside or across them; pipeline and experts are looked at by themselves."""
    axes = [_Size(axis.mode, axis.size, axis.data) for axis in layout.axes if axis.mode is not ParallelMode.PIPELINE]
    seen = {tuple(layout.group_of(one.mode, 0)) for one in axes if layout.has(one.mode, 0)}
    for mode in layout.modes:
        group = tuple(layout.groups(mode)[0]) if len(layout.groups(mode)) else ()
        if mode not in _APART and group not in seen:
            seen.add(group)
            axes.append(_Size(mode, len(group), mode.data, likely=3))
    return [one for one in axes if one.size > 1]


_APART = (
    *(ParallelMode.GLOBAL, ParallelMode.MODEL, ParallelMode.PIPELINE),
    *(ParallelMode.EXPERT, ParallelMode.EXPERT_DATA, ParallelMode.MOE_MODEL, ParallelMode.MOE_DATA),
)


def _distinct(mode: ParallelMode, size: int) -> Iterator[Meaning]:
    name = f"{mode.name} {size}"
    yield Meaning(
        size,
        "summed-not-averaged",
        name,
        f"summed over {mode.name} and not divided by its {size} ranks: look at the handler's all_reduce(SUM), or at a loss that "
        f"is a sum over the batch",
        0,
    )
    yield Meaning(
        1 / size,
        "wrong-divisor",
        f"1 / {name}",
        f"divided by the {size} ranks of {mode.name} twice: a mean (ReduceOp.AVG, or a loss divided by the world) that the "
        f"handler divides again",
        1,
    )
    yield Meaning(
        1 / size,
        "averaged-not-summed",
        f"1 / {name}",
        f"a mean over {mode.name} where a sum was owed: a (sum, count) loss whose count is of all ranks is summed, not averaged",
        4,
    )
    yield Meaning(
        size,
        "reduced-twice",
        name,
        f"summed over {mode.name} by two handlers, and divided by one of them: engine.ledger() shows who does what",
        2,
    )
    yield Meaning(
        size**2,
        "reduced-twice",
        f"{name} squared",
        f"summed over {mode.name} twice and divided by neither: look for DDP or FSDP around a model that the engine sums too",
        4,
    )


def _same(mode: ParallelMode, size: int) -> Iterator[Meaning]:
    name = f"{mode.name} {size}"
    yield Meaning(
        size,
        "scaled-by-mode",
        name,
        f"the loss, or a gradient that is whole already, counts once for each of the {size} ranks of {mode.name}: an all_reduce "
        f"whose backward sums again (use colonnade.parallel.collectives), or a handler over {mode.name} that no placement owes",
        1,
    )
    yield Meaning(
        1 / size,
        "averaged-not-summed",
        f"1 / {name}",
        f"averaged over {mode.name}, whose ranks each have a part: the sum that Replicate(owes='sum') owes is not divided",
        2,
    )
    yield Meaning(
        1 / size,
        "scaled-by-mode",
        f"1 / {name}",
        f"the loss is divided by the size of {mode.name}, whose ranks see the same data: divide by ranks of distinct data only",
        3,
    )


def _world(layout: Layout) -> Iterator[Meaning]:
    saw, world = layout.distinct_data, layout.world_size
    if 1 < saw < world:
        yield Meaning(
            saw / world,
            "wrong-divisor",
            f"{saw} / world {world}",
            f"divided by all {world} ranks of the world instead of the {saw} that saw distinct data: look for get_world_size() "
            f"without a group",
            2,
        )


def _experts(layout: Layout) -> Iterator[Meaning]:
    """What comes of dividing by the ranks that communicate, where others' tokens are in the gradient too."""
    if not layout.has(ParallelMode.EXPERT, 0) or len(layout.group_of(ParallelMode.EXPERT, 0)) == 1:
        return
    for factor in owed(layout, Placement({ParallelMode.EXPERT: Shard(0)}), 0):
        sent, held = factor.divisor, len(factor.ranks)
        if sent > held:
            yield Meaning(
                sent / held,
                "wrong-divisor",
                f"{sent} senders / {held} holders",
                f"in experts alone: divided by the size of {factor.mode.name} ({held}), which communicates, instead of by the "
                f"{sent} ranks that sent them tokens",
                1,
            )


def _stages(layout: Layout) -> Iterator[Meaning]:
    stages = layout.grid.sizes.get("pipeline", 1)
    if stages > 1:
        yield Meaning(
            stages,
            "scaled-by-mode",
            f"PIPELINE {stages}",
            f"summed over the {stages} pipeline stages, though each has parameters of its own: only tied weights owe that",
            4,
        )
        yield Meaning(
            0.5,
            "tied-copy-missed",
            "1 / 2 copies",
            "about this, in a tied weight alone: the gradient of one of its two stages is missing, or averaged; place it as "
            "Tied((first, last), key)",
            4,
        )
        yield Meaning(
            2.0,
            "reduced-twice",
            "2 copies",
            "in a tied weight alone: its stages are summed twice, by the schedule and by a handler",
            5,
        )


def _micro_batches(config: Config) -> Iterator[Meaning]:
    schedule = config.get("schedule")
    own = schedule.get("num_microbatches") if isinstance(schedule, dict) else None
    count = own or config.get("num_microbatches")
    if count and count > 1:
        yield Meaning(
            count,
            "scaled-by-accumulation",
            f"micro-batches {count}",
            f"the losses of {count} micro-batches are added and not averaged: the schedule weights them; a loss of your own "
            f"must be a mean, or (sum, count)",
            3,
        )
        yield Meaning(
            1 / count,
            "last-micro-batch-only",
            f"1 / micro-batches {count}",
            f"about this, if one micro-batch of {count} arrived, or if the loss is divided by their number twice",
            4,
        )


def _loss_scale(config: Config) -> Iterator[Meaning]:
    fp16 = config.get("fp16")
    scale = (fp16.get("init_scale") if isinstance(fp16, dict) else None) or 2.0**16
    for doublings in range(-8, 9):
        yield Meaning(
            scale * 2.0**doublings,
            "loss-scale-left",
            f"loss scale {scale * 2.0**doublings:g}",
            "the loss scale of fp16 is still in the gradient: it is divided out in engine.step(), so read gradients after it",
            3 + abs(doublings),
        )


def _of_norms(layout: Layout) -> Iterator[Meaning]:
    """What is wrong in a norm although the gradients are right."""
    stages = layout.grid.sizes.get("pipeline", 1)
    piped = [_Size(ParallelMode.PIPELINE, stages, "same")] if stages > 1 else []
    for mode, size, data, likely in [*_sizes(layout), *piped]:
        root, name = sqrt(size), f"root of {mode.name} {size}"
        if mode is not ParallelMode.PIPELINE:
            yield Meaning(
                root,
                "norm-counts-replicas",
                name,
                f"squares of parameters that the {size} ranks of {mode.name} all hold are counted {size} times (fewer, if some are "
                f"cut): each rank counts 1/{size} of them",
                likely,
            )
            yield Meaning(
                1 / root,
                "norm-misses-shards",
                f"1 / {name}",
                f"about this, if each rank of {mode.name} takes the norm of its own part: squares of parts are summed over "
                f"{mode.name} before the root",
                1 + likely + 3 * (data == "distinct"),
            )
        else:
            yield Meaning(
                1 / root,
                "norm-of-a-part",
                f"1 / {name}",
                "about this, if each pipeline stage takes the norm of its own parameters: sum the squares over the stages",
                1,
            )
        if data == "distinct":
            yield Meaning(
                root,
                "clipped-before-reduced",
                name,
                f"about this, if the norm is taken of each rank's own gradient, before the mean over {mode.name}: averaging "
                f"makes noise smaller by the root of {size}",
                2 + likely,
            )


# -- two at once ------------------------------------------------------------------------------------------


def _pairs(single: list[Meaning]) -> Iterator[Meaning]:
    """Two mistakes that have nothing to do with each other: the likeliest of each size."""
    best: dict[str, Meaning] = {}
    for one in sorted(single, key=lambda one: one.likely):
        best.setdefault(one.made_of, one)
    for first, second in combinations(best.values(), 2):
        if _words(first) & _words(second) or "loss scale" in first.made_of + second.made_of:
            continue
        alike = first.cause == second.cause
        and_ = f"likewise over {second.made_of}" if alike else f"({second.cause}) {second.sentence}"
        yield Meaning(
            first.value * second.value,
            first.cause,
            f"{first.made_of} x {second.made_of}",
            f"two at once: {first.sentence}; and {and_}",
            (10 if alike else 20) + first.likely + second.likely,
        )


def _words(one: Meaning) -> set[str]:
    """The modes, and what else, that a factor is made of."""
    return {word for word in one.made_of.split() if word.isidentifier() and word not in ("root", "of")}


def _once(found: list[Meaning]) -> list[Meaning]:
    """Without what is said twice."""
    return list({(one.cause, one.made_of, one.sentence): one for one in found}.values())

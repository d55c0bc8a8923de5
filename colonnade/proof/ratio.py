"""`colonnade explain --ratio`: the mistakes that multiply a gradient or a norm by a given factor in a given layout."""

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
"""The relative tolerance of a ratio: people type two or three digits of a square root."""
_PAIRS_SHOWN = 3


class Meaning(NamedTuple):
    """A factor, and the mistake that would cause it.

    `made_of` is the factor in terms of mode sizes. `likely` is a rank: a lower number is a more frequent mistake.
    """

    value: float
    cause: str
    made_of: str
    sentence: str
    likely: int


def meanings(config: Config, world_size: int, ratio: float, of: Of = "gradient") -> tuple[list[Meaning], list[Meaning]]:
    """Return the mistakes that cause this ratio, most frequent first, and the nearest factors if there is none.

    Raises:
        ConfigError: `ratio` is not a positive finite number.
    """
    if not isfinite(ratio) or ratio <= 0:
        raise ConfigError(
            f"--ratio is {ratio:g}; give the found value divided by the expected value, a number above 0, such as 4 "
            "or 0.25"
        )
    return fitting(*factors(config, world_size, of), ratio)


def factors(config: Config, world_size: int, of: Of = "gradient") -> tuple[list[Meaning], list[Meaning]]:
    """Return (the factors of single mistakes, the factors of two mistakes at once) that are possible in this layout."""
    layout = build_layout(config, world_size)
    single = [*_of_gradients(layout, config), *(_of_norms(layout) if of == "norm" else ())]
    single = [meaning for meaning in single if abs(meaning.value - 1) > NEAR]

    # Two unrelated mistakes. Of each size only the most frequent one counts, or there would be too many.
    best: dict[str, Meaning] = {}
    for meaning in sorted(single, key=lambda meaning: meaning.likely):
        best.setdefault(meaning.made_of, meaning)
    pairs = []
    for first, second in combinations(best.values(), 2):
        if _names(first) & _names(second) or "loss scale" in first.made_of + second.made_of:
            continue
        same = first.cause == second.cause
        other = f"likewise over {second.made_of}" if same else f"({second.cause}) {second.sentence}"
        value, made_of = first.value * second.value, f"{first.made_of} x {second.made_of}"
        likely = (10 if same else 20) + first.likely + second.likely
        pairs.append(Meaning(value, first.cause, made_of, f"two at once: {first.sentence}; and {other}", likely))
    return single, pairs


def fitting(single: list[Meaning], pairs: list[Meaning], ratio: float) -> tuple[list[Meaning], list[Meaning]]:
    """Return the factors that equal a ratio, most frequent mistake first, and the nearest single ones if there is none."""
    if abs(ratio - 1) <= NEAR:
        return [Meaning(1.0, "unknown", "1", "a factor of 1 is not an error", 0)], []
    found = [meaning for meaning in [*single, *pairs] if abs(meaning.value / ratio - 1) <= NEAR]
    best = sorted(_without_repeats(found), key=lambda meaning: meaning.likely)
    best = [meaning for meaning in best if meaning.likely < 10] + [meaning for meaning in best if meaning.likely >= 10][
        :_PAIRS_SHOWN
    ]
    near = sorted(_without_repeats(single), key=lambda meaning: max(meaning.value / ratio, ratio / meaning.value))[:3]
    return best, [] if best else near


def _names(meaning: Meaning) -> set[str]:
    """The names of modes, and other words, in a factor."""
    return {word for word in meaning.made_of.split() if word.isidentifier() and word not in ("root", "of")}


def _without_repeats(found: list[Meaning]) -> list[Meaning]:
    return list({(meaning.cause, meaning.made_of, meaning.sentence): meaning for meaning in found}.values())


# --- The factors of one mistake ---


class _Size(NamedTuple):
    """A number of ranks that can be in a factor: the mode of their groups, the data that they see, and how likely it is."""

    mode: ParallelMode
    size: int
    data: str
    likely: int = 0


_APART = (
    *(ParallelMode.GLOBAL, ParallelMode.MODEL, ParallelMode.PIPELINE),
    *(ParallelMode.EXPERT, ParallelMode.EXPERT_DATA, ParallelMode.MOE_MODEL, ParallelMode.MOE_DATA),
)
"""Modes whose sizes have meanings of their own."""


def _sizes(layout: Layout) -> list[_Size]:
    """The axes of the world, and the modes inside or across them, without pipeline and experts."""
    axes = [_Size(axis.mode, axis.size, axis.data) for axis in layout.axes if axis.mode is not ParallelMode.PIPELINE]
    seen = {tuple(layout.group_of(meaning.mode, 0)) for meaning in axes if layout.has(meaning.mode, 0)}
    for mode in layout.modes:
        group = tuple(layout.groups(mode)[0]) if len(layout.groups(mode)) else ()
        if mode not in _APART and group not in seen:
            seen.add(group)
            axes.append(_Size(mode, len(group), mode.data, likely=3))
    return [meaning for meaning in axes if meaning.size > 1]


def _of_gradients(layout: Layout, config: Config) -> Iterator[Meaning]:
    """Mistakes in gradients."""
    for mode, n, data, likely in _sizes(layout):
        name, over = f"{mode.name} {n}", mode.name
        # Ranks with distinct data: the mean over their gradients is required.
        if data == "distinct":
            sentence = f"summed over {over} and not divided by its {n} ranks: look at the handler's all_reduce(SUM), or at a loss that is a sum over the batch"
            yield Meaning(n, "summed-not-averaged", name, sentence, likely)
            sentence = f"divided by the {n} ranks of {over} twice: by a mean (ReduceOp.AVG, or a loss divided by the world size), and again by the handler"
            yield Meaning(1 / n, "wrong-divisor", f"1 / {name}", sentence, 1 + likely)
            sentence = (
                f"a mean over {over} where a sum is required: if a (sum, count) loss is divided by the count of all ranks, "
                f"gradients are summed, not averaged"
            )
            yield Meaning(1 / n, "averaged-not-summed", f"1 / {name}", sentence, 4 + likely)
            sentence = f"summed over {over} by two handlers, and divided by one of them: engine.ledger() shows the handler of each reduction"
            yield Meaning(n, "reduced-twice", name, sentence, 2 + likely)
            sentence = f"summed over {over} twice and never divided: look for DDP or FSDP around a model that the engine reduces too"
            yield Meaning(n**2, "reduced-twice", f"{name} squared", sentence, 4 + likely)
        # Ranks with the same data: gradients are complete, or partial sums.
        else:
            sentence = (
                f"the loss, or a gradient that is complete already, counts once for each of the {n} ranks of {over}: an all_reduce whose "
                f"backward sums again (use colonnade.parallel.collectives), or a handler over {over} that no placement requires"
            )
            yield Meaning(n, "scaled-by-mode", name, sentence, 1 + likely)
            sentence = f"averaged over {over}, whose ranks have partial gradients: the sum that Replicate(owes='sum') declares must not be divided"
            yield Meaning(1 / n, "averaged-not-summed", f"1 / {name}", sentence, 2 + likely)
            sentence = f"the loss is divided by the size of {over}, whose ranks see the same data: divide only by ranks with distinct data"
            yield Meaning(1 / n, "scaled-by-mode", f"1 / {name}", sentence, 3 + likely)

    distinct, world = layout.distinct_data, layout.world_size
    if 1 < distinct < world:
        sentence = f"divided by all {world} ranks of the world instead of the {distinct} that saw distinct data: look for get_world_size() without a group"
        yield Meaning(distinct / world, "wrong-divisor", f"{distinct} / world {world}", sentence, 2)

    # Experts: their groups are smaller than the number of ranks whose tokens are in the gradient.
    if layout.has(ParallelMode.EXPERT, 0) and len(layout.group_of(ParallelMode.EXPERT, 0)) > 1:
        for factor in owed(layout, Placement({ParallelMode.EXPERT: Shard(0)}), 0):
            sent, ranks = factor.divisor, len(factor.ranks)
            if sent > ranks:
                sentence = (
                    f"in experts only: divided by the size of the group that communicates ({factor.mode.name}, {ranks}), instead "
                    f"of by the {sent} ranks that sent tokens"
                )
                yield Meaning(sent / ranks, "wrong-divisor", f"{sent} senders / {ranks} replicas", sentence, 1)

    # Pipeline stages have different parameters, except for tied weights.
    stages = layout.grid.sizes.get("pipeline", 1)
    if stages > 1:
        sentence = f"summed over the {stages} pipeline stages, although each has its own parameters: only tied weights require that"
        yield Meaning(stages, "scaled-by-mode", f"PIPELINE {stages}", sentence, 4)
        sentence = "approximately, and in a tied weight only: the gradient of one of its two stages is missing, or averaged; place it as Tied((first, last), key)"
        yield Meaning(0.5, "tied-copy-missed", "1 / 2 copies", sentence, 4)
        sentence = "in a tied weight only: its stages are summed twice, by the schedule and by a handler"
        yield Meaning(2.0, "reduced-twice", "2 copies", sentence, 5)

    accumulation = int(config.get("gradient_accumulation") or 1)
    if accumulation > 1:
        name, does = f"accumulation {accumulation}", "engine.backward(loss) divides by gradient_accumulation itself"
        sentence = f"the losses of {accumulation} passes are added and not averaged: {does}; a loop or schedule that calls loss.backward() must do it"
        yield Meaning(accumulation, "scaled-by-accumulation", name, sentence, 3)
        sentence = f"divided by gradient_accumulation twice: {does}, so the loop must not"
        yield Meaning(1 / accumulation, "scaled-by-accumulation", f"1 / {name}", sentence, 3)
        sentence = (
            "approximately, if only one of the passes is in the gradient: look for zero_grad() between passes, or for reductions "
            "that replace .grad instead of adding to it"
        )
        yield Meaning(1 / accumulation, "last-micro-batch-only", f"1 / {name}", sentence, 5)

    schedule = config.get("schedule")
    own = schedule.get("num_microbatches") if isinstance(schedule, dict) else None
    count = own or config.get("num_microbatches")
    if count and count > 1:
        name = f"micro-batches {count}"
        sentence = f"the losses of {count} micro-batches are added and not averaged: the schedule weights them; a custom loss must be a mean, or (sum, count)"
        yield Meaning(count, "scaled-by-accumulation", name, sentence, 3)
        sentence = f"approximately, if only one of {count} micro-batches is in the gradient, or if the loss is divided by their number twice"
        yield Meaning(1 / count, "last-micro-batch-only", f"1 / {name}", sentence, 4)

    # The loss scale of fp16 changes during a run, by powers of two.
    fp16 = config.get("fp16")
    initial = (fp16.get("init_scale") if isinstance(fp16, dict) else None) or 2.0**16
    for doublings in range(-8, 9) if fp16 else ():
        scale = initial * 2.0**doublings
        sentence = "the loss scale of fp16 is still in the gradient: engine.step() divides by it, so read gradients after the step"
        yield Meaning(scale, "loss-scale-left", f"loss scale {scale:g}", sentence, 3 + abs(doublings))


def _of_norms(layout: Layout) -> Iterator[Meaning]:
    """Mistakes in a norm of right gradients."""
    for mode, n, data, likely in _sizes(layout):
        root, name, over = sqrt(n), f"root of {mode.name} {n}", mode.name
        sentence = (
            f"squares of parameters that all {n} ranks of {over} store are counted {n} times (fewer, if some parameters are "
            f"sharded): each rank must count 1/{n} of them"
        )
        yield Meaning(root, "norm-counts-replicas", name, sentence, likely)
        sentence = f"approximately, if each rank of {over} takes the norm of its own shards: squares must be summed over {over} before the root"
        yield Meaning(1 / root, "norm-misses-shards", f"1 / {name}", sentence, 1 + likely + 3 * (data == "distinct"))
        if data == "distinct":
            sentence = (
                f"approximately, if the norm is that of each rank's local gradient, before the mean over {over}: averaging reduces "
                f"noise by the root of {n}"
            )
            yield Meaning(root, "clipped-before-reduced", name, sentence, 2 + likely)
    stages = layout.grid.sizes.get("pipeline", 1)
    if stages > 1:
        sentence = "approximately, if each pipeline stage takes the norm of its own parameters: sum the squares over the stages"
        yield Meaning(1 / sqrt(stages), "norm-of-a-part", f"1 / root of PIPELINE {stages}", sentence, 1)

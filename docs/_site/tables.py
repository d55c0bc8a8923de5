"""The numbers of the three pieces that run in the page: tables made by calling the library.

A browser gets no file by itself from file://, so each table is a script that sets one variable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from math import prod, sqrt
from pathlib import Path
from typing import Any

from colonnade.config import load_config
from colonnade.context import ParallelMode, build_layout
from colonnade.context.layout import Layout
from colonnade.engine.schedule.actions import Action, Kind
from colonnade.engine.schedule.orders import chunks_of, make_table
from colonnade.engine.schedule.replay import EQUAL_COSTS, live_counts, simulate
from colonnade.errors import ScheduleError
from colonnade.parallel.demand import holding, joint_ranks, owed
from colonnade.parallel.placement import Placement, Replicate, Shard, Spec, Tied
from colonnade.proof.ratio import NEAR, Meaning, factors, fitting
from colonnade.registry import ORDERS

LARGEST = 1_000_000
"""Bytes of a table; a page should not load more."""


def write(folder: Path) -> None:
    """Write every table into the folder."""
    for name, make in {"placement": placements, "pipeline": pipelines, "which_bug": bugs}.items():
        text = f"window.colonnade_{name} = {json.dumps(make(), separators=(',', ':'))};\n"
        if len(text) > LARGEST:
            raise ValueError(f"the table {name!r} has {len(text):,} bytes, over {LARGEST:,}; make its domain smaller")
        (folder / f"table_{name}.js").write_text(text, encoding="utf-8")


# -- the placement explorer -------------------------------------------------------------------------------

SIZES: dict[str, tuple[int, ...]] = {
    "data": (1, 2, 3, 4, 8),
    "expert": (1, 2, 4),
    "sequence": (1, 2),
    "pipeline": (1, 2, 4),
    "tensor": (1, 2, 4),
}
WORLD = 16
ON_TENSOR: dict[str, Spec | None] = {"whole": None, "cut": Shard(0), "part": Replicate(owes="sum")}
ON_EXPERT: dict[str, Spec | None] = {"whole": None, "cut": Shard(0)}
ON_PIPELINE = ("own", "tied")


def placements() -> dict[str, Any]:
    """By sizes ("2,1,1,1,2"): the ranks' coordinates; by placement ("cut,whole,own"): who holds what, and what is owed."""
    return {
        "sizes": SIZES,
        "layouts": {",".join(map(str, sizes)): _of_layout(sizes) for sizes in layouts()},
    }


def layouts() -> Iterator[tuple[int, ...]]:
    """All sizes of the domain that make a world."""
    for sizes in product(*SIZES.values()):
        data, expert, sequence, pipeline, tensor = sizes
        if data * sequence * pipeline * tensor <= WORLD and data % expert == 0:
            yield sizes


def layout_of(sizes: tuple[int, ...]) -> Layout:
    """The layout of these sizes, in the order of SIZES."""
    named = dict(zip(SIZES, sizes, strict=True))
    world = named["data"] * named["sequence"] * named["pipeline"] * named["tensor"]
    return build_layout({"parallel": {name: size for name, size in named.items() if size > 1}}, world)


def placement_of(sizes: tuple[int, ...], tensor: str, expert: str, pipeline: str) -> Placement:
    """The placement that these choices describe."""
    modes: dict[ParallelMode, Spec] = {}
    if (on_expert := ON_EXPERT[expert]) is not None:
        modes[ParallelMode.EXPERT] = on_expert
    if (on_tensor := ON_TENSOR[tensor]) is not None:
        modes[ParallelMode.TENSOR] = on_tensor
    if pipeline == "tied":
        modes[ParallelMode.PIPELINE] = Tied((0, dict(zip(SIZES, sizes, strict=True))["pipeline"] - 1), "shared")
    return Placement(modes)


def choices(sizes: tuple[int, ...]) -> Iterator[tuple[str, str, str]]:
    """What can be said of a parameter in this layout."""
    _, expert, _, pipeline, tensor = sizes
    yield from product(
        ON_TENSOR if tensor > 1 else ("whole",),
        ON_EXPERT if expert > 1 else ("whole",),
        ON_PIPELINE if pipeline > 1 else ("own",),
    )


def _of_layout(sizes: tuple[int, ...]) -> dict[str, Any]:
    layout = layout_of(sizes)
    names = [axis.name for axis in layout.axes if axis.size > 1]
    return {
        "axes": names,
        "ranks": ["".join(str(layout.coordinates(rank)[name]) for name in names) for rank in range(layout.world_size)],
        "placed": {
            ",".join(chosen): _of_placement(layout, placement_of(sizes, *chosen), sizes[3]) for chosen in choices(sizes)
        },
    }


def _of_placement(layout: Layout, placement: Placement, stages: int) -> dict[str, Any]:
    """Groups are written as one character for each rank: ranks with the same one are together, `-` is in none."""
    ranks = [rank for rank in range(layout.world_size) if _has(layout, placement, rank, stages)]
    sums: dict[str, tuple[dict[int, tuple[int, ...]], int]] = {}
    joint: dict[int, tuple[int, ...]] = {}
    for rank in ranks:
        found = owed(layout, placement, rank)
        joint[rank] = joint_ranks(layout, placement, found, rank)
        for factor in found:
            groups, divisor = sums.setdefault(factor.mode.name, ({}, factor.divisor))
            if divisor != factor.divisor:
                raise ValueError(f"{placement}: {factor.mode} has the divisors {divisor} and {factor.divisor}")
            groups[rank] = factor.ranks
    (count,) = {holding(layout, placement, rank).count for rank in ranks}
    return {
        "holders": count,
        "divisor": prod(divisor for _, divisor in sums.values()),
        "held": _written({rank: holding(layout, placement, rank).ranks for rank in ranks}, layout.world_size),
        "parts": [
            [mode.name, "".join(str(layout.local_rank(mode, rank)) for rank in range(layout.world_size))]
            for mode in placement.shards
        ],
        "sums": [[mode, _written(groups, layout.world_size), divisor] for mode, (groups, divisor) in sums.items()],
        "joint": _written(joint, layout.world_size),
    }


def _has(layout: Layout, placement: Placement, rank: int, stages: int) -> bool:
    return placement.tied is None or layout.coordinates(rank).get("pipeline", 0) in (0, stages - 1)


def _written(groups: dict[int, tuple[int, ...]], world: int) -> str:
    names: dict[tuple[int, ...], str] = {}
    letters = "abcdefghijklmnopqrstuvwxyz"
    return "".join(
        names.setdefault(groups[rank], letters[len(names)]) if rank in groups else "-" for rank in range(world)
    )


# -- the pipeline player ----------------------------------------------------------------------------------

RANKS = (2, 3, 4, 6, 8)
MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
CHUNKS = (2, 3)


def pipelines() -> dict[str, Any]:
    """By "order,ranks,chunks,micro-batches": the rows of the timeline, how much of it is waiting, what is held."""
    return {
        "costs": {kind.value: EQUAL_COSTS(Action(0, kind, 0)) for kind in map(Kind, "FBIW")},
        "ranks": RANKS,
        "micro_batches": MICRO_BATCHES,
        "orders": {name: [own] if (own := chunks_of(name)) else list(CHUNKS) for name in ORDERS},
        "runs": {",".join(map(str, run)): _of_pipeline(*run) for run in runs()},
    }


def runs() -> Iterator[tuple[str, int, int, int]]:
    """All of (order, ranks, chunks, micro-batches)."""
    for name in ORDERS:
        own = chunks_of(name)
        yield from product([name], RANKS, [own] if own else CHUNKS, MICRO_BATCHES)


def _of_pipeline(name: str, ranks: int, chunks: int, micro_batches: int) -> Any:
    """A row is "0F0 0F1 ~3 0B0": actions and waits. Held are micro-batches x chunks after each action; or a refusal."""
    try:
        table = make_table(name, ranks, micro_batches, chunks)
    except ScheduleError as error:
        return {"refused": str(error)}
    timeline = simulate(table, EQUAL_COSTS)
    rows, held = [], []
    for rank, row in timeline.rows.items():
        words, now = [], 0.0
        for timed in row:
            if timed.start > now:
                words.append(f"~{round(timed.start - now)}")
            words.append(str(timed.action) if chunks > 1 else str(timed.action).lstrip("0123456789"))
            now = timed.end
        rows.append(" ".join(words))
        held.append("".join(_digit(round(count * chunks)) for count in live_counts(table[rank])))
    return {
        "rows": rows,
        "held": held,
        "span": round(timeline.makespan),
        "bubble": round(timeline.bubble, 6),
        "peak": [round(timeline.peak_live[rank], 4) for rank in timeline.rows],
    }


def _digit(count: int) -> str:
    return chr(ord("0") + count)


# -- which bug is this? -----------------------------------------------------------------------------------

BUG_SIZES: dict[str, tuple[int, ...]] = {
    "data": (1, 2, 4, 8),
    "expert": (1, 2),
    "pipeline": (1, 2, 4),
    "tensor": (1, 2, 4),
    "passes": (1, 2, 4, 8),
}
OF = ("gradient", "norm")


def bugs() -> dict[str, Any]:
    """By "gradient,4,1,1,2,1": where each answer begins ("2.0304:1a.2b"), as numbers of the sentences in `said`.

    An answer holds from its ratio to the next one's. `?` is before the nearest factors, where none fits.
    """
    said: dict[tuple[Any, ...], int] = {}
    table = {
        ",".join(map(str, (of, *sizes))): _answers(of, sizes, said)
        for of in OF
        for sizes in product(*BUG_SIZES.values())
        if sizes[0] % sizes[1] == 0
    }
    return {"sizes": BUG_SIZES, "of": OF, "table": table, "said": [list(one) for one in said]}


def bug_config(sizes: tuple[int, ...]) -> tuple[dict[str, Any], int]:
    """(The config of these sizes, its world): passes are micro-batches in a pipeline, and accumulated elsewhere."""
    data, expert, pipeline, tensor, passes = sizes
    config: dict[str, Any] = {"parallel": {"data": data, "expert": expert, "pipeline": pipeline, "tensor": tensor}}
    config["num_microbatches" if pipeline > 1 else "gradient_accumulation"] = passes
    return config, data * pipeline * tensor


def _answers(of: Any, sizes: tuple[int, ...], said: dict[tuple[Any, ...], int]) -> str:
    config, world = bug_config(sizes)
    single, pairs = factors(load_config(config), world, of)
    edges = [1 / (1 + NEAR), 1 / (1 - NEAR), 1 - NEAR, 1 + NEAR]
    for one in [*single, *pairs]:
        edges += [one.value / (1 + NEAR), one.value / (1 - NEAR)]
    values = sorted({one.value for one in single})
    edges += [sqrt(one * other) for at, one in enumerate(values) for other in values[at + 1 :]]
    edges = sorted({0.0, *edges})
    written: list[str] = []
    last = None
    for low, high in zip(edges, [*edges[1:], 2 * edges[-1] + 1], strict=True):
        # An edge itself may belong to the answer below it or to the one above.
        for begins, ratio in ((low, low), (low * (1 + 1e-6), (low + high) / 2)):
            if ratio == 0:
                continue
            found, near = fitting(single, pairs, ratio)
            answer = ("?" if near else "") + ".".join(_number(one, said) for one in found or near)
            if answer != last:
                written.append(f"{begins if written else 0:.8g}:{answer}")
                last = answer
    return " ".join(written)


def _number(one: Meaning, said: dict[tuple[Any, ...], int]) -> str:
    key = (float(f"{one.value:.6g}"), one.cause, one.made_of, one.sentence)
    return _base36(said.setdefault(key, len(said)))


def _base36(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return digits[number] if number < 36 else _base36(number // 36) + digits[number % 36]

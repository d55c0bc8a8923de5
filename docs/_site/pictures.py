"""Pictures of the pages: small SVG drawings whose numbers come from the library."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from pathlib import Path

import torch
from torch import nn

from colonnade.config import Config, load_config
from colonnade.context import ParallelContext, ParallelMode, build_layout
from colonnade.context.layout import Layout
from colonnade.core import global_context
from colonnade.engine.schedule.orders import make_table
from colonnade.engine.schedule.replay import simulate
from colonnade.nn import arrange
from colonnade.optim.zero.formula import bytes_held
from colonnade.parallel.demand import holding, owed
from colonnade.parallel.placement import Placement, Replicate, Shard, Tied
from colonnade.proof.planner.hardware import Clock, load_hardware
from colonnade.proof.planner.job import Job
from colonnade.proof.planner.ranks import plan_ranks
from colonnade.proof.planner.steps import Steps


class Drawing:
    """Shapes, and the size that they need. Colours are classes, so that the page's theme gives them."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.width, self.height = 0.0, 0.0

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled box with round corners; `colour` is c0 to c5, `none` or `quiet`."""
        self._reach(x + width, y + height)
        self.shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{colour}"/>')

    def words(self, x: float, y: float, text: str, kind: str = "") -> None:
        """Text whose middle is at (x, y); `kind`: `left`, `small`, `inside` (on a colour)."""
        length = 6.2 * len(text)
        self._reach(x + (length if "left" in kind else length / 2), y + 8)
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>')

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str) -> None:
        """A line; `colour` is c0 to c5, or `thin`."""
        self._reach(max(x, to_x), max(y, to_y))
        self.shapes.append(f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" class="line {colour}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line with a head at its end, which points down."""
        lean = (to_x - x) / (to_y - y) * 8
        head = f"M{to_x - lean - 4:g} {to_y - 8:g} L{to_x:g} {to_y:g} L{to_x - lean + 4:g} {to_y - 8:g}"
        self.shapes.append(f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g} {head}" class="arrow"/>')

    def svg(self, label: str) -> str:
        """The drawing as one line of HTML."""
        size = f'viewBox="0 0 {self.width + 8:g} {self.height + 8:g}" width="{self.width + 8:g}"'
        return f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(self.shapes)}</svg>'

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)


def figure(name: str) -> str:
    """The picture as HTML, in one block."""
    drawing, caption = PICTURES[name]()
    return f'<figure class="picture">{drawing.svg(caption)}<figcaption>{escape(caption)}</figcaption></figure>\n'


def in_words(name: str) -> str:
    """What the picture shows, for those who cannot see it."""
    return f"(Picture: {PICTURES[name]()[1]})\n"


def _ranks(
    drawing: Drawing, x: float, y: float, title: str, layout: Layout, say: Callable[[int], tuple[str, str]]
) -> None:
    """A square of ranks, data down and tensor across; `say` gives each rank a colour and a line."""
    across = layout.grid.sizes["tensor"]
    drawing.words(x + across * 66 - 8, y, title, "title")
    for rank in range(layout.world_size):
        colour, line = say(rank)
        left, top = x + rank % across * 128, y + 16 + rank // across * 58
        drawing.box(left, top, 118, 48, colour)
        drawing.words(left + 59, top + 17, f"rank {rank}", "inside")
        drawing.words(left + 59, top + 35, line, "inside small")


def _mesh() -> tuple[Drawing, str]:
    """Eight ranks as a cube, drawn once for each mode, with the process groups of the mode in their colours."""
    layout = build_layout({"parallel": {"tensor": 2, "pipeline": 2}}, 8)
    modes = (ParallelMode.TENSOR, ParallelMode.PIPELINE, ParallelMode.DATA)
    uses = ("each layer is sharded", "each rank runs a stage", "the ranks see different data")
    drawing = Drawing()
    for at, (mode, use) in enumerate(zip(modes, uses, strict=True)):

        def corner(rank: int, left: float = 20 + at * 270) -> tuple[float, float]:
            tensor, pipeline, data = (layout.local_rank(each, rank) for each in modes)
            return left + tensor * 110 + data * 62, 100 + pipeline * 92 - data * 52

        groups = [layout.group_of(mode, rank) for rank in range(8)]
        pairs = [(layout.group_of(each, rank), each) for each in modes for rank in range(8)]
        for ranks, each in pairs:
            if each is not mode:
                drawing.line(*corner(ranks[0]), *corner(ranks[-1]), "thin")
        for ranks in groups:
            drawing.line(
                *corner(ranks[0]), *corner(ranks[-1]), f"c{sorted({tuple(g) for g in groups}).index(tuple(ranks))}"
            )
        for rank in range(8):
            x, y = corner(rank)
            colour = sorted({tuple(g) for g in groups}).index(tuple(groups[rank]))
            drawing.box(x - 13, y - 11, 26, 22, f"c{colour}")
            drawing.words(x, y, str(rank), "inside")
        drawing.words(104 + at * 270, 12, f"{mode.name} groups", "title")
        drawing.words(104 + at * 270, 222, use, "small")
    return drawing, (
        "Eight ranks as a device mesh of data 2 x pipeline 2 x tensor 2. A mode is one dimension of the mesh; ranks of one colour form a process group of that mode."
    )


def _placements() -> tuple[Drawing, str]:
    layout = build_layout({"parallel": {"tensor": 2}}, 4)
    drawing = Drawing()
    cases = [
        ("Replicate()", Placement()),
        ("Shard(0)", Placement({ParallelMode.TENSOR: Shard(0)})),
        ("Replicate(owes='sum')", Placement({ParallelMode.TENSOR: Replicate(owes="sum")})),
    ]
    for at, (title, placement) in enumerate(cases):

        def say(rank: int, placement: Placement = placement) -> tuple[str, str]:
            same = holding(layout, placement, rank).ranks
            if placement.shards:
                return f"c{same[0]}", f"shard {layout.local_rank(ParallelMode.TENSOR, rank)}"
            partial = owed(layout, placement, rank) != owed(layout, Placement(), rank)
            return f"c{same[0]}", "full, partial grad" if partial else "full, full grad"

        _ranks(drawing, 10 + at * 290, 16, title, layout, say)
    return drawing, (
        "One weight on four ranks; the rows are data parallelism, the columns tensor parallelism. Ranks of one colour store the same "
        "elements. The first and the third placement store the full weight everywhere; they differ in its gradient."
    )


def _sums() -> tuple[Drawing, str]:
    layout = build_layout({"parallel": {"tensor": 2}}, 4)
    drawing = Drawing()
    for at, (title, placement) in enumerate(
        [
            ("a sharded weight", Placement({ParallelMode.TENSOR: Shard(0)})),
            ("a LayerNorm with partial gradients", Placement({ParallelMode.TENSOR: Replicate(owes="sum")})),
        ]
    ):

        def say(rank: int, placement: Placement = placement) -> tuple[str, str]:
            found = owed(layout, placement, rank)
            ranks = sorted({each for factor in found for each in factor.ranks})
            if len(found) > 1:
                ranks = list(holding(layout, placement, rank).ranks)
            return f"c{ranks[0]}", "all-reduce " + ", ".join(map(str, ranks))

        _ranks(drawing, 10 + at * 300, 16, title, layout, say)
    return drawing, (
        "Ranks of one colour all-reduce their gradients. The sharded weight needs an all-reduce over DATA; the LayerNorm, of which each tensor "
        "rank has a partial gradient, needs one over DATA and TENSOR. Both are divided by 2: two ranks saw distinct data."
    )


def _divisor() -> tuple[Drawing, str]:
    layout = build_layout({"parallel": {"expert": 2}}, 4)
    expert = Placement({ParallelMode.EXPERT: Shard(0)})
    drawing = Drawing()
    (factor,) = owed(layout, expert, 0)
    drawing.words(10, 14, "tokens come from", "left title")
    drawing.words(10, 104, "the expert is stored on", "left title")
    for rank in range(4):
        holds = rank in factor.ranks
        drawing.box(180 + rank * 100, 0, 88, 36, "c1")
        drawing.words(224 + rank * 100, 18, f"rank {rank}", "inside")
        drawing.arrow(224 + rank * 100, 40, 224 + (rank // 2 * 2) * 100, 86)
        drawing.box(180 + rank * 100, 90, 88, 36, "c0" if holds else "quiet")
        drawing.words(224 + rank * 100, 108, f"rank {rank}", "inside" if holds else "")
    return drawing, (
        f"Expert 0 on four data ranks with expert groups of two. Its gradient is all-reduced over the {len(factor.ranks)} ranks that store it, "
        f"{list(factor.ranks)}, and divided by {factor.divisor}: the number of ranks whose tokens it saw."
    )


def _norm() -> tuple[Drawing, str]:
    layout = build_layout({"parallel": {"tensor": 2, "pipeline": 2}}, 8)
    cases = [
        ("replicated", Placement()),
        ("sharded (TENSOR)", Placement({ParallelMode.TENSOR: Shard(0)})),
        ("tied (PIPELINE)", Placement({ParallelMode.PIPELINE: Tied((0, 1), "ends")})),
    ]
    drawing = Drawing()
    for row, (title, placement) in enumerate(cases):
        top = row * 54
        drawing.words(4, top + 22, title, "left title")
        for rank in range(layout.world_size):
            held = holding(layout, placement, rank)
            drawing.box(130 + rank * 66, top, 60, 42, f"c{held.ranks[0] % 6}")
            drawing.words(160 + rank * 66, top + 14, f"rank {rank}", "inside small")
            drawing.words(160 + rank * 66, top + 30, f"1/{held.count}", "inside")
    return drawing, (
        "Eight ranks, data 2 x pipeline 2 x tensor 2. Each rank contributes this fraction of its squared gradient to the norm. The fractions "
        "of one colour add up to 1, so every element of the full gradient counts once."
    )


def _pipeline() -> tuple[Drawing, str]:
    drawing = Drawing()
    top, told = 16.0, []
    for name in ("gpipe", "1f1b", "zb_v"):
        timeline = simulate(make_table(name, 3, 4))
        told.append(f"{name}: bubble {timeline.bubble:.0%}, activations of at most {timeline.max_live:g} micro-batches")
        drawing.words(4, top, told[-1], "left title")
        scale = 560 / max(timeline.makespan, 24)
        for rank, row in timeline.rows.items():
            for timed in row:
                kind = timed.action.kind.value
                colour = {"F": "c0", "B": "c1", "I": "c1", "W": "c2"}[kind]
                drawing.box(
                    4 + timed.start * scale, top + 12 + rank * 28, (timed.end - timed.start) * scale - 2, 24, colour
                )
                drawing.words(
                    4 + (timed.start + timed.end) / 2 * scale - 1,
                    top + 24 + rank * 28,
                    f"{kind}{timed.action.micro_batch}",
                    "inside small",
                )
        top += 12 + 3 * 28 + 24
    return (
        drawing,
        "Three pipeline schedules on 3 ranks with 4 micro-batches. Each row is a rank; F is a forward pass, B a backward pass, I and W its parts for "
        "inputs and weights. " + "; ".join(told) + ".",
    )


def _zero() -> tuple[Drawing, str]:
    """Memory of parameters, gradients and optimizer state by ZeRO stage."""
    drawing = Drawing()
    held = {stage: bytes_held(stage, 7 * 10**9, 8) for stage in (0, 1, 2, 3)}
    scale = 560 / held[0].total
    for row, (stage, memory) in enumerate(held.items()):
        top, left = 26 + row * 36, 96.0
        drawing.words(4, top + 13, f"ZeRO {stage}" if stage else "no ZeRO", "left title")
        for value, colour in ((memory.parameters, "c0"), (memory.gradients, "c1"), (memory.state, "c2")):
            drawing.box(left, top, max(value * scale - 2, 1), 26, colour)
            if value * scale > 60:
                drawing.words(left + value * scale / 2, top + 13, f"{value / 1e9:g} GB", "inside small")
            left += value * scale
        drawing.words(left + 8, top + 13, f"{memory.total / 1e9:g} GB", "left")
    for at, (name, colour) in enumerate((("parameters", "c0"), ("gradients", "c1"), ("optimizer state", "c2"))):
        drawing.box(96 + at * 150, 2, 14, 14, colour)
        drawing.words(116 + at * 150, 10, name, "left small")
    totals = ", ".join(f"{memory.total / 1e9:g} GB" for memory in held.values())
    return (
        drawing,
        f"Memory of 7 G parameters in fp32 with AdamW on each of 8 ranks, without ZeRO and at stages 1 to 3: {totals}.",
    )


def _ledger() -> tuple[Drawing, str]:
    """The reductions of typical parameters by mode, for rank 0."""
    layout = build_layout({"parallel": {"tensor": 2, "pipeline": 2, "expert": 2}}, 16)
    tensor = ParallelMode.TENSOR
    rows = [
        ("bias of a row-parallel layer", Placement()),
        ("column-parallel weight", Placement({tensor: Shard(0)})),
        ("LayerNorm, sequence parallel", Placement({tensor: Replicate(owes="sum")})),
        (
            "embedding tied to the LM head",
            Placement({tensor: Shard(0), ParallelMode.PIPELINE: Tied((0, 1), "embedding")}),
        ),
        ("expert weight", Placement({ParallelMode.EXPERT: Shard(0), tensor: Shard(1)})),
    ]
    found = [(name, {each.mode: each for each in owed(layout, placement, 0)}) for name, placement in rows]
    modes = list(dict.fromkeys(mode for _, factors in found for mode in factors))
    drawing = Drawing()
    for column, mode in enumerate(modes):
        drawing.words(272 + column * 136, 10, mode.name, "title")
    for row, (name, factors) in enumerate(found):
        top = 26 + row * 44
        drawing.words(4, top + 19, name, "left")
        for column, mode in enumerate(modes):
            factor = factors.get(mode)
            drawing.box(208 + column * 136, top, 128, 38, f"c{column}" if factor else "quiet")
            if factor:
                drawing.words(272 + column * 136, top + 12, "all-reduce", "inside small")
                told = f"{list(factor.ranks)}" + (f" / {factor.divisor}" if factor.divisor > 1 else "")
                drawing.words(272 + column * 136, top + 26, told, "inside small")
    return drawing, (
        "The ledger of rank 0 as a matrix: 16 ranks, data 4 x pipeline 2 x tensor 2, with experts over 2 data ranks. Each cell is a required "
        "reduction with its ranks and its divisor; an empty cell needs no communication."
    )


def _overlap() -> tuple[Drawing, str]:
    """The last part of a data-parallel step, as `colonnade plan` estimates it."""
    width, layers = 4096, 8
    config, clock = Config(parallel={}), Clock(load_hardware("h100"))
    job = Job(
        build=lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))),
        batch=lambda: (torch.zeros(512, width), torch.zeros(512, width)),
        criterion=lambda: nn.MSELoss(),
    )
    kinds = plan_ranks(config, 16, job, clock, global_context, None)
    steps = Steps(kinds, clock, config)
    ((forward, backward),) = steps.timeline().rows
    times, buckets = steps.times(), kinds.gradients[0].buckets
    scale = 560 / times.step
    drawing = Drawing()
    for row, name in enumerate(("compute", "communicate")):
        drawing.words(4, 18 + row * 40, name, "left title")

    def bar(row: int, start: float, end: float, colour: str, text: str) -> None:
        drawing.box(96 + start * scale, 4 + row * 40, max((end - start) * scale - 2, 1), 28, colour)
        if (end - start) * scale > 7 * len(text):
            drawing.words(96 + (start + end) / 2 * scale - 1, 18 + row * 40, text, "inside small")

    bar(0, forward.start, forward.end, "c0", "forward")
    bar(0, backward.start, backward.end, "c1", "backward")
    bar(0, times.step - times.optimizer, times.step, "c3", "optimizer")
    length, done, free = backward.end - backward.start, 0, 0.0
    for at, bucket in enumerate(buckets):
        done += bucket.numel
        ready = length * done / sum(each.numel for each in buckets) if bucket.early else length
        free, seconds = (
            max(free, ready),
            sum(clock.collective(call.op, call.bytes, call.ranks) for call in bucket.calls),
        )
        bar(1, backward.start + free, backward.start + free + seconds, "c2", str(at + 1))
        free += seconds
    return drawing, (
        f"One step of {layers} linear layers of width {width} on 16 H100 GPUs (2 nodes, data parallel), as colonnade plan estimates it. "
        f"The all-reduce of a bucket starts when the backward pass has filled it; of {sum(sum(clock.collective(c.op, c.bytes, c.ranks) for c in b.calls) for b in buckets) * 1e3:.1f} ms "
        f"of communication, {times.exposed * 1e3:.1f} ms extend the step."
    )


def _grid() -> tuple[Drawing, str]:
    """The table of evidence/grid.md: models across, kinds of parallelism down."""
    page = (Path(__file__).parents[1] / "evidence" / "grid.md").read_text(encoding="utf-8")
    cases = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (\d+) \| (yes|NO) \|$", page, re.MULTILINE)
    cells: dict[tuple[str, str], list[tuple[int, bool]]] = {}
    for model, configuration, ranks, matches in cases:
        # Without sizes and options, but with the scheme of tensor parallelism and the kind of attention.
        kind = re.sub(r"(\w) \d+(?= |,|$)| depth=\d| over=\S+", r"\1", configuration)
        kind = kind.replace(" sequence_split=True", ", sequence split")
        cells.setdefault((kind, model), []).append((int(ranks), matches == "yes"))
    kinds, models = (sorted({key[at] for key in cells}, key=lambda each: (each.count(" x "), each)) for at in (0, 1))
    drawing = Drawing()
    for column, model in enumerate(models):
        drawing.words(262 + column * 82, 10, model, "title small")
    for row, kind in enumerate(kinds):
        drawing.words(4, 33 + row * 24, kind, "left small")
        for column, model in enumerate(models):
            found = cells.get((kind, model), [])
            right = all(matches for _, matches in found)
            drawing.box(224 + column * 82, 23 + row * 24, 76, 20, ("c3" if right else "c4") if found else "quiet")
            if found:
                told = ", ".join(str(ranks) for ranks in sorted({ranks for ranks, _ in found})) + " ranks"
                drawing.words(262 + column * 82, 33 + row * 24, told, "inside small")
    return drawing, f"{len(cases)} runs by model and kind of parallelism. Green: all runs match the single-process run."


def _schemes() -> tuple[Drawing, str]:
    """The blocks of a column-parallel weight and of a row-parallel one, as the layers shard them."""
    full, side = torch.arange(64).view(8, 8), 96
    cases = (("1d", 4, {}), ("2d", 4, {}), ("2.5d", 8, {"depth": 2}), ("3d", 8, {}))
    drawing = Drawing()
    for at, (mode, size, more) in enumerate(cases):
        config = load_config({"parallel": {"tensor": {"size": size, "mode": mode, **more}}})
        drawing.words(90 + at * 226 + side, 10, f"{mode}, {size} ranks", "title")
        for column, split in enumerate(("column", "row")):
            blocks: dict[tuple[int, int, int, int], list[int]] = {}
            for rank in range(size):
                with ParallelContext() as context:
                    context.simulate(config, size, rank)
                    block = arrange(context).take_weight(full, split)
                top, left = divmod(int(block.min()), 8)
                blocks.setdefault((top, left, *block.shape), []).append(rank)
            x, unit = 84 + at * 226 + column * (side + 14), side / 8
            drawing.words(x + side / 2, 28, f"{split}-parallel", "small")
            for (top, left, high, wide), ranks in blocks.items():
                drawing.box(x + left * unit, 40 + top * unit, wide * unit - 2, high * unit - 2, f"c{ranks[0] % 6}")
                told = ", ".join(map(str, ranks))
                drawing.words(x + (left + wide / 2) * unit - 1, 40 + (top + high / 2) * unit - 1, told, "inside small")
    drawing.words(4, 52, "out", "left small")
    drawing.words(4, 72, "features", "left small")
    return drawing, (
        "The ranks that store each block of a weight [out, in], by tensor-parallel scheme. 1d shards one dimension; 2d shards both over a square of "
        "ranks; 2.5d has several such squares, which share the batch; 3d shards every weight over a cube."
    )


PICTURES: dict[str, Callable[[], tuple[Drawing, str]]] = {
    "mesh": _mesh,
    "placements": _placements,
    "sums": _sums,
    "divisor": _divisor,
    "norm": _norm,
    "pipeline": _pipeline,
    "zero": _zero,
    "ledger": _ledger,
    "overlap": _overlap,
    "grid": _grid,
    "schemes": _schemes,
}

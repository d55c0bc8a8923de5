"""Pictures of the pages: small SVG drawings whose numbers come from the library."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from colonnade.context import ParallelMode, build_layout
from colonnade.context.layout import Layout
from colonnade.engine.schedule.orders import make_table
from colonnade.engine.schedule.replay import simulate
from colonnade.optim.zero.formula import bytes_held
from colonnade.parallel.demand import holding, owed
from colonnade.parallel.placement import Placement, Replicate, Shard, Tied


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
        ("whole", Placement()),
        ("cut: Shard(0)", Placement({ParallelMode.TENSOR: Shard(0)})),
        ("Replicate(owes='sum')", Placement({ParallelMode.TENSOR: Replicate(owes="sum")})),
    ]
    for at, (title, placement) in enumerate(cases):

        def say(rank: int, placement: Placement = placement) -> tuple[str, str]:
            same = holding(layout, placement, rank).ranks
            held = f"rows of part {layout.local_rank(ParallelMode.TENSOR, rank)}" if placement.shards else "all rows"
            return f"c{same[0]}", held

        _ranks(drawing, 10 + at * 290, 16, title, layout, say)
    return drawing, (
        "One weight on four ranks, data 2 down and tensor 2 across. Ranks of one colour hold the same elements: all four where it is "
        "whole, two and two where it is cut."
    )


def _sums() -> tuple[Drawing, str]:
    layout = build_layout({"parallel": {"tensor": 2}}, 4)
    drawing = Drawing()
    for at, (title, placement) in enumerate(
        [
            ("a weight that is cut", Placement({ParallelMode.TENSOR: Shard(0)})),
            ("a norm with a part of its gradient", Placement({ParallelMode.TENSOR: Replicate(owes="sum")})),
        ]
    ):

        def say(rank: int, placement: Placement = placement) -> tuple[str, str]:
            found = owed(layout, placement, rank)
            ranks = sorted({each for factor in found for each in factor.ranks})
            if len(found) > 1:
                ranks = list(holding(layout, placement, rank).ranks)
            return f"c{ranks[0]}", "sum over " + ", ".join(map(str, ranks))

        _ranks(drawing, 10 + at * 300, 16, title, layout, say)
    return drawing, (
        "Ranks of one colour add their gradients up. The cut weight owes a sum over DATA alone; the norm, whose ranks each saw a part of the "
        "features, owes one over DATA and TENSOR together. Both are divided by 2: two ranks saw distinct data."
    )


def _divisor() -> tuple[Drawing, str]:
    layout = build_layout({"parallel": {"expert": 2}}, 4)
    expert = Placement({ParallelMode.EXPERT: Shard(0)})
    drawing = Drawing()
    (factor,) = owed(layout, expert, 0)
    drawing.words(10, 14, "tokens come from", "left title")
    drawing.words(10, 104, "the expert lies on", "left title")
    for rank in range(4):
        holds = rank in factor.ranks
        drawing.box(150 + rank * 100, 0, 88, 36, "c1")
        drawing.words(194 + rank * 100, 18, f"rank {rank}", "inside")
        drawing.shapes.append(f'<path d="M{194 + rank * 100} 40 L{194 + (rank // 2 * 2) * 100} 84" class="arrow"/>')
        drawing.box(150 + rank * 100, 90, 88, 36, "c0" if holds else "quiet")
        drawing.words(194 + rank * 100, 108, f"rank {rank}", "inside" if holds else "")
    drawing.words(
        10,
        152,
        f"summed over the {len(factor.ranks)} ranks that hold it, divided by the {factor.divisor} that sent tokens",
        "left",
    )
    return drawing, (
        f"Expert 0 on four data ranks in expert groups of two. Its gradient is summed over ranks {list(factor.ranks)} and divided by "
        f"{factor.divisor}, not by {len(factor.ranks)}."
    )


def _norm() -> tuple[Drawing, str]:
    layout = build_layout({"parallel": {"tensor": 2, "pipeline": 2}}, 8)
    cases = [
        ("whole", Placement()),
        ("cut over TENSOR", Placement({ParallelMode.TENSOR: Shard(0)})),
        ("tied over stages", Placement({ParallelMode.PIPELINE: Tied((0, 1), "ends")})),
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
        "data 2 x pipeline 2 x tensor 2. Each rank counts this share of its squares. The shares of one colour add up to 1, so every element "
        "of the whole gradient counts once."
    )


def _pipeline() -> tuple[Drawing, str]:
    drawing = Drawing()
    top, told = 16.0, []
    for name in ("gpipe", "1f1b", "zb_v"):
        timeline = simulate(make_table(name, 3, 4))
        told.append(f"{name}: {timeline.bubble:.0%} waiting, at most {timeline.max_live:g} micro-batches held")
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
        "Three orders on 3 ranks with 4 micro-batches, a row for each rank, time to the right. "
        + "; ".join(told)
        + ".",
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


PICTURES: dict[str, Callable[[], tuple[Drawing, str]]] = {
    "mesh": _mesh,
    "placements": _placements,
    "sums": _sums,
    "divisor": _divisor,
    "norm": _norm,
    "pipeline": _pipeline,
    "zero": _zero,
}

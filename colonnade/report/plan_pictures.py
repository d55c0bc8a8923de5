"""Pictures of a plan as SVG files: the mesh by modes, the ledger as a matrix, the timeline of the pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from colonnade.report.charts import COLORS

MOST_RANKS = 256
"""That a picture of the mesh shows of a larger world."""

Values = Mapping[str, Any]


def mesh_svg(plan: Values) -> str:
    """A panel for each mode: a cell is a rank, and the ranks of a group have one colour."""
    modes = [mode for mode in plan["modes"] if mode["size"] > 1 and mode["mode"] != "GLOBAL"]
    world = plan["totals"]["world_size"]
    count = min(world, MOST_RANKS)
    columns = min(count, 16)
    cell, across = 16, max(1, min(3, len(modes)))
    wide, tall = columns * cell + 24, math.ceil(count / columns) * cell + 44
    parts = []
    for at, mode in enumerate(modes):
        left, top = at % across * wide + 12, at // across * tall + 30
        parts.append(_text(left, top - 8, f"{mode['mode']} ({mode['count']:,} of {mode['size']:,})"))
        numbers: dict[int, int] = {}
        for rank in range(count):
            first = _first(mode, rank)
            color = COLORS[numbers.setdefault(first, len(numbers)) % 7] if first is not None else "#ddd"
            x, y = left + rank % columns * cell, top + rank // columns * cell
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" fill="{color}"><title>rank {rank}</title></rect>'
            )
    height = math.ceil(len(modes) / across) * tall + 30
    if count < world:
        parts.append(_text(12, height - 8, f"the first {count} of {world:,} ranks"))
    return _whole(max(across * wide, 320), height, parts)


def ledger_svg(plan: Values) -> str:
    """Parameters by modes: a filled cell is a sum that is owed, with its divisor."""
    modes = list(dict.fromkeys(line["mode"] for line in plan["ledger"] if line["mode"]))
    names = list(dict.fromkeys(line["parameters"] for line in plan["ledger"]))
    left, wide, line = 20 + 7 * max(map(len, names), default=0), 130, 20
    parts = [_text(left + at * wide + wide / 2, 20, mode, "middle") for at, mode in enumerate(modes)]
    for row, name in enumerate(names):
        parts.append(_text(left - 10, 44 + row * line, name, "end"))
        for at, mode in enumerate(modes):
            owed = next((one for one in plan["ledger"] if (one["parameters"], one["mode"]) == (name, mode)), None)
            fill = COLORS[at % 7] if owed else "#f0f0f0"
            x, y = left + at * wide, 30 + row * line
            parts.append(f'<rect x="{x}" y="{y}" width="{wide - 2}" height="{line - 2}" fill="{fill}"/>')
            if owed:
                told = f"over {owed['ranks']:,}, / {owed['divisor']:g}"
                parts.append(_text(x + wide / 2, y + 14, told, "middle", "#fff"))
    return _whole(left + len(modes) * wide + 12, 42 + len(names) * line, parts)


def timeline_svg(plan: Values) -> str:
    """When each pipeline rank computes what; blank is waiting."""
    timeline = plan["timeline"]
    colors = {"F": COLORS[0], "B": COLORS[4], "I": COLORS[4], "W": COLORS[2]}
    left, wide, line = 40, 1100, 22
    scale = wide / timeline["makespan"] if timeline["makespan"] else 0.0
    parts = []
    for at, row in enumerate(timeline["rows"]):
        y = 30 + at * line
        parts.append(_text(left - 8, y + 15, str(at), "end"))
        parts.append(f'<rect x="{left}" y="{y}" width="{wide}" height="{line - 2}" fill="#f0f0f0"/>')
        for kind, _, micro, start, end in row:
            x, width = left + start * scale, (end - start) * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.4):.1f}" height="{line - 2}" fill="{colors[kind]}"/>'
            )
            if width > 14:
                parts.append(_text(x + width / 2, y + 15, str(micro), "middle", "#fff"))
    head = f"{timeline['schedule']}: forward blue, backward orange, weight part green; pipeline bubble {timeline['bubble']:.1%}"
    return _whole(left + wide + 12, 42 + len(timeline["rows"]) * line, [_text(left, 18, head), *parts])


def _first(mode: Values, rank: int) -> int | None:
    """The first rank of a rank's group."""
    if mode["digits"] is None:
        return next((group[0] for group in mode["groups"] if rank in group), None)
    return rank - sum(rank // stride % count * stride for stride, count in mode["digits"])


def _text(x: float, y: float, words: str, anchor: str = "start", color: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'


def _whole(width: float, height: float, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
    style = 'font-family="system-ui, sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    return head + style + "".join(parts) + "</svg>\n"

"""Grids of cells as SVG rectangles: heat maps and timelines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
"""Dark is small, light is large: the order is seen without telling colours apart."""


def shade(part: float) -> str:
    """A colour from small (0) to large (1), between those of the scale."""
    at = min(max(part, 0.0), 1.0) * (len(VIRIDIS) - 1)
    low = min(int(at), len(VIRIDIS) - 2)
    pairs = zip(_channels(VIRIDIS[low]), _channels(VIRIDIS[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in pairs)


def heat_map(names: Sequence[str], steps: Sequence[float], rows: Sequence[Sequence[float | None]]) -> str:
    """A row for each name, a column for each step, by the logarithm of the value; None is left blank."""
    logs = [math.log10(value) for row in rows for value in row if value is not None and 0 < value < math.inf]
    if not logs:
        return '<p class="empty">nothing was measured</p>'
    low, high = min(logs), max(logs)
    left, width, line = 190, 1160, 18
    cell = (width - left) / len(steps)
    parts = []
    for at, (name, row) in enumerate(zip(names, rows, strict=True)):
        short = name if len(name) <= 26 else "…" + name[-25:]
        parts.append(f'<text x="{left - 8}" y="{at * line + 13}" text-anchor="end">{escape(short)}</text>')
        for column, value in enumerate(row):
            if value is not None and 0 < value < math.inf:
                color = shade((math.log10(value) - low) / (high - low) if high > low else 0.5)
                told = f"{name}\nstep {steps[column]:,.0f}: {value:.4g}"
                parts.append(
                    f'<rect x="{left + column * cell:.1f}" y="{at * line}" width="{cell + 0.3:.1f}" height="{line - 1}" '
                    f'fill="{color}" data-hint="{escape(told)}"/>'
                )
    height = len(rows) * line
    for column in range(0, len(steps), max(1, len(steps) // 6)):
        parts.append(f'<text x="{left + column * cell:.1f}" y="{height + 16}">{steps[column]:,.0f}</text>')
    parts += _scale(left, height + 32, width, f"{10**low:.3g}", f"{10**high:.3g}")
    return f'<svg class="cells" data-hints viewBox="0 0 {width} {height + 60}">{"".join(parts)}</svg>'


def _scale(left: float, top: float, width: float, low: str, high: str) -> list[str]:
    """What the colours mean."""
    parts = [f'<text x="{left}" y="{top + 22}">{low}</text>']
    parts += [
        f'<rect x="{left + 60 + at * 6}" y="{top + 11}" width="6.3" height="12" fill="{shade(at / 39)}"/>'
        for at in range(40)
    ]
    parts.append(f'<text x="{left + 310}" y="{top + 22}">{high}</text>')
    parts.append(f'<text x="{width}" y="{top + 22}" text-anchor="end">step</text>')
    return parts


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)

"""The frame of a page: style and script inside it, a heading, figures, cards and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

_HERE = Path(__file__).parent


def page(title: str, lines: Sequence[str], body: Iterable[str], script: str = "", refresh: int | None = None) -> str:
    """A whole HTML page that needs no network. `lines` stand below the title; `refresh`: load again after so many seconds."""
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    scripts = script_of_pages() + script
    told = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta name="viewport" content="width=device-width, initial-scale=1">{again}<title>{escape(title)}</title>',
            '<link rel="icon" href="data:,">',
            f"<style>{(_HERE / 'page.css').read_text(encoding='utf-8')}</style></head><body><main>",
            f"<header><div><h1>{escape(title)}</h1>{told}</div>",
            '<button type="button" data-toggle="theme">light / dark</button></header>',
            *body,
            f'</main><div class="hint" hidden></div><script>{scripts}</script></body></html>\n',
        ]
    )


def script_of_pages() -> str:
    """The script that every page has."""
    return (_HERE / "page.js").read_text(encoding="utf-8")


def tiles(figures: Sequence[tuple[str, str] | tuple[str, str, bool]]) -> str:
    """The figures to see first: (value, what it is), and whether it is bad."""
    made = [
        f'<div class="tile{" bad" if len(each) > 2 and each[2] else ""}"><b>{escape(each[0])}</b><span>{escape(each[1])}</span></div>'
        for each in figures
    ]
    return f'<div class="tiles">{"".join(made)}</div>'


def cards(parts: Iterable[str]) -> str:
    """Cards beside each other where there is room."""
    return f'<div class="cards">{"".join(parts)}</div>'


def card(title: str, content: str, note: str = "", wide: bool = False) -> str:
    """One part of the page, with a sentence below its title."""
    told = f"<p>{escape(note)}</p>" if note else ""
    return f'<section class="card{" wide" if wide else ""}"><h2>{escape(title)}</h2>{told}{content}</section>'


def folded(title: str, content: str) -> str:
    """A part that is opened by a click."""
    return f'<details class="card wide"><summary>{escape(title)}</summary>{content}</details>'


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), names: Sequence[int] = ()
) -> str:
    """Rows of text; columns of `numbers` are set to the right, those of `names` in a fixed width."""

    def kind(at: int) -> str:
        return ' class="number"' if at in numbers else ' class="name"' if at in names else ""

    head = "".join(f"<th{kind(at) if at in numbers else ''}>{escape(name)}</th>" for at, name in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{kind(at)}>{escape(cell)}</td>" for at, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


# --- Heat maps as SVG rectangles ---


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

"""The parts of an HTML report: the frame with style and script, heading, figures, cards and tables."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from colonnade.proof.report.charts import data_block

_HERE = Path(__file__).parent


def page(
    title: str, lines: Sequence[str], body: Iterable[str], script: str, style: str = "", refresh: int | None = None
) -> str:
    """A whole HTML page that needs no network, with its content security policy.

    Args:
        title: the heading.
        lines: the text below the heading.
        body: the parts.
        script: the only script that a browser runs on this page.
        style: additional rules of the style sheet.
        refresh: the seconds after which the browser loads the page again.
    """
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    told = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy(script)}">',
            f'<meta name="viewport" content="width=device-width, initial-scale=1">{again}<title>{escape(title)}</title>',
            '<link rel="icon" href="data:,">',
            f"<style>{style}{_read('page.css')}</style></head><body><main>",
            f"<header><div><h1>{escape(title)}</h1>{told}</div>",
            '<button type="button" data-toggle="theme">light / dark</button></header>',
            *body,
            f'</main><div class="hint" role="status" hidden></div><script>{script}</script></body></html>\n',
        ]
    )


def policy(script: str) -> str:
    """Return the content security policy: the browser runs only this script, and loads nothing.

    Inline styles are allowed, because colours and widths are styles of single elements, which have no hash.
    """
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )


@cache
def script_of(name: str) -> str:
    """Return the script for one kind of report: "run" or "plan"."""
    if name == "plan":
        return _read("page.js") + _read("plan.js")
    # uPlot draws at the resolution of the screen. At least twice that of a usual screen, a chart is sharp in print too.
    sharp = "const uPlot = (devicePixelRatio => {\n%s\nreturn uPlot; })(Math.max(2, devicePixelRatio));\n"
    return _read("page.js") + sharp % _read("uplot/uPlot.iife.min.js") + _read("charts.js")


def style_of_runs() -> str:
    """Return the style sheet of uPlot."""
    return _read("uplot/uPlot.min.css")


@cache
def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def tiles(figures: Sequence[tuple[str, str] | tuple[str, str, bool]]) -> str:
    """Return the main figures as HTML. A figure is (value, meaning), or (value, meaning, whether the value is bad)."""
    made = [
        f'<div class="tile{" bad" if len(each) > 2 and each[2] else ""}"><b>{escape(each[0])}</b><span>{escape(each[1])}</span></div>'
        for each in figures
    ]
    return f'<div class="tiles">{"".join(made)}</div>'


def cards(parts: Iterable[str]) -> str:
    """Return cards side by side if the window is wide enough."""
    return f'<div class="cards">{"".join(parts)}</div>'


def card(title: str, content: str, note: str = "", wide: bool = False) -> str:
    """Return one part of the report, with a title and a note below it."""
    told = f"<p>{escape(note)}</p>" if note else ""
    return f'<section class="card{" wide" if wide else ""}"><h2>{escape(title)}</h2>{told}{content}</section>'


def folded(title: str, content: str, is_open: bool = False) -> str:
    """Return a part of the report that opens and closes with a click."""
    return (
        f'<details class="card wide"{" open" if is_open else ""}><summary>{escape(title)}</summary>{content}</details>'
    )


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), names: Sequence[int] = ()
) -> str:
    """Return a table of text cells.

    `numbers` are the indices of right-aligned columns, `names` those of monospaced ones.

    On a phone, each row of a table with many columns becomes a list of its cells, with their heads.
    """

    is_wide = len(heads) > 4

    def kind(at: int) -> str:
        return ' class="number"' if at in numbers else ' class="name"' if at in names else ""

    def cell(at: int, text: str) -> str:
        head = f' data-head="{escape(heads[at])}"' if is_wide else ""
        return f"<td{kind(at)}{head}>{escape(text)}</td>"

    titles = "".join(f"<th{kind(at) if at in numbers else ''}>{escape(name)}</th>" for at, name in enumerate(heads))
    body = "".join("<tr>" + "".join(cell(at, text) for at, text in enumerate(row)) + "</tr>" for row in rows)
    stack = ' class="stack"' if is_wide else ""
    return f'<div class="scroll"><table{stack}><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


# --- Heat maps, which charts.js draws ---


VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
"""A colour scale from dark (small) to light (large), which is readable without distinguishing colours."""


def shade(part: float) -> str:
    """Return a colour for a fraction from 0 (small) to 1 (large)."""
    at = min(max(part, 0.0), 1.0) * (len(VIRIDIS) - 1)
    low = min(int(at), len(VIRIDIS) - 2)
    pairs = zip(_channels(VIRIDIS[low]), _channels(VIRIDIS[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in pairs)


def heat_map(names: Sequence[str], steps: Sequence[float], rows: Sequence[Sequence[float | None]]) -> str:
    """Return a heat map with one row per name and one column per step, on a logarithmic scale; None is a blank cell."""
    values = [value for row in rows for value in row if value is not None and 0 < value < math.inf]
    if not values:
        return '<p class="empty">no values in the log</p>'
    low, high = min(values), max(values)
    data: dict[str, Any] = {"names": names, "steps": steps, "low": low, "high": high}
    data["rows"] = [[None if value is None else float(f"{value:.3g}") for value in row] for row in rows]
    data["shades"] = [shade(at / 63) for at in range(64)]
    colors = ", ".join(shade(at / 8) for at in range(9))
    scale = f'<i class="scale" style="background:linear-gradient(to right, {colors})"></i>'
    label = escape(f"{len(names)} rows by {len(steps)} columns, values from {low:.3g} to {high:.3g}")
    return (
        f'<figure class="heat"><canvas role="img" aria-label="{label}"></canvas>'
        f'<figcaption class="key"><span>{low:.3g}</span>{scale}<span>{high:.3g}</span></figcaption>{data_block(data)}</figure>'
    )


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)

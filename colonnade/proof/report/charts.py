"""Charts: `plot` is a part of a page that uPlot draws in the browser, `line_chart` and `bar_chart` are SVG.

A run may have a million steps. `thinned` reduces a column to at most `MOST_POINTS` points, each with the mean, the smallest and the
largest value of its steps, so that a spike of one step stays visible. The page has these points as JSON, and `charts.js` draws
them.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from colonnade.proof.report.runs import Column

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f", "#d6c000")
"""Colours that colour-blind readers can distinguish (after Okabe and Ito).

The style sheet has a lighter set for dark pages.
"""

MOST_POINTS = 2000
"""The largest number of points of a line. On a screen, a chart is about 600 pixels wide; more points are for zooming."""

Points = Sequence[tuple[float, float]]


class Thin(NamedTuple):
    """The values of neighbouring steps in one point: the last of the steps, and mean, smallest and largest value."""

    step: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """The points of one line, each a (step, value) or a `Thin`.

    The range of values of a `Thin` is drawn as an area around the line.

    Kinds: `level` is a dashed line, `curve` is a line with a mark at each point, `dots` are marks without a line.
    `color` is an index of `COLORS`. `run` is the index of the run whose tokens and times belong to the steps.
    """

    name: str
    points: Sequence[tuple[float, float]] | Sequence[Thin]
    kind: Literal["line", "dots", "level", "curve"] = "line"
    color: int | None = None
    run: int = 0


# --- Thinning ---


def buckets(steps: Sequence[float], most: int = MOST_POINTS) -> list[float]:
    """Group the steps into at most `most` buckets of equal size, and return the last step of each bucket."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round((at + 1) * len(steps) / most) - 1] for at in range(most)]


def thinned(column: Column, lasts: Sequence[float]) -> list[Thin]:
    """Return one point for each bucket with values of a column; `lasts` are the last steps of the buckets."""
    edges = [0, *(bisect_right(column.steps, last) for last in lasts)]
    points = []
    for begin, end in pairwise(edges):
        if values := column.values[begin:end]:
            points.append(Thin(column.steps[end - 1], math.fsum(values) / len(values), min(values), max(values)))
    return points


# --- Charts of a page ---


def plot(
    series: Sequence[Series],
    *,
    y: str,
    logarithmic: bool | None = None,
    from_zero: bool = False,
    stacked: bool = False,
    smooth: bool = False,
    second: tuple[str, float] | None = None,
) -> str:
    """Return an HTML chart of values over steps, for a page whose script contains uPlot.

    Args:
        series: the lines, in the order of the legend.
        y: the label of the axis.
        logarithmic: whether the axis is logarithmic at first; the reader can switch it. None: it is always linear.
        from_zero: the axis starts at zero.
        stacked: each series is an area on top of the previous ones; all have the same steps.
        smooth: the slider of the page smooths its lines.
        second: (label, factor) of an axis on the right, which has the values times a factor.
    """
    grids: dict[tuple[float, ...], int] = {}
    made = []
    for at, one in enumerate(series):
        points = [point for point in one.points if math.isfinite(point[1])]
        if not points:
            continue
        grid = grids.setdefault(tuple(point[0] for point in points), len(grids))
        kind = "curve" if one.kind == "line" and len(points) == 1 else one.kind
        color = (at if one.color is None else one.color) % len(COLORS)
        entry: dict[str, Any] = {"name": one.name, "kind": kind, "color": color, "run": one.run, "grid": grid}
        entry["y"] = [_short(point[1]) for point in points]
        # An area only where points stand for several values.
        if isinstance(points[0], Thin) and any(point.low < point.high for point in points if isinstance(point, Thin)):
            for name in ("low", "high"):
                entry[name] = [_short(getattr(point, name)) for point in points]
        made.append(entry)
    if not made:
        return '<p class="empty">no values in the log</p>'
    chart = {"y": y, "zero": from_zero, "stacked": stacked, "smooth": smooth, "series": made}
    chart["grids"] = [list(map(_short, grid)) for grid in grids]
    chart |= {"log": logarithmic} if logarithmic is not None else {}
    chart |= {"second": second} if second is not None else {}
    names = [
        f'<button type="button" data-serie="{at}" class="color-{one["color"]}" aria-pressed="true">'
        f'<i class="mark is-{"area" if stacked else one["kind"]}"></i>{escape(one["name"])}</button>'
        for at, one in enumerate(made)
    ]
    single = " single" if len(made) == 1 else ""
    label = escape(f"{y}: " + ", ".join(f"{one['name']}, last value {one['y'][-1]:.4g}" for one in made), quote=True)
    switch = '<button type="button" class="switch" data-log>log</button>' if logarithmic is not None else ""
    return (
        f'<figure class="chart">{switch}<div class="plot" role="img" aria-label="{label}" tabindex="0"></div>'
        f'<figcaption class="key{single}">{"".join(names)}</figcaption>{data_block(chart)}</figure>'
    )


def data_block(data: Any, name: str = "") -> str:
    """Return an HTML element that contains values as JSON, for a script of the page."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json"{f" id={json.dumps(name)}" if name else ""}>{text}</script>'


def _short(value: float) -> float:
    """A number with six digits, without ".0" for whole numbers."""
    value = float(f"{value:.6g}") if value % 1 else value
    return int(value) if value % 1 == 0 and abs(value) < 2**53 else value


# --- SVG ---

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 800, 320, 64, 64


def line_chart(series: Sequence[Series], *, x: str = "step", y: str, logarithmic: bool = False) -> str:
    """Return an SVG file with values over steps and labelled axes.

    With `logarithmic`, only positive values are drawn.
    """
    shown = [
        (one, [(at, value) for at, value, *_ in one.points if math.isfinite(value) and (value > 0 or not logarithmic)])
        for one in series
    ]
    values = [value for _, points in shown for _, value in points]
    steps = [at for _, points in shown for at, _ in points]
    if not values:
        return _file(_WIDTH, 40, [_text(12, 24, "no values")])
    place = math.log10 if logarithmic else float
    ticks = decades(min(values), max(values)) if logarithmic else round_numbers(min(values), max(values))
    low, high = (pick(map(place, [*values, *ticks])) for pick in (min, max))
    high = high if high > low else low + 1
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def across(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - 16)

    def up(value: float) -> float:
        return 12 + (high - place(value)) / (high - low) * (_HEIGHT - _BOTTOM - 12)

    parts = []
    for value in ticks:
        parts.append(f'<path d="M{_LEFT} {up(value):.1f}H{_WIDTH - 16}" stroke="#e2e2e2"/>')
        parts.append(_text(_LEFT - 6, up(value) + 4, f"{value:.4g}", "end"))
    parts += [
        _text(across(step), _HEIGHT - _BOTTOM + 18, f"{step:,.0f}", "middle") for step in round_numbers(first, last)
    ]
    parts.append(_text(_WIDTH / 2, _HEIGHT - _BOTTOM + 34, x, "middle"))
    parts.append(f'<g transform="translate(14 {(_HEIGHT - _BOTTOM) / 2}) rotate(-90)">{_text(0, 0, y, "middle")}</g>')
    at = float(_LEFT)
    for number, (one, points) in enumerate(shown):
        color = COLORS[(number if one.color is None else one.color) % len(COLORS)]
        marks = one.kind in ("dots", "curve") or len(points) == 1
        if one.kind == "level" and points:
            points = [(first, points[0][1]), (last, points[0][1])]
        parts.append('<g class="series">')
        if one.kind != "dots" and points:
            line = "L".join(f"{across(step):.1f} {up(value):.1f}" for step, value in points)
            dashes = ' stroke-dasharray="6 4"' if one.kind == "level" else ""
            parts.append(f'<path d="M{line}" fill="none" stroke="{color}" stroke-width="1.8"{dashes}/>')
        for step, value in points if marks and one.kind != "level" else ():
            told = escape(f"{x} {step:,.0f}: {value:.4g}")
            parts.append(
                f'<circle cx="{across(step):.1f}" cy="{up(value):.1f}" r="2.6" fill="{color}"><title>{told}</title></circle>'
            )
        parts.append("</g>")
        parts.append(f'<rect x="{at:.0f}" y="{_HEIGHT - 18}" width="10" height="10" fill="{color}"/>')
        parts.append(_text(at + 14, _HEIGHT - 9, one.name))
        at += 34 + 6.6 * len(one.name)
    return _file(_WIDTH, _HEIGHT, parts)


def bar_chart(
    names: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float]]],
    *,
    x: str,
    page: bool = False,
    colors: Sequence[int] = (),
) -> str:
    """Return horizontal stacked bars as an SVG file or, with `page`, as a part of a page.

    `names` are the parts of each bar; `rows` are (label, one value for each part).
    """
    colors = colors or [at % len(COLORS) for at in range(len(names))]
    left, width, line = 16 + 7.4 * max((len(label) for label, _ in rows), default=0), 560 if page else 800, 30
    left = min(left, width / 3)
    most = max((sum(values) for _, values in rows), default=0.0) or 1.0
    scale, bottom = (width - left - 16) / most, len(rows) * line + 8
    parts = []
    for value in round_numbers(0.0, most):
        at = left + value * scale
        parts.append(f'<path class="guide" d="M{at:.1f} 4V{bottom}" stroke="#e2e2e2"/>')
        parts.append(_text(at, bottom + 16, f"{value:.4g}", "middle"))
    for row, (label, values) in enumerate(rows):
        top = row * line + 8
        short = label if len(label) <= 24 else "…" + label[-23:]
        parts.append(_text(left - 8, top + 15, short, "end"))
        for at, (before, value) in enumerate(zip(accumulate((0.0, *values)), values, strict=False)):
            told = escape(f"{label}\n{names[at]}: {value:.4g} {x}", quote=True)
            fill = f"var(--c{colors[at]})" if page else COLORS[colors[at]]
            parts.append(
                f'<rect x="{left + before * scale:.1f}" y="{top}" width="{value * scale:.1f}" height="{line - 8}" '
                f'fill="{fill}" data-hint="{told}"/>'
            )
    parts.append(_text(left + (width - left) / 2, bottom + 34, x, "middle"))
    if not page:
        at = left
        for number, name in enumerate(names):
            parts.append(
                f'<rect x="{at:.0f}" y="{bottom + 46}" width="10" height="10" fill="{COLORS[colors[number]]}"/>'
            )
            parts.append(_text(at + 14, bottom + 55, name))
            at += 34 + 6.6 * len(name)
        return _file(width, bottom + 64, parts)
    key = "".join(
        f'<span><i class="swatch" style="background:var(--c{color})"></i>{escape(name)}</span>'
        for color, name in zip(colors, names, strict=True)
    )
    drawing = f'<svg class="bars" data-hints viewBox="0 0 {width} {bottom + 40}">{"".join(parts)}</svg>'
    return f'<figure class="chart">{drawing}<figcaption class="key">{key}</figcaption></figure>'


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _file(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#222"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def round_numbers(low: float, high: float, about: int = 5) -> list[float]:
    """Return about `about` round numbers between two values, for the ticks of an axis."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= about + 1)
    return [round(step * at, 12) for at in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Return the powers of ten around the values, and if there are few, also their multiples by 2 and 5."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1.0,) if len(powers) > 4 else (1.0, 2.0, 5.0)
    found = [factor * 10.0**power for power in powers for factor in steps]
    inside = [value for value in found if low <= value <= high]
    return inside if len(inside) > 1 else [10.0**power for power in powers]

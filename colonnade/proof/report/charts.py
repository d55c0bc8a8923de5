"""Charts by pygal, styled once: colours are variables of the page, so that one drawing serves light and dark."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import Any, Literal

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
"""Told apart by colour-blind people too (after Okabe and Ito); the page has a lighter set of them for the dark."""

WIDTH, HEIGHT = 560, 300
MOST_POINTS = 160
"""Of one line. More cannot be seen at this width."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """Points of one name. A `level` is a dashed line; `dots` are marks; a `band` is the area inside its points; `color` is a
    place in `COLORS`."""

    name: str
    points: Points
    kind: Literal["line", "dots", "level", "band"] = "line"
    color: int | None = None


def line_chart(
    series: Sequence[Series],
    *,
    x: str = "step",
    y: str,
    logarithmic: bool = False,
    number: Callable[[float], str] = "{:.4g}".format,
    standalone: bool = False,
) -> str:
    """Values over steps as SVG, with labelled axes. `logarithmic` leaves out what is not positive.

    `standalone`: a whole file with colours of its own; else a part of a page that has our style sheet.
    """
    import pygal

    shown = [(one, _drawable(one.points, logarithmic)) for one in series]
    shown = [(replace(one, kind="dots") if _is_alone(one, points) else one, points) for one, points in shown]
    series = [one for one, _ in shown]
    values = [value for _, points in shown for _, value in points]
    steps = [at for _, points in shown for at, _ in points]
    if not values:
        return '<p class="empty">nothing was measured</p>'
    place: Callable[[float], float] = math.log10 if logarithmic else float
    formatter = (lambda value: number(10**value)) if logarithmic else number
    chart = pygal.XY(
        **_options(series, standalone),
        x_title=x,
        y_title=y,
        value_formatter=formatter,
        x_value_formatter=lambda at: f"{x} {at:,.0f}" if not standalone else f"{at:,.0f}",
        xrange=(min(steps), max(max(steps), min(steps) + 1)),
    )
    chart.x_labels = [
        {"value": at, "label": f"{at:,.0f}"} for at in round_numbers(min(steps), max(steps)) if at % 1 == 0
    ]
    ticks = decades(min(values), max(values)) if logarithmic else round_numbers(min(values), max(values))
    chart.y_labels = [{"value": place(value), "label": number(value)} for value in ticks]
    for one, points in shown:
        placed = [(at, place(value)) for at, value in points]
        if one.kind == "level" and placed:
            placed = [(min(steps), placed[0][1]), (max(steps), placed[0][1])]
        dashes = {"dasharray": "6, 4"} if one.kind == "level" else None
        dots = 2.6 if one.kind == "dots" else 1
        area = {"fill": True, "show_dots": False} if one.kind == "band" else {}
        chart.add(one.name, placed, stroke=one.kind != "dots", dots_size=dots, stroke_style=dashes, **area)
    return _rendered(chart, series, standalone)


def stacked_chart(
    names: Sequence[str], columns: Sequence[tuple[str, Sequence[float]]], *, x: str, y: str, bars: bool = False
) -> str:
    """Parts of a whole, one upon the other: `columns` are (label of x, a value for each name); bars, or areas."""
    import pygal

    kind = pygal.StackedBar if bars else pygal.StackedLine
    labels = [label for label, _ in columns]
    every = max(1, len(labels) // 6)
    chart = kind(
        **_options([], False),
        x_title=x,
        y_title=y,
        fill=True,
        value_formatter="{:.4g}".format,
        show_minor_x_labels=False,
        truncate_label=-1,
    )
    chart.y_labels = _value_labels(values for _, values in columns)
    chart.x_labels = labels
    chart.x_labels_major = labels if bars else labels[::every]
    for at, name in enumerate(names):
        chart.add(name, [values[at] for _, values in columns])
    return _rendered(chart, [Series(name, ()) for name in names], False)


def bar_chart(
    names: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]], *, x: str, standalone: bool = False
) -> str:
    """Horizontal bars of several parts: `rows` are (label, a value for each name)."""
    import pygal

    series = [Series(name, ()) for name in names]
    options = _options(series, standalone) | {"height": 90 + 34 * len(rows)}
    chart = pygal.HorizontalStackedBar(**options, x_title=x, value_formatter="{:.4g}".format, truncate_label=-1)
    chart.y_labels = _value_labels(values for _, values in rows)
    chart.x_labels = [label for label, _ in rows]
    for at, name in enumerate(names):
        chart.add(name, [values[at] for _, values in rows])
    return _rendered(chart, series, standalone)


def thinned(points: Points, join: Callable[[list[float]], float], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many points: neighbours become one, at the last step of them, with what `join` makes of their values."""
    if len(points) <= most:
        return list(points)
    edges = [round(at * len(points) / most) for at in range(most + 1)]
    groups = [points[begin:end] for begin, end in pairwise(edges)]
    return [(group[-1][0], join([value for _, value in group])) for group in groups if group]


def band(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """From the smallest to the largest of the values that `thinned` makes one: its outline; nothing where none are joined."""
    if len(points) <= most:
        return []
    return thinned(points, max, most) + thinned(points, min, most)[::-1]


def round_numbers(low: float, high: float, about: int = 5) -> list[float]:
    """About so many round numbers between two."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= about + 1)
    return [round(step * at, 12) for at in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten that hold the values; 2 and 5 between them where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1.0,) if len(powers) > 4 else (1.0, 2.0, 5.0)
    found = [factor * 10.0**power for power in powers for factor in steps]
    inside = [value for value in found if low <= value <= high]
    return inside if len(inside) > 1 else [10.0**power for power in powers]


def _drawable(points: Points, logarithmic: bool) -> Points:
    return [(at, value) for at, value in points if math.isfinite(value) and (value > 0 or not logarithmic)]


def _is_alone(one: Series, points: Points) -> bool:
    """A line of one point would not be seen."""
    return one.kind == "line" and len(points) == 1


def _value_labels(columns: Iterable[Sequence[float]]) -> list[float]:
    """What stands at the axis of sums: pygal's own labels are as many as fit in height, and lie over each other in width."""
    return round_numbers(0.0, max(map(sum, columns), default=0.0))


def _options(series: Sequence[Series], standalone: bool) -> dict[str, Any]:
    from pygal.style import Style

    colors = [COLORS[(at if one.color is None else one.color) % len(COLORS)] for at, one in enumerate(series)]
    style = Style(
        background="#ffffff" if standalone else "transparent",
        plot_background="transparent",
        foreground="#444",
        foreground_strong="#111",
        foreground_subtle="#ddd",
        guide_stroke_color="#e2e2e2",
        major_guide_stroke_color="#e2e2e2",
        guide_stroke_dasharray="0",
        major_guide_stroke_dasharray="0",
        font_family="system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
        label_font_size=12 if standalone else 15,  # a page shows them so large on a phone
        major_label_font_size=12 if standalone else 15,
        legend_font_size=12.5,
        title_font_size=12.5,
        opacity=".7",
        colors=tuple(colors) or COLORS,
    )
    options: dict[str, Any] = {} if standalone else {"css": ()}
    return options | {
        "style": style,
        "js": (),
        "width": 800 if standalone else WIDTH,
        "height": HEIGHT,
        "explicit_size": standalone,
        "disable_xml_declaration": not standalone,
        "show_legend": standalone,
        "legend_at_bottom": True,
        "legend_at_bottom_columns": max(1, len(series)),
        "legend_box_size": 10,
        "truncate_legend": -1,
        "margin": 8,
        "spacing": 8,
        "show_x_guides": False,
        "show_y_guides": True,
        "include_x_axis": False,
    }


def _rendered(chart: Any, series: Sequence[Series], standalone: bool) -> str:
    """The drawing, with a class for each kind of series, and without what nobody sees."""
    text: str = chart.render(is_unicode=True)
    text = re.sub(r"<!--.*?-->|<script.*?</script>|<title>[^<]*</title>", "", text, flags=re.S)
    text = re.sub(r'<desc class="[xy][^"]*">[^<]*</desc>', "", text)
    text = re.sub(r"(\d\.\d)\d+(?=[ \")])", r"\1", text)
    for at, one in enumerate(series):
        color = at if one.color is None else one.color
        text = text.replace(
            f'class="series serie-{at} color-{at}"', f'class="series serie-{at} is-{one.kind} color-{color}"'
        )
        text = text.replace(f'class="color-{at} reactive"', f'class="color-{color} reactive"')
    if standalone:
        return text
    text = re.sub(r"<style.*?</style>|<defs></defs>", "", text, flags=re.S)
    drawing = re.sub(r' id="chart-[^"]*"', "", text)
    return f'<figure class="chart">{drawing}{_legend(series)}</figure>'


def _legend(series: Sequence[Series]) -> str:
    """The names in the page's own type, which stays readable where the drawing is small; a click hides a series."""
    names = [
        f'<button type="button" data-serie="{at}" class="color-{at if one.color is None else one.color}">'
        f'<i class="mark is-{one.kind}"></i>{escape(one.name)}</button>'
        for at, one in enumerate(series)
    ]
    return f'<figcaption class="key{" single" if len(series) == 1 else ""}">{"".join(names)}</figcaption>'

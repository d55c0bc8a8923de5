"""Pictures of a run, written as SVG by hand: no plotting library is needed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from colonnade.errors import ConfigError

_CHARTS = {"loss": "Loss", "grad_norm": "Norm of the whole gradient, before clipping", "lr": "Learning rate"}
INK, FAINT, BLUE, RED = "#222", "#ddd", "#2b6cb0", "#c53030"
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 56, 46

Points = Sequence[tuple[float, float]]
Place = Callable[[float], float]


@dataclass
class Chart:
    """Values over steps. `logarithmic` takes positive values only; what is not finite is left out."""

    title: str
    logarithmic: bool = False
    width: int = 900
    height: int = 320
    _lines: list[tuple[str, Points, str]] = field(default_factory=list)
    _dots: list[tuple[str, Points, str]] = field(default_factory=list)
    _bars: list[tuple[float, float, float]] = field(default_factory=list)
    _levels: list[tuple[str, float]] = field(default_factory=list)

    def line(self, name: str, points: Points, color: str = BLUE) -> Chart:
        """A line through the points."""
        self._lines.append((name, self._drawable(points), color))
        return self

    def dots(self, name: str, points: Points, color: str = RED) -> Chart:
        """A mark on each point."""
        self._dots.append((name, self._drawable(points), color))
        return self

    def bar(self, x: float, top: float, bottom: float) -> Chart:
        """A thin line from one value to another."""
        self._bars.append((x, top, bottom))
        return self

    def level(self, name: str, value: float) -> Chart:
        """A dashed line across the chart."""
        self._levels.append((name, value))
        return self

    def svg(self) -> str:
        """The chart as a whole SVG document."""
        return page([self])

    def body(self) -> Iterator[str]:
        """The elements of the chart."""
        x, y, ticks, steps = self._axes()
        yield from self._frame(x, y, ticks, steps)
        for _, value in self._levels:
            yield _line(LEFT, y(value), self.width - RIGHT, y(value), RED, 'stroke-dasharray="6 4"')
        for _, points, color in self._lines:
            path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
            yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        for at, top, bottom in self._bars:
            yield _line(x(at), y(top), x(at), y(bottom), RED)
        for _, points, color in self._dots:
            for at, value in points:
                yield f'<circle class="dot" cx="{x(at):.1f}" cy="{y(value):.1f}" r="4" fill="{color}"/>'
        yield from self._legend()

    def _drawable(self, points: Points) -> Points:
        return [(at, v) for at, v in points if math.isfinite(v) and (v > 0 or not self.logarithmic)]

    def _axes(self) -> tuple[Place, Place, list[float], list[int]]:
        """Where steps and values lie, and the ticks of both."""
        points = [point for _, some, _ in (*self._lines, *self._dots) for point in some]
        values = [value for _, value in points] + [value for _, value in self._levels] or [1.0]
        last = max([at for at, _ in points], default=1.0)
        first = min([at for at, _ in points], default=0.0)
        scale: Place = math.log10 if self.logarithmic else lambda value: value
        low, high = scale(min(values)), scale(max(values))
        room = 0.06 * (high - low) or 0.5
        low, high = low - room, high + room

        def x(at: float) -> float:
            return LEFT + (self.width - LEFT - RIGHT) * (at - first) / max(1e-12, last - first)

        def y(value: float) -> float:
            return TOP + (self.height - TOP - BOTTOM) * (high - scale(value)) / (high - low)

        ticks = (
            [10.0**p for p in range(math.ceil(low), math.floor(high) + 1)] if self.logarithmic else _round(low, high)
        )
        return x, y, ticks, [int(at) for at in _round(first, last) if float(at).is_integer()]

    def _frame(self, x: Place, y: Place, ticks: list[float], steps: list[int]) -> Iterator[str]:
        floor = self.height - BOTTOM
        for value in ticks:
            yield _line(LEFT, y(value), self.width - RIGHT, y(value), FAINT)
            yield _text(LEFT - 8, y(value) + 4, f"{value:.4g}", "end")
        for step in steps:
            yield _line(x(step), floor, x(step), floor + 5, INK)
            yield _text(x(step), floor + 20, str(step), "middle")
        yield _line(LEFT, floor, self.width - RIGHT, floor, INK)
        yield _line(LEFT, TOP, LEFT, floor, INK)
        yield _text((LEFT + self.width - RIGHT) / 2, self.height - 8, "step", "middle")

    def _legend(self) -> Iterator[str]:
        yield _text(LEFT, 24, self.title, "start", 'font-size="17"')
        at = LEFT
        for name, color, mark in (
            *((name, color, "line") for name, _, color in self._lines),
            *((name, color, "dot") for name, _, color in self._dots),
            *((name, RED, "level") for name, _ in self._levels),
        ):
            dashes = 'stroke-dasharray="6 4"' if mark == "level" else 'stroke-width="2"'
            dot = f'<circle cx="{at + 15}" cy="40" r="4" fill="{color}"/>'
            yield dot if mark == "dot" else _line(at, 40, at + 30, 40, color, dashes)
            yield _text(at + 38, 44, name, "start")
            at += 60 + 7 * len(name)


def page(charts: Sequence[Chart]) -> str:
    """Charts one below the other, as a whole SVG document."""
    width, height = max(chart.width for chart in charts), sum(chart.height for chart in charts)
    parts, top = [], 0
    for chart in charts:
        parts += [f'<g transform="translate(0 {top})">', *chart.body(), "</g>"]
        top += chart.height
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>\n"])


def _round(low: float, high: float) -> list[float]:
    """About five round numbers between two."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 7)
    return [round(step * at, 12) for at in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float, color: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" {more}/>'


def _text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}" {more}>{escape(words)}</text>'


def draw_run(log: str | Path, picture: str | Path, clip: float | None = None) -> Path:
    """Draw what a `JsonlHook` wrote; returns the picture. `clip` marks the limit, and the steps above it."""
    steps = _steps(Path(log))
    charts = []
    for key, title in _CHARTS.items():
        points = [(entry["step"], float(entry[key])) for entry in steps if entry.get(key) is not None]
        if not points:
            continue
        chart = Chart(title, logarithmic=key == "grad_norm").line(key, points)
        if key == "grad_norm" and clip is not None:
            above = [point for point in points if point[1] > clip]
            chart.level(f"clip_grad_norm = {clip:g}", clip).dots(f"clipped ({len(above)} of {len(points)})", above)
        charts.append(chart)
    if not charts:
        raise ConfigError(f"{log} has no step with any of {', '.join(_CHARTS)}: there is nothing to draw")
    target = Path(picture)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(charts), encoding="utf-8")
    return target


def _steps(log: Path) -> list[dict[str, float]]:
    """The records of steps; a last line that was not finished is passed over."""
    found = []
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry.get("kind") == "step":
            found.append(entry)
    return found

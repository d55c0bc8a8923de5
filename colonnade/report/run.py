"""The picture of a run out of its JSONL log: loss, gradient norm, learning rate."""

from __future__ import annotations

import json
from pathlib import Path

from colonnade.errors import ConfigError
from colonnade.report.chart import Chart, page

_CHARTS = {"loss": "Loss", "grad_norm": "Norm of the whole gradient, before clipping", "lr": "Learning rate"}


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

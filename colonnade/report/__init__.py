"""Pictures of a run, written as SVG by hand: no plotting library is needed."""

from __future__ import annotations

from colonnade.report.chart import Chart, page
from colonnade.report.run import draw_run

__all__ = ["Chart", "draw_run", "page"]

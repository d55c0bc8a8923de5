"""HTML reports and figures of runs and plans, one file each, without network. uPlot draws the charts of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colonnade._imports import lazy_names

if TYPE_CHECKING:
    from colonnade.proof.report.charts import Series as Series
    from colonnade.proof.report.charts import line_chart as line_chart
    from colonnade.proof.report.page_of_plan import plan_page as plan_page
    from colonnade.proof.report.page_of_plan import write_plan_pictures as write_plan_pictures
    from colonnade.proof.report.page_of_run import run_page as run_page
    from colonnade.proof.report.page_of_run import write_run_page as write_run_page
    from colonnade.proof.report.traces import merge_traces as merge_traces

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "colonnade.proof.report.charts": "Series line_chart",
        "colonnade.proof.report.page_of_plan": "plan_page write_plan_pictures",
        "colonnade.proof.report.page_of_run": "run_page write_run_page",
        "colonnade.proof.report.traces": "merge_traces",
    },
)

"""Charts: what is drawn where, and what cannot be drawn."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET

import pytest

from colonnade.errors import ConfigError
from colonnade.report import Chart, draw_run

SVG = "{http://www.w3.org/2000/svg}"


def circles(text: str) -> list[tuple[float, float]]:
    found = ET.fromstring(text).iter(f"{SVG}circle")
    return [(float(dot.get("cx")), float(dot.get("cy"))) for dot in found if dot.get("class") == "dot"]


def test_points_lie_where_their_values_are_and_the_rest_is_left_out():
    chart = Chart("t").dots("d", [(0, 1.0), (5, 3.0), (10, 2.0), (7, math.nan), (8, math.inf)])
    (x0, y0), (x1, y1), (x2, y2) = circles(chart.svg())
    assert x1 == pytest.approx((x0 + x2) / 2)
    assert y2 == pytest.approx((y0 + y1) / 2)
    assert y1 < y2 < y0


def test_equal_ratios_are_equal_lengths_on_a_logarithmic_chart():
    dots = circles(Chart("t", logarithmic=True).dots("d", [(0, 1.0), (1, 10.0), (2, 100.0), (3, 0.0)]).svg())
    assert dots[0][1] - dots[1][1] == pytest.approx(dots[1][1] - dots[2][1], abs=0.11)
    assert len(dots) == 3


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(0, 2.0), (1, 2.0)]])
def test_few_points_are_no_problem(points):
    ET.fromstring(Chart("a <title>").line("n", points).level("limit", 2.0).svg())


def test_a_run_is_drawn_from_its_log_and_clipped_steps_are_marked(tmp_path):
    log = tmp_path / "log.jsonl"
    rows = [{"kind": "step", "step": at, "epoch": 0, "loss": 3.0 / (at + 1), "grad_norm": at + 0.5} for at in range(4)]
    log.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"kind": "test", "step": 4}]) + '{"kind": "st')
    text = draw_run(log, tmp_path / "deep" / "run.svg", clip=1.0).read_text()
    assert len(circles(text)) == 3
    assert "clipped (3 of 4)" in text
    assert "Learning rate" not in text


def test_a_log_without_steps_is_said(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"kind": "test", "step": 4}\n')
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw_run(tmp_path / "log.jsonl", tmp_path / "run.svg")

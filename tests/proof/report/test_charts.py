"""Charts: what is drawn where, and what cannot be drawn."""

from __future__ import annotations

import json
import math
import re
import tomllib
import xml.etree.ElementTree as ET
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from colonnade.proof import report
from colonnade.proof.report.charts import (
    MOST_POINTS,
    Series,
    bar_chart,
    buckets,
    decades,
    line_chart,
    plot,
    round_numbers,
    thinned,
)
from colonnade.proof.report.runs import Column
from colonnade.proof.report.shell import script_of, style_of_runs

UPLOT = Path(report.__file__).parent / "uplot"


def dots(text: str) -> list[tuple[float, float, str]]:
    """(x, y, title) of every mark."""
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*><title>([^<]*)', text)
    return [(float(x), float(y), told) for x, y, told in found]


def spec_of(text: str) -> dict[str, Any]:
    """The JSON of a chart."""
    (found,) = re.findall(r'<script type="application/json">(.*?)</script>', text)
    return json.loads(found)


def column(values: list[float]) -> Column:
    made = Column()
    for step, value in enumerate(values, 1):
        made.add(step, value)
    return made


# -- files of uPlot ------------------------------------------------------------------------------------------


def test_the_files_of_uplot_are_the_released_ones_with_their_licence():
    source = tomllib.loads((UPLOT / "SOURCE.toml").read_text())
    files = {path.name: path.read_bytes() for path in UPLOT.iterdir() if path.name != "SOURCE.toml"}
    assert {name: sha256(content).hexdigest() for name, content in files.items()} == source["sha256"]
    assert b"MIT License" in files["LICENSE"]
    assert f"(v{source['version']})".encode() in files["uPlot.iife.min.js"]
    assert source["archive"].endswith(f"uplot-{source['version']}.tgz")


def test_a_page_of_a_run_has_uplot_unchanged_and_a_page_of_a_plan_has_not():
    whole = (UPLOT / "uPlot.iife.min.js").read_text()
    assert whole in script_of("run")
    assert "uPlot" not in script_of("plan")
    assert style_of_runs() == (UPLOT / "uPlot.min.css").read_text()
    assert "</script" not in script_of("run")
    assert "\r" not in script_of("run")  # a browser would change it, and the policy would refuse the script


# -- charts of a page ----------------------------------------------------------------------------------------


def test_a_chart_has_its_points_the_names_and_what_the_reader_may_switch():
    text = plot(
        [Series("a", [(1, 1.0), (2, math.nan), (3, 0.123456789)]), Series("l", [(1, 1.5)], "level", 7)],
        y="loss",
        logarithmic=False,
        second=("MFU", 0.5),
    )
    spec = spec_of(text)
    assert spec["series"][0] == {"name": "a", "kind": "line", "color": 0, "run": 0, "grid": 0, "y": [1, 0.123457]}
    assert spec["grids"] == [[1, 3], [1]]
    assert (spec["y"], spec["log"], spec["second"]) == ("loss", False, ["MFU", 0.5])
    assert "data-log" in text
    assert 'aria-label="loss: a, last value 0.1235, l, last value 1.5"' in text
    assert text.count("data-serie=") == 2
    assert "data-log" not in plot([Series("a", [(1, 1.0)])], y="lr")


def test_series_with_equal_steps_share_a_grid_and_a_single_value_is_a_mark():
    spec = spec_of(plot([Series("a", [(1, 1.0), (2, 2.0)]), Series("b", [(1, 1.0), (2, 2.0)])], y="y"))
    assert [one["grid"] for one in spec["series"]] == [0, 0]
    assert spec["grids"] == [[1, 2]]
    assert spec_of(plot([Series("a", [(1, 1.0)])], y="y"))["series"][0]["kind"] == "curve"


@pytest.mark.parametrize("points", [[], [(3, math.nan)]])
def test_a_chart_of_nothing_says_so(points):
    assert "no values" in plot([Series("a", points)], y="y")
    assert "no values" in line_chart([Series("a", points)], y="y")


def test_names_are_text_and_no_markup():
    text = plot([Series("</script><b>", [(1, 1.0)]), Series("x", [(1, 1.0)])], y="<i>")
    assert "<b>" not in text
    assert "<i>" not in text.replace('<i class="mark', "")
    assert text.count("</script>") == 1


# -- thinning ------------------------------------------------------------------------------------------------


def test_long_columns_are_thinned_and_their_ends_and_spikes_stay():
    made = column([float(at % 100) for at in range(10_000)])
    lasts = buckets(made.steps, 50)
    found = thinned(made, lasts)
    assert len(found) == 50
    assert found[-1].step == 10_000
    assert {(each.low, each.high) for each in found} == {(0.0, 99.0)}
    assert all(each.mean == pytest.approx(49.5) for each in found)
    assert thinned(column([1.0, 3.0]), buckets([1, 2], 50)) == [(1, 1.0, 1.0, 1.0), (2, 3.0, 3.0, 3.0)]


def test_a_column_of_few_steps_has_points_only_where_it_has_values():
    sparse = Column()
    for step in (5, 6, 995):
        sparse.add(step, float(step))
    assert [each.step for each in thinned(sparse, buckets(range(1, 1001), 100))] == [6, 995]


def test_an_area_is_drawn_only_where_a_point_stands_for_several_values():
    many = column([float(at % 7) for at in range(3 * MOST_POINTS)])
    series = spec_of(plot([Series("a", thinned(many, buckets(many.steps)))], y="y"))["series"][0]
    assert len(series["y"]) == len(series["low"]) == len(series["high"]) == MOST_POINTS
    assert all(low <= mean <= high for low, mean, high in zip(series["low"], series["y"], series["high"], strict=True))
    few = column([1.0, 2.0])
    assert "low" not in spec_of(plot([Series("a", thinned(few, buckets(few.steps)))], y="y"))["series"][0]


# -- files ---------------------------------------------------------------------------------------------------


def test_points_of_a_file_lie_where_their_values_are_and_the_rest_is_left_out():
    points = [(0, 1.0), (5, 3.0), (10, 2.0), (7, math.nan), (8, math.inf)]
    (x0, y0, _), (x1, y1, told), (x2, y2, _) = dots(line_chart([Series("d", points, "dots")], y="loss"))
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.2)
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.2)
    assert y1 < y2 < y0
    assert told == "step 5: 3"


def test_equal_ratios_are_equal_lengths_on_a_logarithmic_chart():
    text = line_chart([Series("d", [(0, 1.0), (1, 10.0), (2, 100.0), (3, 0.0)], "dots")], y="norm", logarithmic=True)
    found = dots(text)
    assert found[0][1] - found[1][1] == pytest.approx(found[1][1] - found[2][1], abs=0.2)
    assert [told for *_, told in found] == ["step 0: 1", "step 1: 10", "step 2: 100"]
    assert ">norm</text>" in text  # axes are labelled
    assert ">step</text>" in text


def test_a_level_goes_across_and_a_file_is_whole_without_a_script():
    series = [
        Series("<a>", [(0, 1.0), (9, 2.0)]),
        Series("l", [(0, 1.5)], "level", 7),
        Series("m", [(4, 1.2)], "dots", 1),
    ]
    text = line_chart(series, y="y")
    ET.fromstring(text)
    (level,) = re.findall(r'd="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"[^>]*stroke-dasharray', text)
    assert level[1] == level[3]
    assert float(level[2]) - float(level[0]) > 600
    assert "<script" not in text
    assert "<a>" not in text


def test_bars_are_as_long_as_their_values_and_name_them():
    rows = [("first", [1.0, 2.0]), ("a name that is longer than its place", [2.0, 0.5])]
    for page in (False, True):
        text = bar_chart(("x", "y"), rows, x="ms", page=page)
        found = re.findall(r'<rect x="([\d.]+)"[^>]*width="([\d.]+)"[^>]*data-hint="([^"]*)"', text)
        x0, one, told = found[0]
        x1, two, _ = found[1]
        assert float(two) == pytest.approx(2 * float(one), abs=0.2)
        assert float(x1) == pytest.approx(float(x0) + float(one), abs=0.2)
        assert told == "first\nx: 1 ms"
        assert "var(--c" not in text if not page else "var(--c0)" in text
    ET.fromstring(bar_chart(("x", "y"), rows, x="ms"))


def test_ticks_are_round():
    assert round_numbers(0, 10) == [0, 2, 4, 6, 8, 10]
    assert round_numbers(3, 3) == [3]
    assert decades(0.03, 700.0) == [0.1, 1.0, 10.0, 100.0]
    assert decades(0.4, 4.0) == [0.5, 1.0, 2.0]

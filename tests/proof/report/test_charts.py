"""Charts: what is drawn where, and what cannot be drawn."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from colonnade.proof.report.charts import Series, bar_chart, decades, line_chart, round_numbers, stacked_chart, thinned


def dots(text: str) -> list[tuple[float, float, str]]:
    """(x, y, what is said of it) of every point."""
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*/><desc class="value">([^<]*)', text)
    return [(float(x), float(y), told) for x, y, told in found]


def test_points_lie_where_their_values_are_and_the_rest_is_left_out():
    points = [(0, 1.0), (5, 3.0), (10, 2.0), (7, math.nan), (8, math.inf)]
    (x0, y0, _), (x1, y1, told), (x2, y2, _) = dots(line_chart([Series("d", points)], y="loss"))
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.2)
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.2)
    assert y1 < y2 < y0
    assert told == "step 5: 3"


def test_equal_ratios_are_equal_lengths_on_a_logarithmic_chart_and_the_values_are_told():
    text = line_chart([Series("d", [(0, 1.0), (1, 10.0), (2, 100.0), (3, 0.0)])], y="norm", logarithmic=True)
    found = dots(text)
    assert found[0][1] - found[1][1] == pytest.approx(found[1][1] - found[2][1], abs=0.2)
    assert [told for *_, told in found] == ["step 0: 1", "step 1: 10", "step 2: 100"]
    assert ">norm</text>" in text  # axes are labelled
    assert ">step</text>" in text


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(0, 2.0), (1, 2.0)], [(3, math.nan)]])
def test_few_points_are_no_problem(points):
    text = line_chart([Series("a <title>", points), Series("limit", [(0, 2.0)], "level")], y="y")
    ET.fromstring(text.replace("class", "c", 0))
    assert "a <title>" not in text


def test_a_level_goes_across_and_kinds_are_told_apart():
    text = line_chart(
        [Series("a", [(0, 1.0), (9, 2.0)]), Series("l", [(0, 1.5)], "level", 7), Series("m", [(4, 1.2)], "dots", 1)],
        y="y",
    )
    assert [told for *_, told in dots(text)] == ["step 0: 1", "step 9: 2", "step 0: 1.5", "step 9: 1.5", "step 4: 1.2"]
    for kind, color in (("line", 0), ("level", 7), ("dots", 1)):
        assert re.search(rf'class="series serie-\d is-{kind} color-{color}"', text)


def test_a_part_of_a_page_has_no_style_or_script_of_its_own_and_a_file_has():
    parts = [("a", [1.0, 2.0]), ("b", [2.0, 1.0])]
    for text in (
        line_chart([Series("a", [(0, 1.0)])], y="y"),
        stacked_chart(("x", "y"), parts, x="step", y="ms"),
        bar_chart(("x", "y"), parts, x="ms"),
    ):
        assert "<style" not in text
        assert "<script" not in text
        assert "http://" not in text.replace("http://www.w3.org/", "")
    whole = line_chart([Series("a", [(0, 1.0)])], y="y", standalone=True)
    assert whole.startswith("<?xml")
    assert "<style" in whole
    assert "<script" not in whole


def test_long_lines_are_thinned_and_their_ends_and_peaks_stay():
    points = [(at, float(at % 100)) for at in range(1, 10_001)]
    found = thinned(points, max, 50)
    assert len(found) == 50
    assert found[-1][0] == 10_000
    assert max(value for _, value in found) == 99.0
    assert thinned(points[:50], max, 50) == points[:50]


def test_ticks_are_round():
    assert round_numbers(0, 10) == [0, 2, 4, 6, 8, 10]
    assert round_numbers(3, 3) == [3]
    assert decades(0.03, 700.0) == [0.1, 1.0, 10.0, 100.0]
    assert decades(0.4, 4.0) == [0.5, 1.0, 2.0]

"""Both pages in Chromium: no error, hover, toggles, print, at two widths, light and dark. `make browser`."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from colonnade.proof.report import plan_page, write_run_page
from tests.proof.report.logs import FACTS, step, write_log
from tests.proof.report.plans import groups_of_a_hundred_thousand

pytestmark = pytest.mark.long

OVERLAPS = """[...document.querySelectorAll('.pygal-chart .axis')].flatMap(axis => {
  const boxes = [...axis.querySelectorAll('text')].filter(each => each.textContent).map(each => [each.textContent, each.getBoundingClientRect()]);
  return boxes.flatMap(([name, one], at) => boxes.slice(at + 1).filter(([, other]) =>
    one.left < other.right - 1 && other.left < one.right - 1 && one.top < other.bottom - 2 && other.top < one.bottom - 2).map(([other]) => name + ' / ' + other));
})"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory, planned) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    more = [{"kind": "run", "step": 300, "epoch": 0, **FACTS, "made_again": 7}, step(301, grad_norm=None, skipped=1.0)]
    logs = [write_log(folder / "first", 300, more), write_log(folder / "second", 200)]
    write_run_page(logs[:1], folder / "run.html")
    write_run_page(logs, folder / "runs.html")
    write_run_page([write_log(folder / "short", 1)], folder / "short.html")
    (folder / "plan.html").write_text(plan_page(planned[0]))
    slow = deepcopy(planned[0])  # on machines a million times as slow
    for call in (call for one in slow["classes"] for call in one["collectives"]):
        call["seconds"], call["exposed"] = 1e6 * call["seconds"], 1e6 * call["exposed"]
    (folder / "slow.html").write_text(plan_page(slow))
    (folder / "large.html").write_text(plan_page(groups_of_a_hundred_thousand()))
    return {name: (folder / f"{name}.html").as_uri() for name in ("run", "runs", "short", "plan", "slow", "large")}


@pytest.fixture
def open_page(chromium, pages):
    """Open a page; whatever it complains of fails the test."""
    said: list[str] = []
    contexts = []

    def opened(name: str, width: int = 1280, scheme: str = "light") -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request",
            lambda request: said.append(request.url) if not request.url.startswith(("file:", "data:")) else None,
        )
        page.goto(pages[name])
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["run", "runs", "short", "plan", "slow", "large"])
def test_it_opens_and_nothing_is_wider_than_the_screen(open_page, name, width, scheme):
    page = open_page(name, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight") > 500
    wide = page.evaluate(
        "[...document.querySelectorAll('h1, h2, p, .tile, .key, svg.pygal-chart, canvas')]"
        ".filter(each => each.getClientRects().length && each.getBoundingClientRect().right > innerWidth).map(each => each.outerHTML.slice(0, 80))"
    )
    assert wide == []
    small = page.evaluate(
        "[...document.querySelectorAll('.pygal-chart text')].filter(each => each.textContent)"
        ".map(each => parseFloat(getComputedStyle(each).fontSize) * each.ownerSVGElement.getBoundingClientRect().width / 560)"
    )
    assert all(size > 8 for size in small)  # pixels that a label is high
    assert page.evaluate(OVERLAPS) == []  # labels of an axis
    cut = page.evaluate(
        "[...document.querySelectorAll('.tile b')].filter(each => each.getClientRects()[0].height > 40).length"
    )
    assert cut == 0  # figures on two lines
    back, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert (_light(back) > _light(ink)) == (scheme == "light")


def test_a_chart_of_one_value_shows_it(open_page):
    page = open_page("short")
    for title in ("Loss", "Learning rate", "Throughput", "Memory"):
        dots = page.locator(".card", has=page.get_by_role("heading", name=title)).locator(".series circle")
        assert dots.first.evaluate("each => getComputedStyle(each).opacity") == "1"


def test_print_is_light_and_has_the_names_of_series(open_page):
    page = open_page("run", scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.get_by_text("communication", exact=True).is_visible()
    assert not page.get_by_text("light / dark").is_visible()


def test_pointing_at_a_chart_tells_the_value_and_a_name_hides_its_series(open_page):
    page = open_page("run")
    chart = page.locator(".pygal-chart").nth(1)
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    for part in range(1, 20):  # until a point is near
        if page.locator(".hint").is_visible():
            break
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + part * box["height"] / 20)
    assert "step " in page.locator(".hint").inner_text()
    clipped = page.get_by_role("button", name="clipped")
    shown = chart.locator(".series.is-dots:visible circle").count()
    clipped.click()
    assert chart.locator(".series.is-dots:visible circle").count() < shown
    clipped.click()
    assert chart.locator(".series.is-dots:visible circle").count() == shown


def test_a_cell_of_the_heat_map_tells_its_layer(open_page):
    page = open_page("run")
    cell = page.locator('rect[data-hint^="blocks.11"]').nth(5)
    cell.scroll_into_view_if_needed()
    cell.hover()
    assert "blocks.11" in page.locator(".hint").inner_text()


@pytest.mark.parametrize("name", ["run", "plan"])
def test_light_and_dark_by_a_button(open_page, name):
    page = open_page(name)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="light / dark").click()
    assert _light(page.evaluate("getComputedStyle(document.body).backgroundColor")) < 60 < _light(before)
    page.get_by_role("button", name="light / dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == before


@pytest.mark.parametrize("name", ["run", "runs", "plan"])
def test_it_prints(open_page, name):
    document = open_page(name, scheme="dark").pdf()
    assert document.startswith(b"%PDF")
    assert len(document) > 10_000


def test_the_groups_of_a_rank_are_those_of_the_layout(open_page):
    page = open_page("plan")
    page.get_by_label("rank").fill("5")
    words = page.locator("#mesh-words").inner_text()
    assert words.startswith("rank 5: data 1, pipeline 0, tensor 1; node 0")
    assert "DATA: 1, 5" in words
    assert "PIPELINE: 5, 7" in words
    assert "TENSOR, PARALLEL_1D: 4, 5" in words
    box = page.locator("#mesh").bounding_box()
    page.mouse.move(box["x"] + 4, box["y"] + 4)
    assert page.locator(".hint").inner_text().startswith("rank 0: ")
    page.get_by_role("button", name="TENSOR").click()
    assert page.locator('[data-mode][aria-pressed="true"]').inner_text() == "TENSOR, PARALLEL_1D"


def test_the_timeline_tells_what_runs_when(open_page):
    page = open_page("plan")
    canvas = page.locator("#timeline")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + 5)
    assert page.locator(".hint").inner_text() == "pipeline rank 0: forward of micro-batch 0, stage 0"


def test_a_rank_of_a_hundred_thousand_is_found_quickly(open_page):
    page = open_page("large")
    page.get_by_label("rank").fill("102399")
    assert "data 799, pipeline 15, tensor 7" in page.locator("#mesh-words").inner_text()
    spent = page.evaluate(
        "() => { const begun = performance.now(); document.dispatchEvent(new Event('themechange')); return performance.now() - begun; }"
    )
    assert spent < 2000


def _light(color: str) -> float:
    """How light `rgb(r, g, b)` is, to 255."""
    return sum(float(part) for part in color[color.index("(") + 1 : -1].split(",")[:3]) / 3

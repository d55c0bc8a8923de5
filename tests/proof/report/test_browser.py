"""Both pages in Chromium: no error, hover, toggles, print, at two widths, light and dark. `make browser`."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from colonnade.proof.report import plan_page, write_run_page
from tests.proof.report.logs import FACTS, step, write_log
from tests.proof.report.plans import groups_of_a_hundred_thousand

pytestmark = pytest.mark.long

OVERLAPS = """[...document.querySelectorAll('.bars')].flatMap(axis => {
  const boxes = [...axis.querySelectorAll('text')].filter(each => each.textContent).map(each => [each.textContent, each.getBoundingClientRect()]);
  return boxes.flatMap(([name, one], at) => boxes.slice(at + 1).filter(([, other]) =>
    one.left < other.right - 1 && other.left < one.right - 1 && one.top < other.bottom - 2 && other.top < one.bottom - 2).map(([other]) => name + ' / ' + other));
})"""
INKED = """(at, color) => {  // pixels of a chart that are nearly of a colour
  const canvas = charts[at].plot.ctx.canvas, pixels = charts[at].plot.ctx.getImageData(0, 0, canvas.width, canvas.height).data;
  const wanted = [1, 3, 5].map(place => parseInt(tone(color).slice(place, place + 2), 16));
  let count = 0;
  for (let place = 0; place < pixels.length; place += 4)
    count += pixels[place + 3] > 200 && wanted.every((value, each) => Math.abs(pixels[place + each] - value) < 12);
  return count;
}"""
RANGES = "charts.map(chart => [chart.plot.scales.x.min, chart.plot.scales.x.max])"


@pytest.fixture(scope="module")
def pages(tmp_path_factory, planned) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    more = [{"kind": "run", "step": 300, "epoch": 0, **FACTS, "made_again": 7}, step(301, grad_norm=None, skipped=1.0)]
    busy = {"busy/slowest": 0.4, "busy/fastest": 0.3, "busy/slowest_rank": 2.0, "tokens": 1000}
    more += [step(number, **busy) for number in range(302, 320)]
    logs = [write_log(folder / "first", 300, more), write_log(folder / "second", 200)]
    write_run_page(logs[:1], folder / "run.html")
    write_run_page(logs, folder / "runs.html")
    write_run_page([write_log(folder / "short", 1)], folder / "short.html")
    write_run_page([write_log(folder / "long", 20_000)], folder / "long.html")
    (folder / "plan.html").write_text(plan_page(planned[0]))
    slow = deepcopy(planned[0])  # on machines a million times as slow
    for call in (call for one in slow["classes"] for call in one["collectives"]):
        call["seconds"], call["exposed"] = 1e6 * call["seconds"], 1e6 * call["exposed"]
    (folder / "slow.html").write_text(plan_page(slow))
    (folder / "large.html").write_text(plan_page(groups_of_a_hundred_thousand()))
    return {
        name: (folder / f"{name}.html").as_uri() for name in ("run", "runs", "short", "long", "plan", "slow", "large")
    }


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
@pytest.mark.parametrize("name", ["run", "runs", "short", "long", "plan", "slow", "large"])
def test_it_opens_and_nothing_is_wider_than_the_screen(open_page, name, width, scheme):
    page = open_page(name, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight") > 500
    wide = page.evaluate(
        "[...document.querySelectorAll('h1, h2, p, .tile, .key, .tools, .bars, canvas')]"
        ".filter(each => each.getClientRects().length && each.getBoundingClientRect().right > innerWidth).map(each => each.outerHTML.slice(0, 80))"
    )
    assert wide == []
    small = page.evaluate(
        "[...document.querySelectorAll('.bars text')].filter(each => each.textContent)"
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


def chart(page: Any, title: str) -> int:
    """The number of the chart of a card."""
    return page.evaluate(
        "title => charts.findIndex(chart => chart.figure.closest('.card').querySelector('h2').textContent === title)",
        title,
    )


def point_at(page: Any, number: int, part: float, down: float = 0.5) -> tuple[float, float]:
    """Move the pointer over a chart, to a part of its width."""
    over = page.locator(".u-over").nth(number)
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    place = box["x"] + part * box["width"], box["y"] + down * box["height"]
    page.mouse.move(*place)
    return place


def test_a_chart_of_one_value_shows_it(open_page):
    page = open_page("short")
    for title in ("Loss", "Learning rate", "Throughput", "Memory"):
        assert page.evaluate(f"({INKED})({chart(page, title)}, '--c0')") > 50, title


def test_print_is_light_and_has_the_names_of_series(open_page):
    page = open_page("run", scheme="dark")
    dark = page.evaluate("charts[0].plot.axes[0].stroke()")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.get_by_text("communication", exact=True).is_visible()
    assert not page.get_by_text("light / dark").is_visible()
    assert not page.locator(".tools").is_visible()
    page.wait_for_function("charts[0].plot.axes[0].stroke() === '#444'")
    assert dark != "#444"


def test_pointing_at_a_chart_tells_the_values_and_a_name_hides_its_series(open_page):
    page = open_page("run")
    point_at(page, chart(page, "Loss"), 0.5)
    told = page.locator(".hint").inner_text()
    assert told.startswith("step 1")
    assert "training: 0.1" in told  # 3 exp(-150 / 50) = 0.149
    number = chart(page, "Gradient norm")
    before = page.evaluate(f"({INKED})({number}, '--c4')")
    assert before > 100
    clipped = page.get_by_role("button", name="clipped")
    clipped.click()
    assert clipped.get_attribute("aria-pressed") == "false"
    assert page.evaluate(f"({INKED})({number}, '--c4')") == 0
    clipped.click()
    assert page.evaluate(f"({INKED})({number}, '--c4')") == before


def test_a_drag_zooms_all_charts_and_a_double_click_resets_them(open_page):
    page = open_page("run")
    (whole,) = {tuple(each) for each in page.evaluate(RANGES)}
    assert whole == (1, 319)
    point_at(page, 0, 0.25)
    page.mouse.down()
    place = point_at(page, 0, 0.5)
    page.mouse.up()
    ranges = page.evaluate(RANGES)
    assert all(each == pytest.approx([1 + 318 / 4, 1 + 318 / 2], abs=2) for each in ranges)
    assert page.locator("[data-zoom=reset]").is_enabled()
    page.reload()  # as `--follow` does
    assert page.evaluate(RANGES) == ranges
    page.mouse.dblclick(*place)
    assert {tuple(each) for each in page.evaluate(RANGES)} == {whole}
    assert page.locator("[data-zoom=reset]").is_disabled()
    page.get_by_label("zoom in").click()
    assert page.evaluate(RANGES)[0] == pytest.approx([80.5, 239.5])
    page.get_by_label("zoom out").click()
    assert page.evaluate(RANGES)[0] == list(whole)


def test_the_x_axis_is_by_step_tokens_or_time(open_page):
    page = open_page("run")
    page.get_by_role("button", name="time", exact=True).click()
    assert page.evaluate(RANGES)[0] == pytest.approx([0.5, 159.5])  # 319 steps of 0.5 s
    page.get_by_role("button", name="tokens", exact=True).click()
    assert page.evaluate(RANGES)[0] == [0, 18_000]
    point_at(page, 0, 0.99)
    assert page.locator(".hint").inner_text().startswith("tokens 18,000")


def test_a_loss_axis_may_be_logarithmic_and_lines_may_be_smoothed(open_page):
    page = open_page("run")
    card = page.locator(".card", has=page.get_by_role("heading", name="Loss"))
    assert page.evaluate("charts[0].plot.scales.y.distr") == 1
    card.get_by_role("button", name="log").click()
    assert page.evaluate("charts[0].plot.scales.y.distr") == 3
    assert card.get_by_role("button", name="log").get_attribute("aria-pressed") == "true"
    page.get_by_label("smoothing").fill("0.9")
    # 0.9 and no bias: the mean of a falling line lies above it.
    assert page.evaluate("smoothed([4, 2])") == [4, pytest.approx((0.1 * 0.9 * 4 + 0.1 * 2) / 0.19)]
    point_at(page, 0, 0.5)
    assert ", smoothed " in page.locator(".hint").inner_text()


def test_the_keyboard_moves_the_cursor_and_zooms(open_page):
    page = open_page("run")
    page.locator(".plot").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".hint").inner_text().startswith("step 2\n")
    page.keyboard.press("+")
    assert page.evaluate(RANGES)[0][1] < 200
    page.keyboard.press("0")
    assert page.evaluate(RANGES)[0] == [1, 319]


def test_a_finger_moves_the_cursor(open_page):
    page = open_page("run", 390)
    page.evaluate(
        """() => {
          const over = charts[0].plot.over, box = over.getBoundingClientRect();
          const touch = new Touch({identifier: 1, target: over, clientX: box.left + box.width / 2, clientY: box.top + 40});
          over.dispatchEvent(new TouchEvent("touchmove", {touches: [touch], bubbles: true}));
        }"""
    )
    assert "training" in page.locator(".hint").inner_text()


def test_a_spike_of_a_long_run_is_inside_the_area_and_drawing_is_fast(open_page):
    page = open_page("long")
    assert page.evaluate("charts.every(chart => chart.plot.data[0].length <= 2500)")
    spent = page.evaluate("() => { const begun = performance.now(); drawAll(); return performance.now() - begun; }")
    assert spent < 2000
    point_at(page, chart(page, "Gradient norm"), 0.5)
    assert "(0.5 to 2.5)" in page.locator(".hint").inner_text()


def test_a_page_loads_nothing_from_elsewhere(chromium, pages):
    page = chromium.new_page()
    page.goto(pages["run"])
    refused = page.evaluate(
        """() => new Promise(done => {
          addEventListener("securitypolicyviolation", event => done(event.effectiveDirective));
          new Image().src = "https://example.org/x.png";
        })"""
    )
    assert refused == "img-src"
    page.close()


def test_a_cell_of_the_heat_map_tells_its_layer(open_page):
    page = open_page("run")
    canvas = page.locator(".heat canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 11 * 18 + 9)
    told = page.locator(".hint").inner_text()
    assert told.startswith("blocks.11\nstep ")
    assert told.endswith(": 1.2")


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


@pytest.mark.parametrize(("name", "title"), [("plan", "Ledger"), ("runs", ""), ("run", "Ledger, on rank 0")])
def test_all_columns_of_a_table_are_on_a_phone(open_page, name, title):
    page = open_page(name, 390)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    cells = page.evaluate(
        """title => {
          const cards = [...document.querySelectorAll('.card')];
          const card = cards.find(each => (each.querySelector('h2, summary')?.textContent ?? '') === title);
          return [...card.querySelectorAll('td')].filter(each => each.textContent).map(each => {
            const box = each.getBoundingClientRect();
            return [each.dataset.head, box.left >= 0 && box.right <= innerWidth && box.height > 0, getComputedStyle(each, '::before').content];
          });
        }""",
        title,
    )
    assert len(cells) > 4
    assert all(visible and told == f'"{head}"' for head, visible, told in cells)


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

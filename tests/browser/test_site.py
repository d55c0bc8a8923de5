"""The site in a browser: every page at two widths, light and dark; the three pieces beside the library."""

from __future__ import annotations

import json
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pytest

from colonnade.config import load_config
from colonnade.engine.schedule.actions import ENDS_MICRO_BATCH, Kind
from colonnade.engine.schedule.orders import make_table
from colonnade.engine.schedule.replay import simulate
from colonnade.errors import ScheduleError
from colonnade.parallel.demand import holding, joint_ranks, owed
from colonnade.proof.ratio import meanings
from colonnade.version import __version__

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site" / __version__
sys.path.insert(0, str(ROOT / "docs" / "_site"))
import aliases  # noqa: E402
import tables  # noqa: E402

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not SITE.exists(), reason="the site is not built: make docs"),
]
WIDTHS = {"wide": 1280, "narrow": 390}


def pages() -> list[Path]:
    """Every page, but for the lists that Sphinx makes for its own search."""
    return [path for path in sorted(SITE.rglob("*.html")) if path.name not in ("genindex.html", "py-modindex.html")]


def open_page(browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> tuple[Any, list[str]]:
    """(The page, what it complained of so far and from now on)."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(path.as_uri())
    return page, wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_opens_without_an_error_and_fits(chromium, width, scheme):
    found = pages()
    assert len(found) > 90
    page, wrong = open_page(chromium, found[0], WIDTHS[width], scheme)
    for path in found:
        page.goto(path.as_uri())
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert not wrong, f"{path}: {wrong}"
        assert over <= 0, f"{path} is {over} pixels wider than the screen at {WIDTHS[width]}"
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [("wide", "light"), ("narrow", "light"), ("wide", "dark")])
def test_no_page_keeps_people_out(chromium, axe, width, scheme):
    """In the dark, colours alone are looked at again."""
    options = {"resultTypes": ["violations"], **({"runOnly": ["color-contrast"]} if scheme == "dark" else {})}
    bad = []
    page, _ = open_page(chromium, SITE / "index.html", WIDTHS[width], scheme)
    for path in pages():
        page.goto(path.as_uri())
        page.wait_for_function("[...document.querySelectorAll('.piece')].every((piece) => piece.dataset.ready)")
        page.evaluate(axe)
        for each in page.evaluate("(options) => axe.run(document, options)", options)["violations"]:
            if each["impact"] in ("serious", "critical"):
                where = f"{path.relative_to(SITE)}: {each['id']}"
                bad.append(f"{where}: {each['nodes'][0]['html'][:160]} ({len(each['nodes'])})")
    page.close()
    assert not bad, "\n".join(bad)


class Links(HTMLParser):
    """What a page links to or loads, and the places in it that a link can name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.targets.add(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


def test_every_link_of_every_page_leads_to_a_place_of_the_site():
    read = {path: Links(path) for path in SITE.rglob("*.html")}
    dead = []
    for path, links in read.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            if not file.is_file() or (place and file in read and place not in read[file].places):
                dead.append(f"{path.relative_to(SITE)}: {target}")
    assert not dead, "\n".join(dead)
    assert sum(len(links.targets) for links in read.values()) > 5000


def test_a_plain_copy_of_each_page_and_its_line_in_llms_txt():
    listed = (SITE / "llms.txt").read_text(encoding="utf-8")
    for path in pages():
        name = path.relative_to(SITE).with_suffix(".md").as_posix()
        if name == "search.md":
            continue
        text = (SITE / name).read_text(encoding="utf-8")
        assert text.startswith("# "), name
        assert not re.search(r"^:::|toctree|<!-- (generated|ranks):", text, re.MULTILINE), name
        assert name == "index.md" or f"]({name}): " in listed, name


def test_options_and_quotes_stay_what_one_types(chromium):
    page, _ = open_page(chromium, SITE / "reference/command_line.html")
    assert "--nproc_per_node, --max_restarts" in page.inner_text("article")
    page.close()
    for path in pages():
        assert not re.search(r"[–—]\w+_|[‘’“”]", path.read_text(encoding="utf-8")), path


def test_what_new_users_looked_for_is_found_by_the_search(chromium):
    wanted = {
        "CheckpointManager": "howto/checkpoint",
        "fp16": "howto/mixed_precision",
        "clip_grad_norm": "reference/config",
        "ckpt": "reference/command_line",
        "pip install": "start/install",
        "pipeline_layers": "howto/cut_for_a_pipeline",
        "device_mesh": "howto/device_mesh",
        "place_module": "howto/place_parameters",
        "grad": "howto/read_gradients",
        "gradient_accumulation": "howto/accumulate",
        "timeout": "howto/debug_a_hang",
        "hang": "howto/debug_a_hang",
    }
    for words, target in wanted.items():
        page, _ = open_page(chromium, SITE / "search.html")
        page.goto((SITE / "search.html").as_uri() + f"?q={words.replace(' ', '+')}")
        page.wait_for_selector("#search-results ul.search li a")
        page.wait_for_function("!document.querySelector('#search-progress')?.textContent.includes('...')")
        page.wait_for_timeout(300)
        links = page.eval_on_selector_all("#search-results ul.search li > a", "(all) => all.map((a) => a.href)")
        assert any(target in link for link in links), (words, links)
        page.close()


def test_light_and_dark_can_be_switched_by_hand(chromium):
    page, wrong = open_page(chromium, SITE / "index.html")
    seen = {page.evaluate("getComputedStyle(document.body).backgroundColor")}
    for _ in range(3):
        page.locator(".theme-toggle:visible").first.click()
        seen.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2
    assert not wrong


# -- the pieces, for 50 inputs each -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def draw():
    return random.Random(20)


def choose(piece: Any, **values: Any) -> None:
    for name, value in values.items():
        field = piece.locator(f"select[name={name}]")
        if field.is_enabled():
            field.select_option(str(value))


def ready(browser: Any, path: str, name: str) -> Any:
    page, wrong = open_page(browser, SITE / path)
    page.wait_for_selector(f"#{name}[data-ready]")
    assert not wrong
    return page.locator(f"#{name}")


def ranks_of(text: str) -> list[list[int]]:
    """All the lists of a text."""
    return [json.loads("[" + part.split("]")[0] + "]") for part in text.split("[")[1:]]


def test_the_placement_explorer_says_what_the_library_says(chromium, draw):
    piece = ready(chromium, "understand/placements.html", "placement-explorer")
    worlds = list(tables.layouts())
    for _ in range(50):
        sizes = draw.choice(worlds)
        tensor, expert, pipeline = draw.choice(list(tables.choices(sizes)))
        choose(piece, **dict.fromkeys(tables.SIZES, 1))
        choose(piece, **dict(zip(tables.SIZES, sizes, strict=True)))
        choose(piece, on_tensor=tensor, on_expert=expert, on_pipeline=pipeline)
        layout, placement = tables.layout_of(sizes), tables.placement_of(sizes, tensor, expert, pipeline)
        buttons = piece.locator(".piece-rank")
        assert buttons.count() == layout.world_size
        rank = draw.choice([at for at in range(layout.world_size) if buttons.nth(at).is_enabled()])
        buttons.nth(rank).click()
        factors, held = owed(layout, placement, rank), holding(layout, placement, rank)
        divisor = 1
        for factor in factors:
            divisor *= factor.divisor
        assert piece.locator("[data-key=divisor]").inner_text() == str(divisor)
        assert f"1/{held.count} " in piece.locator("[data-key=share]").inner_text()
        sums = piece.locator("[data-key=sums]").inner_text()
        for factor in factors:
            (told,) = [part for part in sums.split("; and ") if part.startswith(f"over {factor.mode.name} ")]
            assert list(factor.ranks) in ranks_of(told)
        assert ("none" in sums) == (not factors)
        same, *summed = ranks_of(piece.locator(".piece-detail").inner_text())
        assert same == list(held.ranks)
        joint = joint_ranks(layout, placement, factors, rank)
        assert summed == ([list(joint)] if len(joint) > 1 else [])


def test_the_pipeline_player_says_what_the_simulator_says(chromium, draw):
    piece = ready(chromium, "understand/pipelines.html", "pipeline-player")
    refused = 0
    for name, ranks, chunks, micro_batches in draw.sample(list(tables.runs()), 50):
        choose(piece, order=name)
        choose(piece, ranks=ranks, chunks=chunks, micro_batches=micro_batches)
        answer = piece.locator(".piece-answer")
        if name == "dualpipe_v" and micro_batches < 2 * ranks:
            with pytest.raises(ScheduleError) as said:
                make_table(name, ranks, micro_batches, chunks)
            assert answer.inner_text() == str(said.value)
            refused += 1
            continue
        timeline = simulate(make_table(name, ranks, micro_batches, chunks))
        assert answer.locator("[data-key=span]").inner_text().startswith(f"{timeline.makespan:g} units")
        shown = float(answer.locator("[data-key=bubble]").inner_text().split("%")[0])
        assert shown == pytest.approx(100 * timeline.bubble, abs=0.0501)  # one digit
        peaks = [float(part.split(": ")[1]) for part in answer.locator("[data-key=peak]").inner_text().split(", ")]
        assert peaks == pytest.approx([timeline.peak_live[rank] for rank in timeline.rows], abs=1e-3)
        time = draw.randrange(int(timeline.makespan))
        piece.locator("input[name=time]").fill(str(time))
        for rank, row in enumerate(piece.locator(".piece-now tbody tr").all()):
            doing = next((timed for timed in timeline.rows[rank] if timed.start <= time < timed.end), None)
            told = row.locator("td").first.inner_text()
            wanted = f"of micro-batch {doing.action.micro_batch}, stage {doing.action.stage}" if doing else "waits"
            assert told.endswith(wanted), (name, ranks, chunks, micro_batches, time, rank, told, wanted)
            begun = sum(timed.action.kind is Kind.FORWARD and timed.start <= time for timed in timeline.rows[rank])
            over = sum(timed.action.kind in ENDS_MICRO_BATCH and timed.end <= time for timed in timeline.rows[rank])
            assert float(row.locator("td").last.inner_text()) == pytest.approx((begun - over) / chunks, abs=1e-3)
        assert piece.locator("svg g.action").count() == sum(map(len, timeline.rows.values()))
    assert refused < 25


def test_the_player_plays(chromium):
    piece = ready(chromium, "understand/pipelines.html", "pipeline-player")
    piece.locator(".piece-play").press("Enter")
    piece.page.wait_for_function("document.querySelector('.piece-clock').textContent.startsWith('3 ')")
    piece.locator(".piece-play").press("Enter")
    assert piece.locator(".piece-play").inner_text() == "Play"
    assert piece.locator("g.done").count() > 0
    timeline = piece.locator(".piece-timeline")
    assert timeline.evaluate("(box) => box.scrollWidth <= box.clientWidth")  # what it begins with can be seen whole


def test_which_bug_says_what_the_library_says(chromium, draw):
    piece = ready(chromium, "howto/which_bug.html", "which-bug")
    nothing = 0
    for _ in range(50):
        sizes = tuple(draw.choice(values) for values in tables.BUG_SIZES.values())
        if sizes[0] % sizes[1]:
            sizes = (sizes[1], *sizes[1:])
        of = draw.choice(tables.OF)
        ratio = round(
            draw.choice([0.125, 0.25, 0.5, 0.7071, 1.0, 1.414, 2, 2.828, 3.3, 4, 8, 16]) * draw.uniform(0.98, 1.02), 4
        )
        choose(piece, of=of, **dict(zip(tables.BUG_SIZES, sizes, strict=True)))
        piece.locator("input[name=ratio]").fill(str(ratio))
        config, world = tables.bug_config(sizes)
        found, near = meanings(load_config(config), world, ratio, of)
        rows = [[cell.inner_text() for cell in row.locator("td").all()] for row in piece.locator("tbody tr").all()]
        assert [row[1:] for row in rows] == [[one.made_of, one.cause, one.sentence] for one in found or near]
        assert ("The nearest" in piece.inner_text()) == bool(near)
        nothing += bool(near)
    assert 0 < nothing < 50


def test_the_search_finds_the_page_of_usual_words_among_the_first_three(chromium):
    page, _ = open_page(chromium, SITE / "search.html")
    missed = {}
    for query, wanted in aliases.TABLE["queries"].items():
        page.goto((SITE / "search.html").as_uri() + "?q=" + quote(query))
        page.wait_for_function("!document.querySelector('#search-results h2')?.innerText.startsWith('Searching')")
        links = page.eval_on_selector_all("ul.search li > a", "all => all.map(link => link.getAttribute('href'))")
        first = list(dict.fromkeys(re.split(r"[?#]", link)[0].removesuffix(".html") for link in links))[:3]
        if wanted not in first:
            missed[query] = (wanted, first)
    page.close()
    assert not missed

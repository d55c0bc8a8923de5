"""What the site adds to the documents: generated parts, tables of the pieces, plain copies. `make docs` builds it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from colonnade.cli.app import COMMANDS
from colonnade.config.settings import all_keys
from colonnade.engine.schedule.orders import make_table
from colonnade.engine.schedule.replay import simulate
from colonnade.proof.ratio import factors, fitting

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS / "_site"))
import aliases  # noqa: E402
import generated  # noqa: E402
import speed_chart  # noqa: E402
import tables  # noqa: E402

PAGES = sorted(path for path in DOCS.rglob("*.md") if "_site" not in path.parts)


def test_every_generated_part_can_be_made_in_both_forms():
    made = 0
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for plain in (False, True):
            assert "<!-- generated:" not in generated.filled(text, plain), path
        made += text.count("<!-- generated:")
    assert made > 20


def test_the_reference_has_every_key_and_every_command():
    keys = generated.filled("<!-- generated: config_keys -->")
    assert all(f"`{key.path}`" in keys for key in all_keys())
    assert "| `zero.master_weights` |" in keys
    row = next(line for line in keys.splitlines() if line.startswith("| `clip_grad_norm.norm_type`"))
    assert "| `2.0` |" in row  # the default
    commands = generated.filled("<!-- generated: command_line -->")
    assert all(f"## colonnade {name}\n" in commands for name in COMMANDS)
    assert "| `--max-restarts" in commands


def test_words_that_people_search_for_lead_to_pages_that_exist():
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in PAGES}
    assert set(aliases.TABLE["aliases"]) <= pages
    assert set(aliases.TABLE["queries"].values()) <= pages
    assert len(aliases.TABLE["queries"]) >= 40
    text = aliases.with_entries("howto/debug_a_hang", "# Debug a hang\n\nWait.\n")
    assert text.startswith("# Debug a hang\n\n```{index} ! single: hang\n```\n")
    assert text.endswith("\n\nWait.\n")


def test_the_speed_chart_has_the_ratios_of_the_page():
    """After a change of docs/evidence/speed.md: `python docs/_site/speed_chart.py`."""
    assert (DOCS / "images" / "speed.svg").read_text(encoding="utf-8") == speed_chart.chart()


def test_an_unknown_part_is_an_error():
    with pytest.raises(ValueError, match="no generated part 'nothing'"):
        generated.filled("<!-- generated: nothing -->")


def test_every_page_of_understanding_ends_with_a_problem_and_its_answer():
    pages = [path for path in (DOCS / "understand").glob("*.md") if path.name != "index.md"]
    assert len(pages) == 7
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert "## A problem" in text.split("<details")[0], path
        assert text.rstrip().endswith("</details>"), path


def test_there_are_thirty_recipes_and_a_page_for_each_framework():
    recipes = {path.stem for path in (DOCS / "howto").glob("*.md")} - {"index"}
    assert len(recipes) >= 30
    frameworks = "ddp fsdp accelerate lightning deepspeed megatron colossalai"
    for name in frameworks.split():
        text = (DOCS / "howto" / f"from_{name}.md").read_text(encoding="utf-8")
        assert re.search(r"side-by-side.*```py\n.*```python\n", text, re.DOTALL), name


def test_a_row_of_the_player_is_the_timeline():
    run = tables._of_pipeline("zb_v", 3, 2, 4)
    timeline = simulate(make_table("zb_v", 3, 4))
    assert (run["span"], run["bubble"]) == (timeline.makespan, pytest.approx(timeline.bubble, abs=1e-6))
    for row, timed in zip(run["rows"], timeline.rows.values(), strict=True):
        assert [word for word in row.split() if word[0] != "~"] == [str(each.action) for each in timed]


@pytest.mark.parametrize("ratio", [0.5, 0.985, 1.0, 1.015, 2.0, 2.83, 3.3, 4.0, 700.0])
def test_the_table_of_bugs_has_the_librarys_answer_for_any_ratio(ratio):
    sizes, said = (4, 2, 1, 2, 4), {}
    rows = [part.split(":") for part in tables._answers("norm", sizes, said).split()]
    answer = [text for low, text in rows if float(low) <= ratio][-1]
    config, world = tables.bug_config(sizes)
    found, near = fitting(*factors(config, world, "norm"), ratio)
    sentences = list(said)
    told = [sentences[int(number, 36)][3] for number in answer.removeprefix("?").split(".")]
    assert told == [one.sentence for one in found or near]
    assert answer.startswith("?") == bool(near)

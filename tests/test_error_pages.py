"""Codes of errors: each is raised somewhere, has a page, and survives the way between ranks."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from colonnade.cli import main
from colonnade.comm.messages import error_of, note_of
from colonnade.config import load_config
from colonnade.error_pages import PAGES, codes_in, document
from colonnade.errors import ConfigError, GradientError, HookError

ROOT = Path(__file__).parents[1]


def raised_codes() -> set[str]:
    """Every `code="C..."` in a call of the package."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "colonnade").rglob("*.py")]
    values = [
        word.value for tree in trees for word in ast.walk(tree) if isinstance(word, ast.keyword) and word.arg == "code"
    ]
    return {
        each.value
        for value in values
        for each in ast.walk(value)
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value != "code"
    }


def test_every_code_is_raised_somewhere_and_every_raised_one_has_a_page():
    assert raised_codes() == set(PAGES)


def test_the_page_of_the_documents_is_the_table():
    told = "python -m colonnade.error_pages docs/reference/errors.md"
    assert (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8") == document(), f"write it again: {told}"
    assert [page.more for page in PAGES.values() if page.more and not (ROOT / f"docs/{page.more}.md").exists()] == []


def test_a_message_ends_in_its_code_and_the_error_has_it():
    with pytest.raises(ConfigError, match=r"Did you mean .clip_grad_norm.\?.*\[C001\]$") as found:
        load_config({"clip_grad_nrom": 1.0})
    assert found.value.code == "C001"
    assert codes_in(f"{found.value} and more [C999]") == ["C001"]
    assert GradientError("plain").code is None
    again = pickle.loads(pickle.dumps(found.value))
    assert (str(again), again.code) == (str(found.value), "C001")


def test_it_keeps_its_code_on_the_way_to_other_ranks():
    told = error_of(note_of(GradientError("gone", code="C043")), [1], 0)
    assert isinstance(told, GradientError)
    assert str(told).count("[C043]") == 1
    assert told.code == "C043"
    assert HookError("a [C043] b").code is None  # not at its end


@pytest.mark.parametrize("code", ["C043", "c043"])
def test_explain_prints_the_page(capsys, code):
    with pytest.raises(SystemExit) as left:
        main(["explain", code])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("C043: Rank that left")
    assert "What to do: " in shown


def test_pages_are_read_without_torch():
    script = "import sys; sys.modules['torch'] = None; from colonnade.cli import main; main(['explain', 'C040'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("C040: ")


def test_a_code_that_is_none_is_told_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as left:
        main(["explain", "C049"])
    assert left.value.code == 2
    shown = capsys.readouterr().err
    assert "there is no error code 'C049'. Did you mean" in shown
    assert len(shown) < 250  # where all codes are listed, not the list

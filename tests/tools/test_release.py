"""The page of a release, and the whole check of one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from colonnade.version import __version__

ROOT = Path(__file__).parents[2]


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_of_a_release_has_its_changes_and_the_table():
    page = run("tools/release_page.py", __version__)
    assert page.startswith(f"# Colonnade {__version__}\n")
    assert "| benchmark | case | Colonnade | alternative | ratio |" in page
    assert "Layouts of data, pipeline, tensor" in page
    assert "### " in page
    assert "Renamed and removed" in page


def test_the_number_of_the_version_is_the_same_everywhere():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_recording_of_the_demo_is_small_and_respects_reduced_motion():
    drawing = (ROOT / "docs/images/demo.svg").read_text(encoding="utf-8")
    assert len(drawing.encode()) < 300_000
    assert "prefers-reduced-motion" in drawing
    assert "step 200/200" in drawing
    assert "<script" not in drawing
    assert "images/demo.svg" in (ROOT / "docs/start/first_ten_minutes.md").read_text()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_release_is_in_order():
    assert "the release is in order" in run("tools/release_check.py")

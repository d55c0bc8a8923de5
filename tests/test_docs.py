"""Every Python block of the README and the documents is executed, in order, on as many ranks as the page says.

A block that begins with ```py, not ```python, is code of another framework, shown beside ours and not run.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import colonnade.core
from colonnade.testing import run_world

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_site"))
import api  # noqa: E402

DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in DOCUMENTS if "```python" in (ROOT / page).read_text(encoding="utf-8")]
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
_RANKS = re.compile(r"<!-- ranks: (\d+) -->")


def _run(page: str) -> int:
    """Run the blocks of a page in one namespace, as a reader who types them in would."""
    text = (ROOT / page).read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "reader"}
    blocks = _BLOCK.findall(text)
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page}, block {number}", "exec"), namespace)
    return len(blocks)


def _in_its_tier(page: str) -> object:
    """As a parameter of a test: the import of transformers on every rank takes longer than a fast test may."""
    slow = "transformers import" in (ROOT / page).read_text(encoding="utf-8")
    return pytest.param(page, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("page", [_in_its_tier(page) for page in PAGES])
def test_the_blocks_of_the_page_run(page):
    ranks = _RANKS.search((ROOT / page).read_text(encoding="utf-8"))
    world = int(ranks[1]) if ranks else 1
    assert set(run_world(world, _run, page).values) != {0}


def _examples(slow: bool) -> dict[str, str]:
    """The `Example::` blocks in docstrings of public names; those that import transformers are slow."""
    found: dict[str, str] = {}
    for module in map(importlib.import_module, api.MODULES):
        for name in api.names(module.__name__):
            thing = getattr(module, name)
            members = vars(thing).items() if inspect.isclass(thing) else ()
            for label, each in [(name, thing), *((f"{name}.{key}", value) for key, value in members)]:
                doc = inspect.cleandoc(getattr(each, "__doc__", None) or "")
                for code in re.findall(r"^Example::\n((?:\n| .*(?:\n|$))+)", doc, re.MULTILINE):
                    if ("transformers import" in code) == slow:
                        found[label] = textwrap.dedent(code)
    return found


def _run_examples(folder: str, slow: bool) -> list[str]:
    """Each in a namespace of its own, and in a context that has not been launched."""
    os.chdir(folder)
    for label, code in _examples(slow).items():
        exec(compile(code, f"example of {label}", "exec"), {"colonnade": colonnade, "torch": torch, "nn": torch.nn})
        colonnade.core.global_context.destroy()
    return sorted(_examples(slow))


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_examples_in_docstrings_run(slow, tmp_path):
    run = run_world(2, _run_examples, str(tmp_path), slow, backend=None).values[0]
    assert {"from_pretrained"} <= set(run) if slow else {"launch", "initialize", "verify", "Trainer"} <= set(run)


def test_the_readme_is_among_them():
    assert "README.md" in PAGES


def test_paths_that_pages_name_exist():
    """Decisions of the past name the files of their time."""
    pages = [
        "CONTRIBUTING.md",
        *(page for page in DOCUMENTS if not page.startswith(("docs/design/decisions/", "docs/evidence/"))),
    ]
    wrong = [
        f"{page}: {path}"
        for page in pages
        for path in re.findall(r"(?<![\w/.{])(?:colonnade|tests|benchmarks|docs)/[\w/]*\w(?:\.\w+)?", _prose(page))
        if not (ROOT / path).exists()
    ]
    assert wrong == []


def test_functions_that_the_tour_and_the_page_of_the_step_name_are_in_these_files():
    tour = re.findall(r"`([\w/]+)\.py`, `([A-Z_a-z.]+)`", (ROOT / "docs/design/tour.md").read_text(encoding="utf-8"))
    step = (ROOT / "docs/design/step.md").read_text(encoding="utf-8")
    rows = [(path, name) for name, path in re.findall(r"\| `([\w.]+)` \| `(\w+/\w+)\.py` \|", step)]
    assert len(tour) >= 15
    assert len(rows) >= 15
    for path, name in [*tour, *rows]:
        found = importlib.import_module("colonnade." + path.replace("/", "."))
        for part in name.split("."):
            assert hasattr(found, part), f"{path}.py has no {name}"
            found = getattr(found, part)


def _prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_links_lead_somewhere():
    for page in ["CONTRIBUTING.md", *DOCUMENTS]:
        for target in re.findall(r"\]\(([^)#\s]+?)(?:#[^)]*)?\)", _prose(page)):
            if "://" not in target:
                assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"

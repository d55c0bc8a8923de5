"""Every Python block of the README and the documents is executed, in order, on as many ranks as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from colonnade.testing import run_world

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if "```python" in path.read_text(encoding="utf-8")
)
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


@pytest.mark.parametrize("page", [*map(_in_its_tier, PAGES)])
def test_the_blocks_of_the_page_run(page):
    ranks = _RANKS.search((ROOT / page).read_text(encoding="utf-8"))
    world = int(ranks[1]) if ranks else 1
    assert set(run_world(world, _run, page).values) != {0}


def test_the_readme_is_among_them():
    assert "README.md" in PAGES


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target

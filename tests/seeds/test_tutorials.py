"""The tutorials have every snippet and command of the seed documents, as it is printed there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.seeds.snippets import GRADIENT_CLIPPING, GRADIENT_HANDLER, OWN_PARALLELISM, blocks

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


@pytest.mark.parametrize(
    ("page", "seed", "snippets"),
    [
        ("gradient_handler", GRADIENT_HANDLER, 3),
        ("gradient_clipping", GRADIENT_CLIPPING, 2),
        ("own_parallelism", OWN_PARALLELISM, 6),
    ],
)
def test_the_tutorial_has_every_snippet_of_its_seed(page, seed, snippets):
    text = (TUTORIALS / f"{page}.md").read_text(encoding="utf-8")
    found = [block for language in ("python", "shell") for block in blocks(seed, language, "colonnade")]
    assert len(found) == snippets
    for block in found:
        assert block.strip() in text

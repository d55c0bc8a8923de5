"""Index entries for the words that people search for: the table of `search.toml`, put below the title of each page."""

from __future__ import annotations

import tomllib
from pathlib import Path

TABLE = tomllib.loads((Path(__file__).parent / "search.toml").read_text(encoding="utf-8"))


def with_entries(page: str, text: str) -> str:
    """The source of a page with its index entries, which the search of the site reads."""
    words = TABLE["aliases"].get(page, [])
    if not words:
        return text
    title, _, rest = text.partition("\n")
    entries = "".join(f"\n```{{index}} ! single: {word}\n```\n" for word in words)
    return f"{title}\n{entries}{rest}"

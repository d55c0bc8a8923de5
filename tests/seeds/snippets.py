"""The code blocks of the seed documents, read out of verbatim copies of their text."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

TEXT = Path(__file__).parent / "text"

GRADIENT_HANDLER = "000_81823d0fb1f68423.txt"
GRADIENT_CLIPPING = "001_a7a08377c5a6d70f.txt"
HANDLER_API = "002_0521114bc21d3e4b.txt"
OWN_PARALLELISM = "003_b488e91443ee535d.txt"

_BLOCK = re.compile(r"^([ ]*)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(document: str, language: str, root: str = "colossalai") -> list[str]:
    """The blocks of one language in a document, with the library's name replaced by `root`."""
    text = (TEXT / document).read_text(encoding="utf-8")
    found = [textwrap.dedent(body) for _, kind, body in _BLOCK.findall(text) if kind == language]
    return [body.replace("colossalai", root) for body in found]

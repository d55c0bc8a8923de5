"""Tables that fit the width of the terminal: cells wrap between words, long names after a punctuation mark, never inside a word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

_GAP = 2
_LINK = re.compile(r"[^\s./_,|:=()\[\]-]*[./_,|:=()\[\]-]+|[^\s./_,|:=()\[\]-]+")
"""A piece of a word that ends in a punctuation mark, where a long word may continue on the next line."""


def fitted_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, numbers: Sequence[int] = (), **options: Any
) -> Table:
    """A table at most `width` columns wide, if its words allow it.

    Args:
        heads: the column titles.
        rows: the cells; a line break in a cell is kept.
        width: the width of the terminal.
        numbers: the indices of right-aligned columns.
        options: further arguments of `rich.table.Table`.
    """
    columns = [[head, *(row[at] for row in rows)] for at, head in enumerate(heads)]
    widths = _widths(columns, width - _GAP * (len(columns) - 1))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", **options)
    for at, head in enumerate(heads):
        title = "\n".join(_wrapped(head, widths[at]))
        table.add_column(escape(title), width=widths[at], justify="right" if at in numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(escape("\n".join(_wrapped(cell, widths[at]))) for at, cell in enumerate(row)))
    return table


def _widths(columns: Sequence[Sequence[str]], space: int) -> list[int]:
    """The widths of the columns: natural if they fit; else each has its longest word and a share of the rest."""
    natural = [max(len(line) for cell in cells for line in cell.split("\n")) for cells in columns]
    if sum(natural) <= space:
        return natural
    words = [max((len(word) for cell in cells for word in cell.split()), default=0) for cells in columns]
    pieces = [max((len(piece) for cell in cells for piece in _LINK.findall(cell)), default=0) for cells in columns]
    least = words if sum(words) <= space else pieces
    missing = [wanted - have for wanted, have in zip(natural, least, strict=True)]
    extra = max(0, space - sum(least))
    return [have + extra * lack // (sum(missing) or 1) for have, lack in zip(least, missing, strict=True)]


def _wrapped(cell: str, width: int) -> list[str]:
    """The lines of a cell: broken between words, and inside a word only after a punctuation mark."""
    lines: list[str] = []
    for source in cell.split("\n"):
        line = ""
        for word in source.split():
            glue = " " if line else ""
            if len(line) + len(glue) + len(word) <= width:
                line += glue + word
                continue
            if line:
                lines.append(line)
            line = ""
            for piece in _LINK.findall(word) if len(word) > width else [word]:
                if line and len(line) + len(piece) > width:
                    lines.append(line)
                    line = ""
                line += piece
        lines.append(line)
    return lines

"""Tables that fit the width of the terminal: cells wrap between words, and long names after punctuation or inside CamelCase."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

_UNIT = re.compile(r"(?<=\d) (?=[kMGTPmnµ]?(?:B|s)\b)")
"""The space between a number and its unit, where a line never breaks."""
_JOINT = re.compile(r"(?<=[./_,|:=)\]-])(?![\d.])|(?<=[a-z]{2})(?=[A-Z])")
"""The places where a word that is longer than its column may break: after punctuation, and inside CamelCase."""


def fitted_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, numbers: Sequence[int] = (), **options: Any
) -> Table:
    """Make a table that is at most `width` columns wide, unless a single word is too long.

    Args:
        heads: the column titles.
        rows: the cells; a line break in a cell is kept.
        width: the width of the terminal.
        numbers: the indices of right-aligned columns.
        options: further arguments of `rich.table.Table`.
    """
    columns = [[_UNIT.sub("\0", text) for text in (head, *(row[at] for row in rows))] for at, head in enumerate(heads)]
    gap, widths = _widths(columns, width)
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold", **options)
    wrapped = [
        [_wrapped(text, columns_width) for text in texts] for texts, columns_width in zip(columns, widths, strict=True)
    ]
    for at, (title, *_) in enumerate(wrapped):
        table.add_column(escape(title), width=widths[at], justify="right" if at in numbers else "left", overflow="fold")
    for number in range(1, len(rows) + 1):
        table.add_row(*(escape(texts[number]) for texts in wrapped))
    return table


def _widths(columns: Sequence[Sequence[str]], width: int) -> tuple[int, list[int]]:
    """The gap between columns and their widths: the natural widths if they fit, else at least the longest word, or piece of a
    word, of each column.
    """
    natural = [max(len(line) for text in texts for line in text.split("\n")) for texts in columns]
    words = [max(len(word) for text in texts for word in re.split("[ \n]", text)) for texts in columns]
    pieces = [
        max(len(piece) for text in texts for word in re.split("[ \n]", text) for piece in _JOINT.split(word))
        for texts in columns
    ]
    for least, gap in ((natural, 2), (words, 2), (words, 1), (pieces, 2), (pieces, 1)):
        space = width - gap * (len(columns) - 1)
        if sum(least) <= space:
            break
    # The remaining space is shared by the columns that need more.
    missing = [wanted - have for wanted, have in zip(natural, least, strict=True)]
    extra = min(max(0, space - sum(least)), sum(missing))
    return gap, [have + extra * lack // (sum(missing) or 1) for have, lack in zip(least, missing, strict=True)]


def _wrapped(text: str, width: int) -> str:
    """The text of a cell with line breaks between words. A long word is broken only after punctuation or inside CamelCase."""
    lines: list[str] = []
    for source in text.split("\n"):
        line = ""
        for word in source.split(" "):
            glue = " " if line else ""
            if len(line) + len(glue) + len(word) <= width:
                line += glue + word
                continue
            lines += [line] if line else []
            line = ""
            for piece in _JOINT.split(word) if len(word) > width else [word]:
                if line and len(line) + len(piece) > width:
                    lines.append(line)
                    line = ""
                line += piece
        lines.append(line)
    return "\n".join(lines).replace("\0", " ")

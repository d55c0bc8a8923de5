"""Tables of commands at the width of the terminal."""

from __future__ import annotations

import pytest
from rich.console import Console

from colonnade.cli.tables import fitted_table

HEADS = ("parameters", "n", "handler")
ROWS = [
    ("model.layers.*.self_attn.q_proj.weight", "12", "DataParallel\nPlacement"),
    ("a weight that is tied", "1", "-"),
]


def drawn(width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(fitted_table(HEADS, ROWS, width, numbers=(1,)))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_table_that_fits_is_not_wrapped() -> None:
    assert drawn(80) == [
        "parameters                               n  handler",
        "model.layers.*.self_attn.q_proj.weight  12  DataParallel",
        "                                            Placement",
        "a weight that is tied                    1  -",
    ]


@pytest.mark.parametrize("width", [30, 36, 48])
def test_a_narrow_table_fits_and_breaks_no_word(width: int) -> None:
    lines = drawn(width)
    assert max(map(len, lines)) <= width
    assert "DataParallel" in "\n".join(lines)
    # A name continues only after a dot or an underscore.
    pieces = [line.split("  ")[0].strip() for line in lines[1:]]
    name = next(at for at, piece in enumerate(pieces) if piece.startswith("model"))
    while not pieces[name].endswith("weight"):
        assert pieces[name][-1] in "._*", pieces
        name += 1

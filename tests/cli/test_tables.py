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


@pytest.mark.parametrize("width", [30, 36, 48, 60])
def test_a_narrow_table_fits_and_words_break_at_their_joints_only(width: int) -> None:
    lines = drawn(width)
    assert max(map(len, lines)) <= width
    names = [["model.", "layers.", "*.", "self_", "attn.", "q_", "proj.", "weight"], ["Data", "Parallel"]]
    allowed = {"".join(name[first:end]) for name in names for end in range(len(name) + 1) for first in range(end)}
    allowed |= {"parameters", "n", "handler", "12", "Placement", "1", "-", *["a", "weight", "that", "is", "tied"]}
    assert {word for line in lines for word in line.split()} <= allowed


def test_a_number_stays_with_its_unit() -> None:
    console = Console(width=19)
    with console.capture() as capture:
        console.print(fitted_table(("size", "used for"), [("66.6 kB", "gradients and norms")], 19))
    assert [line.rstrip() for line in capture.get().splitlines()] == [
        "size     used for",
        "66.6 kB  gradients",
        "         and norms",
    ]

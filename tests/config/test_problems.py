"""The form in which problems are told: head, lines of keys, aligned places, paths as one writes them."""

from __future__ import annotations

import pytest

from colonnade.config.problems import ConfigSource, Problem, config_error, dotted, file_error, shortened


@pytest.mark.parametrize(
    ("path", "text"), [(("zero",), "zero"), (("a", "b", "c"), "a.b.c"), (("handlers", 0, "type"), "handlers[0].type")]
)
def test_dotted(path: tuple[object, ...], text: str) -> None:
    assert dotted(path) == text


PYTHON = """\
# parallel = dict(data=1)
from base import loss
x = dict(
    zero=1,
)
parallel = dict(
    data=2,
    tensor=dict(
        size=2,
        mode='1d'),
)
zero = {
    'stage': 1,
}
handlers = [
    dict(type='A'),
]
"""
TOML = """\
lr = 1
[parallel]
data = 2
tensor.size = 2
[parallel.expert]
size = 2
[[ handlers ]]
type = "A"
[ "quoted name" . inner ]
key = { size = 1 }
"""


@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        (PYTHON, ("x",), 3),
        (PYTHON, ("parallel",), 6),
        (PYTHON, ("parallel", "data"), 7),
        (PYTHON, ("parallel", "tensor", "size"), 9),
        (PYTHON, ("parallel", "tensor", "mode"), 10),
        (PYTHON, ("parallel", "tensor", "depth"), 8),
        (PYTHON, ("parallel", "expert"), 6),
        (PYTHON, ("zero",), 12),
        (PYTHON, ("zero", "stage"), 13),
        (PYTHON, ("handlers", 0, "type"), 15),
        (TOML, ("lr",), 1),
        (TOML, ("parallel",), 2),
        (TOML, ("parallel", "data"), 3),
        (TOML, ("parallel", "tensor", "size"), 4),
        (TOML, ("parallel", "expert"), 5),
        (TOML, ("parallel", "expert", "size"), 6),
        (TOML, ("handlers", 0, "type"), 7),
        (TOML, ("quoted name", "inner"), 9),
    ],
)
def test_a_key_has_the_line_it_is_on_or_that_of_the_nearest_one_around(
    text: str, path: tuple[object, ...], line: int
) -> None:
    assert ConfigSource("runs/train", "train", text).where(path) == f"train:{line}"


def test_a_key_that_the_text_does_not_set_has_no_line() -> None:
    assert ConfigSource("runs/train.py", "train.py", PYTHON).where(("log",)) == "train.py"
    assert ConfigSource("runs/train.py", "train.py", PYTHON).where(("data",)) == "train.py"
    assert ConfigSource().where(("zero",)) == ""


def test_problems_are_told_in_aligned_rows() -> None:
    source = ConfigSource("runs/train.py", "train.py", "\n\na = None\n" + "\n" * 8 + "b = dict()\nc = 1\n")
    problems = [Problem(("a",), "must be an int", None), Problem(("b", "c"), "is missing")]
    assert str(config_error(problems, source)).splitlines() == [
        "colonnade: 2 problems in runs/train.py",
        "  train.py:3   a = None   must be an int",
        "  train.py:12  b.c   is missing [C001]",
    ]


def test_file_error_shows_source_below() -> None:
    error = file_error("runs/train.py", "train.py", "SyntaxError: x", line=2, shown="one\ntwo")
    assert str(error).splitlines() == [
        "colonnade: 1 problem in runs/train.py",
        "  train.py:2  SyntaxError: x [C002]",
        "      one",
        "      two",
    ]


def test_shortened_fits_one_line() -> None:
    assert shortened(["a\nb"]) == r"['a\nb']"
    assert len(shortened("x" * 500)) == 60
    assert shortened("x" * 500).endswith("...")

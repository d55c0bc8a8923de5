"""The form in which problems are told: head, aligned places, paths as one writes them."""

from __future__ import annotations

import pytest

from colonnade.config.problems import Problem, Source, config_error, dotted, file_error


@pytest.mark.parametrize(
    ("path", "text"),
    [(("zero",), "zero"), (("a", "b", "c"), "a.b.c"), (("handlers", 0, "type"), "handlers[0].type")],
)
def test_dotted(path: tuple[object, ...], text: str) -> None:
    assert dotted(path) == text


def test_where_falls_back_to_the_nearest_line_around() -> None:
    source = Source("runs/train.py", "train.py", {("parallel",): 3, ("parallel", "tensor"): 5})
    assert source.where(("parallel", "tensor", "size")) == "train.py:5"
    assert source.where(("parallel", "data")) == "train.py:3"
    assert source.where(("zero",)) == "train.py"
    assert Source().where(("zero",)) == ""


def test_problems_are_told_in_aligned_rows() -> None:
    source = Source("runs/train.py", "train.py", {("a",): 3, ("b",): 12})
    problems = [Problem(("a",), "must be an int", None), Problem(("b", "c"), "is missing")]
    assert str(config_error(problems, source)).splitlines() == [
        "colonnade: 2 problems in runs/train.py",
        "  train.py:3   a = None   must be an int",
        "  train.py:12  b.c   is missing",
    ]


def test_file_error_shows_source_below() -> None:
    error = file_error("runs/train.py", "train.py", "SyntaxError: x", line=2, shown="one\ntwo")
    assert str(error).splitlines() == [
        "colonnade: 1 problem in runs/train.py",
        "  train.py:2  SyntaxError: x",
        "      one",
        "      two",
    ]

"""Sections: strict, open, and with a rule for further keys."""

from __future__ import annotations

from typing import Any

import pytest

from colonnade.config.kinds import COUNT, only_dict
from colonnade.config.problems import dotted
from colonnade.config.rules import Key, Rule, Section, check_value

KEYS = {"depth": Key(COUNT, "x"), "width": Key(COUNT, "y")}
STRICT = only_dict(Section(KEYS, required=("depth",), renamed={"deep": "depth"}, refused={"old": "is old"}))
OPEN = only_dict(Section(KEYS, required=("depth",), is_open=True))
COUNTED = "must be an int >= 1"
FURTHER = only_dict(Section(KEYS, others=STRICT))


def told(rule: Rule, value: Any) -> dict[str, str]:
    return {dotted(problem.path): problem.text for problem in check_value(rule, ("a",), value)}


@pytest.mark.parametrize(
    ("rule", "value", "problems"),
    [
        (STRICT, {"depth": 1, "width": 2}, {}),
        (STRICT, {"dpeth": 1}, {"a.dpeth": "unknown key. Did you mean `depth`?"}),
        (STRICT, {"DEEP": 1}, {"a.DEEP": "unknown key. Did you mean `depth`?"}),
        (STRICT, {"old": 1}, {"a.old": "is old"}),
        (
            STRICT,
            {"width": 0},
            {"a.width": COUNTED, "a.depth": f"is missing; it {COUNTED}"},
        ),
        (STRICT, {"depth": 1, "zzz": 1}, {"a.zzz": "unknown key; allowed: depth, width"}),
        (STRICT, 3, {"a": "must be a dict of depth, width"}),
        (OPEN, {"depth": 1, "zzz": 1, "depth2": 1}, {}),
        (OPEN, {"detph": 1}, {"a.detph": "unknown key. Did you mean `depth`?"}),
        (FURTHER, {"mine": {"depth": 1}}, {}),
        (FURTHER, {"mine": {"depth": 0}}, {"a.mine.depth": "must be an int >= 1"}),
        (FURTHER, {"widht": {"depth": 1}}, {"a.widht": "unknown key. Did you mean `width`?"}),
        (
            Rule("a list", items=COUNT),
            [1, 0, (2,)],
            {"a[1]": COUNTED, "a[2]": COUNTED},
        ),
    ],
)
def test_section(rule: Rule, value: Any, problems: dict[str, str]) -> None:
    assert told(rule, value) == problems

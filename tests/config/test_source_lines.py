"""The line of a key in `.py` and `.toml` text."""

from __future__ import annotations

import pytest

from colonnade.config.source_lines import python_lines, toml_lines

PYTHON = """\
from base import loss, other as optim
x = 1
parallel = dict(
    data=2,
    tensor=dict(
        size=2,
        mode='1d'),
)
zero = {
    'stage': 1,
    **{},
}
handlers = [
    dict(type='A'),
    dict(
        type='B'),
]
a, b = 1, 2
parallel['tensor']['depth'] = 3
if x:
    late: int = 4
def hidden():
    inner = 5
for i in range(3):
    looped = i
x = 3
zero = dict(offload=True)
"""

TOML = '''\
lr = 1
[parallel]
data = 2
tensor.size = 2
[parallel.expert]
size = 2
[[gradient_handler]]
type = "A"
text = """
[not_a_table]
nor = 1
"""
[[ gradient_handler ]]
"type" = "B"
[ "quoted name" . inner ]
key = { size = 1 }
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("loss",), 1),
        (("optim",), 1),
        (("parallel",), 3),
        (("parallel", "data"), 4),
        (("parallel", "tensor"), 5),
        (("parallel", "tensor", "size"), 6),
        (("parallel", "tensor", "mode"), 7),
        (("parallel", "tensor", "depth"), 19),
        (("handlers", 0, "type"), 14),
        (("handlers", 1), 15),
        (("handlers", 1, "type"), 16),
        (("a",), 18),
        (("b",), 18),
        (("late",), 21),
        (("looped",), 25),
        (("x",), 26),
        (("zero",), 27),
        (("zero", "offload"), 27),
        (("zero", "stage"), None),
        (("inner",), None),
    ],
)
def test_python(path: tuple[object, ...], line: int | None) -> None:
    assert python_lines(PYTHON).get(path) == line


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("lr",), 1),
        (("parallel",), 2),
        (("parallel", "data"), 3),
        (("parallel", "tensor", "size"), 4),
        (("parallel", "expert", "size"), 6),
        (("gradient_handler", 0, "type"), 8),
        (("gradient_handler", 1), 13),
        (("gradient_handler", 1, "type"), 14),
        (("quoted name", "inner"), 15),
        (("quoted name", "inner", "key"), 16),
        (("not_a_table",), None),
        (("gradient_handler", 0, "nor"), None),
    ],
)
def test_toml(path: tuple[object, ...], line: int | None) -> None:
    assert toml_lines(TOML).get(path) == line

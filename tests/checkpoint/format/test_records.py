"""Records come back from JSON as they were, and only with values of the right types."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from colonnade.checkpoint.manifest import Damaged, TensorPart, TensorRecord, from_json, to_json


@dataclass(frozen=True)
class Sample:
    """A field of every kind."""

    name: str
    at: float
    sizes: tuple[int, ...]
    pairs: list[tuple[str, TensorRecord]]
    maybe: TensorPart | None = None


TENSOR = TensorRecord("w", "exp_avg", ("w", "v"), (2, 3), "F32", (TensorPart((0, 0), (2, 3), (1, 0), "k", 3),))
SAMPLE = Sample("x", 1.5, (1, 0), [("digest", TENSOR)])


def test_records_come_back():
    for sample in (SAMPLE, Sample("", 0.0, (), [], TENSOR.parts[0])):
        assert from_json(Sample, json.loads(json.dumps(to_json(sample))), "it") == sample


def test_the_name_of_a_state_is_called_slot_on_disk():
    assert list(to_json(TENSOR)) == ["label", "slot", "names", "shape", "dtype", "parts"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", None, "it: name is 'None', not a text"),
        ("at", True, "it: at is 'True', not a number"),
        ("at", float("inf"), "it: at is 'inf', not a number"),
        ("sizes", [1, -1], r"it: sizes is '\[1, -1\]', not a list of whole numbers"),
        ("sizes", [1 << 62], "not a list of whole numbers"),
        ("sizes", [1, 1 << 62], "not a list of whole numbers"),
        ("sizes", [1, True], r"it: sizes is '\[1, True\]', not a list of whole numbers"),
        ("sizes", [1, "2"], "not a list of whole numbers"),
        ("sizes", "12", "it: sizes is '12', not a list"),
        ("pairs", {}, "it: pairs is '{}', not a list"),
        ("pairs", [["digest", 7]], r"it: pairs\[0\]\[1\] is a int, not an object"),
        ("pairs", [["digest", {"label": 3}]], r"it: pairs\[0\]\[1\]: label is '3', not a text"),
        ("maybe", [], "it: maybe is a list, not an object"),
    ],
)
def test_a_value_of_another_type_is_damage_with_its_place(key, value, message):
    with pytest.raises(Damaged, match=message):
        from_json(Sample, {**json.loads(json.dumps(to_json(SAMPLE))), key: value}, "it")

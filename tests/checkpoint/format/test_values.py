"""State as JSON: what goes in comes out, and what cannot go in is named."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from enum import Enum

import pytest
import torch

from colonnade.checkpoint.values import decode, encode, is_stateful
from colonnade.errors import CheckpointError


class Colour(int, Enum):
    RED = 1


def through_json(value):
    encoded = encode(value, "it")
    return decode(json.loads(json.dumps(encoded.value, allow_nan=False)), lambda at: encoded.tensors[at])


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -(2**80),
        0.1,
        5e-324,
        math.inf,
        -math.inf,
        "text é $tensor",
        [1, [2, (3, ("x",))]],
        {"a": {"b": [None]}},
        {1: "one", (2, 3): "pair", None: 0},
        {"a": 1, 2: "two"},
        {"$tensor": 1, "$tuple": [2]},
        Counter({30: 1, 80: 2}),
        OrderedDict(a=1),
        (),
        {},
        [],
    ],
    ids=repr,
)
def test_values_come_back_with_their_types(value):
    found = through_json(value)
    assert found == value
    assert type(found) is (dict if isinstance(value, OrderedDict) else type(value))


def test_what_json_has_is_itself_and_the_rest_is_marked():
    assert encode({"a": [1, "x", None]}, "it").value == {"a": [1, "x", None]}
    assert encode({"$a": 1}, "it").value == {"$dict": [["$a", 1]]}
    assert encode(Counter(a=2), "it").value == {"$counter": [["a", 2]]}
    assert encode((math.inf, torch.ones(1)), "it").value == {"$tuple": [{"$float": "inf"}, {"$tensor": 0}]}


def test_nan_and_tensors_come_back():
    found = through_json({"nan": math.nan, "list": [torch.arange(3), (torch.tensor(True),)]})
    assert math.isnan(found["nan"])
    assert torch.equal(found["list"][0], torch.arange(3))
    assert found["list"][1][0].dtype is torch.bool


def test_a_digest_tells_values_apart_by_their_bits():
    values = [
        1,
        1.5,
        "1",
        [1],
        (1,),
        torch.ones(2),
        torch.ones(2).double(),
        torch.ones(1, 2),
        torch.tensor([1.0, -1.0]),
    ]
    assert len({encode(value, "it").digest() for value in values}) == len(values)
    assert encode({"a": torch.ones(2)}, "it").digest() == encode({"a": torch.ones(2)}, "it").digest()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [{1, 2}]}, r"it\['a'\]\[0\] is a builtins.set"),
        ({"f": print}, r"it\['f'\] is a builtins.builtin_function_or_method"),
        (b"bytes", "it is a builtins.bytes"),
        (Colour.RED, "it is a tests.checkpoint.format.test_values.Colour"),
        (torch.zeros(2, dtype=torch.complex128), "it has dtype torch.complex128, which a checkpoint cannot store"),
        (torch.zeros(2, 2).to_sparse(), "Only dense tensors"),
        (torch.zeros(2, device="meta"), "a meta tensor"),
        (object(), "Give the object a state_dict"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_a_checkpoint_cannot_hold_is_named(value, message):
    with pytest.raises(CheckpointError, match=message):
        encode(value, "it")


def test_who_gives_a_state_must_take_it_too():
    gives, takes = {"state_dict": dict}, {"load_state_dict": print}
    kinds = [type("Kind", (), methods) for methods in ({}, gives, takes, {**gives, **takes})]
    assert [is_stateful(kind()) for kind in kinds] == [False, False, False, True]
    assert not is_stateful(type("Kind", (), {**gives, "load_state_dict": 3})())

"""Nested values survive their description and their frame; what cannot travel is named."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colonnade.engine.schedule.actions import Kind
from colonnade.engine.schedule.transfer import (
    _padded,
    describe,
    empty_frame,
    header_of,
    metas,
    pack,
    payload_bytes,
    rebuild,
    unpack,
)
from colonnade.errors import ScheduleError

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=3)
    ),
)
Pair = namedtuple("Pair", "left right")


def through(value: Any) -> Any:
    note, tensors = describe(value, "the output")
    return rebuild(note, [tensor.detach().clone() for tensor in tensors])[0]


def types_of(value: Any) -> Any:
    """The types inside a value, in which True and 1 differ."""
    if isinstance(value, dict):
        return {(type(key), key): types_of(item) for key, item in value.items()}
    return [types_of(item) for item in value] if isinstance(value, (list, tuple)) else type(value)


@given(VALUES)
def test_plain_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    assert through(value) == value
    assert types_of(through(value)) == types_of(value)


def test_those_that_need_a_gradient_are_told_apart() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2)
    note, tensors = describe([a * 2, b, nn.Parameter(b)], "x")
    value, need_grad = rebuild(note, [tensor.detach() for tensor in tensors])
    assert [tensor is value[index] for tensor, index in zip(need_grad, (0, 2), strict=True)] == [True, True]


def test_equal_structures_have_equal_descriptions_and_others_not() -> None:
    def note(value: Any) -> str:
        return describe(value, "x")[0]

    assert note((torch.ones(2), 1)) == note((torch.zeros(2), 1))
    assert note(torch.ones(2)) != note(torch.ones(3))
    assert note(torch.ones(2)) != note(torch.ones(2, dtype=torch.float64))
    assert note((1,)) != note([1])
    assert note(True) != note(1)


def test_ordered_dicts_and_sizes_become_plain_ones() -> None:
    assert through(OrderedDict(a=1)) == {"a": 1}
    assert through(torch.Size([2, 3])) == (2, 3)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"cache": [1, {2}]}, r"the output\['cache'\]\[1\] is a set"),
        (Pair(1, 2), "the output is a Pair"),
        ((Kind.FORWARD,), r"the output\[0\] is a Kind"),
        ({(1, 2): 3}, r"the output has the key \(1, 2\) of type tuple"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), "the output is a Mine"),
    ],
)
def test_what_cannot_travel_is_named(value: Any, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        describe(value, "the output")


# -- frames -----------------------------------------------------------------------------------------------

KINDS = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool]


def test_every_kind_of_tensor_comes_out_as_it_went_in() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(5).to(kind) for kind in KINDS]
    tensors += [torch.empty(0, 3), torch.tensor(7), torch.randn(4, 3).T, torch.randn(3, dtype=torch.complex64).conj()]
    frame = pack((12, -3), tensors)
    assert header_of(frame) == (12, -3)
    assert frame.numel() == empty_frame(payload_bytes(tensors)).numel()
    found = unpack(frame, metas(describe(tensors, "value")[0]))
    torch.testing.assert_close(found, tensors, rtol=0, atol=0)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in found)


def test_both_ends_count_the_same_bytes() -> None:
    tensors = [torch.randn(3, 5), torch.zeros(7, dtype=torch.int8)]
    assert payload_bytes(tensors) == payload_bytes(metas(describe(tensors, "value")[0])) == 64 + 64


def test_a_tensor_changed_in_place_spoils_no_other_one() -> None:
    """A stage may fill a mask that came beside the activation it differentiates through."""
    sent = [torch.randn(4), torch.zeros(4)]
    activation, mask = unpack(pack((0, 0), sent), metas(describe(sent, "value")[0]))
    activation.requires_grad_()
    loss = (activation * activation).sum()
    mask.fill_(1.0)
    loss.backward()
    assert activation.grad is not None
    torch.testing.assert_close(activation.grad, 2 * sent[0], rtol=0, atol=0)


def test_tensors_of_a_frame_begin_at_multiples_of_64_bytes_and_no_later():
    assert [_padded(size) for size in (0, 1, 63, 64, 65, 128, 129)] == [0, 64, 64, 64, 128, 128, 192]

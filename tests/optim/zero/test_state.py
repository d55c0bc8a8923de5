"""What a slice keeps of what was kept for its whole parameter, and how it travels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade.errors import CheckpointError
from colonnade.optim.zero.inner import Part, cut, state_dtypes
from colonnade.optim.zero.state import _decoded, _fitting, _kind

WHOLE = nn.Parameter(torch.arange(6.0).reshape(2, 3))
PART = Part(WHOLE, 0, 1, 4, torch.tensor([1.0, 2.0, 3.0]))


def test_a_state_is_cut_as_its_parameter_unless_it_is_a_step():
    state = 10 * WHOLE.detach()
    assert torch.equal(cut(state, PART, "exp_avg"), torch.tensor([10.0, 20.0, 30.0]))
    assert torch.equal(cut(state.t().contiguous().t(), PART, "exp_avg"), torch.tensor([10.0, 20.0, 30.0]))
    assert torch.equal(cut(state, PART, "step"), state)
    found = cut(state, PART, "exp_avg")
    found.zero_()
    assert state[0, 1] == 10.0  # a copy
    step = torch.tensor(3.0)
    taken = cut(step, PART, "step")
    assert torch.equal(taken, step)
    assert taken is not step
    value = {"a": [1]}
    assert cut(value, PART, "other") == value
    assert cut(value, PART, "other") is not value
    assert PART.local.shape == (2, 3)


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        (torch.tensor([7.0, 8.0, 9.0]), "exp_avg", [7.0, 8.0, 9.0]),
        (WHOLE.detach(), "exp_avg", [1.0, 2.0, 3.0]),
        (torch.tensor([7.0, 8.0]), "exp_avg", [7.0, 8.0]),
        (torch.tensor([[7.0, 8.0, 9.0]]), "exp_avg", [[7.0, 8.0, 9.0]]),
        (torch.tensor(5.0), "step", 5.0),
    ],
)
def test_what_was_loaded_is_cut_where_it_is_for_the_whole(value, name, expected):
    assert _fitting(value, PART, name).tolist() == expected


def test_a_slice_that_fits_is_taken_itself_and_a_step_is_not():
    slices = torch.tensor([7.0, 8.0, 9.0])
    assert _fitting(slices, PART, "exp_avg") is slices
    assert _fitting(slices, PART, "step") is not slices
    assert _fitting(3, PART, "count") == 3


def test_kinds_of_state():
    assert _kind(torch.zeros(3, dtype=torch.bfloat16), PART) == ["like", "bfloat16"]
    assert _kind(torch.tensor(2.0), PART) == ["value", "float32", 2.0, []]
    assert _kind(torch.tensor([[2]]), PART) == ["value", "int64", 2, [1, 1]]
    assert _kind("text", PART) == ["value", None, "text"]
    for value in (2.5, None, torch.tensor([[2]], dtype=torch.int8), torch.tensor(True)):
        found = _decoded(_kind(value, PART))
        assert found == value
        assert not isinstance(value, torch.Tensor) or (found.dtype, found.shape) == (value.dtype, value.shape)
    with pytest.raises(CheckpointError, match=r"^state of shape \(2,\) belongs neither to elements nor to a parameter"):
        _kind(torch.zeros(2), PART)


@pytest.mark.parametrize(
    ("make", "dtypes"),
    [
        (lambda p: torch.optim.AdamW(p, foreach=True), (torch.bfloat16, torch.bfloat16)),
        (lambda p: torch.optim.SGD(p, lr=0.1), ()),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), (torch.bfloat16,)),
        (torch.optim.LBFGS, ()),  # cannot be tried without a closure
    ],
)
def test_the_dtypes_of_what_is_kept_of_each_element(make, dtypes):
    assert state_dtypes(make([WHOLE]), torch.bfloat16) == dtypes

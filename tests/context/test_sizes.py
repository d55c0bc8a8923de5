"""Sizes that do not fit the world: the whole message, with every change that would fit."""

from __future__ import annotations

import pytest

from colonnade.context.layout import check_mode, world_axes
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError


@pytest.mark.parametrize(
    ("parallel", "world_size", "message"),
    [
        (
            {"pipeline": 3},
            8,
            "parallel: pipeline 3 = 3 does not divide the world of 8 ranks. "
            "What would fit: pipeline=2, or a world of 6, 9 ranks.",
        ),
        (
            {"pipeline": 3, "tensor": 2},
            8,
            "parallel: pipeline 3 x tensor 2 = 6 does not divide the world of 8 ranks. "
            "What would fit: pipeline=2, or a world of 6, 12 ranks.",
        ),
        (
            {"pipeline": 2, "tensor": 6},
            8,
            "parallel: pipeline 2 x tensor 6 = 12 does not divide the world of 8 ranks. "
            "What would fit: tensor=4, or a world of 12 ranks.",
        ),
        (
            {"pipeline": 4, "tensor": 4},
            8,
            "parallel: pipeline 4 x tensor 4 = 16 does not divide the world of 8 ranks. "
            "What would fit: pipeline=2, or tensor=2, or a world of 16 ranks.",
        ),
        (
            {"pipeline": 7},
            5,
            "parallel: pipeline 7 = 7 does not divide the world of 5 ranks. "
            "What would fit: pipeline=5, or a world of 7 ranks.",
        ),
        (
            {"pipeline": 2},
            5,
            "parallel: pipeline 2 = 2 does not divide the world of 5 ranks. "
            "What would fit: pipeline=1, or a world of 4, 6 ranks.",
        ),
        (
            {"data": 3, "tensor": 2},
            8,
            "parallel: data 3 x tensor 2 = 6 is not the world of 8 ranks; data=4 would fit. "
            "Leave `data` out to give the axis all remaining ranks.",
        ),
        (
            {"data": 3},
            8,
            "parallel: data 3 x no other axis = 3 is not the world of 8 ranks; data=8 would fit. "
            "Leave `data` out to give the axis all remaining ranks.",
        ),
        ({}, 0, "a world has at least one rank, not 0"),
        (
            {"sequence": 2, "tensor": {"size": 2, "mode": "sequence"}},
            8,
            "parallel: the axes 'tensor' and 'sequence' both have ParallelMode.SEQUENCE; give one of them another mode",
        ),
    ],
)
def test_the_whole_message(parallel, world_size, message):
    with pytest.raises(LayoutError) as error:
        world_axes({"parallel": parallel}, world_size)
    assert str(error.value).startswith(message)


def test_axes_slowest_first_and_what_data_each_sees():
    axes = world_axes({"parallel": {"pipeline": 2, "sequence": 3, "tensor": {"size": 2, "mode": "1d"}}}, 24)
    assert [(axis.name, axis.size, axis.data) for axis in axes] == [
        ("data", 2, "distinct"),
        ("pipeline", 2, "same"),
        ("sequence", 3, axes[2].mode.data),
        ("tensor", 2, "same"),
    ]


def test_a_tensor_axis_of_a_mode_with_data_of_its_own():
    *_, tensor = world_axes({"parallel": {"tensor": {"size": 2, "mode": "sequence"}}}, 4)
    assert tensor.data == ParallelMode("sequence").data == "distinct"


def test_a_mode_may_be_written_large():
    assert check_mode("1D", "here") == check_mode("1d", "here") == "Initializer_1D"
    with pytest.raises(LayoutError, match=r"^here: mode 'pipelin' is not in .*; allowed: .* Did you mean 'pipeline'"):
        check_mode("pipelin", "here")

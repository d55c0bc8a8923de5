"""The typed reading of `parallel`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config import AxisSpec, Config, ParallelSizes, load_config, parallel_sizes
from colonnade.errors import ConfigError


@pytest.mark.parametrize("config", [{}, {"parallel": None}, {"parallel": {}}, Config(), {"lr": 1}])
def test_nothing_asked_means_size_one_and_data_takes_the_rest(config: dict[str, Any]) -> None:
    assert parallel_sizes(config) == ParallelSizes(data=None, pipeline=1, tensor=1)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"data": 4}, ParallelSizes(data=4)),
        ({"data": {"size": 4}}, ParallelSizes(data=4)),
        ({"data": None}, ParallelSizes()),
        ({"data": "auto"}, ParallelSizes()),
        ({"data": {"size": -1}}, ParallelSizes()),
        ({"pipeline": 2, "tensor": 2}, ParallelSizes(pipeline=2, tensor=2)),
        ({"pipeline": {"size": 2}, "tensor": None}, ParallelSizes(pipeline=2)),
        (
            {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}},
            ParallelSizes(tensor=8, tensor_mode="2.5d", tensor_kwargs={"depth": 2}),
        ),
        ({"expert": 2}, ParallelSizes(expert=AxisSpec("expert", 2))),
        ({"expert": {"size": 2, "over": "data"}}, ParallelSizes(expert=AxisSpec("expert", 2, None, {"over": "data"}))),
        ({"expert": None, "sequence": None}, ParallelSizes()),
        (
            {"mine": {"size": 3, "mode": "new_mode", "arg1": "a"}, "sequence": 2},
            ParallelSizes(
                sequence=AxisSpec("sequence", 2),
                axes=(AxisSpec("mine", 3, "new_mode", {"arg1": "a"}), AxisSpec("sequence", 2)),
            ),
        ),
    ],
)
def test_reading(parallel: dict[str, Any], expected: ParallelSizes) -> None:
    assert parallel_sizes({"parallel": parallel}) == expected
    assert parallel_sizes(load_config({"parallel": parallel}).freeze()) == expected


def test_a_wrong_section_is_refused_here_too() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tensor\.size   is missing"):
        parallel_sizes({"parallel": {"tensor": {"mode": "1d"}}})


def test_sizes_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parallel_sizes({}).data = 2  # type: ignore[misc]


SIZES = st.integers(1, 64)


@given(SIZES, SIZES, SIZES, st.booleans(), st.dictionaries(st.sampled_from(["aa", "bb", "cc"]), SIZES))
def test_int_and_dict_forms_read_the_same(d: int, p: int, t: int, as_dict: bool, more: dict[str, int]) -> None:
    further = {name: {"size": size} for name, size in more.items()}
    sizes: dict[str, Any] = {"data": d, "pipeline": p, "tensor": t}
    if as_dict:
        sizes = {name: {"size": size} for name, size in sizes.items()}
    read = parallel_sizes({"parallel": {**sizes, **further}})
    assert (read.data, read.pipeline, read.tensor) == (d, p, t)
    assert {axis.name: axis.size for axis in read.axes} == more

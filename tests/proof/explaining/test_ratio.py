"""What a factor can mean: the likeliest first, from the sizes that are in the layout."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from colonnade.config import load_config
from colonnade.errors import ConfigError, LayoutError
from colonnade.proof.ratio import Of, meanings

WIDE: dict[str, Any] = {
    "parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}, "expert": 2},
    "num_microbatches": 8,
}


def said(config: dict[str, Any], ranks: int, ratio: float, of: Of = "gradient") -> list[tuple[str, str]]:
    return [(one.cause, one.made_of) for one in meanings(load_config(config), ranks, ratio, of)[0]]


@pytest.mark.parametrize(
    ("config", "ranks", "ratio", "cause", "made_of"),
    [
        ({}, 4, 4, "summed-not-averaged", "DATA 4"),
        ({}, 4, 0.25, "wrong-divisor", "1 / DATA 4"),
        ({}, 4, 16, "reduced-twice", "DATA 4 squared"),
        ({"parallel": {"tensor": 2}}, 8, 2, "scaled-by-mode", "TENSOR 2"),
        ({"parallel": {"tensor": 2}}, 8, 8, "summed-not-averaged", "DATA 4 x TENSOR 2"),
        ({"parallel": {"sequence": 3}}, 6, 3, "summed-not-averaged", "SEQUENCE 3"),
        ({"parallel": {"sequence": 3}}, 6, 6, "summed-not-averaged", "SEQUENCE_DP 6"),
        ({"gradient_accumulation": 5}, 2, 5, "scaled-by-accumulation", "accumulation 5"),
        ({"gradient_accumulation": 5}, 2, 0.2, "scaled-by-accumulation", "1 / accumulation 5"),
        (WIDE, 16, 8, "scaled-by-accumulation", "micro-batches 8"),
        (WIDE, 32, 1 / 4, "wrong-divisor", "8 / world 32"),
        ({"fp16": True}, 2, 65536, "loss-scale-left", "loss scale 65536"),
    ],
)
def test_the_likeliest_cause_of_a_gradient_comes_first(config, ranks, ratio, cause, made_of):
    assert said(config, ranks, ratio)[0] == (cause, made_of)


def test_experts_that_are_divided_by_their_twins_alone():
    assert ("wrong-divisor", "4 senders / 2 replicas") in said(WIDE, 16, 2)
    assert ("tied-copy-missed", "1 / 2 copies") in said(WIDE, 16, 0.5)


@pytest.mark.parametrize(
    ("ratio", "cause", "made_of"),
    [
        (2.83, "norm-counts-replicas", "root of DATA 4 x root of TENSOR 2"),
        (1.41, "norm-counts-replicas", "root of TENSOR 2"),
        (2, "norm-counts-replicas", "root of DATA 4"),
        (0.71, "norm-misses-shards", "1 / root of TENSOR 2"),
    ],
)
def test_the_likeliest_cause_of_a_norm_comes_first(ratio, cause, made_of):
    assert said({"parallel": {"tensor": 2}}, 8, ratio, "norm")[0] == (cause, made_of)


def test_a_norm_may_also_be_off_because_the_gradients_are():
    found = said({}, 4, 4, "norm")
    assert found[0] == ("summed-not-averaged", "DATA 4")
    assert ("clipped-before-reduced", "root of DATA 4") in said({}, 4, 2, "norm")
    assert ("norm-of-a-part", "1 / root of PIPELINE 2") in said(WIDE, 16, 1 / sqrt(2), "norm")


def test_what_fits_nothing_is_said_with_the_nearest():
    found, near = meanings(load_config({"parallel": {"tensor": 2}}), 8, 3.3)
    assert found == []
    assert near[0].made_of == "DATA 4"
    assert meanings(load_config({}), 1, 3.3) == ([], [])


def test_nothing_is_wrong_with_one():
    (only,), near = meanings(load_config({}), 4, 1.0)
    assert "not an error" in only.sentence
    assert near == []


def test_every_meaning_has_the_value_that_it_is_made_of():
    for of in ("gradient", "norm"):
        for ratio in (2, 4, 8, 0.5, 0.25, sqrt(2), 1 / sqrt(2)):
            for one in meanings(load_config(WIDE), 16, ratio, of)[0]:
                assert one.value == pytest.approx(ratio, rel=0.015)


@pytest.mark.parametrize("ratio", [0, -2, float("nan"), float("inf")])
def test_nonsense_is_refused(ratio):
    with pytest.raises(ConfigError, match="a number above 0"):
        meanings(load_config({}), 4, ratio)
    with pytest.raises(LayoutError, match="does not divide"):
        meanings(load_config({"parallel": {"tensor": 4}}), 6, 2.0)

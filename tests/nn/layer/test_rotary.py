"""Rotary positions: scores depend on distances, scaled frequencies are those of the published rules."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from colonnade.errors import ConfigError
from colonnade.nn import Rotary
from tests.nn.layer.cases import numbers

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_pairs_are_turned_by_their_position_and_frequency():
    x = numbers(1, 2, 5, 8, seed=1)
    found, same = Rotary(8, theta=100.0)(x, x)
    assert torch.equal(found, same)
    for position in range(5):
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8)
            old, new = (torch.complex(y[0, :, position, pair], y[0, :, position, pair + 4]) for y in (x, found))
            turn = complex(math.cos(angle), math.sin(angle))
            assert torch.allclose(new, old * turn, rtol=1e-6)


def test_scores_depend_on_the_distance_alone():
    rotary = Rotary(16)
    q, k = numbers(1, 1, 4, 16, seed=2), numbers(1, 1, 4, 16, seed=3)
    scores = [
        q_turned @ k_turned.mT
        for q_turned, k_turned in (rotary(q, k, torch.arange(4) + shift) for shift in (0, 3, 100))
    ]
    for other in scores[1:]:
        assert torch.allclose(scores[0], other, atol=1e-4)


def test_positions_are_those_that_are_given():
    rotary = Rotary(8, length=4)
    x = numbers(1, 2, 9, 8, seed=4)  # longer than the table
    whole, _ = rotary(x, x)
    places = torch.tensor([7, 0, 3])
    part, _ = rotary(x[:, :, places], x[:, :, places], places)
    assert torch.equal(part, whole[:, :, places])
    assert rotary(x.bfloat16(), x.bfloat16())[0].dtype is torch.bfloat16


def test_linear_scaling_stretches_positions():
    plain, scaled = Rotary(8), Rotary(8, scaling={"rope_type": "linear", "factor": 4.0})
    x = numbers(1, 1, 3, 8, seed=5)
    assert torch.allclose(scaled(x, x, torch.tensor([0, 4, 8]))[0], plain(x, x)[0])


def test_llama3_scaling_keeps_fast_pairs_and_slows_slow_ones():
    plain = Rotary(128, theta=500000.0).frequencies()
    scaled = Rotary(128, theta=500000.0, scaling=LLAMA3).frequencies()
    lengths = 2 * math.pi / plain
    fast, slow = lengths < 8192 / 4, lengths > 8192
    assert torch.equal(scaled[fast], plain[fast])
    assert torch.allclose(scaled[slow], plain[slow] / 8)
    between = ~fast & ~slow
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
    assert (scaled.diff() < 0).all()


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, "got rope_type='yarn'; allowed are linear, llama3"),
        ({"factor": 2.0}, "unknown rope_type=None"),
        ({"rope_type": "linear"}, "'linear' takes exactly the keys factor"),
        ({**LLAMA3, "beta": 1}, "'llama3' takes exactly"),
    ],
)
def test_scaling_that_is_not_known_is_refused(scaling, said):
    with pytest.raises(ConfigError, match=said):
        Rotary(8, scaling=scaling)


def test_the_table_is_made_once_for_its_length_and_shared_by_copies():
    assert Rotary(8)._tables == {}
    assert Rotary(8).scaling == {}
    (made,) = Rotary(8, length=4)._tables.items()
    assert (made[0], made[1].shape) == (torch.device("cpu"), (2, 4, 4))
    assert [*Rotary(8, length=4, device=torch.device("meta"))._tables] == [torch.device("meta")]
    rotary = Rotary(8, length=5)
    table = rotary.table(5, torch.device("cpu"))
    assert rotary.table(3, torch.device("cpu")) is rotary.table(5, torch.device("cpu")) is table
    assert rotary.table(6, torch.device("cpu")).shape == (2, 6, 4)
    assert copy.deepcopy(rotary) is rotary


def test_an_odd_head_is_refused():
    with pytest.raises(ConfigError, match="head_size is 7"):
        Rotary(7)


def test_a_table_made_in_inference_mode_serves_training():
    rotary, x = Rotary(8), numbers(1, 1, 5, 8, seed=1).requires_grad_()
    with torch.inference_mode():
        seen = rotary(x, x)[0]
    found = rotary(x, x)[0]
    assert torch.equal(found, seen)
    found.sum().backward()

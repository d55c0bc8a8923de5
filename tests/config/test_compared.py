"""What ranks compare of their configs: all that is ours, but for keys that say otherwise."""

from __future__ import annotations

from functools import partial

import torch

from colonnade.config.config import compared_texts, text_of


def test_keys_of_ones_own_and_keys_that_may_differ_are_left_out() -> None:
    config = {
        "mine": 1,
        "model": {"width": 3, "num_chunks": 2},
        "fp16": {"init_scale": 8.0},
        "clip_grad_norm": None,
        "parallel": {"own": {"size": 2, "mode": None, "depth": 1}},
        "sync": {"reduce_dtype": torch.float32},
    }
    assert compared_texts(config) == {
        "model.num_chunks": "2",
        "fp16.init_scale": "8.0",
        "parallel.own.size": "2",
        "parallel.own.depth": "1",
        "sync.reduce_dtype": "torch.float32",
    }


def test_a_text_says_nothing_of_where_a_value_lies_in_memory() -> None:
    class Own:
        pass

    for make in (lambda: [Own()], lambda: {"f": lambda: None}, lambda: partial(Own().__init__)):
        one, other = make(), make()
        assert repr(one) != repr(other)
        assert text_of(one) == text_of(other)
    assert text_of({"b", "a"}) == "{'a', 'b'}"
    assert text_of((1, [2.5, None])) == "[1, [2.5, None]]"

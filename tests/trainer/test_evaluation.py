"""Predictions in one process: which samples they are of, padded to one length, in the order of the dataset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from colonnade.errors import ConfigError
from colonnade.trainer.evaluation import _filled, _indices, _join_padded

ROWS = list(range(5))


class Named:
    """A sampler of names."""

    def __iter__(self) -> Any:
        return iter([0, *"bcde"])

    def __len__(self) -> int:
        return 5


def test_the_samples_of_a_loader_are_known_beforehand():
    assert _indices(DataLoader(ROWS, 2)).tolist() == ROWS
    assert _indices(DataLoader(ROWS, 2, drop_last=True)).tolist() == [0, 1, 2, 3]
    reversed_ones = BatchSampler(list(reversed(ROWS)), 2, False)  # type: ignore[arg-type]
    assert _indices(DataLoader(ROWS, batch_sampler=reversed_ones)).tolist() == [4, 3, 2, 1, 0]
    assert _indices([ROWS]) is None
    assert _indices(DataLoader(ROWS, None)) is None
    assert _indices(DataLoader(dict.fromkeys("abcde", 1), 2, sampler=Named())) is None  # type: ignore[arg-type]
    for sampler in (RandomSampler(ROWS), WeightedRandomSampler([1.0] * 5, 5)):
        with pytest.raises(ConfigError, match=r"^predict returns outputs in dataset order, so it needs a loader with"):
            _indices(DataLoader(ROWS, 2, sampler=sampler))
    assert _indices(DataLoader(ROWS, 2, sampler=SequentialSampler(ROWS))).tolist() == ROWS


def test_a_sampler_with_a_state_is_where_it_was():
    class Stateful(SequentialSampler):
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            return super().__iter__()

        def state_dict(self) -> dict[str, int]:
            return {"passes": self.passes}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.passes = state["passes"]

    sampler = Stateful(ROWS)
    assert _indices(DataLoader(ROWS, 2, sampler=sampler)).tolist() == ROWS
    assert sampler.passes == 0


def test_outputs_of_unequal_lengths_are_filled_up():
    short, long = torch.ones(1, 2, 1), torch.full((2, 1, 3), 2.0)
    filled = _filled(short, long)
    assert filled[0].tolist() == [[[1, -100, -100], [1, -100, -100]]]
    assert filled[1].tolist() == [[[2, 2, 2], [-100, -100, -100]]] * 2
    for alone in ([torch.ones(2), torch.ones(3)], [torch.ones(1, 2), "text"], [torch.ones(1, 2), torch.ones(1, 2, 3)]):
        assert all(one is other for one, other in zip(_filled(*alone), alone, strict=True))
    same = torch.ones(2, 3)
    assert all(each is same for each in _filled(same, same))
    joined = _join_padded([{"a": torch.ones(1, 2), "b": torch.ones(1)}, {"a": torch.zeros(1, 1), "b": torch.zeros(1)}])
    assert joined["a"].tolist() == [[1, 1], [0, -100]]
    assert joined["b"].tolist() == [1, 0]
    other = [{"a": torch.ones(1, 2)}, {"a": torch.ones(1, 2)}, {"b": torch.ones(1, 2)}]
    assert all(one is two for one, two in zip(_join_padded(other), other, strict=True))

"""A distributed sampler that follows the parallel layout, and whose position can be saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from colonnade.context.layout import Layout
from colonnade.errors import ConfigError


class DistinctDataSampler(Sampler[int]):
    """Yields the samples of a rank. Ranks of one model replica (tensor, pipeline, sequence) get the same samples.

    With `shuffle`, every epoch has a new order. Without `drop_last`, samples from the start of the epoch are repeated at its end,
    so that all ranks have the same number of samples. `state_dict` contains a global position, so that a run can be resumed with
    another number of ranks.
    """

    def __init__(
        self,
        dataset: Sized,
        layout: Layout,
        rank: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
    ) -> None:
        self._length = len(dataset)
        if self._length == 0:
            raise ConfigError("the dataset is empty. Give at least one sample.", code="C090")
        self._rank, self._ranks = sample_place(layout, rank)
        if drop_last and self._length < self._ranks:
            raise ConfigError(
                f"a dataset of {self._length} samples is too small for {self._ranks} ranks with drop_last=True. Use "
                "drop_last=False, or more samples.",
                code="C090",
            )
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._position = 0

    def __len__(self) -> int:
        """The number of samples of this rank in an epoch."""
        whole = self._length // self._ranks
        return whole if self._drop_last or self._length % self._ranks == 0 else whole + 1

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        for at in range(self._position, len(self) * self._ranks, self._ranks):
            self._position = at + self._ranks
            yield order[(at + self._rank) % self._length]
        self._position = 0
        self.epoch += 1

    @property
    def repeats_last(self) -> bool:
        """Whether the last sample of this rank in an epoch is a repetition."""
        return (len(self) - 1) * self._ranks + self._rank >= self._length

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch. The epoch also advances automatically after each pass over the samples."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of samples of the epoch that all ranks together have used."""
        return {"epoch": self.epoch, "position": self._position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the saved position, possibly with another number of ranks."""
        self.epoch, self._seed = int(state["epoch"]), int(state["seed"])
        self._position = int(state["position"])

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._length))
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        return torch.randperm(self._length, generator=generator, device="cpu").tolist()


def sample_place(layout: Layout, rank: int) -> tuple[int, int]:
    """The place of a rank among the ranks that get different samples: (its index, the number of indices).

    Ranks that need the same samples have equal indices.
    """
    here, place, count = layout.coordinates(rank), 0, 1
    for axis in layout.sample_axes:
        place, count = place * axis.size + here[axis.name], count * axis.size
    return place, count

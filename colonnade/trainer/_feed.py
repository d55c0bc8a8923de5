"""The batches of an epoch, from its start or from where a run was interrupted, with the random streams as they were."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from colonnade.checkpoint.format.values import is_stateful
from colonnade.checkpoint.random_state import random_state, set_random_state
from colonnade.context.parallel_context import ParallelContext
from colonnade.utils.sampler import DistinctDataSampler


class Feed:
    """One data loader over the epochs of a run.

    Where it goes on in the middle of an epoch, it asks a loader with a state of its own to; sets the position of a
    `DistinctDataSampler`; and skips the batches of any other loader, after putting the random streams back to where
    they were when the epoch began, so that it shuffles as it did.
    """

    def __init__(self, loader: Any, context: ParallelContext) -> None:
        self.loader = loader
        self._context = context
        self._began: dict[str, Any] | None = None
        self._loaded: Any = None
        self._samples: int | None = None

    def open(self, epoch: int, batches: int, then: Any = None) -> Iterator[Any]:
        """The batches of `epoch` after the first `batches`; the random streams are left at `then`, if given."""
        _set_epoch(self.loader, epoch)
        if batches == 0:
            self._began = self._streams()
            return iter(self.loader)
        then = then if then is not None else random_state(self._context)
        self._put_back()
        iterator = self._continued(epoch, batches)
        set_random_state(then, self._context)
        return iterator

    def state_dict(self, batches: int) -> dict[str, Any]:
        """What it takes to go on after `batches` of this epoch: the same on every rank, for any number of ranks."""
        step = self._samples_per_batch()
        return {"batches": batches, "samples": batches * step if step else None}

    def own_state(self) -> dict[str, Any]:
        """What it takes on this rank alone: random streams at the start of the epoch, the loader's own state."""
        own = {"began": self._began}
        return {**own, "loader": self.loader.state_dict()} if is_stateful(self.loader) else own

    def load_state_dict(self, state: dict[str, Any], own: dict[str, Any] | None) -> int:
        """Take both up again; `own` is None where the layout is another. Returns the batches that are behind."""
        self._began = own["began"] if own else None
        self._loaded = own.get("loader") if own else None
        step = self._samples_per_batch()
        if state["samples"] is None or not step:
            return int(state["batches"])
        self._samples = int(state["samples"])
        return self._samples // step

    def _continued(self, epoch: int, batches: int) -> Iterator[Any]:
        if self._loaded is not None:
            self.loader.load_state_dict(self._loaded)
            self._loaded = None
            return iter(self.loader)
        if _keeps_place(self.loader):
            sampler = self.loader.sampler
            at = batches * self._samples_per_batch()
            at, self._samples = self._samples or at, None  # of another number of ranks: no whole number of batches
            sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "position": at})
            return iter(self.loader)
        iterator = iter(self.loader)
        for _ in islice(iterator, batches):
            pass
        return iterator

    def _samples_per_batch(self) -> int:
        """The samples that all ranks take together with one batch each; 0 if that is not known."""
        size = getattr(self.loader, "batch_size", None)
        return size * self._context.layout.distinct_data if isinstance(size, int) else 0

    def _streams(self) -> dict[str, Any]:
        generator = getattr(self.loader, "generator", None)
        state = {"random": random_state(self._context)}
        return {**state, "generator": generator.get_state()} if generator is not None else state

    def _put_back(self) -> None:
        if self._began is None:
            return
        set_random_state(self._began["random"], self._context)
        if "generator" in self._began and getattr(self.loader, "generator", None) is not None:
            self.loader.generator.set_state(self._began["generator"])


def _keeps_place(loader: Any) -> bool:
    """Whether its sampler can be put anywhere in an epoch without fetching what lies before."""
    sampler = getattr(loader, "sampler", None)
    return isinstance(sampler, DistinctDataSampler) and isinstance(getattr(loader, "batch_size", None), int)


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell samplers that shuffle by the number of the epoch; ours may still stand where an epoch was left."""
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if isinstance(sampler, DistinctDataSampler):
            sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "position": 0})
        elif callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]

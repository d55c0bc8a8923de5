"""The data of a run: the number of batches on each rank, and an iterator over an epoch that can start at any position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, default_collate

from colonnade.checkpoint.values import is_stateful
from colonnade.comm.messages import gather_from_all
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.random import random_state, set_random_state
from colonnade.errors import ConfigError
from colonnade.logging import get_dist_logger
from colonnade.utils.sampler import DistinctDataSampler

NO_BATCH = object()
"""The value that marks the end of a loader."""


@dataclass(frozen=True)
class Lengths:
    """The number of batches of each rank; None for a rank whose loader has no length."""

    of_rank: tuple[int | None, ...]

    @property
    def known(self) -> bool:
        """Whether all loaders have a length."""
        return None not in self.of_rank

    @property
    def equal(self) -> bool:
        """Whether all ranks have the same number of batches."""
        return len(set(self.of_rank)) == 1

    @property
    def longest(self) -> int | None:
        """The largest number of batches of a rank; None if a loader has no length."""
        return max(length for length in self.of_rank if length is not None) if self.known else None

    def __str__(self) -> str:
        shown = [f"rank {rank} has {length}" for rank, length in enumerate(self.of_rank[:8])]
        return ", ".join(shown) + (", ..." if len(self.of_rank) > 8 else "")


@dataclass(frozen=True)
class EpochPosition:
    """The progress within an epoch: the batches that each rank has used, and the samples that all ranks together have used.

    The number of samples stays valid if batch size, accumulation or the number of ranks change; None if it is unknown.
    """

    batches: int = 0
    samples: int | None = 0


def read_lengths(loader: Any, context: ParallelContext) -> Lengths:
    """Return the lengths of the loaders of all ranks. Collective over the world.

    Raises ConfigError on all ranks if a loader is no iterable of batches, or if the ranks' lengths do not fit the
    layout.
    """
    # Typical mistakes, each with its remedy. They are recognized by type, since any iterable may be a loader.
    problem: str | None = None
    kind = type(loader).__name__
    if isinstance(loader, Tensor):
        shape = tuple(loader.shape)
        problem = (
            f"a tensor of shape {shape}. Each row of the tensor would count as a batch. For one batch pass [batch]."
        )
    elif isinstance(loader, Mapping):
        problem = f"a {kind}. For one batch pass [batch]."
    elif isinstance(loader, Dataset) and not hasattr(type(loader), "__iter__"):
        problem = (
            f"a {kind}, which yields single samples. Use colonnade.utils.get_dataloader(dataset, batch_size=...) to "
            "make batches."
        )
    elif isinstance(loader, str) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        problem = f"a {kind}. Use colonnade.utils.get_dataloader to make a loader from a dataset."
    length: int | None = None
    if problem is None:
        with suppress(TypeError, NotImplementedError, AttributeError):  # an iterable dataset has no length
            length = len(loader)

    gathered = gather_from_all([problem, length], context)
    for rank, (wrong, _) in enumerate(gathered):
        if wrong:
            raise ConfigError(
                f"rank {rank}: a data loader must be an iterable of batches, but it is {wrong}", code="C090"
            )
    lengths = Lengths(tuple(of_rank for _, of_rank in gathered))
    if lengths.longest == 0:
        raise ConfigError(
            "the data loader has no batches on any rank. With drop_last, a dataset that is smaller than one batch "
            "gives no batches. Use a larger dataset, a smaller batch size, or drop_last=False.",
            code="C090",
        )
    if lengths.known:
        others = _other_distinct(context)
        _check_groups(lengths, context, lambda axis: axis.data == "same", "see the same data")
        what = f"communicate in forward passes (axes {', '.join(others)})"
        _check_groups(lengths, context, lambda axis: axis.data == "same" or axis.name in others, what)
    return lengths


def moves_together(lengths: Lengths, context: ParallelContext) -> bool:
    """Return whether every rank must have a batch, because forward passes of some ranks communicate.

    Pipeline stages and tensor-parallel ranks do not count if their lengths are known to be equal: they run out at the
    same time.
    """
    only_data_parallel = context.world_size == context.data_parallel_size
    return bool(_other_distinct(context)) or (not lengths.known and not only_data_parallel)


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes of an epoch: `whole` batches of `size` samples, and one batch of `last` samples unless `last` is 0."""

    samples: int
    size: int

    @property
    def whole(self) -> int:
        return self.samples // self.size

    @property
    def last(self) -> int:
        return self.samples % self.size


def last_batch(loader: Any) -> BatchSizes | None:
    """Return the batch sizes of a loader, including the size of its smaller last batch.

    Returns None if the sizes are unknown, if the loader drops the last batch, or if rows of a batch may not be samples
    (custom `collate_fn`).
    """
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is not BatchSampler or batches.drop_last or loader.collate_fn is not default_collate:
        return None
    try:
        return BatchSizes(len(batches.sampler), batches.batch_size)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a sampler without a length
        return None


def _check_groups(lengths: Lengths, context: ParallelContext, joins: Callable[[Any], bool], what: str) -> None:
    """Raise if lengths differ between ranks whose coordinates differ only on axes that `joins` accepts."""
    found: dict[tuple[tuple[str, int], ...], int] = {}
    apart = [axis.name for axis in context.layout.axes if not joins(axis)]
    for rank, length in enumerate(lengths.of_rank):
        here = context.layout.coordinates(rank)
        first = found.setdefault(tuple((name, here[name]) for name in apart), rank)
        if lengths.of_rank[first] != length:
            raise ConfigError(
                f"ranks {first} and {rank} {what}, but have {lengths.of_rank[first]} and {length} batches. Give them "
                "loaders of equal length. colonnade.utils.get_dataloader makes loaders of equal length.",
                code="C090",
            )


def _other_distinct(context: ParallelContext) -> list[str]:
    """The axes whose ranks see distinct data and communicate in forward passes. With experts, this includes the data axis."""
    experts = context.is_initialized(ParallelMode.EXPERT) and context.get_world_size(ParallelMode.EXPERT) > 1
    return [
        axis.name
        for axis in context.layout.axes
        if axis.data == "distinct" and axis.size > 1 and (experts or axis.mode is not ParallelMode.DATA)
    ]


class Feed:
    """Iterates one data loader over the epochs of a run, and resumes within an epoch.

    A stateful loader restores itself, and a `DistinctDataSampler` is moved to the position. For any other loader the
    random streams are reset to the start of the epoch, so that it shuffles in the same order, and the used batches are
    skipped.
    """

    def __init__(self, loader: Any, context: ParallelContext) -> None:
        self.loader = loader
        self._context = context
        self._began: dict[str, Any] | None = None
        self._before_ahead: Any = None
        self._loaded: Any = None

    def open(self, epoch: int, place: EpochPosition, then: Any = None) -> Iterator[Any]:
        """Return an iterator over the batches of `epoch` after `place`. Then set the random streams to `then`, if given."""
        # Samplers that shuffle by the epoch number need it; a DistinctDataSampler may still be in the middle of an epoch.
        for sampler in (getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)):
            if isinstance(sampler, DistinctDataSampler):
                sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "position": 0})
            elif callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)  # type: ignore[union-attr]
        if place.batches == 0:
            self._began, self._before_ahead = self._streams(), None
            return iter(self.loader)
        then = then if then is not None else random_state(self._context)
        self._restore_streams()
        if self._loaded is not None:
            self.loader.load_state_dict(self._loaded)
            self._loaded = None
            iterator = iter(self.loader)
        elif _keeps_place(self.loader) and place.samples is not None:
            sampler = self.loader.sampler
            sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "position": place.samples})
            iterator = iter(self.loader)
        else:
            iterator = iter(self.loader)
            for _ in islice(iterator, self.batches_behind(place)):
                pass
        # A batch that was fetched ahead drew its random numbers before the step that the checkpoint includes.
        if self._before_ahead is not None:
            set_random_state(self._before_ahead, self._context)
            iterator = chain(list(islice(iterator, 1)), iterator)
            self._before_ahead = None
        set_random_state(then, self._context)
        return iterator

    def look_ahead(self) -> None:
        """Record the random streams, before the trainer fetches a batch ahead of the current step."""
        self._before_ahead = random_state(self._context)

    def after(self, place: EpochPosition, batches: int) -> EpochPosition:
        """Return the position that is this many batches after `place`."""
        step = self._samples_per_batch()
        samples = place.samples + batches * step if place.samples is not None and step else None
        return EpochPosition(place.batches + batches, samples)

    def batches_behind(self, place: EpochPosition) -> int:
        """Return the number of full batches of this loader before a position.

        The position may have been recorded with another batch size.
        """
        step = self._samples_per_batch()
        return place.batches if place.samples is None or not step else place.samples // step

    def inside_batch(self, place: EpochPosition) -> int:
        """Return the number of samples before a position that belong to the same batch as the next sample."""
        step = self._samples_per_batch()
        return (place.samples or 0) % step if step else 0

    def own_state(self) -> dict[str, Any]:
        """Return the state of this rank: random streams at the start of the epoch, and the state of a stateful loader."""
        own = {"began": self._began, "ahead": self._before_ahead}
        return {**own, "loader": self.loader.state_dict()} if is_stateful(self.loader) else own

    def load_state_dict(self, place: EpochPosition, own: dict[str, Any] | None) -> EpochPosition:
        """Resume at `place`; returns the position at which this loader can start.

        `own` is the result of `own_state` on this rank, None if the layout has changed.
        """
        self._began = own["began"] if own else None
        self._before_ahead = own.get("ahead") if own else None
        self._loaded = own.get("loader") if own else None
        repeated = self.inside_batch(place)
        if not repeated or _keeps_place(self.loader) or self._loaded is not None:
            return place
        assert place.samples is not None
        get_dist_logger().warning(
            f"{repeated} of the {place.samples} samples that this epoch has used are read again, because this loader "
            "can start only at a full batch. Use colonnade.utils.get_dataloader for a loader that can start at any "
            "sample.",
            ranks=[0],
        )
        return replace(place, samples=place.samples - repeated)

    def _samples_per_batch(self) -> int:
        """The samples in one batch of each rank, over all ranks; 0 if unknown."""
        size = getattr(self.loader, "batch_size", None)
        return size * prod(axis.size for axis in self._context.layout.sample_axes) if isinstance(size, int) else 0

    def _streams(self) -> dict[str, Any]:
        generator = getattr(self.loader, "generator", None)
        state = {"random": random_state(self._context)}
        return {**state, "generator": generator.get_state()} if generator is not None else state

    def _restore_streams(self) -> None:
        if self._began is None:
            return
        set_random_state(self._began["random"], self._context)
        if "generator" in self._began and getattr(self.loader, "generator", None) is not None:
            self.loader.generator.set_state(self._began["generator"])


def _keeps_place(loader: Any) -> bool:
    """Whether the sampler can start anywhere in an epoch without fetching earlier samples."""
    sampler = getattr(loader, "sampler", None)
    return isinstance(sampler, DistinctDataSampler) and isinstance(getattr(loader, "batch_size", None), int)

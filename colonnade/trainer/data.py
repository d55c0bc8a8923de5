"""The data of a run: how many batches each rank has, and the batches of an epoch from any place in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
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
"""What a loop gets from a loader that has run out."""


@dataclass(frozen=True)
class Lengths:
    """The number of batches of every rank; None where a loader does not know."""

    of_rank: tuple[int | None, ...]

    @property
    def known(self) -> bool:
        return None not in self.of_rank

    @property
    def equal(self) -> bool:
        return len(set(self.of_rank)) == 1

    @property
    def longest(self) -> int | None:
        """The batches of the rank that has most; None if any rank does not know."""
        return max(length for length in self.of_rank if length is not None) if self.known else None

    def __str__(self) -> str:
        shown = [f"rank {rank} has {length}" for rank, length in enumerate(self.of_rank[:8])]
        return ", ".join(shown) + (", ..." if len(self.of_rank) > 8 else "")


@dataclass(frozen=True)
class EpochPosition:
    """How far a run is in an epoch: the batches that each rank has learnt from, and the samples of all ranks together.

    The samples hold for any size of a batch, any accumulation and any number of ranks; None where they are not known.
    """

    batches: int = 0
    samples: int | None = 0


def read_lengths(loader: Any, context: ParallelContext) -> Lengths:
    """Ask every rank. Collective; refuses, on all ranks, what is no loader and loaders that cannot work together."""
    wrong = _what_else(loader)
    told = gather_from_all([wrong, None if wrong else _length(loader)], context)
    for rank, (problem, _) in enumerate(told):
        if problem:
            raise ConfigError(f"rank {rank}: a data loader is an iterable of batches, not {problem}", code="C090")
    lengths = Lengths(tuple(length for _, length in told))
    if lengths.longest == 0:
        raise ConfigError(
            "the data loader has no batches on any rank; is the dataset smaller than a batch of drop_last?", code="C090"
        )
    if lengths.known:
        others = _other_distinct(context)
        _check_groups(lengths, context, lambda axis: axis.data == "same", "see the same data")
        what = f"share forward passes (axes {', '.join(others)})"
        _check_groups(lengths, context, lambda axis: axis.data == "same" or axis.name in others, what)
    return lengths


def moves_together(lengths: Lengths, context: ParallelContext) -> bool:
    """Whether a rank without a batch would be missed by others that have one: their forward passes need it.

    Stages of a pipeline and shards of a tensor run out together, if their lengths are known to be equal.
    """
    by_itself = context.world_size == context.data_parallel_size
    return bool(_other_distinct(context)) or (not lengths.known and not by_itself)


@dataclass(frozen=True)
class BatchSizes:
    """The batches that a loader gives in an epoch: so many whole ones of `size` samples, then one of `last`, or none."""

    samples: int
    size: int

    @property
    def whole(self) -> int:
        return self.samples // self.size

    @property
    def last(self) -> int:
        return self.samples % self.size


def last_batch(loader: Any) -> BatchSizes | None:
    """The sizes of a loader whose rows are its samples; None where that is not known, or no smaller batch comes last."""
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is not BatchSampler or batches.drop_last or loader.collate_fn is not default_collate:
        return None
    try:
        return BatchSizes(len(batches.sampler), batches.batch_size)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a sampler need not know
        return None


def _what_else(loader: Any) -> str | None:
    """What was given in place of a loader, and what to do; None if it may be one."""
    if isinstance(loader, Tensor):
        return (
            f"a tensor of shape {tuple(loader.shape)}, of which every row would be a batch; for one batch give [batch]"
        )
    if isinstance(loader, Mapping):
        return f"a {type(loader).__name__}; for one batch give [batch]"
    if isinstance(loader, Dataset) and not hasattr(type(loader), "__iter__"):
        kind = type(loader).__name__
        return f"a {kind}, which gives single samples; colonnade.utils.get_dataloader(dataset, batch_size=...) makes batches"
    if isinstance(loader, str) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        return f"a {type(loader).__name__}; colonnade.utils.get_dataloader makes one of a dataset"
    return None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):  # an iterable dataset has none
        return None


def _check_groups(lengths: Lengths, context: ParallelContext, joins: Callable[[Any], bool], what: str) -> None:
    """Refuse different lengths among ranks that differ only on the axes that `joins` picks."""
    found: dict[tuple[tuple[str, int], ...], int] = {}
    apart = [axis.name for axis in context.layout.axes if not joins(axis)]
    for rank, length in enumerate(lengths.of_rank):
        here = context.layout.coordinates(rank)
        first = found.setdefault(tuple((name, here[name]) for name in apart), rank)
        if lengths.of_rank[first] != length:
            raise ConfigError(
                f"ranks {first} and {rank} {what}, but have {lengths.of_rank[first]} and {length} batches; give them "
                f"loaders of one length (colonnade.utils.get_dataloader does)",
                code="C090",
            )


def _other_distinct(context: ParallelContext) -> list[str]:
    """Axes whose ranks see distinct data and meet in forward passes; with experts the data axis is one."""
    experts = context.is_initialized(ParallelMode.EXPERT) and context.get_world_size(ParallelMode.EXPERT) > 1
    return [
        axis.name
        for axis in context.layout.axes
        if axis.data == "distinct" and axis.size > 1 and (experts or axis.mode is not ParallelMode.DATA)
    ]


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
        self._before_ahead: Any = None
        self._loaded: Any = None

    def open(self, epoch: int, place: EpochPosition, then: Any = None) -> Iterator[Any]:
        """The batches of `epoch` after `place`; the random streams are left at `then`, if given."""
        _set_epoch(self.loader, epoch)
        if place.batches == 0:
            self._began, self._before_ahead = self._streams(), None
            return iter(self.loader)
        then = then if then is not None else random_state(self._context)
        self._put_back()
        iterator = self._continued(epoch, place)
        if self._before_ahead is not None:
            set_random_state(self._before_ahead, self._context)
            iterator = chain(list(islice(iterator, 1)), iterator)
            self._before_ahead = None
        set_random_state(then, self._context)
        return iterator

    def look_ahead(self) -> None:
        """A batch is about to be fetched before the step before it is made: with the random streams as they are now."""
        self._before_ahead = random_state(self._context)

    def after(self, place: EpochPosition, batches: int) -> EpochPosition:
        """The place that many batches later."""
        step = self._samples_per_batch()
        samples = place.samples + batches * step if place.samples is not None and step else None
        return EpochPosition(place.batches + batches, samples)

    def batches_behind(self, place: EpochPosition) -> int:
        """How many whole batches of this loader lie before a place, which may be one of another size of batches."""
        step = self._samples_per_batch()
        return place.batches if place.samples is None or not step else place.samples // step

    def inside_batch(self, place: EpochPosition) -> int:
        """How many samples of its next batch lie before a place."""
        step = self._samples_per_batch()
        return (place.samples or 0) % step if step else 0

    def own_state(self) -> dict[str, Any]:
        """What it takes on this rank alone: random streams at the start of the epoch, the loader's own state."""
        own = {"began": self._began, "ahead": self._before_ahead}
        return {**own, "loader": self.loader.state_dict()} if is_stateful(self.loader) else own

    def load_state_dict(self, place: EpochPosition, own: dict[str, Any] | None) -> EpochPosition:
        """Go on at `place`; `own` is None where the layout is another. Returns the place where this loader can begin."""
        self._began = own["began"] if own else None
        self._before_ahead = own.get("ahead") if own else None
        self._loaded = own.get("loader") if own else None
        again = self.inside_batch(place)
        if not again or _keeps_place(self.loader) or self._loaded is not None:
            return place
        assert place.samples is not None
        get_dist_logger().warning(
            f"{again} of the {place.samples} samples that this epoch has had are read again: this loader can only begin "
            f"at a whole batch. A loader of colonnade.utils.get_dataloader can begin anywhere.",
            ranks=[0],
        )
        return replace(place, samples=place.samples - again)

    def _continued(self, epoch: int, place: EpochPosition) -> Iterator[Any]:
        if self._loaded is not None:
            self.loader.load_state_dict(self._loaded)
            self._loaded = None
            return iter(self.loader)
        if _keeps_place(self.loader) and place.samples is not None:
            sampler = self.loader.sampler
            sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "position": place.samples})
            return iter(self.loader)
        iterator = iter(self.loader)
        for _ in islice(iterator, self.batches_behind(place)):
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

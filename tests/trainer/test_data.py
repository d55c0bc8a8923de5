"""Places in an epoch and lengths of loaders, in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from colonnade.context.layout import Layout, world_axes
from colonnade.context.layout_builder import run_initializers
from colonnade.errors import ConfigError
from colonnade.trainer import data
from colonnade.trainer.data import EpochPosition, Feed, Lengths, moves_together, read_lengths
from colonnade.utils import get_dataloader
from tests.engine.test_engine import world_of_one


def world(ranks: int, **parallel: Any) -> Any:
    """What lengths are read by, of a world that is not there."""
    config = {"parallel": parallel}
    layout = Layout(world_axes(config, ranks), run_initializers(config, ranks, 0).groups)
    sizes = {axis.name: axis.size for axis in layout.axes}
    return SimpleNamespace(
        layout=layout,
        world_size=ranks,
        data_parallel_size=sizes.get("data", 1),
        is_initialized=layout.has,
        get_world_size=lambda mode: len(layout.group_of(mode, 0)),
    )


@pytest.mark.parametrize(
    ("context", "lengths", "told"),
    [
        (world(2), [3, 4], None),
        (world(2), [3, None], None),
        (world(2), [0, 1], None),
        (world(2), [0, 0], "no batches on any rank"),
        (world(2, tensor=2), [3, 3], None),
        (world(2, tensor=2), [3, 4], "ranks 0 and 1 see the same data, but have 3 and 4 batches"),
        (world(4, tensor=2), [3, 3, 5, 5], None),
        (world(4, tensor=2), [3, 3, 5, 4], "ranks 2 and 3 see the same data, but have 5 and 4"),
        (world(2, pipeline=2), [3, 4], "see the same data"),
        (world(2, sequence=2), [3, 4], r"ranks 0 and 1 communicate in forward passes \(axes sequence\)"),
        (world(4, sequence=2), [3, 3, 4, 4], None),
        (world(2, expert=2), [3, 4], r"communicate in forward passes \(axes data\)"),
    ],
)
def test_which_ranks_need_loaders_of_one_length(context, lengths, told, monkeypatch):
    monkeypatch.setattr(data, "gather_from_all", lambda mine, _: [[None, length] for length in lengths])
    if told is None:
        assert read_lengths([], context) == Lengths(tuple(lengths))
    else:
        with pytest.raises(ConfigError, match=told):
            read_lengths([], context)


@pytest.mark.parametrize(
    ("context", "known", "unknown"),
    [
        (world(2), False, False),
        (world(2, tensor=2), False, True),
        (world(2, pipeline=2), False, True),
        (world(2, sequence=2), True, True),
        (world(2, expert=2), True, True),
    ],
)
def test_who_would_be_missed(context, known, unknown):
    assert moves_together(Lengths((3, 3)), context) is known
    assert moves_together(Lengths((3, None)), context) is unknown


@pytest.mark.parametrize("kind", ["ours", "torch's", "a list"])
def test_an_epoch_goes_on_after_any_batch_as_it_would_have(kind):
    rows = TensorDataset(torch.arange(12))
    with world_of_one() as gpc:

        def feed() -> Feed:
            if kind == "ours":
                return Feed(get_dataloader(rows, shuffle=True, batch_size=2, context=gpc), gpc)
            generator = torch.Generator().manual_seed(5)
            loader: Any = DataLoader(rows, batch_size=2, shuffle=True, generator=generator)
            return Feed(loader if kind == "torch's" else [[at] for at in range(6)], gpc)

        first = feed()
        whole = [
            [*map(int, batch[0].flatten() if kind != "a list" else batch)] for batch in first.open(3, EpochPosition())
        ]
        own = first.own_state()
        assert len(whole) == 6
        for behind in (1, 5):
            second = feed()
            place = second.load_state_dict(second.after(EpochPosition(), behind), own)
            torch.manual_seed(8)  # somewhere else by now
            before = torch.get_rng_state()
            rest = [[*map(int, batch[0].flatten() if kind != "a list" else batch)] for batch in second.open(3, place)]
            assert rest == whole[behind:]
            assert torch.equal(torch.get_rng_state(), before), "the random streams are as they were"


def test_a_loader_with_a_state_of_its_own_is_asked():
    class Loader:
        at = 0

        def __iter__(self) -> Any:
            yield from range(self.at, 4)

        def state_dict(self) -> dict[str, int]:
            return {"at": 2}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    with world_of_one() as gpc:
        own = Feed(Loader(), gpc).own_state()
        assert own == {"began": None, "ahead": None, "loader": {"at": 2}}
        assert Feed([], gpc).own_state() == {"began": None, "ahead": None}
        feed = Feed(Loader(), gpc)
        place = feed.load_state_dict(EpochPosition(2, None), own)
        assert list(feed.open(0, place)) == [2, 3]
        elsewhere = Feed(Loader(), gpc)  # another layout has no state of this rank
        assert list(elsewhere.open(0, elsewhere.load_state_dict(EpochPosition(3, None), None))) == [3]


def test_what_is_in_the_middle_of_a_batch_is_read_again_where_a_loader_cannot_begin_there():
    rows = TensorDataset(torch.arange(12))
    with world_of_one() as gpc:
        assert Feed(DataLoader(rows, batch_size=4), gpc).load_state_dict(EpochPosition(3, 6), None) == EpochPosition(
            3, 4
        )
        assert Feed(DataLoader(rows, batch_size=4), gpc).load_state_dict(EpochPosition(3, 8), None) == EpochPosition(
            3, 8
        )
        ours = Feed(get_dataloader(rows, batch_size=4, context=gpc), gpc)
        assert ours.load_state_dict(EpochPosition(3, 6), None) == EpochPosition(3, 6)
        assert [batch[0].tolist() for batch in ours.open(0, EpochPosition(3, 6))] == [[6, 7, 8, 9], [10, 11]]


def test_what_may_be_a_loader():
    class Places:
        def __getitem__(self, at: int) -> int:
            return at

    class Endless(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter([1])

    with world_of_one() as gpc:
        for loader in ([0], iter([]), Places(), Endless(), DataLoader([1]), (each for each in [1])):
            read_lengths(loader, gpc)
        for wrong in (torch.zeros(1), {}, TensorDataset(torch.zeros(1)), "text", 3, None, object()):
            with pytest.raises(ConfigError, match="rank 0: a data loader must be an iterable of batches, but it is a"):
                read_lengths(wrong, gpc)


@pytest.mark.parametrize("had", [True, False])
def test_a_run_goes_on_with_a_loader_that_has_a_generator_where_the_other_had_none(had):
    rows = TensorDataset(torch.arange(12))
    with world_of_one() as gpc:
        feeds = [Feed(DataLoader(rows, 2, generator=g), gpc) for g in (torch.Generator(), None)]
        before, after = feeds if had else feeds[::-1]
        before.open(0, EpochPosition())
        place = after.load_state_dict(EpochPosition(2, 4), before.own_state())
        assert [batch.tolist() for (batch,) in after.open(0, place)] == [[4, 5], [6, 7], [8, 9], [10, 11]]


def test_samplers_are_told_the_epoch():
    told: list[int] = []
    by_sampler, by_batches = DataLoader([1]), DataLoader([1])
    by_sampler.sampler.set_epoch = told.append  # type: ignore[attr-defined]
    by_batches.batch_sampler.set_epoch = told.append  # type: ignore[union-attr]
    with world_of_one() as gpc:
        for epoch, loader in enumerate((by_sampler, by_batches, [])):
            Feed(loader, gpc).open(epoch, EpochPosition())
    assert told == [0, 1]

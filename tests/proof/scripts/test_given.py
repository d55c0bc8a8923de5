"""Batches and configs of the ranks, as the script alone is given them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from colonnade.proof.record import BatchAxis, Record, RecordedStep, RunInfo
from colonnade.proof.scripts import ScriptError, join_batches, unequal_passes

DATA, SEQUENCE = BatchAxis("data", 2, True), BatchAxis("sequence", 2, True, dim=1, may_repeat=True)


def ranks(axis: BatchAxis, *counts: int, key: str = "call") -> list[Record]:
    """Ranks of one axis that were given so many batches each; none is no key at all, as in a run."""
    batch = (torch.ones(2, 3), torch.zeros(2))
    return [
        Record(
            rank,
            steps=[RecordedStep(), RecordedStep()],
            run=RunInfo(
                [axis],
                {axis.name: rank},
                given={key: [batch] * count} if count else {},
                given_in={key: [0] * count} if count else {},
            ),
        )
        for rank, count in enumerate(counts)
    ]


@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (0, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("key", ["call", "batch"])
def test_ranks_with_fewer_batches_have_no_part_in_the_others(tmp_path: Path, key: str, counts: tuple[int, int]) -> None:
    records = ranks(DATA, *counts, key=key)
    join_batches(records, tmp_path / "joined.pt", None)
    joined, joined_in = torch.load(tmp_path / "joined.pt")
    rows = [len(batch[0]) for batch in joined[key]]
    assert rows == [2 * sum(at < count for count in counts) for at in range(2)]
    assert joined_in == {key: [0, 0]}
    assert unequal_passes(records) == [f"in step 0, rank 0 took {counts[0]}, rank 1 took {counts[1]}"]


def test_batches_belong_together_by_their_number_within_a_step(tmp_path: Path) -> None:
    records = ranks(DATA, 4, 5)
    for record, steps in zip(records, ([0, 0, 1, 1], [0, 0, 0, 1, 1]), strict=True):
        record.run.given_in = {"call": steps}
    join_batches(records, tmp_path / "joined.pt", None)
    joined, joined_in = torch.load(tmp_path / "joined.pt")
    assert joined_in == {"call": [0, 0, 0, 1, 1]}
    assert [len(batch[0]) for batch in joined["call"]] == [4, 4, 2, 4, 4]
    assert unequal_passes(records) == ["in step 0, rank 0 took 2, rank 1 took 3"]


@pytest.mark.parametrize("counts", [(2, 1), (0, 2)], ids=str)
def test_slices_of_a_sequence_must_be_there_on_all_ranks(tmp_path: Path, counts: tuple[int, int]) -> None:
    told = rf"cannot be joined along dimension 1: in step 0, rank 0 took {counts[0]}, rank 1 took {counts[1]} \(call\)"
    with pytest.raises(ScriptError, match=told):
        join_batches(ranks(SEQUENCE, *counts), tmp_path / "joined.pt", None)


def test_stages_without_batches_are_no_unequal_passes(tmp_path: Path) -> None:
    stages = ranks(BatchAxis("pipeline", 3, False), 2, 0, 2, key="batch")
    join_batches(stages, tmp_path / "joined.pt", None)
    assert unequal_passes(stages) == []


class Given:
    """Something of a config whose repr has its address."""


def test_objects_and_functions_of_a_config_are_compared_without_their_addresses() -> None:
    from colonnade.proof.script_job import shown

    for make in (Given, lambda: partial(Given, 1), lambda: lambda: 0, lambda: {"method": Given()}):
        kept = [make() for _ in range(2)]
        assert shown(kept[0]) == shown(kept[1])
    assert shown(Given) != shown(dict)
    assert shown(4) != shown(8)

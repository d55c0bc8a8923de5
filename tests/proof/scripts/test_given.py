"""Batches and configs of the ranks, as the script alone is given them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from colonnade.proof.record import BatchAxis, Record, RecordedStep, RunInfo
from colonnade.proof.scripts import ScriptError, join_batches

DATA, SEQUENCE = BatchAxis("data", 2, True), BatchAxis("sequence", 2, True, dim=1, may_repeat=True)


def ranks(axis: BatchAxis, *counts: int, key: str = "call") -> list[Record]:
    """Ranks of one axis that were given so many batches each; none is no key at all, as in a run."""
    batch = (torch.ones(2, 3), torch.zeros(2))
    return [
        Record(
            rank,
            steps=[RecordedStep(), RecordedStep()],
            run=RunInfo([axis], {axis.name: rank}, given={key: [batch] * count} if count else {}),
        )
        for rank, count in enumerate(counts)
    ]


@pytest.mark.parametrize("axis", [DATA, SEQUENCE], ids=lambda axis: axis.name)
@pytest.mark.parametrize("key", ["call", "batch"])
@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (0, 2), (2, 0)], ids=str)
def test_whichever_rank_took_more_batches_all_are_counted(
    tmp_path: Path, axis: BatchAxis, key: str, counts: tuple[int, int]
) -> None:
    told = rf"unequal numbers of batches in 2 steps.*rank 0 took {counts[0]}, rank 1 took {counts[1]} \({key}\)"
    with pytest.raises(ScriptError, match=told):
        join_batches(ranks(axis, *counts, key=key), tmp_path / "joined.pt", None)


def test_stages_without_batches_and_loaders_of_unequal_length_are_no_mistake(tmp_path: Path) -> None:
    stages = ranks(BatchAxis("pipeline", 3, False), 2, 0, 2, key="batch")
    for records in (stages, ranks(DATA, 2, 1, key="loader0")):
        join_batches(records, tmp_path / "joined.pt", None)


class Given:
    """Something of a config whose repr has its address."""


def test_objects_and_functions_of_a_config_are_compared_without_their_addresses() -> None:
    from colonnade.proof.script_job import shown

    for make in (Given, lambda: partial(Given, 1), lambda: lambda: 0, lambda: {"method": Given()}):
        kept = [make() for _ in range(2)]
        assert shown(kept[0]) == shown(kept[1])
    assert shown(Given) != shown(dict)
    assert shown(4) != shown(8)

"""Who writes what of a weight, and who only knows of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from colonnade.checkpoint.save_plan import SavePlan, plan_weight
from colonnade.context.parallel_mode import ParallelMode
from colonnade.parallel.boxes import Box, whole_box
from colonnade.parallel.placement import Placement, Tied
from colonnade.parallel.whole import LocalTensor


def weight(shape: Sequence[int], offset: Sequence[int], holders: Sequence[int], tied: bool = False) -> LocalTensor:
    """What a rank has of a weight that ranks 0 to 3 share."""
    local = torch.ones(tuple(shape))
    modes: dict[ParallelMode, Any] = {ParallelMode.PIPELINE: Tied((0, 1), "w")} if tied else {}
    return LocalTensor(
        label="w",
        names=("w",),
        tensor=local,
        placement=Placement(modes),
        holders=tuple(holders),
        sharers=(0, 1, 2, 3),
        parts={},
        by_hand={},
        shape=(8, 9)[: len(shape)],
        places=((Box(tuple(offset), tuple(shape)), whole_box(shape)),),
    )


@pytest.mark.parametrize(
    ("rank", "tensor", "spans", "written"),
    [
        (0, weight((2, 3), (4, 1), (0, 2)), [4, 6], 1),
        (2, weight((2, 3), (4, 1), (0, 2)), [], 0),  # the first of those who hold it writes it
        (1, weight((2, 3), (4, 1), (1, 3)), [4, 6], 1),
        (3, weight((2, 3), (4, 1), (1, 3)), [], 0),
        (0, weight((2, 3), (4, 1), (1, 0)), [4, 4], 0),  # the first of all says that it is there
        (3, weight((2, 3), (4, 1), (1, 3), tied=True), [4, 4], 0),  # each has its own name for it
        (0, weight((0, 3), (4, 1), (0, 2)), [4, 4], 0),
        (1, weight((0, 3), (4, 1), (1, 3)), [4, 4], 0),  # of which there is nothing to write
        (1, weight((3, 0), (4, 1), (1, 3)), [4, 4], 0),
        (1, weight((1, 1), (4, 1), (1, 3)), [4, 5], 1),
        (0, weight((), (), (0, 1)), [0, 1], 1),
        (1, weight((), (), (0, 1)), [], 0),
    ],
)
def test_who_writes_a_weight_and_who_knows_of_it(rank, tensor, spans, written):
    plan = SavePlan(rank)
    plan_weight(plan, tensor, tensor.local)
    assert (plan.note(None).spans, len(plan.entries)) == (spans, written)
    assert plan.size == written * tensor.local.nbytes


def test_copies_on_the_host_stay_what_they_were():
    tensor = weight((2, 3), (0, 0), (0,))
    plan = SavePlan(0)
    plan_weight(plan, tensor, tensor.local)
    plan.copy_to_host()
    tensor.local.zero_()
    (entry,) = plan.entries
    assert (entry.key, entry.read().tolist()) == ("model/w", [[1] * 3] * 2)

"""Every known mistake, planted into real runs, is noticed by verify and called by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.errors import ParityError
from colonnade.parallel.split import split
from colonnade.proof.api import verify
from colonnade.proof.claims import CAUSES
from colonnade.proof.mutation import MISTAKES, NotHere, known, plant
from colonnade.testing import run_world
from tests.models.grid import MODELS, batch

LAYOUTS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "data and tensor": (4, ("GPT", {"data": 2, "tensor": {"size": 2, "mode": "1d"}}, {"gradient_accumulation": 3})),
    "pipeline": (2, ("GPT, tied", {"pipeline": 2}, {"schedule": {"type": "OneFOneB", "num_microbatches": 2}})),
    "zero": (2, ("GPT", {"data": 2}, {"zero": {"stage": 2}})),
}


def named(
    model: str, parallel: dict[str, Any], settings: dict[str, Any], names: tuple[str, ...] = tuple(MISTAKES)
) -> dict[str, Any]:
    """On each rank: what verify says of each mistake, (causes, first sentence); None where it has no place."""
    found: dict[str, Any] = {}
    config = {"parallel": parallel, "clip_grad_norm": 0.1, **settings}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        for name in names:
            torch.manual_seed(0)
            whole = MODELS[model](context=gpc).double()
            stages = gpc.pipeline_parallel_size
            engine, *_ = initialize(
                split(whole, num_stages=stages) if stages > 1 else whole,
                lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-6),
                whole.criterion(),
                context=gpc,
            )
            try:
                plant(engine, name)
            except NotHere:
                found[name] = (None, "")
                continue
            mine = gpc.get_local_rank(ParallelMode.DATA)
            batches = [[batch(model, 10 * at + mine, step) for at in range(engine.accumulation)] for step in range(2)]
            report = verify(engine, lambda: MODELS[model](context=gpc).double(), batches)
            found[name] = (report.causes, report.findings[0].sentence if report.findings else "")
            engine.close()
    return found


def check(found: dict[str, Any]) -> None:
    for name, (causes, sentence) in found.items():
        if causes is not None:
            assert causes, name
            assert set(causes) <= set(MISTAKES[name].causes), (name, causes, sentence)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_mistake_is_noticed_and_called_by_its_name(layout):
    ranks, setup = LAYOUTS[layout]
    found = run_world(ranks, named, *setup, timeout=380).values[0]
    check(found)
    if layout == "data and tensor":
        assert [name for name, (causes, _) in found.items() if causes is None] == []


@pytest.mark.slow
def test_some_of_them_on_two_ranks():
    some = ("drop-a-reduction", "no-divisor", "skip-a-micro-batch", "clip-before-the-sums", "misroute-a-reduction")
    settings = {"gradient_accumulation": 2}
    found = run_world(2, named, "GPT", {"data": 2}, settings, some, timeout=100).values[0]
    check(found)
    assert [name for name, (causes, _) in found.items() if causes is None] == ["misroute-a-reduction"]


def test_a_name_that_is_not_known_is_an_error_with_the_right_one():
    assert list(known("wrong-divisor, drift")) == ["wrong-divisor", "drift"]
    with pytest.raises(ParityError, match="Did you mean 'drift'"):
        known("drifts")


def test_every_mistake_may_be_called_only_what_is_a_cause():
    assert {cause for one in MISTAKES.values() for cause in one.causes} <= set(CAUSES)


def _of_zero_3() -> list[str]:
    """On a rank: the mistakes that have no place in a run whose gradients are all FSDP2's."""
    absent = []
    for name in ("forget-accumulation", "scale-the-loss", "no-divisor"):
        with launch({"zero": 3, "gradient_accumulation": 2}, context=ParallelContext(), verbose=False) as gpc:
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)).double()
            engine, *_ = initialize(
                model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), torch.nn.MSELoss(), context=gpc
            )
            try:
                plant(engine, name)
            except NotHere:
                absent.append(name)
            finally:
                engine.close()
    return absent


@pytest.mark.slow
def test_a_factor_on_gradients_that_cannot_be_changed_has_no_place():
    assert run_world(2, _of_zero_3).values[0] == ["forget-accumulation", "scale-the-loss", "no-divisor"]

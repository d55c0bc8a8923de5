"""The evidence of healthy runs: everything that ranks hold is equal to one process, under every layout."""

from __future__ import annotations

from typing import Any

import pytest

from colonnade.proof import record
from colonnade.proof.diagnose import diagnose
from colonnade.proof.sketch import LARGE
from colonnade.testing import run_world
from tests.proof.layouts import check, evidence_of, report_with_mistake

Run = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
ON_TWO: list[Run] = [
    ("GPT, tied", {"data": 2}, {}, {}),
    ("GPT, tied", {"tensor": {"size": 2, "mode": "1d"}}, {}, {}),
    ("GPT, tied", {"pipeline": 2}, {}, {}),
    ("GPT", {"sequence": 2}, {"over": "ring"}, {}),
    ("MoE-GPT", {"expert": 2}, {}, {}),
    ("GPT", {"data": 2}, {}, {"zero": 1}),
    ("GPT", {"data": 2}, {}, {"zero": 2, "gradient_accumulation": 2}),
    ("GPT, tied", {"data": 2}, {}, {"zero": 3}),
]
ON_FOUR: list[Run] = [
    ("GPT, tied", {"data": 2, "pipeline": 2}, {}, {"zero": 1}),
    ("GPT, tied", {"data": 2, "tensor": {"size": 2, "mode": "1d"}}, {}, {"zero": 3}),
    ("Llama, experts", {"expert": 2, "tensor": {"size": 2, "mode": "1d"}}, {}, {}),
    ("GPT, tied", {"tensor": {"size": 4, "mode": "2d"}}, {}, {}),
    ("GPT, tied", {"sequence": 2, "data": 2}, {"over": "ulysses"}, {}),
]


def _all_equal(runs: list[Run], large: int = LARGE) -> None:
    record.LARGE = large
    for model, parallel, options, settings in runs:
        evidence = evidence_of(model, parallel, options, **settings)
        if evidence is not None:
            check(evidence)
            report = diagnose(evidence)
            assert report.ok, str(report)
            assert not report.findings
            gradient = next(iter(evidence.steps[0].gradients.values()))
            assert gradient.total.spread > 0.0
            assert settings.get("zero") == 3 or len(gradient.raw) == len(gradient.truth_of_passes)


@pytest.mark.slow
def test_everything_that_two_ranks_hold_is_equal_to_one_process() -> None:
    run_world(2, _all_equal, ON_TWO)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [ON_TWO[1::3], pytest.param(ON_TWO, marks=pytest.mark.long)], ids=["some", "all"])
def test_sketches_of_what_two_ranks_hold_are_equal_to_one_process(runs: list[Run]) -> None:
    run_world(2, _all_equal, runs, large=16)


def _with_mistake(large: int, more: int) -> Any:
    record.LARGE = large
    return report_with_mistake(more)


def test_a_mistake_in_sketched_tensors_has_the_finding_of_whole_ones_and_more_steps_of_a_rank_are_left_out() -> None:
    whole, sketched = (run_world(2, _with_mistake, large, 1).values[0] for large in (LARGE, 3))
    assert [finding.sentence for finding in sketched.findings] == [finding.sentence for finding in whole.findings]
    assert sketched.causes[0] == "summed-not-averaged", str(sketched)
    assert "different numbers of steps: rank 0 2, rank 1 3. Only the first 2 were compared" in " ".join(sketched.notes)


def test_a_handler_that_does_not_divide_is_found_on_every_rank_with_dropout_on() -> None:
    for report in run_world(2, report_with_mistake).values:
        assert not report.ok
        assert report.causes[0] == "summed-not-averaged", str(report)
        assert [row.name for row in report.rows if row.quantity == "random numbers"] == ["1"]
        assert "0.weight" in report.findings[0].parameters  # which nobody steps on
        assert "warning: 0.weight, 0.bias are in no parameter group of the optimizer" in report.notes[0]


@pytest.mark.slow
def test_everything_that_four_ranks_hold_is_equal_to_one_process() -> None:
    run_world(4, _all_equal, ON_FOUR, timeout=100)

"""`verify --resume` and `verify --races`: runs of a script compared with each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from colonnade.errors import ParityError
from colonnade.proof.races import verify_races
from colonnade.proof.resume import verify_resume
from colonnade.proof.scripts import Script

OF_USERS = Path(__file__).parent / "of_users"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def _resuming(kind: str, steps: int = 4) -> Script:
    return Script(str(OF_USERS / "resuming.py"), ("{folder}", kind), steps=steps)


@pytest.fixture(autouse=True)
def _plain_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")


@pytest.mark.long
def test_a_healthy_resume_is_equal() -> None:
    assert verify_resume(_resuming("none")).ok


def test_a_healthy_resume_on_another_layout_is_equal() -> None:
    report = verify_resume(_resuming("layout"), resume_nproc=1)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("forgets", "quantity"),
    [
        ("data", "batch"),
        pytest.param("optimizer", "optimizer state", marks=pytest.mark.long),
        pytest.param("random", "state of torch's random numbers", marks=pytest.mark.long),
        pytest.param("schedule", "optimizer option", marks=pytest.mark.long),
    ],
)
def test_the_first_difference_of_a_resumed_run_is_named(forgets: str, quantity: str) -> None:
    report = verify_resume(_resuming(forgets))
    assert report.difference is not None, str(report)
    assert report.difference.quantity == quantity, str(report)


def test_resume_needs_a_folder_and_two_steps() -> None:
    with pytest.raises(ParityError, match=r"put \{folder\} in its arguments"):
        verify_resume(Script("train.py", ("none",)))
    with pytest.raises(ParityError, match="at least 2, and is 1"):
        verify_resume(_resuming("none", steps=1))


@pytest.mark.parametrize(
    "mistake", ["forgotten", *(pytest.param(mistake, marks=pytest.mark.long) for mistake in ("none", "scaled", "late"))]
)
def test_results_that_depend_on_the_timing_of_collectives_are_found(mistake: str) -> None:
    report = verify_races(Script(str(OF_USERS / "asynchronous.py"), (mistake,)), on_gpu=False)
    assert report.ok == (mistake == "none"), str(report)
    if mistake != "none":
        assert "gradient of" in str(report.difference), str(report)

"""Scripts that draw random numbers: one process gets those of the ranks, and where it cannot, nothing is called equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from colonnade.proof.compare import Report
from colonnade.proof.scripts import Script, verify_script

DRAWS = str(Path(__file__).parent / "of_users" / "draws.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

JOINED = ["randn_like", "depth engine"]
MORE = [
    "mixup",
    "depth",
    "gumbel",
    "vae",
    "choice",
    "checkpoint",
    "feature_dropout",
    "rrelu",
    "lstm",
    "noise",
    "unused",
]
NOT_JOINED = {"depth_by_rank": "module 2: ", "host": "random module", "mixup_by_rank": "the loop"}


def _verified(kind: str, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    return verify_script(Script(DRAWS, tuple(kind.split())))


@pytest.mark.parametrize(
    "kind",
    [*JOINED, *(pytest.param(kind, marks=pytest.mark.long) for kind in (*MORE, "router engine", "mixup engine"))],
)
def test_random_numbers_of_the_ranks_are_repeated(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _verified(kind, monkeypatch)
    assert report.ok, str(report)
    doubled = _verified(f"{kind} doubled", monkeypatch)
    assert any("0.weight" in finding.parameters for finding in doubled.findings), str(doubled)
    assert doubled.findings[0].factor == pytest.approx(2.0), str(doubled)


@pytest.mark.long
@pytest.mark.parametrize("kind", NOT_JOINED)
@pytest.mark.parametrize("doubled", ["", " doubled"])
def test_random_numbers_that_cannot_be_repeated_are_never_called_equal(
    kind: str, doubled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = _verified(kind + doubled, monkeypatch)
    assert report.is_uncertain, str(report)
    assert NOT_JOINED[kind] in report.uncertain, report.uncertain

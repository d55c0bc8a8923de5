"""Weights that the ranks load or draw wrongly: one process gets them too, so they are compared with those that the script makes there."""

from __future__ import annotations

from pathlib import Path

import pytest

from colonnade.proof.compare import Report
from colonnade.proof.scripts import Script, verify_script

LOADS = str(Path(__file__).parent / "of_users" / "loads.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
WRONG = {
    "swapped": "0.weight has its shards in another order: rank 0 has the shard of rank 1",
    "replica": "2.weight has different values on the ranks than in a single process, although 4 other weights are the same",
    "one": "2.weight agrees with the script only on rank 0, not on rank 1",
    "stages": "2.weight, 2.bias has the same values as 0.weight, but not in a single process",
    "shards": "0.weight, 2.weight has equal shards on ranks [0, 1], which are different shards in a single process",
}


def _verified(kind: str, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    return verify_script(Script(LOADS, (kind,)))


@pytest.mark.parametrize(
    "kind", ["swapped", *(pytest.param(kind, marks=pytest.mark.long) for kind in WRONG if kind != "swapped")]
)
def test_wrong_weights_at_the_start_are_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _verified(kind, monkeypatch)
    assert report.causes == ["weights-differ-at-start"], str(report)
    assert WRONG[kind] in report.findings[0].sentence, str(report)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "note"), [("right", ""), ("another", "none of them is equal"), ("seeds", "others are equal")]
)
def test_another_seed_is_only_noted(kind: str, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _verified(kind, monkeypatch)
    assert report.ok, str(report)
    assert note in " ".join(report.notes), report.notes
    assert bool(report.notes) == bool(note)

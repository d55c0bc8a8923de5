"""Scripts of other frameworks: healthy ones are equal without any line for `verify`, and planted mistakes are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from colonnade.proof.compare import Report
from colonnade.proof.scripts import Script, verify_script

OF_USERS = Path(__file__).parent / "of_users"
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

HEALTHY = [
    *(("accelerate", kind) for kind in ("plain", "bf16", "dispatched")),
    *(("trainer", kind) for kind in ("plain", "accumulated", "bf16")),
    *(("deepspeed", f"{stage} {kind}") for stage, kind in ((0, "plain"), (1, "plain"), (2, "bf16"), (3, "plain"))),
]
WRONG = [
    *(("accelerate", kind) for kind in ("doubled", "unsynced", "half_rank")),
    *(("trainer", kind) for kind in ("doubled", "half_rank", "own_tokens")),
    *(("deepspeed", kind) for kind in ("1 doubled", "2 half_rank", "3 lost_pass")),
]


def _verified(framework: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> Report:
    pytest.importorskip("transformers" if framework == "trainer" else framework)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return verify_script(Script(str(OF_USERS / f"on_{framework}.py"), tuple(kind.split())))


@pytest.mark.parametrize(("framework", "kind"), HEALTHY)
def test_healthy_scripts_are_equal(framework: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _verified(framework, kind, monkeypatch)
    assert report.ok, str(report)
    assert any(row.quantity == "gradient" for row in report.rows), str(report)


@pytest.mark.parametrize(("framework", "kind"), WRONG)
def test_planted_mistakes_are_found(framework: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _verified(framework, kind, monkeypatch)
    assert report.findings, str(report)
    assert not report.is_uncertain

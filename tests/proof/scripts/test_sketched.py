"""A script with large tensors: compared as sketches, and diagnosed as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from colonnade.proof.processes import Processes
from colonnade.proof.scripts import Script, run_both, verify_script
from colonnade.proof.sketch import Block

LOOP, PLAIN = (str(Path(__file__).parent / "of_users" / name) for name in ("loop.py", "plain.py"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_large_tensors_are_sketched_stored_once_and_equal(tmp_path: Path) -> None:
    with Processes(LOOP) as processes:
        _, records, reference = run_both(Script(LOOP, ("wide",)), tmp_path, processes)
        report = reference.judge(records)
    assert report.ok, str(report)
    for record in records:
        assert record.run.sketched == {"0.weight": None, "3.weight": None}
        step = record.steps[0]
        assert {len(value.view(-1)) for value in (record.start["0.weight"], step.weights["0.weight"])} == {4096}
        assert step.raw["3.weight"][1].shape == step.total["3.weight"][0].value.shape == (4096,)
        assert step.weights["0.bias"].shape == (20_000,)
    assert len(list(tmp_path.rglob("*.tensor"))) == 2


@pytest.mark.parametrize("kind", ["fsdp", "plan"])
def test_shards_of_plain_torch_are_sketched_and_equal(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    with Processes(PLAIN) as processes:
        _, records, reference = run_both(Script(PLAIN, (kind, "wide")), tmp_path, processes)
        report = reference.judge(records)
    assert report.ok, str(report)
    # Rows of the weight are next to each other, its columns are not.
    shape, strides, second = ((150, 300), (300, 1), 45_000) if kind == "fsdp" else ((300, 150), (300, 1), 150)
    blocks = [record.run.sketched["2.weight"] for record in records]
    assert blocks == [Block(start, shape, strides) for start in (0, second)]
    assert len(records[1].steps[1].weights["2.weight"]) == 4096


def test_what_differs_is_recorded_again_as_a_whole_and_has_the_same_cause(capsys: pytest.CaptureFixture[str]) -> None:
    with Processes(LOOP) as processes:
        script = Script(LOOP, ("wide", "undivided"), off=None)
        sketched = verify_script(script, processes)
        runs = capsys.readouterr().err.count(" on 2 ranks ...")
        assert runs == 2
        whole = verify_script(Script(LOOP, ("wide", "undivided"), off=None, whole=None), processes)
    assert sketched.causes[0] == "summed-not-averaged", str(sketched)
    assert [finding.sentence for finding in sketched.findings] == [finding.sentence for finding in whole.findings]

"""Scripts beside themselves alone: ours and plain torch's, healthy and with a mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from colonnade.proof.scripts import Script, ScriptError, verify_script

pytest_plugins = ["colonnade.proof.plugin"]

SCRIPTS = Path(__file__).parent / "of_users"
EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.long  # `colonnade verify` of tests/cli shows the same
def test_a_loop_on_an_engine_is_equal_with_its_dropout(colonnade_verify) -> None:
    report = colonnade_verify(SCRIPTS / "loop.py", steps=3)
    assert report.ok
    assert not report.findings
    assert not report.notes
    assert [row.name for row in report.rows if row.quantity == "random numbers"] == ["2"]
    assert {row.step for row in report.rows} == {None, 0, 1, 2}


def test_a_handler_that_does_not_divide_is_named_and_fails_a_test(colonnade_verify) -> None:
    report = colonnade_verify(SCRIPTS / "loop.py", ["undivided"], check=False, dropout=False)
    assert report.causes[0] == "summed-not-averaged", str(report)
    assert "dropout was set to 0 for the comparison" in report.notes
    with pytest.raises(pytest.fail.Exception, match="does NOT match a single-process run"):
        colonnade_verify(SCRIPTS / "loop.py", ["undivided"])


def test_a_schedule_named_by_a_string_and_a_copy_of_the_model_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    report = verify_script(Script(str(SCRIPTS / "named.py"), called="named.py"))
    assert report.ok, str(report)
    on_ranks, single = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"colonnade verify: named.py on 2 ranks \.\.\. done in [\d.]+ s", on_ranks)
    assert re.fullmatch(
        r"colonnade verify: named.py on 1 rank, 3 times at once \(the reference .*\) \.\.\. done in [\d.]+ s", single
    )
    assert "warmup is 4 on the ranks and 8 in a single process, because it depends on" in " ".join(report.notes)
    assert not any(note.startswith("make ") for note in report.notes)  # a function, at another address in each process


@pytest.mark.long
def test_adapters_in_a_pipeline_have_their_names_and_their_dropout(colonnade_verify) -> None:
    report = colonnade_verify(SCRIPTS / "adapters.py", steps=2)
    assert report.ok, str(report)
    assert any(row.quantity == "random numbers" for row in report.rows)


@pytest.mark.long  # that of a schedule named by a string shows the comparison of configs
def test_passes_that_depend_on_the_number_of_ranks_are_named_with_their_key() -> None:
    told = "gradient_accumulation is 2 on the ranks and 4 in a single process"
    with pytest.raises(ScriptError, match=told):
        verify_script(Script(str(SCRIPTS / "named.py"), ("engine",)))


def test_unequal_numbers_of_batches_are_compared_and_counted_by_rank() -> None:
    report = verify_script(Script(str(SCRIPTS / "named.py"), ("uneven",)))
    assert report.ok, str(report)
    told = "the ranks took unequal numbers of passes: in step 1, rank 0 took 1, rank 1 took 0"
    assert any(told in note for note in report.notes), report.notes


@pytest.mark.long  # `colonnade verify` of tests/cli shows the same
def test_a_script_that_fails_says_so_with_its_own_words() -> None:
    with pytest.raises(ScriptError, match="this script fails by itself"):
        verify_script(Script(str(SCRIPTS / "loop.py"), ("fail",)))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "plan", "pipelining"])
def test_plain_torch_is_equal(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TORCH_DISTRIBUTED_DEBUG", "OFF"
    )  # with DETAIL torch's DDP over gloo ends in a segmentation fault
    report = verify_script(Script(str(SCRIPTS / "plain.py"), (kind,)))
    assert report.ok, str(report)
    assert any(row.quantity == "gradient" for row in report.rows)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp64", "own"])
@pytest.mark.parametrize("kind", ["", "mixed"])
def test_what_users_do_is_no_mistake(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    report = verify_script(Script(str(SCRIPTS / "users.py"), (kind,) if kind else (), dtype=dtype))
    assert report.ok, str(report)
    told = " ".join(report.notes)
    assert "lr of the optimizer is 0.1 on the ranks and 0.05" in told
    left = "mixed precision of FSDP was left out" if kind else "GradScaler was turned off"
    assert (left in told) == (dtype == "fp64")


@pytest.mark.long
def test_sums_of_plain_torch_that_are_not_divided_are_found() -> None:
    report = verify_script(Script(str(SCRIPTS / "plain.py"), ("undivided",)))
    assert report.causes[0] == "summed-not-averaged", str(report)


WRONG = {
    "one_parameter": "partial-gradient",
    "no_sync": "not-reduced",
    "divided_twice": "wrong-divisor",
    "clipped_first": "clipped-before-reduced",
    "sampler": "note: DistributedSampler",
    "tied": "tied-copy-missed",
    "lost_micro_batch": "last-micro-batch-only",
    "never_cleared": "note: zero_grad",
    "not_scaled": "scaled-by-accumulation",
    "wrong_group": "not-reduced",
    "frozen": "missing-gradient",
    "own_norm": "norm-misses-shards",
}
"""What each mistake is to be called; where one process does the same as the ranks, what a note has to ask for."""


@pytest.mark.long
@pytest.mark.parametrize("kind", WRONG)
def test_mistakes_of_plain_torch_are_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    report = verify_script(Script(str(SCRIPTS / "wrong.py"), (kind,), nproc=4 if kind == "wrong_group" else 2))
    said = report.causes[0] if report.causes else " ".join(report.notes)
    assert WRONG[kind].removeprefix("note: ") in said, str(report)


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "ranks"),
    [("gpt/train.py", 4), ("gradient_handler/train_with_engine.py", 2), ("own_parallelism/train.py", 2)],
)
def test_the_examples_are_equal(example: str, ranks: int, tmp_path: Path) -> None:
    arguments = ("--output", str(tmp_path)) if example.startswith("gpt") else ()
    report = verify_script(Script(str(EXAMPLES / example), arguments, ranks))
    assert report.ok, str(report)

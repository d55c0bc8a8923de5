"""The demo: its files, and a short run of them as a user would."""

from __future__ import annotations

from pathlib import Path

import pytest

from colonnade.cli import main
from colonnade.cli.run_command import demo_script
from tests.cli import colonnade


def test_its_files_can_be_copied_and_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for status, said in ((0, "run it: colonnade run --nproc 4"), (2, "never overwritten")):
        with pytest.raises(SystemExit) as left:
            main(["demo", "--copy", str(tmp_path / "mine")])
        assert left.value.code == status
        assert said in "".join(capsys.readouterr())
    copied = {file.name: file.read_text() for file in (tmp_path / "mine").iterdir()}
    assert copied == {file.name: file.read_text() for file in demo_script().parent.glob("*.py")}
    assert set(copied) == {"config.py", "model.py", "text.py", "train.py"}


def test_an_odd_number_of_ranks_is_refused_before_any_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["demo", "--nproc", "3"])
    assert left.value.code == 2
    assert (
        "--nproc is 3, but the demo has two pipeline stages and needs an even number of ranks. Give 2 or 4. [C022]"
        in capsys.readouterr().err
    )


@pytest.mark.long
def test_it_trains_goes_on_and_leaves_everything(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("not the demo's")
    for steps, words in ((4, ()), (6, ("--resume",))):
        done = colonnade("demo", "-o", "out", "--nproc", 2, "--steps", steps, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "your copy:" in done.stdout
        assert "Warning" not in done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"checkpoints", "log.jsonl", "model.safetensors", "log.html", "mine.txt"} <= names
    assert "step-00000006" in colonnade("ckpt", "ls", "out", cwd=tmp_path).stdout

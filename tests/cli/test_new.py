"""`colonnade new parallelism NAME`: what it writes passes its own test, and the test is a real one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from colonnade.cli import main
from tests.cli import ROOT, colonnade


def write(folder: Path, name: str = "ring_rows") -> tuple[Path, Path]:
    """Run the command in this process; the two files."""
    with pytest.raises(SystemExit) as ended:
        main(["new", "parallelism", name, "--folder", str(folder)])
    assert not ended.value.code
    return folder / f"{name}.py", folder / f"test_{name}.py"


def run_test(file: Path) -> subprocess.CompletedProcess[str]:
    """Run a written test as the command says, from another folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(file)]
    return subprocess.run(words, cwd=file.parents[1], env=env, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.slow
def test_it_says_what_it_wrote_and_how_to_run_it(tmp_path):
    done = colonnade("new", "parallelism", "ring_rows", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()
    assert first.startswith("wrote ring_rows.py: ")
    assert second.startswith("wrote test_ring_rows.py: ")
    assert third == "next: python -m pytest test_ring_rows.py"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ring_rows.py", "test_ring_rows.py"]


def test_it_is_named_throughout_and_small(tmp_path):
    own, test = write(tmp_path / "not" / "there yet")
    for path in (own, test):
        text = path.read_text(encoding="utf-8")
        ast.parse(text)
        assert "my_mode" not in text.lower()
        assert "MyMode" not in text
        assert len(text.splitlines()) <= 100
    made = {node.name for node in ast.parse(own.read_text()).body if isinstance(node, ast.ClassDef)}
    assert made == {"RingRowsInitializer", "RingRowsLinear", "RingRowsGradientHandler"}


@pytest.mark.slow
def test_the_written_test_passes(tmp_path):
    _, test = write(tmp_path / "mine")
    done = run_test(test)
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        (
            'Replicate(owes="sum")',
            "Replicate()",
            "gain, but with different values",
        ),
        pytest.param(
            "place(part, {RING_ROWS: Shard(0)}",
            "place(part, {RING_ROWS: Replicate()}",
            "PlacementError",
            marks=pytest.mark.long,
        ),
        pytest.param(
            '"ring_rows", data="same"',
            '"ring_rows", data="distinct"',
            "the results differ from a single process",
            marks=pytest.mark.long,
        ),
        pytest.param("copy(x, RING_ROWS)", "x", "gradient of x", marks=pytest.mark.long),
    ],
)
def test_the_written_test_fails_when_the_parallelism_is_broken(tmp_path, right, wrong, found):
    own, test = write(tmp_path / "mine")
    text = own.read_text(encoding="utf-8")
    assert text.count(right) == 1
    own.write_text(text.replace(right, wrong), encoding="utf-8")
    done = run_test(test)
    assert done.returncode == 1, done.stdout
    assert found in done.stdout


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "test_mine.py").write_text("kept")
    done = colonnade("new", "parallelism", "mine", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "colonnade: the files test_mine.py exist, and existing files are never overwritten. Choose another name"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]
    assert (tmp_path / "test_mine.py").read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "ring-rows",
            "lower-case Python identifier that starts with a letter, such as 'ring_rows'",
        ),
        ("RingRows", "such as 'ring_rows'"),
        ("class", "such as 'my_class'"),
        ("2d", "such as 'my_2d'"),
        ("_own", "such as 'own'"),
        ("", "such as 'my_mode'"),
        ("../own", "such as 'own'"),
        ("tensor", "'tensor' is taken by ParallelMode.TENSOR; choose another name, such as 'my_tensor'. The modes are"),
        ("pipe", "'pipe' is taken by ParallelMode.PIPELINE"),
        ("expert_data", "'expert_data' is taken by ParallelMode.EXPERT_DATA"),
        ("tensors", "cannot be an axis of `parallel`; choose another name"),
        ("moe", "cannot be an axis of `parallel`; choose another name"),
        ("placement", "'placement' would define PlacementGradientHandler, which exists already"),
        ("f", "'f' would define F, which exists already; choose another name, such as 'my_f'"),
        ("json", "a Python module 'json' exists already"),
        ("torch", "choose another name, such as 'my_torch'"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_one_that_can(tmp_path, capsys, name, message):
    with pytest.raises(SystemExit) as ended:
        main(["new", "parallelism", name, "--folder", str(tmp_path)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("colonnade: ")
    assert message in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_one_message(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["new", "parallelism", "mine", "--folder", str(tmp_path / "file" / "inside")])
    assert ended.value.code == 2
    assert "mine.py cannot be written: Not a directory. Give another --folder." in capsys.readouterr().err

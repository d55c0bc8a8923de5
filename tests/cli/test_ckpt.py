"""`colonnade ckpt` on checkpoints that are good and bad."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from colonnade.checkpoint import CheckpointManager
from colonnade.cli import main
from colonnade.context.parallel_context import ParallelContext
from tests.cli import colonnade


@dataclass
class Done:
    """How a command ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def ckpt(capsys, monkeypatch):
    """Run `colonnade ckpt` in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(["ckpt", *map(str, words)])
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Steps 1 to 3 of a linear model whose weights are the step; the last has a flipped bit."""
    folder = tmp_path_factory.mktemp("run")
    with CheckpointManager(folder, ParallelContext()) as manager:
        for step in (1, 2, 3):
            model = nn.Linear(3, 2)
            nn.init.constant_(model.weight, step)
            manager.save(step, model)
    path = folder / "step-00000003/rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return folder


def test_as_a_user_would_call_it(run):
    done = colonnade("ckpt", "ls", run)
    assert done.returncode == 0
    assert done.stdout.count("one rank") == 3


def test_ls_shows_step_size_layout_and_whether_it_is_ok(ckpt, run):
    done = ckpt("ls", run)
    assert done.returncode == 0
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["checkpoint", "step", "size", "files", "layout", "saved", "ok"]
    assert [row.split()[:2] for row in rows] == [["step-00000001", "1"], ["step-00000002", "2"], ["step-00000003", "3"]]
    assert all("one rank" in row and row.endswith("ok") for row in rows)


def test_verify_reads_every_byte(ckpt, run):
    done = ckpt("verify", run, "--json")
    assert done.returncode == 1
    rows = json.loads(done.stdout)
    assert [row["ok"] for row in rows] == [True, True, False]
    assert "rank-00000.safetensors was changed: its sha256 is" in rows[2]["problem"]
    assert (rows[0]["step"], rows[0]["files"], rows[0]["layout"]) == (1, 1, "one rank")
    done = ckpt("verify", run / "step-00000002")
    assert done.returncode == 0


def test_export_takes_the_newest_good_one(ckpt, run, tmp_path):
    done = ckpt("export", run, "--out", tmp_path / "full.safetensors")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{run / 'step-00000002'} -> {tmp_path / 'full.safetensors'}\n"
    assert torch.equal(load_file(tmp_path / "full.safetensors")["weight"], torch.full((2, 3), 2.0))


def test_folders_of_others_go_out_and_come_in(ckpt, run, tmp_path):
    for kind, more in (("dcp", ["--trust"]), ("hf", [])):
        done = ckpt("export", run, "--step", 2, "--format", kind, "--out", tmp_path / kind)
        assert done.returncode == 0, done.stderr
        done = ckpt("import", tmp_path / kind, "--format", kind, "--step", 4, "--out", tmp_path / f"{kind} run", *more)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{tmp_path / kind} -> {tmp_path / f'{kind} run' / 'step-00000004'}\n"
        assert ckpt("verify", tmp_path / f"{kind} run").returncode == 0
        ckpt("export", tmp_path / f"{kind} run", "--out", tmp_path / f"{kind}.safetensors")
        assert torch.equal(load_file(tmp_path / f"{kind}.safetensors")["weight"], torch.full((2, 3), 2.0))
    done = ckpt("import", tmp_path / "dcp", "--format", "dcp", "--out", tmp_path / "never")
    assert done.returncode == 2
    assert "is a pickle" in done.stderr
    assert "pass --trust" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ls", "{empty}"], "no checkpoint in"),
        (["ls", "{run}", "--step", "9"], "no checkpoint of step 9 in"),
        (["export", "{run}"], "export needs --out: a file"),
        (["import", "{run}", "--format", "hf"], "import needs --out: a file or folder"),
        (["import", "{empty}/x", "--format", "hf", "--out", "{empty}/y"], "is neither a folder nor a file"),
        (["export", "{run}", "--step", "3", "--out", "{empty}/x"], "no intact checkpoint of step 3"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_exit_code_2(ckpt, run, tmp_path, words, message):
    done = ckpt(*(word.format(run=run, empty=tmp_path) for word in words))
    assert done.returncode == 2
    assert done.stderr.startswith("colonnade: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_copy_without_its_manifest_is_not_ok(ckpt, run, tmp_path):
    shutil.copytree(run / "step-00000001", tmp_path / "step-00000001")
    (tmp_path / "step-00000001/manifest.json").unlink()
    done = ckpt("ls", tmp_path)
    assert done.returncode == 1
    assert "manifest.json is missing" in done.stdout


def test_checkpoints_one_level_down_are_found(ckpt, run, tmp_path):
    (tmp_path / "checkpoints").symlink_to(run, target_is_directory=True)
    (tmp_path / "trace").mkdir()
    assert ckpt("ls", tmp_path).stdout == ckpt("ls", run).stdout
    assert ckpt("export", tmp_path, "--step", 1, "--out", tmp_path / "one.safetensors").returncode == 0
    (tmp_path / "other").symlink_to(run, target_is_directory=True)
    said = ckpt("ls", tmp_path)
    assert said.returncode == 2
    assert "have checkpoints: " in said.stderr

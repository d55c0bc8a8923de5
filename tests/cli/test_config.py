"""`colonnade config`: the list of keys, and a look at a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from colonnade.cli import main
from colonnade.config.settings import all_keys


def run(capsys: Any, *words: str) -> tuple[str, str, object]:
    """(What was printed, what was complained of, the exit code)."""
    with pytest.raises(SystemExit) as left:
        main(["config", *words])
    said = capsys.readouterr()
    return said.out, said.err, left.value.code


def test_every_key_is_listed_with_what_it_means_and_may_be(capsys: Any) -> None:
    out, _, code = run(capsys, "--keys", "--json")
    assert code == 0
    listed = {key["path"]: key for key in json.loads(out)}
    assert list(listed) == [key.path for key in all_keys()]
    assert listed["zero.stage"] == {
        "path": "zero.stage",
        "allows": "0, 1, 2 or 3",
        "means": "0: off, 1: optimizer state is sharded, 2: and gradients, 3: and parameters",
        "required": True,
        "default": "",
    }
    assert listed["clip_grad_norm.norm_type"]["default"] == "2.0"
    assert {"clip_grad_norm.groups.NAME.max_norm", "gradient_handler[].type", "parallel.NAME.size"} <= set(listed)


def test_keys_are_found_by_their_meaning(capsys: Any) -> None:
    out, _, _ = run(capsys, "--keys", "--find", "LOSS SCALE")
    assert "fp16.init_scale" in out
    assert "zero" not in out
    assert "no config key has 'nonsuch' in" in run(capsys, "--find", "nonsuch")[1]


def test_a_file_is_checked(capsys: Any, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("clip_grad_norm = 1.0\nBATCH_SIZE = 8\n")
    bad.write_text("clip_grad_nrom = 1.0\n")
    assert json.loads(run(capsys, str(good), "--json")[0]) == {"ours": ["clip_grad_norm"], "yours": ["BATCH_SIZE"]}
    _, err, code = run(capsys, str(bad))
    assert code == 2
    assert "clip_grad_norm" in err
    assert "--keys" in run(capsys)[1]

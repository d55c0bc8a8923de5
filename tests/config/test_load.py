"""load_config: every form a config comes in, and what loading costs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config import Config, load_config
from colonnade.errors import ConfigError

PYTHON = """
BATCH_SIZE = 8
x = 2
parallel = dict(
    pipeline=dict(size=1),
    tensor=dict(size=x, mode='new_mode')  # this is where you enable your new parallel mode
)
gradient_handlers = [
    dict(type='YourGradientHandler'),
]
clip_grad_norm = 1.0
"""
TOML = """
BATCH_SIZE = 8
x = 2
clip_grad_norm = 1.0
[parallel]
pipeline.size = 1
tensor = { size = 2, mode = "new_mode" }
[[gradient_handlers]]
type = "YourGradientHandler"
"""
VALUES: dict[str, Any] = {
    "BATCH_SIZE": 8,
    "x": 2,
    "parallel": {"pipeline": {"size": 1}, "tensor": {"size": 2, "mode": "new_mode"}},
    "gradient_handlers": [{"type": "YourGradientHandler"}],
    "clip_grad_norm": 1.0,
}


def test_python_toml_and_dict_give_the_same_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(PYTHON)
    (tmp_path / "train.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    for source in (tmp_path / "train.py", "train.py", "./train.py", tmp_path / "train.toml", VALUES):
        config = load_config(source)
        assert type(config) is Config
        assert config == VALUES
        assert config.gradient_handlers[0].type == "YourGradientHandler"


def test_a_config_comes_back_as_itself_and_a_dict_as_a_copy() -> None:
    config = Config(VALUES)
    assert load_config(config) is config
    mine = dict(VALUES)
    load_config(mine).freeze()
    mine["x"] = 3
    assert type(mine["parallel"]) is dict


@pytest.mark.parametrize("source", [None, 3, ["train.py"], b"train.py", object])
def test_other_types_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match=rf"a path to a \.py or \.toml file .* not {type(source).__name__}: "):
        load_config(source)


def test_problems_have_their_lines(tmp_path: Path) -> None:
    python = tmp_path / "train.py"
    python.write_text("from base import *\nlr = 1\nparallel = dict(\n    tensro=2,\n)\ngrad_accum = 4\n")
    (tmp_path / "base.py").write_text("zero = 7\n")
    toml = tmp_path / "train.toml"
    toml.write_text("lr = 1\n[parallel]\ntensro = 2\n[parallel.tensor]\nmode = '1d'\n")
    with pytest.raises(ConfigError) as caught:
        load_config(python)
    rows = str(caught.value).splitlines()
    assert rows[0] == f"colonnade: 3 problems in {python}"
    assert rows[1].startswith("  train.py    zero = 7   must be 0, 1, 2 or 3")
    assert rows[2] == "  train.py:4  parallel.tensro = 2   unknown key. Did you mean `tensor`?"
    assert rows[3].startswith("  train.py:6  grad_accum = 4   is not read")
    with pytest.raises(ConfigError) as caught:
        load_config(toml)
    assert str(caught.value).splitlines() == [
        f"colonnade: 2 problems in {toml}",
        "  train.toml:3  parallel.tensro = 2   unknown key. Did you mean `tensor`?",
        "  train.toml:4  parallel.tensor.size   is missing; it must be an int >= 1",
    ]


@given(st.dictionaries(st.from_regex(r"[A-Z]{3}[0-9]{3}", fullmatch=True), st.integers() | st.text()))
def test_what_is_printed_loads_again(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    file = tmp_path_factory.mktemp("printed") / "train.py"
    file.write_text(str(Config(values, **VALUES)), encoding="utf-8")
    assert load_config(file) == {**values, **VALUES}


def test_loading_imports_no_torch_and_is_quick(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PYTHON)
    (tmp_path / "train.toml").write_text(TOML)
    script = textwrap.dedent(
        """
        import sys, time
        start = time.perf_counter()
        from colonnade.config import load_config, parallel_sizes, describe_keys
        for name in ("train.py", "train.toml"):
            parallel_sizes(load_config(name).freeze())
        describe_keys()
        wall = time.perf_counter() - start
        heavy = {"torch", "numpy", "rich", "typer"} & set(sys.modules)
        assert not heavy, heavy
        print(wall)
        """
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": str(root), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.3

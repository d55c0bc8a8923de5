"""`colonnade explain` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from colonnade.cli import main
from colonnade.testing import run_world
from tests.cli import ROOT, colonnade


@pytest.fixture
def explain(capsys, monkeypatch):
    """Run `colonnade explain` in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object) -> SimpleNamespace:
        with pytest.raises(SystemExit) as ended:
            main(["explain", *map(str, words)])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=int(ended.value.code or 0), out=out, err=err)

    return run


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.py"
    path.write_text("parallel = dict(tensor=dict(size=2, mode='1d'))\nclip_grad_norm = 1.0\n")
    (tmp_path / "own_net_to_explain.py").write_text(
        "from torch import nn\nfrom colonnade.nn import Linear\n\n"
        "def build():\n    return nn.Sequential(Linear(8, 16), nn.ReLU(), Linear(16, 8, split='row'))\n"
    )
    return path


@pytest.mark.slow
def test_as_a_user_would_call_it():
    done = colonnade("explain", "examples/gpt/config.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 ranks: data 2 x pipeline 2\n")
    assert "a weight tied to another stage" in done.stdout


def test_a_script_that_is_given_as_a_config_does_not_run(explain, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import colonnade\ngpc = colonnade.launch({})\nprint('it trains')\n")
    done = explain(script)
    assert done.code == 2
    assert "it trains" not in done.out
    assert (
        "train.py calls launch(), so it is a script and not a config. Run it with `colonnade run train.py`" in done.err
    )
    assert "[C002]" in done.err


def test_the_optimizer_beside_the_model_is_read(explain, config):
    (config.parent / "own_net_with_optimizer.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def build():\n    return nn.Linear(8, 8)\n\n"
        "class Own(torch.optim.SGD):\n    def sync_grad(self): ...\n\n"
        "def optimizer(parameters):\n    return Own(parameters, lr=0.1)\n"
    )
    config.write_text("")
    done = explain(config, "--model", "own_net_with_optimizer.py:build", "--world-size", 2)
    assert done.code == 0
    assert "by ZeROGradientHandler (attached" in done.out


@pytest.mark.parametrize("example", ["gradient_handler", "gradient_clipping", "gpt", "huggingface"])
def test_the_configs_of_the_examples_are_explained(explain, example):
    done = explain(ROOT / "examples" / example / "config.py", "--json")
    assert done.code == 0, done.err
    assert "a plain parameter" in json.loads(done.out)["classes"][0]["names"]


def test_a_mode_of_ones_own_is_imported_first(explain):
    folder = ROOT / "examples" / "own_parallelism"
    # In a process of its own, which no other test has made import the mode.
    alone = run_world(1, main, ["explain", str(folder / "config.py")], backend=None, check=False)
    assert (alone.outcomes[0].type, alone.outcomes[0].message) == ("SystemExit", "2")
    assert "head_data" in alone.stderr[0]
    done = explain(folder / "config.py", "--import", "head_data")
    assert done.code == 0, done.err
    assert "partial gradient over HEAD_DATA" in done.out
    assert "HeadDataGradientHandler (named in the config)" in done.out


def test_a_model_is_built_for_no_process(explain, config):
    done = explain(config, "--model", "own_net_to_explain:build", "--world-size", 4)
    assert done.code == 0, done.err
    assert "all-reduced over DATA [0, 2] [1, 3], divided by 2 (its 2 ranks saw distinct data)" in done.out
    assert (
        "slices of the full tensor (dimension 0 in 2), each once; written by the first replica of each shard: rank 0, 1"
        in done.out
    )
    file = explain(config, "--model", f"{config.parent}/own_net_to_explain.py:build", "--param", "*.bias", "--json")
    found = json.loads(file.out)
    assert found["world_size"] == 4
    assert {name for one in found["classes"] for name in one["names"]} == {"*.bias"}


def test_ratio_says_which_bug_it_can_be(explain, config):
    done = explain(config, "--world-size", 8, "--ratio", 4)
    assert done.code == 0
    first = done.out.splitlines()[1]
    assert first.startswith(" 1. summed-not-averaged (x 4 = DATA 4): summed over DATA and not divided by its 4 ranks")
    norm = json.loads(explain(config, "--world-size", 8, "--ratio", 2.83, "--of", "norm", "--json").out)
    assert norm["meanings"][0]["cause"] == "norm-counts-replicas"
    assert "The nearest:" in explain(config, "--ratio", 77).out


def test_what_initialize_would_refuse_is_exit_code_1(explain, tmp_path):
    path = tmp_path / "config.py"
    path.write_text("sync = dict(automatic=False)\n")
    done = explain(path)
    assert done.code == 1
    assert "initialize() would reject this" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size", "3"], "does not divide world_size=3"),
        (["--world-size", "0"], "a world has at least one rank, not 0"),
        (["--model", "nothing"], "Write MODULE:FUNCTION"),
        (["--model", "nowhere_at_all:build"], "'nowhere_at_all' cannot be imported"),
        (["--model", "own_net_to_explain:bild"], "has no function 'bild'. Did you mean 'build'?"),
        (["--model", "own_net_to_explain:build", "--param", "9.x"], "matches none of the 4 parameters"),
        (["--ratio", "-1"], "give the found value divided by the expected value, a number above 0"),
    ],
)
def test_what_cannot_be_explained_is_one_message_and_exit_code_2(explain, config, words, message):
    done = explain(config, *words)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err

"""A config with a model, verified without a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colonnade.errors import ConfigError
from colonnade.proof.from_config import Given
from colonnade.proof.user_functions import is_config
from tests.cli import ROOT, colonnade

NET = """
import torch
from torch import nn
from colonnade.nn import Linear


def build(config):
    return nn.Sequential(Linear(8, config.WIDTH), nn.Dropout(0.3), Linear(config.WIDTH, 4, split="row"))


def batch(context, step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(6, 8, generator=draw), torch.randint(0, 4, (6,), generator=draw)


def norm():
    return nn.LayerNorm(4)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.py"
    path.write_text(
        "parallel = dict(tensor=dict(size=2, mode='1d'), data=1)\nclip_grad_norm = 0.1\nWIDTH = 16\n"
        "optimizer = dict(type='SGD', lr=0.1, momentum=0.9)\n"
    )
    (tmp_path / "net.py").write_text(NET)
    return path


def test_a_config_is_told_from_a_script(config: Path) -> None:
    assert is_config(config)
    assert is_config(ROOT / "examples" / "gpt" / "config.py")
    assert is_config(Path("config.toml"))
    assert not is_config(config.parent / "net.py")
    assert not is_config(ROOT / "examples" / "gpt" / "train.py")
    assert not is_config(config.parent / "missing.py")


def test_what_is_named_must_be_there(config: Path) -> None:
    for given, message in (
        (Given(str(config), "net.py"), "--model 'net.py' is not valid. Write MODULE:FUNCTION"),
        (
            Given(str(config), "net.py:biuld"),
            "--model 'net.py:biuld' is not valid, because net.py has no function 'biuld'.*build",
        ),
        (Given(str(config), "net.py:build", batch="nowhere:batch"), "'nowhere' cannot be imported"),
        (Given(str(config), "net.py:build", imports=("nowhere",)), "'nowhere' cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=message):
            given.as_argument()
    assert json.loads(Given(str(config), "net.py:build").as_argument())["model"] == "net.py:build"


def test_options_that_do_not_fit_are_refused_before_a_process_starts(config: Path) -> None:
    for words, message in (
        ((config,), "is a config, and a config contains no training loop"),
        (("--batch", "net.py:batch", config.parent / "net.py"), "requires --model"),
        (("--dropout", "0.5", config.parent / "net.py"), "'0.5' is not allowed: use own or 0"),
    ):
        done = colonnade("verify", *words)
        assert done.returncode == 2, done.stdout
        assert message in " ".join(done.stderr.replace("│", " ").split()), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_config_with_a_model_is_equal_and_options_may_follow_it(config: Path) -> None:
    done = colonnade("verify", "--json", config, "--model", "net.py:build", "--steps", "1", timeout=350)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {"0.weight", "2.weight"} <= {row["name"] for row in rows if row["quantity"] == "gradient"}
    assert [row["name"] for row in rows if row["quantity"] == "random numbers"] == ["1"]


@pytest.mark.long
@pytest.mark.timeout(800)
def test_batches_and_losses_of_ones_own(config: Path) -> None:
    words = "--criterion", "torch.nn:CrossEntropyLoss", "--batch", "net.py:batch", "--dropout", "0"
    done = colonnade("verify", config, "--model", "net.py:build", *words, timeout=350)
    assert done.returncode == 0, done.stderr
    assert "dropout was set to 0" in done.stdout
    done = colonnade("verify", config, "--model", "net.py:norm", timeout=350)
    assert done.returncode == 2
    assert "the model of net.py:norm with" in done.stderr
    assert "its first layer is a LayerNorm. Pass --batch" in done.stderr

"""The `zero` section: its forms, and options that belong to another stage."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from colonnade.config import load_config
from colonnade.config.settings import ZeroSettings
from colonnade.errors import ConfigError
from colonnade.optim.zero import fsdp
from colonnade.optim.zero.fsdp import ShardedModel


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ZeroSettings()),
        (2, ZeroSettings(stage=2)),
        ({"stage": 1, "offload": "cpu", "gather_ahead": True}, ZeroSettings(stage=1, offload=True, gather_ahead=True)),
        ({"stage": 3, "wrap": "Block", "prefetch": 2}, ZeroSettings(stage=3, wrap=("Block",), prefetch=2)),
        ({"stage": 2, "reduce_scatter": True}, ZeroSettings(stage=2)),
        ({"stage": 1, "reduce_scatter": False, "offload": True}, ZeroSettings(1, reduce_scatter=False, offload=True)),
        ({"stage": 1, "offload": False, "bucket_mb": 2.5}, ZeroSettings(stage=1, bucket_mb=2.5)),
        ({"stage": 3, "wrap": ["a", "b"], "reshard": False}, ZeroSettings(stage=3, wrap=("a", "b"), reshard=False)),
    ],
)
def test_forms(given, expected):
    assert ZeroSettings.read(load_config({"zero": given}).get("zero")) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"stage": 2, "reduce_scatter": False},
        {"stage": 1, "wrap": "Block"},
        {"stage": 3, "bucket_mb": 1.0},
        {"stage": 3, "gather_ahead": True},
        {"stage": 1, "prefetch": 2},
        {"stage": 1, "offload": "nvme"},
    ],
    ids=str,
)
def test_options_of_another_stage_are_refused(given):
    with pytest.raises(ConfigError, match=r"zero\."):
        ZeroSettings.read(given)


@pytest.mark.parametrize("is_torchs", [True, False])
def test_before_a_step_the_ranks_compare_and_everything_gathered_is_given_back(monkeypatch, is_torchs):
    said: list[str] = []

    class Step(torch.optim.SGD if is_torchs else SimpleNamespace):  # type: ignore[misc]
        def step(self) -> None:
            said.append("step")

    optimizer = Step([torch.nn.Parameter(torch.zeros(1))]) if is_torchs else Step(param_groups=[])
    monkeypatch.setattr(fsdp, "agreed_errors", lambda device: nullcontext())
    units = SimpleNamespace(
        context=SimpleNamespace(device=None),
        meshes=[],
        order=SimpleNamespace(step=lambda: said.append("compare")),
        guards=[SimpleNamespace(give_back=lambda: said.append("give back"))] * 2,
    )
    ShardedModel.guard(SimpleNamespace(_units=units), optimizer)  # type: ignore[arg-type]
    optimizer.step()
    assert said == ["compare", "give back", "give back", "step"]

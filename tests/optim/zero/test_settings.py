"""The `zero` section: its forms, and options that belong to another stage."""

from __future__ import annotations

import pytest
import torch

from colonnade.config import load_config
from colonnade.errors import ConfigError
from colonnade.optim.zero.settings import Travel, ZeroSettings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ZeroSettings()),
        (2, ZeroSettings(stage=2)),
        ({"stage": 1, "offload": "cpu", "prefetch": True}, ZeroSettings(stage=1, offload=True, prefetch=1)),
        ({"stage": 3, "wrap": "Block", "prefetch": 2}, ZeroSettings(stage=3, wrap=("Block",), prefetch=2)),
        ({"stage": 2, "reduce_scatter": True}, ZeroSettings(stage=2)),
    ],
)
def test_forms(given, expected):
    assert ZeroSettings.read(load_config({"zero": given}).get("zero")) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"stage": 2, "reduce_scatter": False},
        {"stage": 1, "wrap": "Block"},
        {"stage": 3, "master_weights": True},
        {"stage": 1, "offload": "nvme"},
    ],
    ids=str,
)
def test_options_of_another_stage_are_refused(given):
    with pytest.raises(ConfigError, match=r"zero\."):
        ZeroSettings.read(given)


def test_sums_are_never_narrower_and_wires_never_wider():
    assert Travel().sum_dtype(torch.float16) is torch.float32
    assert Travel().sum_dtype(torch.bfloat16) is torch.bfloat16
    assert Travel(reduce_dtype=torch.bfloat16).sum_dtype(torch.float32) is torch.float32
    assert Travel(wire=torch.bfloat16).wire_dtype(torch.float32) is torch.bfloat16
    assert Travel(wire=torch.bfloat16).wire_dtype(torch.float16) is torch.float16

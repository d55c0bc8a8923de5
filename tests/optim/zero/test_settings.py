"""The `zero` section: its forms, and options that belong to another stage."""

from __future__ import annotations

import pytest

from colonnade.config import load_config
from colonnade.config.settings import ZeroSettings
from colonnade.errors import ConfigError


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

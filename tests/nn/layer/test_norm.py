"""Norms in a single process are those of torch; `test_parity.py` compares sharded ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade.errors import ConfigError
from colonnade.nn.layer.layer_norm import LayerNorm, RMSNorm


@pytest.mark.parametrize(
    ("ours", "plain", "options"),
    [
        (RMSNorm, nn.RMSNorm, {}),
        (RMSNorm, nn.RMSNorm, {"eps": 0.5}),
        (LayerNorm, nn.LayerNorm, {}),
        (LayerNorm, nn.LayerNorm, {"eps": 0.5}),
        (LayerNorm, nn.LayerNorm, {"bias": False}),
    ],
)
def test_alone_a_norm_is_torchs_built_anew_or_from_one(ours, plain, options):
    truth = plain(8, dtype=torch.float64, **options)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(ours(8, dtype=torch.float64, **options)(x), truth(x))
    with torch.no_grad():
        for parameter in truth.parameters():
            parameter.copy_(torch.arange(8.0) - 2)
    taken = ours.from_module(truth)
    assert torch.equal(taken(x), truth(x))
    assert [*taken.state_dict()] == [*truth.state_dict()]


@pytest.mark.parametrize("ours", [LayerNorm, RMSNorm])
def test_only_a_norm_over_one_dimension_is_taken(ours):
    with pytest.raises(ConfigError, match=r"a norm over the dimensions \(2, 3\) cannot be converted"):
        ours.from_module(getattr(nn, ours.__name__)((2, 3)))

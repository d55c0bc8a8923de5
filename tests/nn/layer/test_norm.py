"""One process: norms alone are torch's, and the statistics of a hidden dimension that two ranks share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from colonnade.errors import ConfigError
from colonnade.nn.layer import layer_norm
from colonnade.nn.layer.layer_norm import LayerNorm, RMSNorm


def test_mean_and_variance_are_those_of_the_whole(monkeypatch):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 5
    halves = x.chunk(2, -1)
    layer = SimpleNamespace(size=8, arrangement=SimpleNamespace(context=None))
    said: list[Tensor] = []

    def all_gather(stats: Tensor, mode: str, dim: int, sizes: tuple[int, ...], context: None) -> Tensor:
        assert (dim, sizes) == (-1, (2, 2))
        said.append(stats)
        return torch.cat(said[:2] if len(said) > 1 else said * 2, -1)

    monkeypatch.setattr(layer_norm, "size_of", lambda mode, context: 2)
    monkeypatch.setattr(layer_norm.collectives, "all_gather", all_gather)
    LayerNorm._moments(layer, halves[0], "mode")  # the other one has not spoken yet
    for half in halves[::-1]:
        mean, variance = LayerNorm._moments(layer, half, "mode")
        torch.testing.assert_close(mean, x.mean(-1, keepdim=True))
        torch.testing.assert_close(variance, x.var(-1, correction=0, keepdim=True))


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
    with pytest.raises(ConfigError, match=r"a norm over \(2, 3\) cannot be taken over"):
        ours.from_module(getattr(nn, ours.__name__)((2, 3)))


@pytest.mark.parametrize(("mode", "ranks", "cut_by"), [(None, 2, None), ("mode", 1, None), ("mode", 2, "mode")])
def test_a_hidden_dimension_is_whole_on_one_rank_or_where_nothing_cuts_it(monkeypatch, mode, ranks, cut_by):
    monkeypatch.setattr(layer_norm, "size_of", lambda mode, context: ranks)
    layer = SimpleNamespace(arrangement=SimpleNamespace(outer=SimpleNamespace(hidden=mode), context=None))
    assert layer_norm._Norm._cut_by.fget(layer) == cut_by

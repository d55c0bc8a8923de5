"""Masks agree where ranks hold the same activation, differ where each holds its part, and come back after a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.layer import Dropout, SelfAttention, Whole, arrange, attention
from colonnade.testing import run_world
from colonnade.utils import checkpoint


def _masks() -> dict[str, Tensor]:
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "seed": 5}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        whole, split = arrange(gpc), arrange(gpc, sequence_split=True)
        ones = torch.ones(64, 64)
        found = {
            "outer": Dropout(0.25, arrangement=whole)(ones),
            "inner": Dropout(0.25, side="inner", arrangement=whole)(ones),
            "sequence": Dropout(0.25, arrangement=split)(ones),
            "outer again": Dropout(0.25, arrangement=whole)(ones),
        }
        state = gpc.streams.state_dict()
        found["next"] = Dropout(0.25, side="inner", arrangement=whole)(ones)
        gpc.streams.load_state_dict(state)
        found["repeated"] = Dropout(0.25, side="inner", arrangement=whole)(ones)
        assert Dropout(0.25, arrangement=whole).eval()(ones) is ones
        torch.manual_seed(1)
        layer = SelfAttention(8, 2, dropout=0.5, arrangement=whole)
        found["attention"] = layer(torch.randn(2, 16, 8)).detach()
        found["gradients"] = torch.stack(
            [_gradient(Dropout(side="inner", arrangement=whole), again) for again in AGAIN]
        )
        return found


AGAIN: list[Callable[..., Tensor]] = [
    lambda layer, x: layer(x),
    partial(torch_checkpoint, use_reentrant=False),
    partial(torch_checkpoint, use_reentrant=True),
    lambda layer, x: checkpoint(layer, False, x),
    lambda layer, x: checkpoint(layer, True, x),
]


def _gradient(dropout: Dropout, run: Callable[..., Tensor]) -> Tensor:
    """Through two layers that are computed again, or not."""
    torch.manual_seed(2)
    x = torch.ones(8, 8, requires_grad=True)
    layer = nn.Sequential(dropout, nn.Tanh())
    run(layer, run(layer, x)).sum().backward()
    assert x.grad is not None
    return x.grad


def test_masks_agree_on_whole_activations_and_differ_on_parts():
    first, second = run_world(2, _masks).values
    for name in ("outer", "outer again", "attention"):
        assert torch.equal(first[name], second[name]), name
    for name in ("inner", "sequence", "next"):
        assert not torch.equal(first[name], second[name]), name
    assert not torch.equal(first["outer"], first["outer again"])
    assert torch.equal(first["next"], first["repeated"])
    gradients = first.pop("gradients")
    assert torch.equal(gradients, gradients[:1].expand_as(gradients))
    assert not torch.equal(gradients, second["gradients"])
    for name, mask in first.items():
        if name != "attention":
            assert abs((mask == 0).double().mean().item() - 0.25) < 0.03, name
            assert set(mask.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}, name


@pytest.mark.parametrize("settings", [{}, {"window": 3}, {"window": 3, "over": "ulysses"}], ids=str)
def test_weights_of_heads_are_dropped_by_the_stream_of_parts_and_only_in_training(settings, monkeypatch):
    sides: list[str] = []
    monkeypatch.setattr(attention, "stream_of", lambda here, side: nullcontext(sides.append(side)))
    other = "ring_attention" if settings.get("over") == "ulysses" else "ulysses_attention"
    monkeypatch.setattr(attention, other, None)  # which is not the one that was asked for
    layer = SelfAttention(8, 2, dropout=0.5, arrangement=Whole(ParallelContext()), **settings)
    layer(torch.randn(2, 6, 8))
    assert sides == ["inner"]
    layer.eval()(torch.randn(2, 6, 8))
    assert sides == ["inner"]

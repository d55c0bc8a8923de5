"""Layers of every tensor mode in one process: shapes, placements and calls, on a rank of a world that is not there.

What a rank receives there is what it has sent, so that values mean nothing; the other tests compare those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.errors import ConfigError, PlacementError
from colonnade.models import GPT
from colonnade.nn.layer import (
    MLP,
    Arrangement,
    CrossEntropyLoss,
    Embedding,
    LayerNorm,
    Linear,
    RMSNorm,
    SelfAttention,
    Spread,
    Whole,
    arrange,
    partition_input,
)
from colonnade.nn.layer.spread import FirstPass, size_of
from colonnade.parallel.collectives import split_sizes
from colonnade.parallel.demand import holding
from colonnade.parallel.placement import Replicate, logical_shape, placement_of
from colonnade.proof.planner.ranks import fake_rank

MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "1d": (2, {"mode": "1d"}),
    "1d, sequence split": (2, {"mode": "1d", "sequence_split": True}),
    "2d": (4, {"mode": "2d"}),
    "2.5d": (8, {"mode": "2.5d", "depth": 2}),
    "3d": (8, {"mode": "3d"}),
}


@contextmanager
def arranged(name: str, rank: int, **more: Any) -> Iterator[Arrangement]:
    """The arrangement of a mode, on one rank of its world."""
    size, mode = MODES[name]
    context = ParallelContext()
    with fake_rank(load_config({"parallel": {"tensor": {"size": size, **mode, **more}}}), size, rank, context):
        yield arrange(context)


@pytest.mark.parametrize("name", MODES)
def test_small_sizes_are_cut_and_every_rank_has_its_own_block(name):
    """Two features on two ranks: one each. A number of an embedding's rows that two does not divide is cut in 1d."""
    size, _ = MODES[name]
    rows = 7 if name.startswith("1d") else 8
    torch.manual_seed(1)
    wholes = [nn.Linear(4, 4), nn.Embedding(rows, 4), nn.LayerNorm(4)]
    if "3d" not in name:
        wholes += [nn.Linear(2, 2), nn.LayerNorm(2)]
    for rank in range(size):
        with arranged(name, rank) as here:
            for whole in wholes:
                nn.init.normal_(whole.weight)
                if isinstance(whole, nn.Linear):
                    ours = [Linear.from_module(whole, split=split, arrangement=here) for split in ("column", "row")]
                else:
                    ours = [
                        {"Embedding": Embedding, "LayerNorm": LayerNorm}[type(whole).__name__].from_module(
                            whole, arrangement=here
                        )
                    ]
                for layer in ours:
                    for key, parameter in layer.named_parameters():
                        part = whole.get_parameter(key)
                        for mode, shard in placement_of(parameter).shards.items():
                            sizes = split_sizes(part.shape[shard.dim], mode, context=here.context)
                            part = part.split(sizes, shard.dim)[here.context.get_local_rank(mode)]
                        assert torch.equal(parameter, part), (name, rank, key)
            table = torch.arange(rows).unsqueeze(1).expand(rows, 4)
            assert here.first_row(rows) == here.take_weight(table, "column")[0, 0]


@pytest.mark.parametrize(
    ("name", "build", "said"),
    [
        ("2d", lambda h: Linear(4, 7, arrangement=h), "out_features of size 7 cannot be sharded evenly over the 2 ranks"),
        ("2d", lambda h: Linear(7, 4, arrangement=h), "in_features of size 7 cannot"),
        ("2d", lambda h: LayerNorm(5, arrangement=h), "features of size 5 cannot"),
        ("2d", lambda h: LayerNorm.from_module(nn.LayerNorm(5, elementwise_affine=False), arrangement=h), "features of size 5"),
        ("2d", lambda h: Linear(4, 6, unit=2, arrangement=h), "out_features of size 3 x 2 cannot"),
        ("1d", lambda h: Linear(4, 6, unit=4, arrangement=h), "out_features of size 1 x 4 cannot"),
        ("2d", lambda h: partition_input(torch.zeros(3, 2, 4), arrangement=h), "batch of size 3 cannot"),
        ("1d, sequence split", lambda h: partition_input(torch.zeros(2, 3, 4), arrangement=h), "sequence of size 3 cannot"),
        ("2d", lambda h: type(h)(h.context, sequence_split=True), "TwoD does not support sequence_split=True, because it already shards activations"),
        ("1d", lambda h: Linear(4, 12, unit=4, arrangement=h), ""),
        ("2d", lambda h: Linear(4, 8, unit=4, arrangement=h), ""),
        ("2d", lambda h: partition_input(torch.zeros(2, 3, 2), arrangement=h), ""),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(name, build, said):
    with arranged(name, 1) as here, pytest.raises((PlacementError, ConfigError), match=said) if said else nullcontext():
        build(here)


def test_a_gated_mlp_and_one_with_few_ranks_along_one_side():
    with arranged("1d", 1) as here:
        gate, up = MLP(16, 8, gated=True, arrangement=here).up(torch.zeros(8, 4, 16), each=True)
        assert gate.shape == up.shape == (8, 4, 4)
        assert size_of(M.PARALLEL_2D_ROW, here.context) == 1  # there is no such group
        attention = SelfAttention(16, 4, qk_norm=1e-6, arrangement=here)
        for weight in (attention.q_norm, attention.k_norm):  # whole; each rank sees other heads
            assert dict(placement_of(weight).modes) == {M.PARALLEL_1D: Replicate(owes="sum")}
    with arranged("1d, sequence split", 1) as here:
        gate, up = MLP(16, 8, gated=True, arrangement=here).up(torch.zeros(8, 2, 16), each=True)
        assert gate.shape == up.shape == (8, 4, 4)
    context = ParallelContext()
    config = load_config({"parallel": {"tensor": {"size": 2, "mode": "2.5d", "depth": 2}}})
    with fake_rank(config, 2, 1, context):
        here = arrange(context)
        assert here.is_split("outer")  # along the batch alone
        watch = FirstPass(nn.Sequential(), context)
        assert watch.split_only(here.outer) == Spread(batch=M.PARALLEL_2P5D_XZ)
        assert watch.split_only(Spread(sequence=M.PARALLEL_2P5D_XZ)) == Spread(sequence=M.PARALLEL_2P5D_XZ)
    with fake_rank(load_config({"parallel": {"tensor": {"size": 2, "mode": "sequence"}}}), 2, 1, context):
        assert isinstance(arrange(context), Whole)  # a mode that splits no layer


@pytest.mark.parametrize("name", MODES)
def test_the_parts_of_all_ranks_are_the_whole_model_once(name):
    size, mode = MODES[name]
    whole = {key: tuple(p.shape) for key, p in GPT(32, 8, 16, 4, 1, context=ParallelContext()).named_parameters()}
    held: Counter[str] = Counter()
    for rank in range(size):
        context = ParallelContext()
        with fake_rank(load_config({"parallel": {"tensor": {"size": size, **mode}}}), size, rank, context):
            model = GPT(32, 8, 16, 4, 1, context=context)
            for key, parameter in model.named_parameters():
                placement = placement_of(parameter)
                by_mode = {m: context.get_world_size(m) for m in placement.shards}
                assert logical_shape(parameter, placement, by_mode) == whole[key], key
                held[key] += parameter.numel() / holding(context.layout, placement, rank).count
            if rank == 0:
                ids = torch.zeros(8, 8, dtype=torch.long)
                loss = model.criterion()(model(ids), ids)
                (loss[0] if isinstance(loss, tuple) else loss).backward()
                assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    assert held == {key: pytest.approx(prod(shape)) for key, shape in whole.items()}


@pytest.mark.parametrize("mode", [None, "1d", "2d"])
def test_in_a_world_of_one_every_mode_is_torchs_own(mode):
    context = ParallelContext()
    with fake_rank(load_config({"parallel": {"tensor": {"size": 1, "mode": mode}} if mode else {}}), 1, 0, context):
        here = arrange(context)
        assert isinstance(here, Whole) == (mode is None)
        plain = nn.Linear(4, 6, dtype=torch.float64)
        x, tokens = torch.randn(2, 3, 4, dtype=torch.float64), torch.tensor([[1, 0], [3, 2]])
        for split in ("column", "row"):
            assert torch.equal(here.product(x, plain.weight, split), F.linear(x, plain.weight))
            assert torch.allclose(here.linear(x, plain.weight, plain.bias, split), plain(x))
        table = torch.randn(4, 6, dtype=torch.float64)
        assert torch.equal(here.embed(tokens, table, 4, None), table[tokens])
        assert not here.is_split("outer")
        assert not here.is_split("inner")
        for norm in (LayerNorm, RMSNorm):
            truth = getattr(nn, norm.__name__)(4, eps=0.1, dtype=torch.float64)
            assert torch.equal(norm.from_module(truth, arrangement=here)(x), truth(x))
        labels = torch.tensor([[5, 0, -100], [2, 3, 4]])
        loss = CrossEntropyLoss(arrangement=here)(plain(x), labels)
        torch.testing.assert_close(loss, F.cross_entropy(plain(x).flatten(0, 1), labels.flatten()))

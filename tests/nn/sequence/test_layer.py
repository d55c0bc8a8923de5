"""Attention layers on split sequences, trained through the engine, equal one process to 1e-10."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError
from colonnade.nn.layer import SelfAttention, Whole, arrange
from colonnade.nn.sequence import Parts
from colonnade.testing import run_world
from tests.nn.sequence.training import close, numbers, train

KINDS = ("ring", "ulysses")
EVEN, UNEVEN = (3, 3, 3, 3), (5, 1, 2, 4)


class PlainAttention(SelfAttention):
    """The same layer with torch's own attention."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, lengths: Any) -> Tensor:
        groups = q.size(1) // k.size(1)
        return F.scaled_dot_product_attention(
            q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), is_causal=self.causal
        )


class Net(nn.Module):
    """Positions are added, then attention and a head: a position's parameter is used on one rank alone."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.places = nn.Parameter(numbers(20, 8, seed=1))
        self.attention = attention
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.places[positions]
        return self.head(x + self.attention(x))


def _batch(part: int, step: int, length: int) -> tuple[Tensor, Tensor]:
    seed = 100 * step + part
    return numbers(2, length, 8, seed=seed), numbers(2, length, 3, seed=5000 + seed)


def _trained(kind: str, parallel: dict[str, Any], causal: bool, lengths: tuple[int, ...], settings: dict[str, Any]):
    with launch({"parallel": parallel, "clip_grad_norm": 1.0}, context=ParallelContext(), verbose=False) as gpc:
        data, total = gpc.data_parallel_size, sum(lengths)
        parts = Parts(lengths, settings.get("balanced", False))
        mine = parts.positions(gpc.get_local_rank(ParallelMode.SEQUENCE))
        every = Parts((total,)).positions(0)
        model = Net(SelfAttention(8, 4, causal=causal, over=kind, arrangement=arrange(gpc), **settings))
        kv_heads = settings.get("kv_heads")
        plain = Net(PlainAttention(8, 4, causal=causal, kv_heads=kv_heads, arrangement=Whole(ParallelContext())))
        even = len(set(lengths)) == 1

        def run(engine: Any, step: int) -> None:
            x, y = (tensor[:, mine] for tensor in _batch(gpc.get_local_rank(ParallelMode.DATA), step, total))
            x.requires_grad_()
            squares = (engine(x, mine) - y) ** 2
            # Equal parts: the mean of means is the mean. Unequal ones: (sum, count) is divided once, by all tokens.
            engine.backward(squares.mean() if even else (squares.sum(), squares.numel()))
            inputs.append(x.grad)

        def loss_of(plain: nn.Module, step: int) -> Tensor:
            batches = [_batch(part, step, total) for part in range(data)]
            for x, _ in batches:
                x.requires_grad_()
            loss = sum(((plain(x, every) - y) ** 2).mean() for x, y in batches) / data
            x = batches[gpc.get_local_rank(ParallelMode.DATA)][0]
            truth = torch.autograd.grad(loss, x, retain_graph=True)[0][:, mine]
            # What a rank's backward starts from: its mean out of all ranks' means, or its sum out of the mean.
            scale = gpc.world_size if even else data * 2 * total * 3
            close(inputs[-1], truth * scale)
            return loss

        inputs: list[Tensor] = []
        engine = train(gpc, model, plain, run, loss_of)
        if "sequence" in parallel:
            assert {row.done_by for row in engine.ledger().rows} == {"SequenceParallelGradientHandler"}


CASES = [
    (kind, size, causal, lengths, balanced)
    for kind in KINDS
    for size in (2, 4)
    for causal in (False, True)
    for lengths in (EVEN, UNEVEN)
    for balanced in ((False, True) if kind == "ring" and lengths is EVEN and causal else (False,))
]
QUICK = [("ring", 2, True, EVEN, True), ("ring", 2, True, UNEVEN, False), ("ulysses", 2, True, UNEVEN, False)]


@pytest.mark.parametrize(
    ("kind", "size", "causal", "lengths", "balanced"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_trained_layers_equal_one_process(kind, size, causal, lengths, balanced):
    settings = {"balanced": True} if balanced else {}
    if balanced:
        lengths = Parts.of(3 * size, size, True).lengths
    run_world(size, _trained, kind, {"sequence": size}, causal, lengths[:size], settings)


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("ring", {"sequence": 2, "data": 2}),
        pytest.param("ulysses", {"sequence": 2, "data": 2}, marks=pytest.mark.slow),
        pytest.param("ring", {"tensor": {"size": 2, "mode": "sequence"}}, marks=pytest.mark.slow),
        pytest.param("ulysses", {"tensor": {"size": 2, "mode": "sequence"}}, marks=pytest.mark.slow),
    ],
)
def test_so_they_do_beside_data_parallelism_in_either_spelling(kind, parallel):
    """SEQUENCE_DP joins data and sequence; the factor of the loss is that of all four ranks."""
    run_world(4, _trained, kind, parallel, True, (2, 5), {})


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_heads_of_keys_beside_a_split_sequence(kind):
    run_world(2, _trained, kind, {"sequence": 2}, True, (2, 5), {"kv_heads": 2})


def _refused() -> list[str]:
    with launch({"parallel": {"sequence": 2}}, context=ParallelContext(), verbose=False) as gpc:
        here, told = arrange(gpc), []
        for wrong in (
            lambda: SelfAttention(8, 4, dropout=0.1, arrangement=here),
            lambda: SelfAttention(8, 4, arrangement=here)(torch.zeros(1, 2, 8), torch.ones(2, 2, dtype=torch.bool)),
        ):
            with pytest.raises(ConfigError) as error:
                wrong()
            told.append(str(error.value))
        return told


def test_what_a_split_sequence_has_not_is_refused():
    for dropout, mask in run_world(2, _refused).values:
        assert "no dropout" in dropout
        assert "takes no mask" in mask


def test_numbers_that_do_not_divide_are_refused():
    here = Whole(ParallelContext())
    with pytest.raises(ConfigError, match="hidden=8 must be a multiple of heads=3"):
        SelfAttention(8, 3, arrangement=here)
    with pytest.raises(ConfigError, match="heads of kv_heads=3"):
        SelfAttention(8, 4, kv_heads=3, arrangement=here)
    with pytest.raises(ConfigError, match="balanced=True parts are for 'ring'"):
        SelfAttention(8, 4, over="ulysses", balanced=True, arrangement=here)

"""Attention layers on split sequences, trained through the engine, equal one process to 1e-10."""

from __future__ import annotations

import unittest.mock
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError
from colonnade.nn import Rotary
from colonnade.nn.layer import SelfAttention, Whole, arrange
from colonnade.nn.sequence import Parts
from colonnade.parallel import wire
from tests.nn.sequence.training import close, numbers, seen_keys, train
from tests.ranks import on_ranks

KINDS = ("ring", "ulysses")
EVEN, UNEVEN = (3, 3, 3, 3), (5, 1, 2, 4)


class PlainAttention(SelfAttention):
    """The same layer with torch's own attention."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, lengths: Any, documents: Any) -> Tensor:
        groups = q.size(1) // k.size(1)
        seen = seen_keys(q.size(2), self.causal, self.window, documents)
        return F.scaled_dot_product_attention(
            q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), attn_mask=seen
        )


class Net(nn.Module):
    """Positions are added, then attention and a head: a position's parameter is used on one rank alone."""

    def __init__(self, attention: nn.Module, documents: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.documents = documents
        self.places = nn.Parameter(numbers(20, 8, seed=1))
        self.attention = attention
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.places[positions]
        return self.head(x + self.attention(x, documents=self.documents))


def _batch(part: int, step: int, length: int) -> tuple[Tensor, Tensor]:
    seed = 100 * step + part
    return numbers(2, length, 8, seed=seed), numbers(2, length, 3, seed=5000 + seed)


def _trained(
    kind: str,
    parallel: dict[str, Any],
    causal: bool,
    lengths: tuple[int, ...],
    settings: dict[str, Any],
    documents: tuple[int, ...] | None = None,
) -> None:
    with launch({"parallel": parallel, "clip_grad_norm": 1.0}, context=ParallelContext(), verbose=False) as gpc:
        data, total = gpc.data_parallel_size, sum(lengths)
        parts = Parts(lengths, settings.get("balanced", False))
        mine = parts.positions(gpc.get_local_rank(ParallelMode.SEQUENCE))
        every = Parts((total,)).positions(0)
        model = Net(SelfAttention(8, 4, causal=causal, over=kind, arrangement=arrange(gpc), **settings), documents)
        settings = {key: value for key, value in settings.items() if key != "balanced"} | {"causal": causal}
        plain = Net(PlainAttention(8, 4, **settings, arrangement=Whole(ParallelContext())), documents)
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


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks("size", timeout=180)
def test_trained_layers_equal_one_process(size: int):
    for kind in KINDS:
        for causal in (False, True):
            _trained(kind, {"sequence": size}, causal, EVEN[:size], {})
            _trained(kind, {"sequence": size}, causal, UNEVEN[:size], {})
    _trained("ring", {"sequence": size}, True, Parts.of(3 * size, size, True).lengths, {"balanced": True})


@on_ranks(4)
def test_so_they_do_beside_data_parallelism_in_either_spelling():
    """SEQUENCE_DP joins data and sequence; the factor of the loss is that of all four ranks."""
    for kind in KINDS:
        for parallel in ({"sequence": 2, "data": 2}, {"tensor": {"size": 2, "mode": "sequence"}}):
            _trained(kind, parallel, True, (2, 5), {})


def _grouped_and_masked(kind: str) -> None:
    _trained(kind, {"sequence": 2}, True, (2, 5), {"kv_heads": 2})
    _trained(kind, {"sequence": 2}, True, (2, 5), {"window": 3})
    _trained(kind, {"sequence": 2}, False, (4, 5), {"window": 4, "kv_heads": 2}, (0, 3, 4, 9))
    _trained(kind, {"sequence": 2}, True, (2, 5), {"rotary": Rotary(2), "qk_norm": 1e-3, "kv_heads": 2})
    if kind == "ring":
        _trained(kind, {"sequence": 2}, True, (3, 4), {"rotary": Rotary(2), "balanced": True})


@on_ranks(2)
def test_fewer_heads_of_keys_windows_and_documents_beside_a_split_sequence():
    for kind in KINDS:
        _grouped_and_masked(kind)


@on_ranks(2)
def test_a_split_sequence_has_dropout_in_training_and_no_mask():
    with launch({"parallel": {"sequence": 2}}, context=ParallelContext(), verbose=False) as gpc:
        layer = SelfAttention(8, 4, dropout=0.5, arrangement=arrange(gpc))
        x = torch.ones(1, 2, 8)
        with unittest.mock.patch.object(wire, "numbers_of_all", wraps=wire.numbers_of_all) as asked:
            layer(x, lengths=[2, 2])
            assert asked.call_count == 0
            layer(x)
            assert asked.call_count == 1  # for lengths, by the layer, and not again by what it calls
        assert not torch.equal(layer(x), layer(x))
        layer.eval()
        assert torch.equal(layer(x), layer(x))
        with pytest.raises(ConfigError) as error:
            layer(x, torch.ones(2, 2, dtype=torch.bool))
        mask = str(error.value)
    assert "a mask is not supported" in mask


def test_a_window_and_documents_in_one_process():
    layer = SelfAttention(8, 4, causal=True, window=2, arrangement=Whole(ParallelContext())).double()
    plain = PlainAttention(8, 4, causal=True, window=2, arrangement=Whole(ParallelContext())).double()
    plain.load_state_dict(layer.state_dict())
    x = numbers(2, 7, 8, seed=1)
    close(layer(x, documents=(0, 3, 7)), plain(x, documents=(0, 3, 7)))
    close(layer(x), plain(x))
    layer.window = plain.window = None
    close(layer(x, documents=(0, 3, 7)), plain(x, documents=(0, 3, 7)))
    close(layer(x), plain(x))
    layer.window = 2
    with pytest.raises(ConfigError, match="a mask is not supported"):
        layer(x, torch.ones(7, 7, dtype=torch.bool))


@pytest.mark.slow
def test_compiled_code_is_left_for_attention_by_blocks():
    """Compiled too it would be compiled anew for every length, for longer than the other ranks wait."""
    layer, graphs = SelfAttention(8, 4, causal=True, window=2, arrangement=Whole(ParallelContext())).double(), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = numbers(2, 7, 8, seed=1)
    close(torch.compile(layer, backend=backend)(x), layer(x))
    assert len(graphs) == 2  # before and behind


@pytest.mark.parametrize("size", [2, 4])
def test_fewer_heads_of_keys_and_heads_of_another_size(size):
    """With as many sequences, and as many tokens, as heads of keys, or of queries."""
    settings = {"kv_heads": 2, "head_size": 6, "qk_norm": 0.1, "rotary": Rotary(6), "bias": False}
    layer, plain = (
        kind(8, 4, **settings, arrangement=Whole(ParallelContext())).double()
        for kind in (SelfAttention, PlainAttention)
    )
    assert (layer.q.weight.shape, layer.kv.weight.shape, layer.out.weight.shape) == ((24, 8), (2, 12, 8), (8, 24))
    plain.load_state_dict(layer.state_dict())
    assert layer.q_norm.shape == layer.k_norm.shape == (6,)
    x = numbers(size, size, 8, seed=1)
    close(layer(x), plain(x))
    plain.causal = True
    close(layer(x, seen_keys(size, True)), plain(x))


def test_which_attention_of_torch_can_be_taken():
    for options in ({"kdim": 4, "vdim": 4}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(ConfigError, match="supports only attention with kdim"):
            SelfAttention.from_module(nn.MultiheadAttention(8, 2, **options))
    for bias in (True, False):
        whole = nn.MultiheadAttention(8, 2, dropout=0.3, bias=bias, batch_first=True)
        taken = SelfAttention.from_module(whole, arrangement=Whole(ParallelContext()))
        assert (taken.dropout, taken.qkv.bias is None, taken.out.bias is None) == (0.3, not bias, not bias)
        x = torch.randn(2, 5, 8)
        torch.testing.assert_close(taken.eval()(x), whole.eval()(x, x, x, need_weights=False)[0])


def test_numbers_that_do_not_divide_are_refused():
    here = Whole(ParallelContext())
    with pytest.raises(ConfigError, match="hidden is 8, heads is 3"):
        SelfAttention(8, 3, arrangement=here)
    with pytest.raises(ConfigError, match="kv_heads is 3"):
        SelfAttention(8, 4, kv_heads=3, arrangement=here)
    with pytest.raises(
        ConfigError, match=r"balanced=True. Allowed for over are 'ring' and 'ulysses'; balanced requires 'ring'"
    ):
        SelfAttention(8, 4, over="ulysses", balanced=True, arrangement=here)

"""How layers find their mode; what they start from; what they refuse; and a tensor mode of one's own."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colonnade.nn
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, PlacementError
from colonnade.nn.layer import ARRANGEMENT, Arrangement, Spread, Whole, arrange
from colonnade.nn.layer.layer_norm import LayerNorm, RMSNorm
from colonnade.parallel import collectives
from colonnade.parallel.placement import check_ties, placement_of
from colonnade.testing import gather_weights, run_world
from tests.ranks import on_ranks


def tensor(size: int, mode: str, **more: object) -> dict[str, object]:
    return {"parallel": {"tensor": {"size": size, "mode": mode, **more}}}


def test_without_a_world_layers_are_torchs_own_in_weights_and_results():
    torch.manual_seed(3)
    ours = colonnade.nn.Linear(4, 6)
    torch.manual_seed(3)
    plain = nn.Linear(4, 6)
    x = torch.randn(2, 3, 4)
    assert torch.equal(ours.weight, plain.weight)
    assert torch.equal(ours(x), plain(x))
    assert isinstance(ours.arrangement, Whole)
    assert not placement_of(ours.weight).modes


@pytest.mark.parametrize(("parts", "bias"), [(1, True), (2, True), (2, False), (3, True)])
def test_a_layer_of_torch_is_taken_as_it_is(parts, bias):
    plain = nn.Linear(4, 6, bias)
    taken = colonnade.nn.Linear.from_module(plain, parts=parts)
    assert taken.weight.shape == ((6, 4) if parts == 1 else (parts, 6 // parts, 4))
    assert taken.bias is None if not bias else taken.bias.shape == taken.weight.shape[:-1]
    x = torch.randn(2, 3, 4)
    assert torch.equal(taken(x), plain(x))
    if parts > 1:
        torch.testing.assert_close(torch.cat(taken(x, each=True), -1), plain(x))
    assert taken.weight.requires_grad
    assert not colonnade.nn.Linear.from_module(plain.requires_grad_(False)).weight.requires_grad
    assert colonnade.nn.HiddenParameter(torch.ones(3)).weight.requires_grad
    with pytest.raises(PlacementError, match=r"'0.weight' and '1.weight' come from one full parameter"):
        check_ties([nn.Sequential(*(colonnade.nn.Linear.from_module(plain.requires_grad_()) for _ in range(2)))])
    with pytest.raises(ConfigError, match="cannot be divided into 4 equal parts"):
        colonnade.nn.Linear.from_module(plain, parts=4)


def test_dropout_and_embeddings_of_torch_are_taken_with_their_settings():
    dropout = colonnade.nn.Dropout.from_module(nn.Dropout(0.3, inplace=True), side="inner")
    assert (dropout.p, dropout.inplace, dropout.side) == (0.3, True, "inner")
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(ConfigError, match="cannot be sharded"):
            colonnade.nn.Embedding.from_module(nn.Embedding(4, 4, **option))
    position = colonnade.nn.PositionEmbedding(6, 4)
    assert torch.equal(position(), position.weight)
    assert torch.equal(position(6), position.weight)
    assert torch.equal(position(2), position.weight[:2])
    held = colonnade.nn.HiddenParameter(torch.arange(3.0))
    assert held() is held.weight


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": "rows"}, "'column' and 'row'"),
        ({"split": "row", "gather_output": True}, "already full"),
        ({"input_is_parallel": False}, "takes a full input"),
        ({"parts": 2, "split": "row"}, r"parts=2, but several weights"),
        ({"parts": 2, "gather_output": True}, r"parts=2, but several weights"),
        ({"parts": 3}, ""),
        ({"split": "row"}, ""),
        ({"split": "row", "input_is_parallel": False}, ""),
        ({"gather_output": True}, ""),
    ],
    ids=str,
)
def test_which_linear_layers_there_are(options, said):
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        colonnade.nn.Linear(4, 6, **options)


@pytest.mark.parametrize("bias", [True, False])
def test_a_gated_mlp_multiplies_what_its_two_parts_give(bias):
    mlp = colonnade.nn.MLP(4, 6, gated=True, bias=bias, activation=torch.sigmoid)
    x = torch.randn(2, 3, 4)
    gate, up = F.linear(x, mlp.up.weight.flatten(0, 1), mlp.up.bias.flatten() if bias else None).chunk(2, -1)
    torch.testing.assert_close(mlp(x), F.linear(gate.sigmoid() * up, mlp.down.weight, mlp.down.bias))
    plain = colonnade.nn.MLP(4, 6, bias=bias)
    assert plain.up.weight.shape == (6, 4)
    assert (plain.up.bias is None) == (plain.down.bias is None) == (not bias)


def test_names_are_there_and_slips_are_not():
    assert {"Linear", "Embedding", "LayerNorm", "Classifier", "CrossEntropyLoss", "partition_input"} <= set(
        dir(colonnade.nn)
    )
    assert colonnade.nn.lr_scheduler.CosineAnnealingLR
    with pytest.raises(AttributeError, match="Lineer"):
        colonnade.nn.Lineer  # noqa: B018


class Parts(nn.Module):
    def __init__(self, arrangement: Arrangement) -> None:
        super().__init__()
        self.embedding = colonnade.nn.Embedding(8, 8, arrangement=arrangement)
        self.norm = colonnade.nn.LayerNorm(8, arrangement=arrangement)
        self.attention = colonnade.nn.SelfAttention(8, 2, arrangement=arrangement)
        self.mlp = colonnade.nn.MLP(8, 16, arrangement=arrangement)
        self.position = colonnade.nn.PositionEmbedding(4, 8, arrangement=arrangement)


def _start(config: dict[str, object]) -> dict[str, Tensor]:
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(11)
        return gather_weights(Parts(arrange(gpc)), gpc)


@pytest.mark.parametrize("config", [tensor(2, "1d"), pytest.param(tensor(4, "2d"), marks=pytest.mark.slow)], ids=str)
def test_the_first_weights_do_not_depend_on_the_mode(config):
    torch.manual_seed(11)
    plain = dict(Parts(Whole(ParallelContext())).named_parameters())
    found = run_world(config["parallel"]["tensor"]["size"], _start, config).values[0]
    assert set(found) == set(plain)
    for name, parameter in plain.items():
        assert torch.equal(found[name], parameter.double()), name


def _refused_by_lines() -> list[str]:
    messages = []
    with launch(tensor(2, "1d"), context=ParallelContext(), verbose=False) as gpc:
        here, split = arrange(gpc), arrange(gpc, sequence_split=True)
        for build in (
            lambda: colonnade.nn.SelfAttention(4, 1, arrangement=here),
            lambda: colonnade.nn.SelfAttention(4, 2, kv_heads=1, arrangement=here),
            lambda: colonnade.nn.Linear(4, 4, split="row", arrangement=split)(torch.zeros(2, 3, 2)),
            lambda: colonnade.nn.Classifier(4, 6, weight=nn.Parameter(torch.zeros(6, 4)), arrangement=here),
            lambda: colonnade.nn.CrossEntropyLoss(arrangement=here)(
                torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64)
            ),
        ):
            with pytest.raises((PlacementError, ConfigError)) as caught:
                build()
            messages.append(str(caught.value))
        assert colonnade.nn.Linear(4, 4, split="row", arrangement=here)(torch.zeros(2, 3, 2)).shape == (2, 3, 4)
    return messages


def test_what_cannot_be_split_is_said_when_it_is_built():
    messages = run_world(2, _refused_by_lines).values[0]
    wanted = (
        "heads=1 leaves some ranks of ParallelMode.PARALLEL_1D without heads. Use fewer ranks",
        "kv_heads=1 leaves some ranks",
        "sequence of size 3",
        "Embedding(6, 4)",
        "do not fit",
    )
    for message, part in zip(messages, wanted, strict=True):
        assert part in message, message


@on_ranks(2)
def test_a_copy_of_a_layer_lives_in_the_same_world():
    with launch(tensor(2, "1d"), context=ParallelContext(), verbose=False) as gpc:
        layer = colonnade.nn.MLP(4, 8, arrangement=arrange(gpc))
        again = copy.deepcopy(layer)
        assert again.up.arrangement is layer.up.arrangement
        assert placement_of(again.up.weight) == placement_of(layer.up.weight)
        x = torch.randn(2, 3, 4)
        assert torch.equal(layer(x), again(x))


class Halves(Arrangement):
    """A mode of one's own: column weights split as in 1d, results always whole."""

    outer = inner = Spread()

    def weight_modes(self, split):
        return ((ParallelMode.PARALLEL_1D,), ()) if split == "column" else ((), ())

    def product(self, x, weight, split):
        if split == "row":
            return F.linear(x, weight)
        y = F.linear(collectives.copy(x, ParallelMode.PARALLEL_1D, context=self.context), weight)
        return collectives.gather(y, ParallelMode.PARALLEL_1D, context=self.context)

    def embed(self, tokens, weight, rows, padding):
        raise NotImplementedError


@on_ranks(2)
def test_an_arrangement_of_ones_own_is_found_by_its_mode():
    ARRANGEMENT.remove("1d")
    ARRANGEMENT.register_module("1d")(Halves)
    with launch(tensor(2, "1d"), context=ParallelContext(), verbose=False) as gpc:
        plain = nn.Linear(4, 6, bias=False)
        layer = colonnade.nn.Linear.from_module(plain, arrangement=arrange(gpc))
        assert layer.weight.shape == (3, 4)
        x = torch.randn(2, 3, 4)
        assert torch.allclose(layer(x), plain(x))
        assert torch.equal(gather_weights(layer, gpc)["weight"], plain.weight.double())


# -- norm -------------------------------------------------------------------------------------------------
# Norms in a single process are those of torch; `test_parity.py` compares sharded ones.


@pytest.mark.parametrize("ours", [LayerNorm, RMSNorm])
def test_only_a_norm_over_one_dimension_is_taken(ours):
    with pytest.raises(ConfigError, match=r"a norm over the dimensions \(2, 3\) cannot be converted"):
        ours.from_module(getattr(nn, ours.__name__)((2, 3)))

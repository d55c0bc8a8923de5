"""What is wrong with a plan is said by name, before anything is cut, and by every rank; what names cannot tell, in the first step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade import parallelize
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ColonnadeError, ConfigError, PlacementError
from colonnade.hf.plan_checks import check_entries
from colonnade.hf.plans import fits, resolve
from colonnade.parallel.split import Split
from tests.hf.plans.models import (
    CASES,
    HIDDEN,
    MLP,
    PACKED,
    PLAN,
    GatedMLP,
    Model,
    build,
    packed_model,
    tokens,
)
from tests.ranks import on_ranks

TENSOR = {"tensor": {"size": 2, "mode": "1d"}}


class OddHeads(nn.Module):
    """Three heads of four features: 12 features, which 2 ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.q, self.o = 4, nn.Linear(8, 12), nn.Linear(12, 8)


class Bert(nn.Module):
    """Whose last layer of attention is one module further out."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"query": nn.Linear(8, 8)})
        self.output = nn.ModuleDict({"dense": nn.Linear(8, 8)})


def heads() -> nn.Module:
    return nn.ModuleDict({"attention": OddHeads()})


def tied_to_a_convolution() -> nn.Module:
    model: Any = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4), "other": nn.Conv1d(4, 8, 1)})
    model.up.weight = model.other.weight
    return model


class Scaled(nn.Linear):
    """With a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def pair(change: Callable[[nn.Linear], Any] = lambda layer: layer, **options: Any) -> Callable[[], nn.Module]:
    """Two layers, of which the first is another."""
    return lambda: nn.ModuleDict({"up": change(nn.Linear(4, 8, **options)), "down": nn.Linear(8, 4)})


def quantised(layer: nn.Linear) -> nn.Linear:
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    return layer


def one_layer_twice() -> nn.Module:
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)
    return nn.ModuleDict({"up": up, "down": down, "other": nn.ModuleDict({"first": up, "last": down})})


PLAN_OF_ATTENTION = {name: style for name, style in PLAN.items() if "attention" in name}
UP_DOWN = {"up": "colwise", "down": "rowwise"}


def packed(sections: Any) -> dict[str, Any]:
    return {**PACKED, "blocks.*.mlp.gate_up": {"style": "packed_colwise", "sections": sections}}


WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "a slip": (
        Model,
        {**PLAN, "block.*.mlp.up": "colwise"},
        r"'block\.\*\.mlp\.up' matches no .*Did you mean 'blocks\.\*\.mlp\.up'",
    ),
    "a prefix": (Model, {"blocks.*.up": "colwise"}, r"matches no .*Names in the model are blocks\.\*\.mlp\.up"),
    "two styles": (
        Model,
        {**PLAN, "blocks.0.mlp.up": "rowwise"},
        r"'blocks\.0\.mlp\.up' two styles\. The pattern .*'colwise', and .*'rowwise'",
    ),
    "unknown": (Model, {"norm": "colwize"}, r"'norm' the unknown style 'colwize'; .*packed_rowwise.*'colwise'\?"),
    "no row": (
        Model,
        {"blocks.*.mlp.up": "colwise"},
        r"'blocks\.0\.mlp\.up' is 'colwise', but no .* 'blocks\.0\.mlp' is 'rowwise'.*'blocks\.0\.mlp\.down'",
    ),
    "no column": (
        Model,
        {"blocks.*.mlp.down": "rowwise"},
        r"'blocks\.0\.mlp\.down' is 'rowwise', but .*no layer produces its sharded input",
    ),
    "heads": (
        heads,
        {"attention.q": "colwise", "attention.o": "rowwise"},
        r"'attention\.q' has 3 heads of 4 features, but tensor size 2",
    ),
    "features": (
        lambda: nn.ModuleDict({"up": nn.Linear(4, 7), "down": nn.Linear(7, 4)}),
        {"up": "colwise", "down": "rowwise"},
        r"'up': 7 features .* cannot be sharded evenly over the 2 ranks",
    ),
    "no linear": (
        Model,
        {"norm": "colwise_gather_output"},
        r"'norm' is a LayerNorm, but the TP plan gives it a style for nn\.Linear",
    ),
    "sections": (
        packed_model,
        {**PACKED, "blocks.*.mlp.gate_up": {"style": "packed_colwise", "sections": (40, 40)}},
        r"sections=\(40, 40\) of the TP plan do not add up to 64",
    ),
    "no section": (
        packed_model,
        packed(0),
        r"'blocks\.0\.mlp\.gate_up': .*sections=0.* number of equal sections, or .*lengths",
    ),
    "sections below zero": (packed_model, packed((96, -32)), r"'blocks\.0\.mlp\.gate_up': .*sections=\(96, -32\)"),
    "sections in words": (packed_model, packed("two"), r"sections='two'"),
    "sections that are none": (packed_model, packed(()), r"sections=\(\)"),
    "equal sections": (packed_model, packed(3), r"sections=3 of the TP plan do not add up to 64"),
    "an option": (
        pair(),
        {**UP_DOWN, "up": {"style": "colwise", "section": 2}},
        r"'up' .*'section'; 'colwise' takes .*'sections'.*Did you mean 'sections'",
    ),
    "an option of another": (
        Model,
        {**PLAN, "norm": {"style": "replicate", "sections": 2}},
        r"'norm' the unknown option 'sections'\. The options of 'replicate' are 'divide'",
    ),
    "no style": (pair(), {"up": {"stile": "colwise"}}, r"'up' the unknown option 'stile'; .*Did you mean 'style'"),
    "divide in one word": (
        Model,
        {**PLAN, "blocks.*.attention": {"divide": "heads"}},
        r"'blocks\.0\.attention': divide='heads'.*\['heads'\]",
    ),
    "a weight for its layer": (
        pair(bias=False),
        {"up.weight": "colwise", "down.weight": "rowwise"},
        r"'up\.weight' is a parameter of the Linear 'up', .*name 'up'.*'down\.weight' is",
    ),
    "words of an embedding": (
        Model,
        {**PLAN, "embedding.weight": "colwise"},
        r"'embedding\.weight' is a parameter of the Embedding 'embedding', .*name 'embedding'",
    ),
    "one layer, two styles": (
        one_layer_twice,
        {**UP_DOWN, "other.first": "colwise_gather_output"},
        r"'up' and 'other\.first' are one module, .*'colwise' .*'colwise_gather_output'",
    ),
    "a parametrization": (
        pair(nn.utils.parametrizations.weight_norm),
        UP_DOWN,
        r"'up'.* 'weight' is not a parameter.*weight_norm.*remove",
    ),
    "an old weight norm": (pair(nn.utils.weight_norm), UP_DOWN, r"'up'.* 'weight' is not a parameter"),
    "a lazy layer": (lambda: nn.ModuleDict({"up": nn.LazyLinear(8), "down": nn.Linear(8, 4)}), UP_DOWN, r"'up'.*lazy"),
    "integers": (pair(quantised), UP_DOWN, r"'up'.*'weight' has dtype torch\.int8"),
    "a forward pass of its own": (
        lambda: nn.ModuleDict({"up": Scaled(4, 8), "down": nn.Linear(8, 4)}),
        UP_DOWN,
        r"'up' is a Scaled with a custom forward pass",
    ),
    "stages": (lambda: Split([nn.Linear(2, 2)]), {}, r"takes the full model, .*not a Split"),  # type: ignore[arg-type, return-value]
    "a tie": (
        tied_to_a_convolution,
        {"up": "colwise", "down": "rowwise"},
        r"'up\.weight' and 'other\.weight' are one tied parameter, .*would untie the two",
    ),
    "a tie cut twice": (
        lambda: Model(tied=True),
        {**PLAN, "embedding": "embedding_colwise", "head": "colwise_gather_output"},
        r"shares 'weight' with another layer",
    ),
    "attention of torch": (
        lambda: nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)}),
        {"a.out_proj": "rowwise_split_input"},
        r"'a', an nn\.MultiheadAttention, which reads",
    ),
    "summed twice": (
        Model,
        {**PLAN, "blocks.*.mlp": "all_reduce"},
        r"'blocks\.0\.mlp' has the style 'all_reduce', .*'blocks\.0\.mlp\.up'",
    ),
    "sequence": (
        Model,
        {**PLAN, "norm": "sequence_parallel"},
        r"'norm' the style 'sequence_parallel', but activations between blocks are replicated",
    ),
    "divide": (
        Model,
        {**PLAN, "blocks.*.attention": {"divide": ("heads",)}},
        r"'heads' is None, which the tensor size 2 does not divide",
    ),
    "no plan": (Model, None, r"Model has no TP plan"),
}


@on_ranks(2)
def test_every_wrong_plan_is_named_by_every_rank():
    with launch({"parallel": TENSOR}, context=ParallelContext(), verbose=False) as gpc:
        for name, (made, plan, said) in WRONG.items():
            with pytest.raises(ColonnadeError) as raised:
                parallelize(made(), plan, context=gpc)
            assert re.search(said, str(raised.value), re.DOTALL), (name, str(raised.value))
        model = build()
        once = parallelize(model, PLAN, context=gpc)
        with pytest.raises(PlacementError, match=r"Model was already passed to parallelize.*once"):
            parallelize(once, PLAN, context=gpc)
        with pytest.raises(PlacementError, match="already sharded"):
            parallelize(
                nn.ModuleDict({"inside": once}), {f"inside.{name}": each for name, each in PLAN.items()}, context=gpc
            )
        bert = nn.ModuleDict({"attention": Bert()})
        plan = {"attention.inside.query": "colwise", "attention.output.dense": "rowwise"}
        check_entries(resolve(plan, bert), bert, gpc)


class Mixing(MLP):
    """A softmax over all features between its two layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


class Flat(Model):
    """Whose attention has as many features as its blocks: queries, keys and values, cut as if they were one weight, fit."""

    def __init__(self) -> None:
        super().__init__(mlp=GatedMLP)


@on_ranks(2)
def test_a_sample_shows_what_names_cannot_tell():
    """What only values tell, by one pass on a sample; plans that are right pass, in one stage and in two."""
    gathered = {"blocks.*.mlp.up": "colwise_gather_output", "blocks.*.mlp.down": "rowwise_split_input"}
    mixing = lambda: Model(mlp=Mixing)  # noqa: E731
    sections = {"style": "packed_colwise", "sections": (HIDDEN, HIDDEN)}
    wrong = [
        (mixing, PLAN, "down"),
        (Flat, {**PLAN_OF_ATTENTION, "blocks.*.mlp.gate_up": "colwise", "blocks.*.mlp.down": "rowwise"}, "down"),
        (packed_model, {**PACKED, "blocks.*.attention.qkv": sections}, "o_proj"),
    ]
    with launch({"parallel": TENSOR}, context=ParallelContext(), verbose=False) as gpc:
        for made, plan, layer in wrong:
            said = rf"with this TP plan the output of 'blocks\.0\.(attention|mlp)\.{layer}' for the sample differs.*packed_colwise"
            with pytest.raises(PlacementError, match=said):
                parallelize(build(made), plan, sample=tokens(2), context=gpc)
            parallelize(build(made), plan, context=gpc)  # nobody can see it without one
        for made, plan in [*CASES.values(), (mixing, {**PLAN_OF_ATTENTION, **gathered})]:
            model = build(made).train()
            parallelize(model, plan, sample=(tokens(2),), context=gpc)
            assert model.training
            assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.slow
@on_ranks(4)
def test_modes_that_cut_otherwise_are_refused():
    config = {"parallel": {"tensor": {"size": 4, "mode": "2d"}}}
    said = r"tensor\.mode is '2d', but a TP plan requires mode '1d'"
    with launch(config, context=ParallelContext(), verbose=False) as gpc, pytest.raises(ConfigError, match=said):
        parallelize(build(), PLAN, context=gpc)


def test_a_star_stands_for_one_part_of_a_name():
    assert fits("blocks.*.up", "blocks.11.up")
    assert not fits("blocks.*.up", "blocks.1.mlp.up")
    assert fits("norm?", "norm1")
    assert not fits("*", "a.b")
    assert all(resolve(plan, made()) for made, plan in CASES.values())

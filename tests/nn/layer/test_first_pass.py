"""Activations that lie otherwise than a layer takes them: refused by name, on every rank, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import PlacementError
from colonnade.nn import layer as L
from colonnade.nn.layer import Arrangement, Whole, arrange, gather_output, partition_input, spread, unsplit_sequence
from colonnade.nn.layer.spread import FirstPass
from colonnade.parallel.placement import place
from colonnade.proof.planner.ranks import fake_rank
from colonnade.testing import run_world
from tests.ranks import on_ranks

HIDDEN, WORDS = 16, 8


class Way(nn.Module):
    """The layers in a row, with a way in and a way out."""

    def __init__(self, here: Arrangement, *layers: nn.Module, enter: bool = True, leave: Any = "outer") -> None:
        super().__init__()
        self.here, self.layers, self.enter, self.leave = here, nn.ModuleList(layers), enter, leave

    def forward(self, x: Tensor) -> Tensor:
        x = partition_input(x, arrangement=self.here) if self.enter else x
        for layer in self.layers:
            x = layer(x)
        return x if self.leave is None else gather_output(x, side=self.leave, arrangement=self.here)


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Positions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(4))


class Tokens(nn.Module):
    """Words out of the whole input, by a plain embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x[..., 0].abs().long() % WORDS)


class Unsplit(nn.Module):
    def __init__(self, here: Arrangement) -> None:
        super().__init__()
        self.here = here

    def forward(self, x: Tensor) -> Tensor:
        return unsplit_sequence(x, arrangement=self.here)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def placed(layer: Scale, here: Arrangement) -> Scale:
    place(layer.scale, here.outer.along_hidden(), (HIDDEN,))
    return layer


Build = Callable[[Arrangement], nn.Module]


def linear(here: Arrangement, **options: Any) -> L.Linear:
    return L.Linear(HIDDEN, HIDDEN, arrangement=here, **options)


def row(here: Arrangement) -> L.Linear:
    return linear(here, split="row")


SQUARE: list[tuple[Build, str]] = [
    (
        lambda h: Way(h, linear(h), nn.Linear(8, 8), row(h)),
        r"'layers.1' is a plain Linear.*\('layers.1.weight' is not placed\).*the output of Linear 'layers.0'",
    ),
    (
        lambda h: Way(h, frozen(nn.Linear(8, 8)), linear(h)),
        r"'layers.0' is a plain Linear.*the output of partition_input",
    ),
    (lambda h: Way(h, linear(h), frozen(nn.LayerNorm(8)), row(h)), r"'layers.1' is a plain LayerNorm"),
    (lambda h: Way(h, linear(h), nn.Linear(8, 8), leave=None), r"'layers.1' is a plain Linear"),
    (lambda h: Way(h, nn.LayerNorm(8), linear(h)), r"'layers.0' is a plain LayerNorm.*the output of partition_input"),
    (lambda h: Way(h, linear(h), Scale(8)), r"gather_output takes.*computed with 'layers.1.scale'"),
    (
        lambda h: Way(h, linear(h), Positions(8), row(h)),
        r"Linear 'layers.2' takes.*computed with 'layers.1.table.weight'",
    ),
    (
        lambda h: Way(h, Tokens(8), linear(h), enter=False),
        r"Linear 'layers.1' takes.*computed with 'layers.0.table.weight'",
    ),
    (lambda h: Way(h, nn.Linear(16, 16), linear(h), enter=False), r"computed with 'layers.0.(weight|bias)'"),
    (
        lambda h: Way(h, linear(h), enter=False),
        r"Linear 'layers\.0' takes 8 of 16 features on this rank.*but the input has 16",
    ),
    (lambda h: Way(h, L.LayerNorm(HIDDEN, arrangement=h), enter=False), r"LayerNorm 'layers.0' takes 8 of 16"),
    (
        lambda h: Way(h, linear(h), Way(h, row(h))),
        r"partition_input takes.*replicated, but got the output of Linear 'layers.0'",
    ),
    (lambda h: Way(h, linear(h), row(h)), ""),
    (lambda h: Way(h, linear(h), nn.ReLU(), placed(Scale(8), h), row(h)), ""),
    (lambda h: nn.Sequential(nn.Linear(16, 16), Way(h, linear(h), row(h)), nn.LayerNorm(16)), ""),
    # A sequence that gets a part, and has a plain layer behind the way out.
    (lambda h: Way(h, nn.Sequential(Way(h, linear(h), row(h), enter=False), nn.LayerNorm(16)), leave=None), ""),
    (lambda h: Way(h, L.Linear(HIDDEN, 2, arrangement=h), L.LayerNorm(2, arrangement=h)), ""),
]
LINE: list[tuple[Build, str]] = [
    (
        lambda h: Way(h, linear(h), linear(h)),
        r"Linear 'layers.1' takes.*is replicated, but got the output of Linear 'layers.0'",
    ),
    (lambda h: Way(h, linear(h), nn.Linear(16, 16)), r"'layers.1' is a plain Linear.*sharded, hidden over PARALLEL_1D"),
    (lambda h: Way(h, linear(h), nn.PReLU(), row(h)), r"'layers.1' is a plain PReLU"),
    (
        lambda h: Way(h, linear(h, gather_output=True), row(h)),
        r"Linear 'layers.1' takes.*is sharded, hidden over PARALLEL_1D",
    ),
    (lambda h: Way(h, row(h)), r"Linear 'layers.0' takes 4 of 16 features"),
    (
        lambda h: Way(h, linear(h), L.MLP(HIDDEN, 8, gated=True, arrangement=Whole(h.context))),
        r"Linear 'layers.1.up' takes.*is replicated, but got the output of Linear 'layers.0'",
    ),
    (
        lambda h: Way(h, linear(h), Unsplit(h)),
        r"unsplit_sequence takes.*is replicated, but got the output of Linear 'layers.0'",
    ),
    (lambda h: Way(h, linear(h)), r"gather_output takes an activation that is replicated"),
    (lambda h: Way(h, L.MLP(16, 32, arrangement=h), nn.LayerNorm(16), linear(h), leave="inner"), ""),
    (
        lambda h: nn.Sequential(
            Tokens(16), Way(h, linear(h, gather_output=True), nn.Linear(16, 16), linear(h), row(h))
        ),
        "",
    ),
]
IN_SEQUENCE: list[tuple[Build, str]] = [
    (
        lambda h: Way(h, L.LayerNorm(16, arrangement=h), nn.LayerNorm(16)),
        r"'layers.1' is a plain LayerNorm.*sequence over",
    ),
    (lambda h: Way(h, L.LayerNorm(16, arrangement=h), L.MLP(16, 32, arrangement=h)), ""),
    (lambda h: Way(h, L.LayerNorm(16, arrangement=h), Unsplit(h), nn.LayerNorm(16), leave=None), ""),
]
CUBE: list[tuple[Build, str]] = [
    (
        lambda h: Way(h, linear(h), linear(h)),
        r"Linear 'layers.1' takes.*hidden over PARALLEL_3D_OUTPUT, but got the output of Linear",
    ),
    (lambda h: Way(h, linear(h), nn.Linear(8, 8), row(h)), r"'layers.1' is a plain Linear"),
    (lambda h: Way(h, linear(h), row(h)), ""),
    (lambda h: Way(h, linear(h, gather_output=True), linear(h), leave="inner"), ""),
]


def _first_pass_hooks(model: nn.Module) -> int:
    """How many hooks of this check the modules of a model have."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return sum(getattr(hook, "_act", hook).__module__ == spread.__name__ for hook in hooks)


def _attempts(mode: str, size: int, cases: str, sequence_split: bool = False, **more: Any) -> None:
    with launch(
        {"parallel": {"tensor": {"size": size, "mode": mode, **more}}}, context=ParallelContext(), verbose=False
    ) as gpc:
        for build, said in globals()[cases]:
            model = build(arrange(gpc, sequence_split))
            engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
            x = torch.randn(8, 4, HIDDEN)
            if said:
                with pytest.raises(PlacementError, match=said):
                    engine(x)
                engine.close()
            else:
                engine.backward(engine(x).square().mean())
                engine.step()
                assert _first_pass_hooks(model) == 0
                assert not spread._watched
                engine.close()


@pytest.mark.slow
@on_ranks(4)
def test_a_part_is_not_taken_for_the_whole_nor_an_inner_activation_for_an_outer_one():
    _attempts("2d", 4, "SQUARE")
    _attempts("2.5d", 4, "SQUARE", depth=1)
    _attempts("1d", 4, "LINE")
    _attempts("1d", 4, "IN_SEQUENCE", sequence_split=True)


@pytest.mark.slow
def test_two_default_linears_in_a_row_are_refused_on_a_cube():
    run_world(8, _attempts, "3d", 8, "CUBE")


@on_ranks(2)
def test_whole_logits_are_not_taken_for_a_part_of_them():
    with launch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, context=ParallelContext(), verbose=False) as gpc:
        here = arrange(gpc)
        model = nn.Sequential(linear(here, gather_output=True))
        engine = initialize(
            model, lambda p: torch.optim.SGD(p, lr=0.1), L.CrossEntropyLoss(arrangement=here), context=gpc
        )[0]
        logits = engine(torch.randn(8, HIDDEN))
        with pytest.raises(
            PlacementError,
            match=r"CrossEntropyLoss takes.*sharded, hidden over PARALLEL_1D, but got the output of Linear",
        ):
            engine.criterion(logits, torch.zeros(8, dtype=torch.long))
        fused = L.LinearCrossEntropyLoss(arrangement=here)
        labels, weight = torch.zeros(8, dtype=torch.long), torch.zeros(4, HIDDEN)
        assert fused(logits, weight, labels).isfinite()
        with pytest.raises(
            PlacementError, match=r"LinearCrossEntropyLoss takes.*is replicated, but got the output of partition_input"
        ):
            fused(partition_input(logits, side="inner", arrangement=here), weight, labels)
        engine.close()


def _watches() -> Any:
    config = load_config({"parallel": {"tensor": {"size": 2, "mode": "1d"}}})
    context = ParallelContext()
    return context, fake_rank(config, 2, 0, context)


def test_who_is_watched_and_until_when(monkeypatch):
    context, rank = _watches()
    with rank:
        here = arrange(context)
        FirstPass(nn.Sequential(linear(Whole(context))), context)  # nothing is split
        assert not spread._watched
        compiled = nn.Sequential(linear(here), nn.ReLU())
        compiled[1]._compiled_call_impl = print  # as nn.Module.compile leaves it
        FirstPass(compiled, context)
        assert not spread._watched
        model = nn.Sequential(linear(here), nn.LayerNorm(8))
        first, second = FirstPass(model, context), FirstPass(model, context)
        assert spread._watch(here) is second
        assert spread._watch(Whole(ParallelContext())) is None
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            assert spread._watch(here) is None
        assert len(model[1]._forward_pre_hooks) == 2
        first.close()  # of an engine that was built before: the other one goes on
        assert spread._watch(here) is second
        assert len(model[1]._forward_pre_hooks) == 1
        second.close()
        second.close()
        assert spread._watch(here) is None
        assert not spread._watched
        FirstPass(model, context)  # nobody keeps it
        FirstPass(nn.Sequential(), context).close()
        assert not spread._watched

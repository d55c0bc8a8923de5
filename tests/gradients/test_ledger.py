"""The ledger: what it prints, what it refuses, and that every rank refuses together."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.engine.gradient_handler import BaseGradientHandler, PlannedGradientHandler
from colonnade.errors import ConfigError, LedgerError, RegistryError
from colonnade.parallel.placement import Shard, place
from colonnade.registry import GRADIENT_HANDLER
from colonnade.testing import run_world


def model():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    for layer in layers[:2]:
        place(layer.weight, {ParallelMode.TENSOR: Shard(0)}, shape=(8, 4))
    return layers


def _build(config: dict) -> tuple[str, str, list[str]] | str:
    """(ledger as text, as JSON, handlers in order), or the error."""
    with launch({"parallel": {"tensor": 2}, **config}, context=ParallelContext(), verbose=False) as gpc:
        try:
            engine = initialize(model(), lambda p: torch.optim.SGD(p, lr=1), context=gpc)[0]
        except (LedgerError, ConfigError, RegistryError) as error:
            return f"{type(error).__name__}: {error}"
        names = [type(handler).__name__ for handler in engine.gradient_handlers]
        engine.close()
        return str(engine.ledger()), engine.ledger().to_json(), names


def _build_all(configs: list[dict]) -> list[tuple[str, str, list[str]] | str]:
    return [_build(config) for config in configs]


@pytest.fixture(scope="module")
def built() -> dict[str, list]:
    """Every config of this page on the same four ranks: what each rank saw."""
    configs = {**GOOD, **{name: config for name, (config, _) in BAD.items()}}
    ranks = run_world(4, _build_all, [*configs.values()]).values
    return {name: [rank[at] for rank in ranks] for at, name in enumerate(configs)}


def test_it_prints_patterns_and_gives_json(built):
    text, as_json, handlers = built["plain"][0]
    assert handlers == ["DataParallelGradientHandler"]
    assert text.splitlines()[0].split() == ["parameters", "n", "over", "ranks", "divided", "by", "done", "by"]
    assert "*.weight    3  DATA  [0, 2]  2           DataParallelGradientHandler" in text
    rows = json.loads(as_json)
    assert len(rows) == 6
    assert rows[0] == {
        "parameter": "0.weight",
        "mode": "DATA",
        "ranks": [0, 2],
        "divisor": 2,
        "done_by": "DataParallelGradientHandler",
        "waived": False,
    }


def test_automatic_handlers_run_before_named_ones(built):
    text, _, handlers = built["named"][0]
    assert handlers == ["DataParallelGradientHandler", "LedgerTouch", "LedgerWeights"]
    assert "LedgerWeights" in text
    assert "LedgerTouch" not in text


@GRADIENT_HANDLER.register_module
class LedgerTouch(BaseGradientHandler):
    """The seeds' handler: does something, reduces nothing."""

    def handle_gradient(self):
        self.done = True


@GRADIENT_HANDLER.register_module
class LedgerWeights(PlannedGradientHandler):
    """Takes the weights over DATA; the biases are left to the built-ins."""

    def reductions(self):
        return self.over(ParallelMode.DATA, "*.weight")


@GRADIENT_HANDLER.register_module
class LedgerHalf(PlannedGradientHandler):
    def reductions(self):
        return self.over(ParallelMode.DATA, divisor=4)


@GRADIENT_HANDLER.register_module
class LedgerTensor(PlannedGradientHandler):
    def reductions(self):
        return self.over(ParallelMode.TENSOR, ["2.weight"])


@GRADIENT_HANDLER.register_module
class LedgerTypo(PlannedGradientHandler):
    def reductions(self):
        return self.over(ParallelMode.DATA, "0.weigth")


@GRADIENT_HANDLER.register_module
class LedgerOneRank(BaseGradientHandler):
    """Wrong on rank 3 only, where it drops a gradient by a factor nobody can explain."""

    def handle_gradient(self):
        if self.context.get_global_rank() == 3:
            next(self._model.parameters()).grad.mul_(0.123456)


@GRADIENT_HANDLER.register_module
class LedgerNone(BaseGradientHandler):
    def handle_gradient(self):
        next(self._model.parameters()).grad = None


@GRADIENT_HANDLER.register_module
class LedgerByHand(BaseGradientHandler):
    """The ancestor's way: a mean over DATA, written by hand; it is looked at and found right."""

    def handle_gradient(self):
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.context.get_group(ParallelMode.DATA))
                parameter.grad /= self.context.data_parallel_size


def test_a_handler_written_by_hand_is_looked_at_and_takes_its_rows(built):
    text, _, handlers = built["by hand"][1]
    assert handlers == ["LedgerByHand"]
    assert "DataParallelGradientHandler" not in text


GOOD = {
    "plain": {},
    "named": {"gradient_handlers": [{"type": "LedgerTouch"}, {"type": "LedgerWeights"}]},
    "by hand": {"gradient_handler": ["LedgerByHand"]},
    "waived biases": {"sync": {"waive": "*.bias"}},
    "all waived": {"gradient_handler": ["LedgerHalf"], "sync": {"waive": ["*"]}},
}
BAD = {
    "a wrong divisor": (
        {"gradient_handler": ["LedgerHalf"]},
        ["LedgerHalf", "divides by 4, but 2 ranks saw distinct data", "0.weight"],
    ),
    "one row by two": (
        {"gradient_handler": [{"type": "LedgerWeights"}, {"type": "DataParallelGradientHandler"}]},
        ["0.weight", "DataParallelGradientHandler", "but LedgerWeights does so, too"],
    ),
    "a wrong group": (
        {"gradient_handler": ["LedgerTensor"]},
        ["2.weight", "sums over TENSOR", "requires DATA [0, 2] / 2"],
    ),
    "no handler": (
        {"sync": {"automatic": False}},
        ["0.weight", "needs an all-reduce over DATA", "no handler performs it", "waive"],
    ),
    "a name of no parameter": (
        {"gradient_handler": ["LedgerTypo"]},
        ["'0.weigth' matches none", "Did you mean '0.weight'"],
    ),
    "one rank": ({"gradient_handler": ["LedgerOneRank"]}, ["not a sum over a group of any mode", "covers()"]),
    "None": ({"gradient_handler": ["LedgerNone"]}, ["set the gradient of 0.weight to None"]),
    "a name of no handler": (
        {"gradient_handler": ["LedgerWieghts"]},
        ["no gradient handler 'LedgerWieghts'", "Did you mean 'LedgerWeights'"],
    ),
    "a wrong argument": (
        {"gradient_handler": [{"type": "LedgerTouch", "x": 1}]},
        ["LedgerTouch could not be built with", "x"],
    ),
    "a wrong option": (
        {"gradient_handler": [{"type": "LedgerWeights", "bucket": 1}]},
        ["'bucket' is not an option of a gradient handler", "bucket_mb"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_on_every_rank_before_step_one(built, name):
    assert all(isinstance(message, str) for message in built[name])
    for part in BAD[name][1]:
        assert part in built[name][0]


def test_an_error_on_one_rank_is_told_to_the_others(built):
    messages = built["one rank"]
    assert messages[3].startswith("LedgerError: LedgerOneRank changed the gradient of 0.weight")
    assert messages[0].startswith("LedgerError: on rank 3 (this rank is 0): LedgerOneRank changed")


def test_waived_parameters_are_left_alone(built):
    text, _, _ = built["waived biases"][0]
    assert [line.split()[0] for line in text.splitlines() if "waived" in line] == ["*.bias"]
    text, _, handlers = built["all waived"][0]
    assert handlers == ["LedgerHalf"]
    assert {line.split("  ")[-1].strip() for line in text.splitlines()[1:]} == {"LedgerHalf (waived)"}

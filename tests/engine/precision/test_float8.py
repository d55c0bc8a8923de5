"""Float8: what is refused by name, which layers are taken, and training beside one process in fp64 (emulated, by torchao)."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.config.settings import Float8Settings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.engine.precision import _require_float8, _why_not_float8, convert_to_float8
from colonnade.errors import ConfigError
from colonnade.models import GPT
from colonnade.nn.layer import Classifier, Linear
from colonnade.parallel.split import split
from colonnade.testing import gather_weights, run_world

VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS, ROWS, STEPS = 32, 16, 64, 4, 2, 8, 3
CPU = torch.device("cpu")


def test_forms():
    assert Float8Settings.read(None) is None
    assert Float8Settings.read(False) is None
    assert Float8Settings.read(True) == Float8Settings()
    assert Float8Settings.read({"recipe": "rowwise", "skip": "first", "emulate": True}) == Float8Settings(
        "rowwise", ("first",), True
    )
    assert Float8Settings.read({"recipe": None, "skip": ["first", "last"]}) == Float8Settings(skip=("first", "last"))
    assert Float8Settings.read({"skip": None}) == Float8Settings()


def test_what_is_not_there_is_refused_by_name(monkeypatch):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"float8 needs torchao, which is not installed\. Run pip install torchao"):
        convert_to_float8(model, Float8Settings(emulate=True), CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.9 .* on cpu\. .*emulate=True"):
        convert_to_float8(model, Float8Settings(), CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ConfigError, match=r"recipe='rowwise' needs .* 9\.0 or above, but cuda:0 has 8\.9"):
        convert_to_float8(model, Float8Settings("rowwise"), torch.device("cuda:0"))
    least = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}  # as torchao says
    for recipe, needed in least.items():
        for found in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=found: found)
            with (
                nullcontext()
                if found >= needed
                else pytest.raises(ConfigError, match=rf"{recipe}'.* {needed[0]}\.{needed[1]} or above")
            ):
                _require_float8(Float8Settings(recipe), torch.device("cuda:0"))


def test_which_layers_are_taken():
    tied = nn.Embedding(32, 32).weight
    with launch({}, context=ParallelContext(), verbose=False):
        layers: dict[str, tuple[Any, str | None]] = {
            "blocks.0.up": (nn.Linear(32, 64), None),
            "blocks.0.own": (Linear(32, 64), None),
            "blocks.0.joint": (Linear(32, 48, parts=3), None),
            "classes": (Classifier(32, 64), "the classifier"),
            "lm_head": (nn.Linear(32, 64), "skipped"),
            "blocks.0.narrow": (nn.Linear(32, 24), "24 x 32 is no multiple of 16"),
            "blocks.0.low": (nn.Linear(24, 32), "32 x 24 is no multiple of 16"),
            "blocks.0.lm_heads": (nn.Linear(48, 32), None),
            "blocks.0.output": (nn.Linear(32, 64), "skipped"),
            "blocks.0.exact": (nn.Linear(32, 32).double(), "float64"),
        }
        cut = Linear(32, 32)
        cut.arrangement = type("Cut", (), {"multiplies_blocks": False})()
        layers["blocks.0.cut"] = cut, "Cut multiplies in several pieces"
        for name, (layer, reason) in layers.items():
            assert _why_not_float8(name, layer, Float8Settings().skip, {id(tied)}) == reason, name
    layer = nn.Linear(32, 32)
    layer.weight = tied
    assert _why_not_float8("last", layer, Float8Settings().skip, {id(tied)}) == "the classifier"
    assert _why_not_float8("blocks.0.up", nn.Linear(32, 32), ("blocks.0.*",), set()) == "skipped"
    assert _why_not_float8("lm_head", nn.Linear(32, 32), (), set()) is None


class StandIn:
    """As much of torchao as is called, of layers that stay as they are."""

    def __init__(self) -> None:
        self.converted: list[str] = []
        self.config: Any = None

    def convert(self, root: nn.Module, *, module_filter_fn: Any, config: Any) -> None:
        self.config = config
        self.converted += [name for name, module in root.named_modules() if module_filter_fn(module, name)]

    def modules(self) -> dict[str, Any]:
        @dataclass(frozen=True)
        class Config:
            recipe: str
            emulate: bool = False
            pad_inner_dim: bool = False

        product = SimpleNamespace(apply=lambda x, weight, how, config: (x @ weight) * how)
        layer = SimpleNamespace(linear_mm_config=2)
        made = {
            "torchao": {},
            "torchao.float8": {
                "Float8LinearConfig": SimpleNamespace(from_recipe_name=Config),
                "convert_to_float8_training": self.convert,
            },
            "torchao.float8.float8_linear": {
                "Float8Linear": SimpleNamespace(from_float=lambda linear, config: layer),
                "matmul_with_hp_or_float8_args": product,
            },
        }
        return {name: SimpleNamespace(**parts) for name, parts in made.items()}


@pytest.fixture
def stand_in(monkeypatch) -> StandIn:
    made = StandIn()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return made


@pytest.mark.parametrize("chunks", [False, True])
def test_chosen_layers_are_handed_to_torchao_and_ours_multiply_by_it(stand_in, caplog, chunks):
    with launch({}, context=ParallelContext(), verbose=False):
        logging.getLogger("colonnade").propagate = True
        caplog.set_level(logging.INFO, logger="colonnade")
        parts = {"plain": nn.Linear(32, 32), "own": Linear(32, 32), "head": nn.Linear(32, 32), "attention": nn.Tanh()}
        parts["kind"] = type("Kind", (nn.Linear,), {})(32, 32)  # uses its weight by itself
        parts |= {f"narrow{at}": nn.Linear(32, 24) for at in range(6 if chunks else 5)}
        table, model = nn.Embedding(32, 32), nn.ModuleDict(parts)
        model["tied"] = nn.Linear(32, 32)
        model["tied"].weight, model["table"] = table.weight, table
        shared = parts["own"].arrangement
        convert_to_float8(nn.ModuleList([model]) if chunks else model, Float8Settings(emulate=True), CPU)
        assert stand_in.converted == ["plain", "own"]
        assert (stand_in.config.recipe, stand_in.config.emulate, stand_in.config.pad_inner_dim) == (
            "tensorwise",
            True,
            True,
        )
        own, x = parts["own"], torch.ones(1, 32)
        assert own.arrangement is not shared  # others may have the same
        torch.testing.assert_close(own(x), 2 * x @ own.weight.T + own.bias)
        assert own.arrangement.multiply(x, own.weight, None).dtype is torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert own.arrangement.multiply(x, own.weight.bfloat16(), own.bias).dtype is torch.bfloat16
    assert "float8 (tensorwise, emulated): 2 linear layers" in caplog.text
    assert ("and 2 more" if chunks else "and 1 more") in caplog.text


def test_a_linear_layer_that_is_the_model_itself_is_let_alone(stand_in):
    convert_to_float8(nn.Linear(32, 32), Float8Settings(emulate=True), CPU)
    assert stand_in.converted == []


# -- with torchao -----------------------------------------------------------------------------------------


def batch(part: int, step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + part))
    return tokens[:, :-1], tokens[:, 1:]


def build(context: ParallelContext) -> GPT:
    torch.manual_seed(0)
    return GPT(VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS, tied=False, context=context)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def _trained(emulate: bool = True) -> list[tuple[str, float, int]]:
    """By case: how far the weights are from those of one process in fp64, as a share of the way they went.

    `emulate=False` multiplies in float8 on a GPU, where the other operations are in bf16.
    """
    found = []
    for parallel, more in (
        ({"tensor": {"size": 2, "mode": "1d"}}, {}),
        ({"data": 2}, {"zero": 1, "bf16": True}),
        ({"data": 2}, {"zero": 3, "bf16": True}),
        ({"pipeline": 2}, {"schedule": {"type": "OneFOneB", "num_microbatches": 2}}),
    ):
        config = {"parallel": parallel, "float8": {"emulate": emulate}, **more, **({} if emulate else {"bf16": True})}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            whole = build(gpc)
            model: Any = split(whole, num_stages=2) if "pipeline" in parallel else whole
            engine = initialize(model, sgd, whole.criterion(), context=gpc)[0]
            plain = build(ParallelContext()).double().to(gpc.device)
            begun = {name: value.detach().clone() for name, value in plain.named_parameters()}
            optimizer = sgd(plain.parameters())
            for step in range(STEPS):
                engine.zero_grad()
                engine.execute_schedule(iter([batch(gpc.get_local_rank(ParallelMode.DATA), step)]))
                engine.step()
                parts = [batch(part, step) for part in range(gpc.data_parallel_size)]
                x, y = (torch.cat(columns).to(gpc.device) for columns in zip(*parts, strict=True))
                optimizer.zero_grad()
                plain.criterion()(plain(x), y).backward()
                optimizer.step()
            weights = gather_weights(engine.model, gpc)
            way = torch.cat([(value.detach() - begun[name]).flatten() for name, value in plain.named_parameters()])
            off = torch.cat(
                [
                    (weights[name].to(value.device).double() - value).flatten()
                    for name, value in plain.named_parameters()
                ]
            )
            converted = sum(
                type(m).__name__ == "Float8Linear"
                or getattr(getattr(m, "arrangement", None), "multiply", None).__name__ == "multiply"
                for m in engine.model.modules()
                if hasattr(m, "weight") and hasattr(m, "in_features")
            )
            found.append((str(config), (off.norm() / way.norm()).item(), converted))
            engine.close()
    return found


@pytest.mark.long
def test_training_in_float8_stays_near_fp64():
    check_trained(run_world(2, _trained, timeout=120).values)


def check_trained(found: Sequence[list[tuple[str, float, int]]]) -> None:
    for config, error, converted in found[0]:
        assert 0.001 < error < 0.15, (config, error)
        assert converted == (4 * LAYERS if "pipeline" not in config else 4 * LAYERS // 2), config

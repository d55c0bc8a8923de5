"""Slots are numbered alike on every rank, whatever each of them holds; ties, layers and groups have one each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.config.settings import ClipSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.engine.stepper import Slots, number_slots
from colonnade.errors import ConfigError
from colonnade.parallel.placement import Tied, place
from colonnade.testing import run_world

NAMES = ["embed.weight", "layers.0.attn.1.weight", "layers.0.norm.bias", "layers.1.norm.bias", "head.weight", "scale"]


def numbered(names: list[str], **clip: Any) -> Slots:
    settings = ClipSettings.read({"max_norm": 1.0, **clip})
    assert settings is not None
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        return number_slots(names, settings, gpc)


@pytest.mark.parametrize("value", [None, 0, 0.0, {"max_norm": 0}, {"max_norm": 0, "norm_type": 1}])
def test_a_norm_of_zero_is_off_in_every_form(value: Any) -> None:
    assert ClipSettings.read(value) is None


def test_without_a_norm_only_groups_are_clipped() -> None:
    settings = ClipSettings.read({"max_norm": 0, "groups": {"head": {"params": "head.*", "max_norm": 1.0}}})
    assert settings is not None
    assert settings.method_options == {"max_norm": math.inf}


def test_one_slot_per_group_in_the_order_of_the_config_and_the_rest_last() -> None:
    slots = numbered(NAMES, groups={"z": {"params": "head.*"}, "a": {"params": ["embed.*", "scale"]}})
    assert slots.names == ("z", "a", "rest")
    assert slots.group_of == (0, 1, 2)
    assert slots.of_parameter == dict(zip(NAMES, [1, 2, 2, 2, 0, 1], strict=True))


def test_a_layer_is_a_name_up_to_its_first_number_else_the_module() -> None:
    slots = numbered([*NAMES, "0.weight", "0.1.weight", "0.attn.1.weight"], per="layer")
    by_name = {name: slots.names[at] for name, at in slots.of_parameter.items()}
    assert by_name == {
        "embed.weight": "embed",
        "layers.0.attn.1.weight": "layers.0",
        "layers.0.norm.bias": "layers.0",
        "layers.1.norm.bias": "layers.1",
        "head.weight": "head",
        "scale": "scale",
        "0.weight": "0",
        "0.1.weight": "0",
        "0.attn.1.weight": "0",
    }


def test_a_layer_with_parameters_of_two_groups_has_two_slots_with_two_names() -> None:
    slots = numbered(NAMES, per="layer", groups={"bias": {"params": "*.bias", "max_norm": 0.1}})
    assert slots.names == ("layers.0 (bias)", "layers.1", "embed", "head", "layers.0 (rest)", "scale")
    assert slots.group_of == (0, 0, 1, 1, 1, 1)
    assert slots.of_parameter["layers.0.norm.bias"] != slots.of_parameter["layers.0.attn.1.weight"]


def test_a_group_that_fits_nothing_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'tail' \(haed.weight\) matches no parameter.*Did you mean 'head.weight'"):
        numbered(NAMES, groups={"tail": {"params": "haed.weight"}})
    with pytest.raises(
        ConfigError, match=r"'tail' \(haed.weight, x\) matches no parameter.*Did you mean 'head.weight'"
    ):
        numbered(NAMES, groups={"first": {"params": "embed.*"}, "tail": {"params": ["haed.weight", "x"]}})


# -- on several ranks -------------------------------------------------------------------------------------


def _stages(per: str) -> tuple[Slots, str]:
    """Each of four stages has another layer, and the last stage no parameter at all."""
    settings = ClipSettings.read({"max_norm": 1.0, "per": per, "groups": {"first": {"params": "layers.0.*"}}})
    assert settings is not None
    with launch({"parallel": {"pipeline": 4}}, context=ParallelContext(), verbose=False) as gpc:
        rank = gpc.get_global_rank()
        names = [f"layers.{rank}.weight", f"layers.{rank}.bias"] if rank < 3 else []
        slots = number_slots(names, settings, gpc)
        wrong = ClipSettings.read({"max_norm": 1.0, "groups": {"none": {"params": "nothing"}}})
        assert wrong is not None
        try:
            number_slots(names, wrong, gpc)
        except ConfigError as error:
            return slots, str(error)
        return slots, ""


def _all_stages() -> dict[str, tuple[Slots, str]]:
    return {per: _stages(per) for per in ("group", "layer", "parameter")}


@pytest.fixture(scope="module")
def numbered_by_ranks() -> list[dict[str, tuple[Slots, str]]]:
    return run_world(4, _all_stages).values


@pytest.mark.parametrize("per", ["group", "layer", "parameter"])
def test_ranks_that_hold_other_layers_number_them_alike(numbered_by_ranks, per: str) -> None:
    values = [found[per] for found in numbered_by_ranks]
    assert len({(slots.names, slots.group_of) for slots, _ in values}) == 1
    names = values[0][0].names
    for rank, (slots, error) in enumerate(values):
        assert "group 'none' (nothing) matches no parameter of any rank" in error
        assert len(slots.of_parameter) == (2 if rank < 3 else 0)
        if per == "parameter":
            assert all(names[at] == name for name, at in slots.of_parameter.items())
        elif per == "layer":
            assert {names[at] for at in slots.of_parameter.values()} == ({f"layers.{rank}"} if rank < 3 else set())


class Stage(nn.Module):
    """A weight of its own, and one that is tied, under another name at each of the two stages."""

    def __init__(self, at: int) -> None:
        super().__init__()
        torch.manual_seed(at)
        self.own = nn.Linear(3, 3, bias=False).double()
        torch.manual_seed(7)
        self.name = ("embed", "head")[at]
        tied = place(
            nn.Parameter(torch.randn(30, 3, dtype=torch.float64)), {ParallelMode.PIPELINE: Tied((0, 1), "vocab")}
        )
        self.register_parameter(self.name, tied)

    def loss(self, at: int) -> Tensor:
        return (self.own.weight.sum() + (at + 1) * self.get_parameter(self.name).sum()) * 1.0


def _tied(clip: dict[str, Any]) -> tuple[dict[str, float], Tensor]:
    config = {"parallel": {"pipeline": 2}, "schedule": "NonPipelineSchedule", "clip_grad_norm": clip}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        at = gpc.get_global_rank()
        model = Stage(at)
        engine = initialize(model, lambda held: torch.optim.SGD(held, lr=0.1), context=gpc)[0]
        for _ in range(4):
            engine.zero_grad()
            engine.backward(model.loss(at))
            engine.step()
        norms = {name: value.item() for name, value in engine.grad_norms().items()}
        engine.close()
        return norms, model.get_parameter(model.name).detach().clone()


@pytest.mark.parametrize("per", ["parameter", "layer"])
def test_a_weight_tied_under_two_names_is_one_slot_and_its_copies_stay_equal(per: str) -> None:
    # Clipped apart, by the part of its norm that each stage reads, the copies would drift.
    clip = {"method": {"type": "adagc", "warmup": 1, "beta": 0.5, "factor": 0.5}, "max_norm": 1.0, "per": per}
    (norms, first), (others, second) = run_world(2, _tied, clip).values
    assert norms == others
    assert norms["vocab"] == pytest.approx(3 * 90**0.5, rel=1e-12)
    assert torch.equal(first, second)

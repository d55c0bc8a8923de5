"""What a model is asked before it is cut by its forward pass: its config, and which inputs it takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.errors import ScheduleError
from colonnade.parallel import own_forward
from colonnade.parallel.own_forward import stage_class
from tests.parallel.own_forward.models import Decoder


class Cached(nn.Linear):
    def forward(self, x: Tensor, use_cache: bool = True) -> Tensor:
        return super().forward(x)


class Open(nn.Linear):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(x)


def configured(kind: type[nn.Linear], **config: Any) -> nn.Module:
    model = kind(2, 2)
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (configured(Cached, use_cache=True), {"use_cache": False}),
        (configured(Open, use_cache=True), {"use_cache": False}),
        (configured(Open, text_config=SimpleNamespace(use_cache=True)), {"use_cache": False}),
        (configured(nn.Linear, use_cache=True), {}),
        (configured(Cached, other=1), {}),
        (Cached(2, 2), {}),
    ],
)
def test_keys_and_values_are_not_kept_where_a_model_could(model: nn.Module, settings: dict[str, bool]) -> None:
    assert own_forward._settings(model) == settings


class Seeing(nn.Linear):
    main_input_name = "pixel_values"

    def forward(self, pixel_values: Tensor) -> Tensor:
        return super().forward(pixel_values)


class Reading(nn.Linear):
    main_input_name = "input_ids"
    dummy_inputs = {"input_ids": torch.ones(1, 3)}

    def forward(self, input_ids: Tensor, images: Tensor | None = None) -> Tensor:
        return super().forward(input_ids)


class Plain(Reading):
    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids)


def small_inputs(model: nn.Module) -> dict[str, Tensor]:
    return own_forward._call_with_small_inputs(model)(lambda **inputs: inputs)


def test_small_inputs_are_images_or_tokens() -> None:
    assert small_inputs(configured(Seeing, image_size=8))["pixel_values"].shape == (1, 3, 8, 8)
    assert small_inputs(configured(Seeing, image_size=[4, 6], num_channels=1))["pixel_values"].shape == (1, 1, 4, 6)
    assert small_inputs(configured(Seeing, image_size=8).double())["pixel_values"].dtype is torch.float64
    assert small_inputs(configured(Plain, image_size=8)) == Plain.dummy_inputs
    unknown, other = Plain(2, 2), Plain(2, 2)
    unknown.dummy_inputs, other.main_input_name = None, "input_values"
    for model in (configured(Seeing), nn.Linear(2, 2), unknown, other):
        with pytest.raises(ScheduleError, match=r"but the inputs of this pass are not known. Pass sample="):
            small_inputs(model)
    with pytest.raises(ScheduleError, match="Reading takes 'images' in addition to 'input_ids'"):
        small_inputs(Reading(2, 2))


def test_a_batch_without_values_is_zeros() -> None:
    assert own_forward._with_values(torch.ones(2, requires_grad=True)).tolist() == [1.0, 1.0]
    assert own_forward._with_values(torch.ones(2, dtype=torch.int32, device="meta")).tolist() == [0, 0]


def test_a_stage_does_not_generate() -> None:
    class Writer(Decoder):
        def generate(self) -> None:
            """As transformers has it."""

    made = stage_class(Writer)
    assert stage_class(Writer) is made
    with pytest.raises(ScheduleError, match=r"generate\(\) needs all stages"):
        made.generate(None)
    assert not hasattr(stage_class(Decoder), "generate")

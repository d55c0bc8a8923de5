"""The optimizer step as CUDA graphs, beside the same step without; nothing here runs without a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import ColonnadeError
from colonnade.optim.flat_step import WARM_UP

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = 12


class Model(nn.Module):
    """The last layer is left out of some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor, used: int) -> Tensor:
        for layer in self.layers[:used]:
            x = torch.tanh(layer(x))
        return x.square().mean()


@contextmanager
def engine_of(graph: bool, make: Any, **config: Any) -> Iterator[tuple[Any, Any]]:
    torch.manual_seed(0)
    settings = {"clip_grad_norm": 0.05, "cuda_graph": "step" if graph else False, **config}
    with launch(settings, context=ParallelContext(), verbose=False, backend="gloo") as gpc:
        model = Model()
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        engine, _, _, scheduler = initialize(model, optimizer, lr_scheduler=scheduler, context=gpc)
        yield engine, scheduler
        engine.close()


def trained(graph: bool, make: Any, **config: Any) -> tuple[list[Tensor], list[Any]]:
    """Weights, and the norms and skips of all steps: with a schedule, a step that is dropped, one that leaves a layer
    out, and new weight decay and loaded state on the way."""
    with engine_of(graph, make, **config) as (engine, scheduler):
        norms, kept = [], []
        for step in range(STEPS):
            torch.manual_seed(step)
            x = torch.randn(8, 24, device="cuda") * (math.inf if step == 6 else 1.0)
            engine.zero_grad()
            engine.backward(engine(x, 2 if step == 8 else 3))
            engine.step()
            scheduler.step()
            kept.append(engine.grad_norm)
            norms.append(float(engine.grad_norm))
            if step == 4:
                engine.optimizer.param_groups[0]["weight_decay"] = 0.3
            if step == 9:
                engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        assert engine.skipped_steps == 1
        assert [float(norm) for norm in kept[:6]] == norms[:6]  # what was handed out is not written over
        return [parameter.detach().clone() for parameter in engine.model.parameters()], norms


MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.5),
    "rate on the device": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2, device="cuda"), fused=True),
}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {}),
    ("sgd", {}),
    ("rate on the device", {}),
    ("adamw", {"fp16": {"init_scale": 256.0}}),
    ("adamw", {"clip_grad_norm": {"method": {"type": "zclip", "warmup": 3}}}),
]


@pytest.mark.parametrize(("name", "config"), CASES, ids=str)
def test_a_captured_step_is_the_step(name: str, config: dict[str, Any]) -> None:
    assert STEPS > 4 * WARM_UP
    plain, plain_norms = trained(False, MAKERS[name], **config)
    captured, captured_norms = trained(True, MAKERS[name], **config)
    assert captured_norms == pytest.approx(plain_norms, rel=1e-5, nan_ok=True)
    for one, other in zip(plain, captured, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_without_clipping() -> None:
    weights = []
    for graph in (False, True):
        with engine_of(graph, MAKERS["adamw"], clip_grad_norm=None) as (engine, _):
            for step in range(5):
                torch.manual_seed(step)
                engine.zero_grad()
                engine.backward(engine(torch.randn(8, 24, device="cuda"), 3))
                engine.step()
            weights.append([parameter.detach().clone() for parameter in engine.model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Odd(nn.Module):
    """Sizes that are no multiple of anything, a memory format of its own, a layer that is thawed later."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.first, self.second, self.late = nn.Linear(45, 13), nn.Linear(13, 7), nn.Linear(13, 7)
        self.late.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(self.conv(x).flatten(1)))
        return (self.second(y) + self.late(y)).square().mean()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_gradients_of_one_rank_are_stepped_on_where_they_lie(kind: str) -> None:
    """No bucket, no copy; and what torch's clip and step make of the same."""
    make = MAKERS[kind]
    with launch({"clip_grad_norm": 0.05}, context=ParallelContext(), verbose=False, backend="gloo") as gpc:
        torch.manual_seed(0)
        model, plain = Odd(), Odd().cuda()
        plain.load_state_dict(model.state_dict())
        engine = initialize(model, make(model.parameters()), context=gpc)[0]
        assert not engine._sync.synchroniser.buckets
        optimizer = make(plain.parameters())
        for step in range(8):
            torch.manual_seed(step)
            x = torch.randn(4, 3, 5, 5, device="cuda")
            if step == 3:
                model.late.requires_grad_(True)
                plain.late.requires_grad_(True)
            engine.zero_grad()
            engine.backward(engine(x))
            made = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
            engine.step()
            assert made == [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad()
            plain(x).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            optimizer.step()
            assert float(engine.grad_norm) == pytest.approx(float(norm), rel=1e-5)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        engine.close()


@pytest.mark.parametrize(
    ("make", "config", "said"),
    [
        (lambda p: torch.optim.RMSprop(p), {}, "not RMSprop"),
        (MAKERS["adamw"], {"flat_step": False}, "flat_step is False"),
        (MAKERS["adamw"], {"clip_grad_norm": {"max_norm": 1.0, "nonfinite": "raise"}}, "nonfinite='raise'"),
    ],
)
def test_what_cannot_be_captured_is_refused(make: Any, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ColonnadeError, match=said), engine_of(True, make, **config):
        pass

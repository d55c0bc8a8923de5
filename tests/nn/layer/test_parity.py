"""Every layer under every tensor mode equals torch's own in one process: results, gradients, norm, steps of AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.nn.layer import arrange
from colonnade.testing import compare, gather_gradients, gather_weights, run_world
from tests.nn.layer.cases import CASES, UNEVEN, Case, as_ours, build_ours, build_plain, numbers

RTOL = 1e-10
STEPS, CLIP = 3, 1.0

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1d 2": (2, {"tensor": {"size": 2, "mode": "1d"}}),
    "1d 4": (4, {"tensor": {"size": 4, "mode": "1d"}}),
    "1d 8": (8, {"tensor": {"size": 8, "mode": "1d"}}),
    "2d 4": (4, {"tensor": {"size": 4, "mode": "2d"}}),
    "2.5d 4": (4, {"tensor": {"size": 4, "mode": "2.5d", "depth": 1}}),
    "2.5d 8": (8, {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}),
    "3d 8": (8, {"tensor": {"size": 8, "mode": "3d"}}),
    "data 2 x 1d 2": (4, {"data": 2, "tensor": {"size": 2, "mode": "1d"}}),
    "data 2 x 2d 4": (8, {"data": 2, "tensor": {"size": 4, "mode": "2d"}}),
}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """With an eps far above rounding: where a gradient is 0 (the bias of keys), its noise would decide otherwise."""
    return torch.optim.AdamW(parameters, lr=0.1, eps=1e-2)


def loss_of(module: Any, case: Case, x: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """(what the module gives, a loss that is a mean over the samples)"""
    if labels is not None:
        loss = module(x, labels)
        return loss, loss
    y = module(x)
    return y, (y * numbers(*y.shape[1:], seed=8)).sum() / len(y)


def truth(case: Case) -> dict[str, Any]:
    """One process: the first step's result, gradients and norm, and the weights after all steps."""
    model = build_plain(case)
    x, labels = case.x(), case.labels() if case.labels else None
    x.requires_grad_(x.is_floating_point())
    chosen = optimizer(model.parameters())
    found: dict[str, Any] = {}
    for step in range(STEPS):
        chosen.zero_grad()
        x.grad = None
        y, loss = loss_of(model, case, x, labels)
        loss.backward()
        if step == 0:
            found = {"y": y.detach(), "x": x.grad, "gradients": _gradients(model)}
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        found.setdefault("norm", norm)
        chosen.step()
    return {**found, "weights": {name: parameter.detach() for name, parameter in model.named_parameters()}}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)  # a tied weight under each of its names
    return {name: parameter.grad.clone() for name, parameter in named}


def mine(x: Tensor, gpc: ParallelContext) -> Tensor:
    return x.chunk(gpc.data_parallel_size)[gpc.get_local_rank(ParallelMode.DATA)].clone()


def check(name: str, gpc: ParallelContext, sequence_split: bool) -> None:
    case = {**CASES, **UNEVEN}[name]
    wanted = truth(case)
    ours = build_ours(case, arrange(gpc, sequence_split))
    engine = initialize(ours, optimizer(ours.parameters()), context=gpc)[0]
    x, labels = mine(case.x(), gpc), mine(case.labels(), gpc) if case.labels else None
    x.requires_grad_(x.is_floating_point())
    for step in range(STEPS):
        engine.zero_grad()
        x.grad = None
        y, loss = loss_of(engine, case, x, labels)
        engine.backward(loss)
        outcome = engine._sum_gradients()
        if step == 0:
            gradients = gather_gradients(engine.model, gpc)
            compare(as_ours(wanted["gradients"]), gradients, RTOL)
            assert set(gradients) == set(as_ours(wanted["gradients"]))
            if gpc.data_parallel_size == 1:
                compare({"y": wanted["y"]}, {"y": y}, RTOL)
            if x.grad is not None:
                # Over data ranks a mean that says its count goes backward as a sum, which is divided in the parameters.
                counts = getattr(loss, "sum_and_count", (0, 1))[1] if gpc.data_parallel_size > 1 else 1
                compare({"x": mine(wanted["x"], gpc) * gpc.data_parallel_size}, {"x": x.grad / counts}, RTOL)
        engine._finish_step(outcome)
        if step == 0:
            assert abs(engine.grad_norm.item() - wanted["norm"].item()) <= RTOL * wanted["norm"].item()
    compare(as_ours(wanted["weights"]), gather_weights(engine.model, gpc), RTOL)
    engine.close()


def _run(layout: str, names: list[str], sequence_split: bool) -> None:
    config = {"parallel": LAYOUTS[layout][1], "clip_grad_norm": CLIP}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        for name in names:
            try:
                check(name, gpc, sequence_split)
            except Exception as error:
                raise AssertionError(f"{name} under {layout}: {error}") from error


def run(layout: str, names: list[str], sequence_split: bool = False) -> None:
    run_world(LAYOUTS[layout][0], _run, layout, names, sequence_split, timeout=110)


def often(layout: str) -> Any:
    """As a parameter of a test: what has a smaller or a harder brother goes into `make long`."""
    rare = ("1d 4", "1d 8", "2.5d 4", "2.5d 8", "data 2 x 1d 2", "data 2 x 2d 4")
    return pytest.param(layout, marks=[pytest.mark.long] if layout in rare else [])


@pytest.mark.parametrize("sequence_split", [False, True], ids=["", "sequence split"])
def test_a_model_equals_one_process(sequence_split):
    run("1d 2", ["model"], sequence_split)


@pytest.mark.slow
def test_a_model_on_a_square_equals_one_process():
    run("2d 4", ["model"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [often(layout) for layout in LAYOUTS])
def test_every_layer_equals_one_process(layout):
    run(layout, list(CASES))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [often(layout) for layout in LAYOUTS if "1d" in layout])
def test_so_with_the_sequence_split(layout):
    run(layout, list(CASES), True)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_split", [False, True], ids=["", "sequence split"])
def test_so_in_uneven_parts(sequence_split):
    run("1d 2", list(UNEVEN), sequence_split)

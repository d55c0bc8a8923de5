"""Clipping by one line of config, under every scenario, against the gathered gradient in one process."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import ConfigError
from colonnade.testing import compare, gather_gradients, gather_weights, run_world
from tests.gradients.scenarios import SCENARIOS
from tests.optim.watch import Operations, collectives

RTOL = 1e-12


def norm_of(gradients, p):
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    return torch.linalg.vector_norm(flat, p).item()


def _clipped(name: str, clip: object, p: float) -> tuple[float, bytes, int]:
    """(the true norm, the bits of ours, how many collectives the clip and step took)"""
    scenario = SCENARIOS[name]
    config = {**scenario.config, "clip_grad_norm": clip}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(
            lambda: scenario.build(gpc), lambda parameters: torch.optim.SGD(parameters, lr=1.0), context=gpc
        )[0]
        for _ in range(3):  # the first step lays out buckets, the later ones are flat
            before = gather_weights(engine.model, gpc)
            engine.zero_grad()
            scenario.run(engine, gpc)
            outcome = engine._sum_gradients()
            whole = gather_gradients(engine.model, gpc)
            true = norm_of(whole, p)
            with collectives() as counted, Operations() as seen:
                engine._finish_step(outcome)
            norm = engine.grad_norm
            assert abs(norm.item() - true) <= RTOL * true
            # SGD with lr 1 moves the weights by just the clipped gradient.
            after = gather_weights(engine.model, gpc)
            limit = clip if isinstance(clip, float) else clip["max_norm"]
            scale = min(1.0, limit / (true + 1e-6))
            moved = {key: before[key] - after[key] for key in before}
            assert scale < 1
            assert engine.clip_divisor.item() == pytest.approx(1 / scale)
            compare({key: value * scale for key, value in whole.items()}, moved, 1e-9)
            assert norm_of(moved, p) <= limit * (1 + 1e-9)
            assert seen.host_reads == (0 if engine._stepper._step.flat is not None else 1)
        engine.close()
        return true, norm.cpu().numpy().tobytes(), len(counted)


def _clipped_by_scenario(world: int, clip: object, p: float) -> dict[str, tuple[float, bytes, int]]:
    return {name: _clipped(name, clip, p) for name, scenario in SCENARIOS.items() if scenario.world == world}


@pytest.mark.parametrize(
    ("world", "p"),
    [
        *((2, 2.0), (4, 2.0), (8, 2.0), (4, math.inf)),
        *(pytest.param(world, p, marks=pytest.mark.long) for world in (2, 4, 8) for p in (1.0, 3.0)),
        *(pytest.param(world, math.inf, marks=pytest.mark.long) for world in (2, 8)),
    ],
)
def test_the_norm_is_that_of_the_whole_gradient_and_the_same_bits_on_every_rank(world, p):
    clip = 0.01 if p == 2 else {"max_norm": 0.01, "norm_type": p}
    values = run_world(world, _clipped_by_scenario, world, clip, p, timeout=110).values
    for name, (_, bits, count) in values[0].items():
        assert count == 1, name
        assert all(other[name][1:] == (bits, count) for other in values), name


def _train(clip: object, flat: bool | None, optimizer: str) -> dict[str, torch.Tensor]:
    """Five steps on data 2; returns the weights."""
    config = {"clip_grad_norm": clip, "parallel": {}}
    if flat is not None:
        config["flat_step"] = flat
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        scenario = SCENARIOS["data 2"]
        make = getattr(torch.optim, optimizer)
        model = scenario.build(gpc)
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
        built = make(groups, lr=0.01, **({"momentum": 0.9} if optimizer == "SGD" else {}))
        scheduler = torch.optim.lr_scheduler.StepLR(built, 2, 0.5)
        engine, _, _, scheduler = initialize(model, built, lr_scheduler=scheduler, context=gpc)
        for step in range(5):
            engine.zero_grad()
            x, y = scenario.batch(gpc.get_global_rank(), step)
            engine.backward(F.mse_loss(engine(x), y))
            engine.step()
            scheduler.step()
        engine.close()
        return gather_weights(engine.model, gpc)


def one_process(clip: float, optimizer: str) -> dict[str, torch.Tensor]:
    scenario = SCENARIOS["data 2"]
    model = scenario.build(None)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
    built = getattr(torch.optim, optimizer)(groups, lr=0.01, **({"momentum": 0.9} if optimizer == "SGD" else {}))
    scheduler = torch.optim.lr_scheduler.StepLR(built, 2, 0.5)
    for step in range(5):
        built.zero_grad()
        x, y = (torch.cat(column) for column in zip(*[scenario.batch(r, step) for r in range(2)], strict=True))
        F.mse_loss(model(x), y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        built.step()
        scheduler.step()
    return dict(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("clip", [0.1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("flat", [None, False])
def test_five_steps_with_groups_and_a_scheduler_equal_one_process(optimizer, clip, flat):
    truth = one_process(clip, optimizer)
    off = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
    for weights in run_world(2, _train, clip, flat, optimizer, env=off).values:
        compare(truth, weights, 1e-11)


# -- steps that are dropped -------------------------------------------------------------------------------


def _overflow(nonfinite: str, flat: bool) -> tuple[list[bool], int, float, bool]:
    config = {"clip_grad_norm": {"max_norm": 1.0, "nonfinite": nonfinite}, "flat_step": flat}
    with launch(config, context=ParallelContext()) as gpc:
        scenario = SCENARIOS["data 2"]
        model = scenario.build(gpc)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        engine, _, _, scheduler = initialize(model, optimizer, lr_scheduler=scheduler, context=gpc)
        changed = []
        for step in range(4):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            engine.zero_grad()
            x, y = scenario.batch(gpc.get_global_rank(), step)
            if step == 2 and gpc.get_global_rank() == 1:
                x = x * math.nan
            engine.backward(F.mse_loss(engine(x), y))
            engine.step()
            scheduler.step()
            changed.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
        finite = all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
        engine.close()
        return changed, engine.skipped_steps, optimizer.param_groups[0]["lr"], finite


@pytest.mark.parametrize("flat", [True, False])
def test_a_nan_on_one_rank_drops_the_step_on_all_names_the_culprit_and_stops_the_scheduler(flat):
    result = run_world(2, _overflow, "skip", flat)
    for changed, skipped, lr, finite in result.values:
        assert changed == [True, True, False, True]
        assert skipped == 1
        assert lr == pytest.approx(0.1 * 0.5**3)
        assert finite
    assert "step skipped: first in norm.weight on rank" in result.stderr[1]


def test_propagate_lets_it_through():
    for changed, skipped, _, finite in run_world(2, _overflow, "propagate", True).values:
        assert changed == [True] * 4
        assert skipped == 0
        assert not finite


# -- groups, layers, methods ------------------------------------------------------------------------------


def _clipped_step(clip: dict[str, Any], config: dict[str, Any]) -> tuple[float, dict[str, float], dict[str, float]]:
    """One step of SGD with a learning rate of 1: its norm, its reported norms, and how far each parameter moved."""
    config = {"parallel": {"tensor": 2}, "clip_grad_norm": clip, **config}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        scenario = SCENARIOS["data 2 x tensor 2"]
        engine = initialize(lambda: scenario.build(gpc), lambda p: torch.optim.SGD(p, lr=1.0), context=gpc)[0]
        before = gather_weights(engine.model, gpc)
        engine.zero_grad()
        scenario.run(engine, gpc)
        engine.step()
        after = gather_weights(engine.model, gpc)
        norms = {name: value.item() for name, value in engine.grad_norms().items()}
        norm = engine.grad_norm.item()
        engine.close()
        return norm, norms, {k: (before[k] - after[k]).norm().item() for k in before}


def _clipped_with_each(clip: dict[str, Any], configs: list[dict[str, Any]]) -> list[tuple[float, dict, dict]]:
    return [_clipped_step(clip, config) for config in configs]


@pytest.mark.parametrize("per", ["layer", "parameter"])
def test_each_layer_or_parameter_is_clipped_by_its_own_norm(per):
    truth = SCENARIOS["data 2 x tensor 2"].truth()
    part_of = {name: name if per == "parameter" else name.rpartition(".")[0] for name in truth}
    sizes: dict[str, float] = {}
    for name, value in truth.items():
        sizes[part_of[name]] = math.hypot(sizes.get(part_of[name], 0.0), value.norm().item())
    whole, head = math.hypot(*sizes.values()), math.hypot(*(v for k, v in sizes.items() if k.startswith("head")))
    assert any(size > 0.05 for size in sizes.values())
    groups = {"head": {"params": "head.*", "max_norm": 0.01}, "free": {"params": "norm.*", "clipped": False}}
    clip = {"max_norm": 0.05, "groups": groups, "per": per}
    by_rank = run_world(4, _clipped_with_each, clip, [{}, {"zero": 1}, {"zero": 2}]).values
    for norm, norms, moved in itertools.chain(*by_rank):
        assert norm == pytest.approx(whole, rel=1e-12)
        assert norms == {name: pytest.approx(size, rel=1e-12) for name, size in sizes.items()}
        for name, value in truth.items():
            own = (head, 0.01) if name.startswith("head") else (sizes[part_of[name]], 0.05)
            divisor = 1.0 if name.startswith("norm") else max(1.0, (own[0] + 1e-6) / own[1])
            assert moved[name] == pytest.approx(value.norm().item() / divisor, rel=1e-9), name


def test_groups_have_limits_of_their_own_and_layers_their_norms():
    truth = SCENARIOS["data 2 x tensor 2"].truth()

    def layer(name):
        return math.sqrt(sum(v.norm().item() ** 2 for k, v in truth.items() if k.startswith(name)))

    counted = math.sqrt(sum(layer(name) ** 2 for name in ("up", "down", "head")))
    groups = {
        "head": {"params": "head.*", "max_norm": 0.01},
        "free": {"params": "norm.*", "counted": False, "clipped": False},
    }
    clip = {"max_norm": 0.1, "groups": groups, "report": "layer"}
    for _, norms, moved in run_world(4, _clipped_step, clip, {}).values:
        assert norms == {name: pytest.approx(layer(name), rel=1e-12) for name in ("norm", "up", "down", "head")}
        for name, value in truth.items():
            size = value.norm().item()
            if name.startswith("head"):
                expected = size * 0.01 / (layer("head") + 1e-6)
            elif name.startswith("norm"):
                expected = size
            else:
                expected = size * min(1.0, 0.1 / (counted + 1e-6))
            assert moved[name] == pytest.approx(expected, rel=1e-9), name


METHODS = ["zclip", "percentile", "skip_on_spike", {"type": "zclip", "warmup": 1}]


def test_adaptive_methods_are_chosen_by_name_and_keep_their_state():
    clips = [{"method": "adagc", "max_norm": 1.0}, *({"method": method} for method in METHODS)]
    first, second = run_world(2, _adaptive_each, clips).values
    assert first == second
    assert all(first)


def _adaptive_each(clips: list[dict]) -> list[list[tuple[str, list[float]]]]:
    return [_adaptive(clip) for clip in clips]


def _adaptive(clip: dict) -> list[tuple[str, list[float]]]:
    with launch({"clip_grad_norm": clip}, context=ParallelContext(), verbose=False) as gpc:
        scenario = SCENARIOS["data 2"]
        engine = initialize(lambda: scenario.build(gpc), lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
        for step in range(3):
            engine.zero_grad()
            x, y = scenario.batch(gpc.get_global_rank(), step)
            engine.backward(F.mse_loss(engine(x), y))
            engine.step()
        state = engine.extra_state()
        engine.load_extra_state(state)
        engine.close()
        return [
            (name, torch.nan_to_num(value.double()).flatten().tolist())
            for name, value in state["engine.clip"]["state"].items()
        ]


@pytest.mark.parametrize(
    ("clip", "part"),
    [
        ({"method": "zklip"}, "Did you mean 'zclip'"),
        ({"max_norm": 1.0, "groups": {"a": {"params": "heed.*"}}}, "matches no parameter"),
        ({"method": {"type": "percentile", "window": 10**30}}, "window must be a number of steps from 1 to 1000000"),
        ({"method": {"type": "percentile", "percentile": 10**400}}, "does not accept the given options"),
        ({"method": {"type": "zclip", "z_max": 10**400}}, "z_max must be a number > 0"),
        ({"method": {"type": "norm", "max_norm": "1"}}, "max_norm must be a number > 0"),
        ({"method": {"type": "zclip", "sigma": 3}}, "does not accept the given options"),
    ],
)
def test_bad_clip_settings_are_named(clip, part):
    with launch({"clip_grad_norm": clip}, context=ParallelContext(), verbose=False) as gpc:
        with pytest.raises((ConfigError, LookupError)) as error:
            initialize(SCENARIOS["data 2"].build(gpc), lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)
        assert part in str(error.value)


def test_flat_step_true_is_an_error_where_it_cannot_be_done():
    with (
        launch({"flat_step": True}, context=ParallelContext(), verbose=False) as gpc,
        pytest.raises(Exception, match="RMSprop"),
    ):
        initialize(nn.Linear(2, 2), lambda p: torch.optim.RMSprop(p, lr=0.1), context=gpc)

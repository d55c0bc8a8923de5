"""Precision in one process: what the config means, when the loss scale moves, and the table of dtypes to the byte."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.config.settings import Fp16Settings
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.engine.precision import LossScaler, Precision, precision_table
from colonnade.errors import ConfigError
from colonnade.optim.engine_optimizer import PlainOptimizer
from colonnade.optim.norm import Norms

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(0.0), torch.tensor(1.0)


def loss_scaler(**options: Any) -> LossScaler:
    return LossScaler(CPU, Fp16Settings(**options))


def scales(scaler: LossScaler, steps: list[torch.Tensor]) -> list[float]:
    seen = []
    for found_inf in steps:
        scaler.update(found_inf)
        seen.append(scaler.scale.item())
    return seen


def test_the_scale_grows_after_good_steps_and_falls_after_a_bad_one():
    scaler = loss_scaler(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    assert scales(scaler, [GOOD, GOOD, GOOD, BAD, GOOD, GOOD]) == [8, 32, 32, 8, 8, 32]


def test_a_resumed_scaler_has_counted_the_good_steps_before():
    options = {"init_scale": 8.0, "growth_interval": 3}
    whole, first, second = (loss_scaler(**options) for _ in range(3))
    expected = scales(whole, [GOOD] * 5)
    before = scales(first, [GOOD] * 2)
    second.load_state_dict({key: value.clone() for key, value in first.state_dict().items()})
    assert before + scales(second, [GOOD] * 3) == expected == [8, 8, 16, 16, 16]
    scales(first, [BAD])
    second.load_state_dict(first.state_dict())
    assert second.scale.item() == 4.0


def test_limits_and_a_scale_that_stays():
    assert scales(loss_scaler(init_scale=8.0, growth_interval=1, max_scale=20.0), [GOOD] * 3) == [16, 20, 20]
    assert scales(loss_scaler(init_scale=8.0, min_scale=3.0), [BAD] * 3) == [4, 3, 3]
    assert scales(loss_scaler(init_scale=8.0, growth_interval=1, dynamic_grad_scale=False), [GOOD, BAD]) == [8, 8]


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_norms_are_those_of_the_unscaled_gradient(p):
    gradient = torch.tensor([3.0, -4.0], dtype=torch.float64) * 8
    sums = gradient.abs().amax().view(1) if math.isinf(p) else gradient.abs().pow(p).sum().view(1)
    norms = loss_scaler(init_scale=8.0).unscaled(Norms(p, sums, torch.zeros(1)))
    torch.testing.assert_close(norms.total(), torch.linalg.vector_norm(gradient / 8, p))


def test_what_the_config_means():
    assert Precision.read({}) == Precision()
    assert Precision.read({"fp16": {"enabled": False}, "bf16": True}) == Precision(torch.bfloat16)
    assert Precision.read({"fp16": True}) == Precision(torch.float16, Fp16Settings())
    assert Precision.read({"fp16": {"init_scale": 4, "min_scale": None}}) == Precision(
        torch.float16, Fp16Settings(init_scale=4)
    )
    assert Precision.read({"bf16": {"master_weights": False}}) == Precision(torch.bfloat16, None, False)
    assert Precision.read({"bf16": True, "zero": {"stage": 1, "master_weights": False}}) == Precision.read(
        {"bf16": {"master_weights": False}, "zero": 1}
    )
    with pytest.raises(ConfigError, match=r"bf16.master_weights=True and zero.master_weights=False both"):
        Precision.read({"bf16": {"master_weights": True}, "zero": {"stage": 1, "master_weights": False}})
    assert Precision.read({"bf16": True}).build_scaler(CPU) is None
    scaler = Precision(torch.float16, Fp16Settings(init_scale=4.0)).build_scaler(CPU)
    assert scaler is not None
    assert scaler.scale.item() == 4.0
    with pytest.raises(ConfigError, match="hysteresis"):
        Precision.read({"fp16": {"hysteresis": 2}})


def test_forward_passes_run_in_the_chosen_dtype_until_it_is_undone():
    precision, model, criterion = Precision(torch.bfloat16), nn.Linear(2, 2), nn.MSELoss()
    precision.apply(model, CPU, 0)
    x = torch.ones(1, 2)
    assert model(x).dtype == torch.bfloat16
    assert model.weight.dtype == torch.float32
    around = precision.around(criterion, CPU)
    assert around(model(x), x).dtype == torch.float32
    precision.undo(model, None, around)
    assert model(x).dtype == torch.float32
    assert precision.around(None, CPU) is None
    assert Precision().around(criterion, CPU) is criterion
    assert precision.around(lambda y: y @ y.T, CPU)(x).dtype == torch.bfloat16
    cast = nn.Linear(2, 2)
    Precision(torch.bfloat16, master_weights=False).apply(cast, CPU, 0)
    assert cast.weight.dtype == torch.bfloat16
    Precision().apply(model, CPU, 0)
    assert model(x).dtype == torch.float32


def test_the_expected_count_is_a_power_of_two_from_one_on():
    scaler = loss_scaler()
    for count, expected in ((0, 1), (0.5, 1), (1, 1), (1.9, 1), (2, 2), (3, 2), (9, 8), (math.nan, 1), (math.inf, 1)):
        scaler.expect(torch.tensor(float(count)))
        assert scaler.count == expected, count
    scaler.load_state_dict({**loss_scaler().state_dict(), "count": torch.tensor(16.0)})
    assert scaler.count == 16
    old = loss_scaler().state_dict()
    del old["count"]
    scaler.load_state_dict(old)
    assert scaler.count == 1


def test_weights_of_half_precision_become_fp32_but_where_zero_keeps_masters():
    precision = Precision(torch.bfloat16)
    for stage, dtype in ((0, torch.float32), (1, torch.bfloat16), (2, torch.bfloat16)):
        model = nn.Linear(2, 2).bfloat16()
        precision.apply(model, CPU, stage)
        assert model.weight.dtype is dtype


def test_chunks_of_a_stage_run_in_the_chosen_dtype_and_a_second_time_changes_nothing():
    precision, chunks, x = Precision(torch.bfloat16), nn.ModuleList([nn.Linear(2, 2), nn.Tanh()]), torch.ones(1, 2)
    for _ in range(2):  # as from an engine that was not closed
        precision.apply(chunks, CPU, 0)
        assert chunks[0](x).dtype is torch.bfloat16
    precision.undo(chunks)
    assert [type(chunk) for chunk in chunks] == [nn.Linear, nn.Tanh]
    assert chunks[0](x).dtype is torch.float32
    own, forward = nn.Linear(2, 2), lambda x: x @ x.T
    own.forward = forward  # type: ignore[method-assign]
    assert precision.around(own, CPU) is own
    assert own(x).dtype is torch.bfloat16
    precision.undo(own)
    assert (type(own), own.forward) == (nn.Linear, forward)


def test_a_model_is_refused_only_where_autocast_would_do_nothing():
    mixed = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2))
    for dtype, key in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        for model in (mixed, nn.Tanh()):
            Precision(dtype).apply(model, CPU, 0)
        with pytest.raises(ConfigError, match=f"^{key} has no effect on this model, because weight and all"):
            Precision(dtype).apply(nn.Linear(2, 2).double(), CPU, 0)


# -- the table of dtypes ---
NOTHING: Any = SimpleNamespace(layout=(), parameters={})


class Own(torch.optim.AdamW):
    """Not one of torch's own: what it will keep is not known before its first step."""


def step(engine: Any) -> None:
    engine.zero_grad()
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()


def test_bytes_of_each_kind_before_and_after_the_first_step():
    for kind, before in ((torch.optim.AdamW, 8.0), (Own, 0.0)):
        with launch({}, context=ParallelContext(), verbose=False) as gpc:
            engine = initialize(nn.Linear(3, 2), lambda p, kind=kind: kind(p, lr=0.1), context=gpc)[0]
            assert engine.precision_table()["optimizer state"].bytes == before
            step(engine)
            table = engine.precision_table()
            sizes = {row.what: row.bytes for row in table.rows}
            gradients = sizes.pop("gradients")  # in a bucket, which has a tail
            assert gradients >= 4.0
            assert sizes == {
                "weights": 4.0,
                "computed with": None,
                "master copies": 0.0,
                "reduced in": None,
                "optimizer state": 8.0,  # without the counts of steps
            }
            assert (table.parameters, table.bytes_per_parameter) == (8, 12.0 + gradients)
            engine.close()


def test_what_is_frozen_has_no_gradient_and_no_state():
    model = nn.Linear(3, 1, dtype=torch.bfloat16)
    model.bias.requires_grad_(False)
    table = precision_table(
        model, PlainOptimizer(torch.optim.AdamW(model.parameters()), nn.Module()), NOTHING, torch.float16
    )
    assert [table[what].bytes for what in ("weights", "gradients", "optimizer state")] == [2.0, 1.5, 3.0]
    assert table["computed with"].dtypes == ("float16",)
    assert precision_table(model.double(), PlainOptimizer(None, nn.Module()), NOTHING, torch.float16)[
        "computed with"
    ].dtypes == ("float64",)
    assert precision_table(model, PlainOptimizer(None, nn.Module()), NOTHING, None)["optimizer state"].bytes == 0.0


def test_a_model_without_parameters_takes_nothing():
    table = precision_table(nn.Tanh(), PlainOptimizer(SimpleNamespace(), nn.Module()), NOTHING, None)
    assert (table.parameters, table.bytes_per_parameter) == (1, 0.0)
    assert [row.dtypes for row in table.rows] == [()] * 6

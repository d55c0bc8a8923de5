"""Mixed precision: one decision for all ranks, unscaled before clipping, within a stated distance of fp32."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.testing import gather_weights, run_world
from tests.engine.test_pipeline import Stage, all_parts, batch, build
from tests.ranks import on_ranks


def _overflow(flat: bool) -> tuple[list[float], list[bool], int]:
    """A planted overflow on one rank of data 2 x pipeline 2 x tensor 2: (scale, weights changed) after each step."""
    config = {
        "parallel": {"pipeline": 2, "tensor": 2},
        "schedule": {"type": "OneFOneB", "num_microbatches": 4},
        "fp16": {"init_scale": 1024.0, "growth_interval": 2},
        "clip_grad_norm": 1.0,
        "flat_step": flat,
    }
    with launch(config, context=ParallelContext()) as gpc:
        model = build(gpc, "loop1", True).float()
        engine = initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), nn.MSELoss(), context=gpc)[0]
        scales, changed = [], []
        for step in range(5):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            engine.zero_grad()
            x, y = (value.float() for value in batch(step, gpc.get_local_rank(ParallelMode.DATA)))
            if step == 2:
                hook = _plant(model) if gpc.get_global_rank() == 5 else None
            engine.execute_schedule(iter([(x, y)]))
            engine.step()
            if step == 2 and hook is not None:
                hook.remove()
            scales.append(engine._stepper.scaler.scale.item())
            changed.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
        engine.close()
        return scales, changed, engine.skipped_steps


def _plant(model: nn.Module):
    """Make one gradient of one parameter overflow."""
    parameter = next(model.parameters())
    return parameter.register_hook(lambda grad: grad * float("inf"))


def _overflow_each() -> list[tuple[list[float], list[bool], int]]:
    return [_overflow(flat) for flat in (True, False)]


def test_an_overflow_on_one_rank_is_skipped_by_all_and_the_scale_falls_once():
    for scales, changed, skipped in itertools.chain(*run_world(8, _overflow_each).values):
        assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
        assert changed == [True, True, False, True, True]
        assert skipped == 1


def _train(precision: dict) -> tuple[list[float], dict[str, torch.Tensor], float]:
    with launch({**precision, "clip_grad_norm": 0.5}, context=ParallelContext(), verbose=False) as gpc:
        model = Stage(all_parts(None, True)).float()
        engine = initialize(model, torch.optim.AdamW(model.parameters(), lr=0.003), nn.MSELoss(), context=gpc)[0]
        losses = []
        for step in range(20):
            engine.zero_grad()
            x, y = (value.float() for value in batch(step % 4, gpc.get_global_rank()))
            loss = engine.criterion(engine(x).float(), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.close()
        return losses, gather_weights(model, gpc), engine.grad_norm.item()


@on_ranks(2)
def test_mixed_precision_with_fp32_masters_stays_near_fp32():
    losses, weights, norm = _train({})
    for precision in ({"bf16": True}, {"fp16": {"init_scale": 256.0}}):
        mixed, found, mixed_norm = _train(precision)
        assert mixed[-1] < 0.8 * mixed[0], precision
        assert mixed[-1] == pytest.approx(losses[-1], rel=0.05), precision
        assert mixed_norm == pytest.approx(norm, rel=0.1), precision  # unscaled: that of the true gradient
        for name, value in weights.items():
            assert (found[name] - value).norm() <= 0.03 * value.norm(), (precision, name)


def test_a_copy_computes_with_its_own_weights_and_close_gives_the_forward_pass_back():
    built = nn.Linear(4, 2)
    with launch({"bf16": True}, context=ParallelContext(), verbose=False) as gpc:
        criterion = nn.MSELoss()
        engine, *_ = initialize(built, torch.optim.SGD(built.parameters(), lr=0.1), criterion, context=gpc)
        average, x = copy.deepcopy(built), torch.randn(3, 4)
        assert torch.equal(average(x), built(x))
        with torch.no_grad():
            built.weight.zero_()
            built.bias.zero_()
        assert average(x).dtype is torch.bfloat16
        assert average(x).any()
        assert not built(x).any()
        engine.close()
        assert (type(built), type(criterion)) == (nn.Linear, nn.MSELoss)
        assert built(x).dtype is torch.float32


def test_the_sums_of_a_counted_loss_fit_into_fp16():
    """Their gradients are as large as those of a mean: the scale need not fall by the number of labels."""
    config = {"fp16": {"init_scale": 2.0**15}, "gradient_accumulation": 2}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 5))
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.5), nn.CrossEntropyLoss(), context=gpc)[0]
        for step in range(12):
            engine.zero_grad()
            x, y = torch.randn(4096, 4), torch.randint(5, (4096,))
            y[: 1 + 2000 * (step % 2)] = -100
            engine.execute_schedule(iter([(x, y)]))
            engine.step()
        assert engine.skipped_steps <= 1
        scaler = engine._stepper.scaler
        assert scaler.scale >= 2.0**14
        assert scaler.count == 2.0**12  # 6190 labels a step
        kept = {name: value.clone() for name, value in scaler.state_dict().items()}
        scaler.expect(torch.tensor(9.0))
        assert scaler.count == 8.0
        scaler.load_state_dict(kept)
        assert scaler.count == 2.0**12
        engine.close()

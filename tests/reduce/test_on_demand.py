"""Memory that buckets take only while they have gradients: on a GPU in a world of one, and here on the CPU all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.reduce.transports.local import Local
from colonnade.testing import compare, run_world
from tests.engine.gradient_handler.scenarios import numbers


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def _steps(config: dict[str, Any], skip: bool) -> None:
    Local.on_demand = classmethod(lambda cls, device: True)  # type: ignore[method-assign]
    accumulation = config.get("gradient_accumulation", 1)
    with launch({**config, "sync": {"bucket_mb": 1e-4}}, context=ParallelContext(), verbose=False) as gpc:
        model, plain = net(), net()
        engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.1), context=gpc)[0]
        reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
        buckets = engine._sync.synchroniser.buckets
        assert len(buckets) > 2
        for step in range(5):
            reference.zero_grad()
            for micro in range(accumulation):
                engine.zero_grad()
                if micro == 0:
                    assert all(bucket.buffer is None for bucket in buckets), "a forward pass has the memory for itself"
                x = numbers(4, 5, seed=10 * step + micro)
                # In step 2 the last layer is not used, in step 3 only that one is.
                layers = slice(0, 4) if skip and step == 2 else slice(0, 5)
                for one, backward in ((model, engine.backward), (plain, lambda loss: (loss / accumulation).backward())):
                    backward(one[layers](x).square().mean())
                engine.step()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), config.get("clip_grad_norm", 1e9))
            reference.step()
            compare(dict(plain.named_parameters()), dict(model.named_parameters()), 1e-10)
        engine.close()


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    "config",
    [{}, {"clip_grad_norm": 0.1}, {"clip_grad_norm": 0.1, "gradient_accumulation": 2}],
    ids=str,
)
def test_steps_equal_a_plain_loop_and_memory_goes_with_the_gradients(config, skip):
    run_world(1, _steps, config, skip)

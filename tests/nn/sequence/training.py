"""What the parity tests of layers share: a layer with one process's weights, trained beside the plain one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.parallel.placement import placement_of
from colonnade.parallel.split import Split
from colonnade.testing import compare, gather_gradients, gather_weights

RTOL = 1e-10
EPS = 1e-6
"""Adam's: gradients that are zero but for rounding (a bias on keys) must not become steps of full size."""


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen_keys(total: int, causal: bool, window: int | None = None, documents: Sequence[int] | None = None) -> Tensor:
    """Which keys (columns) each query (row) sees: the mask for torch's own attention."""
    places = torch.arange(total)
    behind = places - places.unsqueeze(-1)
    seen = behind <= (0 if causal else total)
    if window is not None:
        seen &= behind.abs() <= window
    if documents is not None:
        document = torch.bucketize(places, torch.tensor(documents), right=True)
        seen &= document == document.unsqueeze(-1)
    return seen


def give_weights(plain: nn.Module) -> None:
    """Weights that are the same on every rank."""
    with torch.no_grad():
        for at, parameter in enumerate(plain.parameters()):
            parameter.copy_(0.4 * numbers(*parameter.shape, seed=7000 + at))


def take_weights(model: nn.Module, whole: Mapping[str, Tensor], gpc: ParallelContext) -> None:
    """Give every parameter its part of one process's."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = whole[name]
            for mode, shard in placement_of(parameter).shards.items():
                part = part.chunk(gpc.get_world_size(mode), shard.dim)[gpc.get_local_rank(mode)]
            assert part.shape == parameter.shape, (name, part.shape, parameter.shape)
            parameter.copy_(part)


def close(found: Tensor, truth: Tensor, rtol: float = RTOL) -> None:
    assert found.shape == truth.shape, (found.shape, truth.shape)
    apart = (found - truth).norm().item()
    assert apart <= rtol * max(truth.norm().item(), 1e-300), (apart, truth.norm().item())


def train(
    gpc: ParallelContext,
    model: nn.Module | Split,
    plain: nn.Module,
    run: Callable[[Any, int], None],
    loss_of: Callable[[nn.Module, int], Tensor],
    steps: int = 3,
    after: Callable[[nn.Module], None] = lambda model: None,
    criterion: Any = None,
) -> Any:
    """Train both; gradients, norm and weights must be equal at every step.

    `run(engine, step)` goes forward and backward on this rank's part of a step's batch, `loss_of(plain, step)` gives
    one process's loss on all of it; `after` is called on both models after each step.
    """
    give_weights(plain)
    for module in model if isinstance(model, Split) else [model]:
        take_weights(module, dict(plain.named_parameters(remove_duplicate=False)), gpc)
    engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.01, eps=EPS), criterion, context=gpc)[0]
    model = engine.model
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=EPS)
    for step in range(steps):
        engine.zero_grad()
        run(engine, step)
        adamw.zero_grad()
        loss_of(plain, step).backward()
        outcome = engine._sum_gradients()
        truth = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in plain.named_parameters()
        }
        compare(truth, gather_gradients(model, gpc), RTOL)
        engine._finish_step(outcome)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert abs(engine.grad_norm.item() - norm.item()) <= RTOL * norm.item()
        adamw.step()
        after(model)
        after(plain)
    compare(dict(plain.named_parameters()), gather_weights(model, gpc), RTOL)
    engine.close()
    return engine

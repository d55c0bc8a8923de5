"""A model under a plan beside one process: every gradient, the norm, and the weights after three clipped steps, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.testing import compare, gather_gradients, gather_weights
from tests.hf.plans.models import Model, build, labels, summed_loss, tokens

RTOL = 1e-10
"""Relative, of each tensor's norm: sums in another order, in fp64, over three steps of AdamW."""

STEPS, CLIP, BATCH = 3, 0.5, 12


def optimizer(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def truth(made: Callable[[], nn.Module] = Model) -> dict[str, Any]:
    """One process, on the whole batch."""
    model = build(made)
    chosen = optimizer(model.parameters())
    found: dict[str, Any] = {}
    for step in range(STEPS):
        chosen.zero_grad()
        total, count = summed_loss(model(tokens(BATCH)), labels(BATCH))
        loss = total / count
        loss.backward()
        if step == 0:
            found = {"loss": loss.detach(), "gradients": {n: p.grad.clone() for n, p in model.named_parameters()}}
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        found.setdefault("norm", norm)
        chosen.step()
    return {**found, "weights": {name: parameter.detach() for name, parameter in model.named_parameters()}}


def check(
    plan: Any, gpc: ParallelContext, made: Callable[[], nn.Module] = Model, model: nn.Module | None = None
) -> Any:
    """Train under the plan, on this data rank's rows, in micro-batches, and compare. Returns the engine."""
    wanted = truth(made)
    model = colonnade.parallelize(build(made), plan, context=gpc) if model is None else model
    engine = colonnade.initialize(model, optimizer, summed_loss, context=gpc)[0]
    x, y = mine(tokens(BATCH), gpc), mine(labels(BATCH), gpc)
    shards_gradients = bool(gpc.config.get("zero"))
    for step in range(STEPS):
        engine.zero_grad()
        for rows, marks in zip(x.chunk(engine.accumulation), y.chunk(engine.accumulation), strict=True):
            engine.backward(engine.criterion(engine(rows), marks))
        if step == 0 and not shards_gradients:
            outcome = engine._sum_gradients()
            compare(wanted["gradients"], gather_gradients(engine.model, gpc), RTOL)
            engine._finish_step(outcome)
        else:
            engine.step()
        if step == 0:
            compare({"norm": wanted["norm"]}, {"norm": engine.grad_norm}, RTOL)
    compare(wanted["weights"], gather_weights(engine.model, gpc), RTOL)
    return engine


def mine(x: Tensor, gpc: ParallelContext) -> Tensor:
    return x.chunk(gpc.data_parallel_size)[gpc.get_local_rank(ParallelMode.DATA)]

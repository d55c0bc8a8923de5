"""Small runs for the tests of verification: a model on a layout, with batches of each rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.gradients.sums import group_reductions
from colonnade.parallel.split import split
from colonnade.proof.api import gather_evidence, verify
from colonnade.proof.compare import Compared, Evidence
from colonnade.registry import GRADIENT_HANDLER
from tests.models.grid import MODELS, batch

STEPS = 2


class Undivided(BaseGradientHandler):
    """A handler with a mistake: it says that it takes the mean over data, and sums."""

    def covers(self) -> list[Any]:
        return group_reductions((demand, factor) for demand in self.demands() for factor in demand.owed)

    def handle_gradient(self) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.context.get_group(ParallelMode.DATA))


def report_with_mistake(more: int = 0) -> Any:
    """On each rank: what `verify` says of a run whose handler does not divide, and whose optimizer knows the last layer alone.

    Each rank is given batches for `more` steps more than the one before.
    """
    if "Undivided" not in GRADIENT_HANDLER:
        GRADIENT_HANDLER.register_module(Undivided)
    with launch({"gradient_handler": ["Undivided"]}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)).double()
        engine, *_ = initialize(model, torch.optim.SGD(model[-1].parameters(), lr=0.1), nn.MSELoss(), context=gpc)
        rows = torch.Generator().manual_seed(gpc.get_global_rank())
        draw = partial(torch.randn, generator=rows, dtype=torch.float64)
        return verify(engine, batches=[[(draw(3, 4), draw(3, 2))] for _ in range(STEPS + more * gpc.get_global_rank())])


def evidence_of(
    model: str,
    parallel: dict[str, Any],
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> Any:
    """On each rank: the evidence of two steps of a model of the grid."""
    piped = "pipeline" in parallel
    schedule = {"schedule": {"type": "OneFOneB", "num_microbatches": 2}} if piped else {}
    config = {"parallel": parallel, "clip_grad_norm": 0.1, **schedule, **settings}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        whole = MODELS[model](**(options or {}), context=gpc).to(dtype)
        engine, *_ = initialize(
            split(whole, num_stages=gpc.pipeline_parallel_size) if piped else whole,
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-6),
            whole.criterion(),
            context=gpc,
        )
        mine = gpc.get_local_rank(ParallelMode.DATA)
        batches = [[batch(model, 10 * at + mine, step) for at in range(engine.accumulation)] for step in range(STEPS)]
        return gather_evidence(engine, lambda: MODELS[model](context=gpc).to(dtype), batches)


def apart(compared: Compared) -> float:
    """The largest relative distance between the truth and what a rank holds of it."""
    truth, worst = compared.truth.reshape(-1).double(), 0.0
    for part in compared.found:
        mine = truth if part.positions is None else truth[part.positions.reshape(-1)]
        worst = max(worst, float((part.value.reshape(-1) - mine).norm() / (truth.norm() + 1e-300)))
    return worst


def covered(compared: Compared) -> bool:
    """Whether all elements of the truth are held by some rank."""
    seen = torch.zeros(compared.truth.numel(), dtype=torch.bool)
    for part in compared.found:
        seen[slice(None) if part.positions is None else part.positions.reshape(-1)] = True
    return bool(seen.all())


def check(evidence: Evidence, rtol: float = 1e-9) -> None:
    """The run is equal to one process, in every number."""
    for name, one in evidence.weights_at_start.items():
        assert apart(one) == 0.0, name
        assert covered(one), name
    for step in evidence.steps:
        assert all(abs(loss - step.loss) <= rtol * abs(step.loss) for loss in step.found_loss if loss is not None), (
            step.loss,
            step.found_loss,
        )
        assert any(loss is not None for loss in step.found_loss)
        for name, gradient in step.gradients.items():
            assert apart(gradient.total) <= rtol, (name, "total", apart(gradient.total))
            assert covered(gradient.total), name
            if gradient.clipped is not None:
                assert apart(gradient.clipped) <= rtol, (name, "clipped")
            if gradient.truth_of_passes:
                total = torch.stack(list(gradient.truth_of_passes)).sum(0)
                assert (total - gradient.total.truth).norm() <= rtol * total.norm(), (name, "passes")
        for kind in ("weights", "buffers", "activations"):
            for name, one in getattr(step, kind).items():
                assert apart(one) <= 1e-7, (name, kind, apart(one))
        if step.norm is not None:
            assert all(abs((norm or 0.0) - step.norm) <= rtol * step.norm for norm in step.found_norm), (
                step.norm,
                step.found_norm,
            )
            assert step.norms.keys() == step.found_norms.keys()

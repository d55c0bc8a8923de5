"""What the ranks do: an architecture trained under a layout, beside what one process made of the same rows."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ColonnadeError, ParityError
from colonnade.parallel.placement import placement_of
from colonnade.testing import compare, gather_gradients, gather_weights, in_double
from tests.hf.zoo import BY_NAME, EPS, MAX_NORM, STEPS, Architecture, Truth, batch_of, num_rows

RTOL = 1e-9
MICRO_BATCHES = 3
"""Passes of a step, whose labels are uneven in number: accumulated, or in flight in a pipeline."""


@dataclass(frozen=True)
class Layout:
    """How a world is divided. What is left of the ranks is data parallel."""

    name: str
    ranks: int
    parallel: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    tied: bool | None = None
    runs: str = "trained"
    """What fills the cell: "trained" or "round_trip"."""

    def fits(self, architecture: Architecture) -> bool:
        """Whether there is something to show: experts to spread, an embedding to tie."""
        return (architecture.experts or "expert" not in self.parallel) and (self.tied is None or bool(architecture.tie))

    @property
    def config(self) -> dict[str, Any]:
        piped = "pipeline" in self.parallel
        passes = (
            {"schedule": {"type": "OneFOneB", "num_microbatches": MICRO_BATCHES}}
            if piped
            else {"gradient_accumulation": MICRO_BATCHES}
        )
        return {"parallel": self.parallel, "clip_grad_norm": MAX_NORM, **passes, **self.settings}


TENSOR = {"tensor": {"size": 2, "mode": "1d"}}
LAYOUTS = (
    Layout("tensor 2", 2, TENSOR),
    Layout("pipeline 2", 2, {"pipeline": 2}),
    Layout("tensor 2 x pipeline 2", 4, {"pipeline": 2, **TENSOR}),
    Layout("expert 2", 2, {"expert": 2}),
    Layout("sequence 2", 2, {"sequence": 2}),
    Layout("ZeRO 3", 2, {}, {"zero": 3}),
    Layout("tied", 4, {"pipeline": 2, **TENSOR}, tied=True),
    Layout("weights", 4, {"pipeline": 2, **TENSOR}, runs="round_trip"),
)


def run_all(layout: Layout, names: list[str], folder: str) -> None:
    """On each rank: every architecture in turn. Rank 0 writes a line for each as soon as it is done."""
    with colonnade.launch(layout.config, context=ParallelContext(), verbose=False) as gpc:
        for name in names:
            truth = torch.load(truth_file(folder, name, layout.tied))
            cell = run_one(BY_NAME[name], layout, gpc, truth, Path(folder))
            if gpc.get_global_rank() == 0:
                with Path(folder, f"{layout.name}.jsonl").open("a") as file:
                    file.write(json.dumps([name, cell]) + "\n")


def truth_file(folder: str, name: str, tied: bool | None) -> Path:
    return Path(folder, f"{name}{' tied' if tied else ''}.pt")


def run_one(
    architecture: Architecture, layout: Layout, gpc: ParallelContext, truth: Truth, folder: Path | None = None
) -> str:
    """What the cell says: "ok", or why not; refused before the first step, failed before it, or how it differs."""
    reason, engine = "", None
    try:
        model: Any = architecture.build(layout.tied)
        with in_double():
            model = colonnade.parallelize(model, context=gpc)
        engine = _engine(model, gpc)
        _check_split(engine.model, gpc)
    except ColonnadeError as error:
        reason = f"refused: {error}"
    except Exception:  # the same on every rank, most likely: the others need not start anew
        reason = f"failed: {traceback.format_exc()}"
    reasons: list[Any] = [None] * gpc.world_size
    dist.all_gather_object(reasons, reason)
    if engine is None or any(reasons):
        if not all(reasons):
            raise RuntimeError(f"only some ranks refused {architecture.name}: {reasons}")
        return reasons[0]
    try:
        if folder is None or layout.runs == "trained":
            trained(engine, architecture, gpc, truth)
        else:
            round_trip(engine, architecture, layout, gpc, folder)
    except ParityError as error:
        return f"wrong: {error}"
    finally:
        engine.close()
    return "ok"


def _engine(model: Any, gpc: ParallelContext) -> Any:
    return colonnade.initialize(model, lambda p: torch.optim.AdamW(p, lr=0.01, eps=EPS), context=gpc)[0]


def _check_split(model: nn.Module, gpc: ParallelContext) -> None:
    """Ranks that all do all of the work would equal one process too."""
    shards = {mode for parameter in model.parameters() for mode in placement_of(parameter).shards}
    for mode in (ParallelMode.TENSOR, ParallelMode.EXPERT):
        if gpc.is_initialized(mode) and gpc.get_world_size(mode) > 1 and mode not in shards:
            raise AssertionError(f"no parameter is split over {mode}")
    sequence = gpc.get_world_size(ParallelMode.SEQUENCE) if gpc.is_initialized(ParallelMode.SEQUENCE) else 1
    if sequence > 1 and not hasattr(model, "split_sequences"):
        raise AssertionError("sequences are not split")


def trained(engine: Any, architecture: Architecture, gpc: ParallelContext, truth: Truth) -> None:
    """Three steps; loss, every gradient and the norm at each, and the weights at the end, are those of one process."""
    for step in range(STEPS):
        _step(engine, architecture, gpc, step, truth)
    compare(truth["weights"], gather_weights(engine.model, gpc), RTOL)


def round_trip(engine: Any, architecture: Architecture, layout: Layout, gpc: ParallelContext, folder: Path) -> None:
    """Written by the ranks, read by transformers, and read by the ranks again: the same bits."""
    plain = architecture.build(layout.tied)
    saved = engine.save_pretrained(folder / f"{layout.name} of {architecture.name}")
    theirs = type(plain).from_pretrained(saved, dtype=torch.float64).state_dict()
    with in_double():
        ours = colonnade.from_pretrained(
            saved, model_class=type(plain), dtype=torch.float64, experts_implementation="eager", context=gpc
        )
    again = _engine(ours, gpc)
    try:
        _same_bits(plain.state_dict(), theirs, "what transformers reads")
        _same_bits(dict(plain.named_parameters()), gather_weights(again.model, gpc), "what ranks read")
    finally:
        again.close()


def _same_bits(truth: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str) -> None:
    wrong = [name for name in truth if name not in found or not torch.equal(truth[name], found[name])]
    if wrong:
        raise ParityError(f"{what} differs from what was written in {wrong[:8]}")


def _step(engine: Any, architecture: Architecture, gpc: ParallelContext, step: int, truth: Truth) -> None:
    data = gpc.get_world_size(ParallelMode.DATA) if gpc.is_initialized(ParallelMode.DATA) else 1
    first = gpc.get_local_rank(ParallelMode.DATA) if data > 1 else 0
    mine = num_rows(batch_of(architecture.kind, step), slice(first, None, data))
    rows = len(mine["labels"])
    count = 1 if gpc.pipeline_parallel_size > 1 else MICRO_BATCHES
    engine.zero_grad()
    total = torch.zeros(2, dtype=torch.float64)
    for at in range(count):
        micro = num_rows(mine, slice(at * rows // count, (at + 1) * rows // count))
        with in_double():
            loss = engine.execute_schedule(iter([micro]), return_output_label=False)[2]
        labels = float(engine.loss_count)
        total += torch.tensor([labels * loss.item(), labels], dtype=torch.float64)
    dist.all_reduce(total)
    _close("loss", total[0].item() / total[1].item(), truth["losses"][step], step)
    outcome = engine._sum_gradients()
    if gpc.config.get("zero") not in (1, 2):  # their gradients are sharded; the norm and the weights are compared
        _compare_gradients(truth["gradients"][step], gather_gradients(engine.model, gpc), truth["norms"][step])
    engine._finish_step(outcome)
    _close("norm", engine.grad_norm.item(), truth["norms"][step], step)


def _compare_gradients(truth: dict[str, Tensor], found: dict[str, Tensor], norm: float) -> None:
    """Those that are zero but for rounding, as of biases on keys, must be that on the ranks too."""
    zero = {name for name, gradient in truth.items() if gradient.norm() <= 1e-13 * norm}
    for name in zero & found.keys():
        if found[name].norm() > RTOL * norm:
            raise ParityError(f"the gradient of {name} is zero in one process, and {found[name].norm():.2e} long here")
    compare({name: gradient for name, gradient in truth.items() if name not in zero}, found, RTOL)


def _close(what: str, found: float, truth: float, step: int) -> None:
    if not abs(found - truth) <= RTOL * abs(truth):
        raise ParityError(f"{what} of step {step} is {found!r}, and {truth!r} in one process")

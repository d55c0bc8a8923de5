"""No false alarm: `verify` finds every model of the grid, and every architecture of the Hugging Face table, equal to one process.

`python -m tests.proof.no_alarm grid|hf [--only llama ...] [--layouts "tensor 2" ...]` says which it does not.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ColonnadeError
from colonnade.parallel.split import split
from colonnade.testing import in_double, run_world
from tests.hf.runs import LAYOUTS, Layout
from tests.hf.zoo import ARCHITECTURES, BY_NAME, EPS, Architecture, batch_of, num_rows
from tests.models import grid

STEPS = 2
EQUAL = "equal"
QUIET = {"TORCH_DISTRIBUTED_DEBUG": "OFF", "TRANSFORMERS_VERBOSITY": "error"}
AT_ONCE = 6
"""Architectures in one world."""
TRAINED = [layout for layout in LAYOUTS if layout.runs == "trained"]


# -- on the ranks: "equal", "refused: ..." before the first step, or what verify says -------------------------


def verdicts(judge: Callable[[Any], str], cases: Sequence[Any]) -> list[str]:
    """Of each case in turn."""
    return [judge(case) for case in cases]


def of_grid(case: grid.Case) -> str:
    """A model of the library."""
    piped = "pipeline" in case.parallel
    schedule = {"schedule": {"type": "OneFOneB", "num_microbatches": grid.MICRO_BATCHES}} if piped else {}
    config = {"parallel": case.parallel, "clip_grad_norm": 1.0, **schedule}
    with colonnade.launch(config, context=ParallelContext(), verbose=False) as gpc:
        whole = grid.MODELS[case.model](**case.options, context=gpc).double()
        model = split(whole, num_stages=gpc.pipeline_parallel_size) if piped else whole
        part = gpc.get_local_rank(ParallelMode.DATA)
        return _judged(
            model,
            lambda: grid.MODELS[case.model](context=gpc).double(),
            [[grid.batch(case.model, part, step)] for step in range(STEPS)],
            gpc,
            criterion=whole.criterion(),
        )


def of_table(case: tuple[str, str]) -> str:
    """An architecture of transformers under a layout of the table."""
    architecture, layout = BY_NAME[case[0]], next(one for one in LAYOUTS if one.name == case[1])
    with colonnade.launch(layout.config, context=ParallelContext(), verbose=False) as gpc, in_double():
        try:
            model: Any = colonnade.parallelize(architecture.build(layout.tied), context=gpc)
        except ColonnadeError as error:
            return f"refused: {error}"
        return _judged(
            model,
            lambda: architecture.build(layout.tied),
            [_micro_batches(architecture, gpc, step) for step in range(STEPS)],
            gpc,
        )


def _judged(model: Any, whole: Callable[[], nn.Module], batches: list[Any], gpc: ParallelContext, **more: Any) -> str:
    try:
        engine = colonnade.initialize(
            model, lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=EPS), context=gpc, **more
        )[0]
    except ColonnadeError as error:
        return f"refused: {error}"
    try:
        report = colonnade.verify(engine, reference=whole, batches=batches)
    except ColonnadeError:
        return f"not compared: {traceback.format_exc()}"
    finally:
        engine.close()
    return EQUAL if report.ok else str(report)


def _micro_batches(architecture: Architecture, gpc: ParallelContext, step: int) -> list[Any]:
    """What this rank is given in a step: its rows, in as many parts as are accumulated."""
    data = gpc.data_parallel_size
    mine = num_rows(batch_of(architecture.kind, step), slice(gpc.get_local_rank(ParallelMode.DATA), None, data))
    rows, count = len(mine["labels"]), gpc.config.get("gradient_accumulation") or 1
    return [num_rows(mine, slice(at * rows // count, (at + 1) * rows // count)) for at in range(count)]


# -- worlds ---------------------------------------------------------------------------------------------------


def grid_verdicts(cases: Sequence[grid.Case]) -> dict[str, str]:
    """The verdict of each case, in one world; all have the same number of ranks."""
    found = run_world(cases[0].ranks, verdicts, of_grid, cases, timeout=120 + 30 * len(cases), env=QUIET)
    return {str(case): verdict for case, verdict in zip(cases, found.values[0], strict=True)}


def table_verdicts(layout: Layout, architectures: Sequence[Architecture]) -> dict[str, str]:
    """The verdict of each architecture that fits, in one world."""
    cases = [(one.name, layout.name) for one in architectures if layout.fits(one)]
    if not cases:
        return {}
    found = run_world(layout.ranks, verdicts, of_table, cases, timeout=180 + 60 * len(cases), env=QUIET)
    return {f"{name}, {layout.name}": verdict for (name, _), verdict in zip(cases, found.values[0], strict=True)}


def _worlds(what: str, only: list[str] | None, layouts: list[str] | None) -> list[Callable[[], dict[str, str]]]:
    if what == "grid":
        return [
            lambda cases=chosen: grid_verdicts(cases)
            for cases in grid.mixes().values()
            if (chosen := [case for case in cases if not only or case.model in only])
        ]
    chosen = [BY_NAME[name] for name in only] if only else list(ARCHITECTURES)
    return [
        lambda layout=layout, first=first: table_verdicts(layout, chosen[first : first + AT_ONCE])
        for layout in TRAINED
        if not layouts or layout.name in layouts
        for first in range(0, len(chosen), AT_ONCE)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["grid", "hf"])
    parser.add_argument("--only", nargs="*", help="models of the grid, or architectures")
    parser.add_argument("--layouts", nargs="*", help="hf: layouts of the table, by name")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    begin, counts = time.monotonic(), {"equal": 0, "refused": 0, "wrong": 0}
    for world in _worlds(arguments.what, arguments.only, arguments.layouts):
        for name, verdict in world().items():
            kind = verdict if verdict == EQUAL else "refused" if verdict.startswith("refused") else "wrong"
            counts[kind] += 1
            print(f"{name}: {verdict if kind != 'wrong' else verdict[:3000]}", flush=True)
    print(f"{counts}, {time.monotonic() - begin:.0f} s")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())

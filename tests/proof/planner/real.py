"""A real run of a job, counted on every rank."""

from __future__ import annotations

from typing import Any

import colonnade
from colonnade.core import global_context
from colonnade.proof.planner.recorder import Observed, observe
from colonnade.proof.user_functions import call_given
from tests.proof.planner.jobs import JOBS


def counted_step(config: dict[str, Any], name: str, timed: int = 0) -> Observed:
    colonnade.launch(config, verbose=False)
    job, context = JOBS[name], global_context
    model = call_given(job.build, {"context": context, "config": context.config}, "model")
    whole = model.whole if hasattr(model, "whole") else model
    criterion = job.criterion() if job.criterion else whole.criterion() if hasattr(whole, "criterion") else None
    engine, *_ = colonnade.initialize(model, job.optimizer, criterion, verbose=False)
    data = job.loaded(context)

    def step() -> None:
        for _ in range(engine.accumulation):
            engine.zero_grad()
            engine.execute_schedule(iter([data]))
            engine.step()

    found = observe(engine, step, timed=timed)
    engine.close()
    global_context.destroy()
    return found

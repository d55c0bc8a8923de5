"""hyper-parallel #382: a stage went on with the old values of a tied weight.

Shows as: after a step the copies of the tied weight differ.
"""

import torch

from colonnade import ParallelMode
from tests.corpus.runner import TIED, Bug, Run

BUG = Bug(
    "hyper-parallel #382",
    "one stage keeps the old values of a tied weight",
    "not-updated",
    layout={"pipeline": 2},
    kind=TIED,
    settings={"num_microbatches": 2},
)


def plant(run: Run) -> None:
    def stay(engine):
        step = engine._stepper.step

        def stepped(outcome):
            before = [p.detach().clone() for p in engine.model.parameters()]
            step(outcome)
            if engine.context.get_local_rank(ParallelMode.PIPELINE) == 1:
                with torch.no_grad():
                    for (name, parameter), old in zip(engine.model.named_parameters(), before, strict=True):
                        if name.startswith("head"):
                            parameter.copy_(old)

        engine._stepper.step = stepped

    run.after.append(stay)

"""flashlight #143: Adam counted a step for every parameter that it stepped on.

Shows as: later parameters are corrected for a bias that they no longer have.
"""

from functools import partial

import torch

from tests.corpus.runner import Bug, Run

BUG = Bug("flashlight #143", "the step counter is incremented for every parameter", "optimizer-differs")


def plant(run: Run) -> None:
    def change(engine):
        step = engine._stepper.step

        def stepped(outcome):
            for at, state in enumerate(engine.optimizer.state.values()):
                state["step"] += at
            step(outcome)

        engine._stepper.step = stepped

    run.optimizer = partial(torch.optim.Adam, lr=0.01)
    run.after.append(change)

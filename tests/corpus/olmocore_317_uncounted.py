"""OLMo-core #317: the optimizer never counted its steps.

Shows as: every step is corrected for bias as if it were the first.
"""

from functools import partial

import torch

from tests.corpus.runner import Bug, Run

BUG = Bug("OLMo-core #317", "the step counter is not incremented", "optimizer-differs")


def plant(run: Run) -> None:
    def change(engine):
        step = engine._stepper.step

        def stepped(outcome):
            for state in engine.optimizer.state.values():
                state["step"].zero_()
            step(outcome)

        engine._stepper.step = stepped

    run.optimizer = partial(torch.optim.Adam, lr=0.01)
    run.after.append(change)

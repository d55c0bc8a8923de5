"""Invented: a rank that is restarted loses the state of its optimizer.

Shows as: from the second step on it moves without momentum.
"""

from functools import partial

import torch

from tests.corpus.runner import Bug, Run

BUG = Bug("invented: lost momentum", "the second rank's momentum is cleared between steps", "optimizer-differs")


def plant(run: Run) -> None:
    def clear(engine):
        step = engine._stepper.step

        def stepped(outcome):
            if engine.context.get_global_rank() == 1:
                engine.optimizer.state.clear()
            step(outcome)

        engine._stepper.step = stepped

    run.optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    run.after.append(clear)

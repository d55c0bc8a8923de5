"""pytorch-a3c #12: the moments of Adam were shared, the counter of steps was not.

Shows as: one replica corrects for another bias, and moves further.
"""

from functools import partial

import torch

from tests.corpus.runner import Bug, Run

BUG = Bug("pytorch-a3c #12", "the step counter of Adam is not shared with the second rank", "optimizer-differs")


def plant(run: Run) -> None:
    def change(engine):
        step = engine._stepper.step

        def stepped(outcome):
            if engine.context.get_global_rank() == 1:
                for state in engine.optimizer.state.values():
                    state["step"].zero_()
            step(outcome)

        engine._stepper.step = stepped

    run.optimizer = partial(torch.optim.Adam, lr=0.01)
    run.after.append(change)

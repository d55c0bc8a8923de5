"""DeepSpeed #1823: Adam counted one step for every sub-group that it was called with.

Shows as: later sub-groups are corrected for more steps than there were.
"""

from functools import partial

import torch

from tests.corpus.runner import Bug, Run

BUG = Bug("DeepSpeed #1823", "sub-groups share one step counter", "optimizer-differs", ranks=3)


def plant(run: Run) -> None:
    def count(engine):
        step = engine._stepper.step

        def stepped(outcome):
            for number, parameter in enumerate(engine.model.parameters()):
                state = engine.optimizer.state[parameter]
                if state:
                    state["step"] += number
            step(outcome)

        engine._stepper.step = stepped

    run.optimizer = partial(torch.optim.Adam, lr=0.01)
    run.after.append(count)

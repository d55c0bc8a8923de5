"""Megatron-LM #5974, #5976: a step with no gradient made the optimizer's states, and it was counted.

Shows as: the first true update is corrected as if it were the second.
"""

from functools import partial

import torch

from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "Megatron-LM #5974, #5976",
    "the step that only creates the optimizer state is counted",
    "optimizer-differs",
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def prepare(engine):
        step = engine._stepper.step

        def stepped(outcome):
            for parameter in engine.model.parameters():
                state = engine.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.tensor(1.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
            step(outcome)

        engine._stepper.step = stepped

    run.optimizer = partial(torch.optim.Adam, lr=0.01)
    run.after.append(prepare)

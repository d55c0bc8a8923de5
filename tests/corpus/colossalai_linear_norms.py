"""Colossal-AI, low_level_optim: the norm of the experts was added to that of the dense parameters.

Shows as: a norm that is too large: 3 + 4 instead of 5.
"""

import torch.distributed as dist

from colonnade import ParallelMode
from tests.corpus.experts import is_expert
from tests.corpus.runner import EXPERTS, NORM, Bug, Run, squares

BUG = Bug(
    "Colossal-AI 4f9953b, low_level_optim",
    "norms of dense parameters and experts are added",
    "norms-averaged",
    layout={"expert": 2},
    kind=EXPERTS,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def norm(engine):
        experts = squares(engine, lambda name, parameter: is_expert(name))
        dist.all_reduce(experts, group=engine.context.get_group(ParallelMode.EXPERT))
        return squares(engine, lambda name, parameter: not is_expert(name)).sqrt() + experts.sqrt()

    run.measure_by(norm)

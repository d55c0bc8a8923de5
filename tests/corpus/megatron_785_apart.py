"""Megatron-LM #785: dense layers and experts had an optimizer each, and each clipped by its own norm.

Shows as: the result depends on whether expert parallelism is on.
"""

import torch

from tests.corpus.experts import is_expert
from tests.corpus.norms import taken_over
from tests.corpus.runner import EXPERTS, NORM, Bug, Run, squares

BUG = Bug(
    "Megatron-LM #785",
    "dense parameters and experts are clipped by separate norms",
    "norm-of-a-part",
    layout={"expert": 2},
    kind=EXPERTS,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    dense = taken_over(None, lambda name, _: not is_expert(name))

    def norm(engine):
        own = squares(engine, lambda name, _: is_expert(name))
        torch.distributed.all_reduce(own)
        told = dense(engine)
        for name, parameter in engine.model.named_parameters():
            if is_expert(name):
                parameter.grad *= told / own.sqrt()
        return told

    run.measure_by(norm)

"""DeepSpeed's fused fp16 optimizer: the norm of the experts was taken of their weights.

Shows as: a norm that hardly changes from step to step.
"""

import torch.distributed as dist

from tests.corpus.experts import is_expert
from tests.corpus.runner import EXPERTS, NORM, Bug, Run, squares

BUG = Bug(
    "DeepSpeed, fp16/fused_optimizer",
    "the norm uses the weights of experts, not their gradients",
    "norm-of-a-part",
    layout={"expert": 2},
    kind=EXPERTS,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def norm(engine):
        own = sum(p.detach().double().square().sum() for name, p in engine.model.named_parameters() if is_expert(name))
        dist.all_reduce(own)
        return (own + squares(engine, lambda name, parameter: not is_expert(name))).sqrt()

    run.measure_by(norm)

"""DeepSpeed #7967, #7302: with accumulation the norm was that of one micro-batch.

Shows as: a norm that does not belong to the gradient that is used.
"""

import torch

from tests.corpus.runner import NORM, Bug, Run, nothing

BUG = Bug(
    "DeepSpeed #7967, #7302",
    "the norm is that of the last micro-batch",
    "norm-of-a-part",
    layout={"tensor": 2},
    settings={"gradient_accumulation": 2, "clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    before = {}

    def keep(engine, number):
        before.update((name, p.grad) for name, p in engine.model.named_parameters())
        before.update((name, grad.clone()) for name, grad in before.items() if number and grad is not None)

    def norm(engine):
        last = [p.grad - before[name] for name, p in engine.model.named_parameters()]
        return torch.stack([gradient.double().square().sum() for gradient in last]).sum().sqrt()

    run.around_backward(keep, nothing)
    run.measure_by(norm)

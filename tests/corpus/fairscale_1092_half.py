"""fairscale #263, #1092: the norm was joined in fp16, where the square of 300 is infinite already.

Shows as: a norm that is not finite, of gradients that are.
"""

import torch.distributed as dist

from tests.corpus.runner import MLP, NORM, Bug, Kind, Run, numbers

BUG = Bug(
    "fairscale #263, #1092",
    "squares are summed in fp16 and overflow",
    "not-finite",
    kind=Kind(MLP.model, batches=lambda context, step: [(x, 3000 * y) for x, y in numbers(context, step)]),
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def norm(engine):
        total = sum(p.grad.half().square().sum() for p in engine.model.parameters())
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return total.double().sqrt()

    run.measure_by(norm)

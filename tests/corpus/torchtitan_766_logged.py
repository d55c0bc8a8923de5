"""torchtitan #766, #769 (pytorch #170862): the norm that is returned was not summed yet when it was read.

Shows as: gradients are clipped rightly; the norm that is told is one rank's share.
"""

from dataclasses import replace

from tests.corpus.norms import split, taken_over
from tests.corpus.runner import NORM, TENSOR, Bug, Run

BUG = Bug(
    "torchtitan #766, #769",
    "the logged norm is one rank's contribution",
    "norm-misses-shards",
    layout={"tensor": 2},
    kind=TENSOR,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def lazily(engine):
        decide = engine._stepper.policy.decide
        engine._stepper.policy.decide = lambda norms: replace(decide(norms), norm=taken_over(None, split)(engine))

    run.after.append(lazily)

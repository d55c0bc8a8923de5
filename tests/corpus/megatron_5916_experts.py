"""Megatron-LM #5916, first case: with EP > 1 and TP > 1 the norm left out some experts.

Shows as: a norm that is too small (11.51 for 12.28), so gradients are clipped too little.
"""

from colonnade import ParallelMode
from tests.corpus.experts import is_expert
from tests.corpus.norms import taken_over
from tests.corpus.runner import EXPERTS, NORM, Bug, Run

BUG = Bug(
    "Megatron-LM #5916 (norm)",
    "experts are included in the norm only on the first rank",
    "norm-misses-shards",
    layout={"expert": 2},
    kind=EXPERTS,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def norm(engine):
        first = engine.context.get_local_rank(ParallelMode.EXPERT) == 0
        mine = taken_over(
            ParallelMode.EXPERT, lambda name, _: is_expert(name) and first, lambda name, _: not is_expert(name)
        )
        return mine(engine)

    run.measure_by(norm)

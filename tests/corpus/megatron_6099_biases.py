"""Megatron-LM #6099: with one optimizer, the biases of experts were filtered over the wrong group.

Shows as: the norm leaves out the biases of the other ranks' experts; small, as biases are.
"""

from colonnade import ParallelMode
from tests.corpus.experts import is_expert
from tests.corpus.norms import taken_over
from tests.corpus.runner import EXPERTS, NORM, Bug, Run

BUG = Bug(
    "Megatron-LM #6099",
    "biases of experts are included in the norm only on the first rank",
    "norm-misses-shards",
    layout={"expert": 2},
    kind=EXPERTS,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def norm(engine):
        first = engine.context.get_local_rank(ParallelMode.EXPERT) == 0

        def counted(name, parameter):
            return is_expert(name) and (first or "bias" not in name)

        return taken_over(ParallelMode.EXPERT, counted, lambda name, _: not is_expert(name))(engine)

    run.measure_by(norm)

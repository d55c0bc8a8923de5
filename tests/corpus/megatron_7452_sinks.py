"""Megatron-LM #7452, finding 8: attention sinks are split by heads and not marked so; tensor ranks above 0 leave them out.

Shows as: a norm that is too small.
"""

from colonnade import ParallelMode
from tests.corpus.norms import taken_over, whole
from tests.corpus.runner import NORM, TENSOR, Bug, Run, is_split

BUG = Bug(
    "Megatron-LM #7452, finding 8",
    "one sharded parameter counts only on the first tensor rank",
    "norm-misses-shards",
    layout={"tensor": 2},
    kind=TENSOR,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def norm(engine):
        first = engine.context.get_local_rank(ParallelMode.TENSOR) == 0

        def counted(name, parameter):
            return is_split(parameter) and (name != "up.bias" or first)

        return taken_over(ParallelMode.TENSOR, counted, whole)(engine)

    run.measure_by(norm)

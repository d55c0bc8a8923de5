"""DeepSpeed's norms for p other than 2: squares are summed, and the root of order p is taken.

Shows as: with norm_type = 3 a norm that is none.
"""

from tests.corpus.runner import NORM, Bug, Run, squares

BUG = Bug(
    "DeepSpeed, get_grad_norm with p = 3",
    "the third root of a sum of squares",
    "norm-type-differs",
    settings={"clip_grad_norm": {"max_norm": NORM, "norm_type": 3.0}},
)


def plant(run: Run) -> None:
    run.config["clip_grad_norm"] = NORM
    run.measure_by(lambda engine: squares(engine).pow(1 / 3))

"""DeepSpeed #8588: the loss scale was raised before gradients were divided by it.

Shows as: gradients of such a step are half of what they should be.
"""

from tests.corpus.runner import Bug, Run

BUG = Bug(
    "DeepSpeed #8588", "from the second step, gradients are divided by twice the loss scale", "wrong-divisor", ranks=3
)


def plant(run: Run) -> None:
    calls = {}

    def halve(name, gradient, context):
        calls[name] = calls.get(name, 0) + 1
        if calls[name] > 1:
            gradient /= 2

    run.after_sums(halve)

"""transformers #34242: tokens were counted over the micro-batches of a rank, but not over the ranks.

Shows as: tokens of a rank with few of them weigh more.
"""

from torch.nn import functional as F

from tests.corpus.runner import CLASSES, Bug, Run, labelled

BUG = Bug(
    "transformers #34242",
    "the loss is the mean over ranks of the means over their tokens",
    "mean-of-means",
    kind=CLASSES,
    settings={"gradient_accumulation": 2},
)


def plant(run: Run) -> None:
    def criterion(context):
        counts = [sum(int((label >= 0).sum()) for _, label in labelled(context, step)) for step in range(2)]
        calls = iter(range(100))

        def loss(out, label):
            return 2 * F.cross_entropy(out, label, reduction="sum") / counts[next(calls) // 2 % 2]

        return loss

    run.criterion = criterion

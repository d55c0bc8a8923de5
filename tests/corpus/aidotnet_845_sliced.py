"""AiDotNet #845: the batch was never sliced, so every micro-batch was the first.

Shows as: one micro-batch counts for all.
"""

from torch.nn import functional as F

from tests.corpus.runner import Bug, Run

BUG = Bug(
    "AiDotNet #845",
    "every micro-step takes the first micro-batch",
    "micro-batch-twice",
    settings={"gradient_accumulation": 2},
)


def plant(run: Run) -> None:
    kept = {}

    def feed(engine):
        forward = engine._forward

        def first(x):
            if engine._passes == 0:
                kept["x"] = x
            kept["first"] = engine._passes == 0
            return forward(kept["x"])

        engine._forward = first

    def criterion(out, label):
        if kept["first"]:
            kept["label"] = label
        return F.mse_loss(out, kept["label"])

    run.after.append(feed)
    run.criterion = lambda context: criterion

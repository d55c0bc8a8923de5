"""nanochat #857: the learning rate followed each rank's own progress through its data.

Shows as: replicas step by different lengths.
"""

from tests.corpus.runner import Bug, Run

BUG = Bug("nanochat #857", "the second rank's learning rate is a little lower", "optimizer-differs")


def plant(run: Run) -> None:
    def slower(engine):
        if engine.context.get_global_rank() == 1:
            for group in engine.optimizer.param_groups:
                group["lr"] *= 0.97

    run.after.append(slower)

"""Invented: the step multiplies the learning rate by the number of ranks, which the batch size was to make up for.

Shows as: right gradients, steps that are too long.
"""

from tests.corpus.runner import Bug, Run

BUG = Bug("invented: scaled rate", "the learning rate is multiplied by the number of ranks", "optimizer-differs")


def plant(run: Run) -> None:
    def longer(engine):
        step, ranks = engine._stepper.step, engine.context.data_parallel_size

        def stepped(outcome):
            for group in engine.optimizer.param_groups:
                group["lr"] *= ranks
            step(outcome)
            for group in engine.optimizer.param_groups:
                group["lr"] /= ranks

        engine._stepper.step = stepped

    run.after.append(longer)

"""Invented: noise for privacy is drawn on every rank after the sum, from streams of their own.

Shows as: replicas drift apart.
"""

import torch

from tests.corpus.runner import Bug, Run

BUG = Bug("invented: noise", "every rank adds different noise to the mean", "replicas-differ")


def plant(run: Run) -> None:
    def disturb(name, gradient, context):
        draw = torch.Generator().manual_seed(context.get_global_rank())
        gradient += 0.01 * torch.randn(gradient.shape, generator=draw, dtype=gradient.dtype)

    run.after_sums(disturb)

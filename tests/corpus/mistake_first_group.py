"""Invented: only the first group of the optimizer is handed to the function that clips.

Shows as: weights are clipped and biases are not.
"""

import torch

from tests.corpus.runner import NORM, Bug, Run

BUG = Bug(
    "invented: the first group",
    "biases, in a group of their own, are not clipped",
    "not-clipped",
    settings={"clip_grad_norm": {"max_norm": NORM, "groups": {"vectors": {"params": "*.bias", "max_norm": NORM}}}},
)


def plant(run: Run) -> None:
    run.config["clip_grad_norm"] = {
        "max_norm": NORM,
        "groups": {"vectors": {"params": "*.bias", "max_norm": 1e9}},
    }
    run.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)

"""Colossal-AI #1218: under ZeRO gradients were never divided by the loss scale before they were clipped and used.

Shows as: gradients are too large by the scale.
"""

from torch import nn

from tests.corpus.models import scaled_gradient
from tests.corpus.runner import Bug, Run

BUG = Bug("Colossal-AI #1218", "gradients are not divided by the loss scale", "loss-scale-left")


def plant(run: Run) -> None:
    run.criterion = lambda context: lambda out, label: scaled_gradient(nn.functional.mse_loss(out, label), 1024.0)

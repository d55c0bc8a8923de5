"""Invented: a backward pass that is written by hand returns the gradient with the other sign.

Shows as: what lies before it climbs.
"""

import torch

from tests.corpus.runner import TENSOR, Bug, Run


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


BUG = Bug(
    "invented: other sign",
    "a hand-written backward pass has the wrong sign",
    "backward-differs",
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    class Climbing(run.kind.model):
        def enter(self, x):
            return Turned.apply(super().enter(x))

    run.model = Climbing

"""Over NCCL: a loss without logits on a split vocabulary, and blocks that compute their activations again."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.device.check import Check
from tests.engine import test_activations
from tests.models import test_fused_loss
from tests.nn.layer import test_linear_loss
from tests.ranks import body_of


def checks() -> Iterator[Check]:
    for dtype in (torch.float64, torch.bfloat16):  # by torch's functions, by Triton's kernels
        yield Check("memory", f"fused loss, {dtype}", 2, test_linear_loss._split, (2, dtype))
    for case in ("tensor", "zero 3", "pipeline", "sequence"):
        yield Check(
            "memory",
            f"fused loss of models, {case}",
            2,
            body_of(test_fused_loss.test_the_same_steps_without_logits),
            ([case],),
        )
    for case in ("tensor", "zero 3", "pipeline", "experts"):
        yield Check(
            "memory",
            f"activations computed again, {case}",
            2,
            body_of(test_activations.test_the_same_steps_under_every_kind_of_parallelism),
            ([case],),
        )

"""Metrics of torchmetrics: equal to one process on uneven ranks; a file apart, because each rank that imports it needs 1.5 s."""

from __future__ import annotations

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics.classification import MulticlassF1Score
from torchmetrics.utilities import dim_zero_cat

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.testing import run_world
from colonnade.trainer.hooks import MetricHook
from colonnade.trainer.metrics import StatefulMetric
from tests.trainer.runs import CLASSES, cut, make_trainer


class Tops(torchmetrics.Metric):
    """A metric of torchmetrics with a state of every kind that can be joined."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        zero = torch.zeros((), dtype=torch.float64)
        self.add_state("total", zero, dist_reduce_fx="sum")
        self.add_state("top", zero.clone(), dist_reduce_fx="max")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, output: Tensor, label: Tensor) -> None:
        best = output.softmax(-1).gather(1, label[:, None]).flatten()
        self.total = self.total + best.sum()
        self.top = torch.maximum(self.top, best.max())
        self.seen.append(best)

    def compute(self) -> Tensor:
        return self.total + 10 * self.top + 100 * dim_zero_cat(self.seen).median()


def test_metrics_of_torchmetrics_are_those_of_one_process_on_uneven_ranks():
    alone = run_world(1, _torchmetrics)
    together = run_world(2, _torchmetrics)
    for values in together.values:
        assert values == pytest.approx(alone.values[0], rel=1e-12)


def _torchmetrics() -> dict[str, float]:
    """Evaluated on 13 samples: 13 on one rank, 7 and 6 on two."""
    trainer = make_trainer({})
    rank, count = trainer.context.get_global_rank(), trainer.context.world_size
    made = [MetricHook(Tops), MetricHook(MulticlassF1Score(num_classes=CLASSES, average="macro"), name="F1")]
    return trainer.evaluate(cut(range(rank, 13, count), 13), hooks=made)


def test_states_of_torchmetrics_that_cannot_be_joined_are_refused():
    metric = torchmetrics.MeanMetric()
    stateful = StatefulMetric(metric, ParallelContext())
    assert stateful._states == {"mean_value": "sum", "weight": "sum"}
    assert not metric._to_sync
    metric.add_state("other", torch.zeros(()), dist_reduce_fx="mean")
    with pytest.raises(ConfigError, match="mean"):
        StatefulMetric(metric, ParallelContext())

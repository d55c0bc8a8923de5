"""Loss and metrics over uneven data are those of one process on all samples, on any number of ranks and in a pipeline."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassF1Score
from torchmetrics.utilities import dim_zero_cat

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.testing import run_world
from colonnade.trainer.hooks import AccuracyHook, LossHook, MetricHook
from colonnade.trainer.metrics import StatefulMetric
from tests.trainer.runs import CLASSES, PIPELINE, cut, make_trainer, model, samples, uneven

COUNT = 23
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data 2": (2, {}),
    "pipeline 2": (2, PIPELINE),
    "tensor 2": (2, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}),
    "data 2 x pipeline 2": (4, PIPELINE),
    "data 4": (4, {}),
}


class Margin:
    """Sums, extremes and everything it has seen, in the manner of torchmetrics but without it."""

    higher_is_better = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = torch.zeros((), dtype=torch.float64), 0
        self.top = torch.full((), -torch.inf, dtype=torch.float64)
        self.low = torch.full((), torch.inf, dtype=torch.float64)
        self.seen: list[Tensor] = []

    def update(self, output: Tensor, label: Tensor) -> None:
        best = output.softmax(-1).gather(1, label[:, None]).flatten()
        self.total, self.count = self.total + best.sum(), self.count + len(best)
        self.top, self.low = torch.maximum(self.top, best.max()), torch.minimum(self.low, best.min())
        self.seen.append(best)

    def compute(self) -> float:
        return float(self.total + self.count + 10 * self.top + 7 * self.low + 100 * torch.cat(self.seen).median())


STATES = {"total": "sum", "count": "sum", "top": "max", "low": "min", "seen": "cat"}


def counted(output: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """A criterion that counts some labels only."""
    counts = label != 0
    return (F.cross_entropy(output, label, reduction="none") * counts).sum(), counts.sum()


def measure(config: dict[str, Any], criterion: str, accumulation: int = 1) -> dict[str, Any]:
    trainer = make_trainer({**config, "gradient_accumulation": accumulation}, globals().get(criterion, F.cross_entropy))
    batches = uneven(trainer.context, COUNT)
    hooks = [LossHook(), AccuracyHook(), MetricHook(Margin, states=STATES)]
    trainer.fit(batches, epochs=2, hooks=hooks, test_dataloader=batches)
    for metric in trainer.states["metrics"]["train"].values():
        metric.gather()  # once more: it changes nothing of what each rank has seen
    found = {
        f"{kind} {name}": metric.get_accumulated_value()
        for kind in ("train", "test")
        for name, metric in trainer.states["metrics"][kind].items()
    }
    again = trainer.evaluate(batches)
    trainer.context.destroy()
    assert again == {name.removeprefix("test "): value for name, value in found.items() if name.startswith("test ")}
    return {**found, "steps": trainer.cur_step, "lengths": len(batches)}


def truth(criterion: str) -> dict[str, float]:
    x, y = samples(COUNT)
    output = model()(x).detach()
    margin = Margin()
    margin.update(output, y)
    total, count = counted(output, y)
    return {
        "Loss": (total / count if criterion == "counted" else F.cross_entropy(output, y)).item(),
        "Accuracy": float((output.argmax(-1) == y).double().mean()),
        "Margin": margin.compute(),
    }


CRITERIA = ("mean", "counted")


def measure_both(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [measure(config, criterion) for criterion in CRITERIA]


@pytest.mark.parametrize("name", LAYOUTS)
def test_metrics_are_those_of_one_process(name):
    ranks, config = LAYOUTS[name]
    by_rank = run_world(ranks, measure_both, config).values
    for criterion, *found in zip(CRITERIA, *by_rank, strict=True):
        if name.startswith("data"):
            assert len({values["lengths"] for values in found}) > 1  # the data is uneven
        for values in found:
            for kind in ("train", "test"):
                for metric, value in truth(criterion).items():
                    assert values[f"{kind} {metric}"] == pytest.approx(value, rel=1e-12), (kind, metric)
        assert len({values["steps"] for values in found}) == 1


def test_accumulation_over_uneven_data_counts_every_sample():
    expected = truth("mean")
    for values in run_world(2, measure, {}, "mean", accumulation=2).values:
        assert values["train Loss"] == pytest.approx(expected["Loss"], rel=1e-12)
        assert values["steps"] == 2 * -(-max(4, values["lengths"]) // 2)


def test_a_metric_that_says_nothing_of_its_state_is_refused_on_several_ranks():
    told = [outcome.message for outcome in run_world(2, _silent_metric, check=False).outcomes]
    assert all(
        re.search("MetricHook.*does not declare its state.*Pass the reduction.*: states=", text) for text in told
    )


def _silent_metric() -> None:
    trainer = make_trainer({})
    trainer.fit(cut(range(8), 8), epochs=1, hooks=[MetricHook(Margin)])


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

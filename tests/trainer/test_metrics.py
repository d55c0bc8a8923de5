"""Loss and metrics over uneven data are those of one process on all samples, on any number of ranks and in a pipeline."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.testing import run_world
from colonnade.trainer.hooks import AccuracyHook, LossHook, MetricHook
from tests.trainer.runs import PIPELINE, cut, make_trainer, model, samples, uneven

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
    assert all(re.search("MetricHook.*does not declare its state.*Pass a reduction.* states=", text) for text in told)


def _silent_metric() -> None:
    trainer = make_trainer({})
    trainer.fit(cut(range(8), 8), epochs=1, hooks=[MetricHook(Margin)])

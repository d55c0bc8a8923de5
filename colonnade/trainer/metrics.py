"""Metrics that are correct over ranks with uneven data: sums and counts are added, and means are never averaged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from colonnade.comm.messages import is_alone
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.trainer.records import gather_values, is_first_with_data, sum_over_world


class Metric(ABC):
    """A metric of `trainer.states["metrics"]`. `gather` communicates; reading the value does not."""

    higher_is_better = False

    @abstractmethod
    def reset(self) -> None:
        """Remove all accumulated values. Called at the start of an epoch."""

    def gather(self) -> None:
        """Compute the value over all ranks. Collective over the world."""

    @abstractmethod
    def get_accumulated_value(self) -> float:
        """Return the last gathered value of the epoch; nan if there were no samples."""


class ValueMetric(Metric):
    """A number with the same value on every rank, such as the learning rate."""

    def __init__(self, value: float = float("nan")) -> None:
        self.value = value

    def reset(self) -> None:
        """Do nothing: the value is kept between epochs."""

    def get_accumulated_value(self) -> float:
        return self.value


class MeanMetric(Metric):
    """A mean: a sum divided by a count. Ranks that see the same data count once."""

    def __init__(self, context: ParallelContext, higher_is_better: bool = False) -> None:
        self.higher_is_better = higher_is_better
        self._context = context
        self._counts = is_first_with_data(context)
        self._value = float("nan")
        self.reset()

    def reset(self) -> None:
        self._local: Tensor | None = None
        self._total = self._count = 0.0

    def update(self, total: Tensor | float, count: Tensor | float) -> None:
        """Add the sum and count of this rank, without copying them from the device."""
        if self._counts:
            device = self._context.device
            both = torch.stack(
                [torch.as_tensor(x, device=device).detach().double().reshape(()) for x in (total, count)]
            )
            self._local = both if self._local is None else self._local + both

    def update_global(self, total: float, count: float) -> None:
        """Add a sum and a count that are already totals over all ranks. Every rank must pass the same numbers."""
        self._total += total
        self._count += count

    def sums(self) -> tuple[float, float]:
        """Return (sum, count) over all ranks. Collective over the world."""
        local = torch.zeros(2, dtype=torch.float64, device=self._context.device) if self._local is None else self._local
        total, count = sum_over_world(local.clone(), self._context).tolist()
        return self._total + total, self._count + count

    def gather(self) -> None:
        total, count = self.sums()
        self._value = total / count if count else float("nan")

    def get_accumulated_value(self) -> float:
        return self._value

    def state_dict(self) -> dict[str, Any]:
        """Return the sums over all ranks, which another layout can load, too. Collective over the world."""
        return {"sums": list(self.sums()), "value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._total, self._count = map(float, state["sums"])
        self._value = float(state["value"])


_REDUCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "max": lambda values: torch.stack([torch.as_tensor(value) for value in values]).amax(0),
    "min": lambda values: torch.stack([torch.as_tensor(value) for value in values]).amin(0),
    "cat": lambda values: [entry for value in values for entry in (value if isinstance(value, list) else [value])],
}


class StatefulMetric(Metric):
    """Wraps an object with update(output, label), compute() and reset(), such as a torchmetrics metric.

    Args:
        metric: the object.
        context: the parallel context.
        states: reduction (sum, max, min or cat) of each state attribute over the ranks. torchmetrics metrics declare
            their states; any other metric needs this argument on more than one rank.
    """

    def __init__(self, metric: Any, context: ParallelContext, states: Mapping[str, str] | None = None) -> None:
        missing = [name for name in ("update", "compute", "reset") if not callable(getattr(metric, name, None))]
        if missing:
            raise ConfigError(
                f"a metric needs the methods update, compute and reset, but {type(metric).__name__} lacks {missing}. "
                "Define the missing methods.",
                code="C092",
            )
        self._metric, self._context = metric, context
        self._states = dict(states) if states is not None else _declared(metric)
        if self._states is None and not is_alone(context):
            raise ConfigError(
                f"{type(metric).__name__} does not declare its state, so it cannot be reduced over several ranks. "
                "Pass a reduction (sum, max, min or cat) for each attribute, such as states={'correct': 'sum', "
                "'total': 'sum'}.",
                code="C092",
            )
        self.higher_is_better = bool(getattr(metric, "higher_is_better", False))
        if hasattr(metric, "sync_on_compute"):
            # torchmetrics would reduce over all ranks, and count replicas and pipeline stages without output.
            metric.sync_on_compute = metric._to_sync = False
        self._value = float("nan")
        self.reset()

    def reset(self) -> None:
        self._metric.reset()
        self._saw = False

    def update(self, output: Any, label: Any) -> None:
        """Update the metric with a batch of this rank."""
        self._saw = True
        self._metric.update(output, label)

    def gather(self) -> None:
        if self._states is None:
            self._value = _number(self._metric.compute())
            return
        own, joined = self._read(), self._joined()
        self._value = float("nan")
        if joined is not None:
            self._write(joined)
            self._value = _number(self._metric.compute())
            self._write(own)

    def get_accumulated_value(self) -> float:
        return self._value

    def state_dict(self) -> dict[str, Any]:
        """Return the state over all ranks, if the reductions of the states are known. Collective over the world."""
        return {"joined": self._joined(), "value": self._value} if self._states is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of all ranks on rank 0, and reset the other ranks."""
        self.reset()
        self._value = float(state["value"])
        if state["joined"] is not None and self._context.get_global_rank() == 0:
            self._saw = True
            self._write(state["joined"])

    def _joined(self) -> dict[str, Any] | None:
        """The state over all ranks that had a batch, in rank order; None if none had. Collective over the world."""
        has = self._saw and is_first_with_data(self._context)
        parts = gather_values(self._read() if has else None, has, self._context)
        if not parts:
            return None
        return {name: _REDUCTIONS[how]([part[name] for part in parts]) for name, how in (self._states or {}).items()}

    def _read(self) -> dict[str, Any]:
        return {name: getattr(self._metric, name) for name in self._states or {}}

    def _write(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            here = getattr(self._metric, name)
            setattr(self._metric, name, value.to(here.device) if isinstance(here, Tensor) else value)
        if hasattr(self._metric, "_computed"):
            self._metric._computed = None  # the cached result of torchmetrics


def _declared(metric: Any) -> dict[str, str] | None:
    """The reductions that a torchmetrics metric declares for its states."""
    known = getattr(metric, "_reductions", None)
    if not isinstance(known, Mapping):
        return None
    found = {name: str(getattr(how, "__name__", how)).removeprefix("dim_zero_") for name, how in known.items()}
    unknown = {name: how for name, how in found.items() if how not in _REDUCTIONS}
    if unknown:
        raise ConfigError(
            f"the states {unknown} of {type(metric).__name__} have a reduction other than sum, max, min or cat. The "
            "value of the metric would differ from a single-process run. Use another metric.",
            code="C092",
        )
    return found


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            f"a metric must return one number, but it returned a tensor of shape {tuple(value.shape)}", code="C092"
        )
    return float(value)

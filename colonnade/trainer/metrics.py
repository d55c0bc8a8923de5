"""Metrics that are right across ranks and uneven data: sums and counts are added up, never means of means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from colonnade.comm.messages import is_alone
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.trainer.records import gather_values, speaks, sum_over_world


class Metric(ABC):
    """What hooks keep in `trainer.states["metrics"]`. Reading its value never communicates; `gather` does."""

    higher_is_better = False

    @abstractmethod
    def reset(self) -> None:
        """An epoch begins."""

    def gather(self) -> None:
        """Compute the value over all ranks. Collective."""

    @abstractmethod
    def get_accumulated_value(self) -> float:
        """The value over the epoch, as it was last gathered; nan if nothing was measured."""


class ValueMetric(Metric):
    """A number that is the same on every rank, such as the learning rate."""

    def __init__(self, value: float = float("nan")) -> None:
        self.value = value

    def reset(self) -> None:
        """Nothing: it is what it was last set to."""

    def get_accumulated_value(self) -> float:
        return self.value


class MeanMetric(Metric):
    """A sum over a count. Every rank adds what it has seen; ranks that see the same data count once."""

    def __init__(self, context: ParallelContext, higher_is_better: bool = False) -> None:
        self.higher_is_better = higher_is_better
        self._context = context
        self._speaks = speaks(context)
        self._value = float("nan")
        self.reset()

    def reset(self) -> None:
        self._mine: Tensor | None = None
        self._total = self._count = 0.0

    def update(self, total: Tensor | float, count: Tensor | float) -> None:
        """Add what this rank has seen; the numbers stay on their device."""
        if self._speaks:
            device = self._context.device
            both = torch.stack(
                [torch.as_tensor(x, device=device).detach().double().reshape(()) for x in (total, count)]
            )
            self._mine = both if self._mine is None else self._mine + both

    def update_global(self, total: float, count: float) -> None:
        """Add what all ranks have seen together, told to all of them."""
        self._total += total
        self._count += count

    def sums(self) -> tuple[float, float]:
        """(sum, count) over all ranks. Collective."""
        mine = torch.zeros(2, dtype=torch.float64, device=self._context.device) if self._mine is None else self._mine
        total, count = sum_over_world(mine.clone(), self._context).tolist()
        return self._total + total, self._count + count

    def gather(self) -> None:
        total, count = self.sums()
        self._value = total / count if count else float("nan")

    def get_accumulated_value(self) -> float:
        return self._value

    def state_dict(self) -> dict[str, Any]:
        """Sums over all ranks, so that another layout can take them up. Collective."""
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
    """Any object with update(output, label), compute() and reset(), in the manner of torchmetrics.

    `states` names the attributes that hold what it has seen and how those of two ranks become one: sum, max, min or
    cat. A metric of torchmetrics says so itself. Without either it works in one process only.
    """

    def __init__(self, metric: Any, context: ParallelContext, states: Mapping[str, str] | None = None) -> None:
        missing = [name for name in ("update", "compute", "reset") if not callable(getattr(metric, name, None))]
        if missing:
            raise ConfigError(
                f"a metric has update, compute and reset; {type(metric).__name__} lacks {missing}", code="C092"
            )
        self._metric, self._context = metric, context
        self._states = dict(states) if states is not None else _declared(metric)
        if self._states is None and not is_alone(context):
            raise ConfigError(
                f"{type(metric).__name__} does not say what its state is, so that of several ranks cannot be joined. "
                f"Pass states={{'correct': 'sum', 'total': 'sum'}}: its attributes, and sum, max, min or cat for each.",
                code="C092",
            )
        self.higher_is_better = bool(getattr(metric, "higher_is_better", False))
        if hasattr(metric, "sync_on_compute"):
            # torchmetrics would join the whole world, and count replicas and stages without output.
            metric.sync_on_compute = metric._to_sync = False
        self._value = float("nan")
        self.reset()

    def reset(self) -> None:
        self._metric.reset()
        self._saw = False

    def update(self, output: Any, label: Any) -> None:
        """Let the metric see a batch of this rank."""
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
        """Its state over all ranks, where it is known what that is. Collective."""
        return {"joined": self._joined(), "value": self._value} if self._states is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Rank 0 takes up what all ranks had seen."""
        self.reset()
        self._value = float(state["value"])
        if state["joined"] is not None and self._context.get_global_rank() == 0:
            self._saw = True
            self._write(state["joined"])

    def _joined(self) -> dict[str, Any] | None:
        """The state over all ranks that have seen a batch, in rank order; None if none has. Collective."""
        has = self._saw and speaks(self._context)
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
            self._metric._computed = None  # torchmetrics keeps the last result


def _declared(metric: Any) -> dict[str, str] | None:
    """What a metric of torchmetrics says of its states."""
    known = getattr(metric, "_reductions", None)
    if not isinstance(known, Mapping):
        return None
    found = {name: str(getattr(how, "__name__", how)).removeprefix("dim_zero_") for name, how in known.items()}
    unknown = {name: how for name, how in found.items() if how not in _REDUCTIONS}
    if unknown:
        raise ConfigError(
            f"the states {unknown} of {type(metric).__name__} are not joined by sum, max, min or cat, so its value would "
            f"not be that of one process",
            code="C092",
        )
    return found


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(f"a metric gives one number, not a tensor of shape {tuple(value.shape)}", code="C092")
    return float(value)

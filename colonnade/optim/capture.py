"""CUDA graphs of a step: work that launches the same kernels on the same memory is recorded once, and repeated as one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from colonnade.errors import GradientError
from colonnade.optim.norm_readers import kernels_available
from colonnade.reduce.options import HALVES

Result = TypeVar("Result")

WARM_UP = 2
"""How often work runs as it is before it is recorded: kernels are compiled and tables made by then."""


def check_capturable(parameters: Sequence[Tensor], flat: bool) -> None:
    """Refuse parameters whose step cannot be a CUDA graph."""
    reason = None if flat else "flat_step is False"
    for parameter in parameters:
        if not parameter.is_cuda:
            reason = f"a parameter, or its state, is on {parameter.device}, and CUDA graphs are of a GPU"
        elif parameter.dtype not in (torch.float32, *HALVES) or not kernels_available():
            reason = f"a parameter is of {parameter.dtype}; it can be done for fp32, bf16 and fp16, with Triton"
    if reason is not None:
        raise GradientError(f"graph_step=True cannot be done: {reason}. Leave it out.")


class Capture:
    """A piece of work, recorded. What it returns lies in memory of its own, and is written over when it is repeated."""

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._holds: Sequence[object] = ()
        self._values: object = object()  # the first run is anew
        self._runs: int
        self._result: Any = None

    def run(self, holds: Sequence[object], values: object, work: Callable[[], Result]) -> Result:
        """Do the work. It is recorded anew when one of the objects that it reads is another, or a value has changed."""
        same = len(holds) == len(self._holds) and all(a is b for a, b in zip(holds, self._holds, strict=True))
        if not same or values != self._values:
            self._graph, self._result, self._runs = None, None, 0
            self._holds, self._values = tuple(holds), values
        if self._graph is None:
            self._runs += 1
            if self._runs <= WARM_UP:
                return work()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._result = work()
            self._graph = graph
        self._graph.replay()
        return self._result


class StepGraph:
    """The launches of a flat step as a CUDA graph. Divisor, drop flag and learning rates are read from device memory."""

    def __init__(self) -> None:
        self._capture = Capture()
        self._divisor = self._found_inf = torch.empty(0, device="cpu")
        self._rates: list[tuple[Tensor, float]] = []

    def step(
        self,
        launch: Callable[[Any, Tensor, Tensor, Sequence[Mapping[str, Any]]], None],
        plan: object,
        divisor: Tensor,
        found_inf: Tensor,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """`launch(plan, divisor, found_inf, groups)`, whose groups have their learning rates on the device."""
        if self._divisor.shape != divisor.shape or self._divisor.device != divisor.device:
            self._divisor, self._found_inf = divisor.clone(), found_inf.clone()
        else:
            self._divisor.copy_(divisor)
            self._found_inf.copy_(found_inf)
        rates = self._on_device(groups)
        moved = [{**group, "lr": rate} for group, rate in zip(groups, rates, strict=True)]
        settings = [{key: group[key] for key in group if key not in ("params", "lr")} for group in groups]
        inputs = self._divisor, self._found_inf
        self._capture.run((plan, *inputs, *rates), settings, lambda: launch(plan, *inputs, moved))

    def _on_device(self, groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """The groups' learning rates as they are now, each where it was before."""
        if len(self._rates) != len(groups):
            self._rates = [(torch.empty((), device=self._divisor.device), -1.0) for _ in groups]
        for at, (group, (held, known)) in enumerate(zip(groups, self._rates, strict=True)):
            rate = group["lr"]
            if isinstance(rate, Tensor) and rate.is_cuda:
                self._rates[at] = rate, -1.0
            elif float(rate) != known:
                self._rates[at] = held.fill_(float(rate)), float(rate)
        return [rate for rate, _ in self._rates]

"""One launch of a flat optimizer step: spans of one bucket that share hyper-parameters and a divisor.

`KernelRun` is one Triton launch that leaves the gradient alone. `TorchRun` is one call of torch's fused
kernels over flat pieces, anywhere they exist; those write the divided gradient back while it is in cache,
which on a CPU is faster than a second copy of it in small pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colonnade.optim.blocks import STEP_CHUNK, chunk_table, to_device
from colonnade.optim.flat_state import BucketState
from colonnade.optim.norm_readers import kernels_available
from colonnade.parallel.flat import padded
from colonnade.reduce.options import HALVES


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of parameters with equal step counts, to be found at place `step`."""

    start: int
    stop: int
    step: int


class Run(ABC):
    """A prepared launch. `group` is the torch parameter group as it is now; counts are already advanced."""

    @abstractmethod
    def adam(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        """Adam or, with `decoupled_weight_decay`, AdamW."""

    @abstractmethod
    def sgd(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        """SGD with or without momentum."""


def prepare(state: BucketState, steps: Tensor, fragments: Sequence[Fragment]) -> Run:
    """The fastest run for these spans on their device."""
    kinds = (torch.float32, *HALVES)
    if state.params.is_cuda and state.params.dtype in kinds and kernels_available():
        return KernelRun(state, steps, fragments)
    return TorchRun(state, steps, fragments)


class TorchRun(Run):
    """Torch's fused kernels on one piece per fragment."""

    def __init__(self, state: BucketState, steps: Tensor, fragments: Sequence[Fragment]) -> None:
        self._state = state
        self._fragments = fragments
        self._params = self._cut(state.params)
        self._steps = [steps[fragment.step] for fragment in fragments]
        self._moments: dict[str, list[Tensor]] = {}

    def adam(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        beta1, beta2 = group["betas"]
        grads, scale = self._divided(divisor)
        fused = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        fused(
            self._params,
            grads,
            self._moment("exp_avg"),
            self._moment("exp_avg_sq"),
            [],
            self._steps,
            amsgrad=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            grad_scale=scale,
            found_inf=found_inf,
        )

    def sgd(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        grads, scale = self._divided(divisor)
        momentum = group["momentum"]
        buffers = self._moment("momentum_buffer") if momentum else []
        for first in (False, True):
            chosen = [place for place, is_first in enumerate(self._firsts(group)) if is_first == first]
            if chosen:
                torch._fused_sgd_(
                    [self._params[place] for place in chosen],
                    [grads[place] for place in chosen],
                    [buffers[place] for place in chosen] if momentum else [],
                    weight_decay=group["weight_decay"],
                    momentum=momentum,
                    lr=group["lr"],
                    dampening=group["dampening"],
                    nesterov=group["nesterov"],
                    maximize=False,
                    is_first_step=first,
                    grad_scale=scale,
                    found_inf=found_inf,
                )

    def _firsts(self, group: Mapping[str, Any]) -> list[bool]:
        """Which fragments take their first step, where that matters: only dampening treats it differently.

        Reading the counts costs nothing on a CPU; on CUDA (fp64 with dampening alone comes here) it waits.
        """
        if not (group["momentum"] and group["dampening"]):
            return [False] * len(self._fragments)
        return [count == 1.0 for count in torch.stack(self._steps).tolist()]

    def _divided(self, divisor: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """The gradient pieces, and the divisor torch's kernel is to apply (fp32: too coarse for fp64)."""
        flat, dtype = self._state.bucket.grad, self._state.params.dtype
        assert isinstance(flat, Tensor)
        grads = self._cut(flat)
        if flat.dtype == dtype and dtype != torch.float64:
            return grads, divisor.float()
        return [torch.div(grad, divisor).to(dtype) for grad in grads], None

    def _moment(self, name: str) -> list[Tensor]:
        if name not in self._moments:
            self._moments[name] = self._cut(self._state.moment(name))
        return self._moments[name]

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [flat[fragment.start : fragment.stop] for fragment in self._fragments]


class KernelRun(Run):
    """The Triton kernels on a table of chunks: one launch whatever the number of fragments."""

    def __init__(self, state: BucketState, steps: Tensor, fragments: Sequence[Fragment]) -> None:
        from colonnade.optim.kernels import step_kernels

        self._kernels = step_kernels
        self._state = state
        self._steps = steps
        device = state.params.device
        pieces = list(self._pieces(fragments))
        table = chunk_table([(start, stop) for start, stop, _, _ in pieces], STEP_CHUNK, torch.device("cpu"))
        piece_of = table[:, 2].long()
        table[:, 2] = torch.tensor([step for _, _, step, _ in pieces], device="cpu")[piece_of]
        self._table = to_device(table, device)
        self._owners = to_device(
            torch.tensor([owner for *_, owner in pieces], dtype=torch.int32, device="cpu")[piece_of], device
        )

    def _pieces(self, fragments: Sequence[Fragment]) -> Iterator[tuple[int, int, int, int]]:
        """(start, stop, place of the step count, which member): gradients that are scattered are read one by one."""
        layout = self._state.bucket.layout
        for fragment in fragments:
            if isinstance(self._state.bucket.grad, Tensor):
                yield fragment.start, fragment.stop, fragment.step, 0
                continue
            for index, span in enumerate(layout.spans):
                if fragment.start <= span.start < fragment.stop:
                    yield span.start, padded(span.stop, layout.dtype), fragment.step, index

    def _gradient(self) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        grad = self._state.bucket.grad
        return (grad, None) if isinstance(grad, Tensor) else (grad.like, (grad.addresses, grad.limits, self._owners))

    def adam(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        state = self._state
        grad, scattered = self._gradient()
        self._kernels.adam(
            (state.params, grad, state.moment("exp_avg"), state.moment("exp_avg_sq")),
            scattered,
            self._table,
            (self._steps, divisor, found_inf),
            _scalar(group["lr"]),
            group["betas"],
            group["eps"],
            group["weight_decay"],
            group["decoupled_weight_decay"],
        )

    def sgd(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        state = self._state
        momentum = float(group["momentum"])
        buffer = state.moment("momentum_buffer") if momentum else state.params
        grad, scattered = self._gradient()
        self._kernels.sgd(
            (state.params, grad, buffer),
            scattered,
            self._table,
            (self._steps, divisor, found_inf),
            _scalar(group["lr"]),
            momentum,
            group["dampening"],
            group["weight_decay"],
            group["nesterov"],
        )


def _scalar(lr: float | Tensor) -> float | Tensor:
    """A learning rate for a kernel: a device tensor stays one, so that a captured graph reads it anew."""
    return lr if isinstance(lr, Tensor) and lr.is_cuda else float(lr)

"""Clip and step with a torch optimizer as it is: the divisor goes into the step instead of a pass of its own.

Optimizers built with `fused=True` divide the gradient by their attribute `grad_scale` and do nothing when
their attribute `found_inf` is 1. All others get one foreach division, and a decision on the host whether
to step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from colonnade.parallel.dtensor import local_part

ATTRIBUTES = ("grad_scale", "found_inf")
DOUBLES = (torch.float64, torch.complex128)


class ScaledStep:
    """Runs `optimizer.step()` on the gradient divided by `divisor`, or not at all where `found_inf` is 1.

    `slot_of` gives the place of a parameter in a divisor with several numbers (0 for those it leaves
    out). After the step the gradients hold the divided values, as torch's fused kernels leave them, so a
    second step on the same gradients would divide twice. An optimizer that is not fused has no way to
    drop a step on the device: then `found_inf` is read on the host, which on CUDA waits for the norm.
    """

    def __init__(self, optimizer: Optimizer, slot_of: Mapping[Tensor, int] | None = None) -> None:
        self.optimizer = optimizer
        self._slot_of = dict(slot_of or {})

    @property
    def waits_for_device(self) -> bool:
        """Whether dropping a step needs a decision on the host."""
        return not _drops_on_device(self.optimizer)

    @torch.no_grad()
    def step(self, divisor: Tensor, found_inf: Tensor | None = None) -> None:
        """One step; without `found_inf` it is never dropped and nothing is read on the host."""
        if _drops_on_device(self.optimizer):
            _give_momentum(self.optimizer)
            # `grad_scale` is fp32: too coarse for fp64 parameters, which are divided beforehand instead.
            inside = divisor.numel() == 1 and not any(p.dtype in DOUBLES for p in _params(self.optimizer))
            if not inside:
                self._divide(divisor)
            with _attributes(self.optimizer, divisor if inside else None, found_inf):
                self.optimizer.step()
        elif found_inf is None or not found_inf.item():
            self._divide(divisor)
            self.optimizer.step()

    def _divide(self, divisor: Tensor) -> None:
        by_slot: dict[int, list[Tensor]] = {}
        for param in _params(self.optimizer):
            if param.grad is not None:
                slot = self._slot_of.get(param, 0) if divisor.numel() > 1 else 0
                by_slot.setdefault(slot, []).append(param.grad)
        for slot, grads in by_slot.items():
            scale_all(grads, divisor.reshape(-1)[slot], divide=True)


@torch.no_grad()
def scale_all(gradients: Iterable[Tensor], factor: float | Tensor, divide: bool = False) -> None:
    """Multiply gradients, or divide them, in few launches: torch has one kernel for a factor of their own precision."""
    alike: dict[tuple[torch.device, torch.dtype, torch.layout], list[Tensor]] = {}
    for grad in map(local_part, gradients):
        wide = torch.float64 if grad.dtype in DOUBLES else torch.float32
        alike.setdefault((grad.device, wide, grad.layout), []).append(grad)
    for (device, wide, layout), grads in alike.items():
        by = factor.to(device, wide, non_blocking=True) if isinstance(factor, Tensor) else factor
        # Of sparse ones, each by itself.
        for some in [grads] if layout is torch.strided else [[grad] for grad in grads]:
            (torch._foreach_div_ if divide else torch._foreach_mul_)(some, by)


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _drops_on_device(optimizer: Optimizer) -> bool:
    """Whether the step reads `grad_scale` and `found_inf`; others raise on them or, worse, ignore them."""
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    damped = isinstance(optimizer, SGD) and any(
        group["momentum"] and group["dampening"] for group in optimizer.param_groups
    )
    return supports and not damped and all(group.get("fused") for group in optimizer.param_groups)


def _give_momentum(optimizer: Optimizer) -> None:
    """Start SGD's momentum buffers as zeros: a dropped first step would leave torch's own uninitialised.

    Without dampening a first step from zeros equals torch's first step.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param] if group["momentum"] and param.grad is not None else None
            if state is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)


@contextmanager
def _attributes(optimizer: Optimizer, divisor: Tensor | None, found_inf: Tensor | None) -> Iterator[None]:
    """Set `grad_scale` and `found_inf` for one step, joined with a loss scaler's, and put those back."""
    before = {name: getattr(optimizer, name) for name in ATTRIBUTES if hasattr(optimizer, name)}
    scale, flag = before.get("grad_scale"), before.get("found_inf")
    if divisor is not None:
        divisor = divisor.reshape(()).float()
        scale = divisor if scale is None else scale * divisor
    if found_inf is not None:
        found_inf = found_inf.reshape(()).float()
        flag = found_inf if flag is None else torch.maximum(flag, found_inf)
    optimizer.grad_scale, optimizer.found_inf = scale, flag  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in ATTRIBUTES:
            if name in before:
                setattr(optimizer, name, before[name])
            else:
                delattr(optimizer, name)

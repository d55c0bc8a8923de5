"""How a built engine is changed from the outside: its final gradients, its passes, its norm, its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.engine.engine import Engine
from colonnade.optim.clip_settings import ClipSettings
from colonnade.parallel.placement import is_dtensor
from colonnade.reduce.records import Demand, read_demands
from colonnade.verification.runs.engine_record import micro_batches


def trained(engine: Engine) -> list[Demand]:
    context = engine.context
    some = read_demands(engine.model, context.layout, context.get_global_rank())
    return [one for one in some if one.parameter.requires_grad and not is_dtensor(one.parameter)]


def first(engine: Engine, test: Callable[[Demand], Any]) -> Demand | None:
    """The first parameter of two dimensions or more that fits, else the first: the same one on ranks that share it."""
    fitting = [one for one in trained(engine) if test(one)]
    return next((one for one in fitting if one.parameter.dim() > 1), fitting[0] if fitting else None)


def is_summed(demand: Demand) -> bool:
    return any(len(factor.ranks) > 1 for factor in demand.owed)


def divisor_of(demand: Demand) -> int:
    """By how many a sum is divided."""
    total = 1
    for factor in demand.owed:
        total *= factor.divisor
    return total


def spans(engine: Engine, chosen: Tensor | None = None) -> Iterator[tuple[Tensor, int, int, Tensor]]:
    """(parameter, first, last + 1, its final gradient there), as far as this rank holds it; to be changed in place."""
    sharded = set()
    if hasattr(engine.optimizer, "gradient_slices"):
        for parameter, start, stop, gradient in engine.optimizer.gradient_slices():
            sharded.add(id(parameter))
            if gradient is not None and (chosen is None or parameter is chosen):
                yield parameter, start, stop, gradient.view(-1)
    for parameter in engine.model.parameters():
        grad = parameter.grad
        if grad is None or id(parameter) in sharded or is_dtensor(grad) or not (chosen is None or parameter is chosen):
            continue
        yield parameter, 0, grad.numel(), grad.view(-1) if grad.is_contiguous() else grad


def after_sums(engine: Engine, change: Callable[[], None]) -> None:
    finish = engine._sync.finish

    def finished() -> None:
        finish()
        if not engine._sync.synchroniser.failed_ranks:
            with torch.no_grad():
                change()

    engine._sync.finish = finished  # type: ignore[method-assign]  # of this one engine


def multiply(engine: Engine, demand: Demand | None, factor: float) -> bool:
    """Multiply the final gradient of one parameter, or of all."""

    def change() -> None:
        for _, _, _, gradient in spans(engine, demand.parameter if demand is not None else None):
            gradient.mul_(factor)

    after_sums(engine, change)
    return factor != 1.0


class OwnGradients:
    """This rank's own gradients of a step, by hooks: what each backward pass gives, before anything is summed."""

    def __init__(self, engine: Engine, demands: list[Demand]) -> None:
        self._sums: dict[int, Tensor] = {}
        self._sync = engine._sync
        for demand in demands:
            demand.parameter.register_hook(partial(self._add, id(demand.parameter)))

    def _add(self, key: int, grad: Tensor) -> None:
        self._sums[key] = self._sums[key] + grad if key in self._sums else grad.clone()

    def take(self, demand: Demand) -> Tensor:
        """On the scale of the final gradient; zero where there was none. Forgotten afterwards."""
        own = self._sums.pop(id(demand.parameter), None)
        own = torch.zeros_like(demand.parameter) if own is None else own.detach()
        return own if self._sync.scale is None else own * self._sync.scale


def put(engine: Engine, demand: Demand, value: Tensor) -> None:
    for _, start, stop, gradient in spans(engine, demand.parameter):
        gradient.copy_(value.reshape(-1)[start:stop].view_as(gradient))


def reduce_by_hand(engine: Engine, demand: Demand, value: Tensor) -> Tensor:
    """What is owed, done by hand."""
    value = value.contiguous()
    for factor in demand.owed:
        if len(factor.ranks) > 1:
            dist.all_reduce(value, group=engine.context.get_group(factor.mode))
        value /= factor.divisor
    return value


def weigh_passes(engine: Engine, weight: Callable[[int, int], float]) -> bool:
    """Multiply what each backward pass gives by weight(number of the pass, how many there are)."""
    count = engine.accumulation * micro_batches(engine)
    fired: dict[int, int] = {}

    def hook(key: int, grad: Tensor) -> Tensor:
        at = fired.get(key, 0)
        fired[key] = at + 1
        return grad * weight(at % count, count)

    for demand in trained(engine):
        demand.parameter.register_hook(partial(hook, id(demand.parameter)))
    return count > 1


def limit_of(engine: Engine) -> float | None:
    """Where all gradients are clipped by their one norm: to what."""
    settings = ClipSettings.read(engine.context.config.get("clip_grad_norm"))
    if settings is None or settings.method != "norm" or engine._stepper.policy is None or settings.clip_groups()[1:]:
        return None
    return float(settings.options["max_norm"])


def clip_by(engine: Engine, norm: Callable[[Tensor], Tensor], power: float = 1.0) -> bool:
    """Let norm(the true one) be what is told and clipped by."""
    limit, decide = limit_of(engine), engine._stepper._decide
    if limit is None:
        return False

    def decided(*args: Any) -> Any:
        decision = decide(*args)
        found = norm(decision.norm).to(decision.norm)
        divisor = ((found + 1e-6) / limit).clamp(min=1.0) ** power
        return replace(decision, norm=found, divisor=divisor.to(decision.divisor).expand_as(decision.divisor).clone())

    engine._stepper._decide = decided  # type: ignore[method-assign,assignment]  # of this one engine
    return True


def squares_of(engine: Engine) -> Tensor:
    found = [gradient.double().square().sum() for _, _, _, gradient in spans(engine)]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64)


def around_step(engine: Engine, before: Callable[[], Any], after: Callable[[Any], Any]) -> None:
    step = engine._stepper.step

    def stepped() -> None:
        with torch.no_grad():
            kept = before()
            step()
            if hasattr(engine.optimizer, "wait"):
                engine.optimizer.wait()
            after(kept)

    engine._stepper.step = stepped  # type: ignore[method-assign]  # of this one engine

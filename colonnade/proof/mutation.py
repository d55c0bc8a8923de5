"""Known mistakes (bugs) that are injected into a healthy engine, to check that `verify` and a test suite notice them.

Each mistake is a function that changes a finished engine from the outside, on every rank. It returns whether the
mistake has an effect on this rank. To inject a mistake into every engine of a process, such as a test command, set the
environment variables that `planted_environment` returns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.messages import message_device
from colonnade.config.settings import ClipSettings
from colonnade.engine.engine import ON_ENGINE, Engine
from colonnade.errors import ParityError, did_you_mean, listed
from colonnade.gradients.sums import Demand, read_demands
from colonnade.gradients.synchroniser import StepOutcome
from colonnade.optim.clip import Decision
from colonnade.optim.norm import Norms
from colonnade.parallel.placement import is_dtensor
from colonnade.proof.record import micro_batches

# --- Changes of an engine from the outside: its final gradients, its passes, its norm, its step ---


def trained(engine: Engine) -> list[Demand]:
    """Return the trained parameters of this rank, except FSDP2's (DTensors), with their required reductions."""
    context = engine.context
    some = read_demands(engine.model, context.layout, context.get_global_rank())
    return [demand for demand in some if demand.parameter.requires_grad and not is_dtensor(demand.parameter)]


def first(engine: Engine, test: Callable[[Demand], Any]) -> Demand | None:
    """Return the first parameter that passes the test, preferably with two dimensions or more; None if there is none.

    All ranks that store replicas of the parameter choose the same one.
    """
    fitting = [demand for demand in trained(engine) if test(demand)]
    return next((demand for demand in fitting if demand.parameter.dim() > 1), fitting[0] if fitting else None)


def is_summed(demand: Demand) -> bool:
    """Return whether a required reduction of the parameter is over several ranks."""
    return any(len(factor.ranks) > 1 for factor in demand.owed)


def divisor_of(demand: Demand) -> int:
    """Return the product of the divisors of a parameter's reductions."""
    total = 1
    for factor in demand.owed:
        total *= factor.divisor
    return total


def spans(engine: Engine, chosen: Tensor | None = None) -> Iterator[tuple[Tensor, int, int, Tensor]]:
    """Yield (parameter, start, stop, final gradient of this range) for all gradients on this rank, to change them in place."""
    sharded = set()
    for parameter, start, stop, gradient in engine.engine_optimizer.gradient_slices():
        sharded.add(id(parameter))
        if gradient is not None and (chosen is None or parameter is chosen):
            yield parameter, start, stop, gradient.view(-1)
    # Parameters that the optimizer does not shard have their gradients in `.grad`; FSDP2's (DTensors) cannot be changed here.
    for parameter in engine.model.parameters():
        grad = parameter.grad
        if grad is None or id(parameter) in sharded or is_dtensor(grad) or not (chosen is None or parameter is chosen):
            continue
        yield parameter, 0, grad.numel(), grad.view(-1) if grad.is_contiguous() else grad


def after_sums(engine: Engine, change: Callable[[StepOutcome], None]) -> None:
    """Make the engine call `change` in each step, after gradients are reduced and before they are clipped."""
    finish = engine._sync.finish

    def finished(*args: Any, **kwargs: Any) -> StepOutcome:
        # If backward failed on some rank, the step is skipped, and collectives of a mistake would hang.
        outcome = finish(*args, **kwargs)
        if not outcome.failed_ranks:
            with torch.no_grad():
                change(outcome)
        return outcome

    engine._sync.finish = finished  # type: ignore[method-assign]  # of this one engine


def multiply(engine: Engine, demand: Demand | None, factor: float) -> bool:
    """Multiply the final gradient of one parameter (`demand`), or of all parameters, by a factor, in each step.

    Returns False if nothing changes: the factor is 1, or all gradients are FSDP2's (DTensors).
    """

    def change(outcome: StepOutcome) -> None:
        for _, _, _, gradient in spans(engine, demand.parameter if demand is not None else None):
            gradient.mul_(factor)

    after_sums(engine, change)
    return factor != 1.0 and (demand is not None or bool(trained(engine)))


class OwnGradients:
    """The local gradients of a step, which hooks record before any reduction."""

    def __init__(self, engine: Engine, demands: list[Demand]) -> None:
        self._sums: dict[int, Tensor] = {}
        for demand in demands:
            demand.parameter.register_hook(partial(self._add, id(demand.parameter)))

    def _add(self, key: int, grad: Tensor) -> None:
        self._sums[key] = self._sums[key] + grad if key in self._sums else grad.clone()

    def take(self, demand: Demand, outcome: StepOutcome) -> Tensor:
        """Remove and return the local gradient of a parameter, scaled like the final gradient; zeros if there was none."""
        own = self._sums.pop(id(demand.parameter), None)
        own = torch.zeros_like(demand.parameter) if own is None else own.detach()
        return own if outcome.scale is None else own * outcome.scale


def put(engine: Engine, demand: Demand, value: Tensor) -> None:
    """Overwrite the final gradient of a parameter on this rank with a full value."""
    for _, start, stop, gradient in spans(engine, demand.parameter):
        gradient.copy_(value.reshape(-1)[start:stop].view_as(gradient))


def reduce_by_hand(engine: Engine, demand: Demand, value: Tensor) -> Tensor:
    """Apply all required reductions of a parameter to a local gradient, and return the result."""
    value = value.contiguous()
    for factor in demand.owed:
        if len(factor.ranks) > 1:
            dist.all_reduce(value, group=engine.context.get_group(factor.mode))
        value /= factor.divisor
    return value


def weigh_passes(engine: Engine, weight: Callable[[int, int], float]) -> bool:
    """Multiply the local gradients of each backward pass by `weight(index of the pass, number of passes)`.

    Returns False if a step has only one pass, or if all gradients are FSDP2's (DTensors).
    """
    count = engine.accumulation * micro_batches(engine)
    fired: dict[int, int] = {}

    def hook(key: int, grad: Tensor) -> Tensor:
        at = fired.get(key, 0)
        fired[key] = at + 1
        return grad * weight(at % count, count)

    demands = trained(engine)
    for demand in demands:
        demand.parameter.register_hook(partial(hook, id(demand.parameter)))
    return count > 1 and bool(demands)


def limit_of(engine: Engine) -> float | None:
    """Return the `max_norm` of all gradients together; None if the run clips by a different rule, or not at all."""
    settings = ClipSettings.read(engine.context.config.get("clip_grad_norm"))
    if settings is None or settings.method != "norm" or engine._stepper.policy is None or settings.clip_groups()[1:]:
        return None
    return float(settings.method_options["max_norm"])


def clip_by(engine: Engine, norm: Callable[[Tensor], Tensor], power: float = 1.0) -> bool:
    """Change the norm of each step to `norm(true norm)`, in reports and for clipping.

    The divisor is raised to the power `power`.

    Returns False if the run does not clip all gradients together by their norm.
    """
    limit, policy = limit_of(engine), engine._stepper.policy
    if limit is None or policy is None:
        return False
    decide = policy.decide

    def decided(norms: Norms) -> Decision:
        decision = decide(norms)
        found = norm(decision.norm).to(decision.norm)
        divisor = ((found + 1e-6) / limit).clamp(min=1.0) ** power
        return replace(decision, norm=found, divisor=divisor.to(decision.divisor).expand_as(decision.divisor).clone())

    policy.decide = decided  # type: ignore[method-assign]  # of this one engine
    return True


def squares_of(engine: Engine) -> Tensor:
    """Return the sum of squares of the final gradients on this rank."""
    found = [gradient.double().square().sum() for _, _, _, gradient in spans(engine)]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64)


def around_step(engine: Engine, before: Callable[[], Any], after: Callable[[Any], Any]) -> None:
    """Make the engine call `before` ahead of each optimizer step, and `after` with its result behind the step."""
    step = engine._stepper.step

    def stepped(outcome: StepOutcome) -> None:
        with torch.no_grad():
            kept = before()
            step(outcome)
            engine.wait_for_weights()
            after(kept)

    engine._stepper.step = stepped  # type: ignore[method-assign]  # of this one engine


VARIABLE, MARK = "COLONNADE_MISTAKE", "COLONNADE_MISTAKE_MARK"


class NotHere(ParityError):
    """The mistake has no effect on this run, for example because the run does not clip."""


@dataclass(frozen=True)
class Mistake:
    """A known mistake (bug) that can be injected.

    `causes` are the names (keys of `CAUSES`) that `verify` may give to this mistake. `plant` injects it into an engine,
    and returns whether the mistake has an effect on this rank.
    """

    name: str
    what: str
    causes: tuple[str, ...]
    plant: Callable[[Engine], bool]


MISTAKES: dict[str, Mistake] = {}


def mistake(what: str, *causes: str) -> Callable[[Callable[[Engine], bool]], Callable[[Engine], bool]]:
    """Register a function as a mistake. The name of the mistake is the name of the function, with hyphens.

    `what` describes the mistake in tables; `causes` are the names (keys of `CAUSES`) that `verify` may give to it.
    """

    def enter(function: Callable[[Engine], bool]) -> Callable[[Engine], bool]:
        name = function.__name__.replace("_", "-")
        MISTAKES[name] = Mistake(name, what, causes, function)
        return function

    return enter


def plant(engine: Engine, name: str) -> None:
    """Inject a mistake into an engine.

    Every rank raises `NotHere` if the mistake has an effect on no rank. Collective over the world.
    """
    if name not in MISTAKES:
        raise ParityError(
            f"{name!r} is no known mistake. Known mistakes: {listed(MISTAKES)}.{did_you_mean(name, MISTAKES)}",
            code="C100",
        )
    found = torch.tensor([int(MISTAKES[name].plant(engine))], device=message_device(engine.context.device))
    if engine.context.world_size > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if not found.item():
        raise NotHere(f"{name} is not applicable to this run")


def planted_environment(name: str, mark: Path) -> dict[str, str]:
    """Return environment variables that inject a mistake into every engine of a process.

    A process in which the mistake has an effect creates the file `mark`.
    """
    return {ON_ENGINE: f"{__name__}:plant_from_environment", VARIABLE: name, MARK: str(mark)}


def plant_from_environment(engine: Engine) -> None:
    """Inject the mistake that the environment variables name into a new engine, unless it has no effect there."""
    try:
        plant(engine, os.environ[VARIABLE])
    except NotHere:
        return
    Path(os.environ[MARK]).touch()


# --- Reductions ---


@mistake("a parameter is not reduced at all", "not-reduced", "partial-gradient", "tied-copy-missed")
def drop_a_reduction(engine: Engine) -> bool:
    """Replace the final gradient of one parameter by this rank's local gradient."""
    demand = first(engine, is_summed)
    if demand is None:
        return False
    own = OwnGradients(engine, [demand])
    after_sums(engine, lambda outcome: put(engine, demand, own.take(demand, outcome)))
    return True


@mistake("the sum of a parameter is taken twice", "summed-not-averaged", "reduced-twice")
def double_a_reduction(engine: Engine) -> bool:
    """Sum the reduced gradient of one parameter, which is equal on all ranks, over these ranks again."""
    demand = first(engine, is_summed)
    return demand is not None and multiply(engine, demand, float(max(len(factor.ranks) for factor in demand.owed)))


@mistake("a parameter is reduced over the wrong mode", "reduced-over-other-mode", "not-reduced")
def misroute_a_reduction(engine: Engine) -> bool:
    """Reduce one parameter over the first mode that its required reductions do not contain.

    The pipeline is excluded, because its ranks store different parameters.
    """
    context = engine.context
    for demand in trained(engine):
        owed = {factor.mode for factor in demand.owed}
        modes = [mode for mode in context.layout.modes if mode.name not in ("PIPELINE", "GLOBAL", "MODEL")]
        other = [m for m in modes if m not in owed and context.is_initialized(m) and context.get_world_size(m) > 1]
        ranks = {factor.ranks for factor in demand.owed}
        other = [mode for mode in other if tuple(context.get_ranks_in_group(mode)) not in ranks]
        if is_summed(demand) and other:
            break
    else:
        return False
    own, mode, found = OwnGradients(engine, [demand]), other[0], demand

    def change(outcome: StepOutcome) -> None:
        value = own.take(found, outcome).contiguous()
        dist.all_reduce(value, group=context.get_group(mode))
        put(engine, found, value / divisor_of(found))

    after_sums(engine, change)
    return True


@mistake("a parameter is divided by one rank too many", "wrong-divisor")
def wrong_divisor(engine: Engine) -> bool:
    """Divide the gradient of one parameter by n + 1 instead of n."""
    demand = first(engine, lambda demand: divisor_of(demand) > 1)
    return demand is not None and multiply(engine, demand, divisor_of(demand) / (divisor_of(demand) + 1))


@mistake("gradients are summed over data ranks and not divided", "summed-not-averaged", "scaled-by-mode")
def no_divisor(engine: Engine) -> bool:
    """Multiply all gradients by the number of data ranks, as if their sums were never divided."""
    return multiply(engine, None, float(engine.context.layout.distinct_data))


@mistake("the gradient of a parameter is lost", "missing-gradient")
def skip_a_parameter(engine: Engine) -> bool:
    """Set the final gradient of one parameter to zero."""
    demand = first(engine, lambda demand: True)
    if demand is not None:
        multiply(engine, demand, 0.0)
    return demand is not None


@mistake("two shards of a gradient are swapped", "shards-swapped")
def swap_two_shards(engine: Engine) -> bool:
    """Give each rank the gradient shard of the next rank in its group, for one parameter."""
    context = engine.context
    demand = first(engine, lambda demand: demand.placement.shards and not engine.engine_optimizer.is_sharded)
    if demand is None:
        return False
    mode = next(iter(demand.placement.shards))
    group, size, mine = context.get_group(mode), context.get_world_size(mode), context.get_local_rank(mode)

    def change(outcome: StepOutcome) -> None:
        grad = demand.parameter.grad
        assert grad is not None
        everyone = [torch.empty_like(grad.contiguous()) for _ in range(size)]
        dist.all_gather(everyone, grad.contiguous(), group=group)
        grad.copy_(everyone[(mine + 1) % size])

    after_sums(engine, change)
    return size > 1


@mistake("gradients of the previous step are used", "stale-gradient")
def one_step_late(engine: Engine) -> bool:
    """Use the gradients of the previous step; those of the first step are zero."""
    before: dict[tuple[int, int], Tensor] = {}

    def change(outcome: StepOutcome) -> None:
        for parameter, start, _, gradient in list(spans(engine)):
            late = before.get((id(parameter), start))
            before[id(parameter), start] = gradient.clone()
            gradient.zero_() if late is None else gradient.copy_(late)

    after_sums(engine, change)
    return True


# --- Losses and passes ---


@mistake("the first micro-batch of a step is left out", "micro-batch-missing", "last-micro-batch-only")
def skip_a_micro_batch(engine: Engine) -> bool:
    """Set the gradients of the first micro-batch to zero."""
    return weigh_passes(engine, lambda at, count: float(at != 0))


@mistake("only the last micro-batch of a step counts", "last-micro-batch-only")
def keep_the_last_micro_batch(engine: Engine) -> bool:
    """Set the gradients of all micro-batches except the last to zero."""
    return weigh_passes(engine, lambda at, count: float(at == count - 1))


@mistake("the first micro-batch of a step counts twice", "micro-batch-twice")
def repeat_a_micro_batch(engine: Engine) -> bool:
    """Double the gradients of the first micro-batch."""
    return weigh_passes(engine, lambda at, count: 1.0 + (at == 0))


@mistake("losses are not divided by the number of micro-batches", "scaled-by-accumulation", "scaled-by-mode")
def forget_accumulation(engine: Engine) -> bool:
    """Multiply the gradients of each pass by the number of passes, as if each pass were a full step."""
    return weigh_passes(engine, lambda at, count: float(count))


@mistake("the loss is multiplied by the number of ranks", "scaled-by-mode", "scaled-by-accumulation", "wrong-divisor")
def scale_the_loss(engine: Engine) -> bool:
    """Multiply all local gradients by the number of ranks, before any reduction."""
    size = engine.context.world_size
    weigh_passes(engine, lambda at, count: float(size))
    return size > 1 and bool(trained(engine))


@mistake("one rank has NaN in its gradient", "not-finite")
def nan_on_one_rank(engine: Engine) -> bool:
    """Set the local gradients of the last rank to NaN, in every pass."""
    if engine.context.get_global_rank() == engine.context.world_size - 1:
        weigh_passes(engine, lambda at, count: float("nan"))
    return bool(trained(engine))


# --- Clipping ---


@mistake("each rank clips by its local norm", "norm-misses-shards", "norm-of-a-part", "clipped-per-stage")
def clip_locally(engine: Engine) -> bool:
    """Clip by the norm of the gradients on this rank, without shards on other ranks and stages."""
    context = engine.context
    splits = [demand for demand in trained(engine) if demand.placement.shards]
    parted = context.pipeline_parallel_size > 1 or splits or engine.engine_optimizer.is_sharded
    return clip_by(engine, lambda norm: squares_of(engine).sqrt()) and bool(parted)


@mistake("the norm counts replicas once for each rank", "norm-counts-replicas")
def count_replicas(engine: Engine) -> bool:
    """Clip by a norm that adds the gradients of all ranks, so that a replicated gradient counts once for each replica."""

    def norm(true: Tensor) -> Tensor:
        total = squares_of(engine).to(message_device(engine.context.device))
        dist.all_reduce(total)
        return total.sqrt()

    copied = any(not demand.placement.shards for demand in trained(engine))
    sharded = engine.engine_optimizer.is_sharded
    return engine.context.world_size > 1 and copied and not sharded and clip_by(engine, norm)


@mistake("gradients are clipped on each rank before they are reduced", "clipped-before-reduced")
def clip_before_the_sums(engine: Engine) -> bool:
    """Clip the local gradients of each rank by their own norm, and reduce them afterwards."""
    limit, demands = limit_of(engine), trained(engine)
    if limit is None or engine.context.layout.distinct_data == 1 or not any(map(is_summed, demands)):
        return False
    own = OwnGradients(engine, demands)

    def change(outcome: StepOutcome) -> None:
        mine = [(demand, own.take(demand, outcome)) for demand in demands]
        norm = torch.stack([value.double().square().sum() for _, value in mine]).sum().sqrt()
        coefficient = float(min(1.0, limit / (float(norm) + 1e-6)))
        for demand, value in mine:
            put(engine, demand, reduce_by_hand(engine, demand, value * coefficient))

    after_sums(engine, change)
    return True


@mistake("gradients are not clipped", "not-clipped", "optimizer-differs")
def forget_to_clip(engine: Engine) -> bool:
    """Report the right norm, but do not divide the gradients."""
    return clip_by(engine, lambda norm: norm, power=0.0)


@mistake("gradients are clipped twice", "clipped-twice", "optimizer-differs")
def clip_twice(engine: Engine) -> bool:
    """Apply the clip coefficient twice."""
    return clip_by(engine, lambda norm: norm, power=2.0)


# --- Weights ---


@mistake("one rank starts with different weights", "weights-differ-at-start")
def start_apart(engine: Engine) -> bool:
    """Multiply the initial values of one replicated parameter by 1.01 on the last rank."""
    demand = first(engine, is_summed)
    if demand is None:
        return False
    if engine.context.get_global_rank() == engine.context.world_size - 1:
        with torch.no_grad():
            demand.parameter.mul_(1.01)
    return True


@mistake("the optimizer leaves a parameter out", "not-updated")
def skip_an_update(engine: Engine) -> bool:
    """Undo the update of one parameter after each optimizer step."""
    demand = first(engine, lambda demand: True)
    if demand is None:
        return False
    around_step(engine, lambda: demand.parameter.detach().clone(), demand.parameter.copy_)
    return True


@mistake("the weights of one rank drift from those of the others", "optimizer-differs", "replicas-differ")
def drift(engine: Engine) -> bool:
    """After each optimizer step, multiply one replicated parameter by 1 + 1e-7 on the last rank."""
    demand = first(engine, is_summed)
    if demand is None:
        return False
    if engine.context.get_global_rank() == engine.context.world_size - 1:
        around_step(engine, lambda: None, lambda _: demand.parameter.mul_(1 + 1e-7))
    return True


def known(names: str | None) -> Mapping[str, Mistake]:
    """Return the mistakes with these names, separated by commas; all mistakes if `names` is empty or None."""
    if not names:
        return MISTAKES
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in MISTAKES:
            raise ParityError(
                f"{name!r} is no known mistake. Known mistakes: {listed(MISTAKES)}.{did_you_mean(name, MISTAKES)}",
                code="C100",
            )
    return {name: MISTAKES[name] for name in chosen}

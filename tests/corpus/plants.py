"""Random mistakes in random runs: exit code 0 and a mistake above the stated tolerance never go together.

`python -m tests.corpus.plants [COUNT] [SEED] [FIRST]` draws so many runs (a model, a layout, random numbers in the forward pass, a
dtype) with one mistake in each, and lists those that `colonnade.verify` calls equal. A world verifies many of them.

A mistake changes gradients, weights or activations of the ranks by a drawn share. It measures the largest share by which
it has changed a tensor. Below the share that the documentation states as visible, any verdict is right.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import colonnade
from colonnade import ParallelMode
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ColonnadeError
from colonnade.parallel.placement import is_dtensor
from colonnade.parallel.split import split
from colonnade.proof.mutation import MISTAKES, NotHere, after_sums, plant, spans
from colonnade.testing import run_world
from tests.corpus import healthy

VISIBLE = {"fp64": 1e-3, "fp32": 1e-2, "bf16": 0.5}
"""By dtype: the share of a tensor (2-norm) from which a wrong factor has to be seen."""
PER_WORLD = 40
LIMIT = 1500.0


# --- Random numbers of the forward pass ---


def no_numbers(out: Tensor, rank: int) -> Tensor:
    return out


def for_each_element(out: Tensor, rank: int) -> Tensor:
    """One number for each element of the output: a single process repeats them."""
    return out + 0.3 * torch.randn_like(out)


def dropout(out: Tensor, rank: int) -> Tensor:
    """Dropout of the output: a single process repeats it."""
    return F.dropout(out, 0.2)


def for_each_rank(out: Tensor, rank: int) -> Tensor:
    """One number for the whole batch of a rank, of its own generator state: a single process cannot repeat it."""
    for _ in range(rank):
        torch.rand(())
    return out * (1 + 0.3 * torch.rand((), dtype=torch.float64).to(out.dtype))


def of_python(out: Tensor, rank: int) -> Tensor:
    """A number of Python's generator."""
    return out * (1 + 0.3 * random.random())


NUMBERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "none": no_numbers,
    "elements": for_each_element,
    "dropout": dropout,
    "ranks": for_each_rank,
    "python": of_python,
}


def draws_in(model: nn.Module, numbers: str, rank: int) -> None:
    """Let the output of the model contain these random numbers."""

    def change(module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            return NUMBERS[numbers](out, rank)
        return (NUMBERS[numbers](out[0], rank), *out[1:])

    if numbers != "none":
        model.register_forward_hook(change)


# --- Mistakes ---


@dataclass
class Planted:
    """What a mistake has done: the largest share of a tensor by which it changed it, on this rank."""

    share: float = 0.0

    def changed(self, tensor: Tensor, value: Tensor, least: float) -> Tensor:
        """Note the change of a tensor and return the new value; tensors below `least` consist of rounding errors."""
        size, moved = float(tensor.detach().double().norm()), float((value - tensor).detach().double().norm())
        if size > least:
            self.share = max(self.share, moved / size)
        return value


Change = Callable[[Tensor, random.Random, float], Tensor]


def times(x: Tensor, dice: random.Random, share: float) -> Tensor:
    return x * (1 + share)


def less(x: Tensor, dice: random.Random, share: float) -> Tensor:
    return x * (1 - min(share, 1.0))


def doubled(x: Tensor, dice: random.Random, share: float) -> Tensor:
    return 2 * x


def turned(x: Tensor, dice: random.Random, share: float) -> Tensor:
    return -x


def zero(x: Tensor, dice: random.Random, share: float) -> Tensor:
    return 0 * x


def noisy(x: Tensor, dice: random.Random, share: float) -> Tensor:
    draw = torch.Generator().manual_seed(dice.randrange(1 << 30))
    noise = torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype)
    return x + noise * (share * x.norm() / (noise.norm() + 1e-30))


def one_element(x: Tensor, dice: random.Random, share: float) -> Tensor:
    """The largest element only."""
    flat = x.detach().flatten().clone()
    if len(flat):
        flat[flat.abs().argmax()] *= 1 + share
    return x + (flat.view_as(x) - x.detach())


def backwards(x: Tensor, dice: random.Random, share: float) -> Tensor:
    return x.flatten().flip(0).view_as(x)


CHANGES: dict[str, Change] = {
    change.__name__: change for change in (times, less, doubled, turned, zero, noisy, one_element, backwards)
}


def _least(engine: Any) -> float:
    """Below this norm, a gradient consists of rounding errors of the others."""
    sizes = [float(gradient.double().norm()) for _, _, _, gradient in spans(engine)]
    return 1e-6 * sum(size**2 for size in sizes) ** 0.5


def _plain(engine: Any) -> list[nn.Parameter]:
    """The parameters that are not FSDP2's."""
    return [parameter for parameter in engine.model.parameters() if not is_dtensor(parameter)]


def in_gradients(engine: Any, change: Change, dice: random.Random, share: float, number: int, here: bool) -> Planted:
    """Change the reduced gradient of one parameter (or of all of them: -1)."""
    planted, parameters = Planted(), list(engine.model.parameters())
    chosen = parameters[number % len(parameters)] if number >= 0 and parameters else None
    seed = dice.random()

    def after(outcome: Any) -> None:
        least = _least(engine)
        for _, _, _, gradient in spans(engine, chosen):
            value = change(gradient, random.Random(seed), share)
            if here:
                gradient.copy_(planted.changed(gradient.clone(), value, least))

    after_sums(engine, after)
    return planted


def in_backward(engine: Any, change: Change, dice: random.Random, share: float, number: int, here: bool) -> Planted:
    """Change the local gradient of one parameter before its reduction."""
    planted, parameters = Planted(), _plain(engine)
    seed, largest = dice.random(), [0.0]

    def hook(grad: Tensor) -> Tensor:
        largest[0] = max(largest[0], float(grad.double().norm()))
        return planted.changed(grad, change(grad, random.Random(seed), share), 1e-3 * largest[0])

    if here and parameters:
        parameters[number % len(parameters)].register_hook(hook)
    return planted


def in_weights(engine: Any, change: Change, dice: random.Random, share: float, number: int, here: bool) -> Planted:
    """Change a weight after the step of the optimizer."""
    planted, parameters = Planted(), _plain(engine)
    seed, step = dice.random(), engine._stepper.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        found = step(*args, **kwargs)
        with torch.no_grad():
            parameter = parameters[number % len(parameters)]
            parameter.copy_(planted.changed(parameter.clone(), change(parameter, random.Random(seed), share), 1e-6))
        return found

    if here and parameters:
        engine._stepper.step = stepped
    return planted


def in_forward(engine: Any, change: Change, dice: random.Random, share: float, number: int, here: bool) -> Planted:
    """Change the output of a module."""
    planted, seed = Planted(), dice.random()
    leaves = [module for module in engine.model.modules() if isinstance(module, (nn.Linear, nn.LayerNorm))]

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if not torch.is_grad_enabled() or not isinstance(out, Tensor):
            return out
        return planted.changed(out, change(out, random.Random(seed), share), 1e-6)

    if here and leaves:
        leaves[number % len(leaves)].register_forward_hook(hook)
    return planted


def _clipped(engine: Any) -> Planted:
    """What a mistake in clipping can change: nothing, unless a step of the run is clipped."""
    planted, policy = Planted(), engine._stepper.policy
    if policy is None:
        return planted
    decide = policy.decide

    def watched(norms: Any) -> Any:
        decision = decide(norms)
        if bool((decision.divisor > 1).any()):
            planted.share = float("inf")
        return decision

    policy.decide = watched
    return planted


PLACES = {"gradients": in_gradients, "backward": in_backward, "weights": in_weights, "forward": in_forward}


# --- Drawing and judging ---


@dataclass(frozen=True)
class Plant:
    """One run with one mistake."""

    number: int
    run: healthy.Drawn
    numbers: str
    place: str
    change: str
    share: float
    parameter: int
    rank: int | None
    """The only rank that makes the mistake; None: all of them."""
    seed: int

    def __str__(self) -> str:
        where = "every rank" if self.rank is None else f"rank {self.rank}"
        mistake = f"{self.place}: {self.change} {self.share:.3g} of number {self.parameter} on {where}"
        return f"{self.number}: {mistake}; random numbers: {self.numbers}; {self.run}"


def drawn(number: int, seed: int = 0) -> Plant:
    """The plant of this number, always the same."""
    dice = random.Random(f"{seed} plant {number}")
    run = healthy.draw(dice.randrange(1 << 30), seed)
    # The dtype that the visible share is smallest in is the usual one. bf16 hides most of the shares that are drawn.
    run = healthy.Drawn(run.kind, run.ranks, dice.choice(["fp64", "fp64", "fp64", "fp32"]), run.optimizer, run.config)
    run.config.pop("bf16", None)
    piped = "pipeline" in run.config["parallel"]
    known = list(MISTAKES)
    place = dice.choice(["mistake", "mistake", "gradients", "gradients", "backward", "backward", "weights", "forward"])
    return Plant(
        number,
        run,
        "none" if piped else dice.choice(["none", "elements", "elements", "dropout", "ranks", "python"]),
        place,
        dice.choice(known if place == "mistake" else list(CHANGES)),
        10 ** dice.uniform(-2.9 if run.dtype == "fp64" else -1.9, 0.5),
        dice.randrange(-1, 12),
        dice.choice([None, None, dice.randrange(run.ranks)]),
        dice.randrange(1 << 30),
    )


@dataclass
class Outcomes:
    """What became of some plants."""

    counts: Counter[str] = field(default_factory=Counter)
    hidden: list[str] = field(default_factory=list)
    """Plants above the visible share that were called equal."""
    failed: list[str] = field(default_factory=list)
    cpu: float = 0.0
    """CPU seconds of all ranks."""


def judge_all(plants: list[Plant]) -> tuple[list[tuple[str, float, str]], float]:
    """On a rank: (verdict, share, what was said) of each plant, and the CPU seconds of the rank."""
    return [judge(one) for one in plants], time.process_time()


def judge(one: Plant) -> tuple[str, float, str]:
    """On a rank: verify one plant. The share is the largest of all ranks."""
    context, drawn_run = ParallelContext(), one.run
    with colonnade.launch(drawn_run.config, context=context, verbose=False), torch.random.fork_rng():
        random.seed(context.get_global_rank())
        torch.manual_seed(0)
        build, criterion, batches = healthy._parts(drawn_run, context)
        dtype, rank = healthy.DTYPES[drawn_run.dtype], context.get_global_rank()
        alone = ParallelContext()

        def reference() -> nn.Module:
            model = build(alone).to(dtype)
            draws_in(model, one.numbers, 0)
            return model

        model: Any = build(context).to(dtype)
        draws_in(model, one.numbers, context.get_local_rank(ParallelMode.DATA))
        loss = criterion(model, context)
        if context.pipeline_parallel_size > 1:
            model = split(model, num_stages=context.pipeline_parallel_size)
        try:
            engine = colonnade.initialize(model, healthy.OPTIMIZERS[drawn_run.optimizer], loss, context=context)[0]
        except ColonnadeError as error:
            return "refused", 0.0, str(error)
        try:
            here = one.rank is None or one.rank == rank
            if one.place == "mistake":
                planted = _clipped(engine) if "clip" in one.change else Planted(float("inf"))
                try:
                    plant(engine, one.change)
                except NotHere:
                    return "no place", 0.0, ""
            else:
                dice = random.Random(one.seed)
                planted = PLACES[one.place](engine, CHANGES[one.change], dice, one.share, one.parameter, here)
            report = colonnade.verify(
                engine,
                reference=reference,
                criterion=criterion(build(alone), alone),
                batches=[healthy._cast(batches(context, step), dtype) for step in range(2)],
            )
        except ColonnadeError as error:
            return "not compared", 0.0, f"{type(error).__name__}: {error}"
        finally:
            engine.close()
        share = torch.tensor(planted.share, dtype=torch.float64)
        dist.all_reduce(share, op=dist.ReduceOp.MAX)
        verdict = "equal" if report.ok else "cannot tell" if report.is_uncertain else "found"
        return verdict, float(share), str(report)


def sweep(first: int, count: int, seed: int = 0) -> Outcomes:
    """Verify so many plants."""
    outcomes = Outcomes()
    plants = [drawn(number, seed) for number in range(first, first + count)]
    for ranks in (2, 4):
        some = [one for one in plants if one.run.ranks == ranks]
        if not some:
            continue
        result = run_world(ranks, judge_all, some, timeout=LIMIT, env={"TORCH_DISTRIBUTED_DEBUG": "OFF"})
        outcomes.cpu += sum(seconds for _, seconds in result.values)
        for one, (verdict, share, said) in zip(some, result.values[0][0], strict=True):
            is_visible = share >= VISIBLE[one.run.dtype]
            kind = verdict if is_visible or verdict in ("refused", "no place", "not compared") else f"below, {verdict}"
            outcomes.counts[kind] += 1
            if is_visible and verdict == "equal":
                outcomes.hidden.append(f"{one}\n    changed by {share:.3g}\n{said[:2500]}")
            elif verdict == "not compared":
                outcomes.failed.append(f"{one}: {said[:500]}")
    return outcomes


def main(count: int = 1000, seed: int = 0, first: int = 0) -> int:
    total, began = Outcomes(), time.monotonic()
    for start in range(first, first + count, PER_WORLD):
        found = sweep(start, min(PER_WORLD, first + count - start), seed)
        total.counts += found.counts
        total.hidden += found.hidden
        total.failed += found.failed
        total.cpu += found.cpu
        print(
            f"{start}: {dict(found.counts)} ({found.cpu:.0f} CPU s, {time.monotonic() - began:.0f} s so far)",
            flush=True,
        )
        for text in found.hidden:
            print(f"EQUAL {text}", flush=True)
        for text in found.failed:
            print(f"NOT COMPARED {text}", flush=True)
    print(
        f"{count} plants: {dict(total.counts)}; {len(total.hidden)} above the visible share called equal; {total.cpu:.0f} CPU s"
    )
    return int(bool(total.hidden))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))

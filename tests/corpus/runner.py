"""What the files of the corpus are made with: a healthy run that a bug is planted in, and what `colonnade.verify` says of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colonnade
from colonnade import ParallelMode
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.errors import ColonnadeError
from colonnade.parallel.split import split
from colonnade.registry import GRADIENT_HANDLER
from tests.corpus import models

Model = Callable[[ParallelContext], nn.Module]
Batches = Callable[[ParallelContext, int], list[Any]]
STEPS = 2
NORM = 0.1
"""Below every norm that is met here, so that every step is clipped."""


@dataclass(frozen=True)
class Kind:
    """A model, its loss and its batches, on any number of ranks."""

    model: Model
    criterion: Callable[[ParallelContext], Any] = lambda context: nn.MSELoss()
    batches: Batches = lambda context, step: numbers(context, step)


MLP = Kind(models.mlp)
TENSOR = Kind(models.TensorMLP)
PARTIAL_NORM = Kind(models.PartialNorm)
SCATTERED = Kind(models.ScatteredTokens)
EXPERTS = Kind(models.experts)
GATED = Kind(models.Gated, lambda context: models.WithAuxiliary())
ALIKE = Kind(models.alike, batches=lambda context, step: numbers(context, step, out=models.WIDTH))
SEQUENCE = Kind(models.Sequence, models.SequenceLoss, lambda context, step: numbers(context, step, (2, 4)))
TIED = Kind(models.tied, lambda context: nn.CrossEntropyLoss(), lambda context, step: words(context, step))
CLASSES = Kind(models.mlp, lambda context: nn.CrossEntropyLoss(), lambda context, step: labelled(context, step))
"""With labels that do not count, more of them on some ranks and passes than on others."""


@dataclass(frozen=True)
class Bug:
    """One bug of the field: where it is told of, what it was, and what it is to be called."""

    source: str
    what: str
    cause: str
    ranks: int = 2
    layout: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind = MLP
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What became of one bug. `refused`: what was said at start-up or at the first step, before the check was turned off."""

    name: str
    refused: str
    causes: tuple[str, ...]
    sentence: str
    seconds: float
    error: str = ""

    @property
    def bug(self) -> Bug:
        return bug_of(self.name)

    @property
    def found(self) -> bool:
        return bool(self.refused or self.causes)

    @property
    def named(self) -> bool:
        """The first cause that is given is the true one."""
        return self.causes[:1] == (self.bug.cause,)


class Run:
    """A healthy run. `plant(run)` of a bug's file changes it; the one-process side stays as it was."""

    def __init__(self, bug: Bug) -> None:
        self.config: dict[str, Any] = {"parallel": dict(bug.layout), "flat_step": False, **bug.settings}
        self.loose: dict[str, Any] = {}
        """What must be added to the config so that a check of the library's own lets the bug pass."""
        self.kind = bug.kind
        """What it is on one process, whatever is planted."""
        self.model, self.criterion, self.batches = bug.kind.model, bug.kind.criterion, bug.kind.batches
        self.optimizer: Callable[[Any], Any] = partial(torch.optim.SGD, lr=0.1)
        self.after: list[Callable[[Any], None]] = []
        """Called with the engine once it is built."""

    def reduce_by(self, function: Callable[[str, Tensor, ParallelContext], None]) -> None:
        """Let a handler of one's own do all sums: `function(name, gradient, context)`, in place, for every parameter."""
        PlantedHandler.function = staticmethod(function)
        self.config["gradient_handler"] = ["PlantedHandler"]
        self.config["sync"] = {"automatic": False}
        self.loose["sync"] = {"automatic": False, "waive": ["*"]}

    def measure_by(self, function: Callable[[Any], Tensor], power: float = 1.0) -> None:
        """Let `function(engine)` be the norm that is told and clipped by; `power`: how often the coefficient is applied."""
        self.after.append(partial(_measured_by, function=function, power=power))

    def after_sums(self, function: Callable[[str, Tensor, ParallelContext], None]) -> None:
        """Change every gradient in place, after all handlers."""
        self.after.append(partial(_add_handler, function=function))

    def around_backward(self, before: Callable[[Any, int], None], after: Callable[[Any, int], None]) -> None:
        """Call `before(engine, pass)` and `after(engine, pass)` around each backward pass of a step."""
        self.after.append(partial(_wrap_backward, before=before, after=after))


def nothing(engine: Any, number: int) -> None:
    """For `around_backward`."""


# -- batches ----------------------------------------------------------------------------------------------------------


def seeded(context: ParallelContext, step: int, micro: int = 0) -> torch.Generator:
    """Other numbers for every data rank, step and micro-batch."""
    part = context.get_local_rank(ParallelMode.DATA) if context.is_initialized(ParallelMode.DATA) else 0
    return torch.Generator().manual_seed(1 + 1000 * step + 100 * micro + part)


def numbers(context: ParallelContext, step: int, shape: tuple[int, ...] = (4,), out: int = models.OUT) -> list[Any]:
    """One micro-batch for every pass: inputs and targets."""
    passes = int(context.config.get("gradient_accumulation") or 1)
    draws = [seeded(context, step, micro) for micro in range(passes)]
    return [
        tuple(torch.randn(*shape, width, generator=draw, dtype=torch.float64) for width in (models.WIDTH, out))
        for draw in draws
    ]


def words(context: ParallelContext, step: int, rows: int = 6) -> list[Any]:
    """One batch for every pass: words and the words to come."""
    passes = int(context.config.get("gradient_accumulation") or 1)
    draws = [seeded(context, step, micro) for micro in range(passes)]
    return [tuple(torch.randint(models.WORDS, (rows,), generator=draw) for _ in range(2)) for draw in draws]


def labelled(context: ParallelContext, step: int) -> list[Any]:
    """Inputs and classes, some of which are left out (-100): one on the first rank and pass, two on the next, and so on."""
    found = []
    for micro, (x, _) in enumerate(numbers(context, step)):
        label = torch.randint(models.OUT, (len(x),), generator=seeded(context, step, micro))
        label[: (context.get_local_rank(ParallelMode.DATA) + micro) % len(x)] = -100
        found.append((x, label))
    return found


# -- sums -------------------------------------------------------------------------------------------------------------


def sum_over(gradient: Tensor, mode: ParallelMode, context: ParallelContext) -> None:
    """In place, over this rank's group of the mode."""
    if context.is_initialized(mode) and context.get_world_size(mode) > 1:
        dist.all_reduce(gradient, group=context.get_group(mode))


def mean_over(gradient: Tensor, mode: ParallelMode, context: ParallelContext) -> None:
    """In place, over this rank's group of the mode."""
    sum_over(gradient, mode, context)
    gradient /= context.get_world_size(mode) if context.is_initialized(mode) else 1


def squares(engine: Any, chosen: Callable[[str, Tensor], bool] = lambda name, parameter: True) -> Tensor:
    """The sum of squares of the gradients of this rank."""
    found = [p.grad.double().square().sum() for name, p in engine.model.named_parameters() if chosen(name, p)]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64)


def is_split(parameter: Tensor) -> bool:
    """Whether ranks hold different parts of it."""
    return bool(colonnade.placement_of(parameter).shards)


@GRADIENT_HANDLER.register_module
class PlantedHandler(BaseGradientHandler):
    """Does whatever the bug's function does, to every gradient in turn."""

    function: Callable[[str, Tensor, ParallelContext], None]

    def handle_gradient(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            type(self).function(name, parameter.grad, self.context)


# -- planting ---------------------------------------------------------------------------------------------------------


class _Late:
    """A handler that comes after all others, with no sums of its own."""

    def __init__(self, engine: Any, function: Callable[[str, Tensor, ParallelContext], None]) -> None:
        self._engine, self._function = engine, function

    def prepare(self, last: bool) -> None: ...

    def set_scale(self, scale: Any) -> bool:
        return False

    def close(self) -> None: ...

    def handle_gradient(self) -> None:
        for name, parameter in self._engine.model.named_parameters():
            if parameter.grad is not None:
                self._function(name, parameter.grad, self._engine.context)


def _add_handler(engine: Any, function: Callable[[str, Tensor, ParallelContext], None]) -> None:
    engine._sync.handlers.append(_Late(engine, function))


def _measured_by(engine: Any, function: Callable[[Any], Tensor], power: float) -> None:
    policy, limit = engine._stepper.policy, float(engine.context.config["clip_grad_norm"])
    decide = policy.decide

    def wrong(norms: Any) -> Any:
        decision, norm = decide(norms), function(engine)
        divisor = ((norm + 1e-6) / limit).clamp(min=1.0).pow(power)
        return replace(decision, norm=norm, divisor=divisor.expand_as(decision.divisor).to(decision.divisor.dtype))

    policy.decide = wrong


def _wrap_backward(engine: Any, before: Callable[[Any, int], None], after: Callable[[Any, int], None]) -> None:
    backward = engine.backward

    def wrapped(loss: Any) -> None:
        number = engine._passes
        before(engine, number)
        backward(loss)
        after(engine, number)

    engine.backward = wrapped


# -- running ----------------------------------------------------------------------------------------------------------


def names(ranks: int | None = None) -> list[str]:
    """The files of the corpus, by name; those of so many ranks."""
    here = Path(__file__).parent
    found = sorted(path.stem for path in here.glob("*_*.py") if not path.stem.startswith(("_", "test_")))
    return [name for name in found if ranks is None or bug_of(name).ranks == ranks]


def bug_of(name: str) -> Bug:
    return import_module(f"tests.corpus.{name}").BUG


def run_all(chosen: list[str]) -> list[Result]:
    """On a rank: every one of these bugs in turn."""
    return [run_one(name) for name in chosen]


def run_one(name: str) -> Result:
    """On a rank: plant it and verify. Where a check of the library's own refuses it, that is noted, and the check turned off."""
    bug, plant = bug_of(name), import_module(f"tests.corpus.{name}").plant
    run, began = Run(bug), time.monotonic()
    plant(run)
    refused = refusal(run) if run.loose else ""
    began = time.monotonic()
    try:
        report = verified(run, loose=True)
        found = [(finding.cause, finding.sentence) for finding in report.findings] if not report.ok else []
        causes, sentence = tuple(cause for cause, _ in found), found[0][1] if found else ""
        return Result(name, refused, causes, sentence, time.monotonic() - began)
    except Exception as error:  # told of in the table, with the other bugs'
        return Result(name, refused, (), "", time.monotonic() - began, f"{type(error).__name__}: {error}")


def refusal(run: Run) -> str:
    """What the library says against the run before it has done a step, its checks being on; nothing: it lets it pass."""
    try:
        verified(run, loose=False, steps=1)
    except ColonnadeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def verified(run: Run, loose: bool, steps: int = STEPS, double: bool = True) -> Any:
    """Build the run and let `colonnade.verify` compare it with one process, in fp64 or (without `double`) in the models' own."""
    dtype = torch.float64 if double else torch.float32
    config = {**run.config, **(run.loose if loose else {})}
    context = ParallelContext()
    with colonnade.launch(config, context=context, verbose=False), torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = run.model(context).to(dtype)
        if context.pipeline_parallel_size > 1:
            model = split(model, num_stages=context.pipeline_parallel_size)
        engine = colonnade.initialize(model, run.optimizer, run.criterion(context), context=context)[0]
        try:
            for change in run.after:
                change(engine)
            alone = ParallelContext()
            return colonnade.verify(
                engine,
                reference=lambda: run.kind.model(alone).to(dtype),
                criterion=run.kind.criterion(alone),
                batches=[run.batches(context, step) for step in range(steps)],
                steps=steps,
            )
        finally:
            engine.close()

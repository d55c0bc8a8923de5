"""Slips of a training loop that would train wrongly without a word: each is said by name, with what to write."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.checks.evaluation import Evaluations
from colonnade.engine.checks.guard import guard_of
from colonnade.engine.checks.same_gradients import SameGradients
from colonnade.engine.gradient_handler.sync import GradientSync
from colonnade.errors import GradientError
from colonnade.nn.activations import release_blocks
from colonnade.nn.layer.first_pass import FirstPass
from colonnade.parallel.hooks import ModelHook

_LOOK_EVERY = 100
"""Steps between two looks at the model's parameters, after the first two."""


class LoopWatch:
    """Watches that steps go through the engine, and that the model keeps the parameters that the optimizer has.

    `unsummed`: there are gradients that were not summed over the ranks yet.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, context: ParallelContext, sync: GradientSync | None = None
    ) -> None:
        self.unsummed = False
        self._sync = sync
        self._guard = guard_of(model, optimizer, context, sync)
        self._first_pass = FirstPass(model, context)
        self._same_gradients = SameGradients(model, context)
        self._evaluations = Evaluations(model, context)
        self._model = weakref.ref(model)
        named = list(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in named}
        self._kept = [
            parameter for _, parameter in named
        ]  # as long as this lives, no other tensor gets one of these ids
        self._steps = 0
        # Not references to this object: it would never go.
        watch = weakref.ref(self)
        self._handles = [model.register_load_state_dict_post_hook(ModelHook(lambda *_: _look(watch)))]
        self._step_guard: _StepGuard | None = None
        if isinstance(optimizer, Optimizer):
            hooks = optimizer._optimizer_step_pre_hooks.values()
            self._step_guard = next((one for one in hooks if isinstance(one, _StepGuard)), None) or _StepGuard(
                optimizer
            )
            self._step_guard.watches.add(self)

    @property
    def strayed(self) -> bool:
        """Whether gradients came from a backward pass that was none of the engine's."""
        return self._sync is not None and self._sync.synchroniser.strayed

    def end_sums(self, complete: bool) -> None:
        """Gradients are summed now. `complete`: this rank has made all passes of the step."""
        self.unsummed = False
        if self._same_gradients.is_due:
            self._same_gradients.check(complete)

    def end_step(self) -> None:
        """A step was made: now and then, see that the model still has its parameters."""
        if self._steps == 0:
            self._first_pass.close()
        self._steps += 1
        if self._steps <= 2 or self._steps % _LOOK_EVERY == 0:
            self.look()
        if self._guard is not None:
            self._guard.end_step()

    def look(self) -> None:
        """Refuse a model whose parameters are other objects than at `initialize`."""
        model = self._model()
        for name, parameter in model.named_parameters() if model is not None else ():
            if id(parameter) not in self._names and name in self._names.values():
                raise GradientError(
                    f"{name!r} is another parameter than at initialize(), so the optimizer would step on one that the model "
                    f"no longer has. Load weights without assign=True, or write them into the parameter in place",
                    code="C046",
                )

    def close(self) -> None:
        self._first_pass.close()
        self._same_gradients.close()
        self._evaluations.close()
        for handle in self._handles:
            handle.remove()
        if self._step_guard is not None:
            self._step_guard.leave(self)
        self._kept = []
        if self._guard is not None:
            self._guard.close()
        model = self._model()
        if model is not None:
            release_blocks(model)


class _StepGuard:
    """A step hook that only checks: a flat step need not treat its optimizer as one that somebody watches.

    One for all engines of an optimizer: what one of them sums has strayed for the others.
    """

    only_looks = True

    def __init__(self, optimizer: Optimizer) -> None:
        self.watches: weakref.WeakSet[LoopWatch] = weakref.WeakSet()
        self._handle = optimizer.register_step_pre_hook(self)

    def leave(self, watch: LoopWatch) -> None:
        self.watches.discard(watch)
        if not self.watches:
            self._handle.remove()

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        watches = list(self.watches)
        unsummed = any(watch.unsummed for watch in watches)
        if not unsummed and watches and all(watch.strayed for watch in watches):
            unsummed = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if unsummed:
            raise GradientError(
                "the optimizer was told to step on gradients that were not summed over the ranks, nor clipped; write "
                "engine.step(), which does all three, after engine.backward(loss)",
                code="C046",
            )


def _look(watch: weakref.ref[LoopWatch]) -> None:
    alive = watch()
    if alive is not None:
        alive.look()

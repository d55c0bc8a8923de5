"""ZeroOptimizer: an ordinary torch optimizer whose state, and at stage 2 its gradients, are sharded over the ranks
that hold the same parameters and see distinct data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import GradientError
from colonnade.optim.zero.build import build_shards
from colonnade.optim.zero.gather import GatherAhead
from colonnade.optim.zero.inner import check_elementwise, copy_options, turned_to
from colonnade.optim.zero.settings import Travel, ZeroSettings
from colonnade.optim.zero.slice_step import SliceStep
from colonnade.optim.zero.state import ShardedState
from colonnade.optim.zero.team import Means
from colonnade.parallel.shards import FlatShard


class ZeroOptimizer(Optimizer):
    """Shards an element-wise optimizer over flat buckets. Made by `initialize`; collective over the world.

    `param_groups` are the original's own (its schedulers go on working) and hold the model's parameters; each
    rank steps on its slices of them, and then all get each other's. After `sync_grad`, gradients are in the
    slices and `.grad` is None. `state_dict` and `whole_gradient` are collective.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        context: ParallelContext,
        settings: ZeroSettings,
        means: Means,
        travel: Travel | None = None,
        flat: bool | None = None,
    ) -> None:
        check_elementwise(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.settings = settings
        self._original = optimizer
        # One set of step hooks, whichever of the two they are given to; they run when the slices are stepped on.
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        self._shards = build_shards(optimizer, model, context, settings, travel or Travel(), means)
        self._sizes = [len(group["params"]) for group in self.param_groups]
        pieces = [piece for bucket in self._shards.buckets for piece in bucket.pieces]
        self._inner = turned_to(optimizer, pieces)
        self._slices = SliceStep(self._inner, self._shards.flows, flat)
        self._state = ShardedState(self._inner, self._shards.buckets)
        self._frozen = [p for group in self.param_groups for p in group["params"] if not self._state.knows(p)]
        self._ahead = GatherAhead(model, self._shards.gathers) if settings.prefetch else None

    @property
    def numel(self) -> int:
        """How many elements this rank steps on."""
        return sum(piece.numel for bucket in self._shards.buckets for piece in bucket.pieces)

    def shards(self, parameter: Tensor) -> bool:
        """Whether the parameter is sharded: one that it has, and that could get a gradient from the start."""
        return self._state.knows(parameter)

    # -- the step -----------------------------------------------------------------------------------------

    def prepare(self, last: bool) -> None:
        """Before each backward pass; `last`: of those that make one step."""
        self._shards.gradients.prepare(last)

    def set_scale(self, scale: float | Tensor | None) -> None:
        """A further factor on the gradients of this step."""
        self._shards.gradients.scale = scale

    def sync_grad(self) -> None:
        """Sum the gradients; each slice's is final on its owner when this returns. Collective."""
        self._check_frozen()
        self._shards.gradients.sync()
        self._slices.mark_absent()

    def use_slots(self, slot_of: Callable[[str], int]) -> None:
        """The slot (of the norm and of the divisor) of each parameter by name; before the first step."""
        self._slices.use_slots(slot_of)

    def measure(self, norm_type: float, slots: int, device: torch.device) -> Tensor:
        """This rank's part of the norm of the whole gradient, for `reduce_norms`."""
        return self._slices.measure(norm_type, slots, device)

    def step_divided(self, divisor: Tensor, found_inf: Tensor) -> None:
        """Step on the gradient divided by `divisor`, unless `found_inf` is 1; then give the slices to all."""
        self._check_groups()
        copy_options(self, self._inner)
        for bucket in self._shards.buckets:
            bucket.refresh()
        self._slices.step(divisor, found_inf)
        copy_options(self._inner, self)
        for gather in self._shards.gathers:
            gather.begin()
        if self._ahead is None:
            self.wait()
        else:
            self._ahead.hold_back()
        for optimizer in (self, self._original):
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look for

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step as it is, for loops without an engine, after `sync_grad`."""
        if closure is not None:
            raise GradientError("a sharded optimizer takes no closure: gradients are summed once per step")
        self.step_divided(*self._slices.as_it_is)

    def wait(self) -> None:
        """Every parameter is whole when this returns; only needed where `prefetch` lets the gathers run on."""
        for gather in self._shards.gathers:
            gather.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of all gradients."""
        self._shards.gradients.forget()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def first_bad(self) -> str | None:
        """A parameter of which this rank's slice has a gradient that is not finite."""
        for bucket in self._shards.buckets:
            for piece in bucket.pieces:
                if piece.value.grad is not None and not bool(torch.isfinite(piece.grad).all()):
                    return piece.member.name
        return None

    def close(self) -> None:
        """Remove hooks and connections; parameters stay where they are."""
        self.wait()
        self._shards.gradients.close()
        self._slices.close()
        if self._ahead is not None:
            self._ahead.close()
        for team in self._shards.teams:
            team.close()

    # -- the state ----------------------------------------------------------------------------------------

    def flat_shard(self, parameter: Tensor) -> FlatShard | None:
        """Which elements of a parameter this rank steps on, and the state it keeps for them; None for none."""
        return self._state.shard_of(parameter)

    def whole_gradient(self, parameter: Tensor) -> Tensor | None:
        """The final gradient of a parameter after `sync_grad`, gathered from its slices. Collective over its team."""
        return self._state.whole_gradient(parameter)

    def state_dict(self) -> dict[str, Any]:
        """The state of whole parameters in torch's format, on every rank. Collective, and as large as it says.

        Checkpoints do not use it: they take each rank's slices as they are.
        """
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        number = 0
        for group in self.param_groups:
            first = number
            for parameter in group["params"]:
                whole = self._state.whole(parameter)
                if whole:
                    state[number] = whole
                number += 1
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "params": list(range(first, number))})
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load state of whole parameters, or of just this rank's slices. Of this rank alone."""
        saved = state_dict["param_groups"]
        if [len(group["params"]) for group in saved] != self._sizes:
            raise GradientError(
                f"the state is of groups of {[len(group['params']) for group in saved]} parameters, but this optimizer "
                f"has groups of {self._sizes}; make the groups as they were"
            )
        states: dict[int, Mapping[str, Any]] = {}
        for group, theirs in zip(self.param_groups, saved, strict=True):
            for parameter, number in zip(group["params"], theirs["params"], strict=True):
                states[id(parameter)] = state_dict["state"].get(number, {})
            # In place: the original optimizer, and schedulers, hold these very dictionaries.
            options = {key: value for key, value in theirs.items() if key not in ("params", "param_names")}
            group.update(options)
        copy_options(self, self._inner)
        self._inner.load_state_dict(self._state.load(states))

    def _check_frozen(self) -> None:
        if any(parameter.grad is not None for parameter in self._frozen):
            raise GradientError(
                "a parameter that was frozen when the optimizer was sharded has got a gradient, which nobody would "
                "sum; set requires_grad before initialize()"
            )

    def _check_groups(self) -> None:
        if [len(group["params"]) for group in self.param_groups] != self._sizes:
            raise GradientError(
                "parameters were added to the optimizer after it was sharded; add them before initialize()"
            )


# Its step hooks run where the slices are stepped on; torch would run them around `step` once more.
ZeroOptimizer.step.hooked = True  # type: ignore[attr-defined]

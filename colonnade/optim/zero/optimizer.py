"""ZeroOptimizer: an ordinary torch optimizer whose state, and at stage 2 its gradients, are sharded over the ranks
that hold the same parameters and see distinct data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.comm.waits import WaitWatch
from colonnade.errors import GradientError
from colonnade.optim.bucket_step import BucketStep, OwnedBucket, ShardedBucket, wants_flat
from colonnade.optim.zero.inner import Part, check_elementwise, copy_options, optimizer_of_parts
from colonnade.optim.zero.settings import ZeroSettings
from colonnade.optim.zero.state import ShardedState
from colonnade.parallel.held import Held
from colonnade.parallel.shards import FlatShard
from colonnade.reduce.gather import Gather, GatherAhead
from colonnade.reduce.plan import Shards
from colonnade.reduce.records import Sharding
from colonnade.reduce.synchroniser import Synchroniser
from colonnade.reduce.values import BucketValues


class ZeroOptimizer(Optimizer):
    """Shards an element-wise optimizer over flat buckets. Made by `initialize`.

    `param_groups` are the original's own (its schedulers go on working) and hold the model's parameters; each
    rank steps on its slices of them, and then all get each other's. When gradients have been summed they are in the
    slices and `.grad` is None. `state_dict` and `whole_gradient` are collective.
    """

    is_sharded_elsewhere = True  # another initialize() refuses it, and the original once this one has its state

    def __init__(
        self, optimizer: Optimizer, model: nn.Module, settings: ZeroSettings, flat: bool | None = None
    ) -> None:
        check_elementwise(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.settings = settings
        self.optimizer_class = type(optimizer)
        """Whose state it keeps: checkpoints compare it."""
        self._original = optimizer
        # One set of step hooks, whichever of the two they are given to; they run when the slices are stepped on.
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        self._flat, self._model = flat, model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._sizes = [len(group["params"]) for group in self.param_groups]
        self._frozen: list[Tensor] = []
        self.waits = WaitWatch()
        """Where this rank is: that of the context, once an engine has it."""

    def shards_of(self, pipeline: bool) -> Shards:
        """What is sharded, and how: the parameters that can get a gradient. With a `pipeline`, summed once a step."""
        labels: dict[int, str] = {}
        for at, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is None:
                    raise GradientError(
                        "the optimizer has parameters that are not the model's, so ZeRO does not know how they lie; "
                        "build it from model.parameters()",
                        code="C070",
                    )
                if not parameter.requires_grad:
                    self._frozen.append(parameter)
                    continue
                if not parameter.is_floating_point():
                    raise GradientError(f"zero shards real parameters; {name} is {parameter.dtype}", code="C070")
                labels[id(parameter)] = f" in group {at} of the optimizer"
        settings = self.settings
        sharding = Sharding(
            keep_whole=settings.stage == 1,
            # A schedule runs many passes, and would send each gradient as often.
            every_pass=settings.stage == 2 and not pipeline,
            wide=settings.master_weights,
            device=torch.device("cpu") if settings.offload else None,
            give_back=not settings.reduce_scatter,
        )
        return Shards(sharding, labels, settings.bucket_mb)

    def attach(self, synchroniser: Synchroniser, model: nn.Module) -> None:
        """Take over the sharded buckets: their parameters become flat, and their slices the optimizer's. Collective."""
        self._values = [
            BucketValues(bucket, synchroniser.groups[bucket.sum.ranks])
            for bucket in synchroniser.layout
            if bucket.is_sharded
        ]
        group_of = {id(p): at for at, group in enumerate(self.param_groups) for p in group["params"]}
        parts = [
            Part(parameter, group_of[id(parameter)], span.start, span.stop, value)
            for one in self._values
            for span, value in zip(one.bucket.spans, one.parts, strict=True)
            for parameter in [one.bucket.parameters[span.index]]
        ]
        self._inner = optimizer_of_parts(self._original, parts)
        self._refusals = [
            self._original.register_state_dict_pre_hook(refuse_state_dict),
            self._original.register_load_state_dict_pre_hook(refuse_load_state_dict),
        ]
        self._state = ShardedState(self._inner, self._values, parts)
        by_group: dict[int, tuple[Any, list[BucketValues]]] = {}
        for one in self._values:
            by_group.setdefault(id(one.group), (one.group, []))[1].append(one)
        self._gathers = [Gather(group, mine) for group, mine in by_group.values()]
        self._ahead = GatherAhead(model, self._gathers) if self.settings.gather_ahead else None
        self.numel = sum(part.stop - part.start for part in parts)
        """How many elements this rank steps on."""

    @property
    def masters(self) -> list[Tensor]:
        """The copies of this rank's slices in another dtype, or on another device, that are stepped on."""
        return [one.owned for one in self._values if one.has_master]

    @property
    def stepped(self) -> Optimizer:
        """The optimizer of this rank's slices, which has their state."""
        return self._inner

    def use_slots(self, held: Sequence[Held], slot_of: Callable[[Held], int]) -> BucketStep:
        """Before the first step: who else holds each parameter, and its slot in the norm and the divisor.

        Returns what measures this rank's slices.
        """
        entry_of = {id(entry.tensor): entry for entry in held}
        buckets: list[OwnedBucket] = []
        for one in self._values:
            entries = [entry_of[id(parameter)] for parameter in one.bucket.parameters]
            buckets.append(ShardedBucket(one, entries, [slot_of(entry) for entry in entries]))
        loose = [entry for entry in held if not self.shards(entry.tensor)]
        flat = wants_flat([part for one in self._values for part in one.parts], self._inner, self._flat)
        self._bucket_step = BucketStep(
            self._inner, lambda: buckets, lambda: "the same", loose, slot_of, flat, self._model, False
        )
        return self._bucket_step

    def shards(self, parameter: Tensor) -> bool:
        """Whether the parameter is sharded: one that it has, and that could get a gradient from the start."""
        return self._state.knows(parameter)

    # -- the step -----------------------------------------------------------------------------------------

    def step_divided(self, divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """Step on the gradient divided by `divisor`, unless `found_inf` is 1; then give the slices to all."""
        self._check_parameters()
        copy_options(self, self._inner)
        for one in self._values:
            one.refresh()
        self._bucket_step.step_divided(divisor, found_inf)
        copy_options(self._inner, self)
        for gather in self._gathers:
            gather.begin()
        if self._ahead is None:
            self.wait()
        else:
            self._ahead.hold_back()
        for optimizer in (self, self._original):
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look for

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step as it is, when the gradients have been summed; `engine.step()` does both, and clips."""
        if closure is not None:
            raise GradientError("a sharded optimizer takes no closure: gradients are summed once per step", code="C070")
        for hook in [one for one in self._optimizer_step_pre_hooks.values() if getattr(one, "only_looks", False)]:
            hook(self, (), {})
        self.step_divided(None, None)

    def wait(self) -> None:
        """Every parameter is whole when this returns; only needed where `gather_ahead` lets the gathers run on."""
        for gather in self._gathers:
            gather.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of all gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def close(self) -> None:
        """Remove hooks; parameters stay where they are, and the state here: the original has none."""
        for refusal in self._refusals:
            refusal.remove()
        self._original.is_sharded_elsewhere = bool(self._inner.state)  # type: ignore[attr-defined]
        if self._inner.state:
            self._original.register_state_dict_pre_hook(refuse_empty_state_dict)
        self.wait()
        self._bucket_step.close()
        if self._ahead is not None:
            self._ahead.close()

    # -- the state ----------------------------------------------------------------------------------------

    def flat_shard(self, parameter: Tensor) -> FlatShard | None:
        """Which elements of a parameter this rank steps on, and the state it keeps for them; None for none."""
        return self._state.shard_of(parameter)

    def gradient_slices(self) -> Iterator[tuple[Tensor, int, int, Tensor | None]]:
        """What this rank owns of the final gradients: (parameter, first and last + 1 of its elements in memory, gradient)."""
        for one in self._values:
            for span, gradient in zip(one.bucket.spans, one.grads, strict=True):
                missing = span.index in one.bucket.absent
                yield one.bucket.parameters[span.index], span.start, span.stop, None if missing else gradient

    def whole_gradient(self, parameter: Tensor) -> Tensor | None:
        """The final gradient of a parameter, gathered from its slices. Collective over the ranks that share it."""
        return self._state.whole_gradient(parameter)

    def state_dict(self) -> dict[str, Any]:
        """The state of whole parameters in torch's format, on every rank, which needs memory for all of it. Collective.

        Checkpoints do not use it: they take each rank's slices as they are.
        """
        with self.waits.together("optimizer.state_dict()"):
            return self._state_dict()

    def _state_dict(self) -> dict[str, Any]:
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        number = 0
        for group in self.param_groups:
            first = number
            for parameter in group["params"]:
                if self.shards(parameter) and (whole := self._state.whole(parameter)):
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
                f"has groups of {self._sizes}; make the groups as they were",
                code="C070",
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

    def _check_parameters(self) -> None:
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise GradientError(
                    f"{self._names[id(parameter)]!r} was frozen when the optimizer was sharded and has now got a gradient, "
                    f"which nobody would step on; set requires_grad before initialize()",
                    code="C070",
                )
        # Groups are shared with the original, the list of them is not.
        given = self._original.param_groups
        shared = len(given) == len(self.param_groups) and all(map(operator.is_, given, self.param_groups))
        mine, theirs = ([len(group["params"]) for group in groups] for groups in (self.param_groups, given))
        if not shared or mine != self._sizes:
            raise GradientError(
                f"the parameter groups of the optimizer are not those that were sharded: they had {self._sizes} parameters, and now have "
                f"{theirs if mine == self._sizes else mine}. Nobody would step on others; add parameters before initialize(), and change options in the groups themselves",
                code="C070",
            )


def refuse_state_dict(optimizer: Optimizer) -> None:
    """Of the optimizer that was sharded: the ranks have its state, and no rank may gather it alone."""
    raise GradientError(
        f"the state of this {type(optimizer).__name__} is sharded over the ranks by zero, so its own state_dict() is empty. Save it with "
        f"CheckpointManager.save(step, engine.model, engine.optimizer), which any layout can load; or call "
        f"engine.optimizer.state_dict() on every rank at once, which gathers the whole state",
        code="C121",
    )


def refuse_load_state_dict(optimizer: Optimizer, state: Any) -> None:
    """Of the optimizer that was sharded: nobody would step with what it loads."""
    raise GradientError(
        f"this {type(optimizer).__name__} was sharded by initialize(), so nobody would step with a state that it loads. Load it before "
        f"initialize(); or call engine.optimizer.load_state_dict(state) on every rank, or CheckpointManager.load for what that saved",
        code="C121",
    )


def refuse_empty_state_dict(optimizer: Optimizer) -> None:
    """The same after the engine was closed, until a state is loaded."""
    if not optimizer.state:
        refuse_state_dict(optimizer)


# Its step hooks run where the slices are stepped on; torch would run them around `step` once more.
ZeroOptimizer.step.hooked = True  # type: ignore[attr-defined]

"""ZeRO stages 1 and 2: an element-wise torch optimizer with sharded state, and at stage 2 sharded gradients.

The differences from plain data parallelism, in the order of a step:

- Buckets are sharded: one slice per rank of the reduction's group. Parameters are views of flat memory on every rank, and each
  rank steps on its own slice (`gradients.bucket.BucketValues`).
- Gradients are reduce-scattered instead of all-reduced (`gradients.transport.CollectiveTransport._scattered`): a rank gets the
  reduced gradient of its slice (`GradientShard`), and `.grad` is None. With a dtype for sending that differs from that for adding,
  or with `fixed_order`, `_sliced` does this; on one CPU host `SharedMemoryTransport`.
- Stage 1 keeps memory for full gradients and reduces once per step.
- Stage 2 keeps only slices. Its buckets share two staging buffers (`BucketStorage.acquire_staging`), and it reduces at every
  backward pass (`Synchroniser._on_gradient` during a pass, `Synchroniser._end_pass` after it); with a pipeline once per step.
- `plan_shards` makes these decisions, in a `Sharding` (gradients/sums.py), whose docstring names the readers of every option.
- Each rank measures its slices. Slices of different ranks are disjoint, so the usual all-reduce gives the global norm.
- A twin of the user's optimizer (`_inner`, a second instance) steps on the slices and holds their state. A slice that is stepped on
  in another dtype, or on the host, is a master copy.
- Then the slices of the parameters are all-gathered (`Gather`): immediately, or with `gather_ahead` during the next forward
  pass, in which each module waits for its own parameters.

The user's optimizer keeps its parameter groups, to which schedulers write; its state moves to the twin.
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.comm.waits import WaitWatch
from colonnade.config.settings import ZeroSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, GradientError
from colonnade.gradients.bucket import BucketValues
from colonnade.gradients.gather import Gather, GatherAhead
from colonnade.gradients.sums import Sharding, Shards
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.logging import get_dist_logger
from colonnade.optim.bucket_step import BucketStep, OwnedBucket, ShardedBucket, wants_flat
from colonnade.optim.engine_optimizer import EngineOptimizer, GradientSlice, groups_by_options, run_trial_steps, twin_of
from colonnade.parallel.flat import MASTER, FlatShard, flattened, view_like
from colonnade.parallel.held import Held
from colonnade.parallel.placement import local_part


class ZeroOptimizer(EngineOptimizer, Optimizer):
    """An element-wise optimizer, sharded over flat buckets. Created by `initialize`.

    `param_groups` are the dictionaries of the original optimizer, so its schedulers still work, and they hold the model's
    parameters. Reduced gradients are in slices, and `.grad` is None. `step`, `state_dict` and `whole_gradient` are collective.
    """

    is_sharded = True
    is_sharded_elsewhere = True  # makes another initialize() refuse this object; set on the original at the end, too

    def __init__(
        self, optimizer: Optimizer, model: nn.Module, settings: ZeroSettings, flat: bool | None = None
    ) -> None:
        check_elementwise(optimizer)
        # The groups are the original's dictionaries: a scheduler that holds the original writes its learning rates to them.
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.settings = settings
        self.optimizer_class = type(optimizer)
        """The class of the user's optimizer, which checkpoints compare."""
        self._original = optimizer
        # One set of step hooks, whichever of the two optimizers they are registered with. `_inner` runs them.
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        self._flat, self._model = flat, model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._sizes = [len(group["params"]) for group in self.param_groups]
        self._frozen: list[Tensor] = []

    def plan_shards(self, pipeline: bool) -> Shards:
        """Plan the sharding of all parameters that require a gradient: the options (`Sharding`) and the labels."""
        labels: dict[int, str] = {}
        for at, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is None:
                    raise GradientError(
                        "the optimizer has parameters that are not in the model, so ZeRO does not know their "
                        "placement. Build the optimizer from model.parameters().",
                        code="C070",
                    )
                if not parameter.requires_grad:
                    self._frozen.append(parameter)
                    continue
                if not parameter.is_floating_point():
                    raise GradientError(
                        f"ZeRO shards only floating-point parameters, but {name} has dtype {parameter.dtype}",
                        code="C070",
                    )
                labels[id(parameter)] = f" in group {at} of the optimizer"
        settings = self.settings
        sharding = Sharding(
            keep_full=settings.stage == 1,
            # A pipeline schedule runs many passes, each of which would communicate every gradient.
            every_pass=settings.stage == 2 and not pipeline,
            wide=settings.master_weights,
            device=torch.device("cpu") if settings.offload else None,
            give_back=not settings.reduce_scatter,
        )
        return Shards(sharding, labels, settings.bucket_mb)

    def needs_buckets(self, planned_on: str | None = None) -> bool:
        return False  # sharded parameters are in buckets anyway, and others are not stepped on here

    def attach(self, synchroniser: Synchroniser, waits: WaitWatch) -> None:
        """Move the parameters of sharded buckets to flat memory, and build the twin that steps on this rank's slices.

        Collective.
        """
        self._waits = waits
        self._values = [
            BucketValues(bucket, synchroniser.groups[bucket.sum.ranks])
            for bucket in synchroniser.layout
            if bucket.is_sharded
        ]
        group_of = {id(p): at for at, group in enumerate(self.param_groups) for p in group["params"]}
        shards = [
            ParameterShard(parameter, group_of[id(parameter)], span.start, span.stop, value)
            for values in self._values
            for span, value in zip(values.bucket.spans, values.parts, strict=True)
            for parameter in [values.bucket.parameters[span.index]]
        ]
        self._inner = twin_on_shards(self._original, shards)
        self._refusals = [
            self._original.register_state_dict_pre_hook(refuse_state_dict),
            self._original.register_load_state_dict_pre_hook(refuse_load_state_dict),
        ]
        self._state = ShardedState(self._inner, self._values, shards)
        by_group: dict[int, tuple[Any, list[BucketValues]]] = {}
        for values in self._values:
            by_group.setdefault(id(values.group), (values.group, []))[1].append(values)
        self._gathers = [Gather(group, of_group) for group, of_group in by_group.values()]
        self._ahead = GatherAhead(self._model, self._gathers) if self.settings.gather_ahead else None
        self.numel = sum(shard.stop - shard.start for shard in shards)
        """The number of elements that this rank steps on."""
        get_dist_logger().debug(
            f"ZeRO stage {self.settings.stage}: this rank steps on {self.numel} of "
            f"{sum(p.numel() for p in self._model.parameters())} elements"
        )

    @property
    def user_optimizer(self) -> ZeroOptimizer:
        return self

    @property
    def masters(self) -> list[Tensor]:
        """The master copies of this rank's slices, if slices are stepped on in another dtype or on another device."""
        return [values.owned for values in self._values if values.has_master]

    @property
    def stepped(self) -> Optimizer:
        """The twin of the user's optimizer, which steps on this rank's slices and has their state."""
        return self._inner

    @cached_property
    def is_flat(self) -> bool:
        # Decided for the slices: master copies may have another dtype or device than the parameters.
        return wants_flat([shard for values in self._values for shard in values.parts], self._inner, self._flat)

    def make_step(
        self,
        synchroniser: Synchroniser,
        held: Sequence[Held],
        slot_of: Callable[[Held], int],
        context: ParallelContext,
    ) -> BucketStep:
        entry_of = {id(entry.tensor): entry for entry in held}
        buckets: list[OwnedBucket] = []
        for values in self._values:
            entries = [entry_of[id(parameter)] for parameter in values.bucket.parameters]
            buckets.append(ShardedBucket(values, entries, [slot_of(entry) for entry in entries]))
        loose = [entry for entry in held if not self.shards(entry.tensor)]
        # Sharded buckets are never laid out again, and no rank measures the full gradient.
        self._bucket_step = BucketStep(
            self._inner, lambda: buckets, lambda: "the same", loose, slot_of, self.is_flat, self._model, False
        )
        return self._bucket_step

    def shards(self, parameter: Tensor) -> bool:
        """Whether the parameter is sharded: it is in the optimizer, and was not frozen at `initialize`."""
        return self._state.knows(parameter)

    # -- the step -----------------------------------------------------------------------------------------

    def step_divided(self, divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """Step on the gradient divided by `divisor`, unless `found_inf` is 1; then all-gather the slices. Collective."""
        # Nothing here steps on a parameter that was frozen at the start, or on one in other groups.
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise GradientError(
                    f"{self._names[id(parameter)]!r} was frozen when the optimizer was sharded, but has a gradient "
                    "now. The optimizer would not update it. Set requires_grad before initialize().",
                    code="C070",
                )
        # The groups are shared with the original optimizer, the list of groups is not.
        given = self._original.param_groups
        shared = len(given) == len(self.param_groups) and all(map(operator.is_, given, self.param_groups))
        own, original = ([len(group["params"]) for group in groups] for groups in (self.param_groups, given))
        if not shared or own != self._sizes:
            raise GradientError(
                f"the parameter groups of the optimizer were changed after it was sharded. They had {self._sizes} "
                f"parameters and now have {original if own == self._sizes else own}. Parameters that were added "
                "later would not be updated. Add parameters before initialize(), and change options only in the "
                "existing groups.",
                code="C070",
            )

        # A scheduler may have changed options since the last step, and loading may have changed weights. An optimizer may also
        # write options in its step (a step count, say), which are copied back to where users see them.
        copy_options(self, self._inner)
        for values in self._values:
            values.refresh()
        self._bucket_step.step_divided(divisor, found_inf)
        copy_options(self._inner, self)

        # All-gather the slices, even if the step was skipped: only the device knows that, and all ranks must issue the same
        # collectives. With `gather_ahead` this waits only for parameters that no module waits for in the forward pass.
        for gather in self._gathers:
            gather.begin()
        if self._ahead is None:
            self.wait()
        else:
            self._ahead.hold_back()
        for optimizer in (self, self._original):
            optimizer._opt_called = True  # type: ignore[attr-defined]  # LR schedulers check it

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step on reduced gradients, without clipping; `engine.step()` reduces, clips and steps. Collective."""
        if closure is not None:
            raise GradientError(
                "a sharded optimizer does not support a closure, because gradients are reduced once per step. Call "
                "step() without a closure.",
                code="C070",
            )
        # Hooks with `only_looks` raise if gradients are not reduced yet. The engine's own steps need no such check, so a flat step
        # ignores these hooks; here the user may have made the mistake.
        for hook in [hook for hook in self._optimizer_step_pre_hooks.values() if getattr(hook, "only_looks", False)]:
            hook(self, (), {})
        # Normally the reduction of gradients keeps ranks together. Two steps by hand have none between them: another rank may
        # still read the weights of the last step in shared memory, which this rank would overwrite with its next slice.
        self.wait()
        for gather in self._gathers:
            gather.meet()
        self.step_divided(None, None)

    def wait(self) -> None:
        """Wait until all parameters are gathered. Only with `gather_ahead` can all-gathers still be running after a step."""
        for gather in self._gathers:
            gather.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None; `set_to_none` has no effect."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def close(self) -> None:
        """Remove hooks. Parameters stay in flat memory, and the state stays in this object; the original optimizer has no state."""
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
        """The elements of a parameter on which this rank steps, and their state; None if this rank has no elements of the
        parameter."""
        return self._state.shard_of(parameter)

    def gradient_slices(self) -> Iterator[GradientSlice]:
        for values in self._values:
            bucket = values.bucket
            for span, gradient in zip(bucket.spans, values.grads, strict=True):
                reduced = None if span.index in bucket.absent else gradient
                yield bucket.parameters[span.index], span.start, span.stop, reduced

    def whole_gradient(self, parameter: Tensor) -> Tensor | None:
        """The reduced gradient of a parameter, gathered from its slices. Collective over the ranks that share the slices."""
        return self._state.whole_gradient(parameter)

    def state_dict(self) -> dict[str, Any]:
        """The full, unsharded state in torch's format, on every rank, which needs memory for all of it. Collective over the world.

        Checkpoints do not use this method: they save the slices of each rank.
        """
        with self._waits.together("optimizer.state_dict()"):
            groups: list[dict[str, Any]] = []
            state: dict[int, dict[str, Any]] = {}
            number = 0
            for group in self.param_groups:
                first = number
                for parameter in group["params"]:
                    if self.shards(parameter) and (full := self._state.full_state(parameter)):
                        state[number] = full
                    number += 1
                options = {key: value for key, value in group.items() if key != "params"}
                groups.append({**options, "params": list(range(first, number))})
            return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict with the full state, or with only the state of this rank's slices. Not collective."""
        saved = state_dict["param_groups"]
        if [len(group["params"]) for group in saved] != self._sizes:
            raise GradientError(
                f"the saved state has parameter groups of {[len(group['params']) for group in saved]} parameters, "
                f"but this optimizer has groups of {self._sizes}. Build the parameter groups of the saved run.",
                code="C070",
            )
        states: dict[int, Mapping[str, Any]] = {}
        for group, saved_group in zip(self.param_groups, saved, strict=True):
            for parameter, number in zip(group["params"], saved_group["params"], strict=True):
                states[id(parameter)] = state_dict["state"].get(number, {})
            # In place: the original optimizer and schedulers hold the same dictionaries.
            options = {key: value for key, value in saved_group.items() if key not in ("params", "param_names")}
            group.update(options)
        copy_options(self, self._inner)
        self._inner.load_state_dict(self._state.load(states))


# Torch wraps `step` in its hooks unless it is marked as hooked; the twin runs these hooks already.
ZeroOptimizer.step.hooked = True  # type: ignore[attr-defined]


def refuse_state_dict(optimizer: Optimizer) -> None:
    """A hook that raises for `state_dict` of the original optimizer, because its state is sharded and one rank cannot return it."""
    raise GradientError(
        f"ZeRO shards the state of this {type(optimizer).__name__} over the ranks, so its own state_dict() is empty. "
        "To save a state for any layout, call CheckpointManager.save(step, engine.model, engine.optimizer). To "
        "gather the full state, call engine.optimizer.state_dict() on every rank at once.",
        code="C121",
    )


def refuse_load_state_dict(optimizer: Optimizer, state: Any) -> None:
    """A hook that raises for `load_state_dict` of the original optimizer, where a loaded state would have no effect."""
    raise GradientError(
        f"this {type(optimizer).__name__} was sharded by initialize(), so a state loaded into it would have no "
        "effect. There are three remedies. 1. Load the state before initialize(). 2. Call "
        "engine.optimizer.load_state_dict(state) on every rank. 3. For a saved checkpoint call "
        "CheckpointManager.load.",
        code="C121",
    )


def refuse_empty_state_dict(optimizer: Optimizer) -> None:
    """A hook that raises for `state_dict` of the original optimizer after the engine was closed, until a state is loaded."""
    if not optimizer.state:
        refuse_state_dict(optimizer)


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise GradientError if an element's update depends on other elements, so that a slice would be updated differently.

    The check is a trial for each kind of parameter group: two steps on a small matrix, on the full matrix and on its two halves.
    """
    name = type(optimizer).__name__
    for at, *_ in groups_by_options(optimizer):
        try:
            full, halves = run_trial_steps(
                optimizer, at, (4, 6), lambda tensor: [half.clone() for half in tensor.view(-1).chunk(2)]
            )
        except Exception as error:
            raise GradientError(
                f"ZeRO stages 1 and 2 shard element-wise optimizers, but {name} could not step on a slice: {error}. "
                "Use an element-wise optimizer such as AdamW or SGD, or ZeRO stage 3 or 0.",
                code="C070",
            ) from error
        if not torch.allclose(full.view(-1), torch.cat(halves), rtol=1e-9, atol=1e-12):
            raise GradientError(
                f"ZeRO stages 1 and 2 shard element-wise optimizers, but {name} is not element-wise. In group {at} a "
                "step on half of a matrix differs from a step on the full matrix. Use an optimizer such as AdamW or "
                "SGD, or turn zero off.",
                code="C070",
            )


# --- The twin: the same optimizer class and options, over this rank's shards instead of full parameters ---


_OWN_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """Elements [start, stop) of a parameter's local tensor, in memory order; the optimizer steps on `value`."""

    parameter: Tensor
    group: int
    start: int
    stop: int
    value: Tensor

    @property
    def local(self) -> Tensor:
        """The parameter's local tensor, of which the shard is a part."""
        return local_part(self.parameter).detach()


def twin_on_shards(optimizer: Optimizer, shards: Sequence[ParameterShard]) -> Optimizer:
    """Make a twin of the optimizer that steps on `shards`, and move the state of the optimizer to the twin.

    Step hooks are shared with the original. Hooks of state dictionaries are not: they expect full parameters.
    """
    groups = range(len(optimizer.param_groups))
    inner = twin_of(optimizer, [[shard.value for shard in shards if shard.group == at] for at in groups])
    for name in _OWN_HOOKS:
        setattr(inner, name, OrderedDict())
    for shard in shards:
        state = optimizer.state.get(shard.parameter)
        if state:
            inner.state[shard.value] = {name: shard_of(value, shard, name) for name, value in state.items()}
    optimizer.state.clear()
    return inner


def copy_options(source: Optimizer, target: Optimizer) -> None:
    """Copy the options of all parameter groups from `source` to `target`. A scheduler or a step may have changed the options."""
    for group, other in zip(source.param_groups, target.param_groups, strict=True):
        for key, value in group.items():
            if key != "params":
                other[key] = value


def shard_of(value: Any, shard: ParameterShard, name: str) -> Any:
    """The shard of a state value of the full parameter; a value that has no entry per element is copied."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    parameter, local = shard.local, local_part(value).detach()
    if name != "step" and local.shape == parameter.shape:
        # Shards are ranges of memory, so the state needs the parameter's memory order.
        if local.stride() != parameter.stride():
            local = torch.empty_like(parameter, dtype=local.dtype).copy_(local)
        return flattened(local)[shard.start : shard.stop].to(shard.value.device, copy=True)
    return local.clone()


# --- The sharded state, by parameter: gathered, split, or the shard of this rank ---


class ShardedState:
    """Reads and writes the optimizer state of the twin (`inner.state`) by parameter of the model."""

    def __init__(self, inner: Optimizer, values: Sequence[BucketValues], shards: Sequence[ParameterShard]) -> None:
        self._inner = inner
        self._shards = {id(shard.parameter): shard for shard in shards}
        self._values = {id(parameter): of_bucket for of_bucket in values for parameter in of_bucket.bucket.parameters}

    def knows(self, parameter: Tensor) -> bool:
        """Whether the parameter is sharded, also if only other ranks have a shard of it."""
        return id(parameter) in self._values

    def shard_of(self, parameter: Tensor) -> FlatShard | None:
        """This rank's shard of a parameter; None if it has none, or the parameter is not sharded."""
        shard = self._shards.get(id(parameter))
        if shard is None:
            return None
        ranks = self._values[id(parameter)].group.ranks
        return FlatShard(shard.start, shard.stop, ranks, self._state_of(shard))

    def full_state(self, parameter: Tensor) -> dict[str, Any]:
        """The full state of a sharded parameter, gathered from all its shards. Collective over the ranks that share the shards."""
        shard = self._shards.get(id(parameter))
        state = self._state_of(shard) if shard is not None else {}
        # A rank without a shard knows neither the names nor the dtypes of the state, but must take part in the same collectives.
        own_kinds = {name: _kind(value, shard) for name, value in state.items()} if shard is not None else {}
        kinds: dict[str, list[Any]] = {}
        for of_rank in self._values[id(parameter)].group.gather_objects(own_kinds):
            kinds.update(of_rank)
        return {name: self._gathered(parameter, state.get(name), kind) for name, kind in kinds.items()}

    def whole_gradient(self, parameter: Tensor) -> Tensor | None:
        """The full reduced gradient of a sharded parameter; None if no rank had a gradient.

        Collective over the ranks that share the shards.
        """
        bucket = self._values[id(parameter)].bucket
        index = next(at for at, member in enumerate(bucket.parameters) if member is parameter)
        if index in bucket.absent:
            return None
        span = next((span for span in bucket.spans if span.index == index), None)
        own = bucket.gradient[span.at : span.at + span.numel] if span is not None else None
        gradient: Tensor = self._gathered(parameter, own, ["like", _name(bucket.gradient.dtype)])
        return gradient

    @torch.no_grad()
    def load(self, states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """Convert loaded state to a state dict for the twin, and copy loaded values to the master copies.

        `states` has, by id of parameter, the full state or only the shard of this rank.
        """
        numbers: dict[int, int] = {}
        groups = []
        for group in self._inner.param_groups:
            first = len(numbers)
            for value in group["params"]:
                numbers[id(value)] = len(numbers)
            groups.append({**group, "params": list(range(first, len(numbers)))})
        state: dict[int, dict[str, Any]] = {}
        for shard in self._shards.values():
            given = dict(states.get(id(shard.parameter), {}))
            # Without a saved master copy, it starts from the parameter, whose digits are all there are.
            master = given.pop(MASTER, None)
            if self._values[id(shard.parameter)].has_master:
                parameter = flattened(shard.local)[shard.start : shard.stop]
                shard.value.copy_(parameter if master is None else _as_shard(master, shard, MASTER))
            if given:
                state[numbers[id(shard.value)]] = {k: _as_shard(v, shard, k) for k, v in given.items()}
        return {"state": state, "param_groups": groups}

    def _state_of(self, shard: ParameterShard) -> dict[str, Any]:
        state = dict(self._inner.state.get(shard.value, {}))
        # A master copy in another dtype has digits of its own. One that is only on another device equals the parameter.
        return {**state, MASTER: shard.value} if shard.value.dtype != shard.local.dtype else state

    def _gathered(self, parameter: Tensor, value: Any, kind: Sequence[Any]) -> Any:
        """A state value of the full parameter, from this rank's `value` (None without a shard) and its `_kind`."""
        if kind[0] == "value":
            return _decoded(kind)
        group, shard, like = self._values[id(parameter)].group, self._shards.get(id(parameter)), local_part(parameter)
        full = torch.zeros(like.numel(), dtype=getattr(torch, kind[1]), device=like.device)
        if shard is not None and value is not None:
            full[shard.start : shard.stop] = value
        if not group.alone:
            # Every element is set on one rank and zero on the others. Summing bytes keeps its bits for every dtype.
            dist.all_reduce(full.view(torch.uint8), group=group.group)
        return view_like(full, like.detach())


def _kind(value: Any, shard: ParameterShard) -> list[Any]:
    """The form of a state value, as JSON: ["like", dtype] if it has an entry per element, else ["value", ...] with the value."""
    if isinstance(value, Tensor):
        if value.shape == shard.value.shape:
            return ["like", _name(value.dtype)]
        if value.numel() != 1:
            raise CheckpointError(
                f"optimizer state has shape {tuple(value.shape)}; it must have one value, or one value for each "
                "element of the parameter"
            )
        return ["value", _name(value.dtype), value.item(), list(value.shape)]
    return ["value", None, value]


def _decoded(kind: Sequence[Any]) -> Any:
    """The value in a `_kind` of the form ["value", ...]."""
    if kind[1] is None:
        return kind[2]
    return torch.tensor(kind[2], dtype=getattr(torch, kind[1]), device="cpu").reshape(kind[3])


def _as_shard(value: Any, shard: ParameterShard, name: str) -> Any:
    """A loaded value for the shard; values for the full parameter are split."""
    if isinstance(value, Tensor) and name != "step" and value.shape == shard.value.shape:
        return value
    return shard_of(value, shard, name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

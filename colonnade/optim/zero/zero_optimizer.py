"""ZeRO stages 1 and 2: an element-wise torch optimizer whose state, and at stage 2 its gradients, are sharded.

What differs from plain data parallelism, along a step:

- A bucket is cut into one slice for each rank that shares its sum. Its parameters are views of flat memory on every rank, and a
  rank owns its slice of them (`BucketValues`).
- Gradients are reduced and scattered instead of all-reduced: a rank gets the final gradient of its slice, and `.grad` is None.
  Stage 1 keeps memory for whole gradients and sums once a step. Stage 2 keeps slices, sums at every backward pass
  (in a pipeline once a step), and buckets share a little memory for what is on its way. `plan_shards` decides it; the class
  `Sharding` in gradients/sums.py carries it to the buckets.
- Each rank measures its slices, which are nobody else's, so the norm is joined by the one collective as ever.
- A twin of the user's optimizer (`_inner`) steps on the slices, and has their state. A slice that is stepped on in another dtype
  or on the host is a master copy.
- Then each rank sends its slice of the parameters to the others (`Gather`): at once, or with `gather_ahead` while the next forward
  pass runs, whose modules wait for their own parameters.

The user's optimizer keeps its parameter groups, which schedulers write to, and gives its state up.
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
from colonnade.optim.engine_optimizer import EngineOptimizer, GradientSlice
from colonnade.optim.optimizer_trial import kinds_of_groups, twin_of, two_steps
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.flat import MASTER, FlatShard, flattened, view_like
from colonnade.parallel.held import Held


class ZeroOptimizer(EngineOptimizer, Optimizer):
    """Shards an element-wise optimizer over flat buckets. Made by `initialize`.

    `param_groups` are the original's own (its schedulers go on working) and hold the model's parameters; each
    rank steps on its slices of them, and then all get each other's. When gradients have been summed they are in the
    slices and `.grad` is None. `state_dict` and `whole_gradient` are collective.
    """

    is_sharded = True
    is_sharded_elsewhere = True  # another initialize() refuses it, and the original once this one has its state

    def __init__(
        self, optimizer: Optimizer, model: nn.Module, settings: ZeroSettings, flat: bool | None = None
    ) -> None:
        check_elementwise(optimizer)
        # Groups are the original's own dicts: a scheduler that holds the original writes its learning rates here.
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

    def plan_shards(self, pipeline: bool) -> Shards:
        """The parameters that can get a gradient. With a `pipeline`, summed once a step."""
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

    def needs_buckets(self, graph: bool, planned_on: str | None = None) -> bool:
        return False  # what is sharded is in buckets, and the rest is not stepped on here

    def attach(self, synchroniser: Synchroniser, waits: WaitWatch) -> None:
        """Take over the sharded buckets: their parameters become flat, and their slices the optimizer's. Collective."""
        self._waits = waits
        self._values = [
            BucketValues(bucket, synchroniser.groups[bucket.sum.ranks])
            for bucket in synchroniser.layout
            if bucket.is_sharded
        ]
        group_of = {id(p): at for at, group in enumerate(self.param_groups) for p in group["params"]}
        parts = [
            OwnedPart(parameter, group_of[id(parameter)], span.start, span.stop, value)
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
        self._ahead = GatherAhead(self._model, self._gathers) if self.settings.gather_ahead else None
        self.numel = sum(part.stop - part.start for part in parts)
        """How many elements this rank steps on."""
        get_dist_logger().debug(
            f"ZeRO stage {self.settings.stage}: {self.numel} of {sum(p.numel() for p in self._model.parameters())} "
            f"elements are stepped on here"
        )

    @property
    def user_optimizer(self) -> ZeroOptimizer:
        return self

    @property
    def masters(self) -> list[Tensor]:
        """The copies of this rank's slices in another dtype, or on another device, that are stepped on."""
        return [one.owned for one in self._values if one.has_master]

    @property
    def stepped(self) -> Optimizer:
        """The optimizer of this rank's slices, which has their state."""
        return self._inner

    @cached_property
    def is_flat(self) -> bool:
        # Asked of the slices: their masters may be of another dtype, or on another device, than the parameters.
        return wants_flat([part for one in self._values for part in one.parts], self._inner, self._flat)

    def make_step(
        self,
        synchroniser: Synchroniser,
        held: Sequence[Held],
        slot_of: Callable[[Held], int],
        context: ParallelContext,
    ) -> BucketStep:
        entry_of = {id(entry.tensor): entry for entry in held}
        buckets: list[OwnedBucket] = []
        for one in self._values:
            entries = [entry_of[id(parameter)] for parameter in one.bucket.parameters]
            buckets.append(ShardedBucket(one, entries, [slot_of(entry) for entry in entries]))
        loose = [entry for entry in held if not self.shards(entry.tensor)]
        # The buckets of slices stay the same for the life of the engine, and no rank measures the whole gradient.
        self._bucket_step = BucketStep(
            self._inner, lambda: buckets, lambda: "the same", loose, slot_of, self.is_flat, self._model, False
        )
        return self._bucket_step

    def shards(self, parameter: Tensor) -> bool:
        """Whether the parameter is sharded: one that it has, and that could get a gradient from the start."""
        return self._state.knows(parameter)

    # -- the step -----------------------------------------------------------------------------------------

    def step_divided(self, divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """Step on the gradient divided by `divisor`, unless `found_inf` is 1; then give the slices to all."""
        self._check_parameters()

        # Take up what was changed since the last step: options by a scheduler, weights by whoever loaded some. An optimizer may
        # also write options in its step, which go back to where users see them.
        copy_options(self, self._inner)
        for one in self._values:
            one.refresh()
        self._bucket_step.step_divided(divisor, found_inf)
        copy_options(self._inner, self)

        # Send this rank's slices, also when the step was dropped: only the device knows that, and the ranks must issue the same
        # collectives. With `gather_ahead` only what a forward pass would not wait for by itself is waited for here.
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
        # A hook that only looks refuses gradients that nobody has summed. The engine has summed them when it steps, and a flat
        # step passes over such hooks; a step that the user takes asks them here.
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

    def gradient_slices(self) -> Iterator[GradientSlice]:
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
        with self._waits.together("optimizer.state_dict()"):
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


# Its step hooks run where the slices are stepped on; torch would run them around `step` once more.
ZeroOptimizer.step.hooked = True  # type: ignore[attr-defined]


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


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on its neighbours: a slice would step otherwise.

    Found out by trying, for each kind of parameter group: two steps on a small matrix, whole and in two halves.
    """
    name = type(optimizer).__name__
    for at, *_ in kinds_of_groups(optimizer):
        try:
            whole, halves = two_steps(
                optimizer, at, (4, 6), lambda tensor: [half.clone() for half in tensor.view(-1).chunk(2)]
            )
        except Exception as error:
            raise GradientError(
                f"zero stages 1 and 2 shard element-wise optimizers, and {name} could not step on a slice: {error}. "
                f"Use AdamW, SGD or the like, or zero stage 3 or 0.",
                code="C070",
            ) from error
        if not torch.allclose(whole.view(-1), torch.cat(halves), rtol=1e-9, atol=1e-12):
            raise GradientError(
                f"zero stages 1 and 2 shard element-wise optimizers, and {name} is none: in group {at} it steps otherwise on half of "
                f"a matrix than on the whole. Use AdamW, SGD or the like, or turn zero off.",
                code="C070",
            )


# --- The twin that steps on slices: the same class and options, on what this rank owns instead of whole parameters ---


_OWN_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@dataclass(frozen=True, eq=False)
class OwnedPart:
    """Elements [start, stop) of a parameter's local tensor, in memory order: `value` is what the optimizer steps on."""

    parameter: Tensor
    group: int
    start: int
    stop: int
    value: Tensor

    @property
    def local(self) -> Tensor:
        """All elements of the parameter that this rank's model holds."""
        return local_part(self.parameter).detach()


def optimizer_of_parts(optimizer: Optimizer, parts: Sequence[OwnedPart]) -> Optimizer:
    """An optimizer like this one over `parts`, which takes over its state; the original's is given up.

    Step hooks are shared with the original, hooks of state dictionaries are not: they are for whole parameters.
    """
    groups = range(len(optimizer.param_groups))
    inner = twin_of(optimizer, [[part.value for part in parts if part.group == at] for at in groups])
    for name in _OWN_HOOKS:
        setattr(inner, name, OrderedDict())
    for part in parts:
        held = optimizer.state.get(part.parameter)
        if held:
            inner.state[part.value] = {name: cut(value, part, name) for name, value in held.items()}
    optimizer.state.clear()
    return inner


def copy_options(source: Optimizer, target: Optimizer) -> None:
    """Give the groups of one optimizer the options of the other's (a scheduler, or a step, may have changed them)."""
    for theirs, mine in zip(source.param_groups, target.param_groups, strict=True):
        for key, value in theirs.items():
            if key != "params":
                mine[key] = value


def cut(value: Any, part: OwnedPart, name: str) -> Any:
    """What a part keeps of something that was kept for its whole parameter."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    whole, held = part.local, local_part(value).detach()
    if name != "step" and held.shape == whole.shape:
        if held.stride() != whole.stride():
            held = torch.empty_like(whole, dtype=held.dtype).copy_(held)
        return flattened(held)[part.start : part.stop].to(part.value.device, copy=True)
    return held.clone()


# --- The sharded state as whole parameters see it: gathered, cut, or as the ranges that this rank has ---


class ShardedState:
    """Reads and writes `inner.state` by parameter."""

    def __init__(self, inner: Optimizer, values: Sequence[BucketValues], parts: Sequence[OwnedPart]) -> None:
        self._inner = inner
        self._parts = {id(part.parameter): part for part in parts}
        self._values = {id(parameter): one for one in values for parameter in one.bucket.parameters}

    def knows(self, parameter: Tensor) -> bool:
        """Whether the parameter is sharded here, if only into other ranks' slices."""
        return id(parameter) in self._values

    def shard_of(self, parameter: Tensor) -> FlatShard | None:
        """This rank's part of a parameter; None if it has none, or the parameter is not sharded at all."""
        part = self._parts.get(id(parameter))
        if part is None:
            return None
        return FlatShard(part.start, part.stop, self._values[id(parameter)].group.ranks, self._kept(part))

    def whole(self, parameter: Tensor) -> dict[str, Any]:
        """Everything kept for a sharded parameter, as if it were not sharded. Collective over its group."""
        part = self._parts.get(id(parameter))
        kept = self._kept(part) if part is not None else {}
        # A rank without a part does not know what is kept, nor in which dtype, and must take part in the same collectives.
        mine = {name: _kind(value, part) for name, value in kept.items()} if part is not None else {}
        kinds: dict[str, list[Any]] = {}
        for theirs in self._values[id(parameter)].group.gather_objects(mine):
            kinds.update(theirs)
        return {name: self._gathered(parameter, kept.get(name), kind) for name, kind in kinds.items()}

    def whole_gradient(self, parameter: Tensor) -> Tensor | None:
        """The final gradient of a sharded parameter. Collective over its group; None where no rank had one."""
        bucket = self._values[id(parameter)].bucket
        index = next(at for at, one in enumerate(bucket.parameters) if one is parameter)
        if index in bucket.absent:
            return None
        span = next((span for span in bucket.spans if span.index == index), None)
        own = bucket.gradient[span.at : span.at + span.numel] if span is not None else None
        gradient: Tensor = self._gathered(parameter, own, ["like", _name(bucket.gradient.dtype)])
        return gradient

    def load(self, states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """The dictionary that `inner` is to load: by id of parameter, whole state or just this rank's part of it."""
        numbers: dict[int, int] = {}
        groups = []
        for group in self._inner.param_groups:
            first = len(numbers)
            for value in group["params"]:
                numbers[id(value)] = len(numbers)
            groups.append({**group, "params": list(range(first, len(numbers)))})
        state: dict[int, dict[str, Any]] = {}
        for part in self._parts.values():
            given = dict(states.get(id(part.parameter), {}))
            self._set_master(part, given.pop(MASTER, None))
            if given:
                state[numbers[id(part.value)]] = {k: _fitting(v, part, k) for k, v in given.items()}
        return {"state": state, "param_groups": groups}

    def _kept(self, part: OwnedPart) -> dict[str, Any]:
        kept = dict(self._inner.state.get(part.value, {}))
        # A copy that only lies on another device is no state: it is the parameter.
        return {**kept, MASTER: part.value} if part.value.dtype != part.local.dtype else kept

    @torch.no_grad()
    def _set_master(self, part: OwnedPart, given: Any) -> None:
        if self._values[id(part.parameter)].has_master:
            part.value.copy_(
                flattened(part.local)[part.start : part.stop] if given is None else _fitting(given, part, MASTER)
            )

    def _gathered(self, parameter: Tensor, value: Any, kind: Sequence[Any]) -> Any:
        if kind[0] == "value":
            return _decoded(kind)
        group, part, like = self._values[id(parameter)].group, self._parts.get(id(parameter)), local_part(parameter)
        whole = torch.zeros(like.numel(), dtype=getattr(torch, kind[1]), device=like.device)
        if part is not None and value is not None:
            whole[part.start : part.stop] = value
        if not group.alone:
            # As bytes: every element is somebody's and zero elsewhere, so that the sum has the same bits.
            dist.all_reduce(whole.view(torch.uint8), group=group.group)
        return view_like(whole, like.detach())


def _kind(value: Any, part: OwnedPart) -> list[Any]:
    """["like", dtype] for a tensor with an element per element; ["value", ...] for one value of all."""
    if isinstance(value, Tensor):
        if value.shape == part.value.shape:
            return ["like", _name(value.dtype)]
        if value.numel() != 1:
            raise CheckpointError(f"state of shape {tuple(value.shape)} belongs neither to elements nor to a parameter")
        return ["value", _name(value.dtype), value.item(), list(value.shape)]
    return ["value", None, value]


def _decoded(kind: Sequence[Any]) -> Any:
    if kind[1] is None:
        return kind[2]
    return torch.tensor(kind[2], dtype=getattr(torch, kind[1]), device="cpu").reshape(kind[3])


def _fitting(value: Any, part: OwnedPart, name: str) -> Any:
    """What was loaded, cut to the part if it is for the whole parameter."""
    if isinstance(value, Tensor) and name != "step" and value.shape == part.value.shape:
        return value
    return cut(value, part, name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

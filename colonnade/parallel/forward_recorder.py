"""Records a forward pass with fake weights (no memory, no arithmetic): the calls of the model's units, and the tensors between
the calls.

`units_of` finds the units of a model: its blocks, and the layers next to the lists of blocks. `record` runs the forward pass of a
copy with fake parameters; anything computed from inputs alone (masks, positions) is computed with real values.

Time is counted in calls that have begun. A tensor that depends on a parameter or on the result of a call is a `Value` with two
times: its creation, and the creation of the oldest result that it depends on. `own_forward` derives from these times the calls
before which the pass can be split.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from colonnade.comm.torch_versions import fake_mode
from colonnade.errors import ScheduleError
from colonnade.parallel.forward import subclass_with

# --------------------------------------------------------------------------------------------------
# The tree of a model's modules: its units, and copies of the tree.
# --------------------------------------------------------------------------------------------------


Tensors = Callable[[Tensor], Tensor]


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose calls a forward pass is split into, by name: blocks, and the layers outside of lists of blocks.

    Blocks are modules with layers inside, in an outermost nn.ModuleList, or in an nn.Sequential that has two or more of one
    class. If there are none, plain layers in an nn.ModuleList count as blocks. Modules with blocks inside (the model itself,
    its decoder) are no units, nor are lists and dicts of modules. Empty if there are no blocks.
    """

    def is_list_of_blocks(module: nn.Module) -> bool:
        kinds = Counter(type(member) for member in module.children() if _is_block(member))
        least = 1 if isinstance(module, nn.ModuleList) else 2
        return _is_list(module) and any(count >= least for count in kinds.values())

    def is_list_of_layers(module: nn.Module) -> bool:
        return isinstance(module, nn.ModuleList) and any(has_parameters(member) for member in module)

    for is_block_list in (is_list_of_blocks, is_list_of_layers):
        tree = _Tree(is_block_list)
        if tree.has_blocks(model):
            found: dict[str, nn.Module] = {}
            seen: set[int] = set()
            for name, unit in tree.units(model, ""):
                if id(unit) not in seen:
                    seen.add(id(unit))
                    found[name] = unit
            return found
    return {}


class _Tree:
    """The tree of a model. `is_block_list`: whether a module is a list of blocks."""

    def __init__(self, is_block_list: Callable[[nn.Module], bool]) -> None:
        self._is_block_list = is_block_list

    def units(self, module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            cannot_run = type(child).forward is nn.Module.forward  # nn.ModuleList, nn.ModuleDict
            if cannot_run or (self.has_blocks(child) and (_is_list(child) or not self._is_block_list(module))):
                yield from self.units(child, f"{prefix}{name}.")
            else:
                yield prefix + name, child

    def has_blocks(self, module: nn.Module) -> bool:
        """Whether the module is a list of blocks, or contains such a list that is not inside a block."""
        return self._is_block_list(module) or any(self.has_blocks(child) for child in module.children())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _is_block(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and has_parameters(module)


def has_parameters(module: nn.Module) -> bool:
    """Whether the module has parameters."""
    return next(module.parameters(), None) is not None


def outside(module: nn.Module, units: Container[int], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules outside of units, with their names; `units` has the ids of the units."""
    yield name, module
    for key, child in module.named_children():
        if id(child) not in units:
            yield from outside(child, units, f"{name}.{key}" if name else key)


def copy_tree(module: nn.Module, memo: dict[int, nn.Module], tensors: Tensors) -> nn.Module:
    """Copy a module and all its submodules; attributes that are neither modules nor tensors are shared with the original.

    Args:
        module: The module.
        memo: Replacements of modules, by the id of the original: these modules are not copied. The copies made here are added.
        tensors: Called for each parameter, buffer and other tensor; returns the one to use in the copy.
    """
    if id(module) in memo:
        return memo[id(module)]
    copied: Any = object.__new__(type(module))
    memo[id(module)] = copied
    own = vars(copied)
    # Not by deepcopy: that would copy the weights, and everything that attributes refer to.
    own.update((key, tensors(value) if isinstance(value, Tensor) else value) for key, value in vars(module).items())
    for key, value in vars(nn.Module()).items():
        if isinstance(value, (dict, set)):  # parameters, modules, hooks
            own[key] = copy.copy(vars(module)[key])
    for group in (copied._parameters, copied._buffers):
        group.update({name: tensors(tensor) for name, tensor in group.items() if tensor is not None})
    for name, child in copied._modules.items():
        copied._modules[name] = None if child is None else copy_tree(child, memo, tensors)
    forward = own.get("forward")
    if getattr(forward, "__self__", None) is module:
        own["forward"] = MethodType(forward.__func__, copied)  # bound to the copy
    return copied


# --------------------------------------------------------------------------------------------------
# Watched calls of units: while a forward pass is recorded, and while a stage runs its part of it.
# --------------------------------------------------------------------------------------------------


class Watcher(Protocol):
    """Interface of an object that handles every call of a unit, for example records it or skips it."""

    def call(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of the unit `name` and return its result; `own(*args, **kwargs)` runs the unit itself."""


WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
"""The watcher of this thread. None while activation checkpointing recomputes a block, which is no new call."""


def watch_calls(name: str, unit: nn.Module) -> None:
    """Route calls of the unit through the active `Watcher`, if there is one. Only the class of the unit changes."""
    vars(unit)["_colonnade_unit"] = name
    if not isinstance(unit, WatchedUnit):
        unit.__class__ = subclass_with(WatchedUnit, type(unit))


class WatchedUnit:
    """A unit whose calls go through the watcher.

    It overrides __call__ instead of using a hook, because a transformers layer with activation checkpointing runs its hooks again
    when it recomputes; and instead of `override_forward`, because the unit's own hooks are part of the call.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watcher, own = WATCHER.get(), super().__call__  # type: ignore[misc]
        return (
            own(*args, **kwargs) if watcher is None else watcher.call(vars(self)["_colonnade_unit"], own, args, kwargs)
        )


_PLAIN = (type(None), bool, int, float, str)
_BY_SHAPE_ALONE = {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros"}
_BY_SHAPE_ALONE |= {"new_ones", "new_full", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Value:
    """A tensor of the recorded pass that depends on parameters, with its two times (see the module docstring)."""

    number: int
    """The same for every occurrence of one tensor."""
    made: int
    oldest: int


@dataclass
class RecordedCall:
    """A call of a unit in the recorded forward pass."""

    name: str
    time: int
    inputs: dict[str, Value] = field(default_factory=dict)
    """By place in (args, kwargs): the arguments that depend on parameters."""
    outputs: list[Value | None] = field(default_factory=list)
    """For each leaf of its result; None for a leaf that is no tensor."""
    form: TreeSpec | None = None
    """The pytree of its result; None if that depends on no parameter, so that every stage can make the call."""


@dataclass
class Recording:
    """The result of `record`: the calls and values of one forward pass."""

    calls: list[RecordedCall]
    results: list[Value]
    """The values in the result of the model."""
    uses: dict[str, set[int]]
    """By name of a parameter or buffer: the times at which forward() used it outside of calls."""
    fake_units: dict[str, nn.Module]
    """The units of the recorded copy; their parameters have shapes but no memory."""


def record(model: nn.Module, units: dict[str, nn.Module], run: Callable[[nn.Module], Any]) -> Recording:
    """Record `run(copy of the model)`, a forward pass. The model does not change.

    Raises:
        ScheduleError: If the pass fails, for example because it depends on values of weights.
    """
    # A copy with fake parameters, which take no memory. Buffers outside of units keep their values, because masks and positions
    # are made of them; inside units that have parameters only shapes count.
    recorder = _Recorder()
    memo: dict[int, nn.Module] = {}
    for unit in units.values():
        if has_parameters(unit):
            copy_tree(unit, memo, recorder.fake)
    fake = copy_tree(model, memo, recorder.stand_in)
    fake_units = {name: memo[id(unit)] for name, unit in units.items()}
    for name, unit in fake_units.items():
        watch_calls(name, unit)
    for name, tensor in [*fake.named_parameters(remove_duplicate=False), *fake.named_buffers(remove_duplicate=False)]:
        recorder.names.setdefault(id(tensor), []).append(name)
    # The recorder sees each call of a unit, as the watcher, and each operation, as a mode of the dispatcher.
    token = WATCHER.set(recorder)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), recorder:
            result = run(fake)
    except ScheduleError:
        raise
    except Exception as error:
        last = recorder.calls[-1].name if recorder.calls else None
        where = f"{'in' if recorder.inside else 'after'} {last!r}" if last else "before its first layer"
        raise ScheduleError(
            f"the forward pass of {type(model).__name__} cannot be recorded without its weights, so the model cannot "
            f"be split into pipeline stages. The pass raised {type(error).__name__} {where}: {error}",
            code="C050",
        ) from error
    finally:
        WATCHER.reset(token)
    # A unit that never depends on a parameter (a rotary table) is called by every stage: no stage begins with it, and its
    # results are not sent. So it does not count as a call.
    results = [value for leaf in tree_leaves(result) if (value := recorder.value_of(leaf)) is not None]
    dependent = {call.name for call in recorder.calls if call.form is not None}
    return Recording([call for call in recorder.calls if call.name in dependent], results, recorder.uses, fake_units)


class _Recorder(TorchDispatchMode):
    """Sees every operation of the pass and every call of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.uses: dict[str, set[int]] = {}
        self.names: dict[int, list[str]] = {}
        """Names of the parameters and buffers of the copy, by id."""
        self.inside = False
        """Whether a unit is being called; calls of units inside it are part of that call."""
        self._fakes = fake_mode()
        self._stand_ins: dict[int, Tensor] = {}
        self._alive: list[Any] = []  # tensors known by id; an id is reused once its object is gone
        # Times: when a tensor was made (by id), and, by memory, of its oldest value and of the last write into it.
        self._made: dict[int, int] = {}
        self._oldest: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # of values, by id of the tensor

    # -- tensors of the model ------------------------------------------------------------------------------

    def fake(self, tensor: Tensor) -> Tensor:
        """A stand-in without memory, of the shape and dtype of `tensor`; one for each tensor."""
        if id(tensor) not in self._stand_ins:
            with self._fakes:
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            self._stand_ins[id(tensor)] = nn.Parameter(made, requires_grad=False) if is_parameter else made
        return self._stand_ins[id(tensor)]

    def stand_in(self, tensor: Tensor) -> Tensor:
        """A parameter's fake; a CPU copy of a buffer, because masks and positions are made of buffers."""
        if isinstance(tensor, nn.Parameter):
            return self.fake(tensor)
        if id(tensor) not in self._stand_ins:
            data = (
                torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
                if tensor.is_meta
                else tensor.detach().cpu().clone()
            )
            self._stand_ins[id(tensor)] = data
        return self._stand_ins[id(tensor)]

    # -- operations ----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Of zeros_like(x) only the shape of x counts: the result depends on no parameter, even if x does.
        if func._overloadpacket.__name__ in _BY_SHAPE_ALONE:
            device = {**kwargs, "device": torch.device("cpu")}
            shape = torch.zeros((), dtype=args[0].dtype, device="cpu").expand(args[0].shape)
            return func(shape, *args[1:], **device)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        oldest = [time for tensor in given if (time := self._oldest_of(tensor)) is not None]
        if not self.inside:  # parameters and buffers that forward() uses outside of calls
            for name in (name for tensor in given for name in self.names.get(id(tensor), ())):
                self.uses.setdefault(name, set()).add(self._time)

        # Inside a call only shapes count, so a result that depends on values, which fake tensors do not have, may be guessed.
        result = self._guessed(func, args) if self.inside and oldest else NotImplemented
        if result is NotImplemented:
            result = func(*args, **kwargs)

        # The result, and a tensor that the operation writes to, depend on the oldest value among its arguments.
        if oldest:
            for argument, tensor in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(tensor, Tensor):
                    self._mark(tensor, min(oldest))
                    self._written[_memory(tensor)] = self._time
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._mark(leaf, min(oldest))
                    self._made.setdefault(id(leaf), self._time)
        return result

    def _guessed(self, func: Any, args: Any) -> Any:
        """A result of the right shape for an operation that depends on values (as if no expert got a token); NotImplemented for
        other operations.
        """
        name = func._overloadpacket.__name__
        if name == "nonzero":
            return torch.zeros(0, args[0].dim(), dtype=torch.int64, device="cpu")
        if name == "_grouped_mm":  # torch's fake kernel takes bf16 only
            rows, weights, *_ = args
            if (rows.dim(), weights.dim()) == (2, 3):
                return rows.new_empty(*rows.shape[:-1], weights.shape[-1])
        return 0 if name == "_local_scalar_dense" else NotImplemented

    @property
    def _time(self) -> int:
        return self.calls[-1].time if self.calls else -1

    def _oldest_of(self, tensor: Tensor) -> int | None:
        if isinstance(tensor, nn.Parameter) and id(tensor) in self.names:
            return self._time
        return self._oldest.get(_memory(tensor))

    def _mark(self, tensor: Tensor, oldest: int) -> None:
        self._alive.append(tensor)
        memory = _memory(tensor)
        self._oldest[memory] = min(oldest, self._oldest.get(memory, oldest))

    def value_of(self, leaf: Any) -> Value | None:
        """The `Value` of a tensor; None if it does not depend on parameters, and for any other leaf."""
        oldest = self._oldest_of(leaf) if isinstance(leaf, Tensor) else None
        if oldest is None:
            return None
        self._alive.append(leaf)
        made = self._made.get(id(leaf), self._time)
        # Written to in place since then: a copy sent earlier would lack that.
        made = max(made, self._written.get(_memory(leaf), made))
        return Value(self._numbers.setdefault(id(leaf), len(self._numbers)), made, oldest)

    # -- calls ---------------------------------------------------------------------------------------------

    def call(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call and record it. Results count as made by this call, even if the call returns its own arguments."""
        if self.inside:
            return own(*args, **kwargs)
        call = RecordedCall(name, self._time + 1)
        for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
            if (value := self.value_of(leaf)) is not None:
                call.inputs[keystr(path)] = value
            elif not isinstance(leaf, (*_PLAIN, Tensor)):
                # An object that no stage could send: a problem only if it carries values.
                inside = tree_leaves(dict(getattr(leaf, "__dict__", {})))
                if any(self.value_of(item) is not None for item in inside):
                    raise ScheduleError(
                        f"{name!r} is called with a {type(leaf).__name__} that contains tensors, and such an object "
                        "cannot be sent to another stage. Pass the tensors as arguments.",
                        code="C050",
                    )
        self.calls.append(call)
        self.inside = True
        result = own(*args, **kwargs)
        self.inside = False
        leaves, form = tree_flatten(result)
        # New tensors in place of the result: even if the unit returns its own argument, the next stage receives it as a value made
        # by this call.
        has_weights = any(isinstance(tensor, nn.Parameter) for tensor in own.__self__.parameters())  # type: ignore[attr-defined]
        if not has_weights and all(self.value_of(leaf) is None for leaf in leaves):
            return result
        call.form = form
        fresh = [self._fresh(leaf, name) for leaf in leaves]
        call.outputs = [self.value_of(leaf) for leaf in fresh]
        return tree_unflatten(fresh, form)

    def _fresh(self, leaf: Any, name: str) -> Any:
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, _PLAIN):
                raise ScheduleError(
                    f"{name!r} returns a {type(leaf).__name__}, which cannot be sent to another stage. Return "
                    "tensors, numbers, strings, None, or tuples, lists and dicts of these types.",
                    code="C050",
                )
            return leaf
        with self._fakes:
            made = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        self._made[id(made)] = self._time
        self._mark(made, self._time)
        return made


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

"""Recording a forward pass without memory or arithmetic of the weights: its calls of units, and the tensors they hand on.

`units_of` says which modules of a model are units: blocks in lists, and what stands beside the lists. `record` runs the forward
pass of a copy whose parameters are fake tensors; what is computed from inputs alone (masks, positions) is computed for real. Every
tensor that comes from a parameter, or from the result of a call, is known by two times: when it was made, and when the oldest of
the results that went into it was. A time is the number of calls that had begun. `own_forward` finds in these times where the
pass can be cut.
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
# The tree of a model's modules: which of its calls can lie in a stage each, and copies of the tree.
# --------------------------------------------------------------------------------------------------


Tensors = Callable[[Tensor], Tensor]


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose calls a forward pass is made of, by name: blocks, and what stands beside the lists of them.

    Blocks are members of the outermost nn.ModuleLists, and of nn.Sequentials of like members, that have layers inside. Where
    the model has no such block, plain layers in an nn.ModuleList count as blocks. What has blocks inside (the model itself,
    its decoder) is none, nor is a list or a dict of modules. Empty if there are no blocks.
    """
    for is_block_list in (_is_list_of_blocks, _is_list_of_layers):
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
    """The tree of a model, where `is_block_list` says which modules are lists of blocks."""

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
        """Whether it is a list of blocks, or has one inside that is not itself inside a block."""
        return self._is_block_list(module) or any(self.has_blocks(child) for child in module.children())


def _is_list_of_blocks(module: nn.Module) -> bool:
    kinds = Counter(type(member) for member in module.children() if _is_block(member))
    least = 1 if isinstance(module, nn.ModuleList) else 2
    return _is_list(module) and any(count >= least for count in kinds.values())


def _is_list_of_layers(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and any(has_parameters(member) for member in module)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _is_block(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and has_parameters(module)


def has_parameters(module: nn.Module) -> bool:
    """Whether there is anything to train in it."""
    return next(module.parameters(), None) is not None


def outside(module: nn.Module, units: Container[int], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that have units inside, with their names. `units`: their ids."""
    yield name, module
    for key, child in module.named_children():
        if id(child) not in units:
            yield from outside(child, units, f"{name}.{key}" if name else key)


def copy_tree(module: nn.Module, memo: dict[int, nn.Module], tensors: Tensors) -> nn.Module:
    """A copy of a module and of those inside it, with `tensors` of its parameters, buffers and others; the rest it shares.

    `memo`, by id, has what stands for a module and is not copied, and gets the copies.
    """
    if id(module) in memo:
        return memo[id(module)]
    copied: Any = object.__new__(type(module))
    memo[id(module)] = copied
    own = vars(copied)
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
        own["forward"] = MethodType(forward.__func__, copied)
    return copied


# --------------------------------------------------------------------------------------------------
# Calls of units, watched: while a forward pass is recorded, and while a stage runs its part of it.
# --------------------------------------------------------------------------------------------------


class Watcher(Protocol):
    """Decides what a call of a unit does."""

    def call(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of calling the unit `name`; `own` calls it."""


WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
"""The watcher of the calls of this thread; none while a block computes its activations again."""


def watch_calls(name: str, unit: nn.Module) -> None:
    """Have calls of the unit go through the watcher, where there is one. Its class changes; else nothing does."""
    vars(unit)["_colonnade_unit"] = name
    if not isinstance(unit, WatchedUnit):
        unit.__class__ = subclass_with(WatchedUnit, type(unit))


class WatchedUnit:
    """A unit whose calls go through the watcher.

    By __call__: not by a hook, since a layer of transformers that computes its activations again runs its hooks again, and not by
    `override_forward`, since the model's hooks on the unit belong to the call.
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
    """A tensor of the pass that depends on parameters."""

    number: int
    """The same for the same tensor, wherever it is met."""
    made: int
    oldest: int


@dataclass
class RecordedCall:
    """A call of a unit."""

    name: str
    time: int
    inputs: dict[str, Value] = field(default_factory=dict)
    """By place in (args, kwargs): what it is given that depends on parameters."""
    outputs: list[Value | None] = field(default_factory=list)
    """Those of the tensors among the leaves of its result; None for a leaf that is none."""
    form: TreeSpec | None = None
    """The form of its result; None where that depends on no parameter, so that every stage can call the unit itself."""


@dataclass
class Recording:
    """The calls and values of one pass."""

    calls: list[RecordedCall]
    results: list[Value]
    """The values among the result of the model."""
    uses: dict[str, set[int]]
    """Parameters and buffers that were used outside of calls, by name, and when."""
    fake_units: dict[str, nn.Module]
    """The units, with the parameters that they had in the pass: they have shapes and no memory."""


def record(model: nn.Module, units: dict[str, nn.Module], run: Callable[[nn.Module], Any]) -> Recording:
    """Watch `run(copy of the model)`, a forward pass. The model is left as it is."""
    # A copy with fake parameters, which takes no memory. Buffers outside of units keep their values, since masks and positions are
    # made of them; inside of units that have parameters only shapes count.
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
    # The pass itself: the recorder sees each call of a unit, as their watcher, and each operation, as a mode of the dispatcher.
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
            f"the forward pass of {type(model).__name__} cannot be followed without its weights, so it cannot be cut into "
            f"pipeline stages: {where} came {type(error).__name__}: {error}",
            code="C050",
        ) from error
    finally:
        WATCHER.reset(token)
    # A unit all of whose calls depend on no parameter (a rotary table) is called by every stage itself: no cut at it, none of it
    # goes along.
    results = [value for leaf in tree_leaves(result) if (value := recorder.value_of(leaf)) is not None]
    apart = {call.name for call in recorder.calls if call.form is not None}
    return Recording([call for call in recorder.calls if call.name in apart], results, recorder.uses, fake_units)


class _Recorder(TorchDispatchMode):
    """Sees every operation of the pass, and every call of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.uses: dict[str, set[int]] = {}
        self.names: dict[int, list[str]] = {}
        """The names of parameters and buffers of the copy, by id."""
        self.inside = False
        """Whether a unit is being called; calls of units inside it are its own."""
        self._fakes = fake_mode()
        self._stand_ins: dict[int, Tensor] = {}
        self._alive: list[Any] = []  # ids are only good for what lives
        # Times: when a tensor was made (by id), the oldest value in its memory, and when that was written to last.
        self._made: dict[int, int] = {}
        self._oldest: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # of values, by id of the tensor

    # -- tensors of the model ------------------------------------------------------------------------------

    def fake(self, tensor: Tensor) -> Tensor:
        """A tensor of this shape without memory."""
        if id(tensor) not in self._stand_ins:
            with self._fakes:
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            self._stand_ins[id(tensor)] = nn.Parameter(made, requires_grad=False) if is_parameter else made
        return self._stand_ins[id(tensor)]

    def stand_in(self, tensor: Tensor) -> Tensor:
        """A parameter's fake; a buffer has its values, which masks and positions come from."""
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
        # Of `zeros_like(x)` only the shape of x counts: the result depends on no parameter, even if x does.
        if func._overloadpacket.__name__ in _BY_SHAPE_ALONE:
            device = {**kwargs, "device": torch.device("cpu")}
            shape = torch.zeros((), dtype=args[0].dtype, device="cpu").expand(args[0].shape)
            return func(shape, *args[1:], **device)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        oldest = [time for tensor in given if (time := self._oldest_of(tensor)) is not None]
        if not self.inside:  # parameters and buffers that the model uses itself, beside the calls of its units
            for name in (name for tensor in given for name in self.names.get(id(tensor), ())):
                self.uses.setdefault(name, set()).add(self._time)

        # Inside of a call only the form of its result counts, so values that fake tensors do not have may be guessed.
        result = self._guessed(func, args) if self.inside and oldest else NotImplemented
        if result is NotImplemented:
            result = func(*args, **kwargs)

        # The result, and a tensor that was written to, are as old as the oldest value that went in.
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
        """For what depends on values, inside a call: only the form of its result counts. No token goes to any expert."""
        name = func._overloadpacket.__name__
        if name == "nonzero":
            return torch.zeros(0, args[0].dim(), dtype=torch.int64, device="cpu")
        if name == "_grouped_mm":  # torch's fake one knows bf16 alone
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
        """The value that a tensor is; None for one that does not depend on parameters."""
        oldest = self._oldest_of(leaf) if isinstance(leaf, Tensor) else None
        if oldest is None:
            return None
        self._alive.append(leaf)
        made = self._made.get(id(leaf), self._time)
        made = max(made, self._written.get(_memory(leaf), made))
        return Value(self._numbers.setdefault(id(leaf), len(self._numbers)), made, oldest)

    # -- calls ---------------------------------------------------------------------------------------------

    def call(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the unit; its result is new, whatever it did to what it was given."""
        if self.inside:
            return own(*args, **kwargs)
        call = RecordedCall(name, self._time + 1)
        for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
            if (value := self.value_of(leaf)) is not None:
                call.inputs[keystr(path)] = value
            elif not isinstance(leaf, (*_PLAIN, Tensor)) and self._hides_value(leaf):
                raise ScheduleError(
                    f"{name!r} is given a {type(leaf).__name__}, which cannot go from stage to stage", code="C050"
                )
        self.calls.append(call)
        self.inside = True
        result = own(*args, **kwargs)
        self.inside = False
        leaves, form = tree_flatten(result)
        # New tensors in place of the result: whatever the unit returned (its own argument, say), another stage gets it as a value
        # that was made here.
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
                    f"{name!r} returns a {type(leaf).__name__}, which cannot go from stage to stage: tensors, numbers, strings "
                    f"and None can",
                    code="C050",
                )
            return leaf
        with self._fakes:
            made = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        self._made[id(made)] = self._time
        self._mark(made, self._time)
        return made

    def _hides_value(self, leaf: Any) -> bool:
        return any(self.value_of(item) is not None for item in tree_leaves(dict(getattr(leaf, "__dict__", {}))))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

"""Start on the meta device: a model is built without memory, and each rank makes its own part of every parameter.

    with colonnade.meta_init():
        model = Llama(config)

1. `meta_init` builds the model on the meta device and records every operation that gives values to a tensor there
   (`InitRecording`). A parameter remembers which tensor of the recording it starts as (`InitialValue`).
2. `initialize` asks `parameter_inits` how each parameter starts, once the model is split and cut. Two ways:
   - element by element (`ElementwiseInit`), where each element follows from its place in the whole parameter alone, as with
     `torch.nn.init.normal_`. Then a rank makes any part of it without the rest. Random numbers are a function of a key and the
     place (`uniform`, `normal`), so they are the same under every layout;
   - by replay of everything that was recorded of it, whole, of which a rank keeps its part.
   A parameter may have its values in a file instead (`set_value_source`, `ParameterLoad`).
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from colonnade.context.random import derive_seed
from colonnade.errors import PlacementError


@contextmanager
def meta_init() -> Iterator[None]:
    """Build a model on the meta device: parameters take no memory until `initialize` draws this rank's part of each.

    What the model's code does to them (torch.nn.init, in-place methods, cutting, copying) is recorded and done in `initialize`.
    Buffers are made for real, on the CPU. Every random number follows from the seed of `launch`, the
    parameter's name and the place in the whole parameter, so weights are the same under every layout.
    """
    recording = InitRecording()
    parameters: list[nn.Parameter] = []

    def note_parameter(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter.device.type != "meta":
            return
        if is_lazy(parameter):
            raise PlacementError(
                f"{name} of {type(module).__name__} gets its shape in the first forward pass, but inside meta_init() it must "
                f"be known: use the layer that is given its sizes",
                code="C034",
            )
        if is_expanded(parameter):
            raise PlacementError(
                f"{name} of {type(module).__name__} is an expanded tensor, of shape {tuple(parameter.shape)} and strides "
                f"{parameter.stride()}: its elements share memory, so they cannot be trained apart. Give it memory of its own: "
                f"nn.Parameter(tensor.expand(...).clone())",
                code="C034",
            )
        parameters.append(parameter)
        recording.owned.add(memory_of(parameter))

    def deepcopy_and_note(parameter: Tensor, memo: Any) -> Any:
        copy = deep_copy(parameter, memo)
        note_parameter(nn.Module(), "", copy)  # nothing registers the parameters of a module that is copied
        return copy

    def make_buffer(module: nn.Module, name: str, buffer: Any) -> Tensor | None:
        return recording.read(buffer) if buffer is not None and buffer.device.type == "meta" else None

    on_buffer: Any = register_module_buffer_registration_hook  # the tensor that the hook returns is registered instead
    hooks = [register_module_parameter_registration_hook(note_parameter), on_buffer(make_buffer)]
    init: Any = nn.init
    truncated = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = _truncated_normal
    deep_copy: Any = nn.Parameter.__deepcopy__
    nn.Parameter.__deepcopy__ = deepcopy_and_note  # type: ignore[method-assign]
    try:
        with torch.device("meta"), recording, _ReadableMeta(recording):
            yield
    finally:
        init._no_grad_trunc_normal_ = truncated
        nn.Parameter.__deepcopy__ = deep_copy  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
        # Only now, since initialisation goes on after a parameter is registered. A part that was cut inside the block, and not
        # changed after that, starts as its whole does: the numbers follow from places in the whole parameter.
        for parameter in parameters:
            whole, version = vars(parameter).pop(_WHOLE, (parameter, parameter._version))
            tensor = whole if version == parameter._version else parameter
            setattr(parameter, _ATTRIBUTE, InitialValue(recording, tensor.detach(), parameter._version))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Build a model on the meta device without a recording: many times faster, for plans. No values can be read."""
    with torch.device("meta"), _GivenValuesOnCPU():
        yield


class _GivenValuesOnCPU(TorchFunctionMode):
    """Tensors that are made of given values (torch.tensor([1, 2])) lie on the CPU, with their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITH_VALUES and kwargs.get("device") is None:
            return func(*args, **{**kwargs, "device": "cpu"})
        return func(*args, **kwargs)


_IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__
_WITH_VALUES = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor}
_READS = {
    getattr(Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__complex__")
}


class _ReadableMeta(_GivenValuesOnCPU):
    """A meta device whose tensors can be read (`item()`, `bool()`): by a replay of the recording."""

    def __init__(self, recording: InitRecording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META and sys._getframe(1).f_globals.get("__name__") == nn.init.__name__:
            return False  # some of torch.nn.init does nothing to tensors of the meta device, where nothing could be recorded
        if func in _READS:
            (tensor,) = args
            args = (self._recording.read(tensor) if tensor.device.type == "meta" else tensor,)
        return super().__torch_function__(func, types, args, kwargs)


@torch.no_grad()
def _truncated_normal(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> Tensor:
    """By the inverse of the distribution function; torch draws again and again what is outside, which cannot be replayed."""
    low, high = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))
    return tensor.uniform_(low, high).erfinv_().mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)


# --------------------------------------------------------------------------------------------------
# What a parameter remembers of its initial value.
# --------------------------------------------------------------------------------------------------


_ATTRIBUTE = "_colonnade_start"
_SOURCE = "_colonnade_values"
_WHOLE = "_colonnade_cut_from"


class ParameterSource(Protocol):
    """Where the values of a whole parameter are kept, such as a file; its text says where."""

    def read_into(self, target: Tensor, offset: Sequence[int]) -> None:
        """Give `target` the elements of the whole from `offset` on."""


class InitialValue(NamedTuple):
    """How a parameter starts: as `tensor` of the recording, and its version counter then, which tells of later changes."""

    recording: InitRecording
    tensor: Tensor
    version: int


def initial_value_of(parameter: Tensor) -> InitialValue | None:
    """How a parameter starts by `meta_init`; None for any other."""
    return getattr(parameter, _ATTRIBUTE, None)


def keep_initial_value(part: Tensor, whole: Tensor) -> None:
    """A part of a parameter of the meta device starts as its elements of the whole do, unless it is changed later."""
    start = initial_value_of(whole)
    if start is not None:
        version = part._version if start.version == whole._version else -1
        setattr(part, _ATTRIBUTE, InitialValue(start.recording, start.tensor, version))
    elif whole.is_meta:  # meta_init() is still on, and sets initial values at its end
        setattr(part, _WHOLE, (whole.detach(), part._version))


def set_value_source(parameter: Tensor, source: ParameterSource) -> None:
    """A parameter on the meta device gets its values from there in `initialize`: on each rank those that it holds."""
    setattr(parameter, _SOURCE, source)


def value_source_of(parameter: Tensor) -> ParameterSource | None:
    """The source that `set_value_source` gave; None without one."""
    return getattr(parameter, _SOURCE, None)


def forget_initial_value(parameter: Tensor) -> None:
    """The parameter has its values now."""
    vars(parameter).pop(_ATTRIBUTE, None)
    vars(parameter).pop(_SOURCE, None)


# --------------------------------------------------------------------------------------------------
# The recording: what was done to tensors of the meta device, so that it can be done again for real.
# --------------------------------------------------------------------------------------------------


_READ_VALUES = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.allclose.default,
}
"""Operations by which torch's own code reads the values of tensors."""


@dataclass(frozen=True, eq=False)
class RecordedOp:
    """An operation that gave values to tensors of the meta device: those of `outputs`."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    draws: int
    """How many operations drew random numbers before it, those for parts that other ranks hold too."""

    @property
    def name(self) -> str:
        """Its name in torch, without the overload: "uniform_"."""
        return str(self.func._schema.name).removeprefix("aten::")

    @property
    def inputs(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves([self.args, dict(self.kwargs)]) if isinstance(leaf, Tensor)]

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags


Run = Callable[[RecordedOp, tuple[Any, ...], dict[str, Any]], Any]
"""Does an operation again: (the recorded operation, its arguments for real)."""


class InitRecording(TorchDispatchMode):
    """Records every operation on the meta device while it is entered. Views are not recorded: tensors carry their strides.

    Tensors are told apart by their memory (`memory_of`), since an in-place operation on a view changes the whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[RecordedOp] = []
        self.owned: set[int] = set()
        """The memory of tensors that became parameters."""
        self._writers: dict[int, list[int]] = {}
        """The numbers of the operations that changed a memory."""
        self._draws = 0
        self.read_from: dict[RecordedOp, Tensor] = {}
        """Operations whose random numbers were read while the model was built, with the state of torch's generator before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        # Values that leave the meta device, to Python or into a tensor that has memory, are made now.
        if func in _READ_VALUES or (func._schema.is_mutable and given and not given[0].is_meta):
            args, kwargs = tree_map_only(Tensor, lambda t: self.read(t) if t.is_meta else t, (args, kwargs))
            return func(*args, **kwargs)
        output = func(*tree_map_only(Tensor, _on_meta, args), **kwargs) if any(t.is_meta for t in given) else None
        output = func(*args, **kwargs) if output is None else output

        made = tuple(leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_meta)
        is_view = not func._schema.is_mutable and {memory_of(t) for t in made} <= {memory_of(t) for t in given}
        if made and not is_view:
            # A copy of arguments that have values: they may be changed before the replay.
            args, kwargs = tree_map_only(Tensor, lambda t: t.detach() if t.is_meta else t.clone(), (args, kwargs))
            for memory in {memory_of(tensor) for tensor in made}:
                self._writers.setdefault(memory, []).append(len(self.ops))
            self.ops.append(RecordedOp(func, args, kwargs, made, self._draws))
            self._draws += self.ops[-1].is_random
        return output

    def needed_for(self, tensor: Tensor) -> list[int]:
        """The numbers of the operations that decide its values, in order."""
        found: set[int] = set()
        left = [(memory_of(tensor), len(self.ops))]
        while left:
            memory, before = left.pop()
            for at in self._writers.get(memory, ()):
                if at < before and at not in found:
                    found.add(at)
                    left += [(memory_of(each), at) for each in self.ops[at].inputs if each.is_meta]
        return sorted(found)

    def replay(self, tensor: Tensor, run: Run | None = None) -> Tensor:
        """The tensor for real, on the CPU: everything that decides its values is done again."""
        real: dict[int, Tensor] = {}

        def as_real(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_meta:
                return value
            return real[memory_of(value)].as_strided(value.size(), value.stride(), value.storage_offset())

        with torch.no_grad(), torch.device("cpu"):
            for at in self.needed_for(tensor):
                op = self.ops[at]
                args, kwargs = tree_map_only(Tensor, as_real, (op.args, dict(op.kwargs)))
                if "device" in kwargs:
                    kwargs["device"] = torch.device("cpu")
                output = op.func(*args, **kwargs) if run is None else run(op, args, kwargs)
                results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                for result, made in zip(results, op.outputs, strict=True):
                    if memory_of(made) not in real:
                        real[memory_of(made)] = _memory_for(result, made)
            return as_real(tensor)

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor for real, while the model is still being built: its values must not depend on those of parameters, which are drawn later."""
        ops = [self.ops[at] for at in self.needed_for(tensor)]
        touched = {memory_of(each) for op in ops for each in (*op.inputs, *op.outputs) if each.is_meta}
        if touched & self.owned and any(op.is_random for op in ops):
            raise PlacementError(
                "inside meta_init() a buffer, or code of the model, needs the values of a parameter, which is drawn only in "
                "initialize(). Build this module outside meta_init(), or `with torch.device('cpu')` inside it.",
                code="C034",
            )
        return self.replay(tensor, self._draw_once).clone()

    def _draw_once(self, op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does an operation again. A second read of its random numbers finds the same ones."""
        if not op.is_random:
            return op.func(*args, **kwargs)
        if op not in self.read_from:
            self.read_from[op] = torch.get_rng_state()
            return op.func(*args, **kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.read_from[op])
            return op.func(*args, **kwargs)


def memory_of(tensor: Tensor) -> int:
    """A number that tensors which share memory have in common."""
    return tensor.untyped_storage()._cdata


def elements_in_memory(tensor: Tensor) -> int:
    """How many elements of its dtype the memory of a tensor has room for."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def covers_memory(tensor: Tensor) -> bool:
    """Whether it is all of its memory."""
    return tensor.numel() == elements_in_memory(tensor)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several of its elements lie at one place in memory."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


def _memory_for(result: Tensor, made: Tensor) -> Tensor:
    """A flat tensor for all the memory of `made`, with the values of `result` in their places."""
    flat = result.new_empty(elements_in_memory(made))
    flat.as_strided(made.size(), made.stride(), made.storage_offset()).copy_(result)
    return flat


# --------------------------------------------------------------------------------------------------
# Random numbers by position: the number at a place is a function of a key and of that place, so any part is drawn alone.
#
# Whole numbers are the same on every device and machine. A normal number is computed from one in float64, whose last bit
# may differ between kinds of devices.
# --------------------------------------------------------------------------------------------------


_MASK = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of splitmix64."""


def uniform(key: int, positions: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """A number between `low` and `high` for each position, in float64."""
    return _fractions(key, positions).mul_(high - low).add_(low)


def normal(key: int, positions: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """A normal number for each position, in float64."""
    return _fractions(key, positions).mul_(2).sub_(1).erfinv_().mul_(std * math.sqrt(2)).add_(mean)


def positions_in(index: Tensor, shape: Sequence[int], offset: int, strides: Sequence[int]) -> Tensor:
    """Where elements number `index` of a tensor of `shape`, counted row by row, lie by these strides."""
    shape, strides = _merged(shape, strides)
    position = torch.full_like(index, offset)
    for size, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        position += index % size * stride
        index = index // size
    return position.add_(index, alpha=strides[0]) if shape else position


def row_strides(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _merged(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same with as few dimensions as will do: those that lie one inside the other without a gap are one."""
    sizes: list[int] = []
    steps: list[int] = []
    for size, stride in zip(shape, strides, strict=True):
        if sizes and steps[-1] == size * stride:
            sizes[-1], steps[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            steps.append(stride)
    return sizes, steps


def _fractions(key: int, positions: Tensor) -> Tensor:
    """52 random bits each, as numbers between 0 and 1, both left out."""
    bits = positions.mul(_signed(_GAMMA)).add_(_signed(key))
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))
    bits.bitwise_xor_(_shifted(bits, 31))
    return _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left: torch's own shift repeats the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


# --------------------------------------------------------------------------------------------------
# Element by element: how a tensor starts, as steps that each element takes by itself, so that any part can be made alone.
#
# Each recorded operation is read as such a step: a fill, a draw, a function of each element, a copy. A tensor with any other
# operation in its past has no such steps, and is replayed whole.
# --------------------------------------------------------------------------------------------------


_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_FILLS = {
    "zero_": 0.0,
    "zeros": 0.0,
    "zeros_like": 0.0,
    "new_zeros": 0.0,
    "ones": 1.0,
    "ones_like": 1.0,
    "new_ones": 1.0,
}
_DRAWS = {"uniform_": "uniform", "rand": "uniform", "rand_like": "uniform"}
_DRAWS |= {"normal_": "normal", "randn": "normal", "randn_like": "normal"}
_POINTWISE = {
    "mul",
    "div",
    "add",
    "sub",
    "rsub",
    "neg",
    "abs",
    "pow",
    "sqrt",
    "exp",
    "log",
    "clamp",
    "clamp_min",
    "clamp_max",
}
_POINTWISE |= {"erfinv", "erf", "tanh", "sigmoid", "reciprocal", "square", "sin", "cos"}
_COPIES = {"clone", "_to_copy", "copy_", "cat", "stack"}


class Strided(NamedTuple):
    """How the elements of a tensor lie in memory."""

    size: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Strided:
        return cls(tuple(tensor.size()), int(tensor.storage_offset()), tuple(tensor.stride()))

    def holds(self, positions: Tensor) -> Tensor:
        """Whether each position in memory is an element of it."""
        left, inside = positions - self.offset, torch.ones_like(positions, dtype=torch.bool)
        for size, stride in sorted(zip(self.size, self.stride, strict=True), key=lambda pair: -pair[1]):
            if size > 1:
                at = left.div(stride, rounding_mode="floor")
                inside &= (at >= 0) & (at < size)
                left = left - at * stride
        return inside & (left == 0)


@dataclass(frozen=True)
class ElementStep:
    """ "uniform" (low, high), "normal" (mean, std), "fill" (value), or "call": a function of each element alone.

    `region`: the places in memory that it is for; None for all. `source`: the memory that was drawn.
    """

    kind: str
    values: tuple[Any, ...]
    region: Strided | None = None
    call: Callable[[Tensor], Tensor] | None = field(default=None, compare=False)
    source: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.kind}{self.values}{'' if self.region is None else ' in a part'}"

    def apply(self, values: Tensor, positions: Tensor, key: int) -> Tensor:
        """The values after this step, whatever its region."""
        if self.call is not None:
            return self.call(values.clone())
        if self.kind == "fill":
            return torch.full_like(values, *self.values)
        return {"uniform": uniform, "normal": normal}[self.kind](key, positions, *self.values)


@dataclass(frozen=True)
class ElementwiseInit:
    """How a tensor starts element by element: the steps that each element takes.

    `cut`: how the tensor's elements lie in the memory that the regions of steps speak of; None: as in its own. `moved`: elements do not lie where they lay in the memory that was drawn.
    """

    steps: tuple[ElementStep, ...] = ()
    cut: Strided | None = None
    moved: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return ", ".join(map(str, self.steps))

    @property
    def has_regions(self) -> bool:
        return any(step.region is not None for step in self.steps)

    def then(self, step: ElementStep, tensor: Tensor) -> ElementwiseInit | None:
        """With one more step, on a tensor that may be a part of the memory."""
        if covers_memory(tensor):
            return ElementwiseInit((step,)) if step.kind != "call" else replace(self, steps=(*self.steps, step))
        return None if self.cut else replace(self, steps=(*self.steps, replace(step, region=Strided.of(tensor))))

    def copied(self, source: Tensor) -> ElementwiseInit | None:
        """That of a copy of `source`, all or some of the tensor's memory."""
        if is_expanded(source):
            return None
        if source.is_contiguous() and covers_memory(source):
            return self
        if self.cut is not None:
            return None
        return ElementwiseInit(self.steps, Strided.of(source) if self.has_regions else None, moved=True)

    def values(self, positions: Tensor, places: Tensor, key: Callable[[int | None], int]) -> Tensor:
        """In float64, for elements at `positions` of the whole parameter, that regions know as `places`."""
        values = torch.zeros_like(positions, dtype=torch.float64)
        for step in self.steps:
            changed = step.apply(values, positions, key(step.source))
            values = changed if step.region is None else torch.where(step.region.holds(places), changed, values)
        return values


def elementwise_init_of(recording: InitRecording, tensor: Tensor) -> ElementwiseInit | None:
    """The steps of a tensor of the meta device; None where its elements do not start each by itself."""
    known: dict[int, ElementwiseInit | None] = {}
    for at in recording.needed_for(tensor):
        op = recording.ops[at]
        after = _result_of(op, known) if len(op.outputs) == 1 else None
        known |= {memory_of(made): after for made in op.outputs}
    init = known.get(memory_of(tensor), ElementwiseInit())
    return init.copied(tensor) if init is not None and not covers_memory(tensor) else init


def random_step_of(op: RecordedOp) -> ElementStep | None:
    """The step of an operation that draws uniform or normal numbers."""
    if op.name not in _DRAWS:
        return None
    (made,) = op.outputs
    if made.is_complex():
        return None
    given = op.args[1:]
    values = (*given, *(0.0, 1.0)[len(given) :]) if op.name.endswith("_") else (0.0, 1.0)
    return ElementStep(_DRAWS[op.name], values, source=memory_of(made))


def _result_of(op: RecordedOp, known: dict[int, ElementwiseInit | None]) -> ElementwiseInit | None:
    """The steps of the tensor that an operation gives, by those of the tensors that it takes."""
    name, (made,) = op.name, op.outputs
    before = known.get(memory_of(made), ElementwiseInit())
    if name in _EMPTY:
        return ElementwiseInit()
    if name in _COPIES:
        return _copy_of(op, known)
    if name.rstrip("_") in _POINTWISE and isinstance(op.args[0], Tensor):
        source, *others = op.inputs
        taken = None if others else known.get(memory_of(source))
        if taken is not None and not name.endswith("_"):
            taken = taken.copied(source)
        return taken.then(_call(op), made) if taken is not None else None
    step = random_step_of(op)
    if name in _FILLS:
        step = ElementStep("fill", (_FILLS[name],))
    elif name in ("fill_", "full", "full_like", "new_full") and isinstance(op.args[-1], (int, float)):
        step = ElementStep("fill", (float(op.args[-1]),))
    return before.then(step, made) if step is not None and before is not None else None


def _call(op: RecordedOp) -> ElementStep:
    rest, kwargs = op.args[1:], dict(op.kwargs)
    return ElementStep("call", (op.name, *rest, *kwargs.items()), call=lambda values: op.func(values, *rest, **kwargs))


def _copy_of(op: RecordedOp, known: dict[int, ElementwiseInit | None]) -> ElementwiseInit | None:
    (made,) = op.outputs
    sources: Sequence[Tensor] = op.inputs[1:] if op.name == "copy_" else op.inputs
    inits = [known.get(memory_of(source)) for source in sources]
    (source, *others), (init, *_) = sources, inits
    first = None if init is None else init.copied(source)
    if not made.dtype.is_floating_point:  # values are rounded here, and steps do not round
        return None
    if first is None or not covers_memory(made) or made.numel() != sum(source.numel() for source in sources):
        return None
    if not others:
        return first
    # Parts that start alike, such as experts, are one: as long as none of them is there twice.
    apart = len({memory_of(source) for source in sources}) == len(sources)
    if not apart or first.has_regions or any(init != first for init in inits):
        return None
    return ElementwiseInit(tuple(replace(step, source=None) for step in first.steps), moved=True)


# --------------------------------------------------------------------------------------------------
# How each parameter of a model starts, under the name that it has in the whole model.
# --------------------------------------------------------------------------------------------------


_ON_CPU, _ELSEWHERE = 1 << 16, 1 << 20
"""How many elements are made at once: so few that they take little memory, and on the CPU stay in its cache."""


@dataclass(frozen=True, eq=False)
class ParameterInit:
    """How a parameter gets its values: element by element, or without that by a replay of everything that was recorded."""

    name: str
    recording: InitRecording
    tensor: Tensor
    elementwise: ElementwiseInit | None
    owners: Mapping[int, str]
    """By the memory that random numbers were drawn into: the parameter whose name they follow from."""
    is_elementwise: Mapping[int, bool]
    """By the memory of each parameter: whether it is made element by element."""
    sizes: Mapping[str, int]
    """How many elements each parameter has here."""

    def __str__(self) -> str:
        if self.elementwise is not None:
            return str(self.elementwise)
        return ", ".join(self.recording.ops[at].name for at in self.recording.needed_for(self.tensor))

    @torch.no_grad()
    def fill(self, local: Tensor, start: Sequence[int], shape: Sequence[int], offset: Sequence[int], seed: int) -> None:
        """Give `local` its values: the part of the tensor from `start` on, at `offset` of the whole parameter of `shape`."""
        # Numbers of parts that other ranks hold must be drawn too, for theirs to be the same: so the whole, of which a part stays.
        if self.elementwise is None:
            whole = self.recording.replay(self.tensor, self._run_with_keys(seed, math.prod(shape)))
            parts = (slice(at, at + size) for at, size in zip(start, local.shape, strict=True))
            local.copy_(whole[tuple(parts)])
            return
        # An element has two places: in the whole parameter, which its random number follows from, and in the memory that the
        # steps were recorded for, which tells whether a step for a region of it applies. A chunk of elements at a time.
        strided = self.elementwise.cut or Strided.of(self.tensor)
        first = strided.offset + sum(at * stride for at, stride in zip(start, strided.stride, strict=True))
        strides = row_strides(shape)
        before = sum(at * stride for at, stride in zip(offset, strides, strict=True))
        flat = local.view(-1) if local.is_contiguous() else local.new_empty(local.numel())
        step = _ON_CPU if local.device.type == "cpu" else _ELSEWHERE
        for chunk in range(0, local.numel(), step):
            index = torch.arange(chunk, min(chunk + step, local.numel()), device=local.device)
            positions = positions_in(index, local.shape, before, strides)
            has = self.elementwise.has_regions
            places = positions_in(index, local.shape, first, strided.stride) if has else positions
            values = self.elementwise.values(positions, places, lambda source: self._key(seed, source))
            flat[chunk : chunk + len(index)] = values
        if not local.is_contiguous():
            local.copy_(flat.view(local.shape))

    def _key(self, seed: int, source: int | None, *more: object) -> int:
        return derive_seed(seed, self.name if source is None else self.owners[source], *more)

    def _run_with_keys(self, seed: int, numel: int) -> Any:
        """Does operations again, with random numbers that do not depend on the layout."""
        seen: set[int] = set()

        def run(op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not op.is_random:
                return op.func(*args, **kwargs)
            (made, *_), step = op.outputs, random_step_of(op)
            memory = memory_of(made)
            key, owner = self._key(seed, memory), self.owners[memory]
            if not self.is_elementwise.get(memory):  # element by element a parameter is drawn once
                whole = numel if owner == self.name else self.sizes[owner]
                if (
                    key in seen or elements_in_memory(made) != whole
                ):  # not the whole parameter: told apart by its number
                    key = self._key(seed, memory, op.draws)
                seen.add(key)
            if step is None:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(key)
                    return op.func(*args, **kwargs)
            result = args[0] if op.name.endswith("_") else torch.empty(made.shape, dtype=made.dtype)
            places = positions_in(torch.arange(made.numel()), *Strided.of(made))
            return result.copy_(step.apply(places, places, key).view(made.shape))

        return run


@dataclass(frozen=True, eq=False)
class ParameterLoad:
    """A parameter whose values are kept somewhere, such as in a file."""

    source: ParameterSource
    tensor: Tensor

    def __str__(self) -> str:
        return str(self.source)

    def fill(self, local: Tensor, start: Sequence[int], shape: Sequence[int], offset: Sequence[int], seed: int) -> None:
        """As `ParameterInit.fill`."""
        self.source.read_into(local, offset)


def parameter_inits(stages: Iterable[nn.Module], prefix: str = "") -> dict[int, ParameterInit | ParameterLoad]:
    """For each parameter (by id) that is on the meta device, how it starts.

    `stages` are those of a split model, or one model. `prefix` tells apart models whose parameters have the same names.
    """
    stages = list(stages)
    found = list(_parameters_on_meta(stages, prefix))
    if found:
        _refuse_bare(stages)
    # Random numbers follow from the name of a parameter: of that whose memory they were drawn into, else of the first that
    # is made of them.
    owners: dict[int, str] = {}
    for name, _, start in found:
        owners.setdefault(memory_of(start.tensor), name)
    users = Counter[int]()
    for name, _, start in found:
        sources = _random_memory(start, name)
        users.update(sources)
        for source in sources:
            owners.setdefault(source, name)
    elementwise_by_name = {
        name: _elementwise_if_allowed(name, parameter, start, users) for name, parameter, start in found
    }
    is_elementwise: dict[int, bool] = {}
    for name, _, start in found:
        is_elementwise.setdefault(memory_of(start.tensor), elementwise_by_name[name] is not None)
    sizes = {name: start.tensor.numel() for name, _, start in found}
    kept = [(parameter, value_source_of(parameter)) for stage in stages for parameter in stage.parameters()]
    read = {id(parameter): ParameterLoad(source, parameter) for parameter, source in kept if source is not None}
    return read | {
        id(parameter): ParameterInit(
            name, start.recording, start.tensor, elementwise_by_name[name], owners, is_elementwise, sizes
        )
        for name, parameter, start in found
    }


def _random_memory(start: InitialValue, name: str) -> set[int]:
    """The memory that was drawn for a parameter."""
    ops = [start.recording.ops[at] for at in start.recording.needed_for(start.tensor)]
    if any(op in start.recording.read_from for op in ops):
        raise PlacementError(
            f"{name} starts with random numbers that a buffer, or code of the model, has read inside meta_init(); those of "
            f"parameters are drawn only in initialize(). Build its module outside, or `with torch.device('cpu'):` inside.",
            code="C034",
        )
    return {memory_of(made) for op in ops if op.is_random for made in op.outputs}


def _elementwise_if_allowed(
    name: str, parameter: nn.Parameter, start: InitialValue, users: Counter[int]
) -> ElementwiseInit | None:
    """How a parameter starts element by element; None where it must be made whole."""
    init = elementwise_init_of(start.recording, start.tensor)
    if init is None:
        return None
    if not init.steps:
        raise PlacementError(
            f"{name} was never given values inside meta_init(). Initialise it there (torch.nn.init.normal_(parameter), "
            f"say), or build its module `with torch.device('cpu'):`.",
            code="C034",
        )
    moved = init.moved or not start.tensor.is_contiguous()
    if moved and any(users[source] > 1 for source in _random_memory(start, name)):
        return None  # another parameter has the same numbers, and elsewhere
    return None if init.cut is not None and init.cut.size != start.tensor.shape else init


def _parameters_on_meta(stages: Sequence[nn.Module], prefix: str) -> Iterator[tuple[str, nn.Parameter, InitialValue]]:
    names: set[str] = set()
    met: set[int] = set()
    for at, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if parameter.is_meta and id(parameter) not in met and value_source_of(parameter) is None:
                named = prefix + (name if name not in names else f"{name} of stage {at}")
                yield named, parameter, _checked_initial_value(parameter, name)
                names.add(name)
                met.add(id(parameter))


def _refuse_bare(stages: Iterable[nn.Module]) -> None:
    """Tensors that are no parameters and no buffers stay on the meta device, where forward passes cannot use them."""
    for stage in stages:
        for name, module in stage.named_modules():
            for attribute, value in vars(module).items():
                if attribute in ("_parameters", "_buffers", "_modules"):
                    continue
                for leaf in tree_leaves(value):
                    # One with a graph is computed from parameters, and by old weight_norm again in each forward pass.
                    if (
                        isinstance(leaf, Tensor)
                        and leaf.is_meta
                        and not leaf.requires_grad
                        and initial_value_of(leaf) is None
                    ):
                        raise PlacementError(
                            f"{f'{name}.{attribute}'.lstrip('.')} holds a tensor without values, as it was built inside "
                            f"meta_init(). Make it a buffer (register_buffer), or build it `with torch.device('cpu'):`.",
                            code="C034",
                        )


def _checked_initial_value(parameter: nn.Parameter, name: str) -> InitialValue:
    start = initial_value_of(parameter)
    if start is None:
        raise PlacementError(
            f"{name} is on the meta device, and nothing says which values it starts with: build the model inside "
            f"`with colonnade.meta_init():`, or on a device that has memory",
            code="C034",
        )
    if start.version != parameter._version:
        raise PlacementError(
            f"{name} was changed after meta_init(), on the meta device, where that has no effect: initialise it inside the "
            f"block, or after initialize()",
            code="C034",
        )
    return start

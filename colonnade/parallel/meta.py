"""Start on the meta device: a model is built without memory, and each rank draws its own part of every parameter."""

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

# --------------------------------------------------------------------------------------------------
# What was done to tensors of the meta device, so that it can be done again for real.
# --------------------------------------------------------------------------------------------------


_GIVE_NUMBERS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.allclose.default,
}
"""What reads the values of tensors inside torch's own code."""


@dataclass(frozen=True, eq=False)
class TapeEntry:
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


Run = Callable[[TapeEntry, tuple[Any, ...], dict[str, Any]], Any]
"""Does an operation again: (what was noted, its arguments for real)."""


class Tape(TorchDispatchMode):
    """Notes every operation on the meta device while it is entered. Views are not noted: tensors carry their strides."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[TapeEntry] = []
        self.owned: set[int] = set()
        """The memory of tensors that became parameters."""
        self._writers: dict[int, list[int]] = {}
        self._draws = 0
        self.read_from: dict[TapeEntry, Tensor] = {}
        """What drew numbers that were read while the model was built, with the state of torch's generator before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        if func in _GIVE_NUMBERS:
            args, kwargs = tree_map_only(Tensor, lambda t: self.read(t) if t.is_meta else t, (args, kwargs))
            return func(*args, **kwargs)
        if func._schema.is_mutable and given and not given[0].is_meta:
            args, kwargs = tree_map_only(Tensor, lambda t: self.read(t) if t.is_meta else t, (args, kwargs))
            return func(*args, **kwargs)
        output = func(*tree_map_only(Tensor, _on_meta, args), **kwargs) if any(t.is_meta for t in given) else None
        output = func(*args, **kwargs) if output is None else output
        made = tuple(leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_meta)
        is_view = not func._schema.is_mutable and {memory_of(t) for t in made} <= {memory_of(t) for t in given}
        if made and not is_view:
            # A copy of what has values: it may be changed before they are asked for.
            args, kwargs = tree_map_only(Tensor, lambda t: t.detach() if t.is_meta else t.clone(), (args, kwargs))
            for memory in {memory_of(tensor) for tensor in made}:
                self._writers.setdefault(memory, []).append(len(self.entries))
            self.entries.append(TapeEntry(func, args, kwargs, made, self._draws))
            self._draws += self.entries[-1].is_random
        return output

    def needed_for(self, tensor: Tensor) -> list[int]:
        """The numbers of the entries that decide its values, in order."""
        found: set[int] = set()
        left = [(memory_of(tensor), len(self.entries))]
        while left:
            memory, before = left.pop()
            for at in self._writers.get(memory, ()):
                if at < before and at not in found:
                    found.add(at)
                    left += [(memory_of(each), at) for each in self.entries[at].inputs if each.is_meta]
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
                entry = self.entries[at]
                args, kwargs = tree_map_only(Tensor, as_real, (entry.args, dict(entry.kwargs)))
                if "device" in kwargs:
                    kwargs["device"] = torch.device("cpu")
                output = entry.func(*args, **kwargs) if run is None else run(entry, args, kwargs)
                results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                for result, made in zip(results, entry.outputs, strict=True):
                    if memory_of(made) not in real:
                        real[memory_of(made)] = _memory_for(result, made)
            return as_real(tensor)

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor for real, while the model is still being built: its values must not hang on drawn parameters."""
        entries = [self.entries[at] for at in self.needed_for(tensor)]
        touched = {memory_of(each) for entry in entries for each in (*entry.inputs, *entry.outputs) if each.is_meta}
        if touched & self.owned and any(entry.is_random for entry in entries):
            raise PlacementError(
                "inside meta_init() a buffer, or code of the model, needs the values of a parameter, which is drawn only in "
                "initialize(). Build this module outside meta_init(), or `with torch.device('cpu')` inside it.",
                code="C034",
            )
        return self.replay(tensor, self._draw_once).clone()

    def _draw_once(self, entry: TapeEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does an operation again. Whoever reads its numbers a second time finds the same ones."""
        if not entry.is_random:
            return entry.func(*args, **kwargs)
        if entry not in self.read_from:
            self.read_from[entry] = torch.get_rng_state()
            return entry.func(*args, **kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.read_from[entry])
            return entry.func(*args, **kwargs)


def memory_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
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


_ATTRIBUTE = "_colonnade_start"
_SOURCE = "_colonnade_values"
_WHOLE = "_colonnade_cut_from"


class ParameterSource(Protocol):
    """Where the values of a whole parameter are kept, such as a file; its text says where."""

    def read_into(self, target: Tensor, offset: Sequence[int]) -> None:
        """Give `target` the elements of the whole from `offset` on."""


class Start(NamedTuple):
    """How a parameter starts: as `tensor` of the tape, and its version counter then, which tells of later changes."""

    tape: Tape
    tensor: Tensor
    version: int


def start_of(parameter: Tensor) -> Start | None:
    """What meta_init noted of a parameter."""
    return getattr(parameter, _ATTRIBUTE, None)


def keep_start(part: Tensor, whole: Tensor) -> None:
    """A part of a parameter of the meta device starts as its elements of the whole do, unless it is changed later."""
    start = start_of(whole)
    if start is not None:
        version = part._version if start.version == whole._version else -1
        setattr(part, _ATTRIBUTE, Start(start.tape, start.tensor, version))
    elif whole.is_meta:  # meta_init() is still on, and notes how parameters start at its end
        setattr(part, _WHOLE, (whole.detach(), part._version))


def give_source(parameter: Tensor, source: ParameterSource) -> None:
    """A parameter on the meta device gets its values from there in `initialize`: on each rank those that it holds."""
    setattr(parameter, _SOURCE, source)


def source_of(parameter: Tensor) -> ParameterSource | None:
    """What `give_source` was told."""
    return getattr(parameter, _SOURCE, None)


def forget_start(parameter: Tensor) -> None:
    """It has its values now."""
    vars(parameter).pop(_ATTRIBUTE, None)
    vars(parameter).pop(_SOURCE, None)


@contextmanager
def meta_init() -> Iterator[None]:
    """Build a model on the meta device: parameters take no memory until `initialize` draws this rank's part of each.

    What the model's code does to them (torch.nn.init, in-place methods, cutting, copying) is noted and done in `initialize`.
    Buffers are made for real, on the CPU. Every number that is drawn follows from the seed of `launch`, the
    parameter's name and the place in the whole parameter, so weights are the same under every layout.
    """
    tape = Tape()
    parameters: list[nn.Parameter] = []

    def keep(module: nn.Module, name: str, parameter: Any) -> None:
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
        tape.owned.add(memory_of(parameter))

    def copied(parameter: Tensor, memo: Any) -> Any:
        copy = deep_copy(parameter, memo)
        keep(nn.Module(), "", copy)  # nothing registers the parameters of a module that is copied
        return copy

    def make(module: nn.Module, name: str, buffer: Any) -> Tensor | None:
        return tape.read(buffer) if buffer is not None and buffer.device.type == "meta" else None

    on_buffer: Any = register_module_buffer_registration_hook  # what the hook returns is registered instead
    hooks = [register_module_parameter_registration_hook(keep), on_buffer(make)]
    init: Any = nn.init
    truncated = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = _truncated_normal
    deep_copy: Any = nn.Parameter.__deepcopy__
    nn.Parameter.__deepcopy__ = copied  # type: ignore[method-assign]
    try:
        with torch.device("meta"), tape, _Builder(tape):
            yield
    finally:
        init._no_grad_trunc_normal_ = truncated
        nn.Parameter.__deepcopy__ = deep_copy  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
        for parameter in parameters:
            whole, version = vars(parameter).pop(_WHOLE, (parameter, parameter._version))
            tensor = whole if version == parameter._version else parameter
            setattr(parameter, _ATTRIBUTE, Start(tape, tensor.detach(), parameter._version))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Build a model on the meta device without notes of how it starts: many times faster, for plans. Nothing can be read."""
    with torch.device("meta"), _ValuesStay():
        yield


class _ValuesStay(TorchFunctionMode):
    """Values that are given stay, on the CPU."""

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


class _Builder(_ValuesStay):
    """What torch's own meta device does otherwise: values that are given stay, and values can be read."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META and sys._getframe(1).f_globals.get("__name__") == nn.init.__name__:
            return False  # some of torch.nn.init does nothing to tensors of the meta device, where nothing is noted
        if func in _READS:
            (tensor,) = args
            args = (self._tape.read(tensor) if tensor.device.type == "meta" else tensor,)
        return super().__torch_function__(func, types, args, kwargs)


@torch.no_grad()
def _truncated_normal(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> Tensor:
    """By the inverse of the distribution function; torch draws again and again what is outside, which no note can say."""
    low, high = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))
    return tensor.uniform_(low, high).erfinv_().mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)


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
# Programs: how a parameter starts, as steps that each element takes by itself, so that any part can be made alone.
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
class FillStep:
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
class Program:
    """The steps, and how the tensor's elements lie in the memory that regions speak of; None: as in its own.

    `moved`: elements do not lie where they lay in the memory that was drawn.
    """

    steps: tuple[FillStep, ...] = ()
    cut: Strided | None = None
    moved: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return ", ".join(map(str, self.steps))

    @property
    def has_regions(self) -> bool:
        return any(step.region is not None for step in self.steps)

    def then(self, step: FillStep, tensor: Tensor) -> Program | None:
        """With one more step, on a tensor that may be a part of the memory."""
        if covers_memory(tensor):
            return Program((step,)) if step.kind != "call" else replace(self, steps=(*self.steps, step))
        return None if self.cut else replace(self, steps=(*self.steps, replace(step, region=Strided.of(tensor))))

    def copied(self, source: Tensor) -> Program | None:
        """That of a copy of `source`, all or some of the tensor's memory."""
        if is_expanded(source):
            return None
        if source.is_contiguous() and covers_memory(source):
            return self
        if self.cut is not None:
            return None
        return Program(self.steps, Strided.of(source) if self.has_regions else None, moved=True)

    def values(self, positions: Tensor, places: Tensor, key: Callable[[int | None], int]) -> Tensor:
        """In float64, for elements at `positions` of the whole parameter, that regions know as `places`."""
        values = torch.zeros_like(positions, dtype=torch.float64)
        for step in self.steps:
            changed = step.apply(values, positions, key(step.source))
            values = changed if step.region is None else torch.where(step.region.holds(places), changed, values)
        return values


def program_of(tape: Tape, tensor: Tensor) -> Program | None:
    """The program of a tensor of the meta device; None where its elements do not start each by itself."""
    known: dict[int, Program | None] = {}
    for at in tape.needed_for(tensor):
        entry = tape.entries[at]
        after = _after(entry, known) if len(entry.outputs) == 1 else None
        known |= {memory_of(made): after for made in entry.outputs}
    program = known.get(memory_of(tensor), Program())
    return program.copied(tensor) if program is not None and not covers_memory(tensor) else program


def drawn(entry: TapeEntry) -> FillStep | None:
    """The step of an operation that draws uniform or normal numbers."""
    if entry.name not in _DRAWS:
        return None
    (made,) = entry.outputs
    if made.is_complex():
        return None
    given = entry.args[1:]
    values = (*given, *(0.0, 1.0)[len(given) :]) if entry.name.endswith("_") else (0.0, 1.0)
    return FillStep(_DRAWS[entry.name], values, source=memory_of(made))


def _after(entry: TapeEntry, known: dict[int, Program | None]) -> Program | None:
    """The program of what an operation gives, by those of what it takes."""
    name, (made,) = entry.name, entry.outputs
    before = known.get(memory_of(made), Program())
    if name in _EMPTY:
        return Program()
    if name in _COPIES:
        return _copied(entry, known)
    if name.rstrip("_") in _POINTWISE and isinstance(entry.args[0], Tensor):
        source, *others = entry.inputs
        taken = None if others else known.get(memory_of(source))
        if taken is not None and not name.endswith("_"):
            taken = taken.copied(source)
        return taken.then(_call(entry), made) if taken is not None else None
    step = drawn(entry)
    if name in _FILLS:
        step = FillStep("fill", (_FILLS[name],))
    elif name in ("fill_", "full", "full_like", "new_full") and isinstance(entry.args[-1], (int, float)):
        step = FillStep("fill", (float(entry.args[-1]),))
    return before.then(step, made) if step is not None and before is not None else None


def _call(entry: TapeEntry) -> FillStep:
    rest, kwargs = entry.args[1:], dict(entry.kwargs)
    return FillStep(
        "call", (entry.name, *rest, *kwargs.items()), call=lambda values: entry.func(values, *rest, **kwargs)
    )


def _copied(entry: TapeEntry, known: dict[int, Program | None]) -> Program | None:
    (made,) = entry.outputs
    sources: Sequence[Tensor] = entry.inputs[1:] if entry.name == "copy_" else entry.inputs
    programs = [known.get(memory_of(source)) for source in sources]
    (source, *others), (program, *_) = sources, programs
    first = None if program is None else program.copied(source)
    if not made.dtype.is_floating_point:  # values are rounded here, and programs do not round
        return None
    if first is None or not covers_memory(made) or made.numel() != sum(source.numel() for source in sources):
        return None
    if not others:
        return first
    # Parts that start alike, such as experts, are one: as long as none of them is there twice.
    apart = len({memory_of(source) for source in sources}) == len(sources)
    if not apart or first.has_regions or any(program != first for program in programs):
        return None
    return Program(tuple(replace(step, source=None) for step in first.steps), moved=True)


# --------------------------------------------------------------------------------------------------
# Recipes: how each parameter of a model starts, under the name that it has in the whole model.
# --------------------------------------------------------------------------------------------------


_ON_CPU, _ELSEWHERE = 1 << 16, 1 << 20
"""How many elements are made at once: so few that they take little memory, and on the CPU stay in its cache."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """What decides the values of a parameter: a program, or without one everything that was done, done again."""

    name: str
    tape: Tape
    tensor: Tensor
    program: Program | None
    owners: Mapping[int, str]
    """The name that numbers follow from, by the memory they were drawn into."""
    by_program: Mapping[int, bool]
    """The memory of all parameters, with whether theirs is drawn by a program."""
    sizes: Mapping[str, int]
    """How many elements each parameter has here."""

    def __str__(self) -> str:
        if self.program is not None:
            return str(self.program)
        return ", ".join(self.tape.entries[at].name for at in self.tape.needed_for(self.tensor))

    @torch.no_grad()
    def fill(self, local: Tensor, start: Sequence[int], shape: Sequence[int], offset: Sequence[int], seed: int) -> None:
        """Give `local` its values: the part of the tensor from `start` on, at `offset` of the whole parameter of `shape`."""
        if self.program is None:
            whole = self.tape.replay(self.tensor, self._drawing(seed, math.prod(shape)))
            parts = (slice(at, at + size) for at, size in zip(start, local.shape, strict=True))
            local.copy_(whole[tuple(parts)])
            return
        strided = self.program.cut or Strided.of(self.tensor)
        first = strided.offset + sum(at * stride for at, stride in zip(start, strided.stride, strict=True))
        strides = row_strides(shape)
        before = sum(at * stride for at, stride in zip(offset, strides, strict=True))
        flat = local.view(-1) if local.is_contiguous() else local.new_empty(local.numel())
        step = _ON_CPU if local.device.type == "cpu" else _ELSEWHERE
        for chunk in range(0, local.numel(), step):
            index = torch.arange(chunk, min(chunk + step, local.numel()), device=local.device)
            positions = positions_in(index, local.shape, before, strides)
            has = self.program.has_regions
            places = positions_in(index, local.shape, first, strided.stride) if has else positions
            values = self.program.values(positions, places, lambda source: self._key(seed, source))
            flat[chunk : chunk + len(index)] = values
        if not local.is_contiguous():
            local.copy_(flat.view(local.shape))

    def _key(self, seed: int, source: int | None, *more: object) -> int:
        return derive_seed(seed, self.name if source is None else self.owners[source], *more)

    def _drawing(self, seed: int, numel: int) -> Any:
        """Does an operation again, with random numbers that do not depend on the layout."""
        seen: set[int] = set()

        def run(entry: TapeEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not entry.is_random:
                return entry.func(*args, **kwargs)
            (made, *_), step = entry.outputs, drawn(entry)
            memory = memory_of(made)
            key, owner = self._key(seed, memory), self.owners[memory]
            if not self.by_program.get(memory):  # what a program draws has no turns
                whole = numel if owner == self.name else self.sizes[owner]
                if key in seen or elements_in_memory(made) != whole:  # not the whole parameter: told apart by its turn
                    key = self._key(seed, memory, entry.draws)
                seen.add(key)
            if step is None:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(key)
                    return entry.func(*args, **kwargs)
            result = args[0] if entry.name.endswith("_") else torch.empty(made.shape, dtype=made.dtype)
            places = positions_in(torch.arange(made.numel()), *Strided.of(made))
            return result.copy_(step.apply(places, places, key).view(made.shape))

        return run


@dataclass(frozen=True, eq=False)
class Reading:
    """A parameter whose values are kept somewhere."""

    source: ParameterSource
    tensor: Tensor

    def __str__(self) -> str:
        return str(self.source)

    def fill(self, local: Tensor, start: Sequence[int], shape: Sequence[int], offset: Sequence[int], seed: int) -> None:
        """As `Recipe.fill`."""
        self.source.read_into(local, offset)


def recipes_of(stages: Iterable[nn.Module], prefix: str = "") -> dict[int, Recipe | Reading]:
    """For each parameter (by id) that is on the meta device, how it starts.

    `stages` are those of a split model, or one model. `prefix` tells apart models whose parameters have the same names.
    """
    stages = list(stages)
    found = list(_parameters_on_meta(stages, prefix))
    if found:
        _refuse_bare(stages)
    owners: dict[int, str] = {}
    for name, _, start in found:
        owners.setdefault(memory_of(start.tensor), name)
    users = Counter[int]()
    for name, _, start in found:
        sources = _sources(start, name)
        users.update(sources)
        for source in sources:
            owners.setdefault(source, name)
    programs = {name: _own_program(name, parameter, start, users) for name, parameter, start in found}
    by_program: dict[int, bool] = {}
    for name, _, start in found:
        by_program.setdefault(memory_of(start.tensor), programs[name] is not None)
    sizes = {name: start.tensor.numel() for name, _, start in found}
    kept = [(parameter, source_of(parameter)) for stage in stages for parameter in stage.parameters()]
    read = {id(parameter): Reading(source, parameter) for parameter, source in kept if source is not None}
    return read | {
        id(parameter): Recipe(name, start.tape, start.tensor, programs[name], owners, by_program, sizes)
        for name, parameter, start in found
    }


def _sources(start: Start, name: str) -> set[int]:
    """The memory that was drawn for a parameter."""
    entries = [start.tape.entries[at] for at in start.tape.needed_for(start.tensor)]
    if any(entry in start.tape.read_from for entry in entries):
        raise PlacementError(
            f"{name} starts with random numbers that a buffer, or code of the model, has read inside meta_init(); those of "
            f"parameters are drawn only in initialize(). Build its module outside, or `with torch.device('cpu'):` inside.",
            code="C034",
        )
    return {memory_of(made) for entry in entries if entry.is_random for made in entry.outputs}


def _own_program(name: str, parameter: nn.Parameter, start: Start, users: Counter[int]) -> Program | None:
    """The program of a parameter; None where it must be made whole."""
    program = program_of(start.tape, start.tensor)
    if program is None:
        return None
    if not program.steps:
        raise PlacementError(
            f"{name} was never given values inside meta_init(). Initialise it there (torch.nn.init.normal_(parameter), "
            f"say), or build its module `with torch.device('cpu'):`.",
            code="C034",
        )
    moved = program.moved or not start.tensor.is_contiguous()
    if moved and any(users[source] > 1 for source in _sources(start, name)):
        return None  # another parameter has the same numbers, and elsewhere
    return None if program.cut is not None and program.cut.size != start.tensor.shape else program


def _parameters_on_meta(stages: Sequence[nn.Module], prefix: str) -> Iterator[tuple[str, nn.Parameter, Start]]:
    names: set[str] = set()
    met: set[int] = set()
    for at, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if parameter.is_meta and id(parameter) not in met and source_of(parameter) is None:
                named = prefix + (name if name not in names else f"{name} of stage {at}")
                yield named, parameter, _start_of(parameter, name)
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
                    if isinstance(leaf, Tensor) and leaf.is_meta and not leaf.requires_grad and start_of(leaf) is None:
                        raise PlacementError(
                            f"{f'{name}.{attribute}'.lstrip('.')} holds a tensor without values, as it was built inside "
                            f"meta_init(). Make it a buffer (register_buffer), or build it `with torch.device('cpu'):`.",
                            code="C034",
                        )


def _start_of(parameter: nn.Parameter, name: str) -> Start:
    start = start_of(parameter)
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

"""Meta-device initialization: a model is built without memory, and each rank materializes its own shard of every parameter.

    with colonnade.meta_init():
        model = Llama(config)

1. `meta_init` builds the model on the meta device and records every operation that gives values to a tensor there
   (`InitRecording`). Each parameter keeps the tensor of the recording that has its initial value (`InitialValue`).
2. Before parameters are sharded, `MetaStart.locate` computes the position of this rank's tensor in each unsharded parameter.
3. When the model is split into stages and sharded, `initialize` calls `MetaStart.materialise`, which allocates this rank's
   shards. A parameter gets its values (`parameter_inits`) in one of these ways:
   - element by element (`ElementwiseInit`), if each element depends only on its position in the full parameter, as with
     `torch.nn.init.normal_`. Then a rank computes its shard without the rest. Random numbers are a function of a key and the
     position (`uniform`, `normal`), so they are equal under every layout;
   - by a replay of all recorded operations for the full tensor, of which the rank keeps its shard;
   - read from a file (`set_value_source`, `ParameterLoad`).
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

from colonnade.comm.messages import MustMatch, agreed_errors
from colonnade.comm.torch_versions import dtensor_like, exchange_tensors, refresh_shards
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.random import derive_seed
from colonnade.errors import GradientError, PlacementError
from colonnade.parallel.boxes import Box, moved
from colonnade.parallel.placement import is_dtensor, local_part
from colonnade.parallel.split import Split
from colonnade.parallel.whole import LocalTensor, locate_tensors, offset_in_dtensor


@contextmanager
def meta_init() -> Iterator[None]:
    """Build a model on the meta device: parameters take no memory until `initialize` materializes this rank's shards.

    Operations of the model's code on parameters (torch.nn.init, in-place methods, slicing, copying) are recorded, and performed
    in `initialize`. Buffers are created at once, on the CPU. Every random number follows from the seed of `launch`, the
    parameter's name and the position in the full parameter, so weights are equal under every layout.

    Example::

        gpc = colonnade.launch(dict(zero=3))
        with colonnade.meta_init():
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))  # no memory yet
        engine, *_ = colonnade.initialize(model, lambda parameters: torch.optim.AdamW(parameters), nn.MSELoss())
    """
    recording = InitRecording()
    parameters: list[nn.Parameter] = []

    def note_parameter(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter.device.type != "meta":
            return
        if is_lazy(parameter):
            raise PlacementError(
                f"{name} of {type(module).__name__} gets its shape in the first forward pass, but meta_init() needs "
                "the shape when the model is built. Use a layer with explicit sizes.",
                code="C034",
            )
        if is_expanded(parameter):
            raise PlacementError(
                f"{name} of {type(module).__name__} is an expanded tensor of shape {tuple(parameter.shape)} and "
                f"strides {parameter.stride()}. Its elements share memory, so they cannot be trained separately. "
                "Allocate memory for every element: nn.Parameter(tensor.expand(...).clone())",
                code="C034",
            )
        parameters.append(parameter)
        recording.owned.add(memory_of(parameter))

    def deepcopy_and_note(parameter: Tensor, memo: Any) -> Any:
        copy = deep_copy(parameter, memo)
        note_parameter(nn.Module(), "", copy)  # the registration hook does not run for parameters of a copied module
        return copy

    def make_buffer(module: nn.Module, name: str, buffer: Any) -> Tensor | None:
        return recording.read(buffer) if buffer is not None and buffer.device.type == "meta" else None

    on_buffer: Any = register_module_buffer_registration_hook  # torch registers the tensor that the hook returns
    hooks = [register_module_parameter_registration_hook(note_parameter), on_buffer(make_buffer)]
    init: Any = nn.init
    original_truncated_normal = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = _truncated_normal
    deep_copy: Any = nn.Parameter.__deepcopy__
    nn.Parameter.__deepcopy__ = deepcopy_and_note  # type: ignore[method-assign]
    try:
        with torch.device("meta"), recording, _ReadableMeta(recording):
            yield
    finally:
        init._no_grad_trunc_normal_ = original_truncated_normal
        nn.Parameter.__deepcopy__ = deep_copy  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
        # At the end, because initialization continues after a parameter is registered. A shard that was taken inside the block,
        # and not changed afterwards, has the initial value of its full parameter, as numbers follow from positions in that.
        for parameter in parameters:
            full, version = vars(parameter).pop(_TAKEN_FROM, (parameter, parameter._version))
            tensor = full if version == parameter._version else parameter
            setattr(parameter, _ATTRIBUTE, InitialValue(recording, tensor.detach(), parameter._version))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Build a model on the meta device without recording operations, for job estimates.

    Many times faster than `meta_init`, but no values can be read.
    """
    with torch.device("meta"), _GivenValuesOnCPU():
        yield


class _GivenValuesOnCPU(TorchFunctionMode):
    """Puts tensors with given values (torch.tensor([1, 2])) on the CPU."""

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
    """Makes tensors on the meta device readable (`item()`, `bool()`), by a replay of the recording."""

    def __init__(self, recording: InitRecording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META and sys._getframe(1).f_globals.get("__name__") == nn.init.__name__:
            return False  # some functions of torch.nn.init skip meta tensors, and nothing would be recorded
        if func in _READS:
            (tensor,) = args
            args = (self._recording.read(tensor) if tensor.device.type == "meta" else tensor,)
        return super().__torch_function__(func, types, args, kwargs)


@torch.no_grad()
def _truncated_normal(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> Tensor:
    """Truncated normal numbers by the inverse of the distribution function.

    (torch repeats draws until all are inside the limits, which cannot be recorded.)
    """
    low, high = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))
    return tensor.uniform_(low, high).erfinv_().mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)


# --------------------------------------------------------------------------------------------------
# The initial value, as an attribute of each parameter.
# --------------------------------------------------------------------------------------------------


_ATTRIBUTE = "_colonnade_start"
_SOURCE = "_colonnade_values"
_TAKEN_FROM = "_colonnade_cut_from"


class ParameterSource(Protocol):
    """A place from which the values of a full parameter can be read, such as a file. `str(source)` names the place in messages."""

    def read_into(self, target: Tensor, offset: Sequence[int]) -> None:
        """Fill `target` with the elements of the full parameter from `offset` on."""


class InitialValue(NamedTuple):
    """The initial value of a parameter: the recording, the recorded tensor, and the parameter's version counter, by which
    later changes are detected."""

    recording: InitRecording
    tensor: Tensor
    version: int


def initial_value_of(parameter: Tensor) -> InitialValue | None:
    """The initial value that `meta_init` recorded; None for a parameter that was not built inside `meta_init`."""
    return getattr(parameter, _ATTRIBUTE, None)


def keep_initial_value(part: Tensor, whole: Tensor) -> None:
    """Record that the shard `part` has the initial value of the full meta parameter `whole`, until `part` is changed."""
    start = initial_value_of(whole)
    if start is not None:
        version = part._version if start.version == whole._version else -1
        setattr(part, _ATTRIBUTE, InitialValue(start.recording, start.tensor, version))
    elif whole.is_meta:  # inside meta_init(), which sets initial values at its end
        setattr(part, _TAKEN_FROM, (whole.detach(), part._version))


def set_value_source(parameter: Tensor, source: ParameterSource) -> None:
    """Let `initialize` read the values of a meta parameter from `source`; each rank reads its own shard."""
    setattr(parameter, _SOURCE, source)


def value_source_of(parameter: Tensor) -> ParameterSource | None:
    """The source set by `set_value_source`, or None."""
    return getattr(parameter, _SOURCE, None)


def forget_initial_value(parameter: Tensor) -> None:
    """Remove the initial value and the source of a parameter. Called when it has been materialized."""
    vars(parameter).pop(_ATTRIBUTE, None)
    vars(parameter).pop(_SOURCE, None)


# --------------------------------------------------------------------------------------------------
# The recording: operations on meta tensors, to be performed later with memory.
# --------------------------------------------------------------------------------------------------


_READ_VALUES = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.allclose.default,
}
"""Operations with which torch's own code reads the values of tensors."""


@dataclass(frozen=True, eq=False)
class RecordedOp:
    """A recorded operation that wrote values to meta tensors (`outputs`)."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    draws: int
    """The number of random operations before this one, including those for shards of other ranks."""

    @property
    def name(self) -> str:
        """The name of the operation in torch, without the overload: "uniform_"."""
        return str(self.func._schema.name).removeprefix("aten::")

    @property
    def inputs(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves([self.args, dict(self.kwargs)]) if isinstance(leaf, Tensor)]

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags


Run = Callable[[RecordedOp, tuple[Any, ...], dict[str, Any]], Any]
"""Performs a recorded operation: (operation, arguments with memory, keyword arguments)."""


class InitRecording(TorchDispatchMode):
    """A context manager that records every operation on meta tensors.

    Views are not recorded: their storage and strides identify them.

    Tensors are identified by their storage (`memory_of`), because an in-place operation on a view changes its base.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[RecordedOp] = []
        self.owned: set[int] = set()
        """The storages of tensors that became parameters."""
        self._writers: dict[int, list[int]] = {}
        """Storage -> the indices of the operations that wrote to it."""
        self._draws = 0
        self.read_from: dict[RecordedOp, Tensor] = {}
        """Random operations whose values were read while the model was built, with the RNG state before the first read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        # Values that leave the meta device, to Python or into a tensor with memory, are computed now.
        if func in _READ_VALUES or (func._schema.is_mutable and given and not given[0].is_meta):
            args, kwargs = tree_map_only(Tensor, lambda t: self.read(t) if t.is_meta else t, (args, kwargs))
            return func(*args, **kwargs)
        on_meta = args
        if any(t.is_meta for t in given):  # a meta tensor and one with memory: the result is on the meta device
            on_meta = tree_map_only(Tensor, lambda t: t if t.is_meta else t.to("meta"), args)
        output = func(*on_meta, **kwargs)

        made = tuple(leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_meta)
        is_view = not func._schema.is_mutable and {memory_of(t) for t in made} <= {memory_of(t) for t in given}
        if made and not is_view:
            # Arguments with memory are copied: the model's code may change them before the replay.
            args, kwargs = tree_map_only(Tensor, lambda t: t.detach() if t.is_meta else t.clone(), (args, kwargs))
            for memory in {memory_of(tensor) for tensor in made}:
                self._writers.setdefault(memory, []).append(len(self.ops))
            self.ops.append(RecordedOp(func, args, kwargs, made, self._draws))
            self._draws += self.ops[-1].is_random
        return output

    def needed_for(self, tensor: Tensor) -> list[int]:
        """The indices of the operations that determine the values of `tensor`, in order."""
        found: set[int] = set()
        pending = [(memory_of(tensor), len(self.ops))]
        while pending:
            memory, before = pending.pop()
            for at in self._writers.get(memory, ()):
                if at < before and at not in found:
                    found.add(at)
                    pending += [(memory_of(source), at) for source in self.ops[at].inputs if source.is_meta]
        return sorted(found)

    def replay(self, tensor: Tensor, run: Run | None = None) -> Tensor:
        """A copy of `tensor` with values, on the CPU.

        Performs the operations that determine the values; `run`, if given, performs each of them.
        """
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
                    # A flat tensor for all of the storage, since later operations may use other views of it.
                    if memory_of(made) not in real:
                        real[memory_of(made)] = flat = result.new_empty(elements_in_memory(made))
                        flat.as_strided(made.size(), made.stride(), made.storage_offset()).copy_(result)
            return as_real(tensor)

    def read(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` with values, for model code that reads them while the model is being built.

        Raises:
            PlacementError: The values depend on random values of a parameter, which are drawn only in `initialize`.
        """
        ops = [self.ops[at] for at in self.needed_for(tensor)]
        touched = {memory_of(value) for op in ops for value in (*op.inputs, *op.outputs) if value.is_meta}
        if touched & self.owned and any(op.is_random for op in ops):
            raise PlacementError(
                "a buffer or the model's code needs the values of a parameter inside meta_init(), but these values "
                "are drawn only in initialize(). Build this module outside of meta_init(), or inside it `with "
                "torch.device('cpu')`.",
                code="C034",
            )

        def run(op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Each read of the same random tensor must give the same numbers.
            if not op.is_random:
                return op.func(*args, **kwargs)
            if op not in self.read_from:
                self.read_from[op] = torch.get_rng_state()
                return op.func(*args, **kwargs)
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.read_from[op])
                return op.func(*args, **kwargs)

        return self.replay(tensor, run).clone()


def memory_of(tensor: Tensor) -> int:
    """The id of a tensor's storage, by which tensors that share memory are recognized."""
    return tensor.untyped_storage()._cdata


def elements_in_memory(tensor: Tensor) -> int:
    """The size of a tensor's storage, in elements of its dtype."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def covers_memory(tensor: Tensor) -> bool:
    """Whether the tensor has as many elements as its storage."""
    return tensor.numel() == elements_in_memory(tensor)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share a place in memory."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


# --------------------------------------------------------------------------------------------------
# Counter-based random numbers: a function of a key and a position, so that any shard can be drawn without the rest.
#
# The integers are equal on every device and machine. Uniform and normal numbers are computed from them in float64; the last
# bit of a normal number may differ between kinds of devices.
# --------------------------------------------------------------------------------------------------


_MASK = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of splitmix64."""


def uniform(key: int, positions: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """A uniform random number between `low` and `high` for each position, in float64; a function of `key` and the position."""
    return _fractions(key, positions).mul_(high - low).add_(low)


def normal(key: int, positions: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """A normal random number for each position, in float64; a function of `key` and the position."""
    return _fractions(key, positions).mul_(2).sub_(1).erfinv_().mul_(std * math.sqrt(2)).add_(mean)


def positions_in(index: Tensor, shape: Sequence[int], offset: int, strides: Sequence[int]) -> Tensor:
    """The positions in storage of the row-major elements `index` of a tensor with this shape, offset and strides."""
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
    """The same shape, offset and strides with as few dimensions as possible: contiguous neighbours are merged."""
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
    """A random number between 0 and 1 (both exclusive) for each position: 52 bits of splitmix64 of position and key."""
    bits = positions.mul(_signed(_GAMMA)).add_(_signed(key))
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))
    bits.bitwise_xor_(_shifted(bits, 31))
    return _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A logical shift to the right: torch's own shift extends the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


# --------------------------------------------------------------------------------------------------
# Element-wise initialization: the operations of a tensor as steps on single elements, so that any shard can be computed.
#
# A recorded operation is such a step if it is a fill, a draw, a function of each element, or a copy. A tensor with any other
# operation in its history has no such steps, and is replayed in full.
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
    """The region of a storage that a tensor covers: size, offset and strides."""

    size: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Strided:
        return cls(tuple(tensor.size()), int(tensor.storage_offset()), tuple(tensor.stride()))

    def holds(self, positions: Tensor) -> Tensor:
        """A boolean mask: for each position in the storage, whether an element of the tensor is there."""
        left, inside = positions - self.offset, torch.ones_like(positions, dtype=torch.bool)
        for size, stride in sorted(zip(self.size, self.stride, strict=True), key=lambda pair: -pair[1]):
            if size > 1:
                at = left.div(stride, rounding_mode="floor")
                inside &= (at >= 0) & (at < size)
                left = left - at * stride
        return inside & (left == 0)


@dataclass(frozen=True)
class ElementStep:
    """One step in the initialization of elements: "uniform" (low, high), "normal" (mean, std), "fill" (value), or "call", an
    element-wise function.

    `region`: the part of the storage that the step changes; None for the full storage. `source`: for a random step, the id of the
    storage into which the recorded operation drew numbers.
    """

    kind: str
    values: tuple[Any, ...]
    region: Strided | None = None
    call: Callable[[Tensor], Tensor] | None = field(default=None, compare=False)
    source: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.kind}{self.values}{'' if self.region is None else ' in a part'}"

    def apply(self, values: Tensor, positions: Tensor, key: int) -> Tensor:
        """Return the values of these elements after this step. All elements must be in the region of the step."""
        if self.call is not None:
            return self.call(values.clone())
        if self.kind == "fill":
            return torch.full_like(values, *self.values)
        return {"uniform": uniform, "normal": normal}[self.kind](key, positions, *self.values)


@dataclass(frozen=True)
class ElementwiseInit:
    """The initialization of a tensor as a sequence of element-wise steps.

    - `steps`: the steps, applied in this order to each element of their regions.
    - `cut`: if the tensor was copied out of another storage, to which the regions of `steps` refer: the tensor's position in
      that storage; else None.
    - `moved`: the elements have other positions than in the storage into which random numbers were drawn.
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
        """This initialization followed by `step` on `tensor`, which may cover only a part of the storage; None if the result
        is not element-wise."""
        if covers_memory(tensor):
            return ElementwiseInit((step,)) if step.kind != "call" else replace(self, steps=(*self.steps, step))
        return None if self.cut else replace(self, steps=(*self.steps, replace(step, region=Strided.of(tensor))))

    def copied(self, source: Tensor) -> ElementwiseInit | None:
        """The initialization of a copy of `source`, a tensor in the described storage; None if the initialization is not
        element-wise.
        """
        if is_expanded(source):
            return None
        if source.is_contiguous() and covers_memory(source):
            return self
        if self.cut is not None:
            return None
        return ElementwiseInit(self.steps, Strided.of(source) if self.has_regions else None, moved=True)

    def values(self, positions: Tensor, places: Tensor, key: Callable[[int | None], int]) -> Tensor:
        """The initial values, in float64, of the elements at `positions` in the full parameter.

        `places` are the positions of these elements in the storage to which the regions refer; `key` returns the random key of a
        storage.
        """
        values = torch.zeros_like(positions, dtype=torch.float64)
        for step in self.steps:
            changed = step.apply(values, positions, key(step.source))
            values = changed if step.region is None else torch.where(step.region.holds(places), changed, values)
        return values


def elementwise_init_of(recording: InitRecording, tensor: Tensor) -> ElementwiseInit | None:
    """The element-wise initialization of a meta tensor; None if elements depend on each other."""
    known: dict[int, ElementwiseInit | None] = {}
    for at in recording.needed_for(tensor):
        op = recording.ops[at]
        after = _after(op, known) if len(op.outputs) == 1 else None
        known |= {memory_of(made): after for made in op.outputs}
    init = known.get(memory_of(tensor), ElementwiseInit())
    return init.copied(tensor) if init is not None and not covers_memory(tensor) else init


def random_step_of(op: RecordedOp) -> ElementStep | None:
    """Convert an operation that draws uniform or normal numbers to an `ElementStep`; None for any other operation."""
    if op.name not in _DRAWS:
        return None
    (made,) = op.outputs
    if made.is_complex():
        return None
    given = op.args[1:]
    values = (*given, *(0.0, 1.0)[len(given) :]) if op.name.endswith("_") else (0.0, 1.0)
    return ElementStep(_DRAWS[op.name], values, source=memory_of(made))


def _after(op: RecordedOp, known: dict[int, ElementwiseInit | None]) -> ElementwiseInit | None:
    """The initialization of an operation's output, derived from those of its inputs; None if it is not element-wise."""
    name, (made,) = op.name, op.outputs
    before = known.get(memory_of(made), ElementwiseInit())
    if name in _EMPTY:
        return ElementwiseInit()

    if name in _COPIES:
        sources: Sequence[Tensor] = op.inputs[1:] if name == "copy_" else op.inputs
        inits = [known.get(memory_of(source)) for source in sources]
        (source, *others), (init, *_) = sources, inits
        copied = None if init is None else init.copied(source)
        if not made.dtype.is_floating_point:  # the copy rounds, and steps do not
            return None
        if copied is None or not covers_memory(made) or made.numel() != sum(source.numel() for source in sources):
            return None
        if not others:
            return copied
        # Equal initializations that are concatenated, such as those of experts, are one; unless a tensor occurs twice, whose
        # numbers would have to be repeated.
        is_distinct = len({memory_of(source) for source in sources}) == len(sources)
        if not is_distinct or copied.has_regions or any(init != copied for init in inits):
            return None
        return ElementwiseInit(tuple(replace(step, source=None) for step in copied.steps), moved=True)

    if name.rstrip("_") in _POINTWISE and isinstance(op.args[0], Tensor):
        source, *others = op.inputs
        init = None if others else known.get(memory_of(source))
        if init is not None and not name.endswith("_"):
            init = init.copied(source)
        rest, kwargs = op.args[1:], dict(op.kwargs)
        call = ElementStep("call", (name, *rest, *kwargs.items()), call=lambda values: op.func(values, *rest, **kwargs))
        return init.then(call, made) if init is not None else None

    step = random_step_of(op)
    if name in _FILLS:
        step = ElementStep("fill", (_FILLS[name],))
    elif name in ("fill_", "full", "full_like", "new_full") and isinstance(op.args[-1], (int, float)):
        step = ElementStep("fill", (float(op.args[-1]),))
    return before.then(step, made) if step is not None and before is not None else None


# --------------------------------------------------------------------------------------------------
# The initialization of each parameter of a model, by its name in the full model.
# --------------------------------------------------------------------------------------------------


_ON_CPU, _ELSEWHERE = 1 << 16, 1 << 20
"""The number of elements that are computed at once: few enough to take little memory, and on the CPU to stay in its cache."""


@dataclass(frozen=True, eq=False)
class ParameterInit:
    """The initialization of a parameter: element by element if possible, else by a replay of its recorded operations."""

    name: str
    recording: InitRecording
    tensor: Tensor
    elementwise: ElementwiseInit | None
    owners: Mapping[int, str]
    """Storage that random numbers were drawn into -> the parameter whose name is their key."""
    is_elementwise: Mapping[int, bool]
    """Storage of each parameter -> whether it is initialized element by element."""
    sizes: Mapping[str, int]
    """Parameter -> its number of elements on this rank."""

    def __str__(self) -> str:
        if self.elementwise is not None:
            return str(self.elementwise)
        return ", ".join(self.recording.ops[at].name for at in self.recording.needed_for(self.tensor))

    @torch.no_grad()
    def fill(self, local: Tensor, start: Sequence[int], shape: Sequence[int], offset: Sequence[int], seed: int) -> None:
        """Fill the tensor `local` with its initial values.

        Args:
            local: The tensor to fill.
            start: The offset of `local` in the recorded tensor.
            shape: The shape of the full parameter.
            offset: The offset of `local` in the full parameter.
            seed: The seed of `launch`.
        """
        # Without element-wise steps the full tensor is computed, also the shards of other ranks, and a slice of it kept.
        if self.elementwise is None:
            full = self.recording.replay(self.tensor, self._run_with_keys(seed, math.prod(shape)))
            local.copy_(full[tuple(slice(at, at + size) for at, size in zip(start, local.shape, strict=True))])
            return

        # An element has two positions: in the full parameter, which determines its random number, and in the storage that the
        # steps were recorded for, which determines the steps that apply. One chunk of elements at a time.
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
        """The function that performs recorded operations, with random numbers that do not depend on the layout."""
        seen: set[int] = set()

        def run(op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not op.is_random:
                return op.func(*args, **kwargs)
            (made, *_), step = op.outputs, random_step_of(op)
            memory = memory_of(made)
            key, owner = self._key(seed, memory), self.owners[memory]
            # Several draws for one parameter (of its parts, or one after another) need different keys: their number is added.
            # Not for an element-wise parameter, which is drawn once; a replay must find its numbers.
            if not self.is_elementwise.get(memory):
                full = numel if owner == self.name else self.sizes[owner]
                if key in seen or elements_in_memory(made) != full:
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
    """The initialization of a parameter from a source of values, such as a file."""

    source: ParameterSource
    tensor: Tensor

    def __str__(self) -> str:
        return str(self.source)

    def fill(self, local: Tensor, start: Sequence[int], shape: Sequence[int], offset: Sequence[int], seed: int) -> None:
        """Fill `local` with values read from the source; arguments as for `ParameterInit.fill`."""
        self.source.read_into(local, offset)


def parameter_inits(stages: Iterable[nn.Module], prefix: str = "") -> dict[int, ParameterInit | ParameterLoad]:
    """Find the initialization of each parameter on the meta device, by id of the parameter.

    Args:
        stages: The stages of a split model, or a single model.
        prefix: Distinguishes models whose parameters have the same names.

    Raises:
        PlacementError: A parameter has no initial value, or one that cannot be reproduced.
    """
    stages = list(stages)
    found: dict[str, tuple[nn.Parameter, InitialValue]] = {}
    seen: set[int] = set()
    for at, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if not parameter.is_meta or id(parameter) in seen or value_source_of(parameter) is not None:
                continue
            start = initial_value_of(parameter)
            if start is None:
                raise PlacementError(
                    f"{name} is on the meta device and has no initial value. Build the model inside `with "
                    "colonnade.meta_init():`, or on a device that has memory.",
                    code="C034",
                )
            if start.version != parameter._version:
                raise PlacementError(
                    f"{name} was changed on the meta device after meta_init(), but this change has no effect. "
                    "Initialize the parameter inside the block, or after initialize().",
                    code="C034",
                )
            # Stages that were built one by one may have equal names.
            unique = f"{prefix}{name}" if f"{prefix}{name}" not in found else f"{prefix}{name} of stage {at}"
            found[unique] = parameter, start
            seen.add(id(parameter))
    if found:
        _refuse_tensors_without_values(stages)

    # The key of random numbers is the name of a parameter: the one whose storage they were drawn into, else the first one that
    # is computed from them.
    owners: dict[int, str] = {}
    for name, (_, start) in found.items():
        owners.setdefault(memory_of(start.tensor), name)
    drawn: dict[str, set[int]] = {}
    for name, (_, start) in found.items():
        ops = [start.recording.ops[at] for at in start.recording.needed_for(start.tensor)]
        if any(op in start.recording.read_from for op in ops):
            raise PlacementError(
                f"{name} is initialized with random numbers that were read inside meta_init() by a buffer or the "
                "model's code. The random numbers of parameters are drawn only in initialize(). Build the module "
                "outside of meta_init(), or inside it `with torch.device('cpu'):`.",
                code="C034",
            )
        drawn[name] = {memory_of(made) for op in ops if op.is_random for made in op.outputs}
        for memory in drawn[name]:
            owners.setdefault(memory, name)
    users = Counter(memory for memories in drawn.values() for memory in memories)

    # Element-wise where possible. Not for numbers that another parameter has at other positions, and not for a slice of a
    # tensor of another shape: there, the position in the parameter does not determine the number.
    elementwise: dict[str, ElementwiseInit | None] = {}
    is_elementwise: dict[int, bool] = {}
    for name, (_, start) in found.items():
        init = elementwise_init_of(start.recording, start.tensor)
        if init is not None:
            if not init.steps:
                raise PlacementError(
                    f"{name} was never given values inside meta_init(). Initialize it there, for example with "
                    "torch.nn.init.normal_(parameter), or build its module `with torch.device('cpu'):`.",
                    code="C034",
                )
            is_moved = init.moved or not start.tensor.is_contiguous()
            is_shared = any(users[memory] > 1 for memory in drawn[name])
            if (is_moved and is_shared) or (init.cut is not None and init.cut.size != start.tensor.shape):
                init = None
        elementwise[name] = init
        is_elementwise.setdefault(memory_of(start.tensor), init is not None)

    sizes = {name: start.tensor.numel() for name, (_, start) in found.items()}
    inits: dict[int, ParameterInit | ParameterLoad] = {}
    for parameter in (parameter for stage in stages for parameter in stage.parameters()):
        source = value_source_of(parameter)
        if source is not None:
            inits[id(parameter)] = ParameterLoad(source, parameter)
    for name, (parameter, start) in found.items():
        inits[id(parameter)] = ParameterInit(
            name, start.recording, start.tensor, elementwise[name], owners, is_elementwise, sizes
        )
    return inits


def _refuse_tensors_without_values(stages: Iterable[nn.Module]) -> None:
    """Raise PlacementError for meta tensors that are neither parameters nor buffers: nothing would give them values."""
    attributes = (
        (f"{name}.{attribute}".lstrip("."), value)
        for stage in stages
        for name, module in stage.named_modules()
        for attribute, value in vars(module).items()
        if attribute not in ("_parameters", "_buffers", "_modules")
    )
    for name, value in attributes:
        for leaf in tree_leaves(value):
            if not isinstance(leaf, Tensor) or not leaf.is_meta or initial_value_of(leaf) is not None:
                continue
            # A tensor with a graph is computed from parameters; the old weight_norm does so again in each forward pass.
            if not leaf.requires_grad:
                raise PlacementError(
                    f"{name} contains a tensor without values, because it was built inside meta_init(). Register the "
                    "tensor as a buffer (register_buffer), or build it `with torch.device('cpu'):`.",
                    code="C034",
                )


Recipes = dict[int, ParameterInit | ParameterLoad]


def read_inits(model: nn.Module | Split, context: ParallelContext) -> Recipes:
    """The initialization of each parameter on the meta device, by id.

    If stages were built separately, names get a prefix for each stage.
    """
    if isinstance(model, Split):
        return parameter_inits(model)
    stage = context.get_local_rank(ParallelMode.PIPELINE)
    return parameter_inits([model], f"stage {stage}: " if context.pipeline_parallel_size > 1 else "")


def refuse_meta_state(optimizer: Any) -> None:
    """Raise if the optimizer has state on the meta device: its values were never computed and cannot be recovered here."""
    for parameter_state in getattr(optimizer, "state", {}).values():
        for key, value in parameter_state.items() if isinstance(parameter_state, Mapping) else ():
            if isinstance(value, Tensor) and value.is_meta:
                name = type(optimizer).__name__
                raise GradientError(
                    f"{name} already has state ({key}), but its parameters were built inside meta_init() and have no "
                    "memory yet, so the state is lost. Some optimizers create state when they are built, and "
                    "load_state_dict() creates state in all optimizers. Pass a function to initialize(): lambda "
                    f"parameters: {name}(parameters, ...). Load state after initialize(), with CheckpointManager or "
                    "engine.optimizer.load_state_dict().",
                    code="C034",
                )


class MetaStart:
    """The parameters of this rank's model on the meta device, with their initializations and positions."""

    def __init__(self, model: nn.Module, inits: Recipes, context: ParallelContext) -> None:
        self._model, self._context = model, context
        self._inits = {name: inits[id(p)] for name, p in model.named_parameters() if id(p) in inits}
        self._located: dict[str, LocalTensor] = {}
        self._count = 0

    def alike(self) -> MustMatch:
        """A table of initializations to compare between ranks.

        The ranks of a pipeline stage must have equal ones, because no broadcast makes the values equal.
        """
        return MustMatch(
            "the start of",
            {name: str(init) for name, init in self._inits.items()},
            "Inside meta_init() every rank of a pipeline stage must build the same model and initialize it in the same way.",
            PlacementError,
            part=self._context.get_local_rank(ParallelMode.PIPELINE),
        )

    def locate(self, count: int) -> None:
        """Find the positions of this rank's tensors in the unsharded parameters. Called before parameters are sharded.

        `count`: the number of meta parameters in the world. Collective over the world if there are any.
        """
        self._count = count
        if not count:
            return
        located = locate_tensors(self._model, self._context, "starting from the meta device", own_names=True)
        self._located = {name: tensor for tensor in located for name in tensor.names}

    def materialise(self, device: torch.device) -> None:
        """Allocate this rank's shards on `device` and fill them with initial values.

        Collective over the world if it has meta parameters.
        """
        if not self._count:
            return
        with agreed_errors(self._context.device):
            for name, parameter in self._model.named_parameters():
                if name in self._inits:
                    _materialise(parameter, self._located[name], self._inits[name], device, self._context.seed)
            for module in self._model.modules():
                if hasattr(module, "_get_fsdp_state"):
                    refresh_shards(module)


def _materialise(
    parameter: Any, located: LocalTensor, init: ParameterInit | ParameterLoad, device: torch.device, seed: int
) -> None:
    """Give a parameter memory for this rank's shard, with its initial values. It stays the same object."""
    shard = local_part(parameter)
    local = torch.empty_strided(shard.size(), shard.stride(), dtype=shard.dtype, device=device)
    first = offset_in_dtensor(parameter) if is_dtensor(parameter) else [0] * local.dim()
    shard_box = Box(tuple(first), tuple(local.shape))
    # A model that was sharded after meta_init() was initialized as unsharded parameters. Otherwise its layers were built
    # sharded, and the initialization is that of the tensor before FSDP.
    of_full = tuple(init.tensor.shape) == located.shape
    for full_box, here in located.places:
        shared = shard_box.shared_with(here)
        if shared is not None:
            inside = moved(shared, here, full_box)
            start = inside.offset if of_full else shared.offset
            init.fill(local[shared.slices_in(shard_box)], start, located.shape, inside.offset, seed)
    real: Any = dtensor_like(parameter, local) if is_dtensor(parameter) else local

    # Swap the tensors under the parameter object, which the optimizer, tied modules and the user refer to. It keeps its Python
    # attributes; its hooks are part of the autograd state that is swapped away, and are registered again.
    forget_initial_value(parameter)
    hooks = list((parameter._backward_hooks or {}).values())
    post_hooks = list((parameter._post_accumulate_grad_hooks or {}).values())
    exchange_tensors(parameter, nn.Parameter(real, parameter.requires_grad))
    parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None
    for hook in hooks:
        parameter.register_hook(hook)
    for hook in post_hooks:
        parameter.register_post_accumulate_grad_hook(hook)

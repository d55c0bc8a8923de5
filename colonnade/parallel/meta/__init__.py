"""Start on the meta device: a model is built without memory, and each rank draws its own part of every parameter."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from colonnade.errors import PlacementError
from colonnade.parallel.meta.tape import Tape, is_expanded, memory_of

_ATTRIBUTE = "_colonnade_start"
_SOURCE = "_colonnade_values"
_WHOLE = "_colonnade_cut_from"


class Source(Protocol):
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


def give_source(parameter: Tensor, source: Source) -> None:
    """A parameter on the meta device gets its values from there in `initialize`: on each rank those that it holds."""
    setattr(parameter, _SOURCE, source)


def source_of(parameter: Tensor) -> Source | None:
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

"""Sources of the parameters of a model of transformers: the tensors of a folder that each is made of, today's form or an older."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from colonnade.checkpoint.weights_folder import AnyTensor
from colonnade.errors import CheckpointError, listed
from colonnade.parallel.boxes import Box, whole_box

_COMPARED = 1 << 25
"""Bytes that are compared at a time."""


@dataclass(frozen=True)
class StoredPart:
    """A stored tensor that fills a box of a parameter; `stacked`: it has no first dimension, where the box has length 1."""

    tensor: AnyTensor
    box: Box
    stacked: bool = False


@dataclass(frozen=True)
class StoredParts:
    """A parameter that is one stored tensor, or several that lie side by side; only what is asked for is read."""

    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    def __str__(self) -> str:
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"{self.parts[0].tensor}{more}"

    def read_into(self, target: Tensor, offset: Sequence[int]) -> None:
        """Give `target` the elements from `offset` on."""
        box = Box(tuple(offset), tuple(target.shape))
        for part in self.parts:
            shared = box.shared_with(part.box)
            if shared is not None:
                view = target[shared.slices_in(box)]
                start = tuple(at - first for at, first in zip(shared.offset, part.box.offset, strict=True))
                inner, view = (start[1:], view[0]) if part.stacked else (start, view)
                part.tensor.read_into(view, Box(inner, tuple(view.shape)))


@dataclass(frozen=True)
class Converted:
    """A parameter that transformers computes from whole stored tensors."""

    name: str
    shape: tuple[int, ...]
    converter: Any
    stored: Mapping[str, Sequence[AnyTensor]]
    model: Any

    def __str__(self) -> str:
        return f"{next(iter(self.stored.values()))[0]}, converted"

    def read_into(self, target: Tensor, offset: Sequence[int]) -> None:
        """Give `target` the elements from `offset` on; the whole is made for it."""
        values = {pattern: [tensor.read() for tensor in tensors] for pattern, tensors in self.stored.items()}
        whole = _convert(self.converter, self.name, values, self.model)[self.name]
        box = Box(tuple(offset), tuple(target.shape))
        with torch.no_grad():
            target.copy_(whole[box.slices_in(whole_box(self.shape))])


Source = StoredParts | Converted


def sources_for(model: Any, stored: Mapping[str, AnyTensor]) -> tuple[dict[str, Source], list[str]]:
    """For the names of the model's state what they are read from, and the keys that belong to none of them.

    Names, and tensors that lie otherwise in older folders (one for each expert, say), are matched as transformers does it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    state, prefix = model.state_dict(), model.base_model_prefix
    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Source] = {}
    strange: list[str] = []
    groups: dict[str, tuple[Any, dict[str, list[AnyTensor]]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            strange.append(key)
        elif pattern is None:
            source = StoredParts(stored[key].shape, (StoredPart(stored[key], whole_box(stored[key].shape)),))
            if name in found and not are_same(found[name], source, state[name].dtype):
                raise CheckpointError(
                    f"the folder has more than one for {name}: {found[name]}, {source}; leave the one that is meant in the files",
                    code="C061",
                )
            found[name] = source
        else:
            _, tensors = groups.setdefault(name, (by_pattern[pattern], {}))
            tensors.setdefault(pattern, []).append(stored[key])
    for name, (converter, tensors) in groups.items():
        found |= _converted(name, converter, tensors, model)
    return found, strange


def are_same(left: Source, right: Source, dtype: torch.dtype) -> bool:
    """Whether two sources give a parameter of this type the same values; some rows of each are read at a time."""
    if left.shape != right.shape:
        return False
    length, *rest = left.shape or (1,)
    rows = max(1, _COMPARED // max(1, prod(rest) * dtype.itemsize))
    if isinstance(left, Converted) or isinstance(right, Converted):
        rows = length  # a converter makes the whole for any part of it
    for first in range(0, length, rows):
        box = Box((first, *[0] * len(rest)), (min(rows, length - first), *rest)) if left.shape else Box((), ())
        parts = [torch.empty(box.shape, dtype=dtype, device="cpu") for _ in range(2)]
        left.read_into(parts[0], box.offset)
        right.read_into(parts[1], box.offset)
        if not torch.equal(*parts):
            return False
    return True


def _converted(name: str, converter: Any, stored: dict[str, list[AnyTensor]], model: Any) -> dict[str, Source]:
    """The parameters that a converter makes of stored tensors: shapes come from a run on the meta device, which reads nothing."""
    empty = {
        pattern: [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors]
        for pattern, tensors in stored.items()
    }
    shapes = {target: tuple(value.shape) for target, value in _convert(converter, name, empty, model).items()}
    pieces = _side_by_side(converter, stored)
    if len(shapes) == 1 and pieces is not None and pieces.shape == shapes.get(name):
        return {name: pieces}
    return {target: Converted(target, shape, converter, stored, model) for target, shape in shapes.items()}


def _convert(converter: Any, name: str, values: dict[str, list[Tensor]], model: Any) -> dict[str, Tensor]:
    # A converter collects tensors, so each parameter needs one of its own.
    own = copy.deepcopy(converter)
    for pattern, tensors in values.items():
        for tensor in tensors:
            own.add_tensor(name, name, pattern, tensor)
    try:
        made = own.convert(name, model=model, config=model.config)
    except Exception as error:
        sources = listed(pattern for pattern in values)
        raise CheckpointError(
            f"{name} cannot be made of {sources}, as transformers would: {error}", code="C061"
        ) from error
    return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}


def _side_by_side(converter: Any, stored: dict[str, list[AnyTensor]]) -> StoredParts | None:
    """The stored parts of a parameter that a converter only stacks and joins; None for other converters."""
    operations = {type(operation).__name__: getattr(operation, "dim", 0) for operation in converter.operations}
    stacks, joined = operations.get("MergeModulelist"), operations.get("Concatenate")
    if (
        stacks not in (None, 0)
        or not operations.keys() <= {"MergeModulelist", "Concatenate"}
        or "quant" in str(converter)
    ):
        return None
    columns = [stored[pattern] for pattern in converter.source_patterns if pattern in stored]
    if stacks is None:
        columns = [[tensor for column in columns for tensor in column]]
    parts: list[StoredPart] = []
    at = 0
    for column in columns if stacks is not None else [[tensor] for tensor in columns[0]]:
        if len({tensor.shape for tensor in column}) > 1:
            return None
        for row, tensor in enumerate(column):
            shape = (1, *tensor.shape) if stacks is not None else tensor.shape
            offset = [0] * len(shape)
            if stacks is not None:
                offset[0] = row
            if joined is not None:
                offset[joined] = at
            parts.append(StoredPart(tensor, Box(tuple(offset), shape), stacks is not None))
        at += parts[-1].box.shape[joined] if joined is not None else 0
    stops = [part.box.stop for part in parts]
    return StoredParts(tuple(map(max, *stops)) if len(stops) > 1 else stops[0], tuple(parts))

"""Sources of a transformers model's parameters: the stored tensors that each is made of, in current and older formats."""

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
from colonnade.parallel.boxes import Box, full_box

_COMPARED = 1 << 25
"""Bytes compared at a time."""


@dataclass(frozen=True)
class StoredPart:
    """A stored tensor that fills a box of a parameter; `stacked`: it lacks the box's first dimension, of length 1."""

    tensor: AnyTensor
    box: Box
    stacked: bool = False


@dataclass(frozen=True)
class StoredParts:
    """A parameter that is one stored tensor, or several side by side; only the requested slices are read."""

    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    def __str__(self) -> str:
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"{self.parts[0].tensor}{more}"

    def read_into(self, target: Tensor, offset: Sequence[int]) -> None:
        """Fill `target` with the elements from `offset` on."""
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
    """A parameter that transformers computes from full stored tensors."""

    name: str
    shape: tuple[int, ...]
    converter: Any
    stored: Mapping[str, Sequence[AnyTensor]]
    model: Any

    def __str__(self) -> str:
        return f"{next(iter(self.stored.values()))[0]}, converted"

    def read_into(self, target: Tensor, offset: Sequence[int]) -> None:
        """Fill `target` with the elements from `offset` on; computes the full parameter for it."""
        values = {pattern: [tensor.read() for tensor in tensors] for pattern, tensors in self.stored.items()}
        full = _convert(self.converter, self.name, values, self.model)[self.name]
        box = Box(tuple(offset), tuple(target.shape))
        with torch.no_grad():
            target.copy_(full[box.slices_in(full_box(self.shape))])


Source = StoredParts | Converted


def sources_for(model: Any, stored: Mapping[str, AnyTensor]) -> tuple[dict[str, Source], list[str]]:
    """(source of each name of the model's state, stored keys that belong to no name).

    Renamed keys and older formats (for example one tensor per expert) are matched with transformers' own rules.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    state, prefix = model.state_dict(), model.base_model_prefix
    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Source] = {}
    unknown: list[str] = []
    groups: dict[str, tuple[Any, dict[str, list[AnyTensor]]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            unknown.append(key)
        elif pattern is None:
            source = StoredParts(stored[key].shape, (StoredPart(stored[key], full_box(stored[key].shape)),))
            if name in found and not are_same(found[name], source, state[name].dtype):
                raise CheckpointError(
                    f"the folder has more than one for {name}: {found[name]}, {source}; remove all but one from the files",
                    code="C061",
                )
            found[name] = source
        else:
            _, tensors = groups.setdefault(name, (by_pattern[pattern], {}))
            tensors.setdefault(pattern, []).append(stored[key])
    for name, (converter, tensors) in groups.items():
        # Shapes come from a conversion on the meta device, which reads nothing.
        empty = {
            pattern: [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in stored_tensors]
            for pattern, stored_tensors in tensors.items()
        }
        shapes = {target: tuple(value.shape) for target, value in _convert(converter, name, empty, model).items()}
        parts = _concatenated(converter, tensors)
        if len(shapes) == 1 and parts is not None and parts.shape == shapes.get(name):
            found[name] = parts
        else:
            found |= {target: Converted(target, shape, converter, tensors, model) for target, shape in shapes.items()}
    return found, unknown


def are_same(left: Source, right: Source, dtype: torch.dtype) -> bool:
    """Whether two sources give a parameter of this dtype the same values; reads some rows of each at a time."""
    if left.shape != right.shape:
        return False
    length, *rest = left.shape or (1,)
    rows = max(1, _COMPARED // max(1, prod(rest) * dtype.itemsize))
    if isinstance(left, Converted) or isinstance(right, Converted):
        rows = length  # a converter computes the full parameter for any slice
    for first in range(0, length, rows):
        box = Box((first, *[0] * len(rest)), (min(rows, length - first), *rest)) if left.shape else Box((), ())
        values = [torch.empty(box.shape, dtype=dtype, device="cpu") for _ in range(2)]
        left.read_into(values[0], box.offset)
        right.read_into(values[1], box.offset)
        if not torch.equal(*values):
            return False
    return True


def _convert(converter: Any, name: str, values: dict[str, list[Tensor]], model: Any) -> dict[str, Tensor]:
    """Run a converter of transformers on these values."""
    # A converter collects tensors, so each parameter needs a fresh one.
    converter = copy.deepcopy(converter)
    for pattern, tensors in values.items():
        for tensor in tensors:
            converter.add_tensor(name, name, pattern, tensor)
    try:
        converted = converter.convert(name, model=model, config=model.config)
    except Exception as error:
        sources = listed(pattern for pattern in values)
        raise CheckpointError(
            f"{name} cannot be converted from {sources} as transformers does it: {error}", code="C061"
        ) from error
    return {target: value[0] if isinstance(value, list) else value for target, value in converted.items()}


def _concatenated(converter: Any, stored: dict[str, list[AnyTensor]]) -> StoredParts | None:
    """The parts of a parameter whose converter only stacks and concatenates; None for other converters."""
    operations = {type(operation).__name__: getattr(operation, "dim", 0) for operation in converter.operations}
    stack_dim, concat_dim = operations.get("MergeModulelist"), operations.get("Concatenate")
    if (
        stack_dim not in (None, 0)
        or not operations.keys() <= {"MergeModulelist", "Concatenate"}
        or "quant" in str(converter)
    ):
        return None
    # One column per pattern: its tensors are stacked along dimension 0, and columns are concatenated. Without a stack every
    # tensor is a column of its own.
    columns = [stored[pattern] for pattern in converter.source_patterns if pattern in stored]
    if stack_dim is None:
        columns = [[tensor] for column in columns for tensor in column]
    parts: list[StoredPart] = []
    at = 0
    for column in columns:
        if len({tensor.shape for tensor in column}) > 1:
            return None
        for row, tensor in enumerate(column):
            shape = (1, *tensor.shape) if stack_dim is not None else tensor.shape
            offset = [0] * len(shape)
            if stack_dim is not None:
                offset[0] = row
            if concat_dim is not None:
                offset[concat_dim] = at
            parts.append(StoredPart(tensor, Box(tuple(offset), shape), stack_dim is not None))
        at += parts[-1].box.shape[concat_dim] if concat_dim is not None else 0
    stops = [part.box.stop for part in parts]
    return StoredParts(tuple(map(max, *stops)) if len(stops) > 1 else stops[0], tuple(parts))

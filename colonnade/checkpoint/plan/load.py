"""LoadPlan: the tensors of a model and of a checkpoint, matched by name. What does not fit is listed, on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from colonnade.checkpoint.format.entries import dtype_of, memory_for, type_name
from colonnade.checkpoint.format.manifest import Manifest, TensorRecord
from colonnade.checkpoint.format.tensors import TensorReader
from colonnade.checkpoint.plan.tensors import LocalTensor
from colonnade.checkpoint.plan.values import SavedValues
from colonnade.errors import CheckpointError, listed
from colonnade.parallel.shards import MASTER

_SHOWN = 12


class LoadPlan:
    """For every tensor of this rank's model, what the checkpoint has under any of its names."""

    def __init__(self, tensors: Sequence[LocalTensor], manifest: Manifest) -> None:
        self.tensors, self.manifest = tensors, manifest
        self._records: dict[int, TensorRecord] = {}
        self._missing: list[str] = []
        self._mismatched: list[str] = []
        known: dict[str, TensorRecord] = {}
        self._masters = {record.label: record for record in manifest.tensors if record.state_name == MASTER}
        self._sources: dict[int, TensorRecord] = {}
        self._others: dict[int, list[TensorRecord]] = {}
        for record in manifest.tensors:
            if not record.state_name:
                for name in (record.label, *record.names):
                    known.setdefault(name, record)
        for tensor in tensors:
            found = [known[name] for name in (*tensor.names, tensor.label) if name in known]
            if found:
                first, *self._others[id(tensor)] = {id(record): record for record in found}.values()
                self._match(tensor, first)
            else:
                self._missing.append(tensor.names[0])

    def record_of(self, tensor: LocalTensor) -> TensorRecord:
        """What the checkpoint has of a tensor."""
        return self._records[id(tensor)]

    def note(self) -> dict[str, list[str]]:
        """What the other ranks must know, for `check`."""
        others = (record for records in self._others.values() for record in records)
        used = sorted({record.label for record in (*self._records.values(), *others)})
        return {"used": used, "missing": self._missing, "mismatched": self._mismatched}

    def check(self, notes: Sequence[dict[str, list[str]]], where: str) -> None:
        """Raise the same error on every rank unless all tensors of the checkpoint and of all ranks found each other."""
        used = {label for note in notes for label in note["used"]}
        problems = {
            "missing in the checkpoint": _union(note["missing"] for note in notes),
            "in the checkpoint, but not in the model": [
                (record.names or (record.label,))[0]
                for record in self.manifest.tensors
                if not record.state_name and record.label not in used
            ],
            "of another shape or type": _union(note["mismatched"] for note in notes),
        }
        lines = [f"  {what} ({len(names)}): {_some(names)}" for what, names in problems.items() if names]
        if lines:
            raise CheckpointError(
                f"{where} does not fit this model:\n" + "\n".join(lines) + "\nBuild the model that "
                "was saved (names, sizes and types are in the manifest), or load another checkpoint.",
                code="C082",
            )

    def read_tensors(self, reader: TensorReader, values: SavedValues) -> list[Tensor]:
        """What every parameter and buffer of this rank is to hold, in new memory, reading only what it needs."""
        found = []
        for tensor in self.tensors:
            record = self.record_of(tensor)
            own = values.own_buffer(record.label)
            found.append(read_local(reader, tensor, self._sources.get(id(tensor), record)) if own is None else own)
            for other in self._others[id(tensor)]:
                if not torch.equal(read_local(reader, tensor, other), read_local(reader, tensor, record)):
                    raise CheckpointError(
                        f"{listed(tensor.names)} are one tensor in the model, and {record} and {other} have different values in "
                        f"the checkpoint: the model that was saved had not tied them",
                        code="C082",
                    )
        return found

    def set_tensors(self, found: Iterable[Tensor]) -> None:
        """Give every parameter and buffer, in place, what `read_tensors` found."""
        with torch.no_grad():
            for tensor, value in zip(self.tensors, found, strict=True):
                tensor.local.copy_(value)

    def _match(self, tensor: LocalTensor, record: TensorRecord) -> None:
        self._records[id(tensor)] = record
        dtype = type_name(tensor.local, listed(tensor.names))
        master = self._masters.get(record.label)
        if master is not None and (dtype, tensor.shape) == (master.dtype, master.shape):
            self._sources[id(tensor)] = master  # the weight itself, before it was rounded
        elif (dtype, tensor.shape) != (record.dtype, record.shape):
            self._mismatched.append(
                f"{tensor.names[0]}: {record.dtype} {list(record.shape)} in the checkpoint, {dtype} "
                f"{list(tensor.shape)} here"
            )


def read_local(reader: TensorReader, tensor: LocalTensor, record: TensorRecord) -> Tensor:
    """What this rank holds of a saved tensor, as a new one."""
    values = memory_for(tensor.local.shape, dtype_of(record))
    for box, view in tensor.pieces(values):
        reader.fill(view, box, record)
    return values


def _union(lists: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _some(names: Sequence[str]) -> str:
    return listed(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")

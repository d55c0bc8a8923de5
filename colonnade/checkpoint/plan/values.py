"""What a checkpoint holds beside tensors of the model: values, the state of objects, and the random streams."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from colonnade.checkpoint.format.entries import raw_bytes
from colonnade.checkpoint.format.manifest import ItemRecord, LayoutRecord, Manifest
from colonnade.checkpoint.format.tensors import TensorReader
from colonnade.checkpoint.format.values import decode, is_stateful
from colonnade.checkpoint.random_state import set_random_state, why_not_here
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.random import derive_seed
from colonnade.errors import CheckpointError, did_you_mean, listed
from colonnade.logging import get_dist_logger

RANDOM = "random"
"""The name of the random state among the values."""
BUFFER = "buffer/"
"""What the names of buffers begin with that were not the same on all ranks that hold them."""
RandomSource = Literal["restored", "re-derived"]


class SavedValues:
    """The values of one checkpoint as this rank sees them.

    A value that was the same on every rank is everybody's. One that differed belongs to the rank that had it, and
    can be asked for only on the layout that saved it.
    """

    def __init__(self, manifest: Manifest, reader: TensorReader, context: ParallelContext) -> None:
        self.same_layout = manifest.layout == LayoutRecord.of(context.layout)
        self._manifest = manifest
        self._reader = reader
        self._context = context
        self._items: dict[str, list[ItemRecord]] = {}
        self._state_names: dict[str, list[str]] = {}
        for item in manifest.items:
            self._items.setdefault(item.name, []).append(item)
            if item.name.startswith("optimizer/"):
                _, state_name, label = item.name.split("/", 2)
                self._state_names.setdefault(label, []).append(state_name)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a value."""
        return name in self._items

    def get(self, name: str) -> Any:
        """This rank's value; raises where there is none that can be its."""
        found = self._mine(name)
        if found is None:
            raise CheckpointError(
                f"{name} was not the same on all ranks when it was saved on {self._manifest.layout}, and this is "
                f"{LayoutRecord.of(self._context.layout)}: no rank here is the one that had it. Load without it."
            )
        return self.decoded(found)

    def decoded(self, item: ItemRecord) -> Any:
        """The value of a record."""
        return decode(item.value, lambda at: self._reader.entry(item.file or "", item.entry(at)))

    def optimizer_state_of(self, label: str) -> dict[str, Any]:
        """What the optimizer kept for a parameter that is not a tensor."""
        return {name: self.get(f"optimizer/{name}/{label}") for name in self._state_names.get(label, ())}

    def extras(self, extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What was saved as `extra`: the state of the objects that are here to take it, and all other values."""
        known = [name.removeprefix("extra/") for name in self._items if name.startswith("extra/")]
        for name in extra:
            if name not in known:
                raise CheckpointError(
                    f"the checkpoint has no extra {name!r}; it has {listed(known)}.{did_you_mean(name, known)}"
                )
        states: dict[str, Any] = {}
        plain: dict[str, Any] = {}
        for name in known:
            if name in extra and is_stateful(extra[name]):
                states[name] = self.get(f"extra/{name}")
            elif name in extra or self._mine(f"extra/{name}") is not None:
                plain[name] = self.get(f"extra/{name}")
        return states, plain

    def own_buffer(self, label: str) -> Tensor | None:
        """What this rank had in a buffer where that was not what the first of its holders had, or None.

        On another layout no rank is the one that had it, so all get the first holder's; the log says so.
        """
        found = self._items.get(f"{BUFFER}{label}", [])
        if found and not self.same_layout:
            get_dist_logger().warning(
                f"{label} was not the same on all ranks when it was saved on {self._manifest.layout}: all ranks get what "
                f"the first had. (Statistics of BatchNorm drift apart; SyncBatchNorm keeps them together.)",
                ranks=[0],
            )
        mine = self._mine(f"{BUFFER}{label}") if found else None
        return None if mine is None else self.decoded(mine)

    def random_state(self) -> tuple[Mapping[str, Any] | None, str]:
        """Where the random streams of this rank stood, or None and why they cannot be put back."""
        if not self.has(RANDOM):
            return None, "it was imported, without any"
        if not self.same_layout:
            return None, f"it was saved on {self._manifest.layout}"
        state = self.get(RANDOM)
        reason = why_not_here(state, self._context)
        return (state, "") if reason is None else (None, reason)

    def restore_random(self, state: Mapping[str, Any] | None, reason: str) -> RandomSource:
        """Put the random streams back to the bit, or derive new ones from the saved and say so in the log."""
        if state is not None:
            set_random_state(state, self._context)
            return "restored"
        seed = self._derived_seed()
        self._context.set_seed(seed)
        get_dist_logger().warning(
            f"the random streams of step {self._manifest.step} cannot be carried over: {reason}, and this is "
            f"{LayoutRecord.of(self._context.layout)} on {self._context.device.type}. New ones were derived from it (seed {seed}).",
            ranks=[0],
        )
        return "re-derived"

    def _mine(self, name: str) -> ItemRecord | None:
        found = self._items[name]
        first, *others = found
        if not others and name != RANDOM and not name.startswith(BUFFER):
            return first
        rank = self._context.get_global_rank()
        return next((item for item in found if self.same_layout and rank in item.ranks), None)

    def _derived_seed(self) -> int:
        """The same on every rank and in every repetition; another one for another step."""
        digest = hashlib.sha256()
        first = next(iter(self._items.get(RANDOM, ())), None)
        if first is not None:
            for at in range(first.tensors):
                digest.update(raw_bytes(self._reader.entry(first.file or "", first.entry(at))))
        return derive_seed(self._manifest.step, digest.hexdigest())

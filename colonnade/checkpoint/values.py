"""Plain values of a checkpoint: the content of a `state_dict()` as JSON, with its tensors stored separately.

`encode` and `decode` are inverses; `SavedValues` gives a rank of any layout the values of a checkpoint.

Objects with string keys, lists, strings, finite numbers, booleans and None are plain JSON. Other types of Python state have a
tag: `$tuple`, `$dict` (keys of any type), `$counter`, `$float` (nan and infinities) and `$tensor`. All else raises.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from torch import Tensor

from colonnade.checkpoint.manifest import ItemRecord, LayoutRecord
from colonnade.checkpoint.tensor_files import TensorReader, raw_bytes, type_name
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.random import derive_seed, set_random_state, why_not_restorable
from colonnade.errors import CheckpointError, did_you_mean, listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.placement import is_dtensor

RANDOM = "random"
"""Name of the item with the random state."""
BUFFER = "buffer/"
"""Name prefix of items with buffers that differed between replicas."""
RandomSource = Literal["restored", "re-derived"]


@dataclass(frozen=True)
class Encoded:
    """An encoded value: JSON in which `{"$tensor": n}` stands for `tensors[n]`."""

    value: Any
    tensors: tuple[Tensor, ...]

    def digest(self) -> str:
        """A hash that is equal for bitwise equal values."""
        digest = hashlib.sha256(json.dumps(self.value).encode())
        for tensor in self.tensors:
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(raw_bytes(tensor))
        return digest.hexdigest()


def is_stateful(value: Any) -> bool:
    """Whether a value is an object with `state_dict()` and `load_state_dict()`, not a plain value."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def encode(value: Any, what: str) -> Encoded:
    """Encode `value` as JSON and tensors. If a part of `value` is neither, the raised error says where in `what` this part is."""
    tensors: list[Tensor] = []
    return Encoded(_encode(value, what, tensors), tuple(tensors))


def decode(value: Any, tensor: Callable[[int], Tensor]) -> Any:
    """Decode the JSON of an `Encoded` value (the inverse of `encode`); `tensor(n)` returns its n-th tensor."""
    if isinstance(value, list):
        return [decode(entry, tensor) for entry in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: decode(entry, tensor) for key, entry in value.items()}
    (tag,) = tags
    content = value[tag]
    if tag == "$tensor":
        return tensor(content)
    if tag == "$float":
        return float(content)
    make: dict[str, Callable[[Sequence[Any]], Any]] = {"$tuple": tuple, "$dict": _pairs, "$counter": _counts}
    return make[tag]([decode(entry, tensor) for entry in content])


def _encode(value: Any, what: str, tensors: list[Tensor]) -> Any:
    if value is None or (isinstance(value, (bool, int, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor):
        return {"$tensor": _keep(value, what, tensors)}
    if type(value) is list:
        return _encode_all(value, what, tensors)
    if type(value) is tuple:
        return {"$tuple": _encode_all(value, what, tensors)}
    if type(value) in (dict, OrderedDict, Counter):
        if type(value) is not Counter and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(entry, f"{what}[{key!r}]", tensors) for key, entry in value.items()}
        pairs = [
            [_encode(key, f"a key of {what}", tensors), _encode(entry, f"{what}[{key!r}]", tensors)]
            for key, entry in value.items()
        ]
        return {"$counter" if type(value) is Counter else "$dict": pairs}
    raise CheckpointError(
        f"{what} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot store. Allowed "
        "are None, booleans, numbers, strings, lists, tuples, dicts and tensors. Give the object a state_dict() that "
        "returns allowed values.",
        code="C085",
    )


def _encode_all(value: Sequence[Any], what: str, tensors: list[Tensor]) -> list[Any]:
    return [_encode(entry, f"{what}[{at}]", tensors) for at, entry in enumerate(value)]


def _keep(tensor: Tensor, what: str, tensors: list[Tensor]) -> int:
    if is_dtensor(tensor):
        raise CheckpointError(
            f"{what} is a DTensor. DTensors are allowed only in the model and the optimizer. Save the local or the "
            "full tensor.",
            code="C085",
        )
    type_name(tensor, what)
    tensors.append(tensor.detach())
    return len(tensors) - 1


def _pairs(content: Sequence[Any]) -> dict[Any, Any]:
    return {key: entry for key, entry in content}  # noqa: C416 - dict(content) would accept two-character strings too


def _counts(content: Sequence[Any]) -> Counter[Any]:
    return Counter(_pairs(content))


# --- The values of a checkpoint ---


class SavedValues:
    """The plain values of a checkpoint for this rank.

    A value that was equal on all ranks can be loaded on any layout. Values that differed between ranks can be loaded only on the
    layout on which they were saved, each on the rank that had it.
    """

    def __init__(self, reader: TensorReader, context: ParallelContext) -> None:
        manifest = reader.manifest
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
        """Whether the checkpoint has a value of this name."""
        return name in self._items

    def get(self, name: str) -> Any:
        """The value `name` for this rank. Raises if the value differed between ranks and the layout has changed since."""
        found = self._own_item(name)
        if found is None:
            raise CheckpointError(
                f"{name} differed between ranks when it was saved on {self._manifest.layout}, so it cannot be loaded "
                f"on {LayoutRecord.of(self._context.layout)}. Load the checkpoint without {name!r}, or use the "
                "layout of the saved run."
            )
        return self.decoded(found)

    def decoded(self, item: ItemRecord) -> Any:
        """The decoded value of a record."""
        return decode(item.value, lambda at: self._reader.entry(item.file or "", item.entry(at)))

    def optimizer_state_of(self, label: str) -> dict[str, Any]:
        """The values, without tensors, in the optimizer state of a parameter."""
        return {name: self.get(f"optimizer/{name}/{label}") for name in self._state_names.get(label, ())}

    def extras(self, extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split the values saved as `extra` into (states for the objects in `extra`, all other values)."""
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
            elif name in extra or self._own_item(f"extra/{name}") is not None:
                plain[name] = self.get(f"extra/{name}")
        return states, plain

    def own_buffer(self, label: str) -> Tensor | None:
        """This rank's value of a buffer if it differed from the value on the first replica; else None.

        On another layout, all ranks get the value of the first replica, with a warning.
        """
        found = self._items.get(f"{BUFFER}{label}", [])
        if found and not self.same_layout:
            get_dist_logger().warning(
                f"buffer {label} differed between ranks when it was saved on {self._manifest.layout}. All ranks now "
                "get the value of the first rank. BatchNorm statistics differ between ranks; use SyncBatchNorm to "
                "keep them equal.",
                ranks=[0],
            )
        # A rank without a record of its own had the first replica's value, which is saved as the tensor itself.
        own = self._own_item(f"{BUFFER}{label}") if found else None
        return None if own is None else self.decoded(own)

    def random_state(self) -> tuple[Mapping[str, Any] | None, str]:
        """The random state of this rank, or None and the reason why it cannot be restored."""
        if not self.has(RANDOM):
            return None, "an imported checkpoint has none"
        if not self.same_layout:
            return None, f"they were saved on {self._manifest.layout}"
        state = self.get(RANDOM)
        reason = why_not_restorable(state, self._context)
        return (state, "") if reason is None else (None, reason)

    def restore_random(self, state: Mapping[str, Any] | None, reason: str) -> RandomSource:
        """Restore the random streams bit for bit or, without a `state`, derive new ones and log a warning."""
        if state is not None:
            set_random_state(state, self._context)
            return "restored"
        # The new seed must be equal on all ranks, reproducible, and different for another step: a hash of the first saved state.
        digest = hashlib.sha256()
        first = next(iter(self._items.get(RANDOM, ())), None)
        if first is not None:
            for at in range(first.tensors):
                digest.update(raw_bytes(self._reader.entry(first.file or "", first.entry(at))))
        seed = derive_seed(self._manifest.step, digest.hexdigest())
        self._context.set_seed(seed)
        get_dist_logger().warning(
            f"the random state of step {self._manifest.step} was not restored: {reason}, and this run is on "
            f"{LayoutRecord.of(self._context.layout)}, {self._context.device.type}. New random streams were derived "
            f"from seed {seed}.",
            ranks=[0],
        )
        return "re-derived"

    def _own_item(self, name: str) -> ItemRecord | None:
        """The record with this rank's value; None if the value belongs to other ranks."""
        # A value that was equal on all ranks has one record. Random states and differing buffers are always per rank.
        found = self._items[name]
        first, *others = found
        if not others and name != RANDOM and not name.startswith(BUFFER):
            return first
        rank = self._context.get_global_rank()
        return next((item for item in found if self.same_layout and rank in item.ranks), None)

"""State as JSON: values that `state_dict()` may give, with the tensors in them beside the JSON. Nothing else is taken.

`encode` and `decode` are the two directions; `SavedValues` gives a rank of any layout the values of a checkpoint.

Objects with text keys, lists, texts, numbers, booleans and None are themselves. The rest of what Python state is made of is
marked: `$tuple`, `$dict` (keys of any kind), `$counter`, `$float` (nan and infinities) and `$tensor`.
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
from colonnade.context.random import derive_seed
from colonnade.context.random_state import set_random_state, why_not_here
from colonnade.errors import CheckpointError, did_you_mean, listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.placement import is_dtensor

RANDOM = "random"
"""The name of the random state among the values."""
BUFFER = "buffer/"
"""The beginning of the names of buffers that were not the same on all ranks that hold them."""
RandomSource = Literal["restored", "re-derived"]


@dataclass(frozen=True)
class Encoded:
    """A value as JSON, in which `{"$tensor": n}` stands for `tensors[n]`."""

    value: Any
    tensors: tuple[Tensor, ...]

    def digest(self) -> str:
        """Equal for equal values, to the bit."""
        digest = hashlib.sha256(json.dumps(self.value).encode())
        for tensor in self.tensors:
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(raw_bytes(tensor))
        return digest.hexdigest()


def is_stateful(value: Any) -> bool:
    """Whether a value is an object that gives and takes its state, rather than a plain value."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def encode(value: Any, what: str) -> Encoded:
    """`value` as JSON and tensors; refuses anything else, by its place in `what`."""
    tensors: list[Tensor] = []
    return Encoded(_encode(value, what, tensors), tuple(tensors))


def decode(value: Any, tensor: Callable[[int], Tensor]) -> Any:
    """The value that was encoded; `tensor` gives the n-th tensor."""
    if isinstance(value, list):
        return [decode(entry, tensor) for entry in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$")]
    if not marks:
        return {key: decode(entry, tensor) for key, entry in value.items()}
    (mark,) = marks
    content = value[mark]
    if mark == "$tensor":
        return tensor(content)
    if mark == "$float":
        return float(content)
    make: dict[str, Callable[[Sequence[Any]], Any]] = {"$tuple": tuple, "$dict": _pairs, "$counter": _counts}
    return make[mark]([decode(entry, tensor) for entry in content])


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
        return _encode_dict(value, what, tensors)
    raise CheckpointError(
        f"{what} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold. State is made "
        f"of None, booleans, numbers, texts, lists, tuples, dicts and tensors; give the object a state_dict() of these.",
        code="C085",
    )


def _encode_dict(value: dict[Any, Any], what: str, tensors: list[Tensor]) -> Any:
    if type(value) is not Counter and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(entry, f"{what}[{key!r}]", tensors) for key, entry in value.items()}
    pairs = [
        [_encode(key, f"a key of {what}", tensors), _encode(entry, f"{what}[{key!r}]", tensors)]
        for key, entry in value.items()
    ]
    return {"$counter" if type(value) is Counter else "$dict": pairs}


def _encode_all(value: Sequence[Any], what: str, tensors: list[Tensor]) -> list[Any]:
    return [_encode(entry, f"{what}[{at}]", tensors) for at, entry in enumerate(value)]


def _keep(tensor: Tensor, what: str, tensors: list[Tensor]) -> int:
    if is_dtensor(tensor):
        raise CheckpointError(f"{what} is a DTensor; only the model and the optimizer may hold those", code="C085")
    type_name(tensor, what)
    tensors.append(tensor.detach())
    return len(tensors) - 1


def _pairs(content: Sequence[Any]) -> dict[Any, Any]:
    return {key: entry for key, entry in content}  # noqa: C416 - dict(content) would take a list of texts too


def _counts(content: Sequence[Any]) -> Counter[Any]:
    return Counter(_pairs(content))


# --- The values of a checkpoint ---


class SavedValues:
    """The values of one checkpoint as this rank sees them.

    A value that was the same on every rank is everybody's. One that differed belongs to the rank that had it, and
    can be asked for only on the layout that saved it.
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
        """The values, other than tensors, that the optimizer kept for a parameter."""
        return {name: self.get(f"optimizer/{name}/{label}") for name in self._state_names.get(label, ())}

    def extras(self, extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values that were saved as `extra`: the state of the objects that are here to take it, and all others."""
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
        """The values that this rank had in a buffer, where they were not those of its first holder, or None.

        On another layout no rank is the one that had it, so all get the first holder's; the log says so.
        """
        found = self._items.get(f"{BUFFER}{label}", [])
        if found and not self.same_layout:
            get_dist_logger().warning(
                f"{label} was not the same on all ranks when it was saved on {self._manifest.layout}: all ranks get what "
                f"the first had. (Statistics of BatchNorm drift apart; SyncBatchNorm keeps them together.)",
                ranks=[0],
            )
        # A rank without a record of its own had the value of the first holder, which is the tensor itself.
        mine = self._mine(f"{BUFFER}{label}") if found else None
        return None if mine is None else self.decoded(mine)

    def random_state(self) -> tuple[Mapping[str, Any] | None, str]:
        """The random state of this rank, or None and why it cannot be put back."""
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
        # A value that was equal on all ranks has one record. Random streams and drifted buffers are a rank's own even so.
        found = self._items[name]
        first, *others = found
        if not others and name != RANDOM and not name.startswith(BUFFER):
            return first
        rank = self._context.get_global_rank()
        return next((item for item in found if self.same_layout and rank in item.ranks), None)

    def _derived_seed(self) -> int:
        """A seed that is the same on every rank and in every repetition, and another one for another step."""
        digest = hashlib.sha256()
        first = next(iter(self._items.get(RANDOM, ())), None)
        if first is not None:
            for at in range(first.tensors):
                digest.update(raw_bytes(self._reader.entry(first.file or "", first.entry(at))))
        return derive_seed(self._manifest.step, digest.hexdigest())

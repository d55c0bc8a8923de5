"""State as JSON: what `state_dict()` may hold, with tensors beside it. Nothing else is taken, nothing is guessed.

Objects with text keys, lists, texts, numbers, booleans and None are themselves. The rest of what Python state is
made of is marked: `$tuple`, `$dict` (keys of any kind), `$counter`, `$float` (nan and infinities) and `$tensor`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from colonnade.checkpoint.format.entries import raw_bytes, type_name
from colonnade.errors import CheckpointError
from colonnade.parallel.placement import is_dtensor


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
    """Whether it is an object that gives and takes its state, rather than a plain value."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def encode(value: Any, what: str) -> Encoded:
    """`value` as JSON and tensors; refuses anything else, by its place in `what`."""
    tensors: list[Tensor] = []
    return Encoded(_encode(value, what, tensors), tuple(tensors))


def decode(value: Any, tensor: Callable[[int], Tensor]) -> Any:
    """What was encoded; `tensor` gives the n-th tensor."""
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

"""Reading JSON that somebody may have changed: each value is asked for by type, and file names stay inside."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from colonnade.errors import CheckpointError

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors")
_LARGEST = 1 << 62


class Damaged(CheckpointError):
    """A checkpoint whose bytes are not those that were written; an older one may still be good."""


def file_name(name: str) -> str:
    """`name`, if it is a plain name of a file of tensors: no folder, no "..", nothing hidden."""
    if not _FILE.fullmatch(name):
        raise Damaged(
            f"the manifest names the file {name!r}; only plain names such as rank-00000.safetensors are opened, never a "
            f"path that leads elsewhere"
        )
    return name


@dataclass(frozen=True)
class Checked:
    """A JSON object and where it stands, whose members are given out only if they have the right type."""

    content: Any
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.content, dict):
            raise Damaged(f"{self.where} is a {type(self.content).__name__}, not an object")

    def text(self, key: str) -> str:
        value = self.content.get(key)
        return value if isinstance(value, str) else self._refuse(key, value, "a text")

    def whole_number(self, key: str) -> int:
        value = self.content.get(key)
        return value if _is_size(value) else self._refuse(key, value, "a whole number from 0 on")

    def number(self, key: str) -> float:
        value = self.content.get(key)
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if fits else self._refuse(key, value, "a number")

    def sizes(self, key: str) -> tuple[int, ...]:
        value = self.content.get(key)
        fits = isinstance(value, list) and all(map(_is_size, value))
        return tuple(value) if fits else self._refuse(key, value, "a list of whole numbers from 0 on")

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.content.get(key)
        fits = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
        return tuple(value) if fits else self._refuse(key, value, "a list of texts")

    def part(self, key: str) -> Checked:
        return Checked(self.content.get(key), f"{self.where}: {key}")

    def parts(self, key: str) -> list[Checked]:
        value = self.content.get(key)
        if not isinstance(value, list):
            return self._refuse(key, value, "a list")
        return [Checked(entry, f"{self.where}: {key}[{at}]") for at, entry in enumerate(value)]

    def _refuse(self, key: str, value: Any, expected: str) -> Any:
        raise Damaged(f"{self.where}: {key} is {str(value)[:80]!r}, not {expected}")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST

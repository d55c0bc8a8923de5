"""Common text functions: digests, name patterns, dotted keys, sizes and times."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any


def digest_of(content: str | bytes) -> int:
    """A 62-bit digest that is equal in every process.

    The digest and its negative fit into an int64, so one MIN all-reduce can compare ranks.

    Use it only for comparisons within one run. Hashes that are stored (files of a checkpoint) or that determine numbers (seeds,
    probe gradients) must never change; they use SHA-256.
    """
    raw = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") >> 2


def pattern_of(name: str, inside: bool = False) -> str:
    """Replace each number between dots in a name by '*', so that the parameters of all layers of a list have the same pattern.

    With `inside`, all other numbers (`fc1`) are replaced too.
    """
    if inside:
        return re.sub(r"\d+", "*", name)
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def flat_config(config: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """Flatten a nested config: all values by dotted key, such as "zero.stage"."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{under}{key}"
        flat.update(flat_config(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat


def format_count(count: float) -> str:
    """Format a number with three digits and a unit prefix: 12,900 becomes "12.9 k"."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 999.5 or unit == "P":
            break
        count /= 1000
    return f"{count:.3g} {unit}".rstrip()


def format_bytes(count: float) -> str:
    """Format a number of bytes with three digits: "12.9 kB". Units are powers of 1,000."""
    return f"{format_count(count)}B" if abs(count) >= 999.5 else f"{count:.0f} B"


def format_seconds(time: float) -> str:
    """Format a time with three digits ("1.5 ms"); from a minute on as hours, minutes and seconds ("0:01:30")."""
    if time >= 60:
        return f"{int(time // 3600)}:{int(time // 60 % 60):02d}:{int(time % 60):02d}"
    return f"{time:.3g} s" if time >= 1 else f"{time * 1e3:.3g} ms" if time >= 1e-3 else f"{time * 1e6:.3g} µs"

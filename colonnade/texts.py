"""Texts that several parts of the package make in the same way: digests, name patterns, sizes and times."""

from __future__ import annotations

import hashlib
import re


def digest_of(content: str | bytes) -> int:
    """A digest of 62 bits, the same in every process: fits an int64 together with its negative, so that a MIN can compare it.

    For comparisons within one run alone. Hashes that are kept (files of a checkpoint) or that numbers follow from (seeds, the
    marks of the probe) are SHA-256 where they are made, since they must never change.
    """
    raw = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") >> 2


def pattern_of(name: str, inside: bool = False) -> str:
    """A name with a '*' for each number between dots: the same for all layers of a list.

    With `inside`, numbers inside a part of a name (`fc1`), or in any other text, become a '*' too.
    """
    if inside:
        return re.sub(r"\d+", "*", name)
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def format_count(count: float) -> str:
    """A large number in three digits: 12,900 is "12.9 k"."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 999.5 or unit == "P":
            break
        count /= 1000
    return f"{count:.3g} {unit}".rstrip()


def format_bytes(count: float) -> str:
    """A number of bytes in three digits: "12.9 kB". Units are powers of 1,000."""
    return f"{format_count(count)}B" if abs(count) >= 999.5 else f"{count:.0f} B"


def format_seconds(time: float) -> str:
    """A time in three digits, "1.5 ms", or from one minute on as hours, minutes and seconds, "0:01:30"."""
    if time >= 60:
        return f"{int(time // 3600)}:{int(time // 60 % 60):02d}:{int(time % 60):02d}"
    return f"{time:.3g} s" if time >= 1 else f"{time * 1e3:.3g} ms" if time >= 1e-3 else f"{time * 1e6:.3g} µs"

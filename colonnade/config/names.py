"""Which name was meant: edit distance, near misses of our own keys, and names that only look like one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from colonnade.errors import nearest

# Real names within one edit of a key of ours: a user who writes one of these means it.
_ORDINARY_WORDS = (
    "mode modes model models modal module node nodes size sizes resize side site cover overs type types",
    "seeds seedy speed feed need weed seek seen see shed send sed zeros zeroed zeroes hero aero",
    "async fsync syncs synced sinc schedules scheduler scheduled reschedule flat_steps fat_step",
    "max_tp_size max_pp_size max_dp_size max_sp_size max_cp_size max_op_size",
    "HIDDEN_SIZES SEQ_LENGTHS TENSOR_SHAPES GLOBAL_BATCH_SIZES Model Schedule Seed Sync Log Zero",
)
_ORDINARY = frozenset(word for line in _ORDINARY_WORDS for word in line.split())
_SHORTEST = 4  # below this nearly everything is one edit away
_LONG = 12  # from here on two edits still mean the key


def distance(one: str, other: str) -> int:
    """Return how many insertions, deletions, substitutions or swaps of neighbours lie between two names."""
    before: list[int] = []
    above = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            steps = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                steps = min(steps, before[j - 2] + 1)
            row.append(steps)
        before, above = above, row
    return above[-1]


def near(name: str, known: Iterable[str], limit: int) -> str | None:
    """Return the known name at most `limit` edits from `name`, the most alike first, or None."""
    found = [
        (steps, -difflib.SequenceMatcher(None, name, candidate).ratio(), candidate)
        for candidate in known
        if abs(len(candidate) - len(name)) <= limit and (steps := distance(name, candidate)) <= limit
    ]
    return min(found)[2] if found else None


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """Return the known name that was probably meant where no other name is allowed, or None."""
    return near(name.lower(), known, limit=max(1, len(name) // 4)) or nearest(name, known)


def is_ordinary(name: str, known: Collection[str]) -> bool:
    """Whether `name` is a user's own although it is close to a known one: `seeds`, `model2`, `_zero`."""
    word = name.rstrip("_0123456789")
    numbered = name[-1:].isdigit() and word in known
    marked = "_" not in word and name.rstrip("_") in known
    return name.startswith("_") or word in _ORDINARY or numbered or marked


def near_miss(name: str, known: Collection[str]) -> str | None:
    """Return the key of ours that a top-level key nearly is, or None when it is the user's own.

    Names in one case are compared by edit distance with the keys in that case, others only by spelling
    without regard to case and underscores (`clipGradNorm`). Short keys and UPPER_CASE ones, of which users
    have many, leave less room.
    """
    if is_ordinary(name, known):
        return None
    if not name.islower() and not name.isupper():
        return next((key for key in known if squeezed(key) == squeezed(name)), None)
    alike = [key for key in known if key.isupper() == name.isupper() and len(key) >= _SHORTEST]
    close = near(name, alike, limit=2)
    if close is None:
        return None
    room = 2 if name.islower() and len(close) >= _LONG else 1
    return close if distance(name, close) <= room else None


def squeezed(name: str) -> str:
    """Return `name` in lower case without underscores and hyphens."""
    return name.lower().replace("_", "").replace("-", "")

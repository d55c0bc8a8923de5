"""What ranks tell each other about a step's gradients, so that all of them do the same about the odd ones.

Every rank writes one note per parameter. Nearly always all notes are alike, and a digest shows it; only where
they differ are the notes themselves exchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from colonnade.engine.gradient_handler._party import Party
from colonnade.errors import GradientError

MISSING = 1
"""No gradient on this rank (and zeros in its place in the bucket, if it has one)."""
OUTSIDE = 2
"""A dense gradient beside the bucket: it came late, or the parameter has no bucket yet."""
SPARSE = 4
"""A sparse gradient."""
FROZEN = 8
"""The parameter does not require a gradient on this rank."""


class Agreement:
    """The notes of one party, for all its reductions one after another."""

    def __init__(self, party: Party, sizes: Sequence[int]) -> None:
        self.party = party
        self._sizes = tuple(sizes)
        self._own = b""
        self._reports: list[list[bytes]] | None = None
        self._step = 0

    def announce(self, step: int, notes: Sequence[bytes]) -> None:
        """Tell the others; `notes` is one entry per reduction. Does not wait."""
        self._own, self._step, self._reports = b"".join(notes), step, None
        digest = hashlib.blake2b(self._own, digest_size=8).digest()
        self.party.signal(step.to_bytes(8, "little") + digest)

    def resolve(self) -> list[list[bytes]]:
        """Wait for the others: per reduction, the notes of every rank in party order."""
        if self._reports is None:
            heard = self.party.collect()
            self._check_steps(heard)
            alike = all(message == heard[0] for message in heard)
            whole = [self._own] * self.party.size if alike else self.party.gather_bytes(self._own)
            self._reports = self._split(whole)
        return self._reports

    def _split(self, whole: list[bytes]) -> list[list[bytes]]:
        reports, start = [], 0
        for size in self._sizes:
            reports.append([notes[start : start + size] for notes in whole])
            start += size
        return reports

    def _check_steps(self, heard: list[bytes]) -> None:
        steps = [int.from_bytes(message[:8], "little") for message in heard]
        if len(set(steps)) > 1:
            at = ", ".join(f"rank {rank}: {step}" for rank, step in zip(self.party.ranks, steps, strict=True))
            raise GradientError(
                f"ranks are not in the same gradient synchronisation ({at}); a rank has skipped or repeated one"
            )

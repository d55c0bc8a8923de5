"""Sequence parallelism: attention over sequences whose tokens lie on several ranks, and the way there and back."""

from __future__ import annotations

from colonnade.nn.sequence.parts import Parts, SharedLengths, gather_sequence, sequence_positions, split_sequence
from colonnade.nn.sequence.ring import ring_attention
from colonnade.nn.sequence.ulysses import ulysses_attention

__all__ = [
    "Parts",
    "SharedLengths",
    "gather_sequence",
    "ring_attention",
    "sequence_positions",
    "split_sequence",
    "ulysses_attention",
]

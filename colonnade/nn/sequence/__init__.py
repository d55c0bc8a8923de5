"""Context parallelism (the `sequence` axis): ring and Ulysses attention over sequences split over ranks.

Megatron's sequence parallelism, which shards activations between tensor-parallel blocks, is `sequence_split` of tensor mode
'1d' in `colonnade.nn.layer`.
"""

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

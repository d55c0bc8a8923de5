"""Which keys a query sees: bands and documents, of whole sequences and of the blocks that a ring cuts them into."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

from torch import Tensor

from colonnade.errors import LayoutError
from colonnade.nn.sequence.parts import Parts, Segment


@dataclass(frozen=True)
class Mask:
    """What the queries of one block see of its keys, as flash attention says it.

    The last query and the last key stand at the same place; a query sees `left` keys before its own place and `right`
    behind it (None: all). `documents`: cumulative lengths of runs of as many queries as keys, in which each is by itself.
    """

    left: int | None = None
    right: int | None = None
    documents: tuple[int, ...] | None = None

    @property
    def is_causal(self) -> bool:
        """Whether it is the plain causal mask, if there are as many queries as keys."""
        return self.left is None and self.right == 0 and self.documents is None

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self == Mask()

    def seen(self, row: int, length: int, keys: int) -> range:
        """The keys that a query sees, of a block or a document of so many queries and keys."""
        place = row + keys - length
        first = 0 if self.left is None else max(0, place - self.left)
        return range(first, keys if self.right is None else min(keys, place + self.right + 1))


class AttentionBlock(NamedTuple):
    """A block of attention: the rows of the queries here, the rows of the keys of another rank, and what is seen."""

    queries: slice
    keys: slice
    mask: Mask


@dataclass(frozen=True)
class Sight:
    """What a query sees of its whole sequence: up to itself or all, `window` keys away at most, in its own document."""

    causal: bool = False
    window: int | None = None
    documents: tuple[int, ...] | None = None

    @staticmethod
    def of(causal: bool, window: int | None, documents: Sequence[int] | Tensor | None, total: int) -> Sight:
        """Checked against the length of the whole sequence."""
        if window is not None and window < 0:
            raise LayoutError(
                f"window={window}: the keys that a query sees on each side of it, 0 or more, or None for all"
            )
        if documents is None:
            return Sight(causal, window)
        if isinstance(documents, Tensor):
            if documents.device.type != "cpu":
                raise LayoutError(
                    f"documents lie on {documents.device}, and to read them in every layer would wait for it; give "
                    f"documents.tolist(), read once for all layers"
                )
            documents = documents.tolist()
        ends = tuple(documents)
        if len(ends) < 2 or ends[0] != 0 or ends[-1] != total or any(b <= a for a, b in pairwise(ends)):
            raise LayoutError(
                f"documents={list(ends)}: cumulative lengths from 0 to the {total} tokens of the whole sequence, each more "
                f"than the one before, as [0, {max(1, total // 2)}, {total}]"
            )
        return Sight(causal, window, ends if len(ends) > 2 else None)

    @property
    def is_plain(self) -> bool:
        """Whether there is neither a window nor a document: what scaled_dot_product_attention can say."""
        return self.window is None and self.documents is None

    @property
    def behind(self) -> int | None:
        """How many keys a query sees behind its own."""
        return 0 if self.causal else self.window

    def pieces(self, parts: Parts, at: int, other: int) -> list[AttentionBlock]:
        """What the queries of rank `at` have to attend to of the keys of rank `other`, in as few blocks as can be."""
        mine, theirs = ([run for run in parts.segments[rank] if run.length] for rank in (at, other))
        if not self.is_plain:
            pairs = ((queries, keys) for queries in mine for keys in theirs)
            return [piece for queries, keys in pairs for piece in self._cut(queries, keys)]
        if self.causal and at == other:  # the order of the tokens here is that of the sequence
            return [AttentionBlock(_rows(mine), _rows(mine), Mask(right=0))] if mine else []
        # Queries that see the same keys are one block.
        runs = groupby(mine, lambda run: [keys for keys in theirs if not self.causal or keys.start < run.start])
        return [AttentionBlock(_rows([*queries]), _rows(seen), Mask()) for seen, queries in runs if seen]

    def _cut(self, queries: Segment, keys: Segment) -> Iterator[AttentionBlock]:
        """The part of a block in which something is seen: of one document, or of all of them where both are the same run."""
        if self.documents is None:
            yield from self._band(queries, keys)
        elif queries.start == keys.start:
            inside = [end for end in self.documents if queries.start < end < queries.start + queries.length]
            ends = (0, *(end - queries.start for end in inside), queries.length)
            mask = Mask(self.window, self.behind, ends if inside else None)
            yield AttentionBlock(_rows([queries]), _rows([keys]), mask)
        else:  # Runs that are apart have one document in common, if any.
            at = bisect_right(self.documents, max(queries.start, keys.start))
            document = self.documents[at - 1], self.documents[at]
            yield from self._band(_inside(queries, *document), _inside(keys, *document))

    def _band(self, queries: Segment, keys: Segment) -> Iterator[AttentionBlock]:
        """Without the rows and keys at the edges that see or are seen by nobody: so neither side of a band is negative."""
        left, right = self.window, self.behind
        if left is not None:
            keys = _inside(keys, queries.start - left, keys.start + keys.length)
            queries = _inside(queries, queries.start, keys.start + keys.length + left)
        if right is not None:
            queries = _inside(queries, keys.start - right, queries.start + queries.length)
            keys = _inside(keys, keys.start, queries.start + queries.length + right)
        if queries.length <= 0 or keys.length <= 0:
            return
        ahead = queries.start + queries.length - keys.start - keys.length  # of the last query, over the last key
        if left is not None:
            left = left - ahead if left - ahead < keys.length - 1 else None
        if right is not None:
            right = right + ahead if right + ahead < queries.length - 1 else None
        yield AttentionBlock(_rows([queries]), _rows([keys]), Mask(left, right))


class Turn(NamedTuple):
    """One step round the ring: keys go `ahead` places, and are attended to there."""

    ahead: int
    sent: slice
    """The rows of the keys here that the rank `ahead` needs."""
    received: slice
    """The rows of the keys of the rank as many places before that are needed here."""
    pieces: list[AttentionBlock]
    """What to attend to; its keys are counted from the first that is received."""


@lru_cache(maxsize=256)
def ring_turns(sight: Sight, parts: Parts, at: int) -> list[Turn]:
    """What rank `at` sends, receives and attends to, its own keys first. Every layer of a model asks for the same.

    A turn in which no rank has anything to do is left out; in the others all take part, be it with one row.
    """
    size, turns = len(parts.lengths), []
    for ahead in range(size):
        if ahead and not any(sight.pieces(parts, rank, (rank - ahead) % size) for rank in range(size)):
            continue  # keys far away, and out of the window of all
        before, after = (at - ahead) % size, (at + ahead) % size
        pieces = sight.pieces(parts, at, before)
        received = _needed(pieces, parts.lengths[before])
        first = received.start
        pieces = [piece._replace(keys=slice(piece.keys.start - first, piece.keys.stop - first)) for piece in pieces]
        turns.append(Turn(ahead, _needed(sight.pieces(parts, after, at), parts.lengths[at]), received, pieces))
    return turns


def _needed(pieces: Sequence[AttentionBlock], length: int) -> slice:
    """The rows of keys, of so many, that some piece sees; one if none does."""
    if not pieces:
        return slice(0, min(1, length))
    return slice(min(piece.keys.start for piece in pieces), max(piece.keys.stop for piece in pieces))


def _inside(run: Segment, start: int, stop: int) -> Segment:
    """The part of a run that lies between two positions of the sequence; its length may be 0 or less."""
    first, last = max(run.start, start), min(run.start + run.length, stop)
    return Segment(first, run.local + first - run.start, last - first)


def _rows(runs: Sequence[Segment]) -> slice:
    return slice(runs[0].local, runs[-1].local + runs[-1].length)

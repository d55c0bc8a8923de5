"""Attention masks by windows and documents: of the full sequence (`Sight`), and of the blocks of a ring (`Mask`)."""

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
    """The mask of one block, with the conventions of flash attention.

    The last query and the last key have the same position. A query sees `left` keys before its position and `right`
    keys after it (None: all). `documents`: cumulative lengths of documents, for blocks with as many queries as keys; a
    query sees only its own document.
    """

    left: int | None = None
    right: int | None = None
    documents: tuple[int, ...] | None = None

    @property
    def is_causal(self) -> bool:
        """Whether this is the plain causal mask, for a block with as many queries as keys."""
        return self.left is None and self.right == 0 and self.documents is None

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self == Mask()

    def seen(self, row: int, length: int, keys: int) -> range:
        """Return the keys that query `row` sees, in a block or document of `length` queries and `keys` keys."""
        place = row + keys - length
        first = 0 if self.left is None else max(0, place - self.left)
        return range(first, keys if self.right is None else min(keys, place + self.right + 1))


class AttentionBlock(NamedTuple):
    """One block of attention: local query rows, key rows of one rank, and their mask."""

    queries: slice
    keys: slice
    mask: Mask


@dataclass(frozen=True)
class Sight:
    """The mask of the full sequence: causal or not, limited to `window` keys on each side and to the query's document."""

    causal: bool = False
    window: int | None = None
    documents: tuple[int, ...] | None = None

    @staticmethod
    def of(causal: bool, window: int | None, documents: Sequence[int] | Tensor | None, total: int) -> Sight:
        """Make a mask, after checking it against the length of the full sequence."""
        if window is not None and window < 0:
            raise LayoutError(
                f"window is {window}; pass the number of keys that a query sees on each side, 0 or larger, or None "
                "for all keys"
            )
        if documents is None:
            return Sight(causal, window)
        if isinstance(documents, Tensor):
            if documents.device.type != "cpu":
                raise LayoutError(
                    f"documents is a tensor on {documents.device}, and every layer would have to synchronize to read "
                    "it. Pass documents.tolist(), which is read once for all layers."
                )
            documents = documents.tolist()
        ends = tuple(documents)
        if len(ends) < 2 or ends[0] != 0 or ends[-1] != total or any(b <= a for a, b in pairwise(ends)):
            raise LayoutError(
                f"documents is {list(ends)}; pass increasing cumulative lengths from 0 to the {total} tokens of the "
                f"full sequence, such as [0, {max(1, total // 2)}, {total}]"
            )
        return Sight(causal, window, ends if len(ends) > 2 else None)

    @property
    def is_plain(self) -> bool:
        """Whether the mask has neither a window nor documents, so that scaled_dot_product_attention supports it."""
        return self.window is None and self.documents is None

    @property
    def behind(self) -> int | None:
        """The number of keys that a query sees after its own position; None: all."""
        return 0 if self.causal else self.window

    def pieces(self, parts: Parts, at: int, other: int) -> list[AttentionBlock]:
        """Return the blocks between the queries of rank `at` and the keys of rank `other`, as few as possible."""
        query_runs, key_runs = ([run for run in parts.segments[rank] if run.length] for rank in (at, other))
        if not self.is_plain:
            pairs = ((queries, keys) for queries in query_runs for keys in key_runs)
            return [piece for queries, keys in pairs for piece in self._visible(queries, keys)]
        if self.causal and at == other:  # local tokens are in the order of the sequence, so the plain causal mask holds
            return [AttentionBlock(_rows(query_runs), _rows(query_runs), Mask(right=0))] if query_runs else []
        # Neighbouring queries that see the same keys are one block.
        groups = groupby(
            query_runs, lambda run: [keys for keys in key_runs if not self.causal or keys.start < run.start]
        )
        return [AttentionBlock(_rows([*queries]), _rows(seen), Mask()) for seen, queries in groups if seen]

    def _visible(self, queries: Segment, keys: Segment) -> Iterator[AttentionBlock]:
        """The block of two runs of tokens, restricted to the documents that they share."""
        if self.documents is None:
            yield from self._band(queries, keys)
        elif queries.start == keys.start:
            inside = [end for end in self.documents if queries.start < end < queries.start + queries.length]
            ends = (0, *(end - queries.start for end in inside), queries.length)
            mask = Mask(self.window, self.behind, ends if inside else None)
            yield AttentionBlock(_rows([queries]), _rows([keys]), mask)
        else:  # different runs share at most one document
            at = bisect_right(self.documents, max(queries.start, keys.start))
            document = self.documents[at - 1], self.documents[at]
            yield from self._band(_inside(queries, *document), _inside(keys, *document))

    def _band(self, queries: Segment, keys: Segment) -> Iterator[AttentionBlock]:
        """The block of two runs, without query and key rows that see nothing: kernels need nonnegative sides of a band."""
        left, right = self.window, self.behind
        if left is not None:
            keys = _inside(keys, queries.start - left, keys.start + keys.length)
            queries = _inside(queries, queries.start, keys.start + keys.length + left)
        if right is not None:
            queries = _inside(queries, keys.start - right, queries.start + queries.length)
            keys = _inside(keys, keys.start, queries.start + queries.length + right)
        if queries.length <= 0 or keys.length <= 0:
            return
        # Kernels align the last query with the last key; the real distance of the two is added to the sides of the band. A side
        # that covers the block is None, which lets faster kernels take it.
        ahead = queries.start + queries.length - keys.start - keys.length
        if left is not None:
            left = left - ahead if left - ahead < keys.length - 1 else None
        if right is not None:
            right = right + ahead if right + ahead < queries.length - 1 else None
        yield AttentionBlock(_rows([queries]), _rows([keys]), Mask(left, right))


class Turn(NamedTuple):
    """One step of the ring: each rank sends keys `ahead` ranks forward, and attends to the keys that it receives."""

    ahead: int
    sent: slice
    """The local key rows that the rank `ahead` needs."""
    received: slice
    """The key rows needed from the rank `ahead` places before."""
    pieces: list[AttentionBlock]
    """The blocks to compute; key rows are counted from the first received one."""


@lru_cache(maxsize=256)
def ring_turns(sight: Sight, parts: Parts, at: int) -> list[Turn]:
    """Return the steps of the ring for rank `at`, its own keys first.

    Cached, because all layers of a model have the same steps.

    Steps without work on any rank are left out. In the others every rank sends at least one row, so that sends and
    receives match.
    """
    size, turns = len(parts.lengths), []
    for ahead in range(size):
        if ahead and not any(sight.pieces(parts, rank, (rank - ahead) % size) for rank in range(size)):
            continue  # out of the window of all ranks
        before, after = (at - ahead) % size, (at + ahead) % size
        pieces = sight.pieces(parts, at, before)
        received = _needed(pieces, parts.lengths[before])
        first = received.start
        pieces = [piece._replace(keys=slice(piece.keys.start - first, piece.keys.stop - first)) for piece in pieces]
        turns.append(Turn(ahead, _needed(sight.pieces(parts, after, at), parts.lengths[at]), received, pieces))
    return turns


def _needed(pieces: Sequence[AttentionBlock], length: int) -> slice:
    """The range of key rows that the blocks see, out of `length`; one row if they see none."""
    if not pieces:
        return slice(0, min(1, length))
    return slice(min(piece.keys.start for piece in pieces), max(piece.keys.stop for piece in pieces))


def _inside(run: Segment, start: int, stop: int) -> Segment:
    """The part of a run between two positions of the sequence; its length may be 0 or negative."""
    first, last = max(run.start, start), min(run.start + run.length, stop)
    return Segment(first, run.local + first - run.start, last - first)


def _rows(runs: Sequence[Segment]) -> slice:
    return slice(runs[0].local, runs[-1].local + runs[-1].length)

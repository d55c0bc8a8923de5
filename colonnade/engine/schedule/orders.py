"""Orders: pipeline schedules as pure functions (num_ranks, num_microbatches[, num_chunks]) -> table.

`@ORDERS.register_module` registers a function as an order, which a config can then name: `schedule=dict(type="its_name",
num_microbatches=8)`. Loop orders assign stages to ranks cyclically (0 1 2 3 0 1 2 3); V orders go forth and back (0 1 2 3 3 2 1
0), so that the first and the last stage share a rank. Each order is written after the paper named in its docstring. Zero-bubble
orders assume equal costs of F, I and W.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from colonnade.engine.schedule.actions import Action, Kind, Table, parse_table
from colonnade.engine.schedule.replay import Milestone, milestone, needed, num_stages
from colonnade.errors import ScheduleError, did_you_mean, listed
from colonnade.registry import ORDERS


def make_table(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Table:
    """Make the table of a registered order; for `num_chunks` see `check_chunks`."""
    num_chunks = check_chunks(name, num_chunks)
    for name_of, size in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if size < 1:
            raise ScheduleError(f"a pipeline needs {name_of} of at least 1, not {size}", code="C051")
    chunks = {} if chunks_of(name) else {"num_chunks": num_chunks}
    return parse_table(ORDERS.get_module(name)(num_ranks, num_microbatches, **chunks))


def check_chunks(name: str, num_chunks: int | None = None) -> int:
    """The number of chunks per rank of an order: `num_chunks` if given; else the fixed number of the order, or 2.

    Raises:
        ScheduleError: If the order does not exist, or its fixed number of chunks is not `num_chunks`.
    """
    if name not in ORDERS:
        raise ScheduleError(
            f"no pipeline order {name!r}; known: {listed(ORDERS)}.{did_you_mean(name, ORDERS)} Register your own with "
            "@ORDERS.register_module, or give its table: TableSchedule(table=...).",
            code="C051",
        )
    own = chunks_of(name)
    if num_chunks is not None and own not in (None, num_chunks):
        fitting = [other for other in ORDERS if chunks_of(other) in (None, num_chunks)]
        raise ScheduleError(
            f"order {name!r} has {own} chunk(s) per rank, not {num_chunks}. Set num_chunks={own}, or choose an order with "
            f"{num_chunks}: {listed(fitting)}",
            code="C051",
        )
    return num_chunks or own or 2


def chunks_of(name: str) -> int | None:
    """The fixed number of chunks per rank of an order; None if it takes `num_chunks`."""
    make = ORDERS.get_module(name)
    return None if "num_chunks" in inspect.signature(make).parameters else getattr(make, "chunks_per_rank", 1)


def chunks_per_rank(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: declares that an order has `count` stages per rank. Without it, there is one, or the argument `num_chunks`."""

    def mark(make: Callable[..., Any]) -> Callable[..., Any]:
        make.chunks_per_rank = count  # type: ignore[attr-defined]
        return make

    return mark


# -- loops ------------------------------------------------------------------------------------------------


def loop_stages(num_ranks: int, num_chunks: int) -> list[int]:
    """The rank of each stage in a loop order: 0 1 2 3 0 1 2 3."""
    return [stage % num_ranks for stage in range(num_ranks * num_chunks)]


@ORDERS.register_module
def gpipe(num_ranks: int, num_microbatches: int) -> Table:
    """All forward passes, then all backward passes (Huang et al., GPipe). A rank holds the activations of all micro-batches."""
    return breadth_first(num_ranks, num_microbatches, 1)


@ORDERS.register_module
def breadth_first(num_ranks: int, num_microbatches: int, num_chunks: int) -> Table:
    """GPipe with several chunks per rank (Lamy-Poirier, Breadth-First Pipeline Parallelism).

    All micro-batches pass a chunk before the next chunk starts. A rank holds all micro-batches. With v chunks, the bubble is 1/v of
    GPipe's.
    """
    micro_batches = range(num_microbatches)
    chunks = range(num_chunks)
    return {
        rank: [Action(c * num_ranks + rank, Kind.FORWARD, k) for c in chunks for k in micro_batches]
        + [Action(c * num_ranks + rank, Kind.BACKWARD, k) for c in reversed(chunks) for k in micro_batches]
        for rank in range(num_ranks)
    }


@ORDERS.register_module("1f1b")
def one_f_one_b(num_ranks: int, num_microbatches: int) -> Table:
    """Alternate one forward and one backward pass (1F1B; Narayanan et al., PipeDream-flush).

    A rank holds at most p micro-batches on p ranks.
    """
    return interleaved_1f1b(num_ranks, num_microbatches, 1)


@ORDERS.register_module
def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int) -> Table:
    """1F1B with v chunks per rank (Narayanan et al., Megatron-LM). The bubble is 1/v of the bubble of 1F1B.

    A rank holds about p + (p - 1) / v micro-batches. Any number of micro-batches is allowed: they run in groups of at least p,
    of nearly equal size.
    """
    # With one chunk a rank needs a lead of one micro-batch over the next rank; with several, of two, or the backward pass
    # of the next chunk is late.
    lead = 1 if num_chunks == 1 else 2
    return _one_for_one(num_ranks, num_microbatches, num_chunks, Kind.BACKWARD, lead)


@ORDERS.register_module
def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, num_chunks: int) -> Table:
    """Interleaved 1F1B with a split backward pass: W actions fill the waits. Needs the memory of 1F1B.

    ZB1P of Qi et al., Zero Bubble Pipeline Parallelism.
    """
    table = _one_for_one(num_ranks, num_microbatches, num_chunks, Kind.INPUT, lead=1)
    largest, *_ = _group_sizes(num_ranks, num_microbatches)
    return fill_weights(table, limit=(num_chunks - 1) * largest + num_ranks)


def _one_for_one(p: int, m: int, v: int, backward: Kind, lead: int) -> Table:
    """Warm-up forward passes, then one forward and one backward pass in turn, then the remaining backward passes."""
    largest, *_ = _group_sizes(p, m)
    warm_up = (v - 1) * largest
    table: Table = {}
    for rank in range(p):
        forwards = [Action(c * p + rank, Kind.FORWARD, k) for c, k in _in_groups(p, m, range(v))]
        backwards = [Action(c * p + rank, backward, k) for c, k in _in_groups(p, m, range(v)[::-1])]
        # Enough forward passes first that the gradient of this rank's oldest micro-batch is there when its backward is due.
        ahead = min(len(forwards), warm_up + lead * (p - rank - 1))
        turns = zip(forwards[ahead:], backwards, strict=False)
        in_turn = [action for pair in turns for action in pair]
        table[rank] = forwards[:ahead] + in_turn + backwards[len(forwards) - ahead :]
    return table


def _in_groups(p: int, m: int, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (chunk, micro-batch) in groups: a group of micro-batches goes through all chunks before the next group starts."""
    sizes = _group_sizes(p, m)
    for stop, size in zip(accumulate(sizes), sizes, strict=True):
        for chunk in chunks:
            for micro_batch in range(stop - size, stop):
                yield chunk, micro_batch


def _group_sizes(p: int, m: int) -> list[int]:
    """m micro-batches in groups of at least p (or one group of m), of nearly equal size, larger ones first.

    In a group of fewer than p a rank would wait for its own output to come round, which can deadlock.
    """
    count = max(1, m // p)
    return [m // count + (index < m % count) for index in range(count)]


# -- zero bubble: weight gradients fill the waits -----------------------------------------------------------


def fill_weights(table: Table, limit: int) -> Table:
    """Add a W for every I to a table of F and I, where the rank would wait or would hold the activations of more than `limit`
    chunks.

    Every action counts one tick. The order of F and I on each rank does not change.
    """
    last_stage = num_stages(table) - 1
    todo = {rank: deque(actions) for rank, actions in table.items()}
    weights: dict[int, deque[Action]] = {rank: deque() for rank in table}  # W of the I that have run
    live = Counter[int]()
    filled: Table = {rank: [] for rank in table}
    done: set[Milestone] = set()
    while any([*todo.values(), *weights.values()]):
        # In each tick, a rank takes its next action, or a W if that one must wait or would pass the limit. Milestones of
        # this tick count from the next one on.
        reached: list[Milestone] = []
        for rank in table:
            following = todo[rank][0] if todo[rank] else None
            full = live[rank] >= limit and bool(weights[rank])
            if (
                following is not None
                and not (full and following.kind is Kind.FORWARD)
                and all(need in done for need in needed(following, last_stage))
            ):
                action = todo[rank].popleft()
            elif weights[rank]:
                action = weights[rank].popleft()
            else:
                continue
            filled[rank].append(action)
            live[rank] += (action.kind is Kind.FORWARD) - (action.kind is Kind.WEIGHT)
            if action.kind is Kind.INPUT:
                weights[rank].append(action._replace(kind=Kind.WEIGHT))
            reached += [result for result in [milestone(action)] if result is not None]
        done.update(reached)
    return filled


class _VRow:
    """The row of one rank of a V order, built action by action. Chunk 0 goes down the ranks, chunk 1 comes back."""

    def __init__(self, rank: int, num_ranks: int, num_microbatches: int) -> None:
        self.actions: list[Action] = []
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        self._num_microbatches = num_microbatches
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._weights: deque[Action] = deque()

    def add(self, actions: str, times: int = 1) -> None:
        """Append actions such as "F0 I1 W", `times` times.

        `F0` is the next forward pass of chunk 0, `B0` or `I0` its next backward pass or input gradient, each only if one is
        left. `W` is the oldest weight gradient of an I that has none yet.
        """
        for text in actions.split() * times:
            if text == "W":
                self.actions.append(self._weights.popleft())
                continue
            kind, chunk = Kind(text[0]), int(text[1])
            count = self._forwards if kind is Kind.FORWARD else self._backwards
            if count[chunk] == (self._num_microbatches if kind is Kind.FORWARD else self._forwards[chunk]):
                continue
            self.actions.append(Action(self._stages[chunk], kind, count[chunk]))
            count[chunk] += 1
            if kind is Kind.INPUT:
                self._weights.append(self.actions[-1]._replace(kind=Kind.WEIGHT))

    @property
    def complete(self) -> bool:
        """Whether every micro-batch has had its backward pass in both chunks."""
        return min(self._backwards) == self._num_microbatches


@ORDERS.register_module
@chunks_per_rank(2)
def zb_v(num_ranks: int, num_microbatches: int) -> Table:
    """Zero-bubble V order, with the memory of 1F1B (Qi et al., Pipeline Parallelism with Controllable Memory).

    With p ranks and m >= p micro-batches, a step takes p - 1 ticks more than its work, the minimum for an order that starts at one
    end. For m >= 2p - 1 no rank waits between its first and its last action.
    """
    table: Table = {}
    for rank in range(num_ranks):
        row = _VRow(rank, num_ranks, num_microbatches)
        # Chunk 0 forward, until the first micro-batch comes back up to this rank.
        row.add("F0", 2 * (num_ranks - rank) - 1)
        # Both chunks forward in turn, until the first gradient comes back from rank 0, which has the last stage.
        row.add("F1 F0", rank)
        # Chunk 1 forward and backward in turn, until the first gradient has gone down and reaches chunk 0 here.
        row.add("F1 I1", num_ranks - rank)
        # The steady state; forward passes that are over are left out, and `fill_weights` puts W where a rank would wait.
        while not row.complete:
            row.add("F0 I0 F1 I1")
        table[rank] = row.actions
    return fill_weights(table, limit=2 * num_ranks)


@ORDERS.register_module
@chunks_per_rank(2)
def dualpipe_v(num_ranks: int, num_microbatches: int) -> Table:
    """DualPipe (DeepSeek-AI) as a V order: in the middle of a step, each F is paired with the backward pass of the rank's other
    chunk.

    DualPipe pairs the two to hide communication inside the layers; this implementation runs them one after the other. At least two
    micro-batches per rank are needed to fill the middle.
    """
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipe_v on {num_ranks} ranks needs at least {2 * num_ranks} micro-batches, but num_microbatches is "
            f"{num_microbatches}. Increase num_microbatches, or use order='zb_v', which takes any number.",
            code="C051",
        )
    table: Table = {}
    for rank in range(num_ranks):
        row = _VRow(rank, num_ranks, num_microbatches)
        below = num_ranks - rank - 1
        # Warm-up: until the first micro-batch is back, then both chunks, then the first gradients of chunk 1.
        row.add("F0", 2 * below)
        row.add("F0 F1", rank + 1)
        row.add("I1 W F1", below)
        # The middle, with each F next to the backward pass of the other chunk; at its end chunk 0 has no F left.
        row.add("F0 B1 F1 B0", num_microbatches - 2 * num_ranks + rank + 1)
        row.add("B1 F1 B0", below)
        # In the second half of the drain ranks wait for each other: backward passes are split, and W is kept for then.
        for step in range(2 * (rank + 1)):
            row.add(f"{'B' if step <= rank else 'I'}{1 - step % 2}")
        row.add("W I0", below)
        row.add("W", rank + 1)
        table[rank] = row.actions
    return table

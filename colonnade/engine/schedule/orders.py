"""Orders: the known pipeline schedules as pure functions (ranks, micro-batches, chunks) -> table.

Loop orders lay the stages round and round over the ranks; V orders go down the ranks and come back, so that
the first and the last stage share a rank. Written from the ideas of the papers named at each function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from colonnade.engine.schedule.actions import Action, Kind, Table
from colonnade.engine.schedule.zero_bubble import dualpipe_v, fill_weights, zb_v
from colonnade.errors import ScheduleError, did_you_mean, listed


def loop_stages(num_ranks: int, num_chunks: int = 1) -> list[int]:
    """The rank of each stage when stages go round: 0 1 2 3 0 1 2 3."""
    return [stage % num_ranks for stage in range(num_ranks * num_chunks)]


def v_stages(num_ranks: int, num_chunks: int = 2) -> list[int]:
    """The rank of each stage when stages go down and come back: 0 1 2 3 3 2 1 0."""
    down = list(range(num_ranks))
    return [rank for chunk in range(num_chunks) for rank in (down if chunk % 2 == 0 else down[::-1])]


def gpipe(num_ranks: int, num_micro_batches: int) -> Table:
    """All forward passes, then all backward passes (Huang et al., GPipe). Holds every micro-batch."""
    return breadth_first(num_ranks, num_micro_batches, 1)


def breadth_first(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Table:
    """GPipe with several chunks per rank (Lamy-Poirier, Breadth-First Pipeline Parallelism).

    A chunk sees all micro-batches before the next one does: every micro-batch is held, and the bubble is
    divided by v.
    """
    micro_batches = range(num_micro_batches)
    chunks = range(num_chunks)
    return {
        rank: [Action(c * num_ranks + rank, Kind.FORWARD, k) for c in chunks for k in micro_batches]
        + [Action(c * num_ranks + rank, Kind.BACKWARD, k) for c in reversed(chunks) for k in micro_batches]
        for rank in range(num_ranks)
    }


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Table:
    """One forward, one backward in turn (Narayanan et al., PipeDream-flush): at most p micro-batches held."""
    return interleaved_1f1b(num_ranks, num_micro_batches, 1)


def interleaved_1f1b(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Table:
    """1F1B with several chunks per rank (Narayanan et al., Megatron-LM): the bubble is divided by v.

    Holds about p + (p - 1) / v micro-batches. Takes any number of them: they go round in groups of at least
    p, as equal as can be.
    """
    # With one chunk a rank needs a lead of one micro-batch over the next rank; with several, of two, or the
    # backward pass of the next chunk comes too late.
    lead = 1 if num_chunks == 1 else 2
    return _one_for_one(num_ranks, num_micro_batches, num_chunks, Kind.BACKWARD, lead)


def interleaved_zero_bubble(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Table:
    """Interleaved 1F1B with split backward (ZB1P of Qi et al.): W fills the waits, memory as 1F1B."""
    table = _one_for_one(num_ranks, num_micro_batches, num_chunks, Kind.INPUT, lead=1)
    group = _group_sizes(num_ranks, num_micro_batches)[0]
    return fill_weights(table, limit=(num_chunks - 1) * group + num_ranks)


def _one_for_one(p: int, m: int, v: int, backward: Kind, lead: int) -> Table:
    """Warm-up of forward passes, then one forward and one backward in turn, then the backward passes left."""
    warm_up = (v - 1) * _group_sizes(p, m)[0]
    table: Table = {}
    for rank in range(p):
        forwards = [Action(c * p + rank, Kind.FORWARD, k) for c, k in _in_groups(p, m, range(v))]
        backwards = [Action(c * p + rank, backward, k) for c, k in _in_groups(p, m, range(v)[::-1])]
        ahead = min(len(forwards), warm_up + lead * (p - rank - 1))
        turns = zip(forwards[ahead:], backwards, strict=False)
        in_turn = [action for pair in turns for action in pair]
        table[rank] = forwards[:ahead] + in_turn + backwards[len(forwards) - ahead :]
    return table


def _in_groups(p: int, m: int, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(chunk, micro-batch): a group of micro-batches goes through all chunks before the next group starts."""
    sizes = _group_sizes(p, m)
    for stop, size in zip(accumulate(sizes), sizes, strict=True):
        for chunk in chunks:
            for micro_batch in range(stop - size, stop):
                yield chunk, micro_batch


def _group_sizes(p: int, m: int) -> list[int]:
    """m cut into groups of at least p (or one of m), as equal as can be, larger ones first.

    A group below p would make a rank wait for its own output to come round, and can lock the order up.
    """
    count = max(1, m // p)
    return [m // count + (index < m % count) for index in range(count)]


@dataclass(frozen=True)
class Order:
    """A named order: how its table is made, where its stages lie, how many chunks a rank may have."""

    make: Callable[[int, int, int], Table]
    stages: Callable[[int, int], list[int]] = loop_stages
    min_chunks: int = 1
    max_chunks: int | None = None


ORDERS: dict[str, Order] = {
    "gpipe": Order(lambda p, m, v: gpipe(p, m), max_chunks=1),
    "1f1b": Order(lambda p, m, v: one_f_one_b(p, m), max_chunks=1),
    "interleaved_1f1b": Order(interleaved_1f1b),
    "breadth_first": Order(breadth_first),
    "interleaved_zero_bubble": Order(interleaved_zero_bubble),
    "zb_v": Order(lambda p, m, v: zb_v(p, m), v_stages, min_chunks=2, max_chunks=2),
    "dualpipe_v": Order(lambda p, m, v: dualpipe_v(p, m), v_stages, min_chunks=2, max_chunks=2),
}


def find_order(name: str, num_chunks: int) -> Order:
    """The order called `name`, if it takes so many chunks per rank."""
    if name not in ORDERS:
        raise ScheduleError(
            f"no pipeline order {name!r}; known: {listed(ORDERS)}.{did_you_mean(name, ORDERS)} "
            "Your own order is a table: TableSchedule(table=...)."
        )
    order = ORDERS[name]
    if num_chunks < order.min_chunks or num_chunks > (order.max_chunks or num_chunks):
        fitting = [
            other for other, that in ORDERS.items() if that.min_chunks <= num_chunks <= (that.max_chunks or num_chunks)
        ]
        raise ScheduleError(
            f"order {name!r} has {order.max_chunks} chunk(s) per rank, not {num_chunks}. Set "
            f"num_chunks={order.max_chunks}, or take an order for {num_chunks}: {listed(fitting)}"
        )
    return order


def make_table(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Table:
    """The table of a named order."""
    order = find_order(name, num_chunks)
    for what, size in (("ranks", num_ranks), ("micro-batches", num_micro_batches)):
        if size < 1:
            raise ScheduleError(f"a pipeline needs at least 1 of its {what}, not {size}")
    return order.make(num_ranks, num_micro_batches, num_chunks)

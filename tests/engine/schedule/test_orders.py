"""Every named order against the numbers known for it, and over all small shapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from colonnade.engine.schedule.actions import Kind, Table, format_rows
from colonnade.engine.schedule.orders import check_chunks, chunks_of, chunks_per_rank, loop_stages, make_table, zb_v
from colonnade.engine.schedule.replay import check, simulate
from colonnade.errors import RegistryError, ScheduleError
from colonnade.registry import ORDERS

SHAPES = [(4, 8), (4, 16), (8, 16), (8, 32)]
KNOWN = {
    "gpipe": [(0.273, 8), (0.158, 16), (0.304, 16), (0.179, 32)],
    "1f1b": [(0.273, 4), (0.158, 4), (0.304, 8), (0.179, 8)],
    "breadth_first": [(0.158, 8), (0.086, 16), (0.179, 16), (0.099, 32)],
    "interleaved_1f1b": [(0.158, 5.5), (0.086, 5.5), (0.179, 11.5), (0.099, 11.5)],
    "interleaved_zero_bubble": [(0.059, 4), (0.030, 4), (0.068, 8), (0.035, 8)],
    "zb_v": [(0.059, 4), (0.030, 4), (0.068, 8), (0.035, 8)],
    "dualpipe_v": [(0.059, 4.5), (0.030, 4.5), (0.068, 8.5), (0.035, 8.5)],
}
"""Bubble and peak of live micro-batches at SHAPES, with two chunks where an order has chunks."""
V_ORDERS = ("zb_v", "dualpipe_v")


def v_stages(num_ranks: int) -> list[int]:
    """The rank of each stage when stages go down and come back."""
    return [*range(num_ranks), *reversed(range(num_ranks))]


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("name", KNOWN)
def test_known_bubbles_and_peaks(name: str, shape: int) -> None:
    timeline = simulate(make_table(name, *SHAPES[shape], chunks_of(name) or 2))
    bubble, peak = KNOWN[name][shape]
    assert round(timeline.bubble, 3) == bubble
    assert timeline.max_live == peak


def test_all_orders_have_known_numbers() -> None:
    assert set(KNOWN) == set(ORDERS)


@pytest.mark.parametrize("name", ORDERS)
def test_all_small_shapes_are_valid_and_lie_where_the_order_says(name: str) -> None:
    for num_ranks in range(1, 7):
        for num_microbatches in range(1, 15):
            for num_chunks in [chunks_of(name)] if chunks_of(name) else [1, 2, 3]:
                if name == "dualpipe_v" and num_microbatches < 2 * num_ranks:
                    continue
                table = make_table(name, num_ranks, num_microbatches, num_chunks)
                stage_ranks = v_stages(num_ranks) if name in V_ORDERS else loop_stages(num_ranks, num_chunks)
                assert check(table, num_microbatches=num_microbatches).stage_ranks == tuple(stage_ranks)


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [4, 5, 7, 11])
def test_interleaving_keeps_its_bubble_for_any_number_of_micro_batches(num_microbatches: int, num_chunks: int) -> None:
    timeline = simulate(make_table("interleaved_1f1b", 4, num_microbatches, num_chunks))
    assert timeline.bubble == pytest.approx(3 / (num_chunks * num_microbatches + 3))


@pytest.mark.parametrize("num_microbatches", [4, 5, 7, 8, 9])
def test_zb_v_is_as_short_as_can_be_with_the_memory_of_1f1b(num_microbatches: int) -> None:
    timeline = simulate(make_table("zb_v", 4, num_microbatches, 2))
    assert timeline.makespan == 6 * num_microbatches + 3
    assert timeline.max_live <= 4
    for row in timeline.rows.values() if num_microbatches >= 7 else []:
        assert row[-1].end - row[0].start == len(row)


def test_1f1b_letter_by_letter() -> None:
    assert format_rows(make_table("1f1b", 2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_stage_maps() -> None:
    assert loop_stages(3, 2) == [0, 1, 2, 0, 1, 2]
    assert check(make_table("zb_v", 3, 1)).stage_ranks == (0, 1, 2, 2, 1, 0)


def test_weights_are_split_only_where_the_order_splits() -> None:
    def kinds(table: Table) -> set[Kind]:
        return {action.kind for actions in table.values() for action in actions}

    assert Kind.INPUT not in kinds(make_table("1f1b", 2, 4))
    assert kinds(make_table("zb_v", 2, 4, 2)) == {Kind.FORWARD, Kind.INPUT, Kind.WEIGHT}
    assert Kind.BACKWARD in kinds(make_table("dualpipe_v", 2, 4, 2))


def test_bad_requests_say_what_is_allowed() -> None:
    with pytest.raises(
        ScheduleError, match=r"no pipeline order '1f2b'; known: 1f1b, breadth_first, .*gpipe.*Did you mean '1f1b'"
    ):
        check_chunks("1f2b", 1)
    with pytest.raises(ScheduleError, match=r"'1f1b' has 1 chunk.*not 2.*interleaved_1f1b"):
        make_table("1f1b", 4, 8, 2)
    with pytest.raises(ScheduleError, match=r"'zb_v' has 2 chunk.*not 1.*num_chunks=2"):
        make_table("zb_v", 4, 8, 1)
    with pytest.raises(ScheduleError, match=r"at least 8 micro-batches, but num_microbatches is 7.*zb_v"):
        make_table("dualpipe_v", 4, 7, 2)
    with pytest.raises(ScheduleError, match="needs num_microbatches of at least 1, not 0"):
        make_table("gpipe", 4, 0)
    with pytest.raises(ScheduleError, match="needs num_ranks of at least 1, not 0"):
        make_table("gpipe", 0, 4)


@pytest.fixture
def own_orders() -> Iterator[None]:
    """Orders as a user writes them: rows of text, with one, two or any number of chunks."""

    @ORDERS.register_module("one")
    def one(num_ranks: int, num_microbatches: int) -> list[str]:
        backward = " ".join(f"{{0}}B{k}" for k in range(num_microbatches))
        forward = " ".join(f"{{0}}F{k}" for k in range(num_microbatches))
        return [f"{forward} {backward}".format(rank) for rank in range(num_ranks)]

    ORDERS.register_module("two")(chunks_per_rank(2)(lambda num_ranks, num_microbatches: zb_v(num_ranks, 1)))
    ORDERS.register_module("any")(lambda num_ranks, num_microbatches, num_chunks: [f"chunks: {num_chunks}"])
    yield
    for name in ("one", "two", "any"):
        ORDERS.remove(name)


def test_a_registered_function_is_an_order(own_orders: None) -> None:
    assert make_table("one", 3, 4) == make_table("gpipe", 3, 4)
    assert [chunks_of(name) for name in ("one", "two", "any")] == [1, 2, None]
    assert [check_chunks(name) for name in ("one", "two", "any")] == [1, 2, 2]
    with pytest.raises(ScheduleError, match=r"'one' has 1 chunk.*not 2.*choose an order with 2: any, .*two"):
        make_table("one", 3, 4, 2)
    with pytest.raises(ScheduleError, match="'chunks:' is not an action"):
        make_table("any", 3, 4, 5)
    with pytest.raises(ScheduleError, match="Did you mean 'one'"):
        check_chunks("onne")
    with pytest.raises(RegistryError, match="pipeline order 'zb_v' is registered twice"):
        ORDERS.register_module("zb_v")(lambda num_ranks, num_microbatches: {})

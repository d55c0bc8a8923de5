"""Small messages in a real world: what one rank says, all hear; what fails on one, fails on all."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from colonnade.comm import messages
from colonnade.comm.messages import (
    MustMatch,
    agreed_errors,
    gather_json,
    gather_numbers,
    gather_texts,
    is_same_everywhere,
    message_device,
    share_texts,
)
from colonnade.comm.torch_versions import all_gather_flat, default_store, is_alive, noting_collectives, timeout_of
from colonnade.errors import ColonnadeError, PlacementError
from colonnade.testing import run_world
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def _talk() -> dict[str, object]:
    rank = dist.get_rank()
    heard = {
        "where": message_device(torch.device("meta")).type,
        "texts": gather_texts("é" * rank, CPU),
        "long": gather_texts("é" * 200 * rank, CPU),
        "edges": gather_texts("x" * (messages._SHORT - 1 + rank), CPU),
        "calls": [_calls(length) for length in (messages._SHORT, messages._SHORT + 1)],
        "json": gather_json({"rank": rank, "ranks": [0] * rank}, CPU),
        "numbers": gather_numbers([7 + rank, -rank], CPU),
        "same": [is_same_everywhere(5, CPU), is_same_everywhere(2**61 + rank, CPU)],
        "store": share_texts("test", f"from {rank}", [0, 2]),
    }
    try:
        with agreed_errors(CPU):
            if rank == 1:
                raise PlacementError("wrong here")
    except PlacementError as error:
        heard["error"] = str(error)
    calls: list[str] = []
    with noting_collectives(lambda name, *_: calls.append(name)), agreed_errors(CPU, parts=(1,)) as agreement:
        agreement.require(MustMatch("key", {"a": "b"}, "Do."))
    assert calls == ["all_reduce"]
    some = dist.new_group([1, 2])
    if rank > 0:
        try:
            with agreed_errors(CPU, group=some):
                if rank == 2:
                    raise PlacementError("wrong there")
        except PlacementError as error:
            heard["some"] = str(error)
    try:
        with agreed_errors(CPU, parts=(2,)) as agreement:
            if rank == 2:
                raise OSError("disk full")
            agreement.require(MustMatch("key", {"a": str(rank)}, "Do."))
    except (ColonnadeError, OSError) as error:
        heard["foreign"] = f"{type(error).__name__}: {error}"
    heard["alike"] = [_compare(*tables) for tables in ALIKE]
    return heard


ALIKE = [
    # What each rank says, in which of two parts of the world it is, and the error.
    ([{"a": "1", "b": "2"}] * 3, (0, 1, 0), "sizes [[1], [2, 2]]"),
    ([{"a": "1"}, {"b": "2", "c": "3"}, {"a": "1"}], (0, 1, 0), "sizes [[1], [1, 2]]"),
    (
        [{"a": "1"}, {"a": "1"}, {"a": "9" * 500}],
        (0, 0, 0),
        f"key 'a': 1 on rank 0, {'9' * 500} on rank 2 (differing from",
    ),
    ([{"a": "1"}, {"b": "1"}, {"b": "2"}], (0, 1, 1), "key 'b': 1 on rank 1, 2 on rank 2 (differing from rank 1: 2)"),
    ([{"a": "1"}, {}, {}], (0, 0, 1), "key 'a': 1 on rank 0, nothing on rank 1 (differing from rank 0: 1)"),
    (
        [{"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {}],
        (0, 0, 1),
        "the order: key 'a' on rank 0 is in the place of 'b' on",
    ),
]


def _compare(items: list[dict[str, str]], parts: tuple[int, ...], _: str) -> str:
    rank = dist.get_rank()
    try:
        with agreed_errors(CPU, parts=(1, 2)) as agreement:
            agreement.require(MustMatch("other", {"x": "y"}, "Do."))
            agreement.require(MustMatch("key", items[rank], "Do this.", PlacementError, parts[rank]))
    except PlacementError as error:
        return str(error)
    return f"sizes {agreement.sizes}"


def _calls(length: int) -> int:
    """How many collectives a text of this length takes."""
    calls: list[str] = []
    with noting_collectives(lambda name, *_: calls.append(name)):
        assert gather_texts("x" * length, CPU) == ["x" * length] * 3
    return len(calls)


def test_every_rank_hears_every_message():
    values = run_world(3, _talk).values
    for heard in values:
        assert [text.strip() for text in heard["texts"]] == ["", "é", "éé"]
        assert heard["where"] == "cpu"
        assert heard["edges"] == ["x" * (messages._SHORT + at) for at in (-1, 0, 1)]
        assert heard["calls"] == [1, 2]
        assert heard["long"] == ["", "é" * 200, "é" * 400]
        for told, (*_, part) in zip(heard["alike"], ALIKE, strict=True):
            assert part in told
            assert told.startswith("sizes") or told.endswith("\nDo this. [C005]")
        assert heard["json"] == [{"rank": rank, "ranks": [0] * rank} for rank in range(3)]
        assert heard["store"] == {0: "from 0", 2: "from 2"}
        assert heard["numbers"] == [[7, 0], [8, -1], [9, -2]]
        assert heard["same"] == [True, False]
    assert [heard["error"] for heard in values] == [
        "on rank 1 (this rank is 0): wrong here",
        "wrong here",
        "on rank 1 (this rank is 2): wrong here",
    ]
    assert [heard.get("some") for heard in values] == [None, "on rank 2 (this rank is 1): wrong there", "wrong there"]
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "raise OSError" in text)
    full_at = f'File "{__file__}", line {line}, in _talk'
    assert [heard["foreign"] for heard in values] == [
        f"ColonnadeError: on rank 2 (this rank is 0): OSError: disk full ({full_at})",
        f"ColonnadeError: on rank 2 (this rank is 1): OSError: disk full ({full_at})",
        "OSError: disk full",
    ]


@on_ranks(2)
def test_the_private_names_of_torch_do_what_we_use_them_for():
    group = dist.new_group([0, 1], timedelta(seconds=37))
    received = torch.empty(2)
    all_gather_flat(received, torch.tensor([float(dist.get_rank())]), group=group)
    alive = [is_alive(group)]
    limit = timeout_of(group)
    dist.destroy_process_group(group)
    default_store().set("colonnade/test", "here")
    value = received.tolist(), [*alive, is_alive(group)], limit, default_store().get("colonnade/test")
    assert value == ([0.0, 1.0], [True, False], timedelta(seconds=37), b"here")


@pytest.mark.parametrize("failed", [True, False])
def test_where_a_rank_is_gone_what_was_wrong_here_matters_more(monkeypatch, failed):
    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("connection closed")

    monkeypatch.setattr(messages.dist, "all_reduce", gone)
    monkeypatch.setattr(messages, "message_device", lambda device: device)
    with pytest.raises(PlacementError if failed else RuntimeError), agreed_errors(CPU):  # noqa: PT012
        if failed:
            raise PlacementError("wrong here")

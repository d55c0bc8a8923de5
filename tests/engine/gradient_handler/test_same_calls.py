"""What ranks write down before a collective, and who waits in vain, from one process."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from colonnade.comm.torch_versions import HashStore
from colonnade.engine.gradient_handler import same_calls
from colonnade.engine.gradient_handler.same_calls import SameCalls, find_difference
from colonnade.errors import LedgerError

SUM = "calls all_reduce of 4 elements"


def state(does: str = SUM, calls: int = 1, at: str = "g", ended: bool = False, raised: str = "") -> dict[str, Any]:
    return {"at": at, "does": does, "size": 2, "calls": {"g": calls}, "ended": ended, "raised": raised}


@pytest.mark.parametrize(
    ("other", "quiet", "told"),
    [
        (state(), True, None),
        (state(calls=0, at="", does=""), True, None),  # it is still on its way
        (state("calls broadcast"), False, "rank 1 calls broadcast where rank 0 calls all_reduce"),
        (state(calls=0, at="", does="ends", ended=True), False, r"rank 1 ends where rank 0 .* \(after 0 equal calls"),
        (state(calls=0, at="h") | {"calls": {"h": 1}}, False, None),
        (state("waits", at="h") | {"calls": {"h": 1}}, True, "rank 1 waits where rank 0"),
        (state(calls=0, ended=True, raised="what it said"), False, "^what it said$"),
    ],
)
def test_who_waits_in_vain(other, quiet, told):
    found = find_difference(0, (0, 1), {0: state(), 1: other}, quiet)
    assert found is None if told is None else re.search(told, found or "")


@pytest.mark.parametrize(
    ("error", "does", "raised"),
    [
        (None, "ends handle_gradient()", ""),
        (LedgerError("the handler: ranks differ"), "stops with LedgerError: the handler: ranks differ", "ranks differ"),
        (ValueError("no"), "stops with ValueError: no", ""),
    ],
)
def test_how_a_rank_left_is_written_down(monkeypatch, error, does, raised):
    store = HashStore()
    monkeypatch.setattr(same_calls, "default_store", lambda: store)
    calls = SameCalls("the handler", 3)
    try:
        with calls:
            if error is not None:
                raise error
    except type(error or OSError()):
        pass
    left = json.loads(calls._store.get("rank/3"))
    assert (left["does"], left["raised"], left["ended"]) == (does, raised, True)

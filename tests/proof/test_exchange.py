"""What ranks tell each other in a comparison: every value comes back equal, nothing of it is run, and what cannot travel is an error on all."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import colonnade
from colonnade import ParallelMode
from colonnade.errors import ParityError
from colonnade.proof.compare import Finding, Report, Row
from colonnade.proof.exchange import agreed, gather_to_first, packed, shared, unpacked
from colonnade.proof.record import Piece, Record, RecordedStep, RunInfo, TensorNote
from colonnade.testing import run_world


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    value: int
    more: tuple[int, ...] = ()


class Evil:
    """What a pickle would run."""

    def __reduce__(self) -> Any:
        return print, ("run",)


@dataclass
class Watched:
    value: int = 0
    made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        raise AssertionError("reading a value calls nothing of it")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        1e-300,
        math.inf,
        "é\n$",
        [1, "two", [3.5, None]],
        (1, (2,)),
        {1: "one", "two": (2, 2.0), (3, "x"): None, None: []},
        {1, 2},
        frozenset({"a"}),
        torch.Size([2, 3]),
        torch.bfloat16,
        ParallelMode.TENSOR,
        Pair(1, [2]),
        Frozen(3, (4,)),
        Report([Finding("cause", ("w",), None, "says", 2.0)], [Row("loss", "", 1, "equal", 0.0, 1e-9, (0,))], ["note"]),
    ],
)
def test_values_come_back_equal_and_of_the_same_type(value):
    back = unpacked(packed(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.tensor(2.5, dtype=torch.float64),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([2.0]), (3,)),
        torch.nn.Parameter(torch.randn(2)),
    ],
)
def test_tensors_come_back_to_the_bit(tensor):
    back = unpacked(packed({"it": [tensor, tensor]}))["it"]
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    assert back[0].dtype == plain.dtype
    assert torch.equal(back[0], plain.resolve_conj())
    assert back[0] is back[1]  # one tensor travels once


def test_nan_and_a_record_with_all_it_holds():
    assert math.isnan(unpacked(packed(math.nan)))
    step = RecordedStep(losses=[(0.5, None)], raw={"w": {0: torch.ones(2)}}, total={"w": [Piece(torch.ones(2), None)]})
    note = TensorNote(("w",), (2,), None, "replicated")
    record = Record(3, {"w": note}, {"w": torch.zeros(2)}, steps=[step], run=RunInfo(zeroed={"a", "b"}))
    back = unpacked(packed(record))
    assert (back.rank, back.tensors, back.run) == (3, record.tensors, record.run)
    assert torch.equal(back.steps[0].total["w"][0].value, torch.ones(2))
    assert back.steps[0].losses == [(0.5, None)]


def test_numbers_of_numpy_in_a_batch_travel_as_numbers():
    for given, expected in ((np.int64(3), 3), (np.float32(0.5), 0.5), (np.float64("inf"), math.inf)):
        assert unpacked(packed({"n": given})) == {"n": expected}


def test_an_object_is_made_without_a_call_and_only_of_what_is_loaded():
    watched = object.__new__(Watched)
    watched.value, watched.made = 7, []
    assert unpacked(packed(watched)).value == 7
    for module, name in (("os", "system"), ("subprocess", "Popen"), ("nowhere.loaded", "X"), (__name__, "Evil")):
        text = json.dumps([["object", module, name, [["x", 1]]], []]).encode()
        with pytest.raises(ParityError, match="but this rank has no dataclass or named tuple") as caught:
            unpacked(bytearray(len(text).to_bytes(8, "little") + text))
        assert caught.value.code == "C116"


def test_what_cannot_travel_is_named_with_its_place():
    with pytest.raises(ParityError, match=r"the batch\['x'\]\[1\] is a .*Evil, which cannot be sent .*\[C116\]"):
        packed({"x": [1, Evil()]}, "the batch")


def _talk() -> dict[str, Any]:
    context = colonnade.launch({}, verbose=False)
    rank = context.get_global_rank()
    heard: dict[str, Any] = {}
    found = gather_to_first((rank, torch.full((rank,), float(rank))), context)
    heard["gathered"] = None if found is None else [(number, tensor.tolist()) for number, tensor in found]
    heard["shared"] = shared(context, lambda: Frozen(5))
    for name, act in (
        ("evil", lambda: gather_to_first(Evil() if rank == 1 else 1, context)),
        ("failed", lambda: agreed(context, ValueError("no") if rank == 0 else None)),
    ):
        try:
            act()
        except Exception as error:
            heard[name] = f"{type(error).__name__}: {error}"
    total = torch.ones(1)
    dist.all_reduce(total)  # the ranks are still together
    heard["after"] = total.item()
    context.destroy()
    return heard


def test_ranks_gather_share_and_fail_together():
    first, second = run_world(2, _talk).values
    assert first["gathered"] == [(0, []), (1, [1.0])]
    assert second["gathered"] is None
    assert [heard["shared"] for heard in (first, second)] == [Frozen(5)] * 2
    assert all("the record of rank 1 is a" in heard["evil"] and "[C116]" in heard["evil"] for heard in (first, second))
    assert (first["failed"], second["failed"]) == ("ValueError: no", "ParityError: on rank 0: ValueError: no [C100]")
    assert first["after"] == second["after"] == 2.0

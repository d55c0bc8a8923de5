"""Comparing what ranks are about to call, before they call it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from time import sleep
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colonnade.comm.torch_versions import PrefixStore, default_store, group_of_call
from colonnade.comm.waits import pauses
from colonnade.errors import LedgerError

_COLLECTIVES = ("all", "barrier", "broadcast", "gather", "reduce", "scatter")
_UNEVEN = ("alltoall", "all_to_all", "barrier", "gather", "scatter")
"""Their tensors may have another size on each rank."""
_LOOK_EVERY = 0.25  # seconds
_WORKING = {"at": "", "does": "", "size": None, "ended": False, "raised": ""}


class SameCalls(TorchDispatchMode):
    """Within the block, a collective runs once every rank of its group has come to the same one.

    Where they differ, torch would abort or wait for half an hour. Each rank writes into the store of the world what it
    is about to call. One that waits for the others looks there, now and then, whether they can still come.
    Sends and receives are not compared. Collective over the world: every rank enters the block.
    """

    def __init__(self, who: str, rank: int) -> None:
        super().__init__()
        self.summed: Counter[tuple[int, ...]] = Counter()
        """How many elements went through sums over which ranks."""
        self._who, self._rank, self._calls = who, rank, Counter[str]()
        turn = default_store().add(f"colonnade/probe/{rank}", 1)
        self._store: Any = PrefixStore(f"colonnade/probe/turn {turn}", default_store())
        self._tell()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it become collectives on plain tensors first
        name = re.sub("^all(?=reduce|gather)", "all_", str(getattr(func, "_opname", "")).strip("_"))
        if "c10d" in getattr(func, "namespace", "") and name.startswith(_COLLECTIVES):
            group = group_of_call(args)
            ranks = tuple(dist.get_process_group_ranks(group))
            tensors = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args]
            elements = max(sum(tensor.numel() for tensor in some) for some in tensors)
            if name.startswith(("all_reduce", "reduce")):
                self.summed[ranks] += elements
            size = "" if name.startswith(_UNEVEN) else f" of {elements} element{'s' if elements != 1 else ''}"
            kind = next(str(leaf.dtype).removeprefix("torch.") for some in tensors for leaf in some)
            self._meet(group.group_name, ranks, f"calls {name}{size} ({kind}) over ranks {list(ranks)}")
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        raised = str(error).removeprefix(f"{self._who}: ") if isinstance(error, LedgerError) else ""
        does = f"stops with {kind.__name__}: {error}" if error is not None else "ends handle_gradient()"
        self._tell(does=does, ended=True, raised=raised)

    def _tell(self, **state: Any) -> None:
        """What this rank is about to do, and `at` which group, of which `size`; or how it has `ended`."""
        self._store.set(f"rank/{self._rank}", json.dumps({**_WORKING, "calls": self._calls, **state}))

    def _meet(self, group: str, ranks: tuple[int, ...], does: str) -> None:
        """Return when every rank of the group is here; raise if one cannot come."""
        self._calls[group] += 1
        self._tell(at=group, does=does, size=len(ranks))
        here = f"{group}/{self._calls[group]}/{does}"
        if self._store.add(here, 1) == len(ranks):
            self._store.set(f"{here}/all", "1")
            return
        before: dict[int, Any] = {}
        for pause in pauses(_LOOK_EVERY):
            if self._store.check([f"{here}/all"]):
                return
            sleep(pause)
            if pause < _LOOK_EVERY:
                continue
            states = self._look()
            wrong = find_difference(self._rank, ranks, states, quiet=states == before)
            if wrong is not None:
                raise LedgerError(f"{self._who}: {wrong}", code="C042")
            before = states

    def _look(self) -> dict[int, Any]:
        names = [f"rank/{rank}" for rank in range(dist.get_world_size())]
        return {rank: json.loads(text) for rank, text in enumerate(self._store.multi_get(names))}


def find_difference(rank: int, ranks: Sequence[int], states: Mapping[int, Any], quiet: bool) -> str | None:
    """Why `rank`, which waits for the others of `ranks`, waits in vain; None if they may still come.

    `quiet`: nobody has moved since the last look, so if every rank waits for another, it stays so.
    """
    mine, calls = states[rank], {other: Counter(state["calls"]) for other, state in states.items()}
    group = mine["at"]
    number = calls[rank][group]
    missing = [other for other in ranks if calls[other][group] < number]
    here = [other for other in ranks if states[other]["at"] == group and other not in missing]
    unlike = [other for other in here if states[other]["does"] != mine["does"]]
    ended = [other for other in missing if states[other]["ended"]]
    raised = next((states[other]["raised"] for other in ranks if states[other]["raised"]), None)
    if raised is not None:
        return str(raised)
    stuck = quiet and not any(_can_go_on(at, states[at], calls) for at in states)
    culprits = unlike or ended or (missing if stuck else [])
    if not culprits:
        return None
    culprit, *_ = culprits
    first, second = sorted([rank, culprit])
    return (
        f"rank {second} {states[second]['does']} where rank {first} {states[first]['does']} (after {number - 1} equal "
        f"calls over these ranks); a handler must do the same on every rank"
    )


def _can_go_on(rank: int, state: Mapping[str, Any], calls: Mapping[int, Counter[str]]) -> bool:
    """Whether it is working, or all ranks that it waits for have come."""
    group = state["at"]
    come = sum(theirs[group] >= calls[rank][group] for theirs in calls.values())
    return not state["ended"] and (not group or come == state["size"])

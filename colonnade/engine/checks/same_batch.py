"""Ranks that see the same data must be given the same batches, and all ranks the same form of loss.

Compared in the first steps and then rarely: a digest of what went in, one small collective, and the same error on
every rank. A steady step computes nothing and sends nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from colonnade.comm.messages import digest_of, message_device
from colonnade.comm.torch_versions import gather_rows
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.checks.ordered_sum import ordered_sum
from colonnade.engine.schedule.base import rows_of
from colonnade.engine.schedule.executor.micro_batch import FEED_ALIKE
from colonnade.errors import GradientError, ScheduleError, listed
from colonnade.parallel.checksum import words_of
from colonnade.reduce.uneven import USE_ONE_FORM

_FORMS = ("", "a mean", "(sum, count)")
_SAMPLED = 1 << 16
"""How many elements of a tensor are looked at, evenly spread: another batch differs in nearly all of them."""
_Given = tuple[int, int]
"""(digest, rows)"""


class _Said(NamedTuple):
    """What one rank says of its step: the form of its loss, and digests and rows of what it was given. Zeros: nothing."""

    form: int
    inputs: int
    labels: int
    input_rows: int
    label_rows: int


class SameBatch:
    """Looks at the batches of training steps, and compares them where ranks see the same data.

    Which ranks do is said by the axes of the layout: tensor and pipeline, and axes of your own with `data="same"`. Ranks
    of other axes (data, sequence) have batches, or parts of sequences, of their own.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._alone = context.world_size == 1
        shares = any(axis.data == "same" and axis.size > 1 for axis in context.layout.axes)
        self._looks = shares and context.config.get("compare_batches") is not False
        self._step = 0
        self.training = True
        self._clear()

    @property
    def due(self) -> bool:
        """Whether the step that is under way is compared: steps 0 and 1, and every power of two from 64 on."""
        return self._step < 2 or (self._step >= 64 and self._step.bit_count() == 1)

    def see(self, inputs: Any, labels: Any = None) -> None:
        """Note what a rank was given; does nothing in a step that is not compared."""
        if not (self._looks and self.training and self.due and torch.is_grad_enabled()):
            return
        for seen, given in zip(self._seen, (inputs, labels), strict=True):
            digest = _digest(given)
            if digest is not None:
                seen.append((digest, rows_of(given)))

    def end_step(self, counted: bool | None, whole: bool) -> None:
        """Compare, if it is due. Collective over the world then; all ranks raise, or none.

        `counted`: whether the step's losses were (sum, count), None if there was none. `whole`: whether this rank has
        made all passes of the step; one that has not says nothing.
        """
        if not self._alone and self.due:
            form = 0 if counted is None else 1 + counted
            digests = [digest_of(repr(seen)) * bool(seen) for seen in self._seen]
            rows = [sum(rows for _, rows in seen) for seen in self._seen]
            with self._context.waits.during("comparing the batches"):
                everyone = self._gather(_Said(form, *digests, *rows), whole)
            self._check(everyone)
        self._step += 1
        self._clear()

    def _clear(self) -> None:
        self._seen: tuple[list[_Given], list[_Given]] = [], []
        """Of the passes so far: inputs, labels."""

    def _gather(self, mine: _Said, speaks: bool) -> list[_Said]:
        own = torch.tensor(mine, dtype=torch.int64, device=message_device(self._context.device)) * speaks
        return [_Said(*row) for row in gather_rows(own).tolist()]

    def _check(self, everyone: list[_Said]) -> None:
        forms = {form: [rank for rank, said in enumerate(everyone) if said.form == form] for form in (1, 2)}
        if all(forms.values()):
            told = "; ".join(f"{_FORMS[form]} on ranks {listed(ranks)}" for form, ranks in forms.items())
            raise GradientError(
                f"step {self._step}: the loss is not of one form on all ranks: {told}; {USE_ONE_FORM}", code="C045"
            )
        first: dict[tuple[Any, ...], tuple[int, _Given]] = {}
        for rank, said in enumerate(everyone):
            given = {"inputs": (said.inputs, said.input_rows), "labels": (said.labels, said.label_rows)}
            for what, (digest, rows) in given.items():
                if digest:
                    mine = digest, rows
                    self._compare(what, *first.setdefault((what, *self._place(rank)), (rank, mine)), rank, mine)

    def _place(self, rank: int) -> tuple[int, ...]:
        """Where the rank stands among those that see distinct data."""
        here = self._context.layout.coordinates(rank)
        return tuple(here[axis.name] for axis in self._context.layout.axes if axis.data == "distinct")

    def _compare(self, what: str, other: int, theirs: _Given, rank: int, mine: _Given) -> None:
        if theirs == mine:
            return
        here, there = (self._context.layout.coordinates(each) for each in (rank, other))
        own = (
            " (the groups are not those of the grid, so the place of a rank in the data is "
            "gpc.layout.coordinates(gpc.get_global_rank())['data'])"
            if self._context.layout.places is not None
            else ""
        )
        axes = listed(repr(name) for name in here if here[name] != there[name])
        raise ScheduleError(
            f"step {self._step}: ranks {other} and {rank} differ on the axis {axes} alone, whose ranks see the same data, but "
            f"were given different {what}: {theirs[1]} rows on rank {other}, {mine[1]} on rank {rank}"
            f"{'' if theirs[1] != mine[1] else ', of other content'}. {FEED_ALIKE}{own}. Where the ranks of this axis are meant to "
            f"get different ones, set compare_batches=False in the config",
            code="C044",
        )


@torch.no_grad()
def _digest(given: Any) -> int | None:
    """A number that another batch does not have; None where there are no plain tensors. Waits for them."""
    found = []
    for leaf in tree_leaves(given):
        if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.is_nested or leaf.is_meta:
            continue
        some = leaf.reshape(-1)[:: 1 + leaf.numel() // _SAMPLED].contiguous()
        found.append((leaf.dtype, tuple(leaf.shape), ordered_sum(words_of(some)).item()))
    return digest_of(repr(found)) if found else None

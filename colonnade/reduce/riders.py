"""What ranks tell each other about a step without waiting: a few numbers that ride on a collective that is made anyway.

With NCCL the host runs ahead of the device, and an agreement through the host would hold it up at every step. So ranks
whose gradients come as they always did say nothing but that, in numbers that are summed over the world with the norm.
They are read on the host two steps later. Until then a step in which a rank's gradients came otherwise is dropped
on the device, by all ranks alike: no weight is ever wrong. From then on the ranks agree at every step.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from colonnade.comm.host_copy import HostCopy
from colonnade.errors import GradientError

_LAG = 2
"""After how many steps the numbers are read: the device always has a whole step of work left then."""
_TURNS = 4
DEVIATES, UNSTEADY, TURN = 0, 1, 2
SIZE = TURN + _TURNS


class Riders:
    """The numbers of this rank, and what the world's of two steps ago said. The same decisions on every rank."""

    def __init__(self, device: torch.device) -> None:
        # [deviates][unsteady][turn], ready on the device: nothing is copied there at any step.
        self._all = torch.zeros(2, 2, _TURNS, SIZE, dtype=torch.float64, device=device)
        self._all[1, :, :, DEVIATES] = self._all[:, 1, :, UNSTEADY] = 1.0
        for turn in range(_TURNS):
            self._all[:, :, turn, TURN + turn] = 1.0
        self._step = 0
        self._told: deque[HostCopy] = deque()
        self._uneven = False
        self.quiet = False
        """Whether all ranks have gradients as they always had, so that they need not agree at this step."""

    def begin(self) -> str | None:
        """Before the sums of a step end: decide whether it is a quiet one; what there is to say, if anything."""
        self.quiet, said = False, None
        if len(self._told) < _LAG:
            return None
        deviates, unsteady, *turns = self._told.popleft().read()
        if sum(turn > 0 for turn in turns) > 1:
            raise GradientError(
                f"ranks were not at the same step {_LAG} steps ago; a rank has skipped or repeated one. That step was dropped",
                code="C043",
            )
        if deviates > 0 and not self._uneven:
            self._uneven = True
            said = (
                f"step {self._step - _LAG} was dropped: on some rank other parameters had gradients than in the steps before. "
                f"From now on the ranks agree on that at every step, and none is dropped for it"
            )
        self.quiet = not self._uneven and unsteady == 0
        return said

    def numbers(self, deviates: bool, unsteady: bool) -> Tensor:
        """What this rank says of the step; to be summed (or its maximum taken) over the world."""
        return self._all[int(deviates), int(unsteady), self._step % _TURNS]

    def all_deviate(self, summed: Tensor) -> bool:
        """Asked by a rank that deviates, after `take`: whether all do, and know what to do about it. Waits for the device.

        Then the step is none to be dropped, only one that was not steady.
        """
        numbers = summed[:SIZE].tolist()
        if numbers[DEVIATES] != numbers[TURN + (self._step - 1) % _TURNS]:
            return False
        self._told[-1] = HostCopy(self.numbers(False, unsteady=True))
        return True

    def take(self, summed: Tensor) -> Tensor:
        """What the world says: 1.0 if the step must be dropped, on the device."""
        self._told.append(HostCopy(summed))
        turn = TURN + self._step % _TURNS
        self._step += 1
        others = summed[TURN:].sum() - summed[turn]
        return ((summed[DEVIATES] + others) > 0).float()

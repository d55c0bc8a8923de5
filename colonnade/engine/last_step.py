"""What an engine says of its last step: norms, how much was clipped, whether it was dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from colonnade.comm.host_copy import HostCopy
from colonnade.engine.stepper import Stepper


class LastStep:
    """The part of `Engine` that tells of the last step."""

    _stepper: Stepper
    _failed: bool

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradient norm of the last step before clipping, as a device tensor; None if clipping is off."""
        return self._stepper.last.norm if self._stepper.last is not None else None

    def grad_norms(self) -> dict[str, Tensor]:
        """The norm of every group, layer or parameter at the last step, out of the same collective."""
        return self._stepper.norms()

    @property
    def skipped_steps(self) -> int:
        """How many steps were dropped because their gradient was not finite, or a spike. Waits for the last one."""
        self._stepper.report_skips(wait=True)
        return self._stepper.skips.total

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step was dropped. Waits for its norm."""
        self._stepper.report_skips(wait=True)
        return self._stepper.skips.last

    @property
    def clip_divisor(self) -> Tensor | None:
        """What the last step's gradient was divided by to clip it, at most: 1 if it was not; None if clipping is off."""
        return self._stepper.last.divisor.amax() if self._stepper.last is not None else None

    @property
    def last_skip_flag(self) -> HostCopy | None:
        """Whether the last step was dropped, as a number that is on its way to the host; None before the first."""
        return HostCopy(torch.ones((), device="cpu")) if self._failed else self._stepper.skips.flag

    @property
    def may_skip(self) -> bool:
        """Whether a step may be dropped for its gradient's sake."""
        return self._stepper.policy is not None

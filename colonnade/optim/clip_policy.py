"""Clip policy: which slots make up the total norm, which are clipped by what, and what a bad gradient does.

It stands between the norms of the world and the optimizer step: `decide` turns `Norms` into a divisor per
slot and a flag that is exactly 1.0 when the step must be dropped, all on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from colonnade.comm.host_copy import STEPS_LATE, HostCopy
from colonnade.errors import CheckpointError, ConfigError, GradientError, did_you_mean, listed
from colonnade.optim.blocks import to_device
from colonnade.optim.clip_method import ClipMethod, Measured, divisor_to, positive
from colonnade.optim.norm import Norms

NonFinite = Literal["skip", "raise", "propagate"]


@dataclass(frozen=True)
class ClipGroup:
    """A named set of slots: those of the parameters whose names fit one of `patterns`.

    `counted`: its gradients are part of the total norm. `clipped`: its gradients are divided. With a
    `max_norm` of its own it is clipped by its own norm, else by the total norm and the clip method.
    """

    name: str
    max_norm: float | None = None
    counted: bool = True
    clipped: bool = True
    patterns: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.max_norm is not None:
            positive(f"max_norm of clip group {self.name!r}", self.max_norm)


@dataclass(frozen=True)
class Decision:
    """What to do with this step's gradient; device tensors only, the same bits on every rank.

    `norm` is the total norm before clipping (NaN or inf when it was); `divisor` has one number per slot;
    `found_inf` is exactly 1.0 (drop the step) or 0.0; `nonfinite` says whether a gradient was not finite, which is one
    reason to drop it.
    """

    norm: Tensor
    divisor: Tensor
    found_inf: Tensor
    norms: Norms
    nonfinite: Tensor


class ClipPolicy:
    """Applies a clip method to the counted groups, and the groups' own limits.

    `group_of` gives the group of every slot; `names` names the slots in messages. A non-finite gradient is
    dropped ("skip"), dropped and reported by an error at the next step ("raise"), or used ("propagate").
    `each`: every slot is clipped by its own norm.
    """

    def __init__(
        self,
        method: ClipMethod,
        groups: Sequence[ClipGroup] = (ClipGroup("all"),),
        group_of: Sequence[int] = (0,),
        *,
        names: Sequence[str] | None = None,
        nonfinite: NonFinite = "skip",
        each: bool = False,
    ) -> None:
        _check(groups, group_of, names, nonfinite)
        self.method = method
        self.groups = tuple(groups)
        self.group_of = tuple(group_of)
        self.names = tuple(names or (groups[index].name for index in group_of))
        self.nonfinite, self.each = nonfinite, each
        self._masks = _Masks(self.groups, self.group_of)
        self._reports: deque[HostCopy] = deque()

    @property
    def slots(self) -> int:
        """How many slots the policy expects."""
        return len(self.group_of)

    def decide(self, norms: Norms) -> Decision:
        """The decision for one step. With "raise", reports the step before it if that was not finite."""
        if self.nonfinite == "raise":
            self.raise_pending()
        masks = self._masks.on(norms.sums.device)
        total = norms.total(masks.counted)
        bad = (norms.nonfinite.view(()) if self.slots == 1 else norms.nonfinite.sum()) > 0
        verdict = self.method(Measured(total, norms, bad, self.each))
        divisor = masks.choose(verdict.divisor, norms)
        drop = bad if self.nonfinite != "propagate" else None
        if verdict.skip is not None:
            drop = verdict.skip if drop is None else drop | verdict.skip
        found_inf = total.new_zeros((), dtype=torch.float32) if drop is None else drop.float()
        if self.nonfinite == "raise":
            self._reports.append(HostCopy(norms.nonfinite))
        return Decision(total, divisor, found_inf, norms, bad)

    def raise_pending(self) -> None:
        """With "raise": report non-finite gradients of the step before; on a device, of the second step before.

        So all ranks raise at the same step, and hardly wait; the step itself was dropped, on every rank.
        """
        slots: list[int] = []
        while self._reports and not slots and (self._reports[0].on_host or len(self._reports) >= STEPS_LATE):
            slots = [slot for slot, count in enumerate(self._reports.popleft().read()) if count > 0]
        if slots:
            self._reports.clear()
            names = listed(self.names[slot] for slot in slots)
            raise GradientError(
                f"the gradient of an earlier step was not finite, in: {names}. The step was dropped. "
                "Lower the learning rate or look at its batch; nonfinite='skip' goes on without an error.",
                code="C048",
            )

    def state_dict(self) -> dict[str, Any]:
        """The history of the clip method."""
        return {"method": type(self.method).__name__, "state": self.method.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a history saved by the same method."""
        if state["method"] != type(self.method).__name__:
            raise CheckpointError(
                f"the clip state is of {state['method']}, this run clips with {type(self.method).__name__}; "
                "use the same clip method, or leave the clip state out to start its history anew",
                code="C083",
            )
        self.method.load_state_dict(state["state"])


class _Masks:
    """Constant masks over slots and groups, kept on the device of the norms."""

    def __init__(self, groups: Sequence[ClipGroup], group_of: Sequence[int]) -> None:
        self.plain = all(group == ClipGroup(group.name) for group in groups)
        self.group_of = torch.tensor(group_of, device="cpu")
        of = [groups[index] for index in group_of]
        self._counted = torch.tensor([group.counted for group in of], device="cpu")
        self.clipped = torch.tensor([group.clipped for group in of], device="cpu")
        self.own = torch.tensor([group.max_norm is not None for group in of], device="cpu")
        limits = [group.max_norm or 1.0 for group in groups]
        self.limits = torch.tensor(limits, dtype=torch.float64, device="cpu")
        self.members = torch.tensor(
            [[index == place for index in group_of] for place in range(len(groups))], device="cpu"
        )

    @property
    def counted(self) -> Tensor | None:
        return None if self.plain else self._counted

    def on(self, device: torch.device) -> _Masks:
        if self.own.device != device:
            for name, value in list(vars(self).items()):
                if isinstance(value, Tensor):
                    setattr(self, name, to_device(value, device))
        return self

    def choose(self, divisor: Tensor, norms: Norms) -> Tensor:
        """One divisor per slot, from the method's and the groups' own limits."""
        divisor = divisor.expand(len(self.group_of)) if divisor.dim() == 0 else divisor
        if self.plain:
            return divisor
        by_group = divisor_to(norms.over(self.members), self.limits)
        divisor = torch.where(self.own, by_group[self.group_of], divisor)
        return torch.where(self.clipped, divisor, 1.0)


def _check(groups: Sequence[ClipGroup], group_of: Sequence[int], names: Sequence[str] | None, nonfinite: str) -> None:
    known = get_args(NonFinite)
    if nonfinite not in known:
        raise ConfigError(
            f"nonfinite is one of {listed(known)}, not {nonfinite!r}.{did_you_mean(nonfinite, known)}", code="C003"
        )
    doubled = sorted({group.name for group in groups if [g.name for g in groups].count(group.name) > 1})
    if doubled:
        raise ConfigError(f"clip groups need different names; twice or more: {listed(doubled)}", code="C003")
    if not group_of or not all(0 <= index < len(groups) for index in group_of):
        raise ConfigError(f"every slot needs a group from 0 to {len(groups) - 1}, met {list(group_of)}", code="C003")
    if names is not None and len(names) != len(group_of):
        raise ConfigError(f"{len(group_of)} slots need as many names, met {len(names)}", code="C003")

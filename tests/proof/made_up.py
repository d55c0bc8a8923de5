"""Evidence made by hand: a small world of data, tensor and pipeline ranks, its true gradients, and mistakes to plant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from colonnade.proof.compare import (
    Compared,
    Evidence,
    Forward,
    GradientEvidence,
    LocalValue,
    ParameterInfo,
    StepEvidence,
)

LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Kind:
    """A parameter: `split` over tensor ranks by rows, `partial` (a sum over tensor ranks is owed), or whole on each."""

    shape: tuple[int, ...]
    stages: tuple[int, ...] = (0,)
    split: bool = False
    partial: bool = False


PARAMETERS = {
    "embed.weight": Kind((12, 4), (0, -1)),
    "up.weight": Kind((8, 4), (0,), split=True),
    "up.bias": Kind((8,), (0,), split=True),
    "down.weight": Kind((4, 8), (-1,)),
    "norm.weight": Kind((4,), (-1,), partial=True),
}

Change = Callable[..., Any]


@dataclass
class World:
    """Sizes, and what to change: `plant` maps "raw", "total", "norm", "clipped", "weights" to a function of what is found."""

    data: int = 2
    tensor: int = 1
    pipeline: int = 1
    accumulation: int = 1
    steps: int = 2
    max_norm: float | None = None
    dtype: str = "float64"
    weights_of_shares: tuple[float, ...] | None = None
    seed: int = 0
    plant: Mapping[str, Change] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.ranks = range(self.data * self.tensor * self.pipeline)
        self.parameters = {
            name: replace(kind, stages=tuple(sorted({stage % self.pipeline for stage in kind.stages})))
            for name, kind in PARAMETERS.items()
        }
        self.shares = self.weights_of_shares or (1 / self.data,) * self.data
        self.start = {name: self.numbers(kind.shape) for name, kind in self.parameters.items()}
        self.true = [self._gradients() for _ in range(self.steps)]

    def numbers(self, shape: tuple[int, ...]) -> Tensor:
        """Normal numbers that the dtype can hold."""
        return torch.randn(shape, generator=self.random, dtype=torch.float64).to(getattr(torch, self.dtype)).double()

    def _gradients(self) -> dict[str, list[list[Tensor]]]:
        """By parameter: [share of the batch][pass], each the gradient of a mean."""
        return {
            name: [[self.numbers(kind.shape) for _ in range(self.accumulation)] for _ in range(self.data)]
            for name, kind in self.parameters.items()
        }

    # -- who is where --------------------------------------------------------------------------------------

    def place(self, rank: int) -> tuple[int, int, int]:
        """(data, pipeline, tensor)"""
        return rank // (self.tensor * self.pipeline), rank // self.tensor % self.pipeline, rank % self.tensor

    def groups(self) -> dict[str, list[list[int]]]:
        """As the context names them, with a mode that holds the whole world."""
        found: dict[str, list[list[int]]] = {"GLOBAL": [list(self.ranks)]}
        for mode, at in (("DATA", 0), ("PIPELINE", 1), ("TENSOR", 2)):
            alike: dict[Any, list[int]] = {}
            for rank in self.ranks:
                place = self.place(rank)
                alike.setdefault(place[:at] + place[at + 1 :], []).append(rank)
            found[mode] = list(alike.values())
        return {mode: some for mode, some in found.items() if len(some[0]) > 1}

    def group(self, mode: str, rank: int) -> list[int]:
        """The group of a rank."""
        return next((group for group in self.groups().get(mode, ()) if rank in group), [rank])

    def holders(self, name: str) -> list[int]:
        """The ranks that hold any of a parameter."""
        return [rank for rank in self.ranks if self.place(rank)[1] in self.parameters[name].stages]

    def positions(self, name: str, rank: int) -> Tensor | None:
        """The rows of a split parameter."""
        kind = self.parameters[name]
        if not kind.split or self.tensor == 1:
            return None
        count = torch.Size(kind.shape).numel()
        whole = torch.arange(count).view(kind.shape)
        return whole.chunk(self.tensor, 0)[self.place(rank)[2]]

    def cut(self, name: str, rank: int, whole: Tensor) -> Tensor:
        """What a rank holds of a whole tensor."""
        positions = self.positions(name, rank)
        return whole.clone() if positions is None else whole.flatten()[positions]

    def owed(self, name: str) -> list[tuple[str, tuple[int, ...], float]]:
        """The sums that the raw gradient owes."""
        kind, rank = self.parameters[name], self.holders(name)[0]
        rows = [("DATA", tuple(self.group("DATA", rank)), float(self.data))] if self.data > 1 else []
        if kind.partial and self.tensor > 1:
            rows.append(("TENSOR", tuple(self.group("TENSOR", rank)), 1.0))
        if len(kind.stages) > 1:
            rows.append(("PIPELINE", tuple(self.group("PIPELINE", rank)), 1.0))
        return rows

    # -- what is found -------------------------------------------------------------------------------------

    def truth_of_passes(self, name: str, at: int) -> list[Tensor]:
        """They add up to the gradient."""
        shares = self.true[at][name]
        return [
            sum(self.shares[share] * shares[share][one] for share in range(self.data)) / self.accumulation
            for one in range(self.accumulation)
        ]

    def truth(self, name: str, at: int) -> Tensor:
        """The gradient of one process."""
        return torch.stack(self.truth_of_passes(name, at)).sum(0)

    def raw(self, name: str, at: int, one: int, rank: int) -> Tensor:
        """What the backward pass of a rank gives, scaled as in the total."""
        data, stage, tensor = self.place(rank)
        kind = self.parameters[name]
        whole = self.true[at][name][data][one] * self.shares[data] * self.data / self.accumulation
        count = (self.tensor if kind.partial else 1) * len(kind.stages)
        which = (tensor if kind.partial else 0) * len(kind.stages) + kind.stages.index(stage)
        value = self.cut(name, rank, _piece(whole, which, count))
        return self.planted("raw", value, name=name, at=at, one=one, rank=rank)

    def raw_sum(self, name: str, at: int, rank: int) -> Tensor:
        """Over the passes."""
        return torch.stack([self.raw(name, at, one, rank) for one in range(self.accumulation)]).sum(0)

    def reduced(self, name: str, at: int, rank: int, modes: tuple[str, ...] | None = None) -> Tensor:
        """The sum over these modes (those owed), divided as owed."""
        ranks, divisor = {rank}, 1.0
        for mode, _, by in self.owed(name):
            if modes is None or mode in modes:
                ranks = {other for one in ranks for other in self.group(mode, one) if other in self.holders(name)}
                divisor *= by
        return torch.stack([self.raw_sum(name, at, other) for other in sorted(ranks)]).sum(0) / divisor

    def planted(self, what: str, value: Any, **where: Any) -> Any:
        """What is found, with the mistake."""
        change = self.plant.get(what)
        return value if change is None else change(self, value, **where)

    def noisy(self, value: Tensor) -> Tensor:
        """With the rounding errors of a few operations."""
        eps = torch.finfo(getattr(torch, self.dtype)).eps
        noise = 1 + eps * torch.randn(value.shape, generator=self.random, dtype=torch.float64)
        return (value * noise).to(getattr(torch, self.dtype)).double()

    def compared(self, truth: Tensor, found: Mapping[int, Tensor], name: str = "") -> Compared:
        """With the spread that such noise has."""
        eps = torch.finfo(getattr(torch, self.dtype)).eps
        parts = [
            LocalValue(rank, self.noisy(value), self.positions(name, rank) if name else None)
            for rank, value in found.items()
        ]
        return Compared(truth, parts, spread=eps * float(truth.norm()), terms=64)

    def evidence(self) -> Evidence:
        """The whole comparison."""
        weights = dict(self.start)
        start = {
            name: self.compared(
                whole,
                {r: self.planted("start", self.cut(name, r, whole), name=name, rank=r) for r in self.holders(name)},
                name,
            )
            for name, whole in weights.items()
        }
        own = {name: {r: self.cut(name, r, whole) for r in self.holders(name)} for name, whole in weights.items()}
        steps = [self._step(at, weights, own) for at in range(self.steps)]
        return Evidence(
            world_size=len(self.ranks),
            groups=self.groups(),
            distinct_data=("DATA",),
            parameters={name: self._info(name) for name in self.parameters},
            weights_at_start=start,
            steps=steps,
            dtype=self.dtype,
            accumulation=self.accumulation,
            max_norm=self.max_norm,
            differing_draws={"up": self.planted("masks", ())},
        )

    def _info(self, name: str) -> ParameterInfo:
        kind, owed = self.parameters[name], self.owed(name)
        ledger = [
            f"{name}: {mode} {list(ranks)} / {by:g}, done by Some{mode.title()}Handler" for mode, ranks, by in owed
        ]
        tied = ("head.weight",) if len(kind.stages) > 1 else ()
        placement = "Shard(0) on TENSOR" if kind.split else "replicated"
        return ParameterInfo(placement, ledger, owed, tied)

    def _step(self, at: int, weights: dict[str, Tensor], own: dict[str, dict[int, Tensor]]) -> StepEvidence:
        """Both sides of one step; `weights` and `own` go on to the next."""
        truths = {name: self.truth(name, at) for name in self.parameters}
        started = {
            name: {r: self.planted("started", value, name=name, at=at, rank=r) for r, value in own[name].items()}
            for name in self.parameters
        }
        changed = {
            name: self.compared(weights[name], found, name)
            for name, found in started.items()
            if any(not torch.equal(value, own[name][r]) for r, value in found.items())
        }
        totals = {
            name: {
                r: self.planted("total", self.reduced(name, at, r), name=name, at=at, rank=r)
                for r in self.holders(name)
            }
            for name in self.parameters
        }
        norm = sqrt(sum(float(whole.norm()) ** 2 for whole in truths.values()))
        found_norm = [self.planted("norm", norm, at=at, rank=r, totals=totals) for r in self.ranks]
        gradients, after = {}, {}
        for name, whole in truths.items():
            share = self.coefficient(norm)
            clipped = {
                r: self.planted(
                    "clipped", self.coefficient(found_norm[r]) * value, name=name, at=at, rank=r, total=value
                )
                for r, value in totals[name].items()
            }
            before = weights[name]
            weights[name] = before - LEARNING_RATE * share * whole
            for r, value in clipped.items():
                moved = own[name][r] - LEARNING_RATE * value
                own[name][r] = self.planted("weights", moved, name=name, at=at, rank=r, before=own[name][r])
            raw = [
                [LocalValue(r, self.raw(name, at, one, r), self.positions(name, r)) for r in self.holders(name)]
                for one in range(self.accumulation)
            ]
            gradients[name] = GradientEvidence(
                total=self.compared(whole, totals[name], name),
                raw=raw,
                truth_of_passes=self.truth_of_passes(name, at),
                truth_of_data_ranks=[
                    self.planted("of_data_rank", torch.stack(some).mean(0)) for some in self.true[at][name]
                ],
                clipped=self.compared(share * whole, clipped, name) if self.max_norm is not None else None,
            )
            after[name] = self.compared(weights[name], own[name], name)
        activation = self.numbers((3, 4))
        names = ("embed", "up", "down")
        return StepEvidence(
            loss=1.5,
            found_loss=[self.planted("loss", 1.5, at=at, rank=r) for r in self.ranks],
            gradients=gradients,
            weights=after,
            buffers={"norm.mean": self._whole("buffer", activation, "norm.mean", at)},
            activations={name: self._whole("activation", activation, name, at) for name in names},
            recomputed={name: self._whole("recomputed", activation, name, at) for name in names[1:2]},
            norm=norm,
            found_norm=found_norm,
            forward=Forward(rows=self.planted("rows", None)),
            changed=changed,
            changed_on={
                name: tuple(r for r, value in started[name].items() if not torch.equal(value, own[name][r]))
                for name in changed
            },
            loss_spread=1.5 * torch.finfo(getattr(torch, self.dtype)).eps,
        )

    def _whole(self, what: str, truth: Tensor, name: str, at: int) -> Compared:
        found = {r: self.planted(what, truth, name=name, at=at, rank=r) for r in self.ranks}
        return self.compared(truth, found)

    def coefficient(self, norm: float) -> float:
        """What clipping multiplies by."""
        return 1.0 if self.max_norm is None else min(1.0, self.max_norm / (norm + 1e-6))


def _piece(whole: Tensor, which: int, count: int) -> Tensor:
    """One of `count` unlike tensors that add up to the whole."""
    if count == 1:
        return whole
    shares = torch.linspace(0.1, 1.0, count, dtype=torch.float64)
    waves = [
        torch.cos(torch.arange(whole.numel(), dtype=torch.float64) * (at + 1)).view_as(whole) for at in range(count)
    ]
    pieces = [share / shares.sum() * whole + wave for share, wave in zip(shares, waves, strict=True)]
    pieces[-1] = whole - torch.stack(pieces[:-1]).sum(0)
    return pieces[which]

"""The first difference between two runs of one script, for `verify --resume` and `verify --races`.

Both modes compare a script with itself, so there is no single-process run. Values are compared in the order in which a step
computes them, and the first difference is the answer: later ones follow from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from colonnade.proof.record import Piece, Record, RecordedStep
from colonnade.proof.reference import data_rank_batches, join

ROUNDING = 1e4
"""The largest relative difference of computed values, in units of the rounding error of the dtype, if runs have different layouts."""

WEIGHT, STATE, OUTPUT, GENERATORS = (
    "weight at the start",
    "optimizer state",
    "output of module",
    "state of torch's random numbers",
)
_RESULTS = (WEIGHT, STATE)
Values = dict[str, Tensor]


@dataclass(frozen=True)
class FirstDifference:
    """The first value that differs between two runs."""

    step: int
    quantity: str
    name: str
    """The tensor, module or place; empty if the quantity has none."""
    error: float
    """The norm of the difference divided by that of the value; inf: missing in one run, or of another shape."""
    is_loaded: bool = False
    """Whether the value must be the same bits, because it is read and not computed."""

    def __str__(self) -> str:
        named = f"{self.quantity} {self.name}".strip()
        far = (
            "is missing in one run, or has another shape"
            if self.error == torch.inf
            else f"differs by {self.error:.2g} of its size"
        )
        return f"in step {self.step}, {named} {far}"


@dataclass(frozen=True)
class RunsReport:
    """The result of `verify --resume` or `verify --races`."""

    headline: str
    difference: FirstDifference | None = None
    sentence: str = ""
    """The meaning of the difference."""
    uncertain: str = ""
    """The reason why the runs cannot be compared."""
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether all compared values are equal."""
        return self.difference is None and not self.uncertain

    @property
    def is_uncertain(self) -> bool:
        """Whether the runs cannot be compared."""
        return bool(self.uncertain)

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=1, default=str)

    def __str__(self) -> str:
        found = [] if self.difference is None else [f"{self.difference}: {self.sentence}"]
        return "\n".join(
            [
                self.headline,
                *([self.uncertain] if self.uncertain else []),
                *found,
                *(f"note: {note}" for note in self.notes),
            ]
        )


def first_difference(
    one: Sequence[Record],
    other: Sequence[Record],
    start: int = 0,
    tolerance: float = 0.0,
    only: Sequence[int] | None = None,
) -> FirstDifference | None:
    """Return the first value of `other` that differs from that of `one`; None if all are equal.

    Args:
        one: The records of the ranks of a run.
        other: Those of another run of the script, with the same or another layout.
        start: The step of `one` that the first step of `other` repeats.
        tolerance: The relative difference up to which computed values count as equal. Loaded values must be equal in each bit.
        only: The steps of `other` that are compared; default: all.
    """
    is_same_layout = len(one) == len(other)
    count = min(len(one[0].steps) - start, len(other[0].steps))
    for at in range(count) if only is None else only:
        # A resumed run may skip the batches of the steps before, so only the last ones that it takes before its first step count.
        most = {place: len(_taken(one[0], place, start + at)) for place in _places(one[0])} if start and not at else {}
        pairs = zip(
            _step_values(one, start + at, is_same_layout), _step_values(other, at, is_same_layout, most), strict=True
        )
        for (quantity, is_loaded, a), (_, _, b) in pairs:
            # After the first compared step, weights and state are results of a step. Outputs are recorded in the first step of a run.
            is_loaded = is_loaded and (not at or quantity not in _RESULTS)
            if quantity == OUTPUT and not (a and b):
                continue
            for name in [*a, *(name for name in b if name not in a)]:
                error = distance(a.get(name), b.get(name))
                if error > (0.0 if is_loaded else tolerance):
                    return FirstDifference(start + at, quantity, name, error, is_loaded)
    return None


def distance(a: Tensor | None, b: Tensor | None) -> float:
    """Return the norm of the difference relative to the larger norm; inf for other shapes, and for NaN in one of them."""
    if a is None or b is None or a.shape != b.shape:
        return torch.inf
    if torch.equal(a, b) or (
        a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num()) and bool((a.isnan() == b.isnan()).all())
    ):
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    found = float((a.to(wide) - b.to(wide)).norm() / max(float(a.to(wide).norm()), float(b.to(wide).norm()), 1e-300))
    return found if found == found else torch.inf


def _step_values(
    records: Sequence[Record], at: int, by_rank: bool, most: Mapping[str, int] | None = None
) -> Iterator[tuple[str, bool, Values]]:
    """Yield (quantity, whether it is loaded, values by name) of a step, in the order of the step.

    `by_rank`: runs with the same layout are compared rank by rank, others as full tensors. `most`: the number of batches that count at each
    place, the last ones.
    """
    yield "batch", True, _batches(records, at, by_rank, most or {})

    def full(of: Callable[[Record], Mapping[str, Any]]) -> Values:
        return _joined(records, of, by_rank)

    yield WEIGHT, True, full(lambda record: _weights_before(record, at))
    yield (
        STATE,
        True,
        full(lambda record: {f"{key} of {name}": x for (key, name), x in record.steps[at].state.items()}),
    )
    yield "optimizer option", True, _options(records[0].steps[at])
    if by_rank:
        seen = {f"on rank {r.rank}": x for r in records if (x := r.steps[at].generators) is not None}
        yield GENERATORS, True, seen
        yield OUTPUT, False, full(lambda record: record.steps[at].activations)
    yield "loss", False, _losses(records, at)
    yield "gradient of", False, full(lambda record: record.steps[at].total or record.steps[at].stepped)
    norm = records[0].steps[at].norm
    yield "gradient norm", False, {} if norm is None else {"": torch.tensor(norm, dtype=torch.float64)}
    yield "updated weight", False, full(lambda record: {**record.steps[at].weights, **record.steps[at].buffers})


def _weights_before(record: Record, at: int) -> Mapping[str, Tensor]:
    before = {**record.steps[at - 1].weights, **record.steps[at - 1].buffers} if at else record.start
    return {**before, **record.steps[at].changed}


def _joined(records: Sequence[Record], of: Callable[[Record], Mapping[str, Any]], by_rank: bool) -> Values:
    found: Values = {}
    for record in reversed(records):
        for name, given in of(record).items():
            note = record.tensors.get(name.rpartition(" of ")[2])
            for piece in given if isinstance(given, list) else [Piece(given, None if note is None else note.positions)]:
                if by_rank:
                    found[f"{name} on rank {record.rank}"] = piece.value
                elif piece.positions is None or note is None or piece.value.numel() != piece.positions.numel():
                    found[name] = piece.value
                else:
                    whole = found.setdefault(name, torch.zeros(note.shape, dtype=piece.value.dtype))
                    whole.view(-1)[piece.positions.flatten()] = piece.value.reshape(-1)
    return found


def _options(step: RecordedStep) -> Values:
    return {
        f"{key} of group {number}": torch.tensor(value, dtype=torch.float64)
        for number, group in enumerate(step.options)
        for key, value in group.items()
    }


def _losses(records: Sequence[Record], at: int) -> Values:
    some = [[loss[0] for loss in record.steps[at].losses if loss is not None] for record in records]
    means = [sum(losses) / len(losses) for losses in some if losses]
    return {"": torch.tensor(sum(means) / len(means), dtype=torch.float64)} if means else {}


def _batches(records: Sequence[Record], at: int, by_rank: bool, most: Mapping[str, int]) -> Values:
    """The batches of a step: by rank, or the sums of the rows of the global batch, in ascending order."""
    found: Values = {}
    for key in _places(records[0]):
        if key == "criterion":
            continue
        taken = [_taken(record, key, at) for record in records]
        taken = [values[-most[key] :] if most.get(key) else values for values in taken]
        if by_rank:
            for rank, values in enumerate(taken):
                for number, leaf in enumerate(x for x in tree_leaves(values) if isinstance(x, Tensor)):
                    found[f"{number} of {key} on rank {rank}"] = leaf
            continue
        rows: list[Tensor] = []
        for of_ranks in zip(*taken, strict=False):
            parts = data_rank_batches(list(of_ranks), [record.run for record in records])
            whole = join(parts)
            rows += [
                leaf
                for leaf in tree_leaves(parts if whole is None else whole)
                if isinstance(leaf, Tensor) and leaf.dim()
            ]
        if rows:
            found[f"of {key}"] = (
                torch.cat([leaf.double().flatten(1).sum(1) if leaf.dim() > 1 else leaf.double() for leaf in rows])
                .sort()
                .values
            )
    return found


def _places(record: Record) -> list[str]:
    """The places at which batches came in. All loaders are one, because a resumed run may make others."""
    return list(dict.fromkeys("loader" if key.startswith("loader") else key for key in record.run.given))


def _taken(record: Record, place: str, step: int) -> list[Any]:
    """The batches that came in at a place in a step."""
    return [
        value
        for key, values in record.run.given.items()
        if key == place or (place == "loader" and key.startswith(place))
        for value, number in zip(values, record.run.given_in[key], strict=True)
        if number == step
    ]

"""Where a recorded forward pass can be cut, and what then goes from stage to stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch.utils._pytree import TreeSpec

from colonnade.parallel.own_forward.recorder import Recording, Value


@dataclass(frozen=True)
class Part:
    """What one stage does: the calls from `first` on, until the call `stop` is about to be made."""

    first: int
    stop: int
    names: tuple[str, ...]
    """The unit of every call of the pass."""
    forms: tuple[TreeSpec | None, ...]
    """The form of what each call returns; None for calls that every stage makes itself."""
    takes: tuple[int, ...]
    """The values that come from the stage before, by number."""
    gives: tuple[int, ...]
    """Those that go to the next."""
    reads: dict[int, dict[str, int]] = field(default_factory=dict)
    """By call: the places in its arguments where values are that came from the stage before."""
    keeps_inputs: dict[int, dict[str, int]] = field(default_factory=dict)
    """By call: the places in its arguments of values that the next stage takes."""
    keeps_outputs: dict[int, dict[int, int]] = field(default_factory=dict)
    """By call: which leaves of its result the next stage takes."""

    def __deepcopy__(self, memo: object) -> Part:
        return self


def possible_cuts(recording: Recording) -> list[int]:
    """The calls that a stage can begin with; the first is 0."""
    return [0, *(at for at in range(1, len(recording.calls)) if not why_no_cut(recording, at))]


def why_no_cut(recording: Recording, at: int) -> str:
    """Why no stage can begin with this call; empty if one can."""
    call = recording.calls[at]
    if call.form is None or not call.inputs:
        return f"{call.name!r} takes nothing of what comes before it"
    known = {number for number, _ in _met_before(recording, at)}
    for what, value in _needed(recording, at):
        if value.made >= call.time or value.number not in known:
            return f"{what} uses more of what comes before {call.name!r} than layers are given or return"
    old = [value for value in recording.results if value.oldest < call.time]
    return f"the model returns something that comes from before {call.name!r}" if old else ""


def _needed(recording: Recording, at: int) -> Iterator[tuple[str, Value]]:
    """What calls from `at` on are given that comes from before it, with the name of who is given it."""
    begin = recording.calls[at].time
    for call in recording.calls[at:]:
        for value in call.inputs.values() if call.form is not None else ():
            if value.oldest < begin:
                yield repr(call.name), value


def _met_before(recording: Recording, at: int) -> Iterator[tuple[int, tuple[int, str | int]]]:
    """(number of a value, (call, place)) for all that calls before `at` are given and return, and that it is given."""
    for index, call in enumerate(recording.calls[: at + 1]):
        yield from ((value.number, (index, place)) for place, value in call.inputs.items())
        if index < at:
            yield from ((value.number, (index, leaf)) for leaf, value in enumerate(call.outputs) if value is not None)


def parts_of(recording: Recording, firsts: Sequence[int]) -> list[Part]:
    """The stages that begin with these calls, all of them possible cuts."""
    names = tuple(call.name for call in recording.calls)
    forms = tuple(call.form for call in recording.calls)
    taken = [tuple(dict.fromkeys(value.number for _, value in _needed(recording, at))) if at else () for at in firsts]
    parts = []
    for index, (first, stop) in enumerate(pairwise([*firsts, len(names)])):
        gives = taken[index + 1] if index + 1 < len(taken) else ()
        part = Part(first, stop, names, forms, taken[index], gives)
        for at in range(first, stop):
            found = {place: v.number for place, v in recording.calls[at].inputs.items() if v.number in part.takes}
            if found:
                part.reads[at] = found
        for number, (at, place) in _met_before(recording, stop) if gives else ():
            if number in gives and number not in part.takes and at >= first:
                keeps = part.keeps_inputs if isinstance(place, str) else part.keeps_outputs
                keeps.setdefault(at, {})[place] = number  # type: ignore[index]
        parts.append(part)
    return parts

"""Compares the weights that the ranks start from with those that the script starts from in a single process.

The single process gets the weights of the ranks, so shards that were loaded in the wrong order, by the wrong rank or on
one rank only are wrong in both runs. The weights that the script itself made in a single process reveal this:
`own_start` keeps them before they are replaced, and `judge_start` compares. Constant weights reveal nothing, and random
ones need the same seed and order of draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from colonnade.errors import listed
from colonnade.parallel.placement import local_part
from colonnade.proof.compare import Finding, short_ranks
from colonnade.proof.record import OwnStart, Record, copied
from colonnade.proof.sketch import sketches


def own_start(model: nn.Module, start: Mapping[str, Tensor], rename: Callable[[str], str]) -> OwnStart:
    """Compare the weights that the script made in a single process with the joined weights of the ranks (`start`)."""
    found = OwnStart()
    for name, parameter in model.named_parameters():
        own, joined = local_part(parameter.detach()).cpu(), start.get(rename(name))
        if joined is None or joined.shape != own.shape or not own.is_floating_point() or is_constant(own):
            continue
        found.order.append(rename(name))
        if torch.equal(own, joined):
            found.agreeing.append(rename(name))
        else:
            found.differing[rename(name)] = copied(own)
    return found


def is_constant(tensor: Tensor) -> bool:
    """Return whether a tensor has at most two distinct values, as biases, gains and identities have at the start."""
    return len(tensor.detach().flatten()[:4096].unique()) <= 2


@dataclass
class StartParts:
    """A weight with different initial values: its parts on the ranks, and the same parts of the single-process weight."""

    name: str
    found: dict[int, Tensor] = field(default_factory=dict)
    own: dict[int, Tensor] = field(default_factory=dict)
    places: dict[int, Tensor | None] = field(default_factory=dict)

    @property
    def right(self) -> list[int]:
        """The ranks whose part of the weight equals the same part of the single-process weight."""
        return [rank for rank, value in self.found.items() if torch.equal(value, self.own[rank])]

    def same_place(self, a: int, b: int) -> bool:
        """Return whether two ranks store the same part."""
        first, second = self.places[a], self.places[b]
        return first is second if first is None or second is None else torch.equal(first, second)


def judge_start(records: Sequence[Record], own: OwnStart) -> tuple[list[Finding], list[str]]:
    """Return findings and notes about initial weights that differ between the ranks and the script in a single process."""
    if not own.differing:
        return [], []
    differing = list[StartParts]()
    for name, whole in own.differing.items():
        parts = StartParts(name)
        for record in records:
            if name in record.start and not is_constant(record.start[name]):
                places = record.tensors[name].positions
                flat = whole.flatten()
                parts.found[record.rank] = record.start[name].flatten()
                if name in record.run.sketched:
                    parts.own[record.rank] = sketches(whole, [record.run.sketched[name]])
                else:
                    parts.own[record.rank] = flat if places is None else flat[places.flatten()]
                parts.places[record.rank] = None if places is None else places.flatten()
        if parts.found:
            differing.append(parts)
    wrong_on = {rank for parts in differing for rank in parts.found if rank not in parts.right}
    has_right = any(parts.right for parts in differing)
    known: dict[str, tuple[Tensor, str]] = {}
    for record in records:
        for name, value in record.start.items():
            known.setdefault(name, (value, name))

    findings: dict[str, list[StartParts]] = {}
    unrelated = list[StartParts]()
    sentences: dict[str, tuple[str, str]] = {}

    def add(key: str, parts: StartParts, what: str, where: str) -> None:
        findings.setdefault(key, []).append(parts)
        sentences.setdefault(key, (what, where))

    for parts in differing:
        wrong = [rank for rank in parts.found if rank not in parts.right]
        # Ranks that store different parts of a weight, with the same numbers in them.
        twins = [
            (a, b)
            for a in parts.found
            for b in wrong
            if a != b
            and not parts.same_place(a, b)
            and parts.found[a].shape == parts.found[b].shape
            and torch.equal(parts.found[a], parts.found[b])
            and not torch.equal(parts.own[a], parts.own[b])
        ]
        # Ranks with the part of another rank.
        swapped = [
            (rank, other)
            for rank in wrong
            for other in parts.found
            if not parts.same_place(rank, other)
            and parts.found[rank].shape == parts.own[other].shape
            and torch.equal(parts.found[rank], parts.own[other])
        ]
        # Weights with the numbers of another weight, as those of pipeline stages that draw from one seed.
        same_as = [
            name
            for name, (value, _) in known.items()
            if name != parts.name
            and any(
                value.numel() == mine.numel() and torch.equal(value.flatten(), mine) for mine in parts.found.values()
            )
        ]
        if twins:
            ranks = short_ranks(sorted({rank for pair in twins for rank in pair}))
            what = f"has equal shards on ranks {ranks}, which are different shards in a single process"
            add(f"twins {ranks}", parts, what, "the random seed of each rank, and at the shard that each rank loads")
        elif len({rank for rank, _ in swapped}) == len(wrong):
            rank, other = swapped[0]
            what = f"has its shards in another order: rank {rank} has the shard of rank {other}"
            add(
                "swapped",
                parts,
                what,
                "the rank, or the index in its process group, by which each rank chooses its shard",
            )
        elif parts.right and all(rank not in wrong_on for rank in parts.right):
            what = f"agrees with the script only on {_ranks(parts.right)}, not on {_ranks(wrong)}"
            add(f"some {parts.right} {wrong}", parts, what, "which ranks load weights, and whether the others get them")
        elif factor := _factor(parts):
            what = f"is {factor:.6g} times that of the script in a single process"
            add(
                f"times {factor:.6g}", parts, what, "the scale with which it is drawn: a fan is that of the full weight"
            )
        elif same_as:
            what = f"has the same values as {listed(sorted(same_as)[:3])}, but not in a single process"
            add(
                "stages",
                parts,
                what,
                "the random seed of each pipeline stage, and at the weights that each stage loads",
            )
        else:
            unrelated.append(parts)

    # Weights with other numbers everywhere. Shards may be drawn with a seed for each rank. After them a generator is in another
    # state than in a single process, so all later random weights differ. If a later weight agrees, that is not the reason, nor
    # if all ranks have all weights.
    order = [*own.order]
    last = max((order.index(name) for name in own.agreeing), default=-1)
    full = all(note.positions is None for record in records for note in record.tensors.values() if note.is_parameter)
    full = full and all(record.tensors.keys() == records[0].tensors.keys() for record in records)
    loaded = [
        parts
        for parts in unrelated
        if own.agreeing and (full or order.index(parts.name) < last)
        if all(places is None for places in parts.places.values())
    ]
    if loaded:
        what = f"has different values on the ranks than in a single process, although {_count(len(own.agreeing))} are the same"
        findings["loaded"], sentences["loaded"] = loaded, (what, "the rank that loads it, and at what it loads")
    others = [parts for parts in unrelated if parts not in loaded]
    notes = []
    if others:
        some = "none of them is equal" if not own.agreeing else "others are equal"
        notes.append(
            f"{_names(others)} {'start' if len(others) > 1 else 'starts'} from different values on the ranks than in "
            f"a single process, and {some}: the seed or the order of random draws depends on the ranks. If weights "
            f"are loaded, check them"
        )

    found = []
    is_known = bool(own.agreeing) or has_right or "swapped" in findings
    for key, alike in findings.items():
        what, where = sentences[key]
        sentence = f"the initial weight {_names(alike)} {what}; look at {where}."
        if is_known:
            found.append(Finding("weights-differ-at-start", tuple(parts.name for parts in alike), None, sentence))
        else:
            notes.append(sentence.removesuffix("."))
    return found, notes


def _factor(parts: StartParts) -> float | None:
    """The number by which the ranks' parts exceed those of the script; None if there is none."""
    above = sum(float(value.double() @ parts.own[rank].double()) for rank, value in parts.found.items())
    below = sum(float(parts.own[rank].double().square().sum()) for rank in parts.found)
    factor = above / below if below else 0.0
    is_same = all(
        float((value - factor * parts.own[rank]).norm()) <= 1e-6 * float(value.norm())
        for rank, value in parts.found.items()
    )
    return factor if is_same and factor else None


def _names(some: Sequence[StartParts]) -> str:
    names = [parts.name for parts in some]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"


def _count(count: int) -> str:
    return "1 other weight" if count == 1 else f"{count} other weights"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {short_ranks(ranks)}"

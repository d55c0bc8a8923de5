"""Checks before the first step: that the reductions make sense here, and that all ranks have the same ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from colonnade.engine.gradient_handler._bucket import local
from colonnade.engine.gradient_handler._lane import Log
from colonnade.engine.gradient_handler._options import GroupReduction, SyncOptions
from colonnade.engine.gradient_handler._party import Party
from colonnade.errors import GradientError


def parties_of(reductions: Sequence[GroupReduction], options: SyncOptions, log: Log) -> dict[tuple[int, ...], Party]:
    """One party per set of ranks, connected where shared memory is wanted. Collective, in the order of ranks."""
    _check_parameters(reductions)
    groups = {reduction.ranks: reduction.group for reduction in reductions}
    parties = {}
    for ranks in sorted(groups):
        parties[ranks] = party = Party(ranks, groups[ranks])
        on_cpu = any(
            parameter.device.type == "cpu" for r in reductions if r.ranks == ranks for parameter in r.parameters
        )
        if options.shared_memory is False or party.size == 1 or not on_cpu:
            continue
        problem = party.connect()
        if problem is not None and options.shared_memory is True:
            raise GradientError(f'shared_memory=True, but {problem}. Use "auto" to fall back by itself')
        if problem is not None:
            log(f"gradients travel by the process group, not by shared memory: {problem}")
        elif options.compress is not None:
            log(f"compress={options.compress!r} is not used in shared memory, where nothing is sent")
    return parties


def check_alike(
    reductions: Sequence[GroupReduction], parties: Mapping[tuple[int, ...], Party], options: SyncOptions
) -> None:
    """Raise on every rank when the ranks of a party have other parameters or options. Collective."""
    for ranks, party in sorted(parties.items()):
        own = [reduction for reduction in reductions if reduction.ranks == ranks]
        described = [_described(options), *(line for reduction in own for line in _lines(reduction))]
        digest = hashlib.blake2b(json.dumps(described).encode(), digest_size=16).digest()
        if len(set(party.gather_bytes(digest))) == 1:
            continue
        names = ["options", *(name for reduction in own for name in ("divisor", *reduction.names))]
        tables = party.gather_objects([list(pair) for pair in zip(names, described, strict=True)])
        raise GradientError(_difference(party, tables))


def _check_parameters(reductions: Sequence[GroupReduction]) -> None:
    names: dict[int, str] = {}
    for reduction in reductions:
        for name, parameter in zip(reduction.names, reduction.parameters, strict=True):
            if id(parameter) in names:
                raise GradientError(
                    f"{name!r} is in two reductions (as {names[id(parameter)]!r} before); "
                    "join them into one over all their ranks"
                )
            names[id(parameter)] = name
        if not reduction.divisor > 0:
            raise GradientError(f"a divisor is more than 0, not {reduction.divisor!r}")


def _described(options: SyncOptions) -> str:
    kept = [field.name for field in fields(options) if field.name != "callback"]
    return ", ".join(f"{name}={getattr(options, name)}" for name in kept)


def _lines(reduction: GroupReduction) -> list[str]:
    parameters = [local(parameter) for parameter in reduction.parameters]
    return [f"{reduction.divisor:g}", *(f"{tuple(p.shape)} {p.dtype} {p.device.type}" for p in parameters)]


def _difference(party: Party, tables: list[list[list[Any]]]) -> str:
    """Name the first entry that differs, and the ranks that differ."""
    first = tables[0]
    for rank, table in zip(party.ranks, tables, strict=True):
        for (name, value), (other_name, other) in zip(first, table, strict=False):
            if value != other:
                return (
                    f"ranks {party.ranks[0]} and {rank} would not reduce the same gradients: "
                    f"{name!r} is {value}, {other_name!r} is {other}"
                )
        if len(table) != len(first):
            extra = (table if len(table) > len(first) else first)[min(len(table), len(first))][0]
            return (
                f"ranks {party.ranks[0]} and {rank} have {len(first)} and {len(table)} entries to reduce; "
                f"the first that only one has is {extra!r}"
            )
    return "ranks differ in what they would reduce"

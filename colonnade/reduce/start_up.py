"""Before the first step: the groups that sums go over, and a check that all their ranks have the same sums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from colonnade.comm.rank_group import RankGroup
from colonnade.errors import GradientError
from colonnade.parallel.dtensor import local_part
from colonnade.reduce.records import Sum

Log = Callable[[str], None]


def open_groups(sums: Sequence[Sum], log: Log) -> dict[tuple[int, ...], RankGroup]:
    """One per set of ranks, connected where shared memory is wanted. Collective, in the order of ranks.

    What is wrong in one group is raised when the others were gone through, where ranks that know of no problem take part.
    """
    _check_parameters(sums)
    groups, problems = {}, []
    for ranks in sorted({one.ranks for one in sums}):
        mine = [one for one in sums if one.ranks == ranks]
        groups[ranks] = group = RankGroup(ranks, mine[0].group, log)
        on_cpu = any(parameter.device.type == "cpu" for one in mine for parameter in one.parameters)
        sharing = [one.options for one in mine if one.options.shared_memory is not False]
        if group.alone or not on_cpu or not sharing:
            continue
        try:
            group.share_memory(must=any(options.shared_memory is True for options in sharing))
        except GradientError as error:
            problems.append(error)
        narrow = [options.narrow for options in sharing if options.narrow is not None]
        if group.sockets is not None and narrow:
            log(
                f"{narrow[0]} is not used in shared memory, where nothing is sent: gradients are summed in their own dtype"
            )
    if problems:
        for group in groups.values():
            group.close()
        raise problems[0]
    return groups


def check_alike(sums: Sequence[Sum], groups: Mapping[tuple[int, ...], RankGroup]) -> None:
    """Raise on every rank when the ranks of a group have other parameters or options. Collective."""
    problems = []
    for ranks, group in sorted(groups.items()):
        table = [line for one in sums if one.ranks == ranks for line in _described(one)]
        digest = hashlib.blake2b(json.dumps([text for _, text in table]).encode(), digest_size=16).digest()
        if len(set(group.gather_bytes(digest))) > 1:
            problems.append(_difference(group, group.gather_objects(table)))
    if problems:
        raise GradientError(problems[0])


def _check_parameters(sums: Sequence[Sum]) -> None:
    names: dict[int, str] = {}
    for one in sums:
        for name, parameter in zip(one.names, one.parameters, strict=True):
            if id(parameter) in names:
                raise GradientError(
                    f"{name!r} is in two sums (as {names[id(parameter)]!r} before); join them into one over all their ranks"
                )
            names[id(parameter)] = name
        if not one.divisor > 0:
            raise GradientError(f"a divisor is more than 0, not {one.divisor!r}")


def _described(one: Sum) -> list[tuple[str, str]]:
    """(name, what must be the same on all ranks) for a sum and each of its parameters."""
    options = ", ".join(f"{field.name}={getattr(one.options, field.name)}" for field in fields(one.options))
    sharding = "" if one.sharding is None else f", {one.sharding}"
    lines = [("options", f"{options}{sharding}"), ("divisor", f"{one.divisor:g}")]
    labels = one.labels or ("",) * len(one.names)
    for name, parameter, label in zip(one.names, one.parameters, labels, strict=True):
        part = local_part(parameter)
        lines.append((name, f"{tuple(part.shape)} {part.dtype} {part.device.type}{label}"))
    return lines


def _difference(group: RankGroup, tables: list[list[list[Any]]]) -> str:
    """Name the first entry that differs, and the ranks that differ."""
    first = tables[0]
    for rank, table in zip(group.ranks, tables, strict=True):
        for (name, value), (other_name, other) in zip(first, table, strict=False):
            if value != other:
                return (
                    f"ranks {group.ranks[0]} and {rank} would not sum the same gradients: "
                    f"{name!r} is {value}, {other_name!r} is {other}"
                )
        if len(table) != len(first):
            extra = (table if len(table) > len(first) else first)[min(len(table), len(first))][0]
            return (
                f"ranks {group.ranks[0]} and {rank} have {len(first)} and {len(table)} entries to sum; "
                f"the first that only one has is {extra!r}"
            )
    return "ranks differ in what they would sum"

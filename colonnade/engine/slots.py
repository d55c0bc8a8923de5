"""Slots: what gets a norm of its own. Numbered alike on every rank, also where stages hold other layers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from colonnade.comm.messages import gather_texts
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError, did_you_mean
from colonnade.optim.clip_settings import ClipSettings, Per


@dataclass(frozen=True)
class Slots:
    """The names of all slots of the world, the clip group of each, and the slot of each parameter here."""

    names: tuple[str, ...]
    group_of: tuple[int, ...]
    of_parameter: dict[str, int]


def number_slots(names: Sequence[str], settings: ClipSettings, context: ParallelContext) -> Slots:
    """Give every parameter its slot, by its label. Collective over the world."""
    mine = {name: (settings.group_of(name), label_of(name, settings.report or settings.per)) for name in names}
    texts = gather_texts(json.dumps(sorted(set(mine.values()))), context.device)
    everyone = sorted({(int(group), str(label)) for text in texts for group, label in json.loads(text)})
    _check_groups(settings, {group for group, _ in everyone}, names)
    if (settings.report or settings.per) == "group":
        everyone = [(number, "") for number in range(len(settings.clip_groups()))]
    at = {key: number for number, key in enumerate(everyone)}
    return Slots(
        _names(everyone, [group.name for group in settings.clip_groups()]),
        tuple(group for group, _ in everyone),
        {name: at[key] for name, key in mine.items()},
    )


def _names(keys: Sequence[tuple[int, str]], groups: Sequence[str]) -> tuple[str, ...]:
    """A slot is called by its layer or parameter, with its group where a layer has parameters of several."""
    times = Counter(label for _, label in keys)
    return tuple(
        groups[group] if not label else label if times[label] == 1 else f"{label} ({groups[group]})"
        for group, label in keys
    )


def label_of(name: str, per: Per) -> str:
    """The part of a parameter's name that names its slot: nothing, its layer, or all of it."""
    if per == "parameter":
        return name
    if per == "layer":
        numbered = re.match(r"\d+(?=\.)|.*?\.\d+(?=\.)", name)  # up to the first number
        return numbered[0] if numbered else name.rpartition(".")[0] or name
    return ""


def _check_groups(settings: ClipSettings, used: set[int], names: Sequence[str]) -> None:
    for number, group in enumerate(settings.groups):
        if number not in used:
            pattern, *_ = group.patterns
            raise ConfigError(
                f"clip_grad_norm: group {group.name!r} ({', '.join(group.patterns)}) matches no parameter of any "
                f"rank.{did_you_mean(pattern, names)}",
                code="C003",
            )

"""All keys of the schema in one list: what `colonnade config --keys` and the reference page show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from colonnade.config.rules import Rule, Section
from colonnade.config.schema import KEYS


class Key(NamedTuple):
    """One key: its path in a config (`zero.stage`; `NAME` stands for a name of yours), and what the schema says of it."""

    path: str
    allows: str
    means: str
    required: bool = False


def all_keys() -> list[Key]:
    """Every key that is ours, in the order of the schema, each section after its own key."""
    return list(_of(Section(KEYS), ()))


def _of(section: Section, path: tuple[str, ...]) -> Iterator[Key]:
    for name, rule in section.keys.items():
        yield Key(".".join((*path, name)), rule.allows, rule.purpose, name in section.required)
        yield from _below(rule, (*path, name))
    if section.others is not None:
        yield from _below(section.others, (*path, "NAME"))


def _below(rule: Rule, path: tuple[str, ...]) -> Iterator[Key]:
    if rule.section is not None:
        yield from _of(rule.section, path)
    if rule.items is not None:
        yield from _below(rule.items, (*path[:-1], f"{path[-1]}[]"))

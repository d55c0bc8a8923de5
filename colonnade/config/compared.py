"""A config as texts by key: what must be the same on all ranks, in a form that ranks can compare."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from colonnade.config.rules import ANYTHING, Rule, differing
from colonnade.config.schema import KEYS


def compared_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Every key of ours that is set and may not differ between ranks, as "clip_grad_norm.max_norm", with its value."""
    return {path: text for key, rule in KEYS.items() for path, text in _texts(rule, key, config.get(key))}


def text_of(value: Any) -> str:
    """The value as it is printed, less addresses in memory: the same for the same value on every rank."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{text_of(key)}: {text_of(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _texts(rule: Rule, path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and rule.section is not None:
        others = rule.section.others or (differing(ANYTHING) if rule.may_differ else ANYTHING)
        for key in sorted(value, key=str):
            yield from _texts(rule.section.keys.get(key, others), f"{path}.{key}", value[key])
    elif value is not None and not rule.may_differ:
        yield path, text_of(value)

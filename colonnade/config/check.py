"""The check of a whole config: every problem at once, before any process group exists."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

from colonnade.config.problems import Problem, Source, config_error
from colonnade.config.rules import NO_KEY, check_value
from colonnade.config.schema import KEYS, REFUSED
from colonnade.config.words import foreign_word, near_miss


def require_valid(values: Mapping[str, Any], source: Source) -> None:
    """Raise one ConfigError that tells every problem of `values`; return when there is none."""
    found = [*_keys(values), *_combinations(values)]
    if found:
        raise config_error(found, source)


def _keys(values: Mapping[Any, Any]) -> Iterator[Problem]:
    for key, value in values.items():
        if not isinstance(key, str) or not key:
            yield Problem((key,), NO_KEY, value)
        elif value is None and key in KEYS:
            continue
        elif key in KEYS:
            yield from check_value(KEYS[key], (key,), value)
        else:
            yield from _others(key, value, values)


def _others(key: str, value: Any, values: Mapping[str, Any]) -> Iterator[Problem]:
    """A key that is not ours is the user's own, unless it was meant to be ours."""
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return  # a helper of the config file: nobody means a setting by a function
    text = REFUSED.get(key) or foreign_word(key, value, values)
    if text is None and (close := near_miss(key, KEYS)):
        text = f"unknown key. Did you mean `{close}`? A key of your own needs a less similar name"
    if text is not None:
        yield Problem((key,), text, value)


def _combinations(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that are right one by one and wrong together."""
    if values.get("gradient_handler") is not None and values.get("gradient_handlers") is not None:
        yield Problem(("gradient_handlers",), "is set beside gradient_handler, its other name: keep one")
    if _is_on(values.get("fp16")) and _is_on(values.get("bf16")):
        yield Problem(("bf16",), "is on beside fp16: keep one")
    clip = values.get("clip_grad_norm")
    if isinstance(clip, dict) and clip.keys() <= {"norm_type", "nonfinite", "per", "report"}:
        yield Problem(("clip_grad_norm", "max_norm"), "is missing: a number >= 0, or give groups or a method")
    fp16 = values.get("fp16")
    if isinstance(fp16, dict):
        yield from _scales(fp16)


def _scales(fp16: Mapping[str, Any]) -> Iterator[Problem]:
    low, first, high = (
        value if isinstance(value, (int, float)) else None
        for value in (fp16.get("min_scale"), fp16.get("init_scale", 2**16), fp16.get("max_scale"))
    )
    if low is not None and high is not None and low > high:
        yield Problem(("fp16", "min_scale"), f"must not be above max_scale = {high}", low)
    elif low is not None and first is not None and low > first:
        text = f"must not be above init_scale = {first}: give a larger init_scale too"
        yield Problem(("fp16", "min_scale"), text, low)
    elif high is not None and first is not None and high < first:
        text = f"must not be below init_scale = {first}: give a smaller init_scale too"
        yield Problem(("fp16", "max_scale"), text, high)


def _is_on(setting: Any) -> bool:
    switched_off = isinstance(setting, dict) and setting.get("enabled") is False
    return setting is not None and setting is not False and not switched_off

"""Placing a whole module at once, by name pattern or by predicate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError, did_you_mean, listed
from colonnade.parallel.placement import Spec, place

Rule = str | Callable[[str, nn.Parameter], bool]


def place_module(module: nn.Module, rules: Mapping[Rule, Mapping[ParallelMode, Spec]]) -> nn.Module:
    """Place every parameter that a rule names; the first rule that fits a parameter is its rule.

    A rule is a pattern of the parameter's name ("*.weight") or a function of name and parameter. A rule that
    fits nothing is an error: a slip in a pattern would leave parameters replicated without a word.
    """
    named = dict(module.named_parameters())
    unused = dict.fromkeys(rules)
    for name, parameter in named.items():
        rule = next((rule for rule in rules if _fits(rule, name, parameter)), None)
        if rule is not None:
            unused.pop(rule, None)
            place(parameter, rules[rule])
    for rule in unused:
        if not any(_fits(rule, name, parameter) for name, parameter in named.items()):
            raise PlacementError(
                f"the rule {rule!r} fits no parameter; the names are {listed(list(named)[:20])}"
                f"{' ...' if len(named) > 20 else ''}.{did_you_mean(str(rule), named)}"
            )
    return module


def _fits(rule: Rule, name: str, parameter: nn.Parameter) -> bool:
    return fnmatchcase(name, rule) if isinstance(rule, str) else rule(name, parameter)

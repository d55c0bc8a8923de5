"""`clip_grad_norm` of a config, read: the order of the norm, the method, the groups, what a bad gradient does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from colonnade.errors import ConfigError
from colonnade.optim.clip_method import CLIP_METHOD, ClipMethod
from colonnade.optim.clip_policy import ClipGroup, NonFinite

Per = Literal["group", "layer", "parameter"]


@dataclass(frozen=True)
class ClipSettings:
    """How to clip. `per` says what is clipped by a norm of its own: the whole gradient (or a group with a limit of its own),
    each layer, or each parameter. `report` says what gets a norm of its own to be looked at: as `per`, if it is None."""

    method: str = "norm"
    options: Mapping[str, Any] = field(default_factory=dict)
    norm_type: float = 2.0
    nonfinite: NonFinite = "skip"
    per: Per = "group"
    groups: tuple[ClipGroup, ...] = ()
    report: Per | None = None

    @classmethod
    def read(cls, value: Any) -> ClipSettings | None:
        """From a number, or dict(max_norm=, norm_type=, groups=, nonfinite=, method=, per=, report=).

        None, 0 and dict(max_norm=0) are off; inf measures without clipping. Beside groups, no max_norm or 0 is inf: the rest
        is measured only. (The check of a config asks for one of max_norm, groups and method.)
        """
        if not value:
            return None
        if not isinstance(value, Mapping):
            return cls(options={"max_norm": float(value)})
        method, options = _method(value.get("method"), value.get("max_norm"))
        if method == "norm" and options.get("max_norm") == 0 and not value.get("groups"):
            return None
        if method == "norm" and not options.get("max_norm"):
            options["max_norm"] = math.inf  # only groups of their own are clipped
        per: Per = value.get("per") or ("parameter" if method == "adagc" else "group")
        report: Per | None = value.get("report")
        if report not in (None, per) and per != "group":
            raise ConfigError(
                f"clip_grad_norm: report={report!r} beside per={per!r}: what is clipped by a norm of its own is what norms are "
                f"reported of. Leave report out",
                code="C003",
            )
        return cls(
            method=method,
            options=options,
            norm_type=float(value.get("norm_type") or 2.0),
            nonfinite=value.get("nonfinite") or "skip",
            per=per,
            groups=tuple(_group(name, entry) for name, entry in (value.get("groups") or {}).items()),
            report=report,
        )

    def build_method(self) -> ClipMethod:
        """The clip method, by its registered name."""
        method = CLIP_METHOD.get_module(self.method)
        if self.per != "group" and not getattr(method, "by_slot", False):
            raise ConfigError(
                f"clip_grad_norm: method {self.method!r} finds one limit for the total norm, so nothing is clipped per "
                f"{self.per}. Write report={self.per!r} for the norm of each {self.per}, and leave per out; or take the method "
                f"'norm', or 'adagc', which limit each by its own norm",
                code="C003",
            )
        try:
            return method(**self.options)
        except (TypeError, OverflowError) as error:
            raise ConfigError(
                f"clip_grad_norm: method {self.method!r} takes no such options: {error}", code="C003"
            ) from error

    def group_of(self, name: str) -> int:
        """The number of the group that a parameter is in; the last is "rest"."""
        for number, group in enumerate(self.groups):
            if any(fnmatchcase(name, pattern) for pattern in group.patterns):
                return number
        return len(self.groups)

    def clip_groups(self) -> list[ClipGroup]:
        """The named groups, and last the rest."""
        return [*self.groups, ClipGroup("rest" if self.groups else "all")]


def _method(method: Any, max_norm: Any) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = dict(method) if isinstance(method, Mapping) else {}
    name = options.pop("type", None) if isinstance(method, Mapping) else method
    if max_norm is not None:
        options["max_norm"] = float(max_norm)
    return name or "norm", options


def _group(name: str, entry: Mapping[str, Any]) -> ClipGroup:
    patterns = entry["params"]
    own = entry.get("max_norm")
    return ClipGroup(
        name,
        None if own is None else float(own),
        entry.get("counted", True),
        entry.get("clipped", True),
        (patterns,) if isinstance(patterns, str) else tuple(patterns),
    )

"""Parts of pages that are made at build time: a page says `<!-- generated: NAME -->` where one belongs.

Each has two forms: one for the site, and one for the plain copy of the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import api
import command_line
import config_keys
import pictures

_MARK = re.compile(r"^<!-- generated: (\w+)(?: (.+?))? -->$", re.MULTILINE)
_PARTS: dict[str, tuple[Callable[..., str], Callable[..., str]]] = {
    "config_keys": (config_keys.markdown, config_keys.markdown),
    "command_line": (command_line.markdown, command_line.markdown),
    "picture": (pictures.figure, pictures.in_words),
    "api": (api.directive, api.in_words),
}


def filled(text: str, plain: bool = False) -> str:
    """The page with its generated parts in place."""
    return _MARK.sub(lambda found: _part(found[1], found[2] or "", plain), text)


@cache
def _part(kind: str, name: str, plain: bool) -> str:
    if kind not in _PARTS:
        raise ValueError(f"no generated part {kind!r}; there are {', '.join(_PARTS)}")
    make = _PARTS[kind][plain]
    return make(name) if name else make()

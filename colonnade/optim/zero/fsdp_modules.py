"""Which modules of a model stage 3 gathers one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from colonnade.errors import ConfigError, did_you_mean

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def chosen_modules(root: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules that are gathered one by one, inner ones first: as named, else the members of outer containers."""
    if not patterns:
        return [module for module in outer_members(root) if any(True for _ in module.parameters())]
    named = [(name, module) for name, module in root.named_modules() if name]
    found = [
        module
        for name, module in named
        if any(fnmatchcase(name, pattern) or type(module).__name__ == pattern for pattern in patterns)
    ]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) or type(module).__name__ == pattern for name, module in named):
            names = [name for name, _ in named]
            raise ConfigError(
                f"zero.wrap: {pattern!r} names no module and no class.{did_you_mean(pattern, names)}", code="C003"
            )
    return list(reversed(found))


def outer_members(module: nn.Module) -> Iterable[nn.Module]:
    """The members of the outermost containers of a model: its blocks, and what is in a row with them."""
    for child in module.children():
        if isinstance(module, _CONTAINERS) and not _is_list(child, module):
            yield child
        else:
            yield from outer_members(child)


def _is_list(child: nn.Module, parent: nn.Module) -> bool:
    """Whether a member of a container is itself one of modules to gather: a list, or the blocks of a sequential model."""
    if isinstance(child, nn.Sequential):
        blocks = list(child)
        alike = len({type(block) for block in blocks}) == 1 and all(any(True for _ in b.children()) for b in blocks)
        return isinstance(parent, nn.Sequential) and alike
    return isinstance(child, (nn.ModuleList, nn.ModuleDict))

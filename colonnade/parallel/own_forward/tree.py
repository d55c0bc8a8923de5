"""The tree of a model's modules: which of its calls can lie in a stage each, and copies of the tree."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Container, Iterator
from types import MethodType
from typing import Any

from torch import Tensor, nn

Tensors = Callable[[Tensor], Tensor]


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose calls a forward pass is made of, by name: blocks, and what stands beside the lists of them.

    Blocks are members of the outermost nn.ModuleLists, and of nn.Sequentials of like members, that have layers inside. Where
    the model has no such block, plain layers in an nn.ModuleList count as blocks. What has blocks inside (the model itself,
    its decoder) is none, nor is a list or a dict of modules. Empty if there are no blocks.
    """
    for is_block_list in (_is_list_of_blocks, _is_list_of_layers):
        tree = _Tree(is_block_list)
        if tree.has_blocks(model):
            found: dict[str, nn.Module] = {}
            seen: set[int] = set()
            for name, unit in tree.units(model, ""):
                if id(unit) not in seen:
                    seen.add(id(unit))
                    found[name] = unit
            return found
    return {}


class _Tree:
    """The tree of a model, where `is_block_list` says which modules are lists of blocks."""

    def __init__(self, is_block_list: Callable[[nn.Module], bool]) -> None:
        self._is_block_list = is_block_list

    def units(self, module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            cannot_run = type(child).forward is nn.Module.forward  # nn.ModuleList, nn.ModuleDict
            if cannot_run or (self.has_blocks(child) and (_is_list(child) or not self._is_block_list(module))):
                yield from self.units(child, f"{prefix}{name}.")
            else:
                yield prefix + name, child

    def has_blocks(self, module: nn.Module) -> bool:
        """Whether it is a list of blocks, or has one inside that is not itself inside a block."""
        return self._is_block_list(module) or any(self.has_blocks(child) for child in module.children())


def _is_list_of_blocks(module: nn.Module) -> bool:
    kinds = Counter(type(member) for member in module.children() if _is_block(member))
    least = 1 if isinstance(module, nn.ModuleList) else 2
    return _is_list(module) and any(count >= least for count in kinds.values())


def _is_list_of_layers(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and any(has_parameters(member) for member in module)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _is_block(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and has_parameters(module)


def has_parameters(module: nn.Module) -> bool:
    """Whether there is anything to train in it."""
    return next(module.parameters(), None) is not None


def outside(module: nn.Module, units: Container[int], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that have units inside, with their names. `units`: their ids."""
    yield name, module
    for key, child in module.named_children():
        if id(child) not in units:
            yield from outside(child, units, f"{name}.{key}" if name else key)


def copy_tree(module: nn.Module, memo: dict[int, nn.Module], tensors: Tensors) -> nn.Module:
    """A copy of a module and of those inside it, with `tensors` of its parameters, buffers and others; the rest it shares.

    `memo`, by id, has what stands for a module and is not copied, and gets the copies.
    """
    if id(module) in memo:
        return memo[id(module)]
    copied: Any = object.__new__(type(module))
    memo[id(module)] = copied
    own = vars(copied)
    own.update((key, tensors(value) if isinstance(value, Tensor) else value) for key, value in vars(module).items())
    for key, value in vars(nn.Module()).items():
        if isinstance(value, (dict, set)):  # parameters, modules, hooks
            own[key] = copy.copy(vars(module)[key])
    for group in (copied._parameters, copied._buffers):
        group.update({name: tensors(tensor) for name, tensor in group.items() if tensor is not None})
    for name, child in copied._modules.items():
        copied._modules[name] = None if child is None else copy_tree(child, memo, tensors)
    forward = own.get("forward")
    if getattr(forward, "__self__", None) is module:
        own["forward"] = MethodType(forward.__func__, copied)
    return copied

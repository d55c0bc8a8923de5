"""What was done to tensors of the meta device, so that it can be done again for real."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from colonnade.errors import PlacementError

_GIVE_NUMBERS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.allclose.default,
}
"""What reads the values of tensors inside torch's own code."""


@dataclass(frozen=True, eq=False)
class Entry:
    """An operation that gave values to tensors of the meta device: those of `outputs`."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    draws: int
    """How many operations drew random numbers before it, those for parts that other ranks hold too."""

    @property
    def name(self) -> str:
        """Its name in torch, without the overload: "uniform_"."""
        return str(self.func._schema.name).removeprefix("aten::")

    @property
    def inputs(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves([self.args, dict(self.kwargs)]) if isinstance(leaf, Tensor)]

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags


Run = Callable[[Entry, tuple[Any, ...], dict[str, Any]], Any]
"""Does an operation again: (what was noted, its arguments for real)."""


class Tape(TorchDispatchMode):
    """Notes every operation on the meta device while it is entered. Views are not noted: tensors carry their strides."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.owned: set[int] = set()
        """The memory of tensors that became parameters."""
        self._writers: dict[int, list[int]] = {}
        self._draws = 0
        self.read_from: dict[Entry, Tensor] = {}
        """What drew numbers that were read while the model was built, with the state of torch's generator before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        if func in _GIVE_NUMBERS:
            args, kwargs = tree_map_only(Tensor, lambda t: self.read(t) if t.is_meta else t, (args, kwargs))
            return func(*args, **kwargs)
        if func._schema.is_mutable and given and not given[0].is_meta:
            args, kwargs = tree_map_only(Tensor, lambda t: self.read(t) if t.is_meta else t, (args, kwargs))
            return func(*args, **kwargs)
        output = func(*tree_map_only(Tensor, _on_meta, args), **kwargs) if any(t.is_meta for t in given) else None
        output = func(*args, **kwargs) if output is None else output
        made = tuple(leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_meta)
        is_view = not func._schema.is_mutable and {memory_of(t) for t in made} <= {memory_of(t) for t in given}
        if made and not is_view:
            # A copy of what has values: it may be changed before they are asked for.
            args, kwargs = tree_map_only(Tensor, lambda t: t.detach() if t.is_meta else t.clone(), (args, kwargs))
            for memory in {memory_of(tensor) for tensor in made}:
                self._writers.setdefault(memory, []).append(len(self.entries))
            self.entries.append(Entry(func, args, kwargs, made, self._draws))
            self._draws += self.entries[-1].is_random
        return output

    def needed_for(self, tensor: Tensor) -> list[int]:
        """The numbers of the entries that decide its values, in order."""
        found: set[int] = set()
        left = [(memory_of(tensor), len(self.entries))]
        while left:
            memory, before = left.pop()
            for at in self._writers.get(memory, ()):
                if at < before and at not in found:
                    found.add(at)
                    left += [(memory_of(each), at) for each in self.entries[at].inputs if each.is_meta]
        return sorted(found)

    def replay(self, tensor: Tensor, run: Run | None = None) -> Tensor:
        """The tensor for real, on the CPU: everything that decides its values is done again."""
        real: dict[int, Tensor] = {}

        def as_real(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_meta:
                return value
            return real[memory_of(value)].as_strided(value.size(), value.stride(), value.storage_offset())

        with torch.no_grad(), torch.device("cpu"):
            for at in self.needed_for(tensor):
                entry = self.entries[at]
                args, kwargs = tree_map_only(Tensor, as_real, (entry.args, dict(entry.kwargs)))
                if "device" in kwargs:
                    kwargs["device"] = torch.device("cpu")
                output = entry.func(*args, **kwargs) if run is None else run(entry, args, kwargs)
                results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                for result, made in zip(results, entry.outputs, strict=True):
                    if memory_of(made) not in real:
                        real[memory_of(made)] = _memory_for(result, made)
            return as_real(tensor)

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor for real, while the model is still being built: its values must not hang on drawn parameters."""
        entries = [self.entries[at] for at in self.needed_for(tensor)]
        touched = {memory_of(each) for entry in entries for each in (*entry.inputs, *entry.outputs) if each.is_meta}
        if touched & self.owned and any(entry.is_random for entry in entries):
            raise PlacementError(
                "inside meta_init() a buffer, or code of the model, needs the values of a parameter, which is drawn only in "
                "initialize(). Build this module outside meta_init(), or `with torch.device('cpu')` inside it.",
                code="C034",
            )
        return self.replay(tensor, self._draw_once).clone()

    def _draw_once(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does an operation again. Whoever reads its numbers a second time finds the same ones."""
        if not entry.is_random:
            return entry.func(*args, **kwargs)
        if entry not in self.read_from:
            self.read_from[entry] = torch.get_rng_state()
            return entry.func(*args, **kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.read_from[entry])
            return entry.func(*args, **kwargs)


def memory_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return tensor.untyped_storage()._cdata


def elements_in_memory(tensor: Tensor) -> int:
    """How many elements of its dtype the memory of a tensor has room for."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def covers_memory(tensor: Tensor) -> bool:
    """Whether it is all of its memory."""
    return tensor.numel() == elements_in_memory(tensor)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several of its elements lie at one place in memory."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


def _memory_for(result: Tensor, made: Tensor) -> Tensor:
    """A flat tensor for all the memory of `made`, with the values of `result` in their places."""
    flat = result.new_empty(elements_in_memory(made))
    flat.as_strided(made.size(), made.stride(), made.storage_offset()).copy_(result)
    return flat

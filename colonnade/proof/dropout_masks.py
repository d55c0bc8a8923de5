"""Dropout in a comparison: the masks of the ranks are recorded and joined, and the single process drops the same elements.

Every call of dropout in a model is intercepted: `Noting` records on the ranks, `Replaying` repeats in the single process, and
`Nothing` turns dropout off. Ranks draw their own random numbers as usual, also when a module is recomputed in the backward
pass. If the masks of a module cannot be joined, the module is reported with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import permutations, product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from colonnade.comm.torch_versions import BACKWARD, backward_inside
from colonnade.errors import listed
from colonnade.parallel.forward import ModelHook
from colonnade.parallel.held import checksum
from colonnade.parallel.placement import local_part

# --- Places: the shard of the full tensor that each rank has, from shapes, process groups and numbers ---


Shape = tuple[int, ...]
Groups = Mapping[str, Sequence[Sequence[int]]]
Place = tuple[Tensor, ...]
"""The shard of a rank: for each dimension, the indices of its rows in the full tensor."""
Places = Mapping[int, Place]
_NEAR = 0.01
"""The largest relative distance between the ranks' inputs and those of the single process at their places."""


def places_for(
    shapes: Mapping[int, Shape], whole: Shape, groups: Groups, inputs: Mapping[int, Tensor], x: Tensor, anyhow: bool
) -> Places | str:
    """The places of the ranks' shards in a tensor of shape `whole`, or the reason why they are unknown.

    Args:
        shapes: The shape of each rank's shard.
        whole: The shape of the full tensor.
        groups: The process groups of the modes.
        inputs: The values of the ranks. Of several ways to shard `whole`, they decide for the one that matches `x`.
        x: The values of the single process.
        anyhow: If none matches, take the nearest one.
    """
    local = next(iter(shapes.values()))
    if any(shape != local for shape in shapes.values()) or len(local) != len(whole):
        return f"its input has different shapes on the ranks, for example {sorted(set(shapes.values()))[:4]}"
    if any(not size or full % size for size, full in zip(local, whole, strict=True)):
        return f"its input has the shape {local} on each rank, which does not divide {whole}"

    # Every way to shard the tensor: each dimension over one mode or two, of which the first is the outer one. Different modes
    # may give the same shards, which count once.
    ways, seen = list[Places](), set[Any]()
    counts = [full // size for size, full in zip(local, whole, strict=True)]
    numbers = _numbers(list(shapes), groups)
    sizes = {mode: len(set(of.values())) for mode, of in numbers.items()}
    orders = [(), *((mode,) for mode in numbers), *permutations(numbers, 2)]
    choices = [[modes for modes in orders if prod(sizes[mode] for mode in modes) == count] for count in counts]
    for chosen in product(*choices):
        cells = {}
        for rank in shapes:
            cell = [0] * len(counts)
            for dim, modes in enumerate(chosen):
                for mode in modes:
                    cell[dim] = cell[dim] * sizes[mode] + numbers[mode][rank]
            cells[rank] = tuple(cell)
        key = tuple(cells.values())
        if len(set(key)) == prod(counts) and key not in seen:
            seen.add(key)
            ways.append(
                {
                    rank: tuple(torch.arange(at * size, (at + 1) * size) for at, size in zip(cell, local, strict=True))
                    for rank, cell in cells.items()
                }
            )
    if not ways:
        return f"its input has the shape {local} on each rank, and no process groups shard {whole} like that"
    if len(inputs) < len(shapes):
        return ways[0]  # there are no values to choose by
    truth = x.detach().to("cpu", torch.float32)
    best = min(ways, key=lambda way: _error(way, inputs, truth))
    if _error(best, inputs, truth) <= _NEAR:
        return best

    # The rows of a sharded dimension may have any order, as in sequences that are dealt out: each row goes to the most similar
    # row of the single process.
    for way in ways:
        for dim in [dim for dim, count in enumerate(counts) if count > 1]:
            order = {}
            for rank, place in way.items():
                full = _at(truth, (*place[:dim], torch.arange(truth.shape[dim]), *place[dim + 1 :]))
                rows, candidates = (x.movedim(dim, 0).flatten(1) for x in (inputs[rank], full))
                order[rank] = (*place[:dim], torch.cdist(rows, candidates).argmin(1), *place[dim + 1 :])
            if _error(order, inputs, truth) <= _NEAR:
                return order
    return best if anyhow else "the inputs of dropout on the ranks are not those of the single process, in any order"


def joined(parts: Mapping[int, Tensor], places: Places, shape: Shape) -> Tensor:
    """The full tensor; of replicas, the values of the first rank."""
    whole = next(iter(parts.values())).new_empty(shape)
    for rank in reversed(list(parts)):
        whole[torch.meshgrid(*places[rank], indexing="ij")] = parts[rank]
    return whole


def _error(places: Places, inputs: Mapping[int, Tensor], truth: Tensor) -> float:
    """The largest distance of a rank from the truth, relative to the length of the truth."""
    size = float(truth.norm()) or 1.0
    return max(float((values - _at(truth, places[rank])).norm()) / size for rank, values in inputs.items())


def _at(whole: Tensor, place: Place) -> Tensor:
    return whole[torch.meshgrid(*place, indexing="ij")]


def _numbers(ranks: Sequence[int], groups: Groups) -> dict[str, dict[int, int]]:
    """By mode in which these ranks differ: the position of each rank in its group, from 0 without gaps."""
    found = {}
    for mode, lists in groups.items():
        at = {rank: list(group).index(rank) for group in lists for rank in group if rank in ranks}
        order = {number: place for place, number in enumerate(sorted(set(at.values())))}
        if len(at) == len(ranks) and len(order) > 1:
            found[mode] = {rank: order[number] for rank, number in at.items()}
    return found


# --- Intercepting, recording and repeating dropout ---

DRAWN_BYTES = 256 << 20
"""The masks of a rank are kept up to this total size."""
_DROPOUT, _ATTENTION = F.dropout, F.scaled_dot_product_attention
_SHIFTING = (F.alpha_dropout, F.feature_alpha_dropout)
_DROPS = (_DROPOUT, F.dropout1d, F.dropout2d, F.dropout3d, *_SHIFTING)


@dataclass(frozen=True)
class DropoutMask:
    """The effect of one call of dropout: input * `kept` * `scale` + `shift`. `kept` is None if the mask is too large."""

    kept: Tensor | None
    scale: float = 1.0
    shift: Tensor | None = None
    input: Tensor | None = None
    """The input of the first call in a module, from which the places of the ranks are found."""


Masks = dict[str, list[DropoutMask]]
"""The masks of one step: by module, in the order of its calls."""


class Dropping(TorchFunctionMode):
    """Intercepts the dropout of a model. `factors` decides the effect of a call; `off` are modules without dropout."""

    def __init__(self, off: Collection[str] = ()) -> None:
        super().__init__()
        self.off = frozenset(off)
        self.zeroed: set[str] = set()
        """The modules whose dropout was turned off."""
        self.data_rank: int | None = None
        """The data rank whose batch is running; None: the global batch."""
        self.on_backward: Callable[..., None] = lambda *args, **kwargs: None
        """Called at each backward pass with its arguments."""
        self._inside: list[str] = []

    def begin_step(self, step: int, data_rank: int | None = None) -> None:
        """Start a step, on the global batch or on that of one data rank."""
        self.data_rank = data_rank

    @contextmanager
    def watching(self, model: nn.Module, rename: Callable[[str], str] = lambda name: name) -> Iterator[None]:
        """Track the module that a call of dropout is made in. Dropout inside of kernels is turned off meanwhile."""

        def leave(name: str) -> None:
            while self._inside and self._inside.pop() != name:
                pass  # modules inside that raised

        with ExitStack() as stack:
            for name, module in model.named_modules():
                own = rename(name)
                entered = ModelHook(lambda *_, own=own: self._inside.append(own))
                left = ModelHook(lambda *_, own=own: leave(own))
                stack.callback(module.register_forward_pre_hook(entered).remove)
                stack.callback(module.register_forward_hook(left, always_call=True).remove)

                # The dropout of recurrent layers and of attention between ranks is not a call that can be intercepted.
                rate = vars(module).get("dropout")
                in_kernel = isinstance(module, nn.RNNBase) or bool(getattr(module, "is_split_over_ranks", False))
                if isinstance(rate, float) and rate and in_kernel:
                    self.zeroed.add(own)
                    stack.callback(setattr, module, "dropout", rate)
                    module.dropout = 0.0
            yield

    def factors(self, module: str, x: Tensor, draw: Callable[[Tensor], Tensor], shifts: bool) -> DropoutMask | None:
        """The mask for x; None: no dropout. `draw` applies dropout to a tensor like x."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPS:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            x, p, training, inplace = given.args
            if not training or not p:
                return func(*args, **kwargs)
            mask = self._mask(x, lambda like: func(like, p, True), func in _SHIFTING)
            if mask is None:
                return x
            factor = _factor(mask, x)
            dropped = x.mul_(factor) if inplace else x * factor
            return dropped if mask.shift is None else dropped + mask.shift.to(x)
        if func is _ATTENTION and (kwargs.get("dropout_p") or args[4:5]):
            return self._attention(*args, **kwargs)
        if func in BACKWARD:
            self.on_backward(*args, **kwargs)
            return backward_inside(self, func, args, kwargs)
        # multi_head_attention_forward calls both functions where no mode sees them, so they are replaced meanwhile.
        if func is F.multi_head_attention_forward:
            with _replaced("dropout", self, _DROPOUT), _replaced("scaled_dot_product_attention", self, _ATTENTION):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention with plain operators, because a kernel does not return its dropout mask."""
        if not dropout_p or self._here in self.off:
            if dropout_p:
                self.zeroed.add(self._here)
            return _ATTENTION(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            key, value = (tensor.repeat_interleave(query.size(-3) // tensor.size(-3), -3) for tensor in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            shown = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if shown else scores + attn_mask
        weights = torch.ops.aten._safe_softmax(scores, -1)
        mask = self._mask(weights, lambda like: _DROPOUT(like, dropout_p), False)
        return (weights if mask is None else weights * _factor(mask, weights)) @ value

    def _mask(self, x: Tensor, draw: Callable[[Tensor], Tensor], shifts: bool) -> DropoutMask | None:
        here = self._here
        mask = None if here in self.off else self.factors(here, x, draw, shifts)
        if mask is None:
            self.zeroed.add(here)
        return mask

    @property
    def _here(self) -> str:
        return self._inside[-1] if self._inside else ""


class Nothing(Dropping):
    """Turns dropout off."""

    def factors(self, module: str, x: Tensor, draw: Callable[[Tensor], Tensor], shifts: bool) -> DropoutMask | None:
        return None


class Noting(Dropping):
    """Drops like torch, and records the masks of the current step in `masks`."""

    def __init__(self, off: Collection[str] = ()) -> None:
        super().__init__(off)
        self.masks: Masks = {}
        self._room, self._first = DRAWN_BYTES, True

    def begin_step(self, step: int, data_rank: int | None = None) -> None:
        """Start a step; the masks of the previous one are forgotten."""
        super().begin_step(step, data_rank)
        self.masks, self._first = {}, step == 0

    def factors(self, module: str, x: Tensor, draw: Callable[[Tensor], Tensor], shifts: bool) -> DropoutMask | None:
        with torch.no_grad():
            mask = _drawn(x, draw, shifts)
        if _is_recomputed():
            return mask
        some = self.masks.setdefault(module, [])
        first, shift = self._first and not some, mask.shift
        assert mask.kept is not None
        size = mask.kept.numel() * (1 if shift is None else 16) + x.numel() * 4 * first
        if self._room < size:
            some.append(DropoutMask(None))
            return mask
        self._room -= size
        shift = None if shift is None else _on_host(shift)
        some.append(DropoutMask(_on_host(mask.kept), mask.scale, shift, _on_host(x).float() if first else None))
        return mask


@dataclass
class Dropped:
    """The masks and process groups of the ranks, with which the single process drops the same elements."""

    steps: Sequence[Mapping[int, Masks]]
    """For each step, the masks by rank."""
    groups: Mapping[str, Sequence[Sequence[int]]]
    data_ranks: Sequence[Collection[int]]
    """For each data rank, the ranks that see its batch."""
    off: Collection[str] = ()


@dataclass
class Replays:
    """The outcome of repeating masks in the single process."""

    differing: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By module, in the order of execution: the ranks whose masks differ from those of their replicas."""
    not_joined: dict[str, str] = field(default_factory=dict)
    """By module: the reason why its masks cannot be joined."""


class Replaying(Dropping):
    """Drops the same elements as the ranks."""

    def __init__(self, dropped: Dropped) -> None:
        super().__init__(dropped.off)
        self.found = Replays()
        self._dropped = dropped
        self._places: dict[Any, Places] = {}
        self.begin_step(0)

    def begin_step(self, step: int, data_rank: int | None = None) -> None:
        super().begin_step(step, data_rank)
        self._step = step
        self._calls: dict[Any, int] = {}
        self._again: dict[Any, DropoutMask] = {}

    def factors(self, module: str, x: Tensor, draw: Callable[[Tensor], Tensor], shifts: bool) -> DropoutMask | None:
        key = (module, *checksum(x.detach()).tolist())
        if _is_recomputed():
            return self._again.get(key)
        at = self._calls[module, self.data_rank] = self._calls.get((module, self.data_rank), -1) + 1
        mask = self._joined(module, at, x)
        if mask is not None:
            self._again[key] = mask
        return mask

    def _joined(self, module: str, at: int, x: Tensor) -> DropoutMask | None:
        if module in self.found.not_joined:
            return None
        ranks = None if self.data_rank is None else self._dropped.data_ranks[self.data_rank]
        masks = {
            rank: some[at]
            for rank, by_module in self._dropped.steps[self._step].items()
            if at < len(some := by_module.get(module, [])) and (ranks is None or rank in ranks)
        }
        kept = {rank: mask.kept for rank, mask in masks.items() if mask.kept is not None}
        if not masks:
            self.found.not_joined[module] = "no rank drops anything there"
            return None
        if len(kept) < len(masks):
            self.found.not_joined[module] = f"the masks of a rank take more than {DRAWN_BYTES >> 20} MiB"
            return None

        # The places of the ranks' shards in x. Only the first step has inputs, so later ones use the places found there.
        shape, shapes = tuple(x.shape), {rank: tuple(mask.shape) for rank, mask in kept.items()}
        key = (module, self.data_rank, shape, *shapes.values())
        if key not in self._places:
            inputs = {rank: mask.input for rank, mask in masks.items() if mask.input is not None}
            # Downstream of a module whose masks differ, the inputs differ anyway.
            anyhow = any(self.found.differing.values()) or bool(self.found.not_joined)
            found = places_for(shapes, shape, self._dropped.groups, inputs, x, anyhow)
            if isinstance(found, str):
                self.found.not_joined[module] = found
                return None
            self._places[key] = found
        places = self._places[key]

        # Replicas must drop the same elements, unless they see distinct data: those draw independently.
        data_rank_of = {rank: number for number, some in enumerate(self._dropped.data_ranks) for rank in some}
        first: dict[Any, int] = {}
        apart = self.found.differing.setdefault(module, ())
        for rank, place in places.items():
            other = first.setdefault(tuple(tuple(rows.tolist()) for rows in place), rank)
            if torch.equal(kept[rank], kept[other]):
                continue
            if data_rank_of.get(rank) != data_rank_of.get(other):
                self.found.not_joined[module] = (
                    "ranks with distinct data drop different elements of a tensor that they all have"
                )
                return None
            if rank not in apart:
                apart = self.found.differing[module] = (*apart, rank)
        shifts = {rank: mask.shift for rank, mask in masks.items() if mask.shift is not None}
        shift = joined(shifts, places, shape) if shifts else None
        return DropoutMask(joined(kept, places, shape), next(iter(masks.values())).scale, shift)


def notes_of(dropping: Dropping, off: Mapping[str, str] | None) -> list[str]:
    """Notes about dropout that was turned off. `off`: the reason by module; None: dropout is off everywhere."""
    if off is None:
        return ["dropout was set to 0 for the comparison"] if dropping.zeroed else []
    reasons: dict[str, list[str]] = {}
    for name in sorted(dropping.zeroed):
        reason = off.get(name, "its mask is drawn inside a kernel, which does not return it")
        reasons.setdefault(reason, []).append(name or "the model's own forward")
    return [f"dropout was set to 0 in {listed(names)}: {reason}" for reason, names in reasons.items()]


def _drawn(x: Tensor, draw: Callable[[Tensor], Tensor], shifts: bool) -> DropoutMask:
    """The mask that the function draws for a tensor like x, from the same random numbers."""
    if not shifts:
        factor = draw(torch.ones_like(x))
        largest = float(local_part(factor).max()) if local_part(factor).numel() else 0.0
        return DropoutMask(factor != 0, largest or 1.0)
    # A function that shifts is x * kept * scale + shift with an unknown shift, so it is called twice from the same state:
    # for zeros, which gives the shift, and for ones.
    state = torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None
    ones = draw(torch.ones_like(x))
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], x.device)
    shift = draw(torch.zeros_like(x))
    return DropoutMask(ones - shift, 1.0, shift)


def _factor(mask: DropoutMask, x: Tensor) -> Tensor:
    assert mask.kept is not None
    return mask.kept.to(x.device, x.dtype) * mask.scale


def _on_host(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach()).to("cpu", copy=True)


def _is_recomputed() -> bool:
    """Whether this is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def _replaced(name: str, mode: Dropping, own: Any) -> Iterator[None]:
    setattr(F, name, lambda *args, **kwargs: mode.__torch_function__(own, (), args, kwargs))
    try:
        yield
    finally:
        setattr(F, name, own)

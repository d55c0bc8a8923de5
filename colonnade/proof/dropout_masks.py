"""Dropout in a comparison: the masks of the ranks are noted, and one process drops the same, joined by the places of the ranks.

Every dropout of a model is seen as it is called, in whichever module: `Noting` on the ranks, `Replaying` in one process,
and `Nothing` where nothing is to be dropped. The ranks draw from their own random numbers as they always do, also when a
module is computed again in the backward pass. Where no way of joining the masks fits, that module is named.
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
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.forward import ModelHook
from colonnade.parallel.held import checksum

# --- Places: which part of one process's tensor each rank's tensor is, by the shapes, the groups of the modes and the numbers ---


Shape = tuple[int, ...]
Groups = Mapping[str, Sequence[Sequence[int]]]
Place = tuple[Tensor, ...]
"""Of a rank's part: in each dimension, the numbers that its rows have in the whole."""
Places = Mapping[int, Place]
_NEAR = 0.01
"""How far, relative to their length, the ranks' numbers may be from those of one process at the places that they are given."""


def places_for(
    shapes: Mapping[int, Shape], whole: Shape, groups: Groups, inputs: Mapping[int, Tensor], x: Tensor, anyhow: bool
) -> Places | str:
    """Where the ranks' parts lie in `whole`, or why that is not known. `inputs`: what ranks hold of x.

    Of several ways that the shapes allow, the one by which the ranks' numbers are those of x. `anyhow`: take the nearest.
    """
    local = next(iter(shapes.values()))
    if any(shape != local for shape in shapes.values()) or len(local) != len(whole):
        return f"the ranks hold parts of different shapes there, as {sorted(set(shapes.values()))[:4]}"
    if any(not mine or full % mine for mine, full in zip(local, whole, strict=True)):
        return f"the ranks hold {local} there, of which {whole} cannot be made"
    ways = list(_ways(list(shapes), local, whole, groups))
    if not ways:
        return f"the ranks hold {local} there, and no groups of ranks make {whole} of it"
    if len(inputs) < len(shapes):
        return ways[0]  # there is nothing to choose by
    truth = x.detach().to("cpu", torch.float32)
    best = min(ways, key=lambda way: _error(way, inputs, truth))
    if _error(best, inputs, truth) <= _NEAR:
        return best
    cut = [dim for dim, (mine, full) in enumerate(zip(local, whole, strict=True)) if mine < full]
    orders = [_reordered(way, dim, inputs, truth) for way in ways for dim in cut]
    for order in orders:
        if _error(order, inputs, truth) <= _NEAR:
            return order
    return best if anyhow else "what the ranks drop from is not what one process drops from, in any order of its parts"


def joined(parts: Mapping[int, Tensor], places: Places, shape: Shape) -> Tensor:
    """The whole; of several holders of a part, the first one's."""
    whole = next(iter(parts.values())).new_empty(shape)
    for rank in reversed(list(parts)):
        whole[torch.meshgrid(*places[rank], indexing="ij")] = parts[rank]
    return whole


def _error(places: Places, inputs: Mapping[int, Tensor], truth: Tensor) -> float:
    """The distance of the rank that is farthest from the truth, in units of the truth's length."""
    size = float(truth.norm()) or 1.0
    return max(float((mine - _at(truth, places[rank])).norm()) / size for rank, mine in inputs.items())


def _at(whole: Tensor, place: Place) -> Tensor:
    return whole[torch.meshgrid(*place, indexing="ij")]


def _reordered(places: Places, dim: int, inputs: Mapping[int, Tensor], truth: Tensor) -> Places:
    """These places with the rows of one dimension where the truth has them: sequences may be dealt out in any order."""
    found = {}
    for rank, place in places.items():
        everything = _at(truth, (*place[:dim], torch.arange(truth.shape[dim]), *place[dim + 1 :]))
        mine, theirs = (one.movedim(dim, 0).flatten(1) for one in (inputs[rank], everything))
        found[rank] = (*place[:dim], torch.cdist(mine, theirs).argmin(1), *place[dim + 1 :])
    return found


def _ways(ranks: Sequence[int], local: Shape, whole: Shape, groups: Groups) -> Iterator[Places]:
    """Every way in which modes can cut `whole` into parts like `local`: each dimension by one mode or two, the first of them outside."""
    parts = [full // mine for mine, full in zip(local, whole, strict=True)]
    numbers = _numbers(ranks, groups)
    sizes = {mode: len(set(of.values())) for mode, of in numbers.items()}
    cutters = [(), *((mode,) for mode in numbers), *permutations(numbers, 2)]
    choices = [[modes for modes in cutters if prod(sizes[mode] for mode in modes) == count] for count in parts]
    seen = set()
    for chosen in product(*choices):
        cells = {}
        for rank in ranks:
            cell = [0] * len(parts)
            for dim, modes in enumerate(chosen):
                for mode in modes:
                    cell[dim] = cell[dim] * sizes[mode] + numbers[mode][rank]
            cells[rank] = tuple(cell)
        if len(set(cells.values())) == prod(parts) and (key := tuple(cells.values())) not in seen:
            seen.add(key)
            yield {
                rank: tuple(torch.arange(at * size, (at + 1) * size) for at, size in zip(cell, local, strict=True))
                for rank, cell in cells.items()
            }


def _numbers(ranks: Sequence[int], groups: Groups) -> dict[str, dict[int, int]]:
    """By mode in which these ranks differ: the place of each rank in its group, from 0 without gaps."""
    found = {}
    for mode, lists in groups.items():
        at = {rank: list(group).index(rank) for group in lists for rank in group if rank in ranks}
        order = {number: place for place, number in enumerate(sorted(set(at.values())))}
        if len(at) == len(ranks) and len(order) > 1:
            found[mode] = {rank: order[number] for rank, number in at.items()}
    return found


# --- Dropout that is seen, noted and repeated ---

DRAWN_BYTES = 256 << 20
"""Masks of a rank are kept up to this size in all."""
_DROPOUT, _ATTENTION = F.dropout, F.scaled_dot_product_attention
_SHIFTING = (F.alpha_dropout, F.feature_alpha_dropout)
_DROPS = (_DROPOUT, F.dropout1d, F.dropout2d, F.dropout3d, *_SHIFTING)


@dataclass(frozen=True)
class DropoutMask:
    """The effect of one call of dropout: input * `kept` * `scale` + `shift`. `kept` None: too large to keep."""

    kept: Tensor | None
    scale: float = 1.0
    shift: Tensor | None = None
    input: Tensor | None = None
    """The input of the first call in a module: by that the places of the ranks are found."""


Masks = dict[str, list[DropoutMask]]
"""Of one step: by module, in the order of its calls."""


class Dropping(TorchFunctionMode):
    """Sees the dropout of a model. What a call does is up to `factors`; `off` are modules in which nothing is dropped."""

    def __init__(self, off: Collection[str] = ()) -> None:
        super().__init__()
        self.off = frozenset(off)
        self.zeroed: set[str] = set()
        """The modules in which something was to be dropped and was not."""
        self.share: int | None = None
        """Which share of the batches is being run; None: all of them."""
        self.on_backward: Callable[..., None] = lambda *args, **kwargs: None
        """Called at each backward pass, with the arguments of that."""
        self._inside: list[str] = []

    def begin_step(self, step: int, share: int | None = None) -> None:
        """This step begins, on all batches or on one share of them."""
        self.share = share

    @contextmanager
    def watching(self, model: nn.Module, rename: Callable[[str], str] = lambda name: name) -> Iterator[None]:
        """Follow in which of the model's modules a call is made. Modules that drop inside a kernel drop nothing meanwhile."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                own = rename(name)
                enter = module.register_forward_pre_hook(ModelHook(lambda *_, own=own: self._inside.append(own)))
                left = ModelHook(lambda *_, own=own: self._leave(own))
                leave = module.register_forward_hook(left, always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
                if _drops_in_kernel(module):
                    self.zeroed.add(own)
                    stack.callback(setattr, module, "dropout", module.dropout)
                    module.dropout = 0.0
            yield

    def _leave(self, name: str) -> None:
        while self._inside and self._inside.pop() != name:
            pass  # of modules that raised

    def factors(self, module: str, x: Tensor, draw: Callable[[Tensor], Tensor], shifts: bool) -> DropoutMask | None:
        """The mask for x; None: nothing is dropped. `draw` drops from a tensor that is like x."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPS:
            return self._dropout(func, args, kwargs)
        if func is _ATTENTION and (kwargs.get("dropout_p") or args[4:5]):
            return self._attention(*args, **kwargs)
        if func in BACKWARD:
            self.on_backward(*args, **kwargs)
            return backward_inside(self, func, args, kwargs)
        if func is F.multi_head_attention_forward:  # which calls both, where no mode sees it
            with _replaced("dropout", self, _DROPOUT), _replaced("scaled_dot_product_attention", self, _ATTENTION):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
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
        """Attention by plain operators, since a kernel does not tell what it drops."""
        if not dropout_p or self._here in self.off:
            if dropout_p:
                self.zeroed.add(self._here)
            return _ATTENTION(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            key, value = (one.repeat_interleave(query.size(-3) // one.size(-3), -3) for one in (key, value))
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
    """Nothing is dropped."""

    def factors(self, module: str, x: Tensor, draw: Callable[[Tensor], Tensor], shifts: bool) -> DropoutMask | None:
        return None


class Noting(Dropping):
    """Drops as torch does, and notes what: `masks` are those of the step that is under way."""

    def __init__(self, off: Collection[str] = ()) -> None:
        super().__init__(off)
        self.masks: Masks = {}
        self._room, self._first = DRAWN_BYTES, True

    def begin_step(self, step: int, share: int | None = None) -> None:
        """Masks of other steps are not kept here any longer."""
        super().begin_step(step, share)
        self.masks, self._first = {}, step == 0

    def factors(self, module: str, x: Tensor, draw: Callable[[Tensor], Tensor], shifts: bool) -> DropoutMask | None:
        with torch.no_grad():
            mask = _drawn(x, draw, shifts)
        if not _computed_again():
            some = self.masks.setdefault(module, [])
            some.append(self._noted(mask, x, first=self._first and not some))
        return mask

    def _noted(self, mask: DropoutMask, x: Tensor, first: bool) -> DropoutMask:
        assert mask.kept is not None
        size = mask.kept.numel() * (1 if mask.shift is None else 16) + x.numel() * 4 * first
        if self._room < size:
            return DropoutMask(None)
        self._room -= size
        shift = None if mask.shift is None else _on_host(mask.shift)
        return DropoutMask(_on_host(mask.kept), mask.scale, shift, _on_host(x).float() if first else None)


@dataclass
class Dropped:
    """The masks of the ranks, and where the ranks are: all that one process needs to drop the same."""

    steps: Sequence[Mapping[int, Masks]]
    """Of each step: by rank."""
    groups: Mapping[str, Sequence[Sequence[int]]]
    shares: Sequence[Collection[int]]
    """The ranks that see each share of the data."""
    off: Collection[str] = ()


@dataclass
class Replays:
    """The outcome of repeating masks in one process."""

    apart: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By module, in the order in which they run: the ranks that drop other elements of what they hold alike."""
    not_joined: dict[str, str] = field(default_factory=dict)
    """By module: the reason why its masks are none that one process could have."""


class Replaying(Dropping):
    """Drops what the ranks dropped."""

    def __init__(self, dropped: Dropped) -> None:
        super().__init__(dropped.off)
        self.found = Replays()
        self._dropped = dropped
        self._places: dict[Any, Places] = {}
        self.begin_step(0)

    def begin_step(self, step: int, share: int | None = None) -> None:
        super().begin_step(step, share)
        self._step = step
        self._calls: dict[Any, int] = {}
        self._again: dict[Any, DropoutMask] = {}

    def factors(self, module: str, x: Tensor, draw: Callable[[Tensor], Tensor], shifts: bool) -> DropoutMask | None:
        key = (module, *checksum(x.detach()).tolist())
        if _computed_again():
            return self._again.get(key)
        at = self._calls[module, self.share] = self._calls.get((module, self.share), -1) + 1
        mask = self._joined(module, at, x)
        if mask is not None:
            self._again[key] = mask
        return mask

    def _joined(self, module: str, at: int, x: Tensor) -> DropoutMask | None:
        if module in self.found.not_joined:
            return None
        ranks = None if self.share is None else self._dropped.shares[self.share]
        theirs = {
            rank: some[at]
            for rank, masks in self._dropped.steps[self._step].items()
            if at < len(some := masks.get(module, [])) and (ranks is None or rank in ranks)
        }
        kept = {rank: mask.kept for rank, mask in theirs.items() if mask.kept is not None}
        places: Places | str = "no rank drops anything there"
        if len(kept) < len(theirs):
            places = f"the masks of a rank take more than {DRAWN_BYTES >> 20} MiB"
        elif theirs:
            places = self._places_of(module, x, theirs, kept)
        reason = places if isinstance(places, str) else self._disagree(module, places, kept)
        if isinstance(places, str) or reason:
            self.found.not_joined[module] = reason
            return None
        shape, shifts = tuple(x.shape), {rank: mask.shift for rank, mask in theirs.items() if mask.shift is not None}
        shift = joined(shifts, places, shape) if shifts else None
        return DropoutMask(joined(kept, places, shape), next(iter(theirs.values())).scale, shift)

    def _places_of(
        self, module: str, x: Tensor, theirs: Mapping[int, DropoutMask], kept: Mapping[int, Tensor]
    ) -> Places | str:
        key = (module, self.share, tuple(x.shape), *(tuple(one.shape) for one in kept.values()))
        if key not in self._places:
            shapes = {rank: tuple(one.shape) for rank, one in kept.items()}
            inputs = {rank: mask.input for rank, mask in theirs.items() if mask.input is not None}
            anyhow = any(self.found.apart.values()) or bool(self.found.not_joined)  # what comes after it differs anyway
            found = places_for(shapes, tuple(x.shape), self._dropped.groups, inputs, x, anyhow)
            if isinstance(found, str):
                return found
            self._places[key] = found
        return self._places[key]

    def _disagree(self, module: str, places: Places, kept: Mapping[int, Tensor]) -> str:
        """Ranks that hold the same elements must drop the same of them; those that see distinct data cannot be told to."""
        share_of = {rank: number for number, ranks in enumerate(self._dropped.shares) for rank in ranks}
        first: dict[Any, int] = {}
        apart = self.found.apart.setdefault(module, ())
        for rank, place in places.items():
            holder = first.setdefault(tuple(tuple(rows.tolist()) for rows in place), rank)
            if not torch.equal(kept[rank], kept[holder]):
                if share_of.get(rank) != share_of.get(holder):
                    return "ranks that see distinct data drop other elements of something that they all have"
                if rank not in apart:
                    apart = self.found.apart[module] = (*apart, rank)
        return ""


def notes_of(dropping: Dropping, off: Mapping[str, str] | None) -> list[str]:
    """Notes about dropout that was turned off. `off`: by module, the reason."""
    if off is None:  # nowhere is anything dropped
        return ["dropout was set to 0 for the comparison"] if dropping.zeroed else []
    reasons: dict[str, list[str]] = {}
    for name in sorted(dropping.zeroed):
        reason = off.get(name, "its mask is drawn inside a kernel, which does not tell it")
        reasons.setdefault(reason, []).append(name or "the model's own forward")
    return [f"dropout was set to 0 in {listed(names)}: {reason}" for reason, names in reasons.items()]


def _drawn(x: Tensor, draw: Callable[[Tensor], Tensor], shifts: bool) -> DropoutMask:
    """The mask that the function draws for a tensor like x, from the random numbers that it would draw for x."""
    if not shifts:
        factor = draw(torch.ones_like(x))
        largest = float(local_part(factor).max()) if local_part(factor).numel() else 0.0
        return DropoutMask(factor != 0, largest or 1.0)
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


def _computed_again() -> bool:
    """Inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _drops_in_kernel(module: nn.Module) -> bool:
    """Whether its dropout cannot be seen as a call: in recurrent layers, and in attention between ranks."""
    rate = vars(module).get("dropout")
    return bool(isinstance(rate, float) and rate) and (
        isinstance(module, nn.RNNBase) or bool(getattr(module, "_reaches", False))
    )


@contextmanager
def _replaced(name: str, mode: Dropping, own: Any) -> Iterator[None]:
    setattr(F, name, lambda *args, **kwargs: mode.__torch_function__(own, (), args, kwargs))
    try:
        yield
    finally:
        setattr(F, name, own)

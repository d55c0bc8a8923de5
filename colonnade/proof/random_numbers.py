"""Random numbers in a comparison: recorded on the ranks, joined, and used again by the single process.

Two modes intercept the operators of a run. A `TorchDispatchMode` sees every operator with the tag
`nondeterministic_seeded`, in modules, between modules and in backward passes: `RecordedDraws` records the results on
the ranks by module and order, and `ReplayedDraws` replaces those of the single process by the joined results. A
`TorchFunctionMode` sees the dropout functions, to set the rate to 0 in modules whose masks cannot be joined. If the
results of any other operator cannot be joined, the single process draws its own numbers, different ones in each
perturbed run: the spread of these runs then shows which values depend on them (`compare.py`).
"""

from __future__ import annotations

import inspect
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import permutations, product
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade.comm.torch_versions import BACKWARD, backward_inside
from colonnade.errors import listed
from colonnade.parallel.forward import ModelHook
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
    shapes: Mapping[int, Shape],
    whole: Shape,
    groups: Groups,
    inputs: Mapping[int, Tensor],
    x: Tensor | None,
    anyhow: bool,
    numbers: Mapping[int, Tensor] | None = None,
    data_ranks: Sequence[Collection[int]] = (),
) -> Places | str:
    """Find the indices of each rank's shard in a tensor of shape `whole`; returns a reason as text if they are unknown.

    Args:
        shapes: The shape of each rank's shard.
        whole: The shape of the full tensor.
        groups: The process groups of the modes.
        inputs: The values of the ranks, to choose the way of sharding `whole` that matches `x`.
        x: The values of the single process.
        anyhow: If no way of sharding matches, use the nearest one.
        numbers: The random numbers of the ranks. Without inputs, a way is preferred if ranks with the same shard have equal
            numbers.
        data_ranks: The ranks of each data rank. The rows of data ranks follow one another in the full tensor.
    """
    # Batches may have unequal numbers of rows.
    local = next(iter(shapes.values()))
    if any(shape != local for shape in shapes.values()):
        of_data_rank = [{shapes[rank] for rank in some if rank in shapes} for some in data_ranks]
        if whole and all(len(some) == 1 for some in of_data_rank):
            rows = [shape[0] if shape else 0 for some in of_data_rank for shape in some]
            rest = {shape[1:] for some in of_data_rank for shape in some}
            if rest == {whole[1:]} and sum(rows) == whole[0]:
                others = [torch.arange(size) for size in whole[1:]]
                return {
                    rank: (torch.arange(sum(rows[:at]), sum(rows[: at + 1])), *others)
                    for at, some in enumerate(data_ranks)
                    for rank in some
                    if rank in shapes
                }
    if any(shape != local for shape in shapes.values()) or len(local) != len(whole):
        return f"its input has different shapes on the ranks, for example {sorted(set(shapes.values()))[:4]}"
    if any(not size or full % size for size, full in zip(local, whole, strict=True)):
        return f"its input has the shape {local} on each rank, which does not divide {whole}"

    # Every way to shard the tensor: each dimension over one mode or two, of which the first is the outer one. Different modes
    # may give the same shards, which count once.
    ways, seen, doubts = list[Places](), set[Any](), list[tuple[bool, bool]]()
    counts = [full // size for size, full in zip(local, whole, strict=True)]
    positions = _numbers(list(shapes), groups)
    sizes = {mode: len(set(of.values())) for mode, of in positions.items()}
    orders = [(), *((mode,) for mode in positions), *permutations(positions, 2)]
    choices = [[modes for modes in orders if prod(sizes[mode] for mode in modes) == count] for count in counts]
    data_rank_of = {rank: at for at, some in enumerate(data_ranks) for rank in some}
    for chosen in product(*choices):
        cells = {}
        for rank in shapes:
            cell = [0] * len(counts)
            for dim, modes in enumerate(chosen):
                for mode in modes:
                    cell[dim] = cell[dim] * sizes[mode] + positions[mode][rank]
            cells[rank] = tuple(cell)
        key = tuple(cells.values())
        if len(set(key)) < prod(counts) or key in seen:
            continue
        seen.add(key)
        ways.append(
            {
                rank: tuple(torch.arange(at * size, (at + 1) * size) for at, size in zip(cell, local, strict=True))
                for rank, cell in cells.items()
            }
        )
        # Without inputs to compare, ranks at one place should have drawn equal numbers, and rows should follow the batch.
        first: dict[Shape, int] = {}
        drawn = {} if numbers is None else numbers
        apart = any(not torch.equal(some, drawn[first.setdefault(cells[rank], rank)]) for rank, some in drawn.items())
        doubts.append((apart, any(cell[:1] not in ((), (data_rank_of.get(rank),)) for rank, cell in cells.items())))
    if not ways:
        return f"its input has the shape {local} on each rank, and no process groups shard {whole} like that"
    if x is None or len(inputs) < len(shapes):
        return ways[min(range(len(ways)), key=doubts.__getitem__)]
    truth, inputs = x.detach().cpu().double(), {rank: some.double() for rank, some in inputs.items()}
    errors = [_error(way, inputs, truth) for way in ways]
    best = min(
        range(len(ways)), key=lambda at: (errors[at] > _NEAR, doubts[at] if errors[at] <= _NEAR else (), errors[at])
    )
    if errors[best] <= _NEAR:
        return ways[best]

    # The rows of a sharded dimension may have any order, as in sequences that are dealt out: each row goes to the most similar
    # row of the single process.
    for way in ways:
        for dim in [dim for dim, count in enumerate(counts) if count > 1]:
            order = {}
            for rank, place in way.items():
                full = _at(truth, (*place[:dim], torch.arange(truth.shape[dim]), *place[dim + 1 :]))
                own, candidates = (some.movedim(dim, 0).flatten(1) for some in (inputs[rank], full))
                order[rank] = (*place[:dim], torch.cdist(own, candidates).argmin(1), *place[dim + 1 :])
            if _error(order, inputs, truth) <= _NEAR:
                return order
    return ways[best] if anyhow else "its inputs on the ranks are not those of the single process, in any order"


def joined(parts: Mapping[int, Tensor], places: Places, shape: Shape) -> Tensor:
    """Join the shards of the ranks to the full tensor. If several ranks have the same elements, use those of the first rank."""
    if not shape:
        return next(iter(parts.values()))
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
    """For each mode in which these ranks differ: the position of each rank in its group, numbered from 0 without gaps."""
    found = {}
    for mode, lists in groups.items():
        at = {rank: list(group).index(rank) for group in lists for rank in group if rank in ranks}
        order = {number: place for place, number in enumerate(sorted(set(at.values())))}
        if len(at) == len(ranks) and len(order) > 1:
            found[mode] = {rank: order[number] for rank, number in at.items()}
    return found


# --- Seeing, recording and repeating random operators ---

DRAWN_BYTES = 256 << 20
"""The largest total size of the random numbers that are kept on a rank."""
LOOP = "the loop, outside of the model"
"""The name under which draws outside of all modules are recorded."""
_BACKWARD = " (backward)"
_ATTENTION = F.scaled_dot_product_attention
_DROPS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_LIKE = ("empty_like", "zeros_like", "ones_like")
_KERNEL = "its random numbers are drawn inside a kernel, which does not return them"


@dataclass(frozen=True)
class Draw:
    """The result of one random operator. If the numbers are unknown, `numbers` is None and `unknown` is the reason."""

    operator: str
    numbers: Tensor | None
    unknown: str = ""
    bound: int | None = None
    """If the numbers are indices (of a permutation, for example): the exclusive upper bound."""
    is_dropout: bool = False
    input: Tensor | None = None
    """The tensor that the numbers are for, only of an operator's first call in a module.

    Places of the ranks are inferred from it.
    """


Draws = dict[str, list[Draw]]
"""The draws of one step: by module, in the order of its calls."""


class RandomNumbers(TorchFunctionMode):
    """Intercepts the random operators of a model. Subclasses override `drawn` to record or replace the results.

    Args:
        off: The modules without dropout; None: dropout is off everywhere.
    """

    def __init__(self, off: Collection[str] | None = ()) -> None:
        super().__init__()
        self.off = off
        self.zeroed: set[str] = set()
        """The modules whose dropout was turned off."""
        self.data_rank: int | None = None
        """The data rank whose batch is running; None: the global batch."""
        self.on_backward: Callable[..., None] = lambda *args, **kwargs: None
        """Called at each backward pass with its arguments."""
        self.host: dict[str, list[int]] = {}
        """By module: the states of Python's and NumPy's generators after each draw that was made there."""
        self.host_seed: int | None = None
        """The next seed of Python's and NumPy's generators in a perturbed run, if the ranks draw different numbers from them."""
        self._host_state = _host_state()
        self._inside: list[str] = []
        self._is_dropout, self._is_paused, self.is_compiled = False, False, False
        self._like: deque[tuple[Tensor, Tensor]] = deque(maxlen=4)
        """The last tensors made by `empty_like`, which random operators fill in place, with the tensors that they are like."""

    def begin_step(self, step: int, data_rank: int | None = None) -> None:
        """Start a step on the global batch, or on the batch of one data rank."""
        self.data_rank = data_rank
        self._seed_host()

    def drawn(self, draw: Draw, state: Any, again: Callable[[], Tensor]) -> Tensor | None:
        """Called with the result of a random operator. Returns the numbers to use instead; None keeps the result.

        Args:
            draw: The operator and its result.
            state: The operator and the state of its generator before the call; equal states give equal numbers.
            again: Calls the operator again.
        """
        return None

    @contextmanager
    def watching(self, model: nn.Module, rename: Callable[[str], str] = lambda name: name) -> Iterator[None]:
        """Intercept random operators in the block, and track the module in which each is called."""

        def enter(name: str) -> None:
            self.note_host()
            if not self._inside:
                self._seed_host()
            self._inside.append(name)

        def leave(name: str) -> None:
            self.note_host()
            while self._inside and self._inside.pop() != name:
                pass  # modules inside that raised

        self._host_state = _host_state()
        with ExitStack() as stack:
            for name, module in model.named_modules():
                own = rename(name)
                compiled = getattr(module, "_compiled_call_impl", None) or type(module).__name__ == "OptimizedModule"
                self.is_compiled = self.is_compiled or bool(compiled)
                entered = ModelHook(lambda *_, own=own: enter(own))
                left = ModelHook(lambda *_, own=own: leave(own))
                stack.callback(module.register_forward_pre_hook(entered).remove)
                stack.callback(module.register_forward_hook(left, always_call=True).remove)

                # The dropout of attention between ranks and of recurrent layers on a GPU is drawn inside a kernel.
                rate = vars(module).get("dropout")
                on_gpu = self.off is None or any(parameter.is_cuda for parameter in module.parameters())
                in_kernel = isinstance(module, nn.RNNBase) and on_gpu
                if isinstance(rate, float) and rate and (in_kernel or getattr(module, "is_split_over_ranks", False)):
                    self.zeroed.add(own)
                    stack.callback(setattr, module, "dropout", rate)
                    module.dropout = 0.0
            stack.enter_context(_Operators(self))
            yield
            self.note_host()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not intercept random operators in the block, in which a loader makes a batch.

        Batches need no random numbers: the single process gets the batches of the ranks.
        """
        self.note_host()
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused, self._host_state = before, _host_state()
            self._seed_host()

    @contextmanager
    def kept_host(self) -> Iterator[None]:
        """Restore Python's and NumPy's generators after the block."""
        before, states = {name: list(some) for name, some in self.host.items()}, host_generators()
        try:
            yield
        finally:
            set_host_generators(states)
            self.host, self._host_state = before, _host_state()

    def _seed_host(self) -> None:
        """Give Python's and NumPy's generators another seed, if they have to differ between runs."""
        if self.host_seed is None:
            return
        self.host_seed += 1000
        random.seed(self.host_seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(self.host_seed)
        self._host_state = _host_state()

    def note_host(self) -> None:
        """Record whether the current module has drawn from Python's or NumPy's generator since the last call."""
        state = _host_state()
        if state != self._host_state and not self._is_paused:
            self.host.setdefault(self._here, []).append(state)
        self._host_state = state

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in BACKWARD:
            self.on_backward(*args, **kwargs)
            return backward_inside(self, func, args, kwargs)
        if func in _DROPS or func is F.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            call, name = bound.arguments, "p" if func in _DROPS else "dropout_p"
            p = call[name] if call["training"] else 0.0
            return self._dropping(lambda p: func(**{**call, name: p}), p, func not in _DROPS)
        if func is _ATTENTION:
            given = (
                dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
            )
            return self._dropping(lambda p: _ATTENTION(**{**given, "dropout_p": p}), given.get("dropout_p", 0.0), True)
        return func(*args, **kwargs)

    def _dropping(self, call: Callable[[float], Any], p: float, has_kernel: bool) -> Any:
        """Call a function that drops with the rate p, or with 0 where dropout is off."""
        if not p:
            return call(p)
        if self.off is None or self._here in self.off:
            self.zeroed.add(self._here)
            return call(0.0)
        # Fused attention draws its mask inside the kernel, so attention with dropout is computed by plain operators.
        before, self._is_dropout = self._is_dropout, True
        try:
            with sdpa_kernel(SDPBackend.MATH) if has_kernel else nullcontext():
                return call(p)
        finally:
            self._is_dropout = before

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a random operator; returns its result, or the replacement that `drawn` returns."""
        arguments = func._schema.arguments
        given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        given |= {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
        tensors = [value for value in given.values() if isinstance(value, Tensor)]
        name = func._schema.name.removeprefix("aten::")

        # Kernels with a rate of 0 and layers in evaluation mode draw nothing.
        rates = [given[key] for key in ("dropout_p", "dropout") if key in given]
        if name == "native_dropout":
            rates = [given["p"] if given["train"] is not False else 0.0]
        is_off = (rates and not any(rates)) or (given.get("training") is False and name.startswith("rrelu"))
        if is_off or any(tensor.is_meta for tensor in tensors) or str(given.get("device")) == "meta":
            return func(*args, **kwargs)
        device = tensors[0].device if tensors else torch.device(given.get("device") or "cpu")
        state = (func, _state(given.get("generator"), device))

        # Most operators return random numbers, or fill a tensor with them. The others compute with them too, and are computed
        # again from other numbers: rrelu and dropout multiply their input by them.
        times = (
            given["self"].clone() if name.startswith("rrelu") else given["input"] if name == "native_dropout" else None
        )
        out = func(*args, **kwargs)
        result = out
        if times is not None:
            result = out[1] if isinstance(out, tuple) else given["noise"]
        elif rates or not isinstance(out, Tensor):
            result = None
        if isinstance(result, Tensor) and result.numel() == 0:
            return out
        bound = {"randperm": "n", "randint": "high", "randint_like": "high"}.get(name)
        limit = given.get(bound) if bound and not given.get("low") else None
        if name == "multinomial":
            limit = int(given["self"].shape[-1])
        draw = Draw(
            name,
            None if result is None else local_part(result.detach()),
            _KERNEL if result is None else "",
            limit if isinstance(limit, int) else None,
            self._is_dropout,
            None if result is None else self._operand(result, tensors),
        )

        def again() -> Tensor:
            new = func(*args, **kwargs)
            return local_part((new if times is None else result).detach())

        numbers = self.drawn(draw, state, again)
        if numbers is not None and result is not None:
            local_part(result).copy_(numbers)
            if times is not None:
                scale = 1.0 / (1.0 - given["p"]) if name == "native_dropout" and given["p"] < 1 else 1.0
                (out[0] if isinstance(out, tuple) else out).copy_(times * result * scale)
        return out

    def _operand(self, result: Tensor, tensors: Sequence[Tensor]) -> Tensor | None:
        """The tensor to which random numbers are applied: an argument, or x if the result fills an `empty_like(x)`."""
        likes = [source for made, source in self._like if made is result]
        for tensor in (*likes, *(tensor for tensor in tensors if tensor is not result)):
            tensor = local_part(tensor.detach())
            shape = tuple(local_part(result).shape)
            if tensor.is_floating_point() and tensor.dim() == len(shape):
                # Numbers for whole rows or channels have dimensions of size 1, over which the tensor is summed.
                over = [dim for dim, size in enumerate(shape) if size == 1 != tensor.shape[dim]]
                tensor = tensor.sum(over, keepdim=True) if over else tensor
                if tuple(tensor.shape) == shape:
                    return tensor
        return None

    @property
    def _here(self) -> str:
        return self._inside[-1] if self._inside else LOOP


class _Operators(TorchDispatchMode):
    """Calls `called` of its owner for random operators."""

    _is_random: dict[Any, bool] = {}

    def __init__(self, owner: RandomNumbers) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # torch hands a tensor that it made of a Python number to a mode as the number.
        if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], Tensor):
            return args[0]
        is_random = self._is_random.get(func)
        if is_random is None:
            is_random = self._is_random[func] = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and not self._owner._is_paused:
            if func._can_decompose():  # in inference mode, composite operators come whole
                with self:
                    return func.decompose(*args, **kwargs)
            return self._owner.called(func, args, kwargs)
        out = func(*args, **kwargs)
        if func.namespace == "aten" and func._schema.name.removeprefix("aten::") in _LIKE:
            self._owner._like.append((out, args[0]))
        return out


class RecordedDraws(RandomNumbers):
    """Keeps the results of random operators unchanged, and records those of the current step in `draws`."""

    def __init__(self, off: Collection[str] | None = ()) -> None:
        super().__init__(off)
        self.draws: Draws = {}
        self._room, self._first = DRAWN_BYTES, True
        self._seen: set[Any] = set()

    def begin_step(self, step: int, data_rank: int | None = None) -> None:
        """Start a step, and forget the draws of the previous one."""
        super().begin_step(step, data_rank)
        self.draws, self._first, self._seen = {}, step == 0, set()

    def drawn(self, draw: Draw, state: Any, again: Callable[[], Tensor]) -> Tensor | None:
        # Activation checkpointing restores the generator, so a module that is recomputed draws the same numbers again.
        if _is_backward() and state in self._seen:
            return None
        self._seen.add(state)
        some = self.draws.setdefault(self._here + _BACKWARD * _is_backward(), [])
        is_first = self._first and all(one.operator != draw.operator for one in some)
        numbers, given, unknown = draw.numbers, draw.input if is_first else None, draw.unknown
        if numbers is not None and draw.operator.startswith("bernoulli") and numbers.is_floating_point():
            numbers = numbers != 0  # an eighth of the memory
        size = sum(kept.numel() * kept.element_size() for kept in (numbers, given) if kept is not None)
        if self._room < size:
            numbers, given, size = None, None, 0
            unknown = f"the random numbers of a rank take more than {DRAWN_BYTES >> 20} MiB"
        self._room -= size
        some.append(
            Draw(
                draw.operator,
                None if numbers is None else numbers.to("cpu", copy=True),
                unknown,
                draw.bound,
                draw.is_dropout,
                None if given is None else given.to("cpu", copy=True),
            )
        )
        return None


@dataclass
class DrawsOfRanks:
    """The recorded draws and the process groups of the ranks, as input of `ReplayedDraws`."""

    steps: Sequence[Mapping[int, Draws]]
    """For each step, the draws by rank."""
    groups: Mapping[str, Sequence[Sequence[int]]]
    data_ranks: Sequence[Collection[int]]
    """For each data rank, the ranks that see its batch."""
    off: Collection[str] | None = ()


@dataclass
class Replays:
    """The outcome of repeating the ranks' draws in the single process."""

    differing: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """For each module, in the order of execution: the ranks whose numbers differ from those of their replicas."""
    not_joined: dict[str, str] = field(default_factory=dict)
    """For each module: the reason why its dropout masks cannot be joined."""
    redrawn: dict[str, str] = field(default_factory=dict)
    """For each module: the reason why its other random numbers cannot be joined, so that the single process draws its own."""
    equal_shards: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """For each module: ranks with the same data that draw equal numbers for different shards of a tensor."""


class ReplayedDraws(RandomNumbers):
    """Replaces the random numbers of the single process by those of the ranks.

    Args:
        of_ranks: The draws of the ranks.
        redraws: The number of the perturbed run, from 1; 0: the reference. Numbers that cannot be joined differ between runs.
    """

    def __init__(self, of_ranks: DrawsOfRanks, redraws: int = 0) -> None:
        super().__init__(of_ranks.off)
        self.found, self.redraws = Replays(), redraws
        self._of_ranks = of_ranks
        self._places: dict[Any, Places] = {}
        self.begin_step(0)

    def begin_step(self, step: int, data_rank: int | None = None) -> None:
        super().begin_step(step, data_rank)
        self._step = step
        self._calls: dict[Any, int] = {}
        self._given: dict[Any, Tensor] = {}

    def drawn(self, draw: Draw, state: Any, again: Callable[[], Tensor]) -> Tensor | None:
        if _is_backward() and state in self._given:
            return self._given[state]
        name = self._here + _BACKWARD * _is_backward()
        # Each operator is counted on its own: the ranks may need more draws, for the seeds of shards, for example.
        call = (name, draw.operator, self.data_rank)
        at = self._calls[call] = self._calls.get(call, -1) + 1
        ranks = None if self.data_rank is None else self._of_ranks.data_ranks[self.data_rank]
        steps = self._of_ranks.steps
        draws = {
            rank: some[at]
            for rank, by_module in (steps[self._step] if self._step < len(steps) else {}).items()
            if at < len(some := [one for one in by_module.get(name, []) if one.operator == draw.operator])
            and (ranks is None or rank in ranks)
        }
        numbers = self._joined(name, draws, draw)
        if isinstance(numbers, str):
            reasons = self.found.not_joined if draw.is_dropout else self.found.redrawn
            reasons.setdefault(name.removesuffix(_BACKWARD), numbers)
            if draw.numbers is None:
                return None
            # Numbers that cannot be joined differ between the perturbed runs as they do between the ranks: so a draw that leads
            # to the same decision on every rank has no effect there either, and any other has one.
            own = draw.numbers
            fitting = [one.numbers for one in draws.values() if one.numbers is not None]
            fitting = [some for some in fitting if some.shape == own.shape]
            if len(fitting) > 1:
                ordered = sorted(fitting, key=lambda some: float(some.double().mean()))
                numbers = (fitting[0], ordered[0], ordered[-1])[self.redraws]
            else:
                for _ in range(self.redraws):
                    own = again()
                numbers = own.clone()
        self._given[state] = numbers
        return numbers

    def _joined(self, name: str, draws: Mapping[int, Draw], draw: Draw) -> Tensor | str:
        """The ranks' numbers, joined for this draw; or the reason why they cannot be joined."""
        numbers = {rank: one.numbers for rank, one in draws.items() if one.numbers is not None}
        if draw.numbers is None:
            return draw.unknown
        if not draws:
            return f"no rank calls {draw.operator} there as often as a single process"
        if len(numbers) < len(draws):
            return next(one.unknown for one in draws.values() if one.unknown)
        # A module of several pipeline stages (an encoder that draws once for each of its layers) draws other numbers on each
        # stage: the order in a single process is not known.
        stages = {
            group.index(rank) for group in self._of_ranks.groups.get("PIPELINE", ()) for rank in draws if rank in group
        }
        if len(stages) > 1 and name != LOOP:
            return "several pipeline stages draw numbers there, each for its own layers"

        # The places of the ranks' numbers in those of the single process. Only the first step has inputs, so later ones use the
        # places found there.
        shape, shapes = tuple(draw.numbers.shape), {rank: tuple(some.shape) for rank, some in numbers.items()}
        key = (name, self.data_rank, shape, *shapes.items())
        if key not in self._places:
            inputs = {rank: one.input for rank, one in draws.items() if one.input is not None}
            # Downstream of a module whose numbers differ, the inputs differ anyway.
            anyhow = not draw.is_dropout or any(self.found.differing.values()) or bool(self.found.not_joined)
            of = self._of_ranks
            found = places_for(shapes, shape, of.groups, inputs, draw.input, anyhow, numbers, of.data_ranks)
            if isinstance(found, str):
                return found
            self._places[key] = found
        places = self._places[key]

        # Replicas must draw the same numbers, unless they see distinct data: those draw independently. Outside of the model, a
        # draw may have no effect on it, and if it has one, the activations of the replicas differ.
        data_rank_of = {rank: number for number, some in enumerate(self._of_ranks.data_ranks) for rank in some}
        first: dict[Any, int] = {}
        apart: tuple[int, ...] = ()
        for rank, place in places.items():
            other = first.setdefault(_key(place), rank)
            if torch.equal(numbers[rank], numbers[other]):
                continue
            if data_rank_of.get(rank) != data_rank_of.get(other):
                what = "drop different elements" if draw.is_dropout else "draw different numbers"
                return f"ranks with distinct data {what} of a tensor that they all have, of shape {shape}"
            apart = (*apart, rank)
        if name != LOOP:
            before = self.found.differing.get(name, ())
            self.found.differing[name] = (*before, *(rank for rank in apart if rank not in before))

        # Shards of ranks that see the same data should have numbers of their own. With less than two to the power of 32 outcomes,
        # numbers are equal by chance.
        for some in self._of_ranks.data_ranks:
            own = [rank for rank in some if rank in places and numbers[rank].numel() >= _BY_CHANCE]
            twins = [rank for rank in own[1:] if torch.equal(numbers[rank], numbers[own[0]])]
            twins = [rank for rank in twins if first[_key(places[rank])] != first[_key(places[own[0]])]]
            if twins and numbers[own[0]].unique().numel() > 1:
                self.found.equal_shards.setdefault(name, (own[0], *twins))

        # Indices into the rows of a rank's batch (a permutation of them, for example) are indices into the same rows of the
        # global batch.
        bounds = {one.bound for one in draws.values()}
        if bounds != {draw.bound}:
            starts = {rank: int(place[0][0]) for rank, place in places.items()} if shape else {}
            ends = {rank: starts[rank] + (draws[rank].bound or 0) for rank in starts}
            follows = all(len(place[0]) == draws[rank].bound for rank, place in places.items()) if shape else False
            if not follows or max(ends.values()) != draw.bound:
                return f"the ranks draw numbers below {sorted(map(str, bounds))[0]}, and a single process below {draw.bound}"
            numbers = {rank: some + starts[rank] for rank, some in numbers.items()}
        return joined(numbers, places, shape)


_BY_CHANCE = 32
"""Fewer numbers, which may be bits, are equal on two ranks by chance."""


def _key(place: tuple[Tensor, ...]) -> Any:
    """A place as a key: equal for ranks with the same part of a tensor."""
    return tuple(tuple(rows.tolist()) for rows in place)


def notes_of(random_numbers: RandomNumbers, off: Mapping[str, str] | None) -> list[str]:
    """Return notes about modules without dropout.

    `off` has the reason for each module; None: dropout is off everywhere.
    """
    notes = []
    if random_numbers.is_compiled:
        notes.append(
            "torch.compile was left out: random operators are recorded one by one, so all runs are in eager mode"
        )
    if off is None:
        return [*notes, *(["dropout was set to 0 for the comparison"] if random_numbers.zeroed else [])]
    reasons: dict[str, list[str]] = {}
    for name in sorted(random_numbers.zeroed):
        reason = off.get(name, "its mask is drawn inside a kernel, which does not return it")
        reasons.setdefault(reason, []).append(name or "the model's own forward")
    return [*notes, *(f"dropout was set to 0 in {listed(names)}: {reason}" for reason, names in reasons.items())]


def _is_backward() -> bool:
    """Whether this is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _state(generator: Any, device: torch.device) -> int:
    """The state of a torch generator; without a generator, the state of the device's default one."""
    if generator is not None:
        state = generator.get_state()
    elif device.type == "cpu":
        state = torch.get_rng_state()
    else:
        state = torch.get_device_module(device).get_rng_state(device)
    return hash(state.numpy().tobytes())


def host_generators() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's global generators."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def set_host_generators(states: tuple[Any, Any]) -> None:
    """Restore the states that `host_generators` returned."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def _host_state() -> int:
    """A checksum of the states of Python's and NumPy's global generators, the same in every process."""
    own, legacy = host_generators()
    found = crc32(array("L", own[1]).tobytes())
    return found if legacy is None else crc32(legacy[1].tobytes() + str(legacy[2]).encode(), found)

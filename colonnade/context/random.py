"""Random streams, one per mode, which draw equal or different numbers on the mode's ranks; and the state of all generators of a
rank as one value.

Outside any stream, ranks that see the same data draw the same numbers (dropout on a replicated tensor must agree), and ranks with
distinct data or another pipeline stage draw different ones. Inside `with streams.use(ParallelMode.TENSOR)` the ranks of a tensor
group draw different numbers, too, as dropout on a sharded tensor needs.

The numbers inside follow from the seed of the stream and one number drawn outside. Restoring torch's own generator, as activation
checkpointing does before it recomputes a layer, therefore reproduces the numbers inside a stream as well.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colonnade.context.parallel_mode import ParallelMode, mode_of
from colonnade.errors import ContextError, listed

if TYPE_CHECKING:
    from colonnade.context.parallel_context import ParallelContext

State = dict[str, Tensor]


class RandomStreams:
    """The random streams of this rank: a seed for each mode."""

    def __init__(self) -> None:
        self._seeds: dict[ParallelMode, int] = {}

    def add(self, mode: ParallelMode, seed: int, overwrite: bool = False) -> None:
        """Add a stream for `mode`. Raises if the mode already has a stream, unless `overwrite` is True."""
        mode = mode_of(mode)
        if mode in self._seeds and not overwrite:
            raise ContextError(
                f"{mode} already has a random stream. To restart all streams, call set_seed() of the context.",
                code="C012",
            )
        self._seeds[mode] = seed

    @contextmanager
    def use(self, mode: ParallelMode) -> Iterator[None]:
        """Draw from the stream of `mode` inside the block.

        Entering advances the outer generator by one number, however many are drawn inside. Ranks that draw equal numbers outside
        must therefore enter the block equally often.
        """
        mode = mode_of(mode)
        if mode not in self._seeds:
            raise ContextError(
                f"{mode} has no random stream. Streams exist for {listed(known.name for known in self._seeds)}. Add "
                f"a stream with streams.add({mode}, seed).",
                code="C012",
            )
        # The state outside is restored on exit, so that numbers drawn inside, even before an error, leave no trace there.
        drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        outside = _state()
        seed = derive_seed(self._seeds[mode], drawn)
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            _set_state(outside)

    def state_dict(self) -> dict[str, Any]:
        """The state of torch's generators ("default") and the seeds of all streams."""
        return {"default": _state(), "seeds": {mode.value: seed for mode, seed in self._seeds.items()}}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        _set_state(states["default"])
        # Older checkpoints have no seeds; the streams keep theirs.
        self._seeds.update({ParallelMode(value): seed for value, seed in states.get("seeds", {}).items()})

    def clear(self) -> None:
        """Remove all streams."""
        self._seeds.clear()


def derive_seed(seed: int, *parts: object) -> int:
    """Derive a seed from `seed` and `parts`. It differs if any part differs, and is equal on all machines and Python versions."""
    text = ":".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _state() -> State:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_state(state: State) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


# --- Every random generator of a rank as one value, for checkpoints ---


def random_state(context: ParallelContext) -> dict[str, Any]:
    """The state of every random generator of this rank: torch on each device, the streams of the modes, Python and numpy."""
    version, numbers, gauss = random.getstate()
    state = {"streams": context.streams.state_dict(), "python": (version, torch.tensor(numbers, device="cpu"), gauss)}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.tensor(keys.astype("int64"), device="cpu"), *rest)
    return state


def set_random_state(state: Mapping[str, Any], context: ParallelContext) -> None:
    """Restore the result of `random_state`."""
    context.streams.load_state_dict(state["streams"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.tolist(), *rest))


def why_not_restorable(state: Mapping[str, Any], context: ParallelContext) -> str | None:
    """The reason why the random state `state` cannot be restored on this device; None if restoring is possible."""
    on_cuda = "cuda" in state["streams"]["default"]
    if on_cuda and not torch.cuda.is_available():
        return "they were saved on cuda"
    return "they were saved without cuda" if context.device.type == "cuda" and not on_cuda else None

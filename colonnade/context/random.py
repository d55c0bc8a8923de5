"""Random streams: one generator state per mode, the same or different across the mode's ranks.

Outside any stream, ranks that see the same data draw the same numbers (a dropout on a replicated tensor
must agree), and ranks that see distinct data, or hold another stage, draw different ones. Inside
`with streams.use(ParallelMode.TENSOR)` the ranks of a tensor group draw different numbers too, which is
what a dropout on a sharded tensor needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ContextError, listed

State = dict[str, Tensor]


class RandomStreams:
    """Generator states by mode. The state of the stream in use is torch's own global state."""

    def __init__(self) -> None:
        self._states: dict[ParallelMode, State] = {}
        self._using: ParallelMode | None = None

    def add(self, mode: ParallelMode, seed: int) -> None:
        """Start a stream for `mode` from `seed`."""
        mode = ParallelMode(mode)
        if mode in self._states:
            raise ContextError(f"{mode} already has a random stream; set_seed() of the context starts all of them anew")
        outside = _state()
        torch.manual_seed(seed)
        self._states[mode] = _state()
        _set_state(outside)

    @contextmanager
    def use(self, mode: ParallelMode) -> Iterator[None]:
        """Draw from the stream of `mode` inside the block; the outer stream is untouched, also on errors."""
        mode = ParallelMode(mode)
        if mode not in self._states:
            raise ContextError(
                f"{mode} has no random stream; streams: {listed(known.name for known in self._states)}. "
                f"Add one with streams.add({mode}, seed)."
            )
        if mode is self._using:
            yield
            return
        outside, before = _state(), self._using
        _set_state(self._states[mode])
        self._using = mode
        try:
            yield
        finally:
            self._states[mode] = _state()
            self._using = before
            _set_state(outside)

    def state_dict(self) -> dict[str, State]:
        """All streams and the global one ("default"), as tensors, for a checkpoint of this rank."""
        held = {mode.value: dict(state) for mode, state in self._states.items()}
        return {"default": _state(), **held}

    def load_state_dict(self, states: dict[str, State]) -> None:
        """Put every stream back where it was saved."""
        _set_state(states["default"])
        for value, state in states.items():
            if value != "default":
                self._states[ParallelMode(value)] = dict(state)

    def clear(self) -> None:
        """Forget every stream."""
        self._states.clear()
        self._using = None


def derive_seed(seed: int, *parts: object) -> int:
    """A seed that differs when any part differs; the same on every machine and Python."""
    text = ":".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _state() -> State:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_state(state: State) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])

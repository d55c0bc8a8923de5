"""Random streams: one per mode, the same or different across the mode's ranks.

Outside any stream, ranks that see the same data draw the same numbers (a dropout on a replicated tensor
must agree), and ranks that see distinct data, or hold another stage, draw different ones. Inside
`with streams.use(ParallelMode.TENSOR)` the ranks of a tensor group draw different numbers too, which is
what a dropout on a sharded tensor needs.

The numbers inside follow from the mode's seed and one number that is drawn outside. So whoever puts torch's own
generator back, as activation checkpointing does before it computes a layer again, gets the same numbers inside too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from colonnade.context.parallel_mode import ParallelMode, mode_of
from colonnade.errors import ContextError, listed

State = dict[str, Tensor]


class RandomStreams:
    """The seed of each mode's stream on this rank."""

    def __init__(self) -> None:
        self._seeds: dict[ParallelMode, int] = {}

    def add(self, mode: ParallelMode, seed: int, overwrite: bool = False) -> None:
        """Give `mode` a stream, or with `overwrite` another one."""
        mode = mode_of(mode)
        if mode in self._seeds and not overwrite:
            raise ContextError(
                f"{mode} already has a random stream; set_seed() of the context starts all of them anew", code="C012"
            )
        self._seeds[mode] = seed

    @contextmanager
    def use(self, mode: ParallelMode) -> Iterator[None]:
        """Draw from the stream of `mode` inside the block.

        The outer stream moves on by one number, however many are drawn inside, also on errors. So ranks that draw
        alike outside must enter alike.
        """
        mode = mode_of(mode)
        if mode not in self._seeds:
            raise ContextError(
                f"{mode} has no random stream; streams: {listed(known.name for known in self._seeds)}. "
                f"Add one with streams.add({mode}, seed).",
                code="C012",
            )
        drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        outside = _state()
        _set_seed(derive_seed(self._seeds[mode], drawn))
        try:
            yield
        finally:
            _set_state(outside)

    def state_dict(self) -> dict[str, Any]:
        """The state of torch's own generators ("default") and the seeds of all streams, for a checkpoint of this rank."""
        return {"default": _state(), "seeds": {mode.value: seed for mode, seed in self._seeds.items()}}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Put everything back as it was saved."""
        _set_state(states["default"])
        # Older checkpoints hold no seeds: the streams keep theirs.
        self._seeds.update({ParallelMode(value): seed for value, seed in states.get("seeds", {}).items()})

    def clear(self) -> None:
        """Forget every stream."""
        self._seeds.clear()


def derive_seed(seed: int, *parts: object) -> int:
    """A seed that differs when any part differs; the same on every machine and Python."""
    text = ":".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _state() -> State:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def _set_state(state: State) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])

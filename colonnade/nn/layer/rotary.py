"""Rotary positions: queries and keys turned by angles that grow with the position, so that scores depend on distances."""

from __future__ import annotations

from collections.abc import Mapping
from math import pi
from typing import Any

import torch
from torch import Tensor

from colonnade.errors import ConfigError, listed

_SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""What each kind of scaling takes."""


class Rotary:
    """The angles of every position, kept once for all the layers that share this object.

    Element i of a head is turned together with element i + head_size / 2, by position x theta^(-2i / head_size), as
    published Llama weights have it. `scaling` has their keys too: {"rope_type": "linear", "factor": 4.0}, or "llama3".
    Cosines and sines are of float32. They are made for `length` positions, and anew for a longer sequence.
    """

    def __init__(
        self,
        head_size: int,
        theta: float = 10000.0,
        scaling: Mapping[str, Any] | None = None,
        *,
        length: int = 0,
        device: torch.device | None = None,
    ) -> None:
        if head_size % 2:
            raise ConfigError(f"rotary positions turn pairs: a head of size {head_size} is odd; choose an even size")
        self.head_size, self.theta, self.scaling = head_size, theta, _checked(scaling)
        self._tables: dict[torch.device, Tensor] = {}
        if length:
            self.table(length, torch.device(device or "cpu"))

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Queries and keys, (batch, heads, length, head_size), turned.

        `positions` of their tokens in the whole sequence; left out, they are 0, 1, 2, ...
        """
        length = q.size(-2)
        turns = self.table(length, q.device)[:, :length] if positions is None else self._turns(positions)
        return _turned(q, *turns.unbind()), _turned(k, *turns.unbind())

    def table(self, length: int, device: torch.device) -> Tensor:
        """Cosines and sines, (2, `length` or more, head_size / 2)."""
        known = self._tables.get(device)
        if known is None or known.size(1) < length:
            known = self._turns(torch.arange(length, device=device))
            # Training could not use one of inference mode, and compiled code makes its own.
            if not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()):
                self._tables[device] = known
        return known

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """The angle of position 1 for every pair, scaled."""
        powers = torch.arange(0, self.head_size, 2, device=device).float() / self.head_size
        plain = 1.0 / self.theta**powers
        if not self.scaling:
            return plain
        factor = float(self.scaling["factor"])
        if self.scaling["rope_type"] == "linear":
            return plain / factor
        low, high = float(self.scaling["low_freq_factor"]), float(self.scaling["high_freq_factor"])
        turns = float(self.scaling["original_max_position_embeddings"]) * plain / (2 * pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # all of a fast pair, nothing of a slow one
        return plain * (kept + (1 - kept) / factor)

    def __deepcopy__(self, memo: Any) -> Rotary:
        """The same: it has no weights."""
        return self

    def _turns(self, positions: Tensor) -> Tensor:
        angles = positions.float().unsqueeze(1) * self.frequencies(positions.device)
        return torch.stack([angles.cos(), angles.sin()])


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _checked(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    if not scaling:
        return {}
    kind = scaling.get("rope_type")
    if kind not in _SCALING:
        raise ConfigError(
            f"rotary scaling: rope_type={kind!r} is not known; allowed are {listed(_SCALING)}, or no scaling"
        )
    wanted = {"rope_type", *_SCALING[kind]}
    if {*scaling} != wanted:
        raise ConfigError(f"rotary scaling {kind!r} takes exactly {listed(sorted(wanted))}; given: {dict(scaling)}")
    return dict(scaling)

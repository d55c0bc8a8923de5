"""Self-attention: heads split over the ranks by the tensor mode, tokens by the sequence mode, or neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import pi
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.errors import ConfigError, listed
from colonnade.nn.layer.arrangement import Arrangement, arrange, partition_input
from colonnade.nn.layer.dropout import stream_of
from colonnade.nn.layer.linear import Linear, own
from colonnade.nn.sequence import SharedLengths, ring_attention, ulysses_attention
from colonnade.nn.sequence.parts import parts_of, sequence_place
from colonnade.parallel.placement import Replicate

# --- Rotary positions: queries and keys turned by angles that grow with the position, so that scores depend on distances ---

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


Over = Literal["ring", "ulysses"]
"""How attention reaches over a split sequence: see `ring_attention` and `ulysses_attention`."""


class SelfAttention(nn.Module):
    """Multi-head self-attention, [batch, sequence, hidden] in the outer spread to the same.

    `qkv.weight` is [3, hidden, hidden]: query, key and value, each split by heads. With fewer `kv_heads` there are `q`
    and `kv` instead. In the 1d mode the number of heads need not be a multiple of the ranks, but each rank needs one.
    `head_size` is hidden / heads unless given. `rotary` turns queries and keys by their positions, after `qk_norm`,
    which is the eps of an RMSNorm over each head of queries and of keys.
    Where a sequence lies on several ranks, `over` says how its parts reach each other, and `balanced` that they are
    those of split_sequence(balanced=True); there is no mask then. A query sees `window` keys before it, and behind it
    if not causal. Layers with the same `shared_lengths` ask for the lengths of the ranks' parts once in a pass.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        causal: bool = False,
        kv_heads: int | None = None,
        head_size: int | None = None,
        rotary: Rotary | None = None,
        qk_norm: float | None = None,
        over: Over = "ring",
        balanced: bool = False,
        window: int | None = None,
        shared_lengths: SharedLengths | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        arrangement: Arrangement | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        source: nn.MultiheadAttention | None = None,
    ) -> None:
        super().__init__()
        here = self.arrangement = arrangement or arrange()
        kv_heads = kv_heads or heads
        _check(hidden if head_size is None else head_size * heads, heads, kv_heads, over, balanced)
        self.head_size, self.causal, self.over, self.balanced = head_size or hidden // heads, causal, over, balanced
        self.rotary, self.qk_norm, width = rotary, qk_norm, self.head_size * heads
        self.window, self.dropout, self._reaches = window, dropout, sequence_place(here.context)[0] > 1
        self._shared_lengths = shared_lengths or SharedLengths()
        self._number = self._shared_lengths.join()
        # Ranks cut queries where they cut keys: the query heads of one key head stay together.
        unit = width // kv_heads
        if min(here.hidden_sizes(width, "inner", unit)) == 0:
            few = f"heads={heads}" if kv_heads == heads else f"kv_heads={kv_heads}"
            raise ConfigError(
                f"{few}: some ranks of {here.inner.hidden} would have none; take fewer ranks", code="C032"
            )
        options: dict[str, Any] = {"arrangement": here, "device": device, "dtype": dtype}
        first, last = (None, None) if source is None else (_joint_projection(source), source.out_proj)
        if kv_heads == heads:
            self.qkv = Linear(hidden, width, bias, parts=3, unit=unit, source=first, **options)
        else:
            self.q = Linear(hidden, width, bias, unit=unit, **options)
            self.kv = Linear(hidden, kv_heads * self.head_size, bias, parts=2, unit=self.head_size, **options)
        self.out = Linear(width, hidden, bias, split="row", unit=unit, source=last, **options)
        self.q_norm = self._norm(device, dtype)
        self.k_norm = self._norm(device, dtype)

    @classmethod
    def from_module(
        cls, module: nn.MultiheadAttention, *, causal: bool = False, arrangement: Arrangement | None = None
    ) -> SelfAttention:
        """This rank's heads of a whole torch.nn.MultiheadAttention, the same on every rank; batch first here."""
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise ConfigError(
                "only attention with kdim = vdim = embed_dim, without bias_kv and zero_attn, can be taken"
            )
        return cls(
            module.embed_dim,
            module.num_heads,
            causal=causal,
            dropout=module.dropout,
            arrangement=arrangement,
            source=module,
        )

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        lengths: Sequence[int] | None = None,
        documents: Sequence[int] | None = None,
    ) -> Tensor:
        """`mask` as of scaled_dot_product_attention: [sequence, sequence], or [batch or 1, 1, ...] with whole batch.

        `lengths`: the tokens on each rank of the sequence group; without it the ranks ask each other. `documents`:
        cumulative lengths of the documents that every whole sequence consists of, which do not see each other.
        """
        projected = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), *self.kv(x).chunk(2, -1))
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in projected)
        if self._reaches and lengths is None:
            lengths = self._asked(q.size(2))
        if self.qk_norm is not None:
            q, k = (F.rms_norm(x, (self.head_size,), w, self.qk_norm) for x, w in ((q, self.q_norm), (k, self.k_norm)))
        if self.rotary is not None:
            positions = None
            if self._reaches:
                parts = parts_of(q.size(2), lengths, self.balanced, self.arrangement.context)
                lengths = parts.lengths
                positions = parts.positions(sequence_place(self.arrangement.context)[1], q.device)
            q, k = self.rotary(q, k, positions)
        mixed = self._attend(q, k, v, mask, lengths, documents)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    @torch.compiler.disable
    def _asked(self, length: int) -> Sequence[int]:
        """The lengths of all ranks' parts. Compiled code is left for it, and is the same for layers of other numbers."""
        return self._shared_lengths.of(self._number, length, self.arrangement.context)

    def _norm(self, device: Any, dtype: torch.dtype | None) -> nn.Parameter | None:
        """The weight of a norm over a head: whole on every rank, each of which sees other heads or other rows."""
        if self.qk_norm is None:
            return None
        placed = {mode: Replicate(owes="sum") for mode in self.arrangement.inner.modes}
        whole = torch.ones(self.head_size, device=device, dtype=dtype)
        return own(whole, dict(placed), tuple(whole.shape), whole)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        lengths: Sequence[int] | None,
        documents: Sequence[int] | None,
    ) -> Tensor:
        here = self.arrangement
        dropped = self.dropout if self.training else 0.0
        if self._reaches or self.window is not None or documents is not None:
            if mask is not None:
                raise ConfigError(
                    "attention over a split sequence, with a window or with documents takes no mask; use causal=True, or "
                    "leave it out"
                )
            options: dict[str, Any] = {"window": self.window, "documents": documents, "dropout": dropped}
            options |= {"causal": self.causal, "lengths": lengths, "context": here.context}
            with stream_of(here, "inner") if dropped else nullcontext():
                if self.over == "ring":
                    return ring_attention(q, k, v, balanced=self.balanced, **options)
                return ulysses_attention(q, k, v, **options)
        if mask is not None and mask.dim() == 4 and len(mask) > 1:
            mask = partition_input(mask, sequence=None, hidden=None, side="inner", arrangement=here)
        grouped = q.size(1) != k.size(1)
        with stream_of(here, "inner") if dropped else nullcontext():
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropped, is_causal=self.causal, enable_gqa=grouped
            )


def _check(hidden: int, heads: int, kv_heads: int, over: str, balanced: bool) -> None:
    if hidden % heads or heads % kv_heads:
        raise ConfigError(
            f"hidden={hidden} must be a multiple of heads={heads}, and heads of kv_heads={kv_heads}; choose numbers that "
            f"divide each other"
        )
    if over not in ("ring", "ulysses") or (balanced and over != "ring"):
        raise ConfigError(f"over={over!r} is one of 'ring' and 'ulysses'; balanced={balanced} parts are for 'ring'")


def _joint_projection(source: nn.MultiheadAttention) -> nn.Linear:
    """Query, key and value as one torch.nn.Linear."""
    joint = nn.Linear(source.embed_dim, len(source.in_proj_weight), device="meta")
    joint.weight, joint.bias = source.in_proj_weight, source.in_proj_bias
    return joint

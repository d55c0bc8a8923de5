"""Self-attention with heads sharded by the tensor mode and tokens by the sequence mode (context parallelism)."""

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
from colonnade.nn.sequence.parts import parts_of, sequence_rank
from colonnade.parallel.placement import Replicate

# --- Rotary position embedding: queries and keys are rotated by their positions, so that scores depend on distances ---

_SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The keys of each kind of scaling."""


class Rotary:
    """Rotary position embedding (RoPE), with tables of angles shared by all layers that share this object.

    Element i of a head is rotated together with element i + head_size / 2 by position x theta^(-2i / head_size), as in the
    published Llama weights. Tables are in float32.

    Args:
        head_size: The width of a head; must be even.
        theta: The base of the frequencies.
        scaling: As in Llama configs: {"rope_type": "linear", "factor": 4.0}, or "llama3" with its keys.
        length: The number of positions for which tables are computed now; longer sequences extend the tables.
        device: The device of these tables.
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
            raise ConfigError(
                f"head_size is {head_size}, but rotary positions rotate pairs and need an even size. Choose an even "
                "size."
            )
        if scaling:
            kind = scaling.get("rope_type")
            if kind not in _SCALING:
                raise ConfigError(
                    f"rotary scaling got rope_type={kind!r}; allowed are {listed(_SCALING)}, or no scaling"
                )
            keys = {"rope_type", *_SCALING[kind]}
            if {*scaling} != keys:
                raise ConfigError(
                    f"rotary scaling {kind!r} takes exactly the keys {listed(sorted(keys))}, but the given keys are "
                    f"{dict(scaling)}"
                )
        self.head_size, self.theta, self.scaling = head_size, theta, dict(scaling or {})
        self._tables: dict[torch.device, Tensor] = {}
        if length:
            self.table(length, torch.device(device or "cpu"))

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys, (batch, heads, length, head_size).

        `positions` are the positions of the tokens in the full sequence, by default 0, 1, 2, ...
        """
        length = q.size(-2)
        rotation = self.table(length, q.device)[:, :length] if positions is None else self._rotation(positions)
        return _rotated(q, *rotation.unbind()), _rotated(k, *rotation.unbind())

    def table(self, length: int, device: torch.device) -> Tensor:
        """Return cosines and sines, a tensor of shape (2, `length` or more, head_size / 2)."""
        table = self._tables.get(device)
        if table is None or table.size(1) < length:
            table = self._rotation(torch.arange(length, device=device))
            # Autograd could not use a tensor of inference mode later, and compiled code computes its own.
            if not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()):
                self._tables[device] = table
        return table

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Return the scaled rotation angle per position, for every pair of elements."""
        powers = torch.arange(0, self.head_size, 2, device=device).float() / self.head_size
        plain = 1.0 / self.theta**powers
        if not self.scaling:
            return plain
        factor = float(self.scaling["factor"])
        if self.scaling["rope_type"] == "linear":
            return plain / factor
        low, high = float(self.scaling["low_freq_factor"]), float(self.scaling["high_freq_factor"])
        turns = float(self.scaling["original_max_position_embeddings"]) * plain / (2 * pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1 for fast pairs, 0 for slow ones
        return plain * (kept + (1 - kept) / factor)

    def __deepcopy__(self, memo: Any) -> Rotary:
        """The same object: a copied model shares the tables."""
        return self

    def _rotation(self, positions: Tensor) -> Tensor:
        angles = positions.float().unsqueeze(1) * self.frequencies(positions.device)
        return torch.stack([angles.cos(), angles.sin()])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


Over = Literal["ring", "ulysses"]
"""The context-parallel attention: see `ring_attention` and `ulysses_attention`."""


class SelfAttention(nn.Module):
    """Multi-head self-attention on [batch, sequence, hidden], from outer to outer spread.

    `qkv.weight` is [3, hidden, hidden]: query, key and value, each sharded by heads. With fewer `kv_heads` there are `q` and
    `kv` instead. In the 1d mode the ranks need not divide the number of heads, but each rank needs one.

    Args:
        hidden: The width of input and output.
        heads: The number of query heads.
        causal: Whether a token attends only to itself and earlier tokens.
        kv_heads: The number of key and value heads; defaults to `heads`.
        head_size: The width of a head; defaults to hidden / heads.
        rotary: Rotary positions of queries and keys, applied after `qk_norm`.
        qk_norm: The eps of an RMSNorm over each head of queries and of keys; None for no norm.
        over: Under context parallelism: "ring" or "ulysses".
        balanced: Under context parallelism: tokens are split as by split_sequence(balanced=True).
        window: The number of earlier keys that a query attends to, and of later ones if not causal; None for all.
        shared_lengths: Layers with the same object exchange the ranks' sequence lengths once per pass.
        dropout: Dropout of attention weights in training.
        bias: Whether the projections have biases.
        arrangement: The sharding scheme; defaults to that of the global context.
        device: The device of the weights.
        dtype: The dtype of the weights.
        source: A full attention to take the weights from; see `from_module`.
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
        if (head_size is None and hidden % heads) or heads % kv_heads:
            raise ConfigError(
                f"hidden is {hidden}, heads is {heads} and kv_heads is {kv_heads}. Choose hidden as a multiple of "
                "heads, and heads as a multiple of kv_heads."
            )
        if over not in ("ring", "ulysses") or (balanced and over != "ring"):
            raise ConfigError(
                f"attention got over={over!r} and balanced={balanced}. Allowed for over are 'ring' and 'ulysses'; "
                "balanced requires 'ring'."
            )
        self.head_size, self.causal, self.over, self.balanced = head_size or hidden // heads, causal, over, balanced
        self.rotary, self.qk_norm, width = rotary, qk_norm, self.head_size * heads
        self.window, self.dropout, self.is_split_over_ranks = window, dropout, sequence_rank(here.context)[0] > 1
        self._shared_lengths = shared_lengths or SharedLengths()
        self._number = self._shared_lengths.join()
        # Query heads are sharded in groups: those that use one key head stay with it.
        unit = width // kv_heads
        if min(here.hidden_sizes(width, "inner", unit)) == 0:
            few = f"heads={heads}" if kv_heads == heads else f"kv_heads={kv_heads}"
            raise ConfigError(
                f"{few} leaves some ranks of {here.inner.hidden} without heads. Use fewer ranks.", code="C032"
            )
        options: dict[str, Any] = {"arrangement": here, "device": device, "dtype": dtype}
        joint: nn.Linear | None = None
        if source is not None:
            # The projections of query, key and value as one torch.nn.Linear.
            joint = nn.Linear(source.embed_dim, len(source.in_proj_weight), device="meta")
            joint.weight, joint.bias = source.in_proj_weight, source.in_proj_bias
        if kv_heads == heads:
            self.qkv = Linear(hidden, width, bias, parts=3, unit=unit, source=joint, **options)
        else:
            self.q = Linear(hidden, width, bias, unit=unit, **options)
            self.kv = Linear(hidden, kv_heads * self.head_size, bias, parts=2, unit=self.head_size, **options)
        last = None if source is None else source.out_proj
        self.out = Linear(width, hidden, bias, split="row", unit=unit, source=last, **options)
        self.q_norm = self._norm(device, dtype)
        self.k_norm = self._norm(device, dtype)

    @classmethod
    def from_module(
        cls, module: nn.MultiheadAttention, *, causal: bool = False, arrangement: Arrangement | None = None
    ) -> SelfAttention:
        """Make this rank's heads of a torch.nn.MultiheadAttention, which has the same weights on every rank.

        Inputs of the result are batch first.
        """
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise ConfigError(
                "SelfAttention.from_module supports only attention with kdim = vdim = embed_dim, without bias_kv and "
                "without zero_attn"
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
        """Compute attention over the full sequence.

        Args:
            x: [batch, sequence, hidden] in the outer spread.
            mask: As in scaled_dot_product_attention: [sequence, sequence], or [batch or 1, 1, ...] for the full batch.
                Not with context parallelism, a window or documents.
            lengths: The number of tokens on each rank of the sequence group; by default the ranks exchange them.
            documents: Cumulative lengths of the documents in every full sequence; tokens attend to their own document.
        """
        here = self.arrangement
        projected = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), *self.kv(x).chunk(2, -1))
        q, k, v = (y.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for y in projected)
        if self.is_split_over_ranks and lengths is None:
            lengths = self._exchanged_lengths(q.size(2))
        if self.qk_norm is not None:
            q, k = (F.rms_norm(x, (self.head_size,), w, self.qk_norm) for x, w in ((q, self.q_norm), (k, self.k_norm)))
        if self.rotary is not None:
            positions = None
            if self.is_split_over_ranks:
                parts = parts_of(q.size(2), lengths, self.balanced, here.context)
                lengths = parts.lengths
                positions = parts.positions(sequence_rank(here.context)[1], q.device)
            q, k = self.rotary(q, k, positions)
        mixed = self._attend(q, k, v, mask, lengths, documents)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        lengths: Sequence[int] | None,
        documents: Sequence[int] | None,
    ) -> Tensor:
        """Attention of this rank's heads and queries; a subclass may replace it."""
        here = self.arrangement
        dropout = self.dropout if self.training else 0.0
        with stream_of(here, "inner") if dropout else nullcontext():
            if self.is_split_over_ranks or self.window is not None or documents is not None:
                if mask is not None:
                    raise ConfigError(
                        "a mask is not supported with context parallelism, a window or documents. Use causal=True, "
                        "or leave the mask out."
                    )
                options: dict[str, Any] = {"window": self.window, "documents": documents, "dropout": dropout}
                options |= {"causal": self.causal, "lengths": lengths, "context": here.context}
                if self.over == "ring":
                    return ring_attention(q, k, v, balanced=self.balanced, **options)
                return ulysses_attention(q, k, v, **options)
            if mask is not None and mask.dim() == 4 and len(mask) > 1:
                mask = partition_input(mask, sequence=None, hidden=None, side="inner", arrangement=here)
            grouped = q.size(1) != k.size(1)
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=self.causal, enable_gqa=grouped
            )

    @torch.compiler.disable
    def _exchanged_lengths(self, length: int) -> Sequence[int]:
        """The sequence lengths of all ranks. Not compiled, so that `_number` does not cause a recompilation per layer."""
        return self._shared_lengths.of(self._number, length, self.arrangement.context)

    def _norm(self, device: Any, dtype: torch.dtype | None) -> nn.Parameter | None:
        """The weight of a norm over a head: replicated, with a partial gradient from this rank's heads or rows."""
        if self.qk_norm is None:
            return None
        placed = {mode: Replicate(owes="sum") for mode in self.arrangement.inner.modes}
        full = torch.ones(self.head_size, device=device, dtype=dtype)
        return own(full, dict(placed), tuple(full.shape), full)

"""Embeddings: of tokens, with the vocabulary split; of positions; and any parameter that lies along the hidden dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from colonnade.errors import ConfigError
from colonnade.nn.layer.arrangement import Arrangement, arrange
from colonnade.nn.layer.first_pass import gives
from colonnade.nn.layer.linear import own
from colonnade.nn.layer.spread import cut


class Embedding(nn.Module):
    """torch.nn.Embedding with this rank's block of the weight, which lies as a `Classifier`'s does.

    Takes whole tokens, the same on every rank of the tensor group, and gives vectors in the outer spread.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        arrangement: Arrangement | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        source: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        self.arrangement = arrangement or arrange()
        whole = source or nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, whole.padding_idx
        block = self.arrangement.take_weight(whole.weight.detach(), "column")
        placed = self.arrangement.weight_placement("column")
        self.weight = own(block, placed, tuple(whole.weight.shape), whole.weight)

    @classmethod
    def from_module(cls, module: nn.Embedding, *, arrangement: Arrangement | None = None) -> Embedding:
        """This rank's block of a whole torch.nn.Embedding, the same on every rank.

        Give it on to the layer that shares the weight: Classifier.from_module(head, weight=embedding.weight).
        """
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ConfigError("an Embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be split")
        return cls(module.num_embeddings, module.embedding_dim, arrangement=arrangement, source=module)

    def forward(self, tokens: Tensor) -> Tensor:
        here = self.arrangement
        return gives(self, here, here.embed(tokens, self.weight, self.num_embeddings, self.padding_idx), here.outer)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.arrangement}"


class HiddenParameter(nn.Module):
    """A parameter whose last dimension is the hidden one, such as a class token: this rank's part of `whole`.

    Calling it gives that part, to be added to or joined with activations of the outer spread.
    """

    def __init__(self, whole: Tensor, *, arrangement: Arrangement | None = None) -> None:
        super().__init__()
        self.arrangement = arrangement or arrange()
        part = self.arrangement.take_along_hidden(whole.detach(), "outer")
        self.weight = own(part, self.arrangement.outer.along_hidden(), tuple(whole.shape), whole)

    def forward(self) -> Tensor:
        return self.weight


class PositionEmbedding(HiddenParameter):
    """A learned vector per position, drawn as torch.nn.Embedding's. `position(length)`: the vectors of a sequence.

    With `sequence_split` each rank gets those of its part of the sequence.
    """

    def __init__(
        self,
        length: int,
        embedding_dim: int,
        *,
        arrangement: Arrangement | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        source: nn.Embedding | None = None,
    ) -> None:
        whole = source or nn.Embedding(length, embedding_dim, device=device, dtype=dtype)
        super().__init__(whole.weight, arrangement=arrangement)
        self.length = length

    @classmethod
    def from_module(cls, module: nn.Embedding, *, arrangement: Arrangement | None = None) -> PositionEmbedding:
        """This rank's part of a whole torch.nn.Embedding of positions, the same on every rank."""
        return cls(module.num_embeddings, module.embedding_dim, arrangement=arrangement, source=module)

    def forward(self, length: int | None = None) -> Tensor:
        wanted = self.length if length is None else length
        if wanted > self.length:
            raise ConfigError(f"a sequence of length {wanted} has positions beyond the {self.length} that there are")
        here = self.arrangement
        mode = here.outer.sequence
        if mode is None:
            return self.weight[:wanted]
        sizes, at = cut(wanted, mode, here.context, "sequence"), here.context.get_local_rank(mode)
        return self.weight.narrow(0, sum(sizes[:at]), sizes[at])

"""ViT: an image classifier on patches; the config determines how it is sharded."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.models.gpt import TransformerBlock
from colonnade.nn.layer import (
    MLP,
    Classifier,
    CrossEntropyLoss,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    SelfAttention,
    arrange,
    partition_input,
    unsplit_sequence,
)
from colonnade.nn.layer.attention import Over
from colonnade.nn.sequence import SharedLengths, gather_sequence, split_sequence


class ViT(nn.Sequential):
    """Patch and position embedding, blocks, a norm, the mean over patches, a classifier.

    Takes full images (batch, channels, size, size), the same on all ranks of a tensor and of a sequence group, and returns
    the logits that `criterion()` takes.
    """

    def __init__(
        self,
        size: int,
        patch: int,
        hidden: int,
        heads: int,
        layers: int,
        classes: int,
        *,
        channels: int = 3,
        dropout: float = 0.0,
        over: Over = "ring",
        context: ParallelContext | None = None,
    ) -> None:
        here = arrange(context)
        blocks, lengths = nn.Sequential(), SharedLengths()
        for _ in range(layers):
            attention = SelfAttention(hidden, heads, over=over, shared_lengths=lengths, arrangement=here)
            blocks.append(TransformerBlock(attention, MLP(hidden, 4 * hidden, arrangement=here), hidden, dropout, here))
        embedding = PatchEmbedding(size, patch, channels, hidden, dropout, context)
        super().__init__(OrderedDict(embedding=embedding, blocks=blocks, head=Pool(hidden, classes, context)))
        self._after = arrange(context, sequence_split=False)

    def criterion(self) -> CrossEntropyLoss:
        """Make the loss for the logits of this model."""
        return CrossEntropyLoss(arrangement=self._after)


class PatchEmbedding(nn.Module):
    """Maps full images to the vectors of this rank's patches, and adds position vectors."""

    def __init__(
        self, size: int, patch: int, channels: int, hidden: int, dropout: float, context: ParallelContext | None
    ) -> None:
        super().__init__()
        if size % patch:
            raise ConfigError(
                f"images of size={size} cannot be divided into patches of {patch}. Choose a patch size that divides "
                "the image size."
            )
        self.patch, self._here = patch, arrange(context)
        self.project = Linear(channels * patch**2, hidden, split="row", input_is_parallel=False, arrangement=self._here)
        self.positions = Embedding((size // patch) ** 2, hidden, arrangement=self._here)
        self.dropout = Dropout(dropout, arrangement=self._here)

    def forward(self, images: Tensor) -> Tensor:
        context = self._here.context
        patches = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        positions = torch.arange(patches.size(1), device=images.device).expand(patches.shape[:2])
        patches, positions = (split_sequence(x, context=context) for x in (patches, positions))
        entered = partition_input(patches, arrangement=self._here)
        return self.dropout(self.project(entered) + self.positions(positions))


class Pool(nn.Module):
    """The last norm, the mean over all patches and the classifier. Returns the logits of each image."""

    def __init__(self, hidden: int, classes: int, context: ParallelContext | None) -> None:
        super().__init__()
        self._here = arrange(context)
        self.norm = LayerNorm(hidden, arrangement=self._here)
        self.classifier = Classifier(hidden, classes, bias=True, arrangement=arrange(context, sequence_split=False))

    def forward(self, x: Tensor) -> Tensor:
        x = unsplit_sequence(self.norm(x), arrangement=self._here)
        return self.classifier(gather_sequence(x, context=self._here.context).mean(1))

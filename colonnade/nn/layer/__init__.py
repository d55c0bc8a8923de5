"""Layers that follow the context's tensor mode: written once, on an `Arrangement` of activations and weights."""

from __future__ import annotations

from colonnade.nn.layer.arrangement import (
    ARRANGEMENT,
    Arrangement,
    Whole,
    arrange,
    gather_output,
    partition_input,
    unsplit_sequence,
)
from colonnade.nn.layer.attention import SelfAttention
from colonnade.nn.layer.dropout import Dropout
from colonnade.nn.layer.embedding import Embedding, HiddenParameter, PositionEmbedding
from colonnade.nn.layer.linear import MLP, Classifier, Linear
from colonnade.nn.layer.linear_loss import LinearCrossEntropyLoss
from colonnade.nn.layer.loss import CrossEntropyLoss
from colonnade.nn.layer.norm import LayerNorm, RMSNorm
from colonnade.nn.layer.rotary import Rotary
from colonnade.nn.layer.spread import Spread

__all__ = [
    "ARRANGEMENT",
    "Arrangement",
    "Classifier",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "HiddenParameter",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropyLoss",
    "MLP",
    "PositionEmbedding",
    "RMSNorm",
    "Rotary",
    "SelfAttention",
    "Spread",
    "Whole",
    "arrange",
    "gather_output",
    "partition_input",
    "unsplit_sequence",
]

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
from colonnade.nn.layer.attention import Rotary, SelfAttention
from colonnade.nn.layer.cross_entropy import CrossEntropyLoss, LinearCrossEntropyLoss
from colonnade.nn.layer.dropout import Dropout
from colonnade.nn.layer.layer_norm import LayerNorm, RMSNorm
from colonnade.nn.layer.linear import MLP, Classifier, Embedding, HiddenParameter, Linear, PositionEmbedding
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

"""Layers for every tensor-parallel scheme: written once, on an `Arrangement` of activations and weights.

The scheme is `parallel.tensor.mode` of the config: "1d" is Megatron-style column and row parallelism (Shoeybi et al. 2019),
"2d" is SUMMA (Xu et al., "An Efficient 2D Method for Training Super-Large Deep Learning Models"), "2.5d" is Tesseract (Wang
et al.), "3d" is the 3D method of Bian et al., "Maximizing Parallelism in Distributed Training for Huge Neural Networks".
`sequence_split` is Megatron's sequence parallelism; the `sequence` axis is context parallelism (`colonnade.nn.sequence`).
"""

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

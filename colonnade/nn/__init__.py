"""Layers for tensor, context and expert parallelism, and learning-rate schedulers."""

from __future__ import annotations

from colonnade._imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "colonnade.nn.layer": "Arrangement Classifier CrossEntropyLoss Dropout Embedding HiddenParameter LayerNorm Linear "
        "LinearCrossEntropyLoss MLP PositionEmbedding RMSNorm Rotary SelfAttention arrange gather_output partition_input "
        "unsplit_sequence",
        "colonnade.nn.layer.cross_entropy": "Accuracy",
    },
)

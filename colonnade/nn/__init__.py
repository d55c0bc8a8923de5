"""Building blocks of training: layers that follow the context's tensor mode, and learning-rate schedulers."""

from __future__ import annotations

from typing import Any

from colonnade._lazy import lazy_names

_LAYERS = "colonnade.nn.layer"
_NAMES = dict.fromkeys(
    (
        "Arrangement",
        "Classifier",
        "CrossEntropyLoss",
        "Dropout",
        "Embedding",
        "HiddenParameter",
        "LayerNorm",
        "Linear",
        "MLP",
        "PositionEmbedding",
        "RMSNorm",
        "SelfAttention",
        "arrange",
        "gather_output",
        "partition_input",
        "unsplit_sequence",
    ),
    _LAYERS,
)
_NAMES["Accuracy"] = "colonnade.nn.metric"


def __getattr__(name: str) -> Any:
    return lazy_names(__name__, name, _NAMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})

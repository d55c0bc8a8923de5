"""Which models of transformers can run on parts of sequences, and why the others cannot."""

from __future__ import annotations

import inspect
from typing import Any, Literal

from torch import nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import LayoutError, listed

_LAYERS = {"full_attention", "sliding_attention"}


def parameters_of(model: nn.Module) -> list[str]:
    """The names that the model's own forward pass takes."""
    return list(inspect.signature(inspect.unwrap(type(model).forward)).parameters)[1:]


def label_kind(model: Any) -> Literal["next", "each"] | None:
    """Whether a token's label is that of the next one, its own, or there is no such label."""
    if "labels" not in parameters_of(model):
        return None
    code = inspect.unwrap(type(model).forward).__code__
    name = getattr(model.loss_function, "__name__", "")
    if name == "ForCausalLMLoss":
        return "next" if "loss_function" in code.co_names else None if "shift_labels" in code.co_varnames else "each"
    return "each" if name in ("ForMaskedLMLoss", "ForTokenClassification") else None


def check_model(model: Any, size: int, over: str, context: ParallelContext) -> None:
    """Refuse a model whose tokens need each other elsewhere than in attention, or in one that no kernel here knows."""
    config, takes = model.config, parameters_of(model)
    kinds = {*(getattr(config, "layer_types", None) or ())} - _LAYERS
    heads = getattr(config, "num_attention_heads", None) or 0
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    tensor = context.tensor_parallel_size
    uneven = [count for count in (heads, kv_heads) if count // tensor % size]
    problems = [
        (context.pipeline_parallel_size > 1, "it would lie on the stages of a pipeline as well; use one of the two"),
        (getattr(config, "is_encoder_decoder", False), "it has an encoder and a decoder, which attend to each other"),
        (bool(getattr(config, "sub_configs", None)), f"it is made of several models ({listed(config.sub_configs)})"),
        (model.main_input_name != "input_ids", f"it takes {model.main_input_name}, not tokens"),
        ("position_ids" not in takes, "its forward pass takes no position_ids"),
        (bool(kinds), f"it has layers of the kinds {listed(sorted(kinds))}; known are {listed(sorted(_LAYERS))}"),
        (
            not (model._supports_flash_attn and model._can_set_attn_implementation()),
            "its attention is not behind transformers' attention interface",
        ),
        (
            any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()),
            "it has convolutions, which see their neighbours",
        ),
        (
            getattr(config, "attn_logit_softcapping", None) is not None,
            f"attn_logit_softcapping={getattr(config, 'attn_logit_softcapping', None)} is known to no kernel here",
        ),
        (
            "labels" in takes and label_kind(model) is None,
            f"its loss ({getattr(model, 'loss_type', None)}) is not a mean over tokens",
        ),
        (
            over == "ulysses" and bool(uneven),
            f"{listed(uneven)} heads on {tensor} tensor ranks cannot be shared evenly, as attention='ulysses' has to; use 'ring'",
        ),
    ]
    for wrong, reason in problems:
        if wrong:
            raise LayoutError(
                f"{type(model).__name__} cannot run on {size} ranks of parallel.sequence: {reason}. Train it without "
                f"parallel.sequence",
                code="C061",
            )

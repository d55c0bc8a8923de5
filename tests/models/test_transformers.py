"""Llama beside the one of `transformers`, where that is installed: the same weights give the same logits.

Theirs casts to float32 inside: within 1e-6 as it is, to the last digits under `colonnade.testing.in_double`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.context.parallel_context import ParallelContext
from colonnade.models import Llama
from colonnade.testing import in_double
from tests.models.grid import LINEAR, LLAMA3

transformers = pytest.importorskip("transformers", reason="needs transformers")

VOCABULARY, HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, THETA = 40, 64, 8, 2, 96, 2, 500000.0


def weights_of(theirs: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Theirs by our names."""
    found = {
        "embedding.tokens.weight": theirs["model.embed_tokens.weight"],
        "head.norm.weight": theirs["model.norm.weight"],
        "head.classifier.weight": theirs["lm_head.weight"],
    }
    for at in range(layers):
        block = {name.removeprefix(f"model.layers.{at}."): w for name, w in theirs.items() if f".layers.{at}." in name}
        attention = {name: block[f"self_attn.{name}_proj.weight"] for name in "qkvo"}
        ours = {
            "first_norm.weight": block["input_layernorm.weight"],
            "attention.q.weight": attention["q"],
            "attention.kv.weight": torch.stack([attention["k"], attention["v"]]),
            "attention.out.weight": attention["o"],
            "second_norm.weight": block["post_attention_layernorm.weight"],
            "feed_forward.up.weight": torch.stack([block["mlp.gate_proj.weight"], block["mlp.up_proj.weight"]]),
            "feed_forward.down.weight": block["mlp.down_proj.weight"],
        }
        if "self_attn.q_norm.weight" in block:
            ours |= {f"attention.{name}_norm": block[f"self_attn.{name}_norm.weight"] for name in "qk"}
        found |= {f"blocks.{at}.{name}": weight for name, weight in ours.items()}
    return found


@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3, "qk_norm"], ids=["plain", "linear", "llama3", "qk_norm"])
def test_logits_are_those_of_transformers(scaling: Any) -> None:
    with in_double():
        assert _apart(scaling) <= 1e-12
    assert 1e-9 < _apart(scaling) <= 1e-6


def _apart(scaling: Any) -> float:
    """How far logits and gradients of both are from each other."""
    with_norm = scaling == "qk_norm"
    scaling = None if with_norm else scaling
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default", **(scaling or {})},
    }
    config, model = ("Qwen3Config", "Qwen3ForCausalLM") if with_norm else ("LlamaConfig", "LlamaForCausalLM")
    torch.manual_seed(0)
    theirs = getattr(transformers, model)(getattr(transformers, config)(**options)).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    ours = Llama(
        VOCABULARY,
        64,
        HIDDEN,
        HEADS,
        LAYERS,
        kv_heads=KV_HEADS,
        inner=INNER,
        theta=THETA,
        rotary_scaling=scaling,
        qk_norm=with_norm,
        context=ParallelContext(),
    ).double()
    ours.load_state_dict(weights_of(theirs.state_dict(), LAYERS))
    tokens = torch.randint(0, VOCABULARY, (2, 48))
    found, truth = ours(tokens), theirs(tokens).logits
    (found**2).sum().backward()
    (truth**2).sum().backward()
    gradients = weights_of({name: weight.grad for name, weight in theirs.named_parameters()}, LAYERS)
    pairs = [(found, truth), *((weight.grad, gradients[name]) for name, weight in ours.named_parameters())]
    return max(float((one - other).detach().norm() / other.norm()) for one, other in pairs)

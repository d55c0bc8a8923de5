"""Which plan a model gets: its own, mended, or ours. That plans are right is shown by runs, in test_table.py."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from colonnade.hf.parallelize import style_of
from colonnade.hf.plans import OWN_PLANS, fits, own_plan, tensor_plan
from tests.hf.zoo import BY_NAME, Architecture

pytest.importorskip("transformers", reason="needs transformers")


@cache
def model_of(name: str) -> Any:
    return BY_NAME[name].build()


def _varied(name: str, **options: Any) -> Architecture:
    base = BY_NAME[name]
    return Architecture(name, base.model, {**base.options, **options}, base.kind, base.experts, base.tie)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_every_entry_names_a_layer_and_a_known_style(name: str) -> None:
    model, plan = model_of(name), tensor_plan(model_of(name))
    names = [*dict(model.named_modules(remove_duplicate=False)), *dict(model.named_parameters(remove_duplicate=False))]
    assert plan
    for pattern, entry in plan.items():
        assert any(fits(pattern, each) for each in names), pattern
        style = entry.get("style") if isinstance(entry, dict) else entry
        if style is not None:
            style_of(style, pattern)


@pytest.mark.slow
def test_every_line_of_our_plans_is_for_some_architecture() -> None:
    for kind in OWN_PLANS:
        models = [model for model in map(model_of, BY_NAME) if model.config.model_type == kind]
        unused = {
            pattern
            for model in models
            for pattern in own_plan(model.config) or {}
            if not any(
                fits(pattern, ".".join(parts[start:]))
                for other in models
                for parts in (name.split(".") for name, _ in (*other.named_modules(), *other.named_parameters()))
                for start in (0, 1)
            )
        }
        # Parts that other configs of the architecture have: gates of T5 1.1, cross attention.
        assert {
            pattern
            for pattern in unused
            if not re.search(r"wi_[01]$|crossattention|encoder\..*EncDec|ncoder_attn", pattern)
        } == set()


@pytest.mark.slow
def test_architectures_without_a_plan_upstream_have_one_of_ours() -> None:
    for name in BY_NAME:
        config = model_of(name).config
        assert config.base_model_tp_plan or config.model_type in OWN_PLANS, name


def test_norms_of_queries_and_keys_that_upstream_forgets() -> None:
    layer = "model.layers.*.self_attn"
    plan = tensor_plan(model_of("phi, qk_layernorm"))
    assert f"{layer}.q_layernorm" not in model_of("phi, qk_layernorm").tp_plan
    assert {plan[f"{layer}.{name}_layernorm.{of}"] for name in "qk" for of in ("weight", "bias")} == {
        "replicated_with_grad_allreduce"
    }
    assert tensor_plan(model_of("glm4_moe"))[f"{layer}.q_norm.weight"] == "replicated_with_grad_allreduce"
    assert tensor_plan(model_of("cohere, use_qk_norm"))[f"{layer}.k_norm.weight"] == "colwise"  # weights for each head
    assert tensor_plan(model_of("gpt_oss"))[f"{layer}.sinks"] == "colwise"
    assert tensor_plan(model_of("qwen3"))[f"{layer}.q_norm"] == "replicated_with_grad_allreduce"  # upstream's own
    assert not any("q_norm" in name for name in tensor_plan(model_of("olmo2")))  # behind a gathered projection


def test_a_tied_embedding_is_cut_with_the_head() -> None:
    model: Any = _varied("gpt_oss", tie_word_embeddings=True).build()
    assert "model.embed_tokens" not in model.tp_plan
    plan = tensor_plan(model)
    assert (plan["lm_head"], plan["model.embed_tokens"]) == ("colwise_gather_output", "embedding_rowwise")


def test_a_bias_of_the_head_with_two_names_is_cut_under_both() -> None:
    assert tensor_plan(model_of("bert"))["cls.predictions.bias"] == "colwise"


def test_a_model_without_a_plan_has_none() -> None:
    from torch import nn

    assert tensor_plan(nn.Linear(2, 2)) == {}

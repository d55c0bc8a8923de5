"""The plan of a Hugging Face model: its own, mended where it is wrong, or one of ours where it has none.

`plan_of` is what `parallelize` asks for. The first half is a table: plans of ours for architectures that bring none along, by
`config.model_type`; names are those of the base model. Nothing of transformers is imported: what is read are attributes of the
model and of its config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError
from colonnade.hf.match import fits
from colonnade.texts import pattern_of

Plan = dict[str, Any]


def _split(where: str, columns: Iterable[str], row: str) -> Plan:
    """Features are split from the first layers to the last."""
    return {**{f"{where}.{name}": "colwise" for name in columns}, f"{where}.{row}": "rowwise"}


def _gathered(where: str, columns: Iterable[str], row: str) -> Plan:
    """Weights are split, and what is between them is computed whole by every rank."""
    return {
        **{f"{where}.{name}": "colwise_gather_output" for name in columns},
        f"{where}.{row}": "rowwise_split_input",
    }


def _local(where: str, *attributes: str) -> Plan:
    """Sizes that the module's forward pass reads, divided by the number of ranks."""
    return {where: {"divide": attributes}}


_QKV = ("q_proj", "k_proj", "v_proj")
_LLAMA_MLP = _split("layers.*.mlp", ("gate_proj", "up_proj"), "down_proj")
_BERT_LAYER = "encoder.layer.*"


def _gpt2(config: Any) -> Plan:
    return {
        "h.*.attn.c_attn": {"style": "packed_colwise", "sections": 3},  # queries, keys and values, one after another
        "h.*.attn.c_proj": "rowwise",
        **_local("h.*.attn", "split_size", "num_heads"),
        **_split("h.*.mlp", ("c_fc",), "c_proj"),
    }


def _gptj(config: Any) -> Plan:
    attention = {**_split("h.*.attn", _QKV, "out_proj"), **_local("h.*.attn", "num_attention_heads")}
    return {**attention, **_split("h.*.mlp", ("fc_in",), "fc_out")}


def _codegen(config: Any) -> Plan:
    # Queries, values and keys lie in four blocks, a number that its forward pass has written in: it gets them whole.
    return {**_gathered("h.*.attn", ("qkv_proj",), "out_proj"), **_split("h.*.mlp", ("fc_in",), "fc_out")}


def _gpt_neo(config: Any) -> Plan:
    attention = "h.*.attn.attention"
    return {
        **_split(attention, _QKV, "out_proj"),
        **_local(attention, "num_heads"),
        **_split("h.*.mlp", ("c_fc",), "c_proj"),
    }


def _opt(config: Any) -> Plan:
    attention = {
        **_split("decoder.layers.*.self_attn", _QKV, "out_proj"),
        **_local("decoder.layers.*.self_attn", "num_heads"),
    }
    return {**attention, **_split("decoder.layers.*", ("fc1",), "fc2")}


def _bloom(config: Any) -> Plan:
    # The model gives every layer the slopes of all heads: attention gets all of them.
    return {
        **_gathered("h.*.self_attention", ("query_key_value",), "dense"),
        **_split("h.*.mlp", ("dense_h_to_4h",), "dense_4h_to_h"),
    }


def _falcon(config: Any) -> Plan:
    attention = "h.*.self_attention"
    if config.alibi or (config.multi_query and not config.new_decoder_architecture):
        # Slopes of all heads, or one head of keys and values for all queries, which cannot be cut.
        heads = _gathered(attention, ("query_key_value",), "dense")
    else:
        heads = {**_split(attention, ("query_key_value",), "dense"), **_local(attention, "num_heads", "num_kv_heads")}
    return {**heads, **_split("h.*.mlp", ("dense_h_to_4h",), "dense_4h_to_h")}


def _stablelm(config: Any) -> Plan:
    attention = "layers.*.self_attn"
    if config.qk_layernorm:
        # A list of norms, one for each head, all of which the forward pass of attention goes through.
        return {**_gathered(attention, _QKV, "o_proj"), **_LLAMA_MLP}
    return {**_split(attention, _QKV, "o_proj"), **_local(attention, "num_heads", "num_key_value_heads"), **_LLAMA_MLP}


def _llama(config: Any) -> Plan:
    return {**_split("layers.*.self_attn", _QKV, "o_proj"), **_LLAMA_MLP}


def _doge(config: Any) -> Plan:
    # Upstream splits heads, and gives every rank a mask that dt_proj makes of them for all heads.
    return {**_gathered("layers.*.self_attn", _QKV, "o_proj"), **_LLAMA_MLP}


def _nemotron(config: Any) -> Plan:
    return {**_split("layers.*.self_attn", _QKV, "o_proj"), **_split("layers.*.mlp", ("up_proj",), "down_proj")}


def _gpt_oss(config: Any) -> Plan:
    return _split("layers.*.self_attn", _QKV, "o_proj")


def _bert(config: Any) -> Plan:
    plan = {
        f"{_BERT_LAYER}.intermediate.dense": "colwise",
        f"{_BERT_LAYER}.output.dense": "rowwise",
    }
    for attention in ("attention", "crossattention"):
        plan |= {f"{_BERT_LAYER}.{attention}.self.{name}": "colwise" for name in ("query", "key", "value")}
        plan[f"{_BERT_LAYER}.{attention}.output.dense"] = "rowwise"
    return plan


def _distilbert(config: Any) -> Plan:
    layer = "transformer.layer.*"
    return {
        **_split(f"{layer}.attention", ("q_lin", "k_lin", "v_lin"), "out_lin"),
        **_split(f"{layer}.ffn", ("lin1",), "lin2"),
    }


def _vit(config: Any) -> Plan:
    return {**_split("layers.*.attention", _QKV, "o_proj"), **_split("layers.*.mlp", ("fc1",), "fc2")}


def _t5(config: Any) -> Plan:
    plan: Plan = {}
    for side in ("encoder", "decoder"):
        layer = f"{side}.block.*.layer.*"
        for attention in ("SelfAttention", "EncDecAttention"):
            where = f"{layer}.{attention}"
            plan |= {**_split(where, ("q", "k", "v"), "o"), **_local(where, "n_heads", "inner_dim")}
        plan[f"{layer}.SelfAttention.relative_attention_bias.weight"] = "rowwise"  # a column for each head
        plan |= _split(f"{layer}.DenseReluDense", ("wi", "wi_0", "wi_1"), "wo")
    return plan


def _bart(config: Any) -> Plan:
    plan: Plan = {}
    for side in ("encoder", "decoder"):
        for attention in ("self_attn", "encoder_attn"):
            plan |= _split(f"{side}.layers.*.{attention}", _QKV, "out_proj")
        plan |= _split(f"{side}.layers.*", ("fc1",), "fc2")
    return plan


OWN_PLANS: dict[str, Callable[[Any], Plan]] = {
    "bart": _bart,
    "bert": _bert,
    "bloom": _bloom,
    "codegen": _codegen,
    "distilbert": _distilbert,
    "doge": _doge,
    "electra": _bert,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "hunyuan_v1_dense": _llama,
    "nemotron": _nemotron,  # has one of its own in later versions than 5.17
    "opt": _opt,
    "roberta": _bert,
    "stablelm": _stablelm,
    "t5": _t5,
    "vit": _vit,
    "xlm-roberta": _bert,
}
"""model_type -> the plan of the base model, for a config. Embedding and head are added to it."""

INSTEAD = frozenset({"doge"})
"""Of these, ours stands in the place of upstream's, which is wrong."""


_HEADS = re.compile(r"(q|k|v|query|key|value)(_proj|_lin)?$|query_key_value$|qkv_proj$|c_attn$")
"""Layers whose outputs are heads, one after another."""
_NORMS = re.compile(r"(q|k|query|key)_(layer)?norm$")
"""Norms of queries and keys, head by head."""
_SPLIT = ("colwise", "packed_colwise")


def plan_of(model: nn.Module, context: ParallelContext) -> dict[str, Any]:
    """What `parallelize` does to the model where no plan is given; empty if there is none.

    Where there is expert parallelism, what the expert plan names is the expert plan's first.
    """
    plan = tensor_plan(model)
    experts = context.get_world_size(ParallelMode.EXPERT) if context.is_initialized(ParallelMode.EXPERT) else 1
    if experts == 1:
        return plan
    own = expert_plan(model)
    if not own:
        raise PlacementError(
            f"expert={experts}: {type(model).__name__} has no plan for experts (no ep_plan that names a layer of it); leave "
            f"`expert` out of `parallel`, or give parallelize() a plan",
            code="C061",
        )
    return {**plan, **{name: _both(style, plan.get(name)) for name, style in own.items()}}


def _both(expert: str, tensor: Any) -> Any:
    """What the expert plan says of a name, and beside it what the tensor plan says, where both have parts to cut."""
    return expert if tensor in (None, expert) else {"style": expert, "tensor": tensor}


def expert_plan(model: nn.Module) -> dict[str, Any]:
    """The plan for expert parallelism: upstream's, and all parameters of experts that lie stacked. Empty if there is none."""
    base = getattr(getattr(model, "config", None), "base_model_ep_plan", None) or {}
    plan = getattr(model, "ep_plan", None) or _of_base(model, base)  # transformers 5.17 has it in the config alone
    # A parameter of the experts that is whole on every expert rank has its share of the gradient there, as any other has.
    found = {name: style for name, style in plan.items() if style != "replicated_with_grad_allreduce"}
    for pattern, experts in _stacked_experts(model):
        found |= {f"{pattern}.{name}": "grouped_gemm" for name, _ in experts.named_parameters(recurse=False)}
        found[pattern] = "ep_dispatch_experts"
    return _present(found, model)


def tensor_plan(model: nn.Module) -> dict[str, Any]:
    """The plan for tensor parallelism; empty if there is none."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    ours = OWN_PLANS.get(kind)
    plan = dict(getattr(model, "tp_plan", None) or {})
    upstream = getattr(config, "base_model_tp_plan", None) or {}
    if ours is not None and (kind in INSTEAD or not upstream):
        heads = {name: style for name, style in plan.items() if name not in _of_base(model, upstream)}
        plan = {**_of_base(model, ours(config)), **_vocabulary(model), **heads}
    plan = _present(plan, model)
    return {**plan, **_inside_attention(model, plan), **_inside_experts(model)}


def _of_base(model: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    """A plan for the base model, by the names that the model has for its layers."""
    base = getattr(model, "base_model", model)
    prefix = next((f"{name}." for name, module in model.named_modules() if name and module is base), "")
    return {prefix + name: style for name, style in plan.items()}


def _present(plan: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A plan is written for all configs of an architecture: what it says of layers that this model lacks is left out."""
    modules, parameters = model.named_modules(remove_duplicate=False), model.named_parameters(remove_duplicate=False)
    names = {pattern_of(name) for name, _ in (*modules, *parameters)}
    return {pattern: style for pattern, style in plan.items() if any(fits(pattern, name) for name in names)}


def _inside_attention(model: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    """What upstream's plans forget: parameters between queries, keys and scores, of which a rank sees its own heads.

    Norms of queries and keys (phi with qk_layernorm, glm4_moe with use_qk_norm) have a part of the gradient on each
    rank; where they have weights for each head (cohere with use_qk_norm), and where there is a number for each head (sinks
    of gpt_oss), these are cut as the heads are.
    """
    found: dict[str, Any] = {}
    for owner in dict.fromkeys(name.rpartition(".")[0] for name, style in plan.items() if _is_heads(name, style)):
        for name, module in model.named_modules():
            if not fits(owner, name):
                continue
            for path, parameter in module.named_parameters():
                child, _, _ = path.rpartition(".")
                pattern = f"{owner}.{path}"
                if pattern in plan or f"{owner}.{child}" in plan or not (_NORMS.match(child) or path == "sinks"):
                    continue
                each = parameter.dim() == 1 and path != "sinks"
                found[pattern] = "replicated_with_grad_allreduce" if each else "colwise"
    return found


def _inside_experts(model: nn.Module) -> dict[str, Any]:
    """How stacked experts are cut, read from how they lie: upstream leaves some whole (gpt_oss) and cuts some wrong (inkling)."""
    found: dict[str, Any] = {}
    for pattern, experts in _stacked_experts(model):
        if getattr(experts, "has_post_expert_norm", False) or not hasattr(experts, "is_concatenated"):
            continue
        inner, outer = ("rowwise", "colwise") if experts.is_transposed else ("colwise", "rowwise")
        packed = "packed_" if experts.has_gate and experts.is_concatenated else ""
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        styles = {first: packed + inner, f"{first}_bias": f"{packed}rowwise", "down_proj": outer}
        found |= {f"{pattern}.{key}": style for key, style in styles.items() if getattr(experts, key, None) is not None}
        found[pattern] = "moe_tp_experts"
    return found


def _stacked_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(pattern, module) of experts that say how their parameters lie, as those behind transformers' experts interface do."""
    for name, module in model.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "num_experts"):
            yield pattern_of(name), module


def _is_heads(name: str, style: Any) -> bool:
    kind = style.get("style") if isinstance(style, dict) else style
    return kind in _SPLIT and _HEADS.search(name.rpartition(".")[2]) is not None


def _vocabulary(model: nn.Module) -> dict[str, Any]:
    """Embedding and head are cut along the vocabulary; a bias of the head that has another name, under that too."""
    ends: list[Any] = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    biases = [end.bias for end in ends if isinstance(end, nn.Linear) and end.bias is not None]
    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        if any(module is end for end in ends) and isinstance(module, (nn.Embedding, nn.Linear)):
            plan[name] = "embedding_rowwise" if isinstance(module, nn.Embedding) else "colwise_gather_output"
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(parameter is bias for bias in biases) and name.rpartition(".")[0] not in plan:
            plan[name] = "colwise"
    return plan

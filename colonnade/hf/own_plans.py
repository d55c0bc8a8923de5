"""Plans of ours for architectures that bring none along, by `config.model_type`; names are those of the base model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

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

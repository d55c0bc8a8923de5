"""TP plans: their entries, the modules and parameters that their patterns match, and the plan of a Hugging Face model.

`plan_of` returns the plan of a model: the plan that transformers ships, with corrections; or, for architectures without
one, a built-in plan, found by `config.model_type`, with the names of the base model. transformers is not imported: only
attributes of the model and of its config are read.

`resolve` turns a TP plan into one `PlanEntry` per name; `plan_checks.py` checks these entries, and `parallelize.py` passes a
`Target` for each to its style (`styles.py`). Values of a TP plan may be styles of torch's `parallelize_module`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError, did_you_mean, listed
from colonnade.nn.layer.arrangement import Arrangement, arrange
from colonnade.texts import pattern_of

ParallelizePlan = Mapping[str, Any]
"""Pattern -> style. `*` stands for one component of a dotted name: "blocks.*.fc1".

A style is a name, a style of torch (`ColwiseParallel()`), or a mapping with the name under "style" plus options of that
style. The option "divide", allowed without a style too, lists attributes of the module (number of heads, width) that are
divided by the tensor size.
"""


@dataclass(frozen=True, eq=False)
class Target:
    """A module, or a parameter of a module, to which a style is applied."""

    name: str
    """The full dotted name of the module or of the parameter."""
    module: nn.Module
    """The module, or the module that owns the parameter."""
    parameter: str | None
    """The parameter's name in its owner; None if the pattern names a module."""
    model: nn.Module
    """The full model, or the pipeline stage that contains the module."""
    context: ParallelContext
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the style, for example `sections`."""
    shards: MutableMapping[nn.Parameter, nn.Parameter] = field(default_factory=WeakIdKeyDictionary)
    """Full parameter -> its shard, so that two layers that share a parameter share the shard too."""

    @property
    def arrangement(self) -> Arrangement:
        """The arrangement of activations around this module; the option `sequence` of the entry overrides the config."""
        return arrange(self.context, self.options.get("sequence"))

    @property
    def parent(self) -> nn.Module | None:
        """The parent of the module; None for the full model."""
        owner = self.name if self.parameter is None else self.name.rpartition(".")[0]
        return self.model.get_submodule(owner.rpartition(".")[0]) if owner else None


@dataclass(frozen=True)
class PlanEntry:
    """The style and options of one module or parameter, and the pattern of the TP plan that they come from."""

    pattern: str
    style: Any
    options: Mapping[str, Any]


def resolve(plan: ParallelizePlan, model: nn.Module) -> dict[str, PlanEntry]:
    """Return an entry for each module and parameter that the TP plan matches.

    Parameters come before modules, because a style of a module reads how its parameters are sharded.
    """
    if not isinstance(plan, Mapping):
        raise PlacementError(f"a TP plan must be a mapping of patterns to styles, but it is {plan!r}", code="C060")
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, PlanEntry] = {}
    for pattern, value in plan.items():
        names = [name for name in (*parameters, *modules) if fits(pattern, name)]
        if not names:
            known = list(dict.fromkeys(map(pattern_of, (*modules, *parameters))))
            # Names with the same last component are the likely ones: the mistake is mostly in the path.
            shown = [name for name in known if name.rpartition(".")[2] == pattern.rpartition(".")[2]] or known
            raise PlacementError(
                f"the pattern {pattern!r} of the TP plan matches no module and no parameter. A '*' stands for one "
                "component of a dotted name. Names in the model are "
                f"{listed(shown[:8])}{' ...' if len(shown) > 8 else ''}.{did_you_mean(pattern, known)}",
                code="C060",
            )
        for name in names:
            entry = PlanEntry(pattern, value, {})
            if isinstance(value, Mapping):
                options = dict(value)
                entry = PlanEntry(pattern, options.pop("style", None), options)
            elif is_torch_style(value) and name in modules:
                entry = PlanEntry(pattern, *from_torch(value, modules[name], name))
            other = found.setdefault(name, entry)
            if (other.style, dict(other.options)) != (entry.style, dict(entry.options)):
                raise PlacementError(
                    f"the TP plan gives {name!r} two styles. The pattern {other.pattern!r} has "
                    f"{plan[other.pattern]!r}, and the pattern {pattern!r} has {value!r}. Let only one pattern match "
                    f"{name!r}.",
                    code="C060",
                )
    return {name: found[name] for name in (*parameters, *modules) if name in found}


def place_of(name: str, model: nn.Module) -> tuple[nn.Module, str | None]:
    """Return (module, None) for the name of a module, or (owner, name in the owner) for the name of a parameter."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    return (module, last) if last in module._parameters else (model.get_submodule(name), None)


def fits(pattern: str, name: str) -> bool:
    """Return whether a name matches a pattern, component by component."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


# --- Styles of torch's `parallelize_module`, translated by class name, so that DTensor is not imported ---

_MODULE = "torch.distributed.tensor."
_FULL, _FEATURES, _SEQUENCE = "Replicate()", "Shard(-1)", "Shard(1)"


def is_torch_style(value: Any) -> bool:
    """Return whether the value is a style of torch."""
    return type(value).__module__.startswith(_MODULE)


def from_torch(value: Any, module: nn.Module, name: str) -> tuple[str, dict[str, Any]]:
    """Return the style of a TP plan, and its options, that have the effect of a torch style on this module."""
    kind = type(value).__name__
    embeds = isinstance(module, nn.Embedding)
    if kind == "ColwiseParallel":
        source, target = _layout(value.input_layouts), _layout(value.output_layouts)
        known = {_FEATURES: "colwise", _FULL: "embedding_colwise" if embeds else "colwise_gather_output"}
        if source in (_FULL, _SEQUENCE) and target in known and not (embeds and source == _SEQUENCE):
            return known[target], {"sequence": source == _SEQUENCE}
        raise _unsupported(name, kind, f"from {source} to {target}")
    if kind == "RowwiseParallel":
        source, target = _layout(value.input_layouts), _layout(value.output_layouts)
        known = {_FULL: "embedding_rowwise"} if embeds else {_FEATURES: "rowwise", _FULL: "rowwise_split_input"}
        if source in known and target in (_FULL, _SEQUENCE):
            return known[source], {"sequence": target == _SEQUENCE}
        raise _unsupported(name, kind, f"from {source} to {target}")
    if kind == "SequenceParallel":
        dims = value.sequence_sharding
        if _layout(dims) == _SEQUENCE:
            return "sequence_parallel", {"sequence": True}
        raise _unsupported(name, kind, f"on {_layout(dims)}")
    if kind == "PrepareModuleInput":
        # Inputs that torch would redistribute from sequence shards to full tensors, by position and by keyword.
        positional = zip(value.input_layouts or (), value.desired_input_layouts or (), strict=False)
        keywords = {
            key: (layout, value.desired_input_kwarg_layouts[key]) for key, layout in value.input_kwarg_layouts.items()
        }
        inputs: list[Any] = []
        for key, layouts in [*enumerate(positional), *keywords.items()]:
            source, target = map(_layout, layouts)
            if (source, target) == (_SEQUENCE, _FULL):
                inputs.append(key)
            elif source != target:
                raise _unsupported(name, kind, f"from {source} to {target}")
        return "gather_sequence", {"inputs": inputs}
    raise PlacementError(
        f"the TP plan gives {name!r} torch's style {kind}, which is not supported. Supported are ColwiseParallel, "
        "RowwiseParallel, SequenceParallel and PrepareModuleInput.",
        code="C060",
    )


def _layout(layouts: Any) -> str:
    """Convert a torch placement to one of the three constants above; any other placement to its text."""
    layout = layouts[0] if isinstance(layouts, (tuple, list)) and len(layouts) == 1 else layouts
    if layout is None or type(layout).__name__ == "Replicate":
        return _FULL if layout is not None else "None"
    dim = getattr(layout, "dim", None) if type(layout).__name__ == "Shard" else None
    return {-1: _FEATURES, 2: _FEATURES, 1: _SEQUENCE, -2: _SEQUENCE}.get(dim, str(layout))  # type: ignore[arg-type]


def _unsupported(name: str, kind: str, layouts: str) -> PlacementError:
    return PlacementError(
        f"the TP plan gives {name!r} torch's style {kind} {layouts}, which is not supported. Activations are [batch, "
        f"sequence, features]. Allowed layouts are {_FULL}, {_FEATURES} and {_SEQUENCE}.",
        code="C060",
    )


Plan = dict[str, Any]


def _split(where: str, columns: Iterable[str], row: str) -> Plan:
    """Column-parallel layers and their row-parallel partner: features are sharded in between."""
    return {**{f"{where}.{name}": "colwise" for name in columns}, f"{where}.{row}": "rowwise"}


def _gathered(where: str, columns: Iterable[str], row: str) -> Plan:
    """Sharded weights with full features in between, which every rank computes redundantly."""
    return {
        **{f"{where}.{name}": "colwise_gather_output" for name in columns},
        f"{where}.{row}": "rowwise_split_input",
    }


def _local(where: str, *attributes: str) -> Plan:
    """Attributes that the module's forward pass reads as sizes, divided by the number of ranks."""
    return {where: {"divide": attributes}}


def _falcon(config: Any) -> Plan:
    attention = "h.*.self_attention"
    if config.alibi or (config.multi_query and not config.new_decoder_architecture):
        # ALiBi slopes of all heads, or a single head of keys and values, which cannot be sharded.
        heads = _gathered(attention, ("query_key_value",), "dense")
    else:
        heads = {**_split(attention, ("query_key_value",), "dense"), **_local(attention, "num_heads", "num_kv_heads")}
    return {**heads, **_split("h.*.mlp", ("dense_h_to_4h",), "dense_4h_to_h")}


def _stablelm(config: Any) -> Plan:
    attention = "layers.*.self_attn"
    if config.qk_layernorm:
        # The forward pass of attention iterates over a list of norms, one for each of all heads.
        return {**_gathered(attention, _QKV, "o_proj"), **_LLAMA_MLP}
    return {**_split(attention, _QKV, "o_proj"), **_local(attention, "num_heads", "num_key_value_heads"), **_LLAMA_MLP}


def _encoder_decoder(plan_of_side: Callable[[str], Plan]) -> Plan:
    return {**plan_of_side("encoder"), **plan_of_side("decoder")}


def _t5_side(side: str) -> Plan:
    layer = f"{side}.block.*.layer.*"
    plan: Plan = {}
    for attention in (f"{layer}.SelfAttention", f"{layer}.EncDecAttention"):
        plan |= {**_split(attention, ("q", "k", "v"), "o"), **_local(attention, "n_heads", "inner_dim")}
    plan[f"{layer}.SelfAttention.relative_attention_bias.weight"] = "rowwise"  # a column for each head
    return {**plan, **_split(f"{layer}.DenseReluDense", ("wi", "wi_0", "wi_1"), "wo")}


_QKV = ("q_proj", "k_proj", "v_proj")
_LLAMA_MLP = _split("layers.*.mlp", ("gate_proj", "up_proj"), "down_proj")
_LLAMA = {**_split("layers.*.self_attn", _QKV, "o_proj"), **_LLAMA_MLP}
_BERT_QKV = ("self.query", "self.key", "self.value")
_BERT = {
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
    **_split("encoder.layer.*.attention", _BERT_QKV, "output.dense"),
    **_split("encoder.layer.*.crossattention", _BERT_QKV, "output.dense"),
}

OWN_PLANS: dict[str, Plan | Callable[[Any], Plan]] = {
    "bart": _encoder_decoder(
        lambda side: {
            **_split(f"{side}.layers.*.self_attn", _QKV, "out_proj"),
            **_split(f"{side}.layers.*.encoder_attn", _QKV, "out_proj"),
            **_split(f"{side}.layers.*", ("fc1",), "fc2"),
        }
    ),
    "bert": _BERT,
    # The model passes the ALiBi slopes of all heads to every layer, so attention needs all heads.
    "bloom": {
        **_gathered("h.*.self_attention", ("query_key_value",), "dense"),
        **_split("h.*.mlp", ("dense_h_to_4h",), "dense_4h_to_h"),
    },
    # Queries, values and keys are in four blocks, a number hard-coded in the forward pass, so it needs full features.
    "codegen": {**_gathered("h.*.attn", ("qkv_proj",), "out_proj"), **_split("h.*.mlp", ("fc_in",), "fc_out")},
    "distilbert": {
        **_split("transformer.layer.*.attention", ("q_lin", "k_lin", "v_lin"), "out_lin"),
        **_split("transformer.layer.*.ffn", ("lin1",), "lin2"),
    },
    # The upstream plan shards heads, but every rank gets a mask that dt_proj computes from them for all heads.
    "doge": {**_gathered("layers.*.self_attn", _QKV, "o_proj"), **_LLAMA_MLP},
    "electra": _BERT,
    "falcon": _falcon,
    "gpt2": {
        "h.*.attn.c_attn": {"style": "packed_colwise", "sections": 3},  # queries, keys and values, concatenated
        "h.*.attn.c_proj": "rowwise",
        **_local("h.*.attn", "split_size", "num_heads"),
        **_split("h.*.mlp", ("c_fc",), "c_proj"),
    },
    "gpt_neo": {
        **_split("h.*.attn.attention", _QKV, "out_proj"),
        **_local("h.*.attn.attention", "num_heads"),
        **_split("h.*.mlp", ("c_fc",), "c_proj"),
    },
    "gpt_oss": _split("layers.*.self_attn", _QKV, "o_proj"),
    "gptj": {
        **_split("h.*.attn", _QKV, "out_proj"),
        **_local("h.*.attn", "num_attention_heads"),
        **_split("h.*.mlp", ("fc_in",), "fc_out"),
    },
    "hunyuan_v1_dense": _LLAMA,
    # transformers after 5.17 ships a plan
    "nemotron": {
        **_split("layers.*.self_attn", _QKV, "o_proj"),
        **_split("layers.*.mlp", ("up_proj",), "down_proj"),
    },
    "opt": {
        **_split("decoder.layers.*.self_attn", _QKV, "out_proj"),
        **_local("decoder.layers.*.self_attn", "num_heads"),
        **_split("decoder.layers.*", ("fc1",), "fc2"),
    },
    "roberta": _BERT,
    "stablelm": _stablelm,
    "t5": _encoder_decoder(_t5_side),
    "vit": {**_split("layers.*.attention", _QKV, "o_proj"), **_split("layers.*.mlp", ("fc1",), "fc2")},
    "xlm-roberta": _BERT,
}
"""model_type -> plan of the base model, or function of the config. Embedding and LM head are added later."""

OVERRIDES = frozenset({"doge"})
"""Model types whose built-in plan replaces the upstream one, which is wrong."""


_HEADS = re.compile(r"(q|k|v|query|key|value)(_proj|_lin)?$|query_key_value$|qkv_proj$|c_attn$")
"""Layers whose output features are attention heads."""
_NORMS = re.compile(r"(q|k|query|key)_(layer)?norm$")
"""Norms of queries and keys, per head."""
_SHARDED_OUTPUT = ("colwise", "packed_colwise")


def plan_of(model: nn.Module, context: ParallelContext) -> dict[str, Any]:
    """Return the default TP plan of a model; empty if there is none.

    With expert parallelism, entries of the expert plan take precedence, and keep the tensor-parallel style as an
    option.
    """
    plan = tensor_plan(model)
    ranks = context.get_world_size(ParallelMode.EXPERT) if context.is_initialized(ParallelMode.EXPERT) else 1
    if ranks == 1:
        return plan
    experts = expert_plan(model)
    if not experts:
        raise PlacementError(
            f"parallel.expert is {ranks}, but {type(model).__name__} has no expert plan: no ep_plan names a layer of "
            "the model. Leave `expert` out of `parallel`, or pass a TP plan to parallelize().",
            code="C061",
        )
    for name, style in experts.items():
        tensor_style = plan.get(name)
        plan[name] = style if tensor_style in (None, style) else {"style": style, "tensor": tensor_style}
    return plan


def expert_plan(model: nn.Module) -> dict[str, Any]:
    """Return the plan for expert parallelism; empty if there is none.

    It is the plan that transformers ships, plus all stacked parameters of experts.
    """
    base = getattr(getattr(model, "config", None), "base_model_ep_plan", None) or {}
    # transformers 5.17 has the expert plan in the config only.
    plan = getattr(model, "ep_plan", None) or _for_model(model, base)
    # Parameters replicated over the expert ranks need no style: each rank has the gradient of its own tokens, as for any
    # other replicated parameter.
    found = {name: style for name, style in plan.items() if style != "replicated_with_grad_allreduce"}
    for pattern, experts in _stacked_experts(model):
        found |= {f"{pattern}.{name}": "grouped_gemm" for name, _ in experts.named_parameters(recurse=False)}
        found[pattern] = "ep_dispatch_experts"
    return _existing(found, model)


def own_plan(config: Any) -> Plan | None:
    """Return the built-in plan for a config; None if there is none."""
    plan = OWN_PLANS.get(getattr(config, "model_type", ""))
    return plan(config) if callable(plan) else plan


def tensor_plan(model: nn.Module) -> dict[str, Any]:
    """Return the plan for tensor parallelism; empty if there is none."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", "")
    built_in = own_plan(config)
    plan = dict(getattr(model, "tp_plan", None) or {})
    upstream = getattr(config, "base_model_tp_plan", None) or {}
    if built_in is not None and (model_type in OVERRIDES or not upstream):
        # Entries beyond the base model, such as the LM head, are kept from upstream.
        beyond_base = {name: style for name, style in plan.items() if name not in _for_model(model, upstream)}
        plan = {**_for_model(model, built_in), **_vocabulary(model), **beyond_base}
    plan = _existing(plan, model)
    return {**plan, **_inside_attention(model, plan), **_inside_experts(model)}


def _for_model(model: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    """A plan for the base model, with the names that its layers have in the model."""
    base = getattr(model, "base_model", model)
    prefix = next((f"{name}." for name, module in model.named_modules() if name and module is base), "")
    return {prefix + name: style for name, style in plan.items()}


def _existing(plan: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The entries that match a layer of this model: a plan covers all configs of an architecture."""
    modules, parameters = model.named_modules(remove_duplicate=False), model.named_parameters(remove_duplicate=False)
    names = {pattern_of(name) for name, _ in (*modules, *parameters)}
    return {pattern: style for pattern, style in plan.items() if any(fits(pattern, name) for name in names)}


def _inside_attention(model: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    """Entries that upstream plans lack: parameters inside attention that a rank applies to its own heads only.

    Norms of queries and keys (phi with qk_layernorm, glm4_moe with use_qk_norm) have a partial gradient on each rank. Norms
    with weights per head (cohere with use_qk_norm) and numbers per head (sinks of gpt_oss) are sharded like the heads.
    """

    def has_heads(name: str, style: Any) -> bool:
        style = style.get("style") if isinstance(style, dict) else style
        return style in _SHARDED_OUTPUT and _HEADS.search(name.rpartition(".")[2]) is not None

    found: dict[str, Any] = {}
    for owner in dict.fromkeys(name.rpartition(".")[0] for name, style in plan.items() if has_heads(name, style)):
        for name, module in model.named_modules():
            if not fits(owner, name):
                continue
            for path, parameter in module.named_parameters():
                child, _, _ = path.rpartition(".")
                pattern = f"{owner}.{path}"
                if pattern in plan or f"{owner}.{child}" in plan or not (_NORMS.match(child) or path == "sinks"):
                    continue
                shared_by_heads = parameter.dim() == 1 and path != "sinks"
                found[pattern] = "replicated_with_grad_allreduce" if shared_by_heads else "colwise"
    return found


def _inside_experts(model: nn.Module) -> dict[str, Any]:
    """Styles of stacked experts, derived from their memory layout.

    Upstream plans leave some replicated (gpt_oss) and shard some wrongly (inkling).
    """
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
    """(pattern, module) of experts whose attributes describe their memory layout, as transformers' experts interface does."""
    for name, module in model.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "num_experts"):
            yield pattern_of(name), module


def _vocabulary(model: nn.Module) -> dict[str, Any]:
    """Entries that shard the embedding and the LM head by vocabulary, and the head's bias under any other name it has."""
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

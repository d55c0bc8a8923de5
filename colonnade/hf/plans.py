"""The plan of a Hugging Face model: its own, mended where it is wrong, or one of ours where it has none.

Nothing of transformers is imported: what is read are attributes of the model and of its config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError
from colonnade.hf.own_plans import OWN_PLANS
from colonnade.plans.match import fits

_HEADS = re.compile(r"(q|k|v|query|key|value)(_proj|_lin)?$|query_key_value$|qkv_proj$|c_attn$")
"""Layers whose outputs are heads, one after another."""
_NORMS = re.compile(r"(q|k|query|key)_(layer)?norm$")
"""Norms of queries and keys, head by head."""
_SPLIT = ("colwise", "packed_colwise")


def plan_of(model: nn.Module, context: ParallelContext) -> dict[str, Any]:
    """What `parallelize` does to the model where no plan is given; empty if there is none.

    Where there is expert parallelism, what the expert plan names is no longer the tensor plan's.
    """
    plan = tensor_plan(model, context.tensor_parallel_size)
    experts = context.get_world_size(ParallelMode.EXPERT) if context.is_initialized(ParallelMode.EXPERT) else 1
    if experts == 1:
        return plan
    own = _present(dict(getattr(model, "ep_plan", None) or {}), model)
    if not own:
        raise PlacementError(
            f"expert={experts}: {type(model).__name__} has no plan for experts (no ep_plan that names a layer of it); leave "
            f"`expert` out of `parallel`, or give parallelize() a plan"
        )
    kept = {name: style for name, style in plan.items() if not any(f"{name}.".startswith(f"{other}.") for other in own)}
    return {**kept, **own}


def tensor_plan(model: nn.Module, ranks: int) -> dict[str, Any]:
    """The plan for so many tensor ranks; refuses a model of which they cannot have whole heads."""
    config = getattr(model, "config", None)
    ours = OWN_PLANS.get(getattr(config, "model_type", ""))
    plan = dict(getattr(model, "tp_plan", None) or {})
    if ours is not None and not getattr(config, "base_model_tp_plan", None):
        base = getattr(model, "base_model", model)
        prefix = next((f"{name}." for name, module in model.named_modules() if name and module is base), "")
        plan = {**{prefix + name: style for name, style in ours(config).items()}, **plan}
    elif not plan:
        return {}
    plan = _present(plan, model)
    plan |= _inside_attention(model, plan)
    _check_heads(model, plan, ranks)
    return _with_vocabulary(model, plan, ranks)


def _present(plan: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A plan is written for all configs of an architecture: what it says of layers that this model lacks is left out."""
    names = [*_module_names(model), *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    known = {_pattern(name) for name in names}
    return {
        pattern: style for pattern, style in plan.items() if pattern in known or any(fits(pattern, it) for it in names)
    }


def _inside_attention(model: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    """What upstream's plans forget: parameters between queries, keys and scores, of which a rank sees its own heads.

    Norms of queries and keys (phi with qk_layernorm, glm4_moe with use_qk_norm, doge) have a part of the gradient on each
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


def _is_heads(name: str, style: Any) -> bool:
    kind = style.get("style") if isinstance(style, dict) else style
    return kind in _SPLIT and _HEADS.search(name.rpartition(".")[2]) is not None


def _check_heads(model: nn.Module, plan: dict[str, Any], ranks: int) -> None:
    if not any(_is_heads(name, style) for name, style in plan.items()):
        return
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("num_attention_heads", "num_key_value_heads", "num_kv_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % ranks:
            raise PlacementError(
                f"{type(model).__name__} has {key}={heads}, which a tensor size of {ranks} does not divide: a rank has whole "
                f"heads. Choose a tensor size that divides {heads}, or give parallelize() a plan that leaves attention whole"
            )


def _with_vocabulary(model: nn.Module, plan: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Embedding and head are cut along the vocabulary, both or, where they share weights or it does not divide, neither.

    Upstream's plan names the head of every causal model, and the embedding of those alone that have `embed_tokens` and a
    plan for the base model: of the others (gpt_oss, hunyuan_v1_dense) a tie would be cut.
    """
    shared = dict(_embeddings(model))
    kept = {name: style for name, style in plan.items() if name not in shared}
    if any(module.weight.shape[0] % ranks for module in shared.values()):
        return kept
    for name, module in shared.items():
        if isinstance(module, nn.Embedding):
            kept[name] = "embedding_rowwise"
        else:
            kept[name] = "colwise_gather_output"
            kept |= {
                other: "colwise" for other in _names_of(model, getattr(module, "bias", None)) if other != f"{name}.bias"
            }
    return kept


def _embeddings(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The embedding of tokens and the head, with every module that shares the weight of either."""
    ends: list[Any] = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    weights = {id(end.weight) for end in ends if hasattr(end, "weight")}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (nn.Embedding, nn.Linear)) and id(module.weight) in weights:
            yield name, module


def _names_of(model: nn.Module, parameter: Any) -> Iterable[str]:
    if parameter is None:
        return []
    return [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]


def _module_names(model: nn.Module) -> Iterator[str]:
    return (name for name, _ in model.named_modules(remove_duplicate=False) if name)


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))

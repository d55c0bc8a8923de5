"""from_pretrained: a model of transformers out of its folder, of which each rank reads just what it holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colonnade.checkpoint.weights_folder import tensors_in
from colonnade.comm.messages import agreed_errors
from colonnade.context.parallel_context import ParallelContext
from colonnade.core import given_or_global
from colonnade.errors import CheckpointError, ConfigError, ContextError, listed
from colonnade.hf.parallelize import parallelize
from colonnade.hf.source_weights import Source, are_same, sources_for
from colonnade.parallel.meta import meta_init, set_value_source
from colonnade.parallel.split import Split
from colonnade.paths import local_path

_SHOWN = 12
_ABOUT_TIES = (
    " Of two weights for one tied parameter name the one that is to be left out, or set tie_word_embeddings to false in "
    "config.json to train them apart."
)
_NEVER_STORED = r"rotary_emb\.inv_freq$"
"""A buffer that is computed, and that old folders have."""


def from_pretrained(
    path_or_config: Any,
    plan: Any = None,
    *,
    model_class: Any = None,
    dtype: torch.dtype | None = None,
    adapters: Any = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    trust: bool = False,
    sample: Any = None,
    context: ParallelContext | None = None,
    **options: Any,
) -> nn.Module | Split:
    """A model of transformers, parallelized, for `initialize`, which gives each rank its part of the weights.

    `path_or_config` is a folder as `save_pretrained` writes it, of which each rank reads just the slices that it holds; or a
    config, for weights that are drawn as transformers draws them, the same on every layout. The model is built on the
    meta device and takes no memory until `initialize`. `model_class` is a class of transformers, or one of its Auto classes; left out, it
    is the one that the config names. `plan` and `sample` are as in `parallelize`, `dtype` that of the weights (else as the config says),
    `options` go to the model's class (attn_implementation="sdpa"). `adapters` is a config of peft: the model gets them, and
    they alone are trained.

    Every rank raises where the folder does not fit the model: names that are missing (except those that `allow_missing` has
    patterns for, which are drawn), names that the model does not have (`allow_unexpected`), other shapes. Pickled
    weights are read only with `trust=True`, then by torch's weights_only loader.
    """
    context = given_or_global(context)
    if not context.is_launched:
        raise ContextError(
            "from_pretrained() needs a launched context: call colonnade.launch(config) first", code="C013"
        )
    # Every rank reads the folder and builds the model, without memory, and all raise if one of them cannot.
    with agreed_errors(context.device):
        path = (
            local_path(path_or_config, "the folder of from_pretrained()", CheckpointError)
            if isinstance(path_or_config, (str, Path))
            else None
        )
        config = _config(path_or_config, path)
        with meta_init():
            whole = _build(model_class, config, dtype, options)
        _compute_buffers(whole)
        sources: dict[str, Source] = {}
        if path is not None:
            sources = _matched(whole, path, trust, list(allow_missing), list(allow_unexpected), context)
            # Buffers are not on the meta device, so they are read here; parameters are read by `initialize`, cut.
            for name, value in whole.state_dict(keep_vars=True).items():
                if name in sources and not isinstance(value, nn.Parameter):
                    sources[name].read_into(value, [0] * value.dim())
            if (path / "generation_config.json").is_file() and whole.can_generate():
                from transformers import GenerationConfig

                whole.generation_config = GenerationConfig.from_pretrained(path)
        names = {name: group for group in _all_names(whole).values() for name in group}
        if adapters is not None:
            from peft import get_peft_model

            whole = get_peft_model(whole, adapters)
    model = parallelize(whole, plan, sample=sample, context=context)

    # Each parameter of this rank is told where its elements come from. The sources have the names of the model before peft put
    # its wrappers around it, and of several names of a tied weight the folder has one.
    for stage in list(model) if isinstance(model, Split) else [model]:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            source = next((sources[other] for other in names.get(plain, [plain]) if other in sources), None)
            if source is not None:
                set_value_source(parameter, source)
    return model


def _config(given: Any, path: Path | None) -> Any:
    try:
        from transformers import AutoConfig, PretrainedConfig
    except ImportError as error:
        raise ConfigError(
            f"from_pretrained() needs transformers: pip install 'colonnade[hf]' ({error})", code="C024"
        ) from error
    if path is None:
        if not isinstance(given, PretrainedConfig):
            raise ConfigError(
                f"from_pretrained() takes the folder of a model or a config of transformers, not {type(given).__name__}",
                code="C061",
            )
        return given
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} has no config.json. Give the folder of a model (download one with `hf download <name> --local-dir "
            f"<folder>`), or a config for new weights",
            code="C061",
        )
    return AutoConfig.from_pretrained(path)


def _build(model_class: Any, config: Any, dtype: torch.dtype | None, options: dict[str, Any]) -> Any:
    """The model on the meta device, in training mode as a model that is built is."""
    import transformers

    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            "the weights of this model are quantised, which cannot be trained; take the original ones", code="C061"
        )
    if model_class is None:
        names = list(getattr(config, "architectures", None) or ())
        model_class = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if model_class is None:
        model_class = transformers.AutoModelForCausalLM
    make = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config", None)
    if make is None:
        raise ConfigError(
            f"model_class is a class of transformers, such as LlamaForCausalLM, not {model_class!r}", code="C061"
        )
    model = make(config, **({"dtype": dtype} if dtype is not None else {}), **options)
    _keep_wide(model, config.dtype)
    return model


def _keep_wide(model: Any, dtype: torch.dtype | None) -> None:
    """Give the parameters and buffers that transformers keeps in float32, whatever the model's type, that type."""
    plan = model._get_dtype_plan(dtype) if dtype is not None else {}
    for pattern, wide in plan.items():
        wanted = re.compile(rf"(^|\.){re.escape(pattern)}($|\.)".replace(r"\*", ".*"))
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if wanted.search(name) and value.is_floating_point() and value.dtype != wide:
                owner, _, last = name.rpartition(".")
                kept: Any = value.detach().to(wide)
                if isinstance(value, nn.Parameter):
                    kept = nn.Parameter(kept, value.requires_grad)
                setattr(model.get_submodule(owner), last, kept)


@torch.no_grad()
def _compute_buffers(model: Any) -> None:
    """Compute the buffers that are in no folder, as transformers does it: in torch's default type, not the model's."""
    for module in model.modules():
        if module._non_persistent_buffers_set and not module._parameters:
            model._init_weights(module)


def _all_names(model: nn.Module) -> dict[int, list[str]]:
    """The names of each tensor of the model's state, by its id."""
    found: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        found.setdefault(id(value), []).append(name)
    return found


def _matched(
    model: Any, path: Path, trust: bool, missing: list[str], unexpected: list[str], context: ParallelContext
) -> dict[str, Source]:
    """The source of each name of the model's state; refuses a folder that does not fit."""
    sources, strange = sources_for(model, tensors_in(path, trust))
    state = model.state_dict(keep_vars=True)
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), _NEVER_STORED]
    spared = list(model._keys_to_ignore_on_load_missing or ())
    lost = [
        names[0]
        for names in _all_names(model).values()
        if not any(name in sources or _fits(name, spared, missing) for name in names)
    ]
    # Values are compared by rank 0 alone: all raise its error.
    untied = _untied(model, sources, unexpected, compare=context.get_global_rank() == 0)
    problems = {
        "missing in the folder": lost,
        "in the folder, but not in the model": [key for key in strange if not _fits(key, ignored, unexpected)],
        "of another shape": [
            f"{name}: {list(source.shape)} in the folder, {list(state[name].shape)} in the model"
            for name, source in sources.items()
            if tuple(state[name].shape) != source.shape
        ],
        "tied in the model, two weights in the folder": untied,
    }
    lines = [
        f"  {what} ({len(names)}): {listed(names[:_SHOWN])}{' ...' if len(names) > _SHOWN else ''}"
        for what, names in problems.items()
        if names
    ]
    if lines:
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}:\n"
            + "\n".join(lines)
            + "\nTake the model that was saved, or say "
            "what may be drawn anew (allow_missing=['classifier.*']) or left out (allow_unexpected=[...])."
            + (_ABOUT_TIES if untied else ""),
            code="C061",
        )
    return sources


def _untied(model: Any, sources: dict[str, Source], left_out: Sequence[str], compare: bool) -> list[str]:
    """Names of one parameter for which the folder has two values; those that are left out are taken from the sources."""
    state, found = model.state_dict(), []
    for names in _all_names(model).values():
        there = [name for name in names if name in sources]
        for name in [name for name in there if _fits(name, (), left_out)][: len(there) - 1]:
            del sources[name]
            there.remove(name)
        found += [
            f"{there[0]} and {name}"
            for name in there[1:]
            if compare and not are_same(sources[there[0]], sources[name], state[name].dtype)
        ]
    return found


def _fits(name: str, expressions: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(re.search(each, name) for each in expressions) or any(fnmatchcase(name, each) for each in patterns)

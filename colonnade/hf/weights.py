"""`from_pretrained`: load a transformers model from its folder, each rank reading only the slices that it stores."""

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
from colonnade.hf.parallelize import parallelize, renamed_plan
from colonnade.hf.source_weights import Source, are_same, sources_for
from colonnade.parallel.meta import meta_init, set_value_source
from colonnade.parallel.split import Split
from colonnade.paths import local_path

_SHOWN = 12
_NEVER_STORED = r"rotary_emb\.inv_freq$"
"""A computed buffer that old folders contain."""


def from_pretrained(
    path_or_config: Any,
    parallelize_plan: Any = None,
    *,
    model_class: Any = None,
    dtype: torch.dtype | None = None,
    adapters: Any = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    trust: bool = False,
    sample: Any = None,
    context: ParallelContext | None = None,
    plan: Any = None,
    **options: Any,
) -> nn.Module | Split:
    """Build a transformers model on the meta device and parallelize it; `initialize` then loads or draws its weights.

    Each rank reads only the slices of the weights that it stores, and the model takes no memory until `initialize`.

    Args:
        path_or_config: A folder written by `save_pretrained`; or a transformers config, for weights initialized as
            transformers does, with the same values on every layout.
        parallelize_plan: The TP plan, as in `parallelize`.
        model_class: A class of transformers or one of its Auto classes; defaults to the class that the config names.
        dtype: The dtype of the weights; defaults to that of the config.
        adapters: A peft config; the model gets these adapters, and only they are trained.
        allow_missing: Patterns of parameters that the folder may lack; they are initialized as transformers does.
        allow_unexpected: Patterns of stored tensors that the model does not have, and that are left out.
        trust: Read pickled weights too, with torch's weights_only loader.
        sample: The data of one batch, as in `parallelize`.
        context: The launched context; defaults to the global one.
        plan: Deprecated name of `parallelize_plan`.
        options: Arguments of the model class, such as `attn_implementation="sdpa"`.

    Returns:
        The model, or its pipeline stages; pass it to `initialize`.

    Raises:
        CheckpointError: The folder does not fit the model: missing or unexpected names, or other shapes.

    Collective over the world.

    Example::

        from transformers import LlamaConfig

        gpc = colonnade.launch(dict(parallel=dict(tensor=dict(size=2, mode="1d"))))
        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        model = colonnade.from_pretrained(config)  # or the folder of a model, such as "Llama-3.1-8B"
    """
    context = given_or_global(context)
    parallelize_plan = renamed_plan("from_pretrained", parallelize_plan, plan)
    if not context.is_launched:
        raise ContextError(
            "from_pretrained() needs a launched context: call colonnade.launch(config) first", code="C013"
        )
    # Every rank reads the folder's headers and builds the model without memory; all ranks raise if one of them fails.
    with agreed_errors(context.device):
        path = None
        if isinstance(path_or_config, (str, Path)):
            path = local_path(path_or_config, "the folder of from_pretrained()", CheckpointError)
        config = _config(path_or_config, path)
        with meta_init():
            full = _build(model_class, config, dtype, options)
        # Non-persistent buffers are in no folder. Transformers computes them in torch's default dtype, not the model's.
        with torch.no_grad():
            for module in full.modules():
                if module._non_persistent_buffers_set and not module._parameters:
                    full._init_weights(module)
        sources: dict[str, Source] = {}
        if path is not None:
            sources = _match_folder(full, path, trust, list(allow_missing), list(allow_unexpected), context)
            # Buffers are not on the meta device, so they are read here; `initialize` reads the shards of parameters.
            for name, value in full.state_dict(keep_vars=True).items():
                if name in sources and not isinstance(value, nn.Parameter):
                    sources[name].read_into(value, [0] * value.dim())
            if (path / "generation_config.json").is_file() and full.can_generate():
                from transformers import GenerationConfig

                full.generation_config = GenerationConfig.from_pretrained(path)
        tied_names = {name: names for names in _names_by_tensor(full).values() for name in names}
        if adapters is not None:
            from peft import get_peft_model

            full = get_peft_model(full, adapters)
    model = parallelize(full, parallelize_plan, sample=sample, context=context)

    # The sources have the names from before peft wrapped the model, and the folder has one of the names of a tied weight.
    for stage in list(model) if isinstance(model, Split) else [model]:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            source = next((sources[other] for other in tied_names.get(plain, [plain]) if other in sources), None)
            if source is not None:
                set_value_source(parameter, source)
    return model


def _config(given: Any, path: Path | None) -> Any:
    try:
        from transformers import AutoConfig, PretrainedConfig
    except ImportError as error:
        raise ConfigError(
            f"from_pretrained() needs transformers: pip install 'transformers>=5.17' ({error})", code="C024"
        ) from error
    if path is None:
        if not isinstance(given, PretrainedConfig):
            raise ConfigError(
                f"from_pretrained() takes the folder of a model or a transformers config, not {type(given).__name__}",
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
    """The model, in training mode like any model that is built from a config."""
    import transformers

    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            "the weights of this model are quantized and cannot be trained; load the original weights", code="C061"
        )
    if model_class is None:
        names = list(getattr(config, "architectures", None) or ())
        model_class = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if model_class is None:
        model_class = transformers.AutoModelForCausalLM
    make = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config", None)
    if make is None:
        raise ConfigError(
            f"model_class must be a class of transformers, such as LlamaForCausalLM, not {model_class!r}", code="C061"
        )
    model = make(config, **({"dtype": dtype} if dtype is not None else {}), **options)

    # Transformers keeps some parameters and buffers in float32 whatever the model's dtype. Its loader does that, which is not
    # used here.
    wide_dtypes = model._get_dtype_plan(config.dtype) if config.dtype is not None else {}
    for pattern, wide in wide_dtypes.items():
        matcher = re.compile(rf"(^|\.){re.escape(pattern)}($|\.)".replace(r"\*", ".*"))
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if matcher.search(name) and value.is_floating_point() and value.dtype != wide:
                owner, _, last = name.rpartition(".")
                widened: Any = value.detach().to(wide)
                if isinstance(value, nn.Parameter):
                    widened = nn.Parameter(widened, value.requires_grad)
                setattr(model.get_submodule(owner), last, widened)
    return model


def _names_by_tensor(model: nn.Module) -> dict[int, list[str]]:
    """The names of each tensor of the model's state, by its id."""
    found: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        found.setdefault(id(value), []).append(name)
    return found


def _match_folder(
    model: Any, path: Path, trust: bool, missing: list[str], unexpected: list[str], context: ParallelContext
) -> dict[str, Source]:
    """The source of each name of the model's state; raises if the folder does not fit the model."""
    sources, unknown = sources_for(model, tensors_in(path, trust))
    state = model.state_dict(keep_vars=True)
    groups = _names_by_tensor(model)
    ignored_unexpected = [*(model._keys_to_ignore_on_load_unexpected or ()), _NEVER_STORED]
    ignored_missing = list(model._keys_to_ignore_on_load_missing or ())
    absent = [
        names[0]
        for names in groups.values()
        if not any(name in sources or _matches(name, ignored_missing, missing) for name in names)
    ]
    # A tied parameter for which the folder has different values under two names: `allow_unexpected` may name the one to leave
    # out. Values are compared by rank 0 only, whose error all ranks raise.
    untied = []
    for names in groups.values():
        stored = [name for name in names if name in sources]
        for name in [name for name in stored if _matches(name, (), unexpected)][: len(stored) - 1]:
            del sources[name]
            stored.remove(name)
        untied += [
            f"{stored[0]} and {name}"
            for name in stored[1:]
            if context.get_global_rank() == 0 and not are_same(sources[stored[0]], sources[name], state[name].dtype)
        ]
    problems = {
        "missing in the folder": absent,
        "in the folder, but not in the model": [
            key for key in unknown if not _matches(key, ignored_unexpected, unexpected)
        ],
        "of another shape": [
            f"{name}: {list(source.shape)} in the folder, {list(state[name].shape)} in the model"
            for name, source in sources.items()
            if tuple(state[name].shape) != source.shape
        ],
        "tied in the model, two weights in the folder": untied,
    }
    lines = [
        f"  {problem} ({len(names)}): {listed(names[:_SHOWN])}{' ...' if len(names) > _SHOWN else ''}"
        for problem, names in problems.items()
        if names
    ]
    if lines:
        about_ties = (
            " For two weights of one tied parameter, name the one to leave out, or set tie_word_embeddings to false in "
            "config.json to train them separately."
        )
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}:\n"
            + "\n".join(lines)
            + "\nUse the model that was saved, or list names that may be initialized (allow_missing=['classifier.*']) or "
            "left out (allow_unexpected=[...])." + (about_ties if untied else ""),
            code="C061",
        )
    return sources


def _matches(name: str, expressions: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(re.search(key, name) for key in expressions) or any(fnmatchcase(name, key) for key in patterns)

"""`from_pretrained`: load a transformers model from its folder, each rank reading only the slices that it stores.

`sources_for` finds the stored tensors that each parameter is made of, in current and older formats of transformers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.checkpoint.full_weights import AnyTensor, tensors_in
from colonnade.comm.messages import agreed_errors
from colonnade.context.parallel_context import ParallelContext
from colonnade.core import given_or_global
from colonnade.errors import CheckpointError, ConfigError, ContextError, listed
from colonnade.hf.parallelize import parallelize, renamed_plan
from colonnade.parallel.boxes import Box, full_box
from colonnade.parallel.meta import meta_init, set_value_source
from colonnade.parallel.split import Split
from colonnade.paths import local_path

_COMPARED = 1 << 25
"""Bytes compared at a time."""


@dataclass(frozen=True)
class StoredPart:
    """A stored tensor that fills a box of a parameter.

    `stacked`: the box has a first dimension of length 1 that the stored tensor lacks.
    """

    tensor: AnyTensor
    box: Box
    stacked: bool = False


@dataclass(frozen=True)
class StoredParts:
    """A parameter that consists of one or several stored tensors; only the requested slices are read."""

    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    def __str__(self) -> str:
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"{self.parts[0].tensor}{more}"

    def read_into(self, target: Tensor, offset: Sequence[int]) -> None:
        """Read a box of the parameter into `target`: the box starts at `offset` and has the shape of `target`."""
        box = Box(tuple(offset), tuple(target.shape))
        for part in self.parts:
            shared = box.shared_with(part.box)
            if shared is not None:
                view = target[shared.slices_in(box)]
                start = tuple(at - first for at, first in zip(shared.offset, part.box.offset, strict=True))
                inner, view = (start[1:], view[0]) if part.stacked else (start, view)
                part.tensor.read_into(view, Box(inner, tuple(view.shape)))


@dataclass(frozen=True)
class Converted:
    """A parameter that transformers computes from full stored tensors."""

    name: str
    shape: tuple[int, ...]
    converter: Any
    stored: Mapping[str, Sequence[AnyTensor]]
    model: Any

    def __str__(self) -> str:
        return f"{next(iter(self.stored.values()))[0]}, converted"

    def read_into(self, target: Tensor, offset: Sequence[int]) -> None:
        """Compute the full parameter, and copy the box that starts at `offset` into `target`."""
        values = {pattern: [tensor.read() for tensor in tensors] for pattern, tensors in self.stored.items()}
        full = _convert(self.converter, self.name, values, self.model)[self.name]
        box = Box(tuple(offset), tuple(target.shape))
        with torch.no_grad():
            target.copy_(full[box.slices_in(full_box(self.shape))])


Source = StoredParts | Converted


def sources_for(model: Any, stored: Mapping[str, AnyTensor]) -> tuple[dict[str, Source], list[str]]:
    """Return (the source of each name of the model's state, the stored keys that belong to no name).

    Renamed keys and older formats (for example one tensor per expert) are matched with transformers' own rules.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    state, prefix = model.state_dict(), model.base_model_prefix
    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Source] = {}
    unknown: list[str] = []
    groups: dict[str, tuple[Any, dict[str, list[AnyTensor]]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            unknown.append(key)
        elif pattern is None:
            source = StoredParts(stored[key].shape, (StoredPart(stored[key], full_box(stored[key].shape)),))
            if name in found and not are_same(found[name], source, state[name].dtype):
                raise CheckpointError(
                    f"the folder has several tensors for {name}: {found[name]} and {source}. Remove all but one of "
                    "them from the files.",
                    code="C061",
                )
            found[name] = source
        else:
            _, tensors = groups.setdefault(name, (by_pattern[pattern], {}))
            tensors.setdefault(pattern, []).append(stored[key])
    for name, (converter, tensors) in groups.items():
        # Shapes come from a conversion on the meta device, which reads nothing.
        empty = {
            pattern: [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in stored_tensors]
            for pattern, stored_tensors in tensors.items()
        }
        shapes = {target: tuple(value.shape) for target, value in _convert(converter, name, empty, model).items()}
        parts = _concatenated(converter, tensors)
        if len(shapes) == 1 and parts is not None and parts.shape == shapes.get(name):
            found[name] = parts
        else:
            found |= {target: Converted(target, shape, converter, tensors, model) for target, shape in shapes.items()}
    return found, unknown


def are_same(left: Source, right: Source, dtype: torch.dtype) -> bool:
    """Return whether two sources give a parameter of this dtype the same values. Reads some rows of each at a time."""
    if left.shape != right.shape:
        return False
    length, *rest = left.shape or (1,)
    rows = max(1, _COMPARED // max(1, prod(rest) * dtype.itemsize))
    if isinstance(left, Converted) or isinstance(right, Converted):
        rows = length  # a converter computes the full parameter for any slice
    for first in range(0, length, rows):
        box = Box((first, *[0] * len(rest)), (min(rows, length - first), *rest)) if left.shape else Box((), ())
        values = [torch.empty(box.shape, dtype=dtype, device="cpu") for _ in range(2)]
        left.read_into(values[0], box.offset)
        right.read_into(values[1], box.offset)
        if not torch.equal(*values):
            return False
    return True


def _convert(converter: Any, name: str, values: dict[str, list[Tensor]], model: Any) -> dict[str, Tensor]:
    """Run a converter of transformers on these values."""
    # A converter collects tensors, so each parameter needs a fresh one.
    converter = copy.deepcopy(converter)
    for pattern, tensors in values.items():
        for tensor in tensors:
            converter.add_tensor(name, name, pattern, tensor)
    try:
        converted = converter.convert(name, model=model, config=model.config)
    except Exception as error:
        sources = listed(pattern for pattern in values)
        raise CheckpointError(
            f"{name} could not be converted from {sources} with the conversion of transformers: {error}", code="C061"
        ) from error
    return {target: value[0] if isinstance(value, list) else value for target, value in converted.items()}


def _concatenated(converter: Any, stored: dict[str, list[AnyTensor]]) -> StoredParts | None:
    """The parts of a parameter whose converter only stacks and concatenates; None for other converters."""
    operations = {type(operation).__name__: getattr(operation, "dim", 0) for operation in converter.operations}
    stack_dim, concat_dim = operations.get("MergeModulelist"), operations.get("Concatenate")
    if (
        stack_dim not in (None, 0)
        or not operations.keys() <= {"MergeModulelist", "Concatenate"}
        or "quant" in str(converter)
    ):
        return None
    # One column per pattern: its tensors are stacked along dimension 0, and columns are concatenated. Without a stack every
    # tensor is a column of its own.
    columns = [stored[pattern] for pattern in converter.source_patterns if pattern in stored]
    if stack_dim is None:
        columns = [[tensor] for column in columns for tensor in column]
    parts: list[StoredPart] = []
    at = 0
    for column in columns:
        if len({tensor.shape for tensor in column}) > 1:
            return None
        for row, tensor in enumerate(column):
            shape = (1, *tensor.shape) if stack_dim is not None else tensor.shape
            offset = [0] * len(shape)
            if stack_dim is not None:
                offset[0] = row
            if concat_dim is not None:
                offset[concat_dim] = at
            parts.append(StoredPart(tensor, Box(tuple(offset), shape), stack_dim is not None))
        at += parts[-1].box.shape[concat_dim] if concat_dim is not None else 0
    stops = [part.box.stop for part in parts]
    return StoredParts(tuple(map(max, *stops)) if len(stops) > 1 else stops[0], tuple(parts))


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
                "from_pretrained() takes the folder of a model or a transformers config, but got a "
                f"{type(given).__name__}",
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
            "the weights of this model are quantized and cannot be trained. Load the original weights.", code="C061"
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
        "tied in the model, but two weights in the folder": untied,
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

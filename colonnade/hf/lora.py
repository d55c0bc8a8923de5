"""LoRA adapters of peft under tensor parallelism: created on the full model, then sharded like their layer.

For a column-parallel layer A is replicated and B is sharded; for a row-parallel layer it is the reverse, and the
all-reduce carries rank-r activations only. Therefore one matrix has the style of its layer and the other is replicated.
peft is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colonnade.checkpoint.full_weights import FullTensors
from colonnade.checkpoint.save import agreed
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.random import derive_seed
from colonnade.errors import CheckpointError, PlacementError, listed
from colonnade.hf.model_loss import base_model
from colonnade.hf.plans import PlanEntry, Target
from colonnade.hf.styles import style_of
from colonnade.nn.layer.arrangement import arrange
from colonnade.nn.layer.dropout import Dropout
from colonnade.nn.layer.spread import size_of
from colonnade.parallel.placement import placement_of
from colonnade.parallel.whole import PREFIX, LocalTensor
from colonnade.paths import local_path

_COLUMN = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
_ROW = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
_REPLICATED = ("replicate", "replicated_with_grad_allreduce")
_EMBEDDING = ("rowwise", "embedding_rowwise", "embedding_colwise")
"""Styles of an embedding with full output vectors: its adapters stay replicated."""


class Adapters:
    """The peft adapters of a model. The constructor detaches the adapters: until `put_back`, `base` is the model without peft."""

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        self.base = base_model(model)
        self._prefix = next((f"{name}." for name, module in model.named_modules() if module is self.base and name), "")
        self._context = context
        self._configs: Mapping[str, Any] = getattr(model, "peft_config", {})
        self._detached = dict(lora_layers(self.base))
        if context.tensor_parallel_size > 1:
            for name, module in self.base.named_modules():
                is_adapted = hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names")
                if is_adapted and not hasattr(module, "lora_A"):
                    raise PlacementError(
                        f"{name!r} has adapters of type {type(module).__module__.split('.')[-2]}, but tensor "
                        "parallelism supports only LoRA adapters. Use LoraConfig, or leave tensor parallelism out.",
                        code="C061",
                    )
        for name, layer in self._detached.items():
            self._materialize(name, layer)
            _set(self.base, name, layer.get_base_layer())

    def put_back(self, stage: nn.Module, entries: Mapping[str, PlanEntry], shards: Any) -> None:
        """Attach the adapters of the layers in a stage, and shard them by the plan entries of their layers."""
        if self._configs and not hasattr(stage, "peft_config"):
            stage.peft_config = self._configs  # type: ignore[assignment]  # a stage has no peft wrapper around it
        if stage is not self.base:
            setattr(stage, PREFIX, self._prefix)
        present = {id(module) for module in stage.modules()}
        for name, layer in list(self._detached.items()):
            if id(layer.get_base_layer()) in present:
                _set(stage, name, layer)
                self._shard(name, layer, stage, entries, shards)
                del self._detached[name]

    def undo(self) -> None:
        """Attach the adapters that are still detached, without sharding them."""
        for name, layer in self._detached.items():
            _set(self.base, name, layer)

    def _materialize(self, name: str, layer: Any) -> None:
        """Initialize adapters that peft created on the meta device, because the model is there, with the values that
        peft would draw.
        """
        for adapter in [*layer.lora_A, *layer.lora_embedding_A]:
            matrices = [layer.lora_A, layer.lora_B, layer.lora_embedding_A, layer.lora_embedding_B]
            containers = [matrix for matrix in matrices if adapter in matrix]
            if not any(parameter.is_meta for container in containers for parameter in container.parameters()):
                continue
            init = self._configs[adapter].init_lora_weights if adapter in self._configs else True
            if isinstance(init, str) and init != "gaussian":
                raise PlacementError(
                    f"{name!r} has init_lora_weights={init!r}, which needs the weights of the model, but the model "
                    "is on the meta device. Load the model first, or leave init_lora_weights=True.",
                    code="C061",
                )
            for container in containers:
                matrix = container[adapter]
                if isinstance(matrix, nn.Module):
                    container[adapter] = matrix.to_empty(device="cpu")
                else:
                    container[adapter] = nn.Parameter(torch.empty_like(matrix, device="cpu"), matrix.requires_grad)
            # The seed depends on names only: the same values on every rank, of any layout.
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(derive_seed(self._context.seed, name, adapter))
                layer.reset_lora_parameters(adapter, init)

    def _shard(self, name: str, layer: Any, stage: nn.Module, entries: Mapping[str, PlanEntry], shards: Any) -> None:
        sharded = {
            key: entry
            for key, entry in entries.items()
            if f"{key}.".startswith(f"{name}.")
            and entry.style is not None
            and size_of(style_of(entry.style, key)[1], self._context) > 1
        }
        if hasattr(layer, "parameter_name") and sharded:
            raise PlacementError(
                f"{name!r} has adapters on the parameters {listed(sharded)} (target_parameters of peft), but the TP "
                "plan shards them. Use only target_modules, or leave tensor and expert parallelism out.",
                code="C061",
            )
        if name not in sharded or (len(layer.lora_embedding_A) and sharded[name].style in _EMBEDDING):
            return
        entry = sharded[name]
        supported = (*_COLUMN, *_ROW, *_REPLICATED)
        if entry.style not in supported or layer.lora_variant or len(layer.lora_embedding_A):
            kinds = listed(type(variant).__name__ for variant in layer.lora_variant.values()) or "adapters"
            raise PlacementError(
                f"{name!r} has {kinds} of peft and the style {entry.style!r} in the TP plan. Only plain LoRA on "
                f"layers of the styles {listed(supported)} can be sharded. Leave this layer out of target_modules.",
                code="C061",
            )
        here = arrange(self._context)
        for adapter in layer.lora_A:
            for matrix in ("lora_A", "lora_B"):
                style, options = entry.style, entry.options
                if style not in _REPLICATED and (matrix == "lora_B") != (style in _COLUMN):
                    # The replicated matrix needs nothing, unless each rank applies it to its own tokens only.
                    if not here.sequence_split:
                        continue
                    style, options = "replicated_with_grad_allreduce", {}
                module = getattr(layer, matrix)[adapter]
                target = Target(f"{name}.{matrix}.{adapter}", module, None, stage, self._context, options, shards)
                style_of(style, target.name)[0](target)
            if isinstance(layer.lora_dropout[adapter], nn.Dropout):
                side: Any = "inner" if entry.style in ("rowwise", "packed_rowwise") else "outer"
                layer.lora_dropout[adapter] = Dropout.from_module(
                    layer.lora_dropout[adapter], side=side, arrangement=here
                )


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) of the layers with adapters; of nested wrappers (target_parameters of peft), only the outermost."""
    last = None
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A") and not (last and name.startswith(f"{last}.")):
            last = name
            yield name, module


def save_adapters(
    model: nn.Module, folder: str | Path, context: ParallelContext, dtype: torch.dtype | None = None
) -> Path:
    """Write the folder that `PeftModel.from_pretrained` of peft loads: trained weights and config.

    As in peft, the adapter "default" is stored in the folder itself and others in subfolders of their names.
    Collective over the world.
    """
    from colonnade.checkpoint.full_weights import save_full  # needs safetensors

    home = local_path(folder, "the folder of engine.save_pretrained()", CheckpointError)
    base: Any = base_model(model[-1] if isinstance(model, nn.ModuleList) else model)
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or base.peft_config
    for adapter, config in configs.items():
        target = home / ("" if adapter == "default" else adapter)
        others = configs.keys() - {adapter}

        def is_saved(tensor: LocalTensor, others: Set[str] = others) -> bool:
            # As peft: adapter weights, modules_to_save and anything trained, except those of other adapters.
            path = tensor.names[0].split(".")
            adapted = tensor.tensor.requires_grad or any(key.startswith("lora_") for key in path)
            return (adapted or "modules_to_save" in path) and others.isdisjoint(path)

        full = FullTensors(model, context, keep=is_saved)
        full.records = tuple(replace(record, names=(_file_name(record.label, adapter),)) for record in full.records)
        save_full(full, target / "adapter_model.safetensors", context, dtype)
        with agreed(context, f"saving to {target}"):
            if context.get_global_rank() == 0:
                # FSDP puts a subclass of its own in front, which peft could not import again.
                kind = next(kind for kind in type(base).__mro__ if not kind.__name__.startswith("FSDP"))
                mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
                written = copy(config)
                written.inference_mode = True
                written.base_model_name_or_path = (
                    written.base_model_name_or_path or getattr(base, "name_or_path", "") or None
                )
                written.save_pretrained(target, auto_mapping_dict=None if written.task_type else mapping)
    return home


def _file_name(name: str, adapter: str) -> str:
    """A parameter's name in peft's files: without the adapter's name, and with the prefix of peft's wrapper."""
    plain = re.sub(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)", r"\1", name)
    plain = plain.replace(f".modules_to_save.{adapter}.", ".").removeprefix("base_model.model.")
    return f"base_model.model.{plain}"


def check_adapters(model: nn.Module) -> None:
    """Raise if adapters were added to layers that were sharded before."""
    for name, layer in lora_layers(model):
        weight = getattr(layer.get_base_layer(), "weight", None)
        is_sharded = weight is not None and ParallelMode.TENSOR in placement_of(weight).shards
        adapters = [parameter for key, parameter in layer.named_parameters() if "lora_" in key]
        if is_sharded and len(layer.lora_A) and not any(placement_of(parameter).shards for parameter in adapters):
            raise PlacementError(
                f"{name!r} was sharded before its adapters were added, so the adapters do not fit the shard. Call "
                "peft.get_peft_model(model, config) first, and colonnade.parallelize(model) after it.",
                code="C061",
            )


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)

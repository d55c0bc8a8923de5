"""LoRA adapters of peft on a model that is cut: made on the whole model, then cut as the layer that they sit on.

A layer whose output features are cut (colwise) has a whole A and the same rows of B. One whose input features are cut
(rowwise) has the same columns of A, whose products are summed over the ranks while they are narrow, and a whole B. So one
matrix of an adapter has the style of its layer, the other is whole, and no other rule is needed. peft is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colonnade.checkpoint.agreement import agreed
from colonnade.checkpoint.full_weights import WholeTensors
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.random import derive_seed
from colonnade.errors import CheckpointError, PlacementError, listed
from colonnade.hf.match import PlanEntry, Target
from colonnade.hf.model_loss import base_model
from colonnade.hf.styles import style_of
from colonnade.nn.layer.arrangement import arrange
from colonnade.nn.layer.dropout import Dropout
from colonnade.nn.layer.spread import size_of
from colonnade.parallel.placement import placement_of
from colonnade.parallel.whole import PREFIX, LocalTensor
from colonnade.paths import local_path

_COLUMN = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
_ROW = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
_WHOLE = ("replicate", "replicated_with_grad_allreduce")
_EMBEDDING = ("rowwise", "embedding_rowwise", "embedding_colwise")
"""Styles of an embedding that give whole vectors: its adapters stay whole."""


class Adapters:
    """The adapters of a model, taken off it: `base` is the model as it was before peft, until they are put back."""

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        self.base = base_model(model)
        self._prefix = next((f"{name}." for name, module in model.named_modules() if module is self.base and name), "")
        self._context = context
        self._configs: Mapping[str, Any] = getattr(model, "peft_config", {})
        self._off = dict(lora_layers(self.base))
        if context.tensor_parallel_size > 1:
            _refuse_others(self.base)
        for name, layer in self._off.items():
            self._draw(name, layer)
            _set(self.base, name, layer.get_base_layer())

    def put_back(self, stage: nn.Module, entries: Mapping[str, PlanEntry], parts: Any) -> None:
        """Give a stage, whose layers are cut by these entries, the adapters of its layers, cut likewise."""
        if self._configs and not hasattr(stage, "peft_config"):
            stage.peft_config = self._configs  # type: ignore[assignment]  # no wrapper of peft is around a stage
        if stage is not self.base:
            setattr(stage, PREFIX, self._prefix)
        here = {id(module) for module in stage.modules()}
        for name, layer in list(self._off.items()):
            if id(layer.get_base_layer()) in here:
                _set(stage, name, layer)
                self._cut(name, layer, stage, entries, parts)
                del self._off[name]

    def undo(self) -> None:
        """Put everything that is off back on as it is."""
        for name, layer in self._off.items():
            _set(self.base, name, layer)

    def _draw(self, name: str, layer: Any) -> None:
        """Adapters that peft has put on the meta device, as it does where the model is: drawn as it draws them."""
        for adapter in [*layer.lora_A, *layer.lora_embedding_A]:
            matrices = [layer.lora_A, layer.lora_B, layer.lora_embedding_A, layer.lora_embedding_B]
            holders = [held for held in matrices if adapter in held]
            if not any(parameter.is_meta for held in holders for parameter in held.parameters()):
                continue
            start = self._configs[adapter].init_lora_weights if adapter in self._configs else True
            if isinstance(start, str) and start != "gaussian":
                raise PlacementError(
                    f"{name!r}: init_lora_weights={start!r} needs the weights of the model, which is on the meta device; "
                    f"load it first, or leave init_lora_weights=True",
                    code="C061",
                )
            for held in holders:
                made = held[adapter]
                empty = (
                    made.to_empty(device="cpu") if isinstance(made, nn.Module) else torch.empty_like(made, device="cpu")
                )
                held[adapter] = empty if isinstance(empty, nn.Module) else nn.Parameter(empty, made.requires_grad)
            with torch.random.fork_rng(devices=()):  # the same on every rank, of any layout
                torch.manual_seed(derive_seed(self._context.seed, name, adapter))
                layer.reset_lora_parameters(adapter, start)

    def _cut(self, name: str, layer: Any, stage: nn.Module, entries: Mapping[str, PlanEntry], parts: Any) -> None:
        cut = {at: entry for at, entry in entries.items() if f"{at}.".startswith(f"{name}.") and self._cuts(at, entry)}
        if hasattr(layer, "parameter_name") and cut:
            raise PlacementError(
                f"{name!r} has adapters on parameters (target_parameters of peft) that the plan cuts ({listed(cut)}); these "
                f"stay whole with target_modules alone, or without tensor and expert parallelism",
                code="C061",
            )
        if name not in cut or (len(layer.lora_embedding_A) and cut[name].style in _EMBEDDING):
            return
        entry = cut[name]
        if entry.style not in (*_COLUMN, *_ROW, *_WHOLE) or layer.lora_variant or len(layer.lora_embedding_A):
            kinds = listed(type(variant).__name__ for variant in layer.lora_variant.values()) or "adapters"
            raise PlacementError(
                f"{name!r} has {kinds} of peft and the style {entry.style!r} in the plan. Plain LoRA on layers of the styles "
                f"{listed((*_COLUMN, *_ROW, *_WHOLE))} is cut with them; leave this layer out of target_modules",
                code="C061",
            )
        for adapter in layer.lora_A:
            for part in ("lora_A", "lora_B"):
                style = self._style(entry.style, part)
                if style is not None:
                    options = entry.options if style == entry.style else {}
                    module = getattr(layer, part)[adapter]
                    target = Target(f"{name}.{part}.{adapter}", module, None, stage, self._context, options, parts)
                    style_of(style, target.name)[0](target)
            if isinstance(layer.lora_dropout[adapter], nn.Dropout):
                side: Any = "inner" if entry.style in ("rowwise", "packed_rowwise") else "outer"
                dropped = Dropout.from_module(
                    layer.lora_dropout[adapter], side=side, arrangement=arrange(self._context)
                )
                layer.lora_dropout[adapter] = dropped

    def _style(self, style: str, part: str) -> str | None:
        """The style of one matrix of an adapter: that of the layer for one of the two, and the other is whole.

        Where activations are split by sequence, each rank uses the whole one for its own tokens alone.
        """
        if style in _WHOLE or (part == "lora_B") == (style in _COLUMN):
            return style
        return "replicated_with_grad_allreduce" if arrange(self._context).sequence_split else None

    def _cuts(self, name: str, entry: PlanEntry) -> bool:
        return entry.style is not None and size_of(style_of(entry.style, name)[1], self._context) > 1


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers with adapters; of wrappers around wrappers, as peft makes for several parameters, the outer one."""
    last = None
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A") and not (last and name.startswith(f"{last}.")):
            last = name
            yield name, module


def save_adapters(
    model: nn.Module, folder: str | Path, context: ParallelContext, dtype: torch.dtype | None = None
) -> Path:
    """Write the folder that peft's `PeftModel.from_pretrained` loads: what was trained, and the config. Collective.

    The adapter "default" lies in the folder itself, others in folders of their names, as peft has it.
    """
    from colonnade.checkpoint.full_weights import save_full  # needs safetensors

    home = local_path(folder, "the folder of engine.save_pretrained()", CheckpointError)
    base: Any = base_model(model[-1] if isinstance(model, nn.ModuleList) else model)
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or base.peft_config
    for adapter, config in configs.items():
        target = home / ("" if adapter == "default" else adapter)
        whole = WholeTensors(model, context, keep=partial(_is_saved, others=configs.keys() - {adapter}))
        whole.records = tuple(replace(each, names=(_file_name(each.label, adapter),)) for each in whole.records)
        save_full(whole, target / "adapter_model.safetensors", context, dtype)
        with agreed(context, f"saving to {target}"):
            if context.get_global_rank() == 0:
                kind = next(kind for kind in type(base).__mro__ if not kind.__name__.startswith("FSDP"))
                mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
                written = copy(config)
                written.inference_mode = True
                written.base_model_name_or_path = (
                    written.base_model_name_or_path or getattr(base, "name_or_path", "") or None
                )
                written.save_pretrained(target, auto_mapping_dict=None if written.task_type else mapping)
    return home


def _is_saved(tensor: LocalTensor, others: Set[str]) -> bool:
    """Whether peft saves a tensor beside the adapters of these names: it is of an adapter, or was trained."""
    parts = tensor.names[0].split(".")
    adapted = tensor.tensor.requires_grad or any(part.startswith("lora_") for part in parts)
    return (adapted or "modules_to_save" in parts) and others.isdisjoint(parts)


def _file_name(name: str, adapter: str) -> str:
    """A name as peft has it in a file: without that of the adapter, and with what its wrapper puts before all."""
    plain = re.sub(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)", r"\1", name)
    plain = plain.replace(f".modules_to_save.{adapter}.", ".").removeprefix("base_model.model.")
    return f"base_model.model.{plain}"


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters that were put on layers that had been cut already."""
    for name, layer in lora_layers(model):
        weight = getattr(layer.get_base_layer(), "weight", None)
        cut = weight is not None and ParallelMode.TENSOR in placement_of(weight).shards
        adapters = [parameter for key, parameter in layer.named_parameters() if "lora_" in key]
        if cut and len(layer.lora_A) and not any(placement_of(parameter).shards for parameter in adapters):
            raise PlacementError(
                f"{name!r} was cut before it got its adapters, which do not fit its part; call peft.get_peft_model(model, "
                f"config) first and colonnade.parallelize(model) then",
                code="C061",
            )


def _refuse_others(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names") and not hasattr(module, "lora_A"):
            raise PlacementError(
                f"{name!r} has adapters of the kind {type(module).__module__.split('.')[-2]}; under tensor parallelism only "
                f"LoRA's are cut with their layer. Use LoraConfig, or no tensor parallelism",
                code="C061",
            )


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)

"""From a model and one pass of it to its stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from colonnade.errors import ScheduleError
from colonnade.parallel.chain import has_hooks
from colonnade.parallel.own_forward.calls import catch_calls
from colonnade.parallel.own_forward.cuts import Part, parts_of, possible_cuts, why_no_cut
from colonnade.parallel.own_forward.recorder import record
from colonnade.parallel.own_forward.stage import Absent, result_of, stage_class, take_out
from colonnade.parallel.own_forward.tree import copy_tree, has_parameters, outside, units_of

Call = Callable[[Callable[..., Any]], Any]
"""Calls a function with the data of a batch, as the model would be called."""


_OF_OTHER_KINDS = ("pixel_values", "input_features", "input_values", "audio_values", "images", "videos")
"""How the names of inputs begin that a model of transformers takes beside tokens, for an encoder of its own."""


class OwnForward:
    """A model with blocks in lists, cut by its own forward pass, which is run once without weights to see its layers.

    `call` gives a module the data of a batch; models of transformers need none.
    """

    def __init__(self, model: nn.Module, call: Call | None = None) -> None:
        self._model, self._units, self._settings = model, units_of(model), _settings(model)
        _check(model, self._units)
        call = call or _call_with_small_inputs(model)
        with torch.device("cpu"):  # inside meta_init() too: masks and positions need their values
            self._recording = record(model, self._units, lambda twin: result_of(call(self._with_settings(twin))))
        self._cuts = possible_cuts(self._recording)
        self._check_buffers()

    def _with_settings(self, twin: nn.Module) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(Tensor, _with_values, (args, kwargs))
            return twin(*args, **{**kwargs, **self._settings})

        return run

    def _check_buffers(self) -> None:
        """Refuse a forward pass that looks into a layer which most stages will not have."""
        for name, unit in self._units.items():
            if has_parameters(unit):
                for key, _ in unit.named_buffers():
                    if f"{name}.{key}" in self._recording.uses:
                        raise ScheduleError(
                            f"the forward pass of {type(self._model).__name__} uses {key!r}, a buffer of {name!r}, which only one "
                            f"pipeline stage has; let that layer use it, or give the model a buffer of its own",
                            code="C050",
                        )

    @property
    def layers(self) -> list[tuple[str, float]]:
        """The layers that a stage can begin with, each with the number of parameters from there to the next."""
        calls, weights = self._recording.calls, []
        for first, stop in zip(self._cuts, [*self._cuts[1:], len(calls)], strict=True):
            units = [self._units[call.name] for call in calls[first:stop]]
            held = sum(parameter.numel() for unit in units for parameter in unit.parameters())
            weights.append(float(held + self._used_between(first, stop)))
        return [(calls[at].name, weight) for at, weight in zip(self._cuts, weights, strict=True)]

    def why_not(self, name: str) -> str:
        """Why no stage can begin with the layer of this name; empty where there is none of it."""
        calls = [at for at, call in enumerate(self._recording.calls) if call.name == name]
        return next((why_no_cut(self._recording, at) for at in calls if at not in self._cuts), "")

    def stages(self, firsts: Sequence[int]) -> list[nn.Module]:
        """The stages that begin with these of the `layers`. They share the model's modules, which are not copied."""
        parts = parts_of(self._recording, [self._cuts[at] for at in firsts])
        for name in self._caught(parts[-1]):
            catch_calls(name, self._units[name])
        placed = self._placed(parts)
        return [
            self._stage(part, units, set().union(*placed[:at]))
            for at, (part, units) in enumerate(zip(parts, placed, strict=True))
        ]

    # -- one stage -----------------------------------------------------------------------------------------

    def _caught(self, last: Part) -> set[str]:
        """The units whose calls must be seen. Not those of one class that come after all others: a head stays an nn.Linear."""
        kinds = [type(self._units[name]) for name in last.names]
        end = max([last.first, *last.reads])
        while (further := max(at for at, kind in enumerate(kinds) if kind in kinds[: end + 1])) > end:
            end = further
        return set(last.names[: end + 1])

    def _placed(self, parts: Sequence[Part]) -> list[set[str]]:
        """The units that each stage has. One that was not called is where its weights are, if it shares them, else in the last."""
        placed = [{name for name in self._units if self._works_in(part, name)} for part in parts]
        for name in self._units.keys() - set().union(*placed):
            weights = {id(parameter) for parameter in self._units[name].parameters()}
            held = [{id(p) for unit in units for p in self._units[unit].parameters()} for units in placed]
            placed[next((at for at, ids in enumerate(held) if ids & weights), -1)].add(name)
        return placed

    def _works_in(self, part: Part, name: str) -> bool:
        calls = [at for at, called in enumerate(part.names) if called == name]
        used = [
            f"{name}.{key}"
            for key, _ in self._units[name].named_parameters()
            if f"{name}.{key}" in self._recording.uses
        ]
        if not calls and not used:
            return not has_parameters(self._units[name])
        here = any(part.first <= at < part.stop or part.forms[at] is None for at in calls)
        return here or any(self._has_tensor(part, key) for key in used)

    def _stage(self, part: Part, units: set[str], before: set[str]) -> nn.Module:
        """The stage with these units; those that a stage before it has too are copied, and share their weights.

        Buffers of such a copy are saved by the stage before alone.
        """
        memo: dict[int, Any] = {}
        for name, unit in self._units.items():
            memo[id(unit)] = unit if name in units else Absent(name, self._recording.twins[name])
            if name in units & before:
                memo[id(unit)] = here = copy_tree(unit, {}, lambda tensor: tensor)
                for module in here.modules():
                    module._non_persistent_buffers_set.update(module._buffers)
        units_here = {id(unit) for unit in memo.values()}
        stage: Any = copy_tree(self._model, memo, lambda tensor: tensor)
        for owner_name, owner in list(outside(stage, units_here)):
            self._leave_out(part, owner_name, owner)
        own = vars(stage).pop("forward", None)
        vars(stage).update(_colonnade_part=part, _colonnade_settings=self._settings, _colonnade_own_forward=own)
        stage.__class__ = stage_class(type(stage))
        return stage

    def _leave_out(self, part: Part, name: str, owner: nn.Module) -> None:
        """Of a module that has blocks inside: what belongs to other stages."""
        children: dict[str, Any] = owner._modules
        absent = {key: child for key, child in children.items() if isinstance(child, Absent)}
        if absent:
            take_out(owner, absent)
        for key, parameter in list(owner._parameters.items()):
            if parameter is not None and not self._has_tensor(part, f"{name}.{key}" if name else key):
                del owner._parameters[key]
                device = "cpu" if parameter.is_meta else parameter.device
                owner.register_buffer(key, torch.zeros_like(parameter, device=device))
        for key in owner._buffers:
            if not self._has_tensor(part, f"{name}.{key}" if name else key):
                owner._non_persistent_buffers_set.add(key)

    def _has_tensor(self, part: Part, name: str) -> bool:
        """Whether a parameter or buffer that no unit has is used here; one that nobody uses is the last stage's."""
        uses = self._recording.uses.get(name)
        return _is_last(part) if uses is None else any(self._is_in(part.first, part.stop, time) for time in uses)

    def _is_in(self, first: int, stop: int, time: int) -> bool:
        calls = self._recording.calls
        begun = first == 0 or calls[first].time <= time
        return begun and (stop == len(calls) or time < calls[stop].time)

    def _used_between(self, first: int, stop: int) -> int:
        """The elements of parameters of no unit, such as embeddings of positions, that are first used there."""
        found = 0
        for name, parameter in self._model.named_parameters():
            uses = self._recording.uses.get(name, ())
            in_unit = any(name.startswith(f"{unit}.") for unit in self._units)
            if uses and not in_unit and self._is_in(first, stop, min(uses)):
                found += parameter.numel()
        return found


def _is_last(part: Part) -> bool:
    return part.stop == len(part.names)


# -- what a model is asked before -------------------------------------------------------------------------


def _check(model: nn.Module, units: dict[str, nn.Module]) -> None:
    name = type(model).__name__
    if not units:
        raise ScheduleError(
            f"a {name} does not say in which order its layers run. Give it a method pipeline_layers() that returns them (or "
            f"their names) in that order, keep its blocks in an nn.ModuleList, or pass an nn.Sequential or a list of your "
            f"own stages.",
            code="C050",
        )
    if has_hooks(model):
        raise ScheduleError(
            f"{name} has hooks, which would see the parts of a pipeline stage; remove them, or hook its layers",
            code="C050",
        )
    for key, value in _config_values(model):
        if "layerdrop" in key and value:
            raise ScheduleError(
                f"{name}: config.{key}={value} leaves out layers at random, which a pipeline cannot: each rank would leave out "
                f"others. Set it to 0",
                code="C050",
            )
        if key == "output_router_logits" and value:
            raise ScheduleError(
                f"{name}: config.output_router_logits=True adds a loss over the routers of all layers, which are in several "
                f"pipeline stages. Set it to False",
                code="C050",
            )


def _config_values(model: nn.Module) -> Iterable[tuple[str, Any]]:
    config = getattr(model, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        yield from vars(each).items() if hasattr(each, "__dict__") else ()


def _settings(model: nn.Module) -> dict[str, Any]:
    """What a model of transformers is told in training: to keep no keys and values."""
    accepted = inspect.signature(model.forward).parameters
    takes = "use_cache" in accepted or any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    return {"use_cache": False} if takes and "use_cache" in dict(_config_values(model)) else {}


def _call_with_small_inputs(model: nn.Module) -> Call:
    main = getattr(model, "main_input_name", None)
    inputs = getattr(model, "dummy_inputs", None)
    config: Any = getattr(model, "config", None)
    if main == "pixel_values" and hasattr(config, "image_size"):
        sides = config.image_size if isinstance(config.image_size, (list, tuple)) else [config.image_size] * 2
        dtype = next(model.parameters()).dtype
        inputs = {"pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), *sides, dtype=dtype, device="cpu")}
    if not isinstance(inputs, dict) or main not in inputs:
        raise ScheduleError(
            f"a {type(model).__name__} is cut into stages by its forward pass, which takes an input that is not known: pass "
            f"sample=, the data of a batch (tensors of any values)",
            code="C050",
        )
    others = [name for name in inspect.signature(model.forward).parameters if name.startswith(_OF_OTHER_KINDS)]
    if main == "input_ids" and others:
        raise ScheduleError(
            f"a {type(model).__name__} takes {others[0]!r} beside {main!r}, and calls other layers with it than without: pass "
            f"sample=, a batch with the inputs of your run (tensors of any values), to parallelize or split",
            code="C050",
        )
    return lambda function: function(**inputs)


def _with_values(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor.detach().cpu()

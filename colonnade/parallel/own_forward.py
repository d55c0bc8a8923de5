"""Cutting a model into pipeline stages by its own forward pass, for models that keep their blocks in lists.

A model like those of transformers does more in forward() than call its blocks one after another: it makes masks, positions and
rotary tables, and hands some of them to every block. So each stage *is* the model, without the blocks of other stages, and runs
the whole forward pass:

1. `OwnForward` runs the forward pass once, without memory for the weights (`forward_recorder`). That shows the calls of the
   model's units (blocks, embedding, head) in order, and which tensors they hand on.
2. A stage can begin with a call where all that later calls need from before is at hand: given to a call or returned by one
   (`possible_cuts`). `stage_parts` says for each stage which values come from the stage before and which go to the next.
3. `OwnForward.stages` copies the tree of modules for each stage and leaves the units of other stages out (`Absent`). Parameters
   are shared with the model, not copied.
4. In a run, `ModelStage.forward` runs the model's forward pass with a `StageRun` that decides about each call of a unit: calls of
   earlier stages return zeros of the right form, its own are made with the values that were received, and the first call of the
   next stage ends the pass; what that one needs is the message.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_map_with_path,
    tree_unflatten,
)

from colonnade.errors import ScheduleError
from colonnade.parallel.forward import has_hooks, subclass_with
from colonnade.parallel.forward_recorder import (
    WATCHER,
    Recording,
    Value,
    copy_tree,
    has_parameters,
    outside,
    record,
    units_of,
    watch_calls,
)
from colonnade.parallel.split import no_generate

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
            self._recording = record(model, self._units, lambda fake: result_of(call(self._with_settings(fake))))
        self._cuts = possible_cuts(self._recording)
        self._check_buffers()

    def _with_settings(self, fake: nn.Module) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(Tensor, _with_values, (args, kwargs))
            return fake(*args, **{**kwargs, **self._settings})

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
        parts = stage_parts(self._recording, [self._cuts[at] for at in firsts])
        for name in self._units_to_watch(parts[-1]):
            watch_calls(name, self._units[name])
        placed = self._units_by_stage(parts)
        return [
            self._stage(part, units, set().union(*placed[:at]))
            for at, (part, units) in enumerate(zip(parts, placed, strict=True))
        ]

    # -- one stage -----------------------------------------------------------------------------------------

    def _units_to_watch(self, last: StagePart) -> set[str]:
        """The units whose calls must be seen. Not those of one class that come after all others: a head stays an nn.Linear."""
        kinds = [type(self._units[name]) for name in last.names]
        end = max([last.first, *last.reads])
        while (further := max(at for at, kind in enumerate(kinds) if kind in kinds[: end + 1])) > end:
            end = further
        return set(last.names[: end + 1])

    def _units_by_stage(self, parts: Sequence[StagePart]) -> list[set[str]]:
        """The units that each stage has. One that was not called is where its weights are, if it shares them, else in the last."""
        placed = [{name for name in self._units if self._is_used_in(part, name)} for part in parts]
        for name in self._units.keys() - set().union(*placed):
            weights = {id(parameter) for parameter in self._units[name].parameters()}
            held = [{id(p) for unit in units for p in self._units[unit].parameters()} for units in placed]
            placed[next((at for at, ids in enumerate(held) if ids & weights), -1)].add(name)
        return placed

    def _is_used_in(self, part: StagePart, name: str) -> bool:
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

    def _stage(self, part: StagePart, units: set[str], before: set[str]) -> nn.Module:
        """The stage with these units; those that a stage before it has too are copied, and share their weights.

        Buffers of such a copy are saved by the stage before alone.
        """
        memo: dict[int, Any] = {}
        for name, unit in self._units.items():
            memo[id(unit)] = unit if name in units else Absent(name, self._recording.fake_units[name])
            if name in units & before:
                memo[id(unit)] = here = copy_tree(unit, {}, lambda tensor: tensor)
                for module in here.modules():
                    module._non_persistent_buffers_set.update(module._buffers)
        units_here = {id(unit) for unit in memo.values()}
        stage: Any = copy_tree(self._model, memo, lambda tensor: tensor)
        for owner_name, owner in list(outside(stage, units_here)):
            self._drop_what_is_elsewhere(part, owner_name, owner)
        own = vars(stage).pop("forward", None)
        vars(stage).update(_colonnade_part=part, _colonnade_settings=self._settings, _colonnade_own_forward=own)
        stage.__class__ = stage_class(type(stage))
        return stage

    def _drop_what_is_elsewhere(self, part: StagePart, name: str, owner: nn.Module) -> None:
        """Take what belongs to other stages out of a module that has blocks inside.

        A parameter of another stage becomes a buffer of zeros, which the forward pass may use before that stage's calls.
        """
        children: dict[str, Any] = owner._modules
        absent = {key: child for key, child in children.items() if isinstance(child, Absent)}
        if absent:
            hide_children(owner, absent)
        for key, parameter in list(owner._parameters.items()):
            if parameter is not None and not self._has_tensor(part, f"{name}.{key}" if name else key):
                del owner._parameters[key]
                device = "cpu" if parameter.is_meta else parameter.device
                owner.register_buffer(key, torch.zeros_like(parameter, device=device))
        for key in owner._buffers:
            if not self._has_tensor(part, f"{name}.{key}" if name else key):
                owner._non_persistent_buffers_set.add(key)

    def _has_tensor(self, part: StagePart, name: str) -> bool:
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


def _is_last(part: StagePart) -> bool:
    return part.stop == len(part.names)


# --------------------------------------------------------------------------------------------------
# Where a recorded forward pass can be cut, and the values that then go from stage to stage.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StagePart:
    """The part of one stage: the calls from `first` on, until the call `stop` is about to be made."""

    first: int
    stop: int
    names: tuple[str, ...]
    """The unit of every call of the pass."""
    forms: tuple[TreeSpec | None, ...]
    """The form of what each call returns; None for calls that every stage makes itself."""
    takes: tuple[int, ...]
    """The values that come from the stage before, by number."""
    gives: tuple[int, ...]
    """Those that go to the next."""
    reads: dict[int, dict[str, int]] = field(default_factory=dict)
    """By call: the places in its arguments where values are that came from the stage before."""
    keeps_inputs: dict[int, dict[str, int]] = field(default_factory=dict)
    """By call: the places in its arguments of values that the next stage takes."""
    keeps_outputs: dict[int, dict[int, int]] = field(default_factory=dict)
    """By call: which leaves of its result the next stage takes."""

    def __deepcopy__(self, memo: object) -> StagePart:
        return self


def possible_cuts(recording: Recording) -> list[int]:
    """The calls that a stage can begin with; the first is 0."""
    return [0, *(at for at in range(1, len(recording.calls)) if not why_no_cut(recording, at))]


def why_no_cut(recording: Recording, at: int) -> str:
    """Why no stage can begin with this call; empty if one can."""
    call = recording.calls[at]
    if call.form is None or not call.inputs:
        return f"{call.name!r} takes nothing of what comes before it"
    known = {number for number, _ in _values_at_hand(recording, at)}
    for what, value in _values_from_before(recording, at):
        if value.made >= call.time or value.number not in known:
            return f"{what} uses more of what comes before {call.name!r} than layers are given or return"
    # A result of the model that was made before this call would have to skip all stages from here on.
    old = [value for value in recording.results if value.oldest < call.time]
    return f"the model returns something that comes from before {call.name!r}" if old else ""


def _values_from_before(recording: Recording, at: int) -> Iterator[tuple[str, Value]]:
    """Arguments of the calls from `at` on that come from before it, each with the name of the unit that is given it."""
    begin = recording.calls[at].time
    for call in recording.calls[at:]:
        for value in call.inputs.values() if call.form is not None else ():
            if value.oldest < begin:
                yield repr(call.name), value


def _values_at_hand(recording: Recording, at: int) -> Iterator[tuple[int, tuple[int, str | int]]]:
    """(number, (call, place)) of the values that a stage which ends before `at` sees: arguments and results of the calls before
    it, and the arguments of the call `at` itself."""
    for index, call in enumerate(recording.calls[: at + 1]):
        yield from ((value.number, (index, place)) for place, value in call.inputs.items())
        if index < at:
            yield from ((value.number, (index, leaf)) for leaf, value in enumerate(call.outputs) if value is not None)


def stage_parts(recording: Recording, firsts: Sequence[int]) -> list[StagePart]:
    """The stages that begin with these calls, all of them possible cuts."""
    names = tuple(call.name for call in recording.calls)
    forms = tuple(call.form for call in recording.calls)
    taken = [
        tuple(dict.fromkeys(value.number for _, value in _values_from_before(recording, at))) if at else ()
        for at in firsts
    ]
    parts = []
    for index, (first, stop) in enumerate(pairwise([*firsts, len(names)])):
        gives = taken[index + 1] if index + 1 < len(taken) else ()
        part = StagePart(first, stop, names, forms, taken[index], gives)
        for at in range(first, stop):
            found = {place: v.number for place, v in recording.calls[at].inputs.items() if v.number in part.takes}
            if found:
                part.reads[at] = found
        for number, (at, place) in _values_at_hand(recording, stop) if gives else ():
            if number in gives and number not in part.takes and at >= first:
                keeps = part.keeps_inputs if isinstance(place, str) else part.keeps_outputs
                keeps.setdefault(at, {})[place] = number  # type: ignore[index]
        parts.append(part)
    return parts


# --------------------------------------------------------------------------------------------------
# A stage at run time: the model itself without the units that lie elsewhere, whose forward pass makes its part of the calls.
# --------------------------------------------------------------------------------------------------


class Absent:
    """Stands where a unit of another stage is, for a forward pass that calls it. No module: the stage has no weights of it.

    `fake`: the unit as it was in the recorded pass, with parameters that have shapes and no memory.
    """

    def __init__(self, name: str, fake: nn.Module) -> None:
        vars(self).update(_name=name, _fake=fake)  # by vars(), since __getattr__ reads from the fake unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watcher = WATCHER.get()
        return self._no_call() if watcher is None else watcher.call(self._name, self._no_call, args, kwargs)

    def _no_call(self, *args: Any, **kwargs: Any) -> Any:
        raise ScheduleError(f"{self._name!r} is in another pipeline stage, and cannot be called here", code="C050")

    def __getattr__(self, name: str) -> Any:
        """Attributes that forward passes read off their layers (`layer.attention_type`, the dtype of a weight)."""
        return getattr(vars(self)["_fake"], name)

    def __deepcopy__(self, memo: Any) -> Absent:
        return self


class _EndOfStage(BaseException):
    """Ends the forward pass of a stage; no Exception, which a model may catch."""


class StageRun:
    """One forward pass of a stage: the calls before its part give something of the right form, its own are made."""

    def __init__(self, part: StagePart, message: dict[str, Any]) -> None:
        self._part = part
        self._at = 0  # the call that comes next
        self._inside = False  # a unit is being called: calls of units inside it are its own
        # Shapes may differ from the recorded pass, and from batch to batch: each stage adds the forms of its results, so that later
        # stages know them. Few are different, so calls have the number of a form.
        self._forms: list[list[Any]] = message.get("forms", [])
        self._form_of: list[int | None] = message.get("calls", [])
        self._values: dict[int, Tensor] = dict(zip(part.takes, message.get("values", ()), strict=True))
        self._device = next((value.device for value in self._values.values()), None)
        self._zeros: dict[int, list[Any]] = {}

    def message(self, inputs: Any) -> dict[str, Any]:
        """The message to the next stage."""
        values = [self._values[number] for number in self._part.gives]
        return {"inputs": inputs, "values": values, "forms": self._forms, "calls": self._form_of}

    def call(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the next call of the pass."""
        if self._inside:
            return own(*args, **kwargs)
        part, at = self._part, self._at
        self._at += 1
        if at >= len(part.names) or part.names[at] != name:
            raise ScheduleError(_other_order(part, at, name), code="C050")
        form = part.forms[at]
        if form is None:  # depends on no weights (positions, a rotary table): every stage makes it itself
            return self._run(own, args, kwargs)
        if at < part.first:
            return tree_unflatten(self._zeros_for(at), form)
        # From here on the arguments are real, but for values that the recorded pass has shown to come from the stage before.
        self._keep_inputs(at, args, kwargs)
        if at == part.stop:
            raise _EndOfStage
        if at in part.reads:
            args, kwargs = self._with_received(part.reads[at], args, kwargs)
        self._zeros.clear()
        result = self._run(own, args, kwargs)
        self._keep_outputs(at, tree_leaves(result))
        return result

    def _run(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside = True
        try:
            return own(*args, **kwargs)
        finally:
            self._inside = False

    def _zeros_for(self, at: int) -> list[Any]:
        """The leaves of a result of an earlier stage, with zeros for tensors: only shapes and dtypes of it are used."""
        index = self._form_of[at]
        assert index is not None
        if index not in self._zeros:
            self._zeros[index] = [self._zeros_of(leaf) for leaf in self._forms[index]]
        return self._zeros[index]

    def _zeros_of(self, leaf: Any) -> Any:
        if not isinstance(leaf, list):
            return leaf
        dtype, *shape = leaf
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)

    def _with_received(self, places: dict[str, int], args: Any, kwargs: Any) -> Any:
        def replaced(path: Any, leaf: Any) -> Any:
            number = places.get(keystr(path))
            return leaf if number is None else self._values[number]

        return tree_map_with_path(replaced, (args, kwargs))

    def _keep_inputs(self, at: int, args: Any, kwargs: Any) -> None:
        places = self._part.keeps_inputs.get(at)
        for path, leaf in tree_flatten_with_path((args, kwargs))[0] if places else ():
            if (number := places.get(keystr(path))) is not None:  # type: ignore[union-attr]
                self._values[number] = leaf

    def _keep_outputs(self, at: int, leaves: list[Any]) -> None:
        if self._part.stop == len(self._part.names):
            return  # nobody comes after
        for leaf, number in self._part.keeps_outputs.get(at, {}).items():
            self._values[number] = leaves[leaf]
        form = [[str(leaf.dtype)[6:], *leaf.shape] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if form not in self._forms:
            self._forms = [*self._forms, form]
        self._form_of = [*self._form_of, *[None] * (at - len(self._form_of)), self._forms.index(form)]


def _other_order(part: StagePart, at: int, name: str) -> str:
    expected = f"{part.names[at]!r} was to come" if at < len(part.names) else "no other was to come"
    return (
        f"the forward pass calls {name!r} where {expected}, as in the pass by which the model was cut into stages. A pipeline "
        f"needs the same calls in every pass (no layers left out at random); for inputs of another kind give a batch of them to parallelize(sample=) "
        f"or split(sample=)"
    )


class ModelStage(nn.Module):
    """Base of the classes of stages: the model's own forward pass, in part.

    By `subclass_with`, not by `override_forward`: a stage in between takes messages, so its forward() must not have the signature
    of the model's, and engines tell stages by this class.
    """

    _colonnade_part: StagePart
    _colonnade_settings: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first stage takes what the model takes, the last returns what it returns; in between go messages."""
        part, message = self._colonnade_part, {}
        if part.first:
            message = kwargs
            args, kwargs = message["inputs"]
        run = StageRun(part, message)
        token = WATCHER.set(run)
        try:
            result = self._colonnade_forward(*args, **{**kwargs, **self._colonnade_settings})
        except _EndOfStage:
            return run.message((args, kwargs))
        finally:
            WATCHER.reset(token)
        if part.stop < len(part.names):
            raise ScheduleError(
                f"the forward pass ended without a call of {part.names[part.stop]!r}, which was to come", code="C050"
            )
        return result_of(result)

    def _colonnade_forward(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self).get("_colonnade_own_forward")
        return super().forward(*args, **kwargs) if own is None else own(*args, **kwargs)


def stage_class(kind: type) -> Any:
    """The class of the stages of a model. Its forward() takes anything; `inspect.unwrap` finds the model's."""
    made = subclass_with(ModelStage, kind)
    if "forward" not in vars(made):

        def forward(self: ModelStage, *args: Any, **kwargs: Any) -> Any:
            return ModelStage.forward(self, *args, **kwargs)

        vars(forward).update(__signature__=inspect.signature(forward), __wrapped__=kind.forward)  # type: ignore[attr-defined]
        made.forward = forward
        if hasattr(kind, "generate"):
            made.generate = no_generate
    return made


def result_of(output: Any) -> Any:
    """The result of a last stage: of an output with logits these, with the loss if there is one; else the output."""
    logits, loss = getattr(output, "logits", None), getattr(output, "loss", None)
    if not isinstance(logits, Tensor):
        return output
    return logits if loss is None else {"loss": loss, "logits": logits}


class _PartlyAbsent:
    """A list or a dict some members of which are absent: they are iterated over, but are no modules of it."""

    _colonnade_members: dict[str, Absent | None]
    _modules: dict[str, nn.Module]

    def _all(self) -> dict[str, nn.Module | Absent]:
        return {
            name: self._modules[name] if absent is None else absent for name, absent in self._colonnade_members.items()
        }

    def __len__(self) -> int:
        return len(self._colonnade_members)


class _PartlyAbsentList(_PartlyAbsent):
    def __iter__(self) -> Iterator[Any]:
        return iter(self._all().values())

    def __getitem__(self, index: Any) -> Any:
        return [*self._all().values()][index]


class _PartlyAbsentDict(_PartlyAbsent):
    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __getitem__(self, key: str) -> Any:
        return self._all()[key]

    def __contains__(self, key: str) -> bool:
        return key in self._colonnade_members

    def keys(self) -> Any:
        return self._all().keys()

    def values(self) -> Any:
        return self._all().values()

    def items(self) -> Any:
        return self._all().items()


def hide_children(owner: nn.Module, absent: dict[str, Absent]) -> None:
    """Have these children of a module be no modules of it, though its forward pass still finds them."""
    if isinstance(owner, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        vars(owner)["_colonnade_members"] = {name: absent.get(name) for name in owner._modules}
        owner.__class__ = subclass_with(
            _PartlyAbsentDict if isinstance(owner, nn.ModuleDict) else _PartlyAbsentList, type(owner)
        )
    if not isinstance(owner, (nn.ModuleList, nn.Sequential)):
        vars(owner).update(absent)
    for name in absent:
        del owner._modules[name]


# --------------------------------------------------------------------------------------------------
# Models that cannot be cut, and the inputs of the recorded pass.
# --------------------------------------------------------------------------------------------------


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
    """Arguments of the forward pass of a model of transformers in training: it keeps no keys and values."""
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

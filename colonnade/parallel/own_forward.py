"""Splitting a model into pipeline stages by its own forward pass, for models that keep their blocks in lists.

A model like those of transformers does more in forward() than call its blocks one after another: it makes masks, positions and
rotary tables, and passes some of them to every block. So each stage *is* the model, without the blocks of other stages, and runs
the whole forward():

1. `ForwardSplitter` runs the forward pass once, without memory for the weights (`forward_recorder`). The recording has the calls
   of the model's units (blocks, embedding, head) in order, and the tensors that they pass on.
2. A stage can begin with a call if every value from before it that it or a later call needs has been an argument or a result of
   some call (`possible_cuts`). `stage_specs` lists for each stage the values to receive and to send.
3. `ForwardSplitter.stages` copies the tree of modules for each stage and replaces the units of other stages by `Absent`.
   Parameters are shared with the model, not copied.
4. At run time `ModelStage.forward` runs the model's forward() under a `StageRun`, which decides about each call of a unit. Calls
   of earlier stages return zeros of the right shape. The stage's own calls are made, with the received values. The first call of
   the next stage ends the pass; the values that it needs are the message.
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


_OTHER_MODALITIES = ("pixel_values", "input_features", "input_values", "audio_values", "images", "videos")
"""Prefixes of the inputs that a transformers model takes in addition to tokens, for a separate encoder."""


class ForwardSplitter:
    """Splits a model whose blocks are in lists. The splitter records the model's own forward pass once, without weights.

    Args:
        model: The model; it is not changed until `stages`.
        call: Calls a module with the data of a batch. Hugging Face models need none.

    Raises:
        ScheduleError: If the forward pass cannot be recorded or split at all.
    """

    def __init__(self, model: nn.Module, call: Call | None = None) -> None:
        self._model, self._units, self._settings = model, units_of(model), _settings(model)
        _check(model, self._units)
        call = call or _call_with_small_inputs(model)

        def run(fake: nn.Module) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                args, kwargs = tree_map_only(Tensor, _with_values, (args, kwargs))
                return fake(*args, **{**kwargs, **self._settings})

            return result_of(call(forward))

        with torch.device("cpu"):  # under meta_init(), too: masks and positions need their values
            self._recording = record(model, self._units, run)
        self._cuts = possible_cuts(self._recording)
        # A buffer of a unit is on the stage of that unit only, so the model's own forward() must not read it.
        for name, unit in self._units.items():
            for key, _ in unit.named_buffers() if has_parameters(unit) else ():
                if f"{name}.{key}" in self._recording.uses:
                    raise ScheduleError(
                        f"the forward pass of {type(self._model).__name__} uses {key!r}, a buffer of {name!r}, but "
                        f"only one pipeline stage has {name!r}. Use the buffer only inside that layer, or register a "
                        "buffer on the model.",
                        code="C050",
                    )

    @property
    def layers(self) -> list[tuple[str, float]]:
        """The layers with which a stage can begin: (name, number of parameters from this layer up to the next layer of the
        list)."""
        calls, layers = self._recording.calls, []
        for first, stop in zip(self._cuts, [*self._cuts[1:], len(calls)], strict=True):
            units = [self._units[call.name] for call in calls[first:stop]]
            count = sum(parameter.numel() for unit in units for parameter in unit.parameters())
            # Parameters outside of units, such as position embeddings, count where they are used first.
            for name, parameter in self._model.named_parameters():
                uses = self._recording.uses.get(name, ())
                in_unit = any(name.startswith(f"{unit}.") for unit in self._units)
                if uses and not in_unit and self._is_in(first, stop, min(uses)):
                    count += parameter.numel()
            layers.append((calls[first].name, float(count)))
        return layers

    def why_not(self, name: str) -> str:
        """The reason why no stage can begin with the layer `name`; empty if a stage can begin with it, or if there is no such
        layer."""
        calls = [at for at, call in enumerate(self._recording.calls) if call.name == name]
        return next((why_no_cut(self._recording, at) for at in calls if at not in self._cuts), "")

    def stages(self, firsts: Sequence[int]) -> list[nn.Module]:
        """Build the stages that begin with `layers[first]` for each of `firsts`. The stages share the model's parameters."""
        specs = stage_specs(self._recording, [self._cuts[at] for at in firsts])
        # The calls up to the last stage's first one, and to its last received value, must go through the watcher. So must
        # calls of the same classes, by which forward() may tell blocks. All others keep their class: a head stays an nn.Linear.
        last = specs[-1]
        kinds = [type(self._units[name]) for name in last.unit_names]
        end = max([last.first, *last.received_args])
        while (further := max(at for at, kind in enumerate(kinds) if kind in kinds[: end + 1])) > end:
            end = further
        for name in {*last.unit_names[: end + 1]}:
            watch_calls(name, self._units[name])
        # A unit that is never called goes to a stage that has its weights, if they are shared, else to the last one.
        placed = [{name for name in self._units if self._uses_unit(spec, name)} for spec in specs]
        for name in self._units.keys() - set().union(*placed):
            weights = {id(parameter) for parameter in self._units[name].parameters()}
            held = [{id(p) for unit in units for p in self._units[unit].parameters()} for units in placed]
            placed[next((at for at, ids in enumerate(held) if ids & weights), -1)].add(name)
        return [
            self._build_stage(spec, units, set().union(*placed[:at]))
            for at, (spec, units) in enumerate(zip(specs, placed, strict=True))
        ]

    def _uses_unit(self, spec: StageSpec, name: str) -> bool:
        """Whether a stage calls the unit, or uses one of its parameters outside of calls."""
        calls = [at for at, called in enumerate(spec.unit_names) if called == name]
        names = [f"{name}.{key}" for key, _ in self._units[name].named_parameters()]
        used = [key for key in names if key in self._recording.uses]
        if not calls and not used:
            return not has_parameters(self._units[name])
        here = any(spec.first <= at < spec.stop or spec.result_forms[at] is None for at in calls)
        return here or any(self._has_tensor(spec, key) for key in used)

    def _build_stage(self, spec: StageSpec, units: set[str], before: set[str]) -> nn.Module:
        """The stage with these units. `before`: the units of earlier stages."""
        memo: dict[int, Any] = {}
        for name, unit in self._units.items():
            memo[id(unit)] = unit if name in units else Absent(name, self._recording.fake_units[name])
            if name in units & before:
                # A unit of two stages: a copy that shares the weights. Its buffers are saved by the earlier stage only.
                memo[id(unit)] = again = copy_tree(unit, {}, lambda tensor: tensor)
                for module in again.modules():
                    module._non_persistent_buffers_set.update(module._buffers)
        unit_ids = {id(unit) for unit in memo.values()}
        stage: Any = copy_tree(self._model, memo, lambda tensor: tensor)
        for name, owner in list(outside(stage, unit_ids)):
            children: dict[str, Any] = owner._modules
            absent = {key: child for key, child in children.items() if isinstance(child, Absent)}
            if absent:
                hide_children(owner, absent)
            # forward() may use a parameter of another stage before that stage's calls, where only shapes count: it
            # becomes a buffer of zeros. A buffer of another stage keeps its values, but is saved there only.
            for key, parameter in list(owner._parameters.items()):
                if parameter is not None and not self._has_tensor(spec, f"{name}.{key}" if name else key):
                    del owner._parameters[key]
                    device = "cpu" if parameter.is_meta else parameter.device
                    owner.register_buffer(key, torch.zeros_like(parameter, device=device))
            for key in owner._buffers:
                if not self._has_tensor(spec, f"{name}.{key}" if name else key):
                    owner._non_persistent_buffers_set.add(key)
        own = vars(stage).pop("forward", None)
        vars(stage).update(_colonnade_stage=spec, _colonnade_settings=self._settings, _colonnade_own_forward=own)
        stage.__class__ = stage_class(type(stage))
        return stage

    def _has_tensor(self, spec: StageSpec, name: str) -> bool:
        """Whether the stage uses a parameter or buffer outside of calls; an unused one belongs to the last stage."""
        uses = self._recording.uses.get(name)
        return spec.is_last if uses is None else any(self._is_in(spec.first, spec.stop, time) for time in uses)

    def _is_in(self, first: int, stop: int, time: int) -> bool:
        calls = self._recording.calls
        begun = first == 0 or calls[first].time <= time
        return begun and (stop == len(calls) or time < calls[stop].time)


# --------------------------------------------------------------------------------------------------
# The calls that a stage can begin with, and the values that are sent from stage to stage.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageSpec:
    """The part of one stage: the calls [first, stop) of the recorded pass, and the values that the stage receives and sends.

    Calls are numbered as in the recorded pass, values as in its `Value.number`.
    """

    first: int
    stop: int
    unit_names: tuple[str, ...]
    """The unit of every call of the pass."""
    result_forms: tuple[TreeSpec | None, ...]
    """The pytree of each call's result; None for calls that every stage makes itself."""
    received: tuple[int, ...]
    """The values that the previous stage sends."""
    sent: tuple[int, ...]
    """The values that go to the next stage."""
    received_args: dict[int, dict[str, int]] = field(default_factory=dict)
    """By call: places in its arguments, and the received values that belong there."""
    sent_args: dict[int, dict[str, int]] = field(default_factory=dict)
    """By call: places in its arguments of values to be sent."""
    sent_results: dict[int, dict[int, int]] = field(default_factory=dict)
    """By call: leaves of its result that are values to be sent."""

    @property
    def is_last(self) -> bool:
        """Whether the forward pass ends in this stage."""
        return self.stop == len(self.unit_names)

    def __deepcopy__(self, memo: object) -> StageSpec:
        return self


def possible_cuts(recording: Recording) -> list[int]:
    """The indices of the calls with which a stage can begin, ascending; the first is always 0."""
    return [0, *(at for at in range(1, len(recording.calls)) if not why_no_cut(recording, at))]


def why_no_cut(recording: Recording, at: int) -> str:
    """The reason why no stage can begin with call number `at`; empty if a stage can."""
    call = recording.calls[at]
    if call.form is None or not call.inputs:
        return f"{call.name!r} takes no value computed before it"
    # Stages see only arguments and results of calls. A value that forward() itself computes from older results, before
    # this call or after it, cannot be sent.
    known = {number for number, _ in _values_at_hand(recording, at)}
    for user, value in _values_from_before(recording, at):
        if value.made >= call.time or value.number not in known:
            return (
                f"{user} uses a value computed before {call.name!r} that is neither an argument nor a result of a layer"
            )
    # The model's result is returned by the last stage, and messages are for arguments of calls only.
    old = [value for value in recording.results if value.oldest < call.time]
    return f"the model returns a value computed before {call.name!r}" if old else ""


def _values_from_before(recording: Recording, at: int) -> Iterator[tuple[str, Value]]:
    """Yield (unit, value) for arguments of calls from `at` on, if they depend on results of calls before `at`."""
    begin = recording.calls[at].time
    for call in recording.calls[at:]:
        for value in call.inputs.values() if call.form is not None else ():
            if value.oldest < begin:
                yield repr(call.name), value


def _values_at_hand(recording: Recording, at: int) -> Iterator[tuple[int, tuple[int, str | int]]]:
    """The values that a stage ending before call `at` can send, as (number, (call, place)).

    These are the arguments and results of the calls before it, and the arguments of the call itself.
    """
    for index, call in enumerate(recording.calls[: at + 1]):
        yield from ((value.number, (index, place)) for place, value in call.inputs.items())
        if index < at:
            yield from ((value.number, (index, leaf)) for leaf, value in enumerate(call.outputs) if value is not None)


def stage_specs(recording: Recording, firsts: Sequence[int]) -> list[StageSpec]:
    """The specification of each stage, if the stages begin with the calls `firsts`, all of which must be in `possible_cuts`."""
    names = tuple(call.name for call in recording.calls)
    forms = tuple(call.form for call in recording.calls)
    received = [
        tuple(dict.fromkeys(value.number for _, value in _values_from_before(recording, at))) if at else ()
        for at in firsts
    ]
    specs = []
    for index, (first, stop) in enumerate(pairwise([*firsts, len(names)])):
        sent = received[index + 1] if index + 1 < len(received) else ()
        spec = StageSpec(first, stop, names, forms, received[index], sent)
        for at in range(first, stop):
            inputs = recording.calls[at].inputs.items()
            places = {place: value.number for place, value in inputs if value.number in spec.received}
            if places:
                spec.received_args[at] = places
        # A value to be sent that was itself received is passed on as it came.
        for number, (at, place) in _values_at_hand(recording, stop) if sent else ():
            if number in sent and number not in spec.received and at >= first:
                calls = spec.sent_args if isinstance(place, str) else spec.sent_results
                calls.setdefault(at, {})[place] = number  # type: ignore[index]
        specs.append(spec)
    return specs


# --------------------------------------------------------------------------------------------------
# A stage at run time: the model without the units of other stages, whose forward() makes its part of the calls.
# --------------------------------------------------------------------------------------------------


class Absent:
    """Placeholder for a unit of another stage: the model's forward() calls it on this stage too.

    A placeholder is not a module and has no weights.

    Args:
        name: The name of the unit in the model.
        fake: The unit of the recorded pass, with parameters that have shapes but no memory.
    """

    def __init__(self, name: str, fake: nn.Module) -> None:
        vars(self).update(_name=name, _fake=fake)  # by vars(), since __getattr__ reads from the fake unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watcher = WATCHER.get()
        return self._no_call() if watcher is None else watcher.call(self._name, self._no_call, args, kwargs)

    def _no_call(self, *args: Any, **kwargs: Any) -> Any:
        raise ScheduleError(
            f"{self._name!r} is in another pipeline stage, so it cannot be called on this rank. Call it only in the "
            "forward pass of the model.",
            code="C050",
        )

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the fake unit, because forward() reads attributes of its layers (`layer.attention_type`, the
        dtype of a weight)."""
        return getattr(vars(self)["_fake"], name)

    def __deepcopy__(self, memo: Any) -> Absent:
        return self


class _EndOfStage(BaseException):
    """Ends the forward pass of a stage. It is not an Exception, because forward() may catch exceptions."""


class StageRun:
    """One forward pass of a stage: a `Watcher` that runs, skips or replaces each call of a unit."""

    def __init__(self, spec: StageSpec, message: dict[str, Any]) -> None:
        self._spec = spec
        self._at = 0  # the next call
        self._inside = False  # a unit is being called; calls of units inside it are its own
        # Shapes may differ from those of the recorded pass, and from batch to batch. So each stage sends the shapes and
        # dtypes of its results along for later stages. Few of them differ: calls refer to them by number.
        self._forms: list[list[Any]] = message.get("forms", [])
        self._form_of: list[int | None] = message.get("calls", [])
        self._values: dict[int, Tensor] = dict(zip(spec.received, message.get("values", ()), strict=True))
        self._device = next((value.device for value in self._values.values()), None)
        self._zeros: dict[int, list[Any]] = {}

    def message(self, inputs: Any) -> dict[str, Any]:
        """The message to the next stage: the inputs of the pass, the values that it needs, and the shapes of results so far."""
        values = [self._values[number] for number in self._spec.sent]
        return {"inputs": inputs, "values": values, "forms": self._forms, "calls": self._form_of}

    def call(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the next call of the pass: zeros for a call of an earlier stage, the unit's result for a call of this stage."""
        if self._inside:
            return own(*args, **kwargs)
        spec, at = self._spec, self._at
        self._at += 1
        if at >= len(spec.unit_names) or spec.unit_names[at] != name:
            expected = f"{spec.unit_names[at]!r} was expected" if at < len(spec.unit_names) else "no call was expected"
            raise ScheduleError(
                f"the forward pass calls {name!r}, but {expected} at this point. The expected calls were recorded "
                "when the model was split into stages. A pipeline needs the same calls in every pass, without layer "
                "dropout. If your inputs lead to other calls, pass a batch of them to parallelize(sample=) or "
                "split(sample=).",
                code="C050",
            )
        form = spec.result_forms[at]
        if form is None:  # depends on no weights (positions, a rotary table): every stage calls it
            return self._run(own, args, kwargs)

        # A call of an earlier stage: forward() uses only shapes and dtypes of its result, so zeros do.
        if at < spec.first:
            index = self._form_of[at]
            assert index is not None
            if index not in self._zeros:
                self._zeros[index] = [
                    torch.zeros(leaf[1:], dtype=getattr(torch, leaf[0]), device=self._device)
                    if isinstance(leaf, list)
                    else leaf
                    for leaf in self._forms[index]
                ]
            return tree_unflatten(self._zeros[index], form)

        # From here on arguments are real, except values from earlier stages, which are replaced by the received ones.
        # Arguments of the next stage's first call may still have to be sent, before that call ends the pass.
        if places := spec.sent_args.get(at):
            for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
                if (number := places.get(keystr(path))) is not None:
                    self._values[number] = leaf
        if at == spec.stop:
            raise _EndOfStage
        if at in spec.received_args:
            numbers = spec.received_args[at]

            def received(path: Any, leaf: Any) -> Any:
                number = numbers.get(keystr(path))
                return leaf if number is None else self._values[number]

            args, kwargs = tree_map_with_path(received, (args, kwargs))
        self._zeros.clear()  # their memory is not needed any more
        result = self._run(own, args, kwargs)
        if spec.is_last:  # nothing to send
            return result
        leaves = tree_leaves(result)
        for leaf_index, number in spec.sent_results.get(at, {}).items():
            self._values[number] = leaves[leaf_index]
        # New lists: those of the message may be the previous stage's own.
        shapes = [[str(leaf.dtype)[6:], *leaf.shape] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if shapes not in self._forms:
            self._forms = [*self._forms, shapes]
        self._form_of = [*self._form_of, *[None] * (at - len(self._form_of)), self._forms.index(shapes)]
        return result

    def _run(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside = True
        try:
            return own(*args, **kwargs)
        finally:
            self._inside = False


class ModelStage(nn.Module):
    """Base class of stages that run a part of the model's own forward pass.

    Built by `subclass_with`, not by `override_forward`: a stage that is not the first takes a message, so its forward() must not
    have the signature of the model's, and engines recognize stages by this class.
    """

    _colonnade_stage: StageSpec
    _colonnade_settings: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage.

        The first stage takes the model's inputs, and the last stage returns its result; between stages, messages are passed.
        """
        spec, message = self._colonnade_stage, {}
        if spec.first:
            message = kwargs
            args, kwargs = message["inputs"]
        run = StageRun(spec, message)
        token = WATCHER.set(run)
        own = vars(self).get("_colonnade_own_forward")
        forward = super().forward if own is None else own
        try:
            result = forward(*args, **{**kwargs, **self._colonnade_settings})
        except _EndOfStage:
            return run.message((args, kwargs))
        finally:
            WATCHER.reset(token)
        if not spec.is_last:
            raise ScheduleError(
                f"forward() returned before it called {spec.unit_names[spec.stop]!r}, the first layer of the next "
                "pipeline stage. Call every layer in each forward pass.",
                code="C050",
            )
        return result_of(result)


def stage_class(kind: type) -> Any:
    """The class of the stages of a model of class `kind`.

    Its forward() accepts any arguments; `inspect.unwrap` returns the model's forward().
    """
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
    """Reduce the output of the last stage to its logits, or to dict(loss, logits), if it has them; return any other output
    unchanged."""
    logits, loss = getattr(output, "logits", None), getattr(output, "loss", None)
    if not isinstance(logits, Tensor):
        return output
    return logits if loss is None else {"loss": loss, "logits": logits}


class _PartlyAbsent:
    """A list or dict of modules with absent members.

    Iteration yields the absent members too, but they are not registered as modules.
    """

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
    """Replace children of a module by `Absent` objects. forward() can still access these objects, but `modules()` and
    `parameters()` do not contain them.
    """
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
# Models that cannot be split, and the inputs of the recorded pass.
# --------------------------------------------------------------------------------------------------


def _check(model: nn.Module, units: dict[str, nn.Module]) -> None:
    name = type(model).__name__
    if not units:
        raise ScheduleError(
            f"the order of the layers of a {name} is not known. There are three remedies. 1. Keep its blocks in an "
            "nn.ModuleList. 2. Define a method pipeline_layers() that returns its layers (or their names) in the "
            "order of their calls. 3. Pass an nn.Sequential or a list of custom stages.",
            code="C050",
        )
    if has_hooks(model):
        raise ScheduleError(
            f"{name} has hooks, but each pipeline stage would run these hooks with only parts of the inputs and "
            "outputs. Remove the hooks, or register them on its layers.",
            code="C050",
        )
    for key, value in _config_values(model):
        if "layerdrop" in key and value:
            raise ScheduleError(
                f"{name} has config.{key}={value}, but layer dropout is not supported in a pipeline, because ranks "
                "would drop different layers. Set it to 0.",
                code="C050",
            )
        if key == "output_router_logits" and value:
            raise ScheduleError(
                f"{name} has config.output_router_logits=True, which adds a loss over the routers of all layers. In "
                "a pipeline these layers are in several stages. Set output_router_logits to False.",
                code="C050",
            )


def _config_values(model: nn.Module) -> Iterable[tuple[str, Any]]:
    config = getattr(model, "config", None)
    for section in (config, getattr(config, "text_config", None)):
        yield from vars(section).items() if hasattr(section, "__dict__") else ()


def _settings(model: nn.Module) -> dict[str, Any]:
    """Arguments for the forward pass of a transformers model in training: no cache of keys and values."""
    parameters = inspect.signature(model.forward).parameters
    takes = "use_cache" in parameters or any(entry.kind is entry.VAR_KEYWORD for entry in parameters.values())
    return {"use_cache": False} if takes and "use_cache" in dict(_config_values(model)) else {}


def _call_with_small_inputs(model: nn.Module) -> Call:
    """Calls a function with small inputs of the kind that a transformers model takes."""
    main = getattr(model, "main_input_name", None)
    inputs = getattr(model, "dummy_inputs", None)
    config: Any = getattr(model, "config", None)
    if main == "pixel_values" and hasattr(config, "image_size"):
        sides = config.image_size if isinstance(config.image_size, (list, tuple)) else [config.image_size] * 2
        dtype = next(model.parameters()).dtype
        inputs = {"pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), *sides, dtype=dtype, device="cpu")}
    if not isinstance(inputs, dict) or main not in inputs:
        raise ScheduleError(
            f"a {type(model).__name__} is split into stages by its forward pass, but the inputs of this pass are not "
            "known. Pass sample=, the data of a batch (tensors of any values).",
            code="C050",
        )
    others = [name for name in inspect.signature(model.forward).parameters if name.startswith(_OTHER_MODALITIES)]
    if main == "input_ids" and others:
        raise ScheduleError(
            f"a {type(model).__name__} takes {others[0]!r} in addition to {main!r}, and {others[0]!r} changes which "
            "layers the model calls. Pass sample=, a batch with the inputs of your run (tensors of any values), to "
            "parallelize or split.",
            code="C050",
        )
    return lambda function: function(**inputs)


def _with_values(tensor: Tensor) -> Tensor:
    """The tensor on the CPU; zeros for one on the meta device."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor.detach().cpu()

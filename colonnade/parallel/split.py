"""Splitting a model into pipeline stages that keep the parameter names of the whole model.

A stage's `state_dict` has the keys that the model's has, so checkpoints, placements and messages speak of the same
parameters whatever the cut. Parameters that end up in two stages are found and reported as ties.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import Node, Tracer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, ScheduleError, did_you_mean, listed
from colonnade.parallel.forward import has_hooks
from colonnade.parallel.placement import Tied, place, placement_of
from colonnade.registry import ORDERS, SCHEDULE

Layers = Sequence[tuple[str, nn.Module]]
"""Layers in the order in which they are called, with their names in the model."""

Tie = tuple[tuple[str, int], ...]
"""A parameter that several stages hold: (its name there, the stage), in the order of stages."""


def no_generate(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Stands in the place of transformers' `generate`, which would call the whole model."""
    raise ScheduleError(
        "generate() needs all stages of the model, and a pipeline has them on several ranks: call engine.save_pretrained(folder) "
        "on every rank, and generate with transformers' from_pretrained(folder) in one process",
        code="C050",
    )


class Stage(nn.Module):
    """Some layers of a model, one after another, under the names that they have in the model.

    `takes_one_value`: what a layer returns goes into the next one as one argument, as in nn.Sequential; else a
    tuple goes in by position and a dict by keyword.
    """

    def __init__(self, layers: Layers, takes_one_value: bool) -> None:
        super().__init__()
        self.takes_one_value = takes_one_value
        self.layer_names = tuple(name for name, _ in layers)
        for name, layer in layers:
            _attach(self, name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = (self.get_submodule(name) for name in self.layer_names)
        value = first(*args, **kwargs)
        for layer in others:
            value = call_layer(layer, value, self.takes_one_value)
        return value


def call_layer(layer: Callable[..., Any], value: Any, one_value: bool = False) -> Any:
    """Call `layer` as a person would write it: a dict by keyword, a tuple or list by position, anything else alone.

    `one_value`: always alone, as in nn.Sequential.
    """
    if isinstance(value, Mapping) and not one_value:
        return layer(**value)
    return layer(*value) if isinstance(value, (tuple, list)) and not one_value else layer(value)


@dataclass(frozen=True)
class Split:
    """A model in stages."""

    stages: list[nn.Module]
    ties: list[Tie] = field(default_factory=list)
    """Parameters held by more than one stage; their gradients must be summed over these stages."""
    whole: nn.Module | None = None
    """The model that was cut; None where the stages were made by hand."""

    generate = no_generate

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, stage: int) -> nn.Module:
        return self.stages[stage]


def split(
    model: nn.Module | Sequence[nn.Module],
    at: str | Sequence[str] | None = None,
    num_stages: int | None = None,
    balance: Literal["parameters", "time"] = "parameters",
    sample: Any = None,
) -> Split:
    """Cut a model into stages: at the layers named in `at`, or into `num_stages` of near-equal weight.

    The layers are those of an nn.Sequential (nested ones too), or what the model's own `pipeline_layers()`
    returns: its layers, or their names, in the order in which they are called. `at` names the first layer of each
    stage but the first. `balance="time"` measures forward and backward of each layer on `sample`, a batch's data.
    A list of modules is taken as stages that you made yourself. No parameter is copied.

    What forward() does between these layers is in no stage. With a `sample` the stages must give what the model gives;
    without one the model must be seen to call its layers one after another, or it is refused.

    Any other model with its blocks in an nn.ModuleList is cut by its own forward pass: each stage runs it, and does its
    part of it. The pass is followed once, without weights, on `sample`; models of transformers need none. What layers are
    given beside what the layer before returned goes along; a cut at which it cannot is refused.
    """
    if not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList):
        stages = list(model)
        if at is not None or num_stages not in (None, len(stages)):
            raise ScheduleError(
                f"a list of {len(stages)} modules is {len(stages)} stages already; leave out at= and num_stages=, or "
                "give the model in one piece",
                code="C050",
            )
        return Split(stages, find_ties(stages))
    one_value = not hasattr(model, "pipeline_layers")
    if one_value and not isinstance(model, nn.Sequential):
        return _split_by_forward(model, at, num_stages, balance, sample)
    layers = list(_flat(model, "")) if one_value else _declared_layers(model)
    _check_covered(model, layers)
    in_order = _runs_in_order(model)
    if sample is None and not in_order:
        _in_modes(model, lambda: _require_chain(model, layers))
    names = [name for name, _ in layers]
    if at is not None:
        firsts = _given_cuts(names, [at] if isinstance(at, str) else at, num_stages)
    else:
        firsts = _balanced_cuts(names, num_stages, _weights(layers, balance, sample, one_value))
    if sample is not None and not in_order:
        whole = Stage(layers, one_value)
        _in_modes(model, lambda: _compare_with_stages(model, whole, lambda module: call_layer(module, cloned(sample))))
    stages = [Stage(layers[first:stop], one_value) for first, stop in pairwise([*firsts, len(layers)])]
    return Split(stages, find_ties(stages), model)


def _split_by_forward(
    model: nn.Module, at: str | Sequence[str] | None, num_stages: int | None, balance: str, sample: Any
) -> Split:
    """Stages of a model with blocks in lists, each of which runs the model's forward pass and does its part of it."""
    if balance != "parameters":
        raise ScheduleError(
            f"balance={balance!r} is for an nn.Sequential or a model with pipeline_layers(); a {type(model).__name__} is cut "
            f"by its own forward pass, with balance='parameters' or at= the layers that you name",
            code="C050",
        )
    # A run whose model is not cut by its own forward pass does not import the recorder of one.
    from colonnade.parallel.own_forward import OwnForward, result_of

    own = OwnForward(model, None if sample is None else lambda function: call_layer(function, sample))
    names, weights = zip(*own.layers, strict=True)
    if at is not None:
        at = [at] if isinstance(at, str) else at
        for cut in at:
            if why := own.why_not(cut):
                raise ScheduleError(f"no stage can begin with {cut!r}: {why}", code="C050")
        firsts = _given_cuts(names, at, num_stages)
    else:
        firsts = _balanced_cuts(names, num_stages, weights)
    stages = own.stages(firsts)
    if sample is not None and not any(parameter.is_meta for parameter in model.parameters()):
        chain = Stage([(str(at), stage) for at, stage in enumerate(stages)], takes_one_value=False)
        hidden = "A layer seems to leave something for another beside what it returns; hand it on as an argument."
        with evaluating(model, chain):
            _compare_with_stages(model, chain, lambda each: result_of(call_layer(each, cloned(sample))), hidden)
    return Split(stages, find_ties(stages), model)


def find_ties(stages: Sequence[nn.Module]) -> list[Tie]:
    """The parameters that more than one stage holds: the same object, or the same memory."""
    places: dict[Any, dict[int, str]] = {}
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            memory = (parameter.data_ptr(), parameter.shape) if parameter.data_ptr() else id(parameter)
            places.setdefault(memory, {}).setdefault(stage, name)
    return [tuple((name, stage) for stage, name in held.items()) for held in places.values() if len(held) > 1]


# -- layers -----------------------------------------------------------------------------------------------


def _flat(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a Sequential, with those of plain Sequentials inside it, unless something hooks on to one."""
    for name, layer in model._modules.items():
        assert layer is not None
        if type(layer) is nn.Sequential and len(layer) and not _is_altered(layer):
            yield from _flat(layer, f"{prefix}{name}.")
        else:
            yield prefix + name, layer


def _declared_layers(model: nn.Module) -> Layers:
    modules = dict(model.named_modules(remove_duplicate=False))
    del modules[""]  # the model itself is no layer
    names = {id(module): name for name, module in reversed(modules.items())}
    layers: list[tuple[str, nn.Module]] = []
    for layer in model.pipeline_layers():  # type: ignore[operator]
        name = layer if isinstance(layer, str) else names.get(id(layer), "")
        if name not in modules:
            told = f"no layer {name!r}.{did_you_mean(name, modules)}" if isinstance(layer, str) else f"not {layer}"
            raise ScheduleError(
                f"pipeline_layers() of {type(model).__name__} returns layers of the model, or their names: {told}",
                code="C050",
            )
        layers.append((name, modules[name]))
    inside = [(a, b) for a, _ in layers for b, _ in layers if b.startswith(f"{a}.")]
    if inside:
        raise ScheduleError(
            f"pipeline_layers() returns {inside[0][0]!r} and, inside it, {inside[0][1]!r}; return one", code="C050"
        )
    if not layers:
        raise ScheduleError(f"pipeline_layers() of {type(model).__name__} returned nothing", code="C050")
    return layers


def _check_covered(model: nn.Module, layers: Layers) -> None:
    """Every parameter and buffer of the model lies in some layer, or it would be lost."""
    kept = {f"{name}.{key}" for name, layer in layers for key in _tensor_names(layer)}
    lost = [key for key in _tensor_names(model) if key not in kept]
    if lost:
        raise ScheduleError(
            f"the layers of {type(model).__name__} do not hold {listed(lost[:5])}{', ...' if len(lost) > 5 else ''}; put each "
            f"parameter and buffer into one of them",
            code="C050",
        )


def _tensor_names(module: nn.Module) -> list[str]:
    tensors = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return [name for named in tensors for name, _ in named]


def _attach(root: nn.Module, name: str, layer: nn.Module) -> None:
    """Hang `layer` under a dotted name, with empty modules on the way."""
    *path, last = name.split(".")
    holder = root
    for part in path:
        if part not in holder._modules:
            holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    holder.add_module(last, layer)


# --------------------------------------------------------------------------------------------------
# Whether the forward pass of a model is its layers, one after another, and nothing else: only then may it be taken apart.
#
# What forward() does between two layers (a scale, an addition, a dropout) would be in no stage, and be lost without a word. So
# the model is compared with its layers on a sample, or its forward pass is traced.
# --------------------------------------------------------------------------------------------------


_BETWEEN = "Put what its forward() does between the layers into one of them."


def _compare_with_stages(
    model: nn.Module, stages: nn.Module, run: Callable[[nn.Module], Any], advice: str = _BETWEEN
) -> None:
    """Refuse stages that give another result than the model, from the same random state, in the mode it is in.

    Random state and buffers stay as they were.
    """
    what = f"the layers of {type(model).__name__}, one after another, give another result than its forward pass"
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})
    results = []
    for module in (model, stages):
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                results.append(run(module))
        except Exception as error:
            if module is model:
                raise
            raise ScheduleError(
                f"{what}: they fail ({type(error).__name__}: {error}). {advice}", code="C050"
            ) from error
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
    (ours, form), (theirs, other) = (tree_flatten(result) for result in results)
    try:
        if form != other:
            raise AssertionError(f"{form} and {other}")
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(two, one, equal_nan=True)
    except AssertionError as error:
        raise ScheduleError(f"{what}. {advice}\n{error}", code="C050") from error


def _in_modes(model: nn.Module, check: Callable[[], None]) -> None:
    """`check` the model as it is, and as one to be trained: its own forward() may do more then. Its layers stay as they are."""
    before = model.training
    try:
        for training in {before, True}:
            model.training = training
            check()
    finally:
        model.training = before


@contextlib.contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Inside, they and all that they hold are in evaluation mode; then each as before."""
    modes = [(each, each.training) for module in modules for each in module.modules()]
    try:
        for each, _ in modes:
            each.training = False
        yield
    finally:
        for each, training in modes:
            each.training = training


def cloned(sample: Any) -> Any:
    """The same values in tensors of their own, which layers may change in place."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, sample)


def _runs_in_order(model: nn.Module) -> bool:
    """Whether there is nothing but the layers by construction: a Sequential's own forward(), or none at all."""
    if _is_altered(model):
        return False
    forward = type(model).forward
    return forward is nn.Module.forward or (forward is nn.Sequential.forward and not hasattr(model, "pipeline_layers"))


def _require_chain(model: nn.Module, layers: Layers) -> None:
    """Refuse a model that cannot be shown to call these layers one after another and nothing else, without running it."""
    altered = "it has hooks, or a forward() of its own instance, which no stage would have"
    why = altered if _is_altered(model) else _between(model, layers)
    if why:
        raise ScheduleError(
            f"the forward pass of {type(model).__name__} cannot be shown to be its layers one after another: {why}. Put what "
            f"forward() does between the layers into one of them; or pass sample=, the data of a batch, on which split "
            f"and whole model are compared",
            code="C050",
        )


def _is_altered(module: nn.Module) -> bool:
    """Whether someone has put hooks or a forward() on this one instance."""
    return has_hooks(module) or "forward" in vars(module)


class _Tracer(Tracer):
    """Records a forward pass in which each layer is one call."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self._layers = {id(layer) for _, layer in layers}

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return id(module) in self._layers


def _between(model: nn.Module, layers: Layers) -> str:
    """An operation of forward() beside the calls of the layers in this order; empty if there is none."""
    try:
        graph = _Tracer(layers).trace(model)
    except Exception as error:  # a forward pass that looks at values can be traced no further
        return f"it cannot be traced ({type(error).__name__}: {error})"
    value = next(node for node in graph.nodes if node.op == "output").args[0]
    for at in reversed(range(len(layers))):
        name, layer = layers[at]
        if (
            not isinstance(value, Node)
            or value.op != "call_module"
            or model.get_submodule(str(value.target)) is not layer
        ):
            after = f"before {layers[at + 1][0]!r}" if at + 1 < len(layers) else "as its result"
            return f"{after} it has {_named(value)}, not the result of {name!r}"
        if at:
            value = _source(value)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    direct = list(value.args) == inputs[: len(value.args)]
    by_name = all(key == node.target for key, node in value.kwargs.items() if isinstance(node, Node))
    return "" if direct and by_name else f"{layers[0][0]!r} does not get what the model gets"


def _source(call: Node) -> Any:
    """The one value that a layer is called with: alone, or a tuple's items by position, or a dict's by keyword."""
    if len(call.args) == 1 and not call.kwargs:
        (value,) = call.args
        return value
    given = [*enumerate(call.args), *call.kwargs.items()]
    found = {_whole_of(value, key) for key, value in given}
    return found.pop() if len(found) == 1 and not (call.args and call.kwargs) else None


def _whole_of(value: Any, key: object) -> Any:
    """The value that `value` is the item `key` of; None if it is no such item."""
    is_item = isinstance(value, Node) and value.target is operator.getitem and value.args[1] == key
    return value.args[0] if is_item else None


def _named(value: Any) -> str:
    if value is None:
        return "several values"
    return f"the input {value.name!r}" if isinstance(value, Node) and value.op == "placeholder" else repr(str(value))


# -- where to cut -----------------------------------------------------------------------------------------


def _given_cuts(names: Sequence[str], at: Sequence[str], num_stages: int | None) -> list[int]:
    """The index of the first layer of each stage."""
    firsts = [0]
    for cut in at:
        index = next((i for i, name in enumerate(names) if name == cut or name.startswith(f"{cut}.")), None)
        if index is None:
            raise ScheduleError(
                f"no layer {cut!r} to cut at; layers: {listed(names)}.{did_you_mean(cut, names)}", code="C050"
            )
        if index <= firsts[-1]:
            raise ScheduleError(
                f"at= names the first layer of each stage but the first, in order and each once; {cut!r} does not come "
                f"after {names[firsts[-1]]!r}",
                code="C050",
            )
        firsts.append(index)
    if num_stages not in (None, len(firsts)):
        raise ScheduleError(
            f"{len(at)} cuts make {len(firsts)} stages, not num_stages={num_stages}; give one of the two", code="C050"
        )
    return firsts


def _balanced_cuts(names: Sequence[str], num_stages: int | None, weights: Sequence[float]) -> list[int]:
    if num_stages is None:
        raise ScheduleError("say where to cut: at=[names of layers], or num_stages=", code="C050")
    if not 1 <= num_stages <= len(names):
        raise ScheduleError(
            f"{len(names)} layers cannot make {num_stages} stages: every stage has at least one. Layers: {listed(names)}",
            code="C050",
        )
    return balanced(weights, num_stages)


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Where each of `parts` runs of items starts, so that the heaviest is as light as can be, then the rest even."""
    sums = list(accumulate(weights, initial=0.0))

    def options(start: int, parts: int) -> list[tuple[float, int]]:
        """(weight, end) of each run that may come next."""
        stops = range(start + 1, len(weights) - parts + 2) if parts > 1 else (len(weights),)
        return [(sums[stop] - sums[start], stop) for stop in stops]

    @cache
    def heaviest(start: int, parts: int) -> float:
        """The lightest that the heaviest of so many parts can be, of the items from `start` on."""
        if parts == 0:
            return 0.0
        return min(max(own, heaviest(stop, parts - 1)) for own, stop in options(start, parts))

    @cache
    def evenest(start: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """(sum of squares, starts) of the evenest parts none of which is too heavy."""
        if parts == 0:
            return 0.0, ()
        found = [(own, evenest(stop, parts - 1)) for own, stop in options(start, parts) if own <= limit]
        return min(((own * own + rest, (start, *starts)) for own, (rest, starts) in found), default=(inf, ()))

    limit = heaviest(0, parts)
    return list(evenest(0, parts)[1])


# -- how heavy a layer is ---------------------------------------------------------------------------------


def _weights(layers: Layers, balance: str, sample: Any, one_value: bool) -> list[float]:
    if balance == "parameters":
        return [float(sum(parameter.numel() for parameter in layer.parameters())) for _, layer in layers]
    if balance != "time":
        raise ScheduleError(f"balance is 'parameters' or 'time', not {balance!r}", code="C050")
    if sample is None:
        raise ScheduleError("balance='time' measures the layers: pass sample=, the data of one batch", code="C050")
    return _measured(layers, sample, one_value)


def _measured(layers: Layers, sample: Any, one_value: bool) -> list[float]:
    """Seconds of forward and backward for each layer; gradients, modes and random state stay as they were."""
    seconds: list[float] = []
    value, alone = sample, False
    devices = {leaf.device for leaf in tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.is_cuda}
    with torch.random.fork_rng(devices=[device.index for device in devices]):
        for _, layer in layers:
            with evaluating(layer):
                value = tree_map(_fresh, value)
                seconds.append(min(_seconds(layer, value, alone) for _ in range(3)))
                with torch.no_grad():
                    value = call_layer(layer, value, alone)
            alone = one_value
    return seconds


def _fresh(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.detach().clone().requires_grad_() if floating else leaf


def _seconds(layer: nn.Module, value: Any, one_value: bool) -> float:
    start = _now()
    # A copy of each leaf, which a layer may change in place.
    output = call_layer(layer, tree_map(lambda leaf: leaf.clone() if _needs_grad(leaf) else leaf, value), one_value)
    roots = [leaf for leaf in tree_leaves(output) if _needs_grad(leaf)]
    leaves = [leaf for leaf in [*layer.parameters(), *tree_leaves(value)] if _needs_grad(leaf)]
    if roots and leaves:
        torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)
    return _now() - start


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _now() -> float:
    """The time at which all that was asked of a GPU so far is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


# --------------------------------------------------------------------------------------------------
# A rank's own stages out of a split model, under the names of the whole model, with ties placed.
# --------------------------------------------------------------------------------------------------


class Chunks(nn.ModuleList):
    """The stages of one rank. Unlike a plain list, it puts no number before names: they stay the whole model's."""

    generate = no_generate

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Every module of every stage, under its name in the whole model."""
        memo = set() if memo is None else memo
        for module in self:
            yield from module.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """The module of this name in the whole model."""
        for module in self if target else ():
            with contextlib.suppress(AttributeError):
                return module.get_submodule(target)
        return super().get_submodule(target)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state of all stages together."""
        destination = {} if destination is None else destination
        for module in self:
            module.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Give each stage what is its own; unexpected keys are an error if `strict`."""
        known = [set(module.state_dict()) for module in self]
        extra = sorted(set(state_dict).difference(*known))
        if strict and extra:
            raise RuntimeError(f"unexpected keys for the stages here: {', '.join(extra)}")
        found = [
            module.load_state_dict({key: value for key, value in state_dict.items() if key in keys}, strict, assign)
            for module, keys in zip(self, known, strict=True)
        ]
        first, *_ = found
        return first._replace(missing_keys=[key for each in found for key in each.missing_keys], unexpected_keys=extra)


def take_stages(split: Split, stage_ranks: Sequence[int], rank: int) -> nn.Module:
    """The stages of pipeline rank `rank`, where `stage_ranks` says which rank has each stage.

    A parameter that stages of several ranks hold is placed as `Tied` on these ranks, so that its gradients are
    summed, it is counted once, and its copies start equal; between stages of one rank it stays one parameter.
    """
    if len(split) != len(stage_ranks):
        raise ScheduleError(
            f"the model was split into {len(split)} stages, and the schedule has {len(stage_ranks)} (on "
            f"{max(stage_ranks) + 1} pipeline ranks); give colonnade.split num_stages={len(stage_ranks)}, or as many cuts",
            code="C050",
        )
    mine = [stage for stage, home in enumerate(stage_ranks) if home == rank]
    for tie in split.ties:
        homes = sorted({stage_ranks[stage] for _, stage in tie})
        here = [(name, stage) for name, stage in tie if stage in mine]
        if len(homes) > 1 and here:
            (name, stage), *_ = here
            parameter = split[stage].get_parameter(name)
            before = placement_of(parameter)
            (key, _), *_ = tie
            tied = Tied(tuple(homes), key)
            place(parameter, {**before.modes, ParallelMode.PIPELINE: tied}, before.shape)
    first, *others = (split[stage] for stage in mine)
    return Chunks([first, *others]) if others else first


# --------------------------------------------------------------------------------------------------
# The schedule that a config asks for.
# --------------------------------------------------------------------------------------------------


def build_schedule(context: ParallelContext) -> Any:
    """The schedule of a launched config, of the class or the order that it names."""
    wanted = context.config.get("schedule") or _default_schedule(context)
    settings = {"type": wanted} if isinstance(wanted, str) else dict(wanted)
    name = settings.pop("type")
    if name in ORDERS:
        name, settings = "PipelineSchedule", {"order": name, **settings}
    schedule = SCHEDULE.get_module(name)
    try:
        built = schedule(**settings)
    except TypeError as error:
        raise ConfigError(
            f"schedule: {name} could not be built with {settings or 'no arguments'}: {error}", code="C051"
        ) from error
    if not callable(getattr(built, "forward_back_step", None)):
        raise ConfigError(f"schedule: {name} has no forward_back_step(); inherit BaseSchedule", code="C051")
    return built


def _default_schedule(context: ParallelContext) -> dict[str, Any]:
    """Without a `schedule` key: none of a pipeline, or one by `num_microbatches` and `model.num_chunks`."""
    config = context.config
    if context.pipeline_parallel_size == 1:
        return {"type": "NonPipelineSchedule"}
    if config.get("num_microbatches") is None:
        raise ConfigError(
            f"a pipeline of {context.pipeline_parallel_size} stages needs a schedule and a number of micro-batches: "
            f"schedule=dict(type='OneFOneB', num_microbatches=8), or num_microbatches=8 for that same one",
            code="C051",
        )
    chunks = (config.get("model") or {}).get("num_chunks")
    shape = {"tensor_shape": config.get("TENSOR_SHAPE")} if config.get("TENSOR_SHAPE") is not None else {}
    if chunks:
        return {"type": "Interleaved1F1B", "num_microbatches": config.num_microbatches, "num_chunks": chunks, **shape}
    return {"type": "OneFOneB", "num_microbatches": config.num_microbatches, **shape}

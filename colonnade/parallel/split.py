"""Splitting a model into pipeline stages that keep the parameter names of the unsplit model.

The keys of a stage's `state_dict` are those of the model, so checkpoints, placements and messages name the same
parameters however the model is split. Parameters that two stages share are reported as ties.

`split` handles models whose layers run one after another (nn.Sequential, `pipeline_layers()`); any other model is split by
its own forward pass (`own_forward.py`). `take_stages` picks a rank's stages, `build_schedule` builds the schedule of a config.
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
"""(name in the model, layer), in the order of their calls."""

Tie = tuple[tuple[str, int], ...]
"""A parameter that several stages share: (its name there, the stage), in the order of stages."""


def no_generate(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Replaces the method `generate` of a transformers model on a stage, where it cannot work. Always raises."""
    raise ScheduleError(
        "generate() needs all stages of the model, but in a pipeline they are on several ranks. Call "
        "engine.save_pretrained(folder) on every rank. Then load the folder with transformers' from_pretrained in "
        "one process, and generate there.",
        code="C050",
    )


class Stage(nn.Module):
    """Consecutive layers of a model, under their names in the model.

    Args:
        layers: The layers, with their names.
        takes_one_value: Whether the output of a layer is passed to the next one as a single argument, as in
            nn.Sequential; else a tuple is passed by position and a dict by keyword.
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
    """Call `layer` with `value`: a dict is passed by keyword, a tuple or list by position, and any other value as the single
    argument.

    With `one_value`, every value is passed as the single argument, as in nn.Sequential.
    """
    if isinstance(value, Mapping) and not one_value:
        return layer(**value)
    return layer(*value) if isinstance(value, (tuple, list)) and not one_value else layer(value)


@dataclass(frozen=True)
class Split:
    """The result of `split`: a sequence of the stages of a model, which are modules."""

    stages: list[nn.Module]
    ties: list[Tie] = field(default_factory=list)
    """Parameters shared by several stages; their gradients must be summed over these stages."""
    whole: nn.Module | None = None
    """The unsplit model; None if the stages were made by hand."""

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
    """Split a model into pipeline stages: before the layers named in `at`, or into `num_stages` of near-equal weight.

    No parameter is copied, and all keep their names. Three kinds of models can be split:

    - An nn.Sequential (nested ones too), or a model whose method `pipeline_layers()` returns its layers, or their
      names, in the order of their calls. Operations of forward() between these layers would be in no stage. So the
      stages are compared with the model on `sample`; without a sample, a trace of forward() must show that there are
      none.
    - Any other model with its blocks in an nn.ModuleList. Each stage then runs the model's own forward() and makes
      its part of the calls. The calls are recorded once, without weights, on `sample`; Hugging Face models need no
      sample. Further arguments of the layers are sent along; a split for which that is impossible is an error.
    - A list of modules, each of which becomes a stage.

    Args:
        model: The model, or a list of its stages.
        at: The name of the first layer of every stage except stage 0.
        num_stages: The number of stages, instead of `at`.
        balance: The weight of a layer: its number of parameters, or the time of its forward and backward pass on `sample`.
        sample: The data of a batch, as the model takes it.

    Raises:
        ScheduleError: If the model cannot be split as asked.

    Example::

        gpc = colonnade.launch(dict(parallel=dict(pipeline=2), num_microbatches=4))
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        stages = colonnade.split(model, num_stages=2)
        engine, *_ = colonnade.initialize(stages, lambda parameters: torch.optim.AdamW(parameters), nn.MSELoss())
    """
    if not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList):
        stages = list(model)
        if at is not None or num_stages not in (None, len(stages)):
            raise ScheduleError(
                f"a list of {len(stages)} modules already defines {len(stages)} stages. Leave at= and num_stages= "
                "out, or pass the unsplit model.",
                code="C050",
            )
        return Split(stages, find_ties(stages))
    one_value = not hasattr(model, "pipeline_layers")
    if one_value and not isinstance(model, nn.Sequential):
        return _split_by_forward(model, at, num_stages, balance, sample)
    layers = _layers_of(model)
    # An nn.Sequential's own forward() calls the layers in order by construction, and a model without forward() cannot do
    # more. Of any other model that must be shown.
    forward = type(model).forward
    in_order = not _is_altered(model) and (
        forward is nn.Module.forward or (forward is nn.Sequential.forward and one_value)
    )
    if sample is None and not in_order:
        _in_modes(model, lambda: _require_chain(model, layers))
    names = [name for name, _ in layers]
    if at is not None:
        firsts = _given_cuts(names, [at] if isinstance(at, str) else at, num_stages)
    else:
        firsts = _balanced_cuts(names, num_stages, _weights(layers, balance, sample, one_value))
    if sample is not None and not in_order:
        chain = Stage(layers, one_value)
        _in_modes(model, lambda: _compare_with_stages(model, chain, lambda module: call_layer(module, cloned(sample))))
    stages = [Stage(layers[first:stop], one_value) for first, stop in pairwise([*firsts, len(layers)])]
    return Split(stages, find_ties(stages), model)


def _split_by_forward(
    model: nn.Module, at: str | Sequence[str] | None, num_stages: int | None, balance: str, sample: Any
) -> Split:
    """Split a model with blocks in lists into stages that run the model's own forward pass."""
    if balance != "parameters":
        raise ScheduleError(
            f"balance={balance!r} needs an nn.Sequential or a model with pipeline_layers(), but a "
            f"{type(model).__name__} is split by its forward pass. Use balance='parameters', or name layers in at=.",
            code="C050",
        )
    # Imported here: a run without such a model does not need the recorder.
    from colonnade.parallel.own_forward import ForwardSplitter, result_of

    splitter = ForwardSplitter(model, None if sample is None else lambda function: call_layer(function, sample))
    names, weights = zip(*splitter.layers, strict=True)
    if at is not None:
        at = [at] if isinstance(at, str) else at
        for name in at:
            if why := splitter.why_not(name):
                raise ScheduleError(f"no stage can begin with {name!r}: {why}", code="C050")
        firsts = _given_cuts(names, at, num_stages)
    else:
        firsts = _balanced_cuts(names, num_stages, weights)
    stages = splitter.stages(firsts)
    # The recording cannot see values that a layer leaves for another in an attribute, so the stages are compared, too.
    if sample is not None and not any(parameter.is_meta for parameter in model.parameters()):
        chain = Stage([(str(index), stage) for index, stage in enumerate(stages)], takes_one_value=False)
        hidden = (
            "A layer seems to store a value that another layer reads; return the value, and pass it as an argument."
        )
        with evaluating(model, chain):
            _compare_with_stages(model, chain, lambda module: result_of(call_layer(module, cloned(sample))), hidden)
    return Split(stages, find_ties(stages), model)


def find_ties(stages: Sequence[nn.Module]) -> list[Tie]:
    """Find the parameters that several stages share: the same object, or different objects with the same memory."""
    places: dict[Any, dict[int, str]] = {}
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            memory = (parameter.data_ptr(), parameter.shape) if parameter.data_ptr() else id(parameter)
            places.setdefault(memory, {}).setdefault(stage, name)
    return [tuple((name, stage) for stage, name in names.items()) for names in places.values() if len(names) > 1]


# -- layers -----------------------------------------------------------------------------------------------


def _layers_of(model: nn.Module) -> Layers:
    """The layers of an nn.Sequential or of `pipeline_layers()`, checked to hold every tensor of the model."""
    kind = type(model).__name__
    if not hasattr(model, "pipeline_layers"):
        layers = list(_flat(model, ""))
    else:
        modules = dict(model.named_modules(remove_duplicate=False))
        del modules[""]  # the model itself is no layer
        names = {id(module): name for name, module in reversed(modules.items())}
        layers = []
        for layer in model.pipeline_layers():  # type: ignore[operator]
            name = layer if isinstance(layer, str) else names.get(id(layer), "")
            if name not in modules:
                wrong = (
                    f"the unknown name {name!r}.{did_you_mean(name, modules)}" if isinstance(layer, str) else f"{layer}"
                )
                raise ScheduleError(
                    f"pipeline_layers() of {kind} must return layers of the model, or their names. It returned {wrong}",
                    code="C050",
                )
            layers.append((name, modules[name]))
        nested = [(outer, inner) for outer, _ in layers for inner, _ in layers if inner.startswith(f"{outer}.")]
        if nested:
            raise ScheduleError(
                f"pipeline_layers() returned {nested[0][0]!r} and also {nested[0][1]!r}, which is inside "
                f"{nested[0][0]!r}. Return only one of the two.",
                code="C050",
            )
        if not layers:
            raise ScheduleError(
                f"pipeline_layers() of {kind} returned no layers. Return its layers, or their names, in the order of "
                "their calls.",
                code="C050",
            )
    # A tensor outside of all layers would be in no stage, and so neither trained nor saved.
    kept = {f"{name}.{key}" for name, layer in layers for key in _tensor_names(layer)}
    lost = [key for key in _tensor_names(model) if key not in kept]
    if lost:
        raise ScheduleError(
            f"no layer of {kind} contains {listed(lost[:5])}{', ...' if len(lost) > 5 else ''}. Put each parameter and "
            "buffer into a layer.",
            code="C050",
        )
    return layers


def _flat(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a Sequential, and of nested Sequentials without hooks and without a custom forward()."""
    for name, layer in model._modules.items():
        assert layer is not None
        if type(layer) is nn.Sequential and len(layer) and not _is_altered(layer):
            yield from _flat(layer, f"{prefix}{name}.")
        else:
            yield prefix + name, layer


def _tensor_names(module: nn.Module) -> list[str]:
    tensors = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return [name for named in tensors for name, _ in named]


def _attach(root: nn.Module, name: str, layer: nn.Module) -> None:
    """Add `layer` under a dotted name, with empty modules for the parents."""
    *path, last = name.split(".")
    parent = root
    for key in path:
        if key not in parent._modules:
            parent.add_module(key, nn.Module())
        parent = parent.get_submodule(key)
    parent.add_module(last, layer)


# --------------------------------------------------------------------------------------------------
# Whether a model's forward pass is its layers, one after another, and nothing else.
#
# Operations of forward() between two layers (a scale, an addition, a dropout) would be in no stage, and silently lost. So the
# model is compared with its layers on a sample, or its forward pass is traced.
# --------------------------------------------------------------------------------------------------


_BETWEEN = "Move the operations of its forward() between the layers into one of the layers."


def _compare_with_stages(
    model: nn.Module, stages: nn.Module, run: Callable[[nn.Module], Any], advice: str = _BETWEEN
) -> None:
    """Raise if the result of the stages differs from the result of the model, from the same random state, in its current mode.

    Random state and buffers are restored.
    """
    differs = f"the layers of {type(model).__name__}, called in order, do not give the same result as its forward pass"
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})
    results = []
    for module in (model, stages):
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                results.append(run(module))
        except Exception as error:
            if module is model:  # the user's own error
                raise
            raise ScheduleError(
                f"{differs}: they fail ({type(error).__name__}: {error}). {advice}", code="C050"
            ) from error
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
    (expected, expected_form), (found, found_form) = (tree_flatten(result) for result in results)
    try:
        if expected_form != found_form:
            raise AssertionError(f"{expected_form} and {found_form}")
        for expected_leaf, found_leaf in zip(expected, found, strict=True):
            torch.testing.assert_close(found_leaf, expected_leaf, equal_nan=True)
    except AssertionError as error:
        raise ScheduleError(f"{differs}. {advice}\n{error}", code="C050") from error


def _in_modes(model: nn.Module, check: Callable[[], None]) -> None:
    """Run `check` in the model's current mode and in training mode, in which forward() may do more. Layers keep their modes."""
    before = model.training
    try:
        for training in {before, True}:
            model.training = training
            check()
    finally:
        model.training = before


@contextlib.contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Put the modules and their submodules into evaluation mode inside the block; afterwards, restore the mode of each module."""
    modes = [(inner, inner.training) for module in modules for inner in module.modules()]
    try:
        for inner, _ in modes:
            inner.training = False
        yield
    finally:
        for inner, training in modes:
            inner.training = training


def cloned(sample: Any) -> Any:
    """A copy of a nested value in which each tensor is cloned, because layers may change their inputs in place."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, sample)


def _is_altered(module: nn.Module) -> bool:
    """Whether this instance has hooks, or a forward() of its own."""
    return has_hooks(module) or "forward" in vars(module)


class _Tracer(Tracer):
    """Traces a forward pass in which each layer is one call."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self._layers = {id(layer) for _, layer in layers}

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return id(module) in self._layers


def _require_chain(model: nn.Module, layers: Layers) -> None:
    """Raise unless a trace of forward() shows the layers, called in this order, and no other operation."""
    why = "it has hooks or a forward() set on the instance, which no stage would have"
    if not _is_altered(model):
        why = _not_a_chain(model, layers)
    if why:
        raise ScheduleError(
            f"the model cannot be split into stages, because nothing shows that forward() of {type(model).__name__} "
            f"only calls its layers in order: {why}. Move the operations between the layers into one of the layers. "
            "Or pass sample=, the data of a batch; the stages and the unsplit model are then compared on this batch.",
            code="C050",
        )


def _not_a_chain(model: nn.Module, layers: Layers) -> str:
    """Search forward() from its end for an operation that is not the call of the next layer, and return its description; empty
    if there is none.
    """
    try:
        graph = _Tracer(layers).trace(model)
    except Exception as error:  # forward() depends on values
        return f"it cannot be traced ({type(error).__name__}: {error})"
    # From the result back to the inputs: each value must be the output of the layer that comes next.
    value = next(node for node in graph.nodes if node.op == "output").args[0]
    for at in reversed(range(len(layers))):
        name, layer = layers[at]
        if (
            not isinstance(value, Node)
            or value.op != "call_module"
            or model.get_submodule(str(value.target)) is not layer
        ):
            place = f"the input of {layers[at + 1][0]!r}" if at + 1 < len(layers) else "its result"
            return f"{place} is {_named(value)}, not the output of {name!r}"
        if at:
            value = _source(value)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    direct = list(value.args) == inputs[: len(value.args)]
    by_name = all(key == node.target for key, node in value.kwargs.items() if isinstance(node, Node))
    return "" if direct and by_name else f"{layers[0][0]!r} is not called with the arguments of the model"


def _source(call: Node) -> Any:
    """The single value that a layer is called with: directly, as a tuple passed by position, or as a dict passed by keyword."""
    if len(call.args) == 1 and not call.kwargs:
        (value,) = call.args
        return value
    found = set()
    for key, value in [*enumerate(call.args), *call.kwargs.items()]:
        is_item = isinstance(value, Node) and value.target is operator.getitem and value.args[1] == key
        found.add(value.args[0] if is_item else None)  # type: ignore[union-attr]
    return found.pop() if len(found) == 1 and not (call.args and call.kwargs) else None


def _named(value: Any) -> str:
    if value is None:
        return "several values"
    return f"the input {value.name!r}" if isinstance(value, Node) and value.op == "placeholder" else repr(str(value))


# -- where to split ---------------------------------------------------------------------------------------


def _given_cuts(names: Sequence[str], at: Sequence[str], num_stages: int | None) -> list[int]:
    """The index of the first layer of each stage."""
    firsts = [0]
    for cut in at:
        index = next((i for i, name in enumerate(names) if name == cut or name.startswith(f"{cut}.")), None)
        if index is None:
            raise ScheduleError(
                f"{cut!r} in at= is not a layer. The layers are {listed(names)}.{did_you_mean(cut, names)}", code="C050"
            )
        if index <= firsts[-1]:
            raise ScheduleError(
                "at= must name the first layer of each stage except the first stage, in order and without repeats. "
                f"{cut!r} does not come after {names[firsts[-1]]!r}.",
                code="C050",
            )
        firsts.append(index)
    if num_stages not in (None, len(firsts)):
        raise ScheduleError(
            f"at= with {len(at)} name(s) makes {len(firsts)} stages, but num_stages is {num_stages}. Pass only one "
            "of at= and num_stages=.",
            code="C050",
        )
    return firsts


def _balanced_cuts(names: Sequence[str], num_stages: int | None, weights: Sequence[float]) -> list[int]:
    if num_stages is None:
        raise ScheduleError(
            "the cut points of the pipeline stages are missing. Pass at=[names of layers] or num_stages=.", code="C050"
        )
    if not 1 <= num_stages <= len(names):
        raise ScheduleError(
            f"{len(names)} layers cannot make {num_stages} stages, because every stage needs at least one layer. The "
            f"layers are {listed(names)}.",
            code="C050",
        )
    return balanced(weights, num_stages)


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Split consecutive items into `parts` runs, and return the start of each run.

    Minimizes the weight of the heaviest run, then the differences between runs.
    """
    sums = list(accumulate(weights, initial=0.0))

    def options(start: int, parts: int) -> list[tuple[float, int]]:
        """Yield (weight, end) of each possible next run."""
        stops = range(start + 1, len(weights) - parts + 2) if parts > 1 else (len(weights),)
        return [(sums[stop] - sums[start], stop) for stop in stops]

    @cache
    def heaviest(start: int, parts: int) -> float:
        """The weight of the heaviest run if the items from `start` on are split into `parts` runs as well as possible."""
        if parts == 0:
            return 0.0
        return min(max(own, heaviest(stop, parts - 1)) for own, stop in options(start, parts))

    @cache
    def evenest(start: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """Return the most even split in which no run is heavier than `limit`, as (sum of squares, starts)."""
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
        raise ScheduleError(f"balance is {balance!r}; allowed are 'parameters' and 'time'", code="C050")
    if sample is None:
        raise ScheduleError(
            "balance='time' measures the layers and needs data. Pass sample=, the data of one batch.", code="C050"
        )
    return _measured(layers, sample, one_value)


def _measured(layers: Layers, sample: Any, one_value: bool) -> list[float]:
    """Seconds of forward and backward of each layer; gradients, modes and random state stay unchanged."""
    seconds: list[float] = []
    value, alone = sample, False  # the first layer gets the sample as the model would, whatever comes after it
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
    # Clones, because a layer may change its input in place, which autograd forbids for a leaf.
    output = call_layer(layer, tree_map(lambda leaf: leaf.clone() if _needs_grad(leaf) else leaf, value), one_value)
    roots = [leaf for leaf in tree_leaves(output) if _needs_grad(leaf)]
    leaves = [leaf for leaf in [*layer.parameters(), *tree_leaves(value)] if _needs_grad(leaf)]
    if roots and leaves:
        torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)
    return _now() - start


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _now() -> float:
    """Synchronize the device and return the current time."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


# --------------------------------------------------------------------------------------------------
# A rank's own stages of a split model, with ties placed.
# --------------------------------------------------------------------------------------------------


class Chunks(nn.ModuleList):
    """The stages of one rank (virtual pipeline stages).

    Unlike nn.ModuleList, it keeps the names of the unsplit model, without an index.
    """

    generate = no_generate

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Every module of every stage, under its name in the unsplit model."""
        memo = set() if memo is None else memo
        for module in self:
            yield from module.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """The module of this name in the unsplit model."""
        for module in self if target else ():
            with contextlib.suppress(AttributeError):
                return module.get_submodule(target)
        return super().get_submodule(target)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state dicts of all stages, merged into one."""
        destination = {} if destination is None else destination
        for module in self:
            module.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load each stage from its entries of `state_dict`; with `strict`, unexpected keys raise."""
        known = [set(module.state_dict()) for module in self]
        extra = sorted(set(state_dict).difference(*known))
        if strict and extra:
            raise RuntimeError(f"unexpected keys for the stages of this rank: {', '.join(extra)}")
        loaded = [
            module.load_state_dict({key: value for key, value in state_dict.items() if key in keys}, strict, assign)
            for module, keys in zip(self, known, strict=True)
        ]
        first, *_ = loaded
        return first._replace(missing_keys=[key for keys in loaded for key in keys.missing_keys], unexpected_keys=extra)


def take_stages(split: Split, stage_ranks: Sequence[int], rank: int) -> nn.Module:
    """Return the stages of pipeline rank `rank`; several stages as `Chunks`. `stage_ranks`: the rank of each stage.

    If stages of several ranks share a parameter, the parameter is placed as `Tied` on these ranks: its gradients are summed, it
    counts once in norms, and its copies start equal. If only stages of one rank share a parameter, it stays a single parameter.
    """
    if len(split) != len(stage_ranks):
        raise ScheduleError(
            f"the model was split into {len(split)} stages, but the schedule has {len(stage_ranks)} stages (on "
            f"{max(stage_ranks) + 1} pipeline ranks). Call colonnade.split with num_stages={len(stage_ranks)}, or "
            "with names for as many stages in at=.",
            code="C050",
        )
    own_stages = [stage for stage, home in enumerate(stage_ranks) if home == rank]
    for tie in split.ties:
        tied_ranks = sorted({stage_ranks[stage] for _, stage in tie})
        here = [(name, stage) for name, stage in tie if stage in own_stages]
        if len(tied_ranks) > 1 and here:
            (name, stage), *_ = here
            parameter = split[stage].get_parameter(name)
            before = placement_of(parameter)
            (key, _), *_ = tie  # the same on all ranks, whatever its name is there
            tied = Tied(tuple(tied_ranks), key)
            place(parameter, {**before.modes, ParallelMode.PIPELINE: tied}, before.shape)
    first, *others = (split[stage] for stage in own_stages)
    return Chunks([first, *others]) if others else first


# --------------------------------------------------------------------------------------------------
# The schedule that a config asks for.
# --------------------------------------------------------------------------------------------------


def build_schedule(context: ParallelContext) -> Any:
    """Build the schedule from the config of `context`: the class or order of the key `schedule`, or the default for the
    pipeline size."""
    config = context.config
    wanted = config.get("schedule")
    if not wanted and context.pipeline_parallel_size == 1:
        wanted = "NonPipelineSchedule"
    elif not wanted:
        if config.get("num_microbatches") is None:
            raise ConfigError(
                f"a pipeline of {context.pipeline_parallel_size} stages needs a schedule and a number of "
                "micro-batches. Write schedule=dict(type='OneFOneB', num_microbatches=8). num_microbatches=8 has the "
                "same effect.",
                code="C051",
            )
        # The keys of Colossal-AI's configs.
        wanted = {"type": "OneFOneB", "num_microbatches": config.num_microbatches}
        if chunks := (config.get("model") or {}).get("num_chunks"):
            wanted.update(type="Interleaved1F1B", num_chunks=chunks)
        if config.get("TENSOR_SHAPE") is not None:
            wanted["tensor_shape"] = config.get("TENSOR_SHAPE")
    settings = {"type": wanted} if isinstance(wanted, str) else dict(wanted)
    name = settings.pop("type")
    if name in ORDERS:
        name, settings = "PipelineSchedule", {"order": name, **settings}
    schedule = SCHEDULE.get_module(name)
    try:
        built = schedule(**settings)
    except TypeError as error:
        raise ConfigError(
            f"the schedule {name} could not be built with {settings or 'no arguments'}: {error}", code="C051"
        ) from error
    if not callable(getattr(built, "forward_back_step", None)):
        raise ConfigError(f"the schedule {name} has no forward_back_step(). Inherit BaseSchedule.", code="C051")
    return built

"""Whether one entry of a plan can be meant as it is said, and whether the layer that it names can be cut at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from colonnade.errors import PlacementError, did_you_mean, listed
from colonnade.parallel.placement import placement_of
from colonnade.plans.match import Entry, place_of
from colonnade.plans.styles import OPTIONS, style_of

_MULTIPLY_ALIKE = ("FalconLinear",)
"""Subclasses of nn.Linear with a forward pass that computes what nn.Linear's does."""


def check_said(name: str, entry: Entry) -> None:
    """Refuse a style or an option that is not known, and values that no option has."""
    if entry.style is not None:
        style_of(entry.style, name)
    known = ("divide", *OPTIONS.get(entry.style, ()))
    for key, value in entry.options.items():
        if key not in known:
            raise PlacementError(
                f"the plan gives {name!r} the option {key!r}, which is not known; "
                f"{repr(entry.style) if entry.style else 'an entry without a style'} takes {listed(map(repr, known))}."
                f"{did_you_mean(key, ('style', *known))}",
                code="C060",
            )
        if key == "sections" and not _is_sections(value):
            raise PlacementError(
                f"{name!r}: sections={value!r}; give a number of equal ones, or their lengths, each 1 or more",
                code="C060",
            )
        if key in ("divide", "inputs") and isinstance(value, str):
            raise PlacementError(f"{name!r}: {key}={value!r} is one name; give a list of them: {[value]}", code="C060")


def _is_sections(value: Any) -> bool:
    lengths = value if isinstance(value, (tuple, list)) else [value]
    return bool(lengths) and all(type(length) is int and length > 0 for length in lengths)


def two_styles(entries: Mapping[str, Entry], model: nn.Module) -> Iterator[str]:
    """Modules and parameters that have several names, of which the plan says different things."""
    first: dict[Any, str] = {}
    for name in entries:
        other = first.setdefault(place_of(name, model), name)
        told = [(entries[each].style, dict(entries[each].options)) for each in (other, name)]
        if told[0] != told[1]:
            styles = [f"{style!r}{f' with {options}' if options else ''}" for style, options in told]
            yield (
                f"{other!r} and {name!r} are one module, and the plan gives the first {styles[0]} and the second {styles[1]}; "
                f"say the same of both, or name one of them alone"
            )


def weights_alone(cuts: Mapping[str, str], styles: Mapping[str, int], model: nn.Module) -> Iterator[str]:
    """Parameters that the plan cuts, where the layer, linear or by vocabulary, would go on as if it had the whole."""
    for name in (name for name, style in cuts.items() if style in styles):
        owner, _, last = name.rpartition(".")
        layer = model.get_submodule(owner)
        summed = any(each in cuts for each in [owner, *around(owner)])
        by_words = isinstance(layer, nn.Embedding) and styles[cuts[name]] == 0
        if (is_linear(layer) or by_words) and last in layer._parameters and not summed:
            yield (
                f"{name!r} is a parameter of {owner!r}, of the class {type(layer).__name__}, which would compute with its part as if it "
                f"were the whole; name {owner!r} instead, which cuts all of its parameters"
            )


def undivided(entries: Mapping[str, Entry], model: nn.Module, ranks: int) -> Iterator[str]:
    """Attributes that the plan divides, and that the tensor size does not."""
    for name, entry in entries.items():
        for attribute in entry.options.get("divide", ()):
            size = getattr(place_of(name, model)[0], attribute, None)
            if not isinstance(size, int) or size % ranks:
                yield f"{name!r}: the attribute {attribute!r} is {size!r}, which cannot be divided by the tensor size {ranks}"


def unfit_layers(cuts: Mapping[str, str], styles: Mapping[str, int], model: nn.Module) -> Iterator[str]:
    """Layers that cannot be cut, with the reason and what can be done."""
    for name in (name for name, style in cuts.items() if style in styles):
        layer, parameter = place_of(name, model)
        if parameter is None:
            yield from (f"{name!r} {reason}" for reason in _why_unfit(layer))


def _why_unfit(layer: nn.Module) -> Iterator[str]:
    """Its weight is made of others, not there yet, no number to train, cut before, or used otherwise than styles use it."""
    if hasattr(layer, "original_module") and hasattr(layer, "adapter_layer_names"):
        yield (
            "is trained as a whole beside the adapters (modules_to_save or trainable_token_indices of peft), and the plan cuts "
            "it. Name it in target_modules instead, whose adapters are cut with their layer, or train without tensor "
            "parallelism: under data parallelism, ZeRO or a pipeline it stays whole"
        )
    if not is_linear(layer) and not isinstance(layer, nn.Embedding):
        return
    weight: Any = layer._parameters.get("weight")
    computed = [each for each in ("weight", "bias") if each not in layer._parameters and hasattr(layer, each)]
    if computed:
        yield (
            f"cannot be cut: its {computed[0]!r} is no parameter of it but computed (weight_norm, spectral_norm, pruning or "
            f"another parametrization); remove that before parallelize, or leave the layer out of the plan"
        )
    elif is_lazy(weight):
        yield "is lazy: its sizes are not known yet; run the model once before parallelize"
    elif not weight.is_floating_point():
        yield f"cannot be cut: its 'weight' has the type {weight.dtype}, as quantised layers have; take the original weights"
    elif placement_of(weight).shards:
        yield f"is cut and placed already ({placement_of(weight)}); parallelize a model once"
    elif isinstance(layer, nn.Linear) and _has_own_forward(layer):
        yield (
            f"is a {type(layer).__name__}, whose forward pass is its own and would be replaced by that of nn.Linear; put what it "
            f"does beside multiplying into a module around it, or leave it out of the plan"
        )


def is_linear(module: nn.Module) -> bool:
    """Whether the module is one that styles for linear layers take."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _has_own_forward(layer: nn.Linear) -> bool:
    alike = type(layer).forward is nn.Linear.forward or type(layer).__name__ in _MULTIPLY_ALIKE
    return not alike or "forward" in vars(layer)


def around(name: str) -> Iterator[str]:
    """The modules around a module or parameter, from the nearest to the model itself ("")."""
    while name:
        name = name.rpartition(".")[0]
        yield name

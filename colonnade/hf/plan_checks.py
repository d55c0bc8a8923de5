"""Errors in a plan, told by name before anything is cut; and the layers that it must name because of a tie.

`check_mode` and `check_entries` are asked by `parallelize`, and `with_ties` adds to the entries. Below stand the single checks:
of one entry, and of entries beside each other. What names cannot tell, `plan_comparison.py` finds by values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError, PlacementError, did_you_mean, listed
from colonnade.hf.match import PlanEntry, place_of
from colonnade.hf.styles import OPTIONS, STYLES, style_of
from colonnade.nn.layer.spread import size_of
from colonnade.parallel.placement import placement_of

_GIVES_PARTS = ("colwise", "packed_colwise")
_TAKES_PARTS = ("rowwise", "packed_rowwise")
_DIM_OF_WEIGHT = {
    **dict.fromkeys(("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"), 0),
    **dict.fromkeys(("rowwise", "packed_rowwise", "rowwise_split_input", "rowwise_rep"), 1),
    "embedding_rowwise": 0,
    "embedding_colwise": 1,
}
"""Which dimension of the weight of a layer, [out, in] or [words, features], each style cuts."""
_HEAD_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_MULTIPLY_ALIKE = ("FalconLinear",)
"""Subclasses of nn.Linear with a forward pass that computes what nn.Linear's does."""


def check_mode(context: ParallelContext) -> None:
    """Refuse tensor modes that a plan cannot serve."""
    tensor: Any = (context.config.get("parallel") or {}).get("tensor")
    mode = tensor.get("mode") if hasattr(tensor, "get") else None
    if context.tensor_parallel_size > 1 and str(mode or "").lower() != "1d":
        raise ConfigError(
            f"parallel.tensor.mode={mode!r}: a plan cuts layers for mode '1d'; write tensor=dict(size="
            f"{context.tensor_parallel_size}, mode='1d'). Modes 2d, 2.5d and 3d need the layers of colonnade.nn",
            code="C060",
        )


def check_entries(entries: Mapping[str, PlanEntry], model: nn.Module, context: ParallelContext) -> None:
    """Refuse, with all that is wrong in one message, entries that cannot be right."""
    for name, entry in entries.items():
        check_said(name, entry)
    named = {name: entry for name, entry in entries.items() if entry.style is not None}
    cuts = {name: str(entry.style) for name, entry in named.items() if size_of(STYLES[entry.style][1], context) > 1}
    layers = [
        two_styles(entries, model),
        weights_alone(cuts, _DIM_OF_WEIGHT, model),
        unfit_layers(cuts, _DIM_OF_WEIGHT, model),
        undivided(entries, model, context.tensor_parallel_size),
    ]
    problems = [problem for found in layers for problem in found]
    if not problems:
        problems = [*_inside_attention(cuts, model), *_partners(cuts, model), *_summed_twice(cuts, model)]
    if not problems and context.tensor_parallel_size > 1:
        problems += _heads(cuts, entries, model, context.tensor_parallel_size)
    if problems:
        lines = "\n  ".join(dict.fromkeys(problems[:12]))
        raise PlacementError(f"the plan cannot be right:\n  {lines}", code="C060")


def with_ties(entries: dict[str, PlanEntry], model: nn.Module) -> dict[str, PlanEntry]:
    """The entries, and one for each layer that shares its weight with a layer that is cut and that no pattern names.

    An embedding whose weight is that of an output layer is cut as that is: by vocabulary (`embedding_rowwise`) if the
    output layer is `colwise`, and the other way round. A tie that cannot be kept so is refused, never cut.
    """
    owners: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    found = dict(entries)
    for names in owners.values():
        modules = {name: name.rpartition(".")[0] for name in names}
        dims = {name: dim for name in names if (dim := _dim_of(name, found, model)) is not None}
        named = [model.get_submodule(modules[name]) for name in dims]
        for name in (name for name in names if dims and name not in dims):
            first, dim = next(iter(dims.items()))
            module = model.get_submodule(modules[name])
            if any(module is other for other in named):
                continue  # the same layer by another name
            style = _style_for(module, dim)
            if style is None or modules[name] in found or name in found:
                raise PlacementError(
                    f"{first!r} and {name!r} are one parameter, and the plan cuts the first alone, so the tie would be cut. "
                    f"Name {modules[name]!r}, a {type(module).__name__}, with a style that cuts it along dimension {dim} too, "
                    f"leave both out of the plan, or untie them before",
                    code="C060",
                )
            found[modules[name]] = PlanEntry(f"the tie of {first}", style, {})
    return found


def _dim_of(name: str, entries: Mapping[str, PlanEntry], model: nn.Module) -> int | None:
    """The dimension along which a parameter is cut; None if it is not."""
    owner, _, last = name.rpartition(".")
    entry = entries.get(name) or entries.get(owner)
    if entry is None or entry.style not in _DIM_OF_WEIGHT:
        return None
    dim = _DIM_OF_WEIGHT[entry.style]
    module = model.get_submodule(owner)
    if last == "bias":
        return 0 if dim == 0 else None
    # Torch's words for embeddings are of the weight's rows and columns as they lie in memory.
    swapped = isinstance(module, nn.Embedding) and entry.style in ("colwise", "rowwise")
    return 1 - dim if swapped or type(module).__name__ == "Conv1D" else dim


def _style_for(module: nn.Module, dim: int) -> str | None:
    if isinstance(module, nn.Embedding):
        return ("embedding_rowwise", "embedding_colwise")[dim]
    return ("colwise_gather_output", "rowwise_split_input")[dim] if isinstance(module, nn.Linear) else None


def _inside_attention(cuts: Mapping[str, str], model: nn.Module) -> Iterator[str]:
    for name in cuts:
        for owner in around(name):
            if isinstance(model.get_submodule(owner), nn.MultiheadAttention):
                yield (
                    f"{name!r} is inside {owner!r}, an nn.MultiheadAttention, which computes with the weights of its children "
                    f"itself; use colonnade.nn.layer.SelfAttention.from_module, or an attention of nn.Linear layers"
                )


def _partners(cuts: Mapping[str, str], model: nn.Module) -> Iterator[str]:
    """Layers that give parts which none takes, and that take parts which none gives, as far as names can tell.

    We look for a partner in the module around a layer, and further out only as long as the plan names every linear layer
    inside: the attention of some models has its last layer one module further out.
    """
    linear = [name for name, module in model.named_modules(remove_duplicate=False) if is_linear(module)]
    left = [name for name in linear if name not in cuts]
    beside_left = {each for name in left for each in around(name)}
    for mine, theirs in ((_GIVES_PARTS, _TAKES_PARTS), (_TAKES_PARTS, _GIVES_PARTS)):
        beside_partners = {each for name, style in cuts.items() if style in theirs for each in around(name)}
        lonely: dict[str, str] = {}
        for name in (name for name in linear if cuts.get(name) in mine):
            near = next(each for each in around(name) if each in beside_partners or each in beside_left or not each)
            if near not in beside_partners:
                lonely.setdefault(near, name)
        gives = mine is _GIVES_PARTS
        for near, name in lonely.items():
            others = [repr(other) for other in left if _is_inside(other, near)]
            yield (
                f"{name!r} is {cuts[name]!r}, but no layer of {near or 'the model'!r} is {theirs[0]!r}: nothing "
                f"{'takes its part of the features' if gives else 'gives it features in parts'}"
                f"{f' (not in the plan: {listed(others[:6])})' if others else ''}. Give its partner the style {theirs[0]!r}, or "
                f"this layer {'colwise_gather_output' if gives else 'rowwise_split_input'!r}"
            )


def _summed_twice(cuts: Mapping[str, str], model: nn.Module) -> Iterator[str]:
    for name in (name for name, style in cuts.items() if style == "all_reduce"):
        inner = next((n for n in cuts if _is_inside(n, name) and _module_at(n, model) is not None), None)
        if inner is not None:
            yield (
                f"{name!r} is 'all_reduce', which is for a module that computes with cut parameters of its own, but the plan cuts "
                f"the layer {inner!r} inside it, which sums for itself; leave {name!r} out of the plan"
            )


def _heads(cuts: Mapping[str, str], entries: Mapping[str, PlanEntry], model: nn.Module, ranks: int) -> Iterator[str]:
    """Heads that the ranks do not divide: features may be divisible where heads are not."""
    for name in (name for name, style in cuts.items() if style in _GIVES_PARTS):
        owner = name.rpartition(".")[0]
        module, around = _module_at(name, model), model.get_submodule(owner) if owner else model
        if module is None:
            continue
        size = next((getattr(around, key) for key in _HEAD_SIZES if isinstance(getattr(around, key, None), int)), None)
        width = module.weight.shape[1 if type(module).__name__ == "Conv1D" else 0]
        sections = entries[name].options.get("sections", 1)
        for length in sections if not isinstance(sections, int) else (width // sections,):
            if size and length % size == 0 and length // size % ranks:
                yield (
                    f"{name!r} has {length // size} heads of {size} features, which tensor size {ranks} does not divide; choose "
                    f"a tensor size that does, or leave the attention out of the plan"
                )
        for key in (key for key in _HEAD_COUNTS if isinstance(getattr(around, key, None), int)):
            if getattr(around, key) % ranks:
                yield (
                    f"{owner!r} has {key}={getattr(around, key)}, which tensor size {ranks} does not divide; choose a tensor "
                    f"size that does, or leave the attention out of the plan"
                )


def _module_at(name: str, model: nn.Module) -> Any:
    """The linear layer of this name; None where the name is that of a parameter or of another module."""
    owner, _, last = name.rpartition(".")
    module = (model.get_submodule(owner) if owner else model)._modules.get(last)
    return module if module is not None and is_linear(module) else None


def _is_inside(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


# --- One entry, and the layer that it names ---


def check_said(name: str, entry: PlanEntry) -> None:
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


def two_styles(entries: Mapping[str, PlanEntry], model: nn.Module) -> Iterator[str]:
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


def undivided(entries: Mapping[str, PlanEntry], model: nn.Module, ranks: int) -> Iterator[str]:
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

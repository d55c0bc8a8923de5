"""Checks of a TP plan: of its entries before any layer is sharded, and of the sharded forward pass, compared with the
full model.

`parallelize` calls `check_mode`, then `with_ties`, which adds the entries that weight ties need, then `check_entries`.
The generators below `check_entries` yield one sentence per problem; all problems go into one error.

Names do not show every mistake. An operator without weights that mixes sharded features (a softmax over them), or a
layer with the wrong `sections`, raises nothing and computes wrong numbers. `record_unsharded` runs the full model and
returns a function that compares the sharded one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from colonnade.comm.messages import agreed_errors
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, PlacementError, did_you_mean, listed
from colonnade.hf.plans import PlanEntry, place_of
from colonnade.hf.styles import OPTIONS, STYLES, style_of
from colonnade.logging import get_dist_logger
from colonnade.nn.layer.spread import size_of
from colonnade.parallel.own_forward import result_of
from colonnade.parallel.placement import placement_of
from colonnade.parallel.split import call_layer, cloned, evaluating

_SHARDED_OUTPUT = ("colwise", "packed_colwise")
_SHARDED_INPUT = ("rowwise", "packed_rowwise")
_WEIGHT_DIM = {
    **dict.fromkeys(("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"), 0),
    **dict.fromkeys(("rowwise", "packed_rowwise", "rowwise_split_input", "rowwise_rep"), 1),
    "embedding_rowwise": 0,
    "embedding_colwise": 1,
}
"""The dimension of a weight, [out, in] or [words, features], that each style shards."""
_HEAD_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_SAME_FORWARD = ("FalconLinear",)
"""Subclasses of nn.Linear that override forward() with the same computation."""


def check_mode(context: ParallelContext) -> None:
    """Raise for tensor modes other than 1d, because TP plans are column and row parallelism."""
    tensor: Any = (context.config.get("parallel") or {}).get("tensor")
    mode = tensor.get("mode") if hasattr(tensor, "get") else None
    if context.tensor_parallel_size > 1 and str(mode or "").lower() != "1d":
        raise ConfigError(
            f"parallel.tensor.mode is {mode!r}, but a TP plan requires mode '1d'. Write "
            f"tensor=dict(size={context.tensor_parallel_size}, mode='1d'). Modes 2d, 2.5d and 3d require the layers "
            "of colonnade.nn.",
            code="C060",
        )


def check_entries(entries: Mapping[str, PlanEntry], model: nn.Module, context: ParallelContext) -> None:
    """Raise one error with all problems of the entries.

    Raises:
        PlacementError: A style or an option is unknown, or the entries cannot give a correct model.
    """
    for name, entry in entries.items():
        _check_entry(name, entry)
    named = {name: entry for name, entry in entries.items() if entry.style is not None}
    styles = {name: str(entry.style) for name, entry in named.items() if size_of(STYLES[entry.style][1], context) > 1}
    checks = [
        _conflicting_names(entries, model),
        _bare_weights(styles, model),
        _unfit_layers(styles, model),
        _indivisible_attributes(entries, model, context.tensor_parallel_size),
    ]
    problems = [problem for found in checks for problem in found]
    # The following checks read layers in relation to each other, and would repeat a problem of a single layer in other words.
    if not problems:
        problems = [
            *_inside_attention(styles, model),
            *_missing_partners(styles, model),
            *_reduced_twice(styles, model),
        ]
    if not problems and context.tensor_parallel_size > 1:
        problems += _indivisible_heads(styles, entries, model, context.tensor_parallel_size)
    if problems:
        lines = "\n  ".join(dict.fromkeys(problems[:12]))
        raise PlacementError(f"the TP plan is wrong for this model:\n  {lines}", code="C060")


def with_ties(entries: dict[str, PlanEntry], model: nn.Module) -> dict[str, PlanEntry]:
    """Add an entry for each layer that no pattern matches and that shares its weight with a sharded layer.

    An embedding tied to an output layer is sharded like it: by vocabulary (`embedding_rowwise`) if the output layer is
    `colwise`, by features if it is `rowwise`. The weight stays one parameter; a tie that cannot be kept raises.
    """
    owners: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    found = dict(entries)
    for names in owners.values():
        owners_of = {name: name.rpartition(".")[0] for name in names}
        dims = {name: dim for name in names if (dim := _sharded_dim(name, found, model)) is not None}
        matched = [model.get_submodule(owners_of[name]) for name in dims]
        for name in (name for name in names if dims and name not in dims):
            first, dim = next(iter(dims.items()))
            module = model.get_submodule(owners_of[name])
            if any(module is other for other in matched):
                continue  # the same layer under another name
            style = None
            if isinstance(module, nn.Embedding):
                style = ("embedding_rowwise", "embedding_colwise")[dim]
            elif isinstance(module, nn.Linear):
                style = ("colwise_gather_output", "rowwise_split_input")[dim]
            if style is None or owners_of[name] in found or name in found:
                raise PlacementError(
                    f"{first!r} and {name!r} are one tied parameter, but the TP plan shards only the first, which "
                    f"would untie the two. There are three remedies. 1. Give {owners_of[name]!r}, a "
                    f"{type(module).__name__}, a style that also shards it along dimension {dim}. 2. Leave both out "
                    "of the TP plan. 3. Untie them before parallelize().",
                    code="C060",
                )
            found[owners_of[name]] = PlanEntry(f"the tie of {first}", style, {})
    return found


def _sharded_dim(name: str, entries: Mapping[str, PlanEntry], model: nn.Module) -> int | None:
    """The dimension along which the entries shard a parameter; None if they do not."""
    owner, _, last = name.rpartition(".")
    entry = entries.get(name) or entries.get(owner)
    if entry is None or entry.style not in _WEIGHT_DIM:
        return None
    dim = _WEIGHT_DIM[entry.style]
    module = model.get_submodule(owner)
    if last == "bias":
        return 0 if dim == 0 else None
    # For embeddings, torch's "colwise" and "rowwise" mean columns and rows of the stored weight, [words, features].
    swapped = isinstance(module, nn.Embedding) and entry.style in ("colwise", "rowwise")
    return 1 - dim if swapped or type(module).__name__ == "Conv1D" else dim


# --- Single entries ---


def _check_entry(name: str, entry: PlanEntry) -> None:
    """Raise for an unknown style, an unknown option, or a value of the wrong type."""
    if entry.style is not None:
        style_of(entry.style, name)
    known = ("divide", *OPTIONS.get(entry.style, ()))
    for key, value in entry.options.items():
        if key not in known:
            raise PlacementError(
                f"the TP plan gives {name!r} the unknown option {key!r}. The options of "
                f"{repr(entry.style) if entry.style else 'an entry without a style'} are "
                f"{listed(map(repr, known))}.{did_you_mean(key, ('style', *known))}",
                code="C060",
            )
        if key == "sections":
            lengths = value if isinstance(value, (tuple, list)) else [value]
            if not lengths or not all(type(length) is int and length > 0 for length in lengths):
                raise PlacementError(
                    f"the TP plan gives {name!r} sections={value!r}. Pass the number of equal sections, or a list of "
                    "their lengths. Each must be 1 or larger.",
                    code="C060",
                )
        if key in ("divide", "inputs") and isinstance(value, str):
            raise PlacementError(
                f"the TP plan gives {name!r} {key}={value!r}, which is a single name. Pass a list: {[value]}",
                code="C060",
            )


def _conflicting_names(entries: Mapping[str, PlanEntry], model: nn.Module) -> Iterator[str]:
    """Modules and parameters with several names whose entries differ."""
    first: dict[Any, str] = {}
    for name in entries:
        other = first.setdefault(place_of(name, model), name)
        pair = [(entries[key].style, dict(entries[key].options)) for key in (other, name)]
        if pair[0] != pair[1]:
            styles = [f"{style!r}{f' with {options}' if options else ''}" for style, options in pair]
            yield (
                f"{other!r} and {name!r} are one module, but the TP plan gives the first {styles[0]} and the "
                f"second {styles[1]}. Give both the same style, or name only one of them"
            )


def _bare_weights(styles: Mapping[str, str], model: nn.Module) -> Iterator[str]:
    """Sharded parameters of a layer whose forward pass would take the shard for the full parameter."""
    for name in (name for name, style in styles.items() if style in _WEIGHT_DIM):
        owner, _, last = name.rpartition(".")
        layer = model.get_submodule(owner)
        # A style of the layer or of a module around it (`all_reduce`) reduces the partial results.
        is_reduced = any(path in styles for path in [owner, *_ancestors(owner)])
        by_vocabulary = isinstance(layer, nn.Embedding) and _WEIGHT_DIM[styles[name]] == 0
        if (_is_linear(layer) or by_vocabulary) and last in layer._parameters and not is_reduced:
            yield (
                f"{name!r} is a parameter of the {type(layer).__name__} {owner!r}. This layer would compute with "
                f"the shard as if the shard were the full parameter. Name {owner!r} in the TP plan instead; this "
                "shards all parameters of the layer"
            )


def _indivisible_attributes(entries: Mapping[str, PlanEntry], model: nn.Module, ranks: int) -> Iterator[str]:
    """Attributes under "divide" that are not multiples of the tensor size."""
    for name, entry in entries.items():
        for attribute in entry.options.get("divide", ()):
            size = getattr(place_of(name, model)[0], attribute, None)
            if not isinstance(size, int) or size % ranks:
                yield f"{name!r}: the attribute {attribute!r} is {size!r}, which the tensor size {ranks} does not divide"


def _unfit_layers(styles: Mapping[str, str], model: nn.Module) -> Iterator[str]:
    """Layers that cannot be sharded: computed, lazy, quantized or already sharded weights, or a custom forward pass."""
    for name in (name for name, style in styles.items() if style in _WEIGHT_DIM):
        layer, parameter = place_of(name, model)
        if parameter is not None:
            continue
        if hasattr(layer, "original_module") and hasattr(layer, "adapter_layer_names"):
            yield (
                f"{name!r} is trained in full next to the adapters (modules_to_save or trainable_token_indices "
                "of peft), but the TP plan shards it. Name it in target_modules, because adapters are sharded "
                "with their layer. Or train without tensor parallelism"
            )
        if not _is_linear(layer) and not isinstance(layer, nn.Embedding):
            continue
        weight: Any = layer._parameters.get("weight")
        computed = [key for key in ("weight", "bias") if key not in layer._parameters and hasattr(layer, key)]
        if computed:
            yield (
                f"{name!r} cannot be sharded, because its {computed[0]!r} is not a parameter but is computed "
                "(weight_norm, spectral_norm, pruning or another parametrization). Remove the parametrization "
                "before parallelize, or leave the layer out of the TP plan"
            )
        elif is_lazy(weight):
            yield f"{name!r} is a lazy layer, so its sizes are not known yet. Run the model once before parallelize"
        elif not weight.is_floating_point():
            yield (
                f"{name!r} cannot be sharded, because its 'weight' has dtype {weight.dtype}, as in quantized "
                "layers. Load the original weights"
            )
        elif placement_of(weight).shards:
            yield (
                f"{name!r} is already sharded ({placement_of(weight)}), and a model can be sharded only once. Call "
                "parallelize once"
            )
        elif isinstance(layer, nn.Linear) and (
            (type(layer).forward is not nn.Linear.forward and type(layer).__name__ not in _SAME_FORWARD)
            or "forward" in vars(layer)
        ):
            yield (
                f"{name!r} is a {type(layer).__name__} with a custom forward pass, but sharding runs the forward "
                "pass of nn.Linear. Move everything except the matrix product into a module around this layer, "
                "or leave the layer out of the TP plan"
            )


# --- Entries in relation to each other ---


def _inside_attention(styles: Mapping[str, str], model: nn.Module) -> Iterator[str]:
    for name in styles:
        for owner in _ancestors(name):
            if isinstance(model.get_submodule(owner), nn.MultiheadAttention):
                yield (
                    f"{name!r} is inside {owner!r}, an nn.MultiheadAttention, which reads the weights of its "
                    "children instead of calling them. Use colonnade.nn.layer.SelfAttention.from_module, or an "
                    "attention made of nn.Linear layers"
                )


def _missing_partners(styles: Mapping[str, str], model: nn.Module) -> Iterator[str]:
    """Layers with a sharded output that no layer takes, and layers that need a sharded input that no layer produces.

    The partner is searched in the module around a layer, and further out only while the TP plan names every linear layer
    inside: in some models the last layer of attention is one module further out.
    """
    linear = [name for name, module in model.named_modules(remove_duplicate=False) if _is_linear(module)]
    unnamed = [name for name in linear if name not in styles]
    around_unnamed = {path for name in unnamed for path in _ancestors(name)}
    for kind, partner in ((_SHARDED_OUTPUT, _SHARDED_INPUT), (_SHARDED_INPUT, _SHARDED_OUTPUT)):
        around_partners = {path for name, style in styles.items() if style in partner for path in _ancestors(name)}
        # Per module, one layer without a partner: its neighbours have the same problem.
        unpaired: dict[str, str] = {}
        for name in (name for name in linear if styles.get(name) in kind):
            near = next(
                path for path in _ancestors(name) if path in around_partners or path in around_unnamed or not path
            )
            if near not in around_partners:
                unpaired.setdefault(near, name)
        for near, name in unpaired.items():
            others = [repr(other) for other in unnamed if _is_inside(other, near)]
            is_output = kind is _SHARDED_OUTPUT
            yield (
                f"{name!r} is {styles[name]!r}, but no layer of {near or 'the model'!r} is {partner[0]!r}: no layer "
                f"{'takes its sharded output' if is_output else 'produces its sharded input'}"
                f"{f' (not in the TP plan: {listed(others[:6])})' if others else ''}. Give its partner the style "
                f"{partner[0]!r}, or this layer {'colwise_gather_output' if is_output else 'rowwise_split_input'!r}"
            )


def _reduced_twice(styles: Mapping[str, str], model: nn.Module) -> Iterator[str]:
    for name in (name for name, style in styles.items() if style == "all_reduce"):
        inner = next((n for n in styles if _is_inside(n, name) and _linear_at(n, model) is not None), None)
        if inner is not None:
            yield (
                f"{name!r} has the style 'all_reduce', but the TP plan also shards the layer {inner!r} inside "
                f"it, and {inner!r} already reduces its own output. The style 'all_reduce' is for a module that "
                f"computes with its own sharded parameters. Leave {name!r} out of the TP plan"
            )


def _indivisible_heads(
    styles: Mapping[str, str], entries: Mapping[str, PlanEntry], model: nn.Module, ranks: int
) -> Iterator[str]:
    """Heads that the tensor size does not divide, although it may divide the features."""
    for name in (name for name, style in styles.items() if style in _SHARDED_OUTPUT):
        layer = _linear_at(name, model)
        if layer is None:
            continue
        owner = name.rpartition(".")[0]
        attention = model.get_submodule(owner) if owner else model
        size = next(
            (getattr(attention, key) for key in _HEAD_SIZES if isinstance(getattr(attention, key, None), int)), None
        )
        width = layer.weight.shape[1 if type(layer).__name__ == "Conv1D" else 0]
        sections = entries[name].options.get("sections", 1)
        for length in sections if not isinstance(sections, int) else (width // sections,):
            if size and length % size == 0 and length // size % ranks:
                yield (
                    f"{name!r} has {length // size} heads of {size} features, but tensor size {ranks} does not "
                    "divide the number of heads. Choose a tensor size that divides it, or leave the attention "
                    "out of the TP plan"
                )
        for key in (key for key in _HEAD_COUNTS if isinstance(getattr(attention, key, None), int)):
            if getattr(attention, key) % ranks:
                yield (
                    f"{owner!r} has {key}={getattr(attention, key)}, but tensor size {ranks} does not divide "
                    "this number. Choose a tensor size that divides it, or leave the attention out of the TP plan"
                )


def _linear_at(name: str, model: nn.Module) -> Any:
    """The linear layer of this name; None if the name is that of a parameter or of another module."""
    owner, _, last = name.rpartition(".")
    module = (model.get_submodule(owner) if owner else model)._modules.get(last)
    return module if module is not None and _is_linear(module) else None


def _is_linear(module: nn.Module) -> bool:
    """Whether styles for linear layers apply to the module."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _is_inside(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _ancestors(name: str) -> Iterator[str]:
    """The modules around a module or parameter, from the nearest to the model itself ("")."""
    while name:
        name = name.rpartition(".")[0]
        yield name


_NOT_COMPARED = ("colwise", "packed_colwise", "moe_identity_expert")
"""Styles whose output is a shard: it has nothing to be compared with, so only later layers are compared."""

Outputs = list[tuple[str, Tensor]]
"""(name, output) of layers in the order of their calls; the output of the model has the name ""."""


def record_unsharded(
    model: nn.Module, entries: Mapping[str, PlanEntry], sample: Any, context: ParallelContext
) -> Callable[[Sequence[nn.Module]], None]:
    """Run the full model on the sample.

    Returns a function that runs the sharded stages and compares their outputs with those of the full model.

    The returned function does nothing without a sample, if no layer is sharded, or if the model cannot run here (meta
    device, another device, a split sequence). Otherwise it is collective over the world.
    """
    names = [name for name, entry in entries.items() if entry.style is not None and entry.style not in _NOT_COMPARED]
    is_sharded = size_of(ParallelMode.TENSOR, context) > 1 or size_of(ParallelMode.EXPERT, context) > 1
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    if sample is None or not is_sharded or is_meta or size_of(ParallelMode.SEQUENCE, context) > 1:
        return lambda stages: None
    if any(parameter.device.type != context.device.type for parameter in model.parameters()):
        get_dist_logger().warning(f"sample= is not compared, because the model is not on {context.device}", ranks=[0])
        return lambda stages: None
    expected = _outputs([model], names, sample)

    def compare(stages: Sequence[nn.Module]) -> None:
        found = _outputs(stages, names, sample)
        with agreed_errors(context.device):
            last_equal = "the start"
            for (name, reference), (other, value) in zip(expected, found, strict=False):
                # With `sequence_split` outputs between blocks have another shape; the layers that gather them are compared.
                if name != other or reference.shape != value.shape or not reference.is_floating_point():
                    continue
                finite = reference[reference.isfinite()]
                size = finite.abs().max() if len(finite) else reference.new_zeros(())
                # Half of the digits: sums in another order differ less, wrong features differ more.
                tolerance = float(size * torch.finfo(reference.dtype).eps ** 0.5)
                if not torch.allclose(value, reference, rtol=0.0, atol=tolerance, equal_nan=True):
                    raise PlacementError(
                        f"with this TP plan the output of {repr(name) if name else 'the model'} for the sample differs from "
                        f"that in the full model (by {float((value - reference).abs().max()):.3g}, values up to "
                        f"{float(size):.3g}); up to {last_equal} outputs are equal. An operation in between treats sharded "
                        f"features as all features: around a softmax or a norm over features use 'colwise_gather_output' and "
                        f"'rowwise_split_input'; if the output of a layer is divided (chunk, split), use "
                        f"'packed_colwise' with its 'sections'",
                        code="C060",
                    )
                last_equal = repr(name)

    return compare


def _outputs(stages: Sequence[nn.Module], names: Sequence[str], sample: Any) -> Outputs:
    """Outputs of the named layers, and of the last stage, in one forward pass in eval mode."""
    found: Outputs = []
    # By module: a module with several names, or on several stages, gets one hook.
    modules = {module: name for stage in stages for name, module in stage.named_modules() if name in names}

    def record(name: str) -> Any:
        return lambda module, args, output: found.extend(
            (name, leaf.detach().clone()) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)
        )

    with ExitStack() as cleanup, torch.random.fork_rng(), torch.no_grad(), evaluating(*stages):
        for module, name in modules.items():
            cleanup.callback(module.register_forward_hook(record(name)).remove)
        result = cloned(sample)
        for at, stage in enumerate(stages):
            result = call_layer(stage, result, at > 0 and getattr(stage, "takes_one_value", False))
        logits = result_of(result)
        logits = logits["logits"] if isinstance(logits, dict) and "logits" in logits else logits
        found += [("", leaf) for leaf in tree_leaves(logits) if isinstance(leaf, Tensor)]
    return found

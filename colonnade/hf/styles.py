"""The styles of a TP plan: Megatron-style column and row parallelism (Shoeybi et al. 2019), applied to existing layers.

A style shards the parameters of a layer and replaces its forward pass. Between blocks, activations are replicated over the
tensor group (or, with `sequence_split`, Megatron's sequence parallelism, sharded along the sequence); from a `colwise` layer
to its `rowwise` partner they are sharded along the features. Names and meanings are those of transformers' TP plans.

The second half has the styles for experts in stacked parameters (dimension 0 is the expert) that are called with the choices of a
router. The module's own forward pass still computes the experts, with whatever gates and activations it has: on this rank's shard
of each expert (tensor parallelism), on the tokens routed to this rank's experts (expert parallelism), or both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError, PlacementError, did_you_mean, listed
from colonnade.hf.plans import Target
from colonnade.nn.layer.arrangement import Arrangement, Split, arrange
from colonnade.nn.layer.linear import own
from colonnade.nn.layer.spread import Spread, Width, check_input, gather, mark_output, respread, shard_sizes
from colonnade.nn.moe.dispatch import Scope, Traffic, counted, exchange, order
from colonnade.parallel import collectives
from colonnade.parallel.collectives import all_to_all, copy, reduce, scatter, split_sizes
from colonnade.parallel.flat import section_runs
from colonnade.parallel.forward import override_forward
from colonnade.parallel.meta import keep_initial_value
from colonnade.parallel.placement import Replicate, Shard, Spec, place, placement_of

# --- The two effects of a style on a module: parameters become shards, and the forward pass is replaced ---


def shard_parameter(
    target: Target,
    name: str,
    dim: int,
    *,
    mode: ParallelMode = ParallelMode.TENSOR,
    sections: Sequence[int] = (),
    uneven: bool = False,
) -> nn.Parameter:
    """Replace the parameter `name` of the target's module by this rank's shard along `dim`, with its placement.

    Args:
        target: The module, its context, and the shards that exist already.
        name: The parameter's name in the module.
        dim: The dimension to shard.
        mode: The mode to shard over. A parameter sharded over another mode along another dimension is sharded further.
        sections: Lengths of weights packed along `dim`; the shard has its slice of each.
        uneven: Whether shards may differ in length.

    Two layers that share a parameter get the same shard, and raise if their styles shard it differently.
    """
    full: Any = getattr(target.module, name)
    shard = target.shards.get(full)
    spec = Shard(dim % full.dim(), sections=tuple(sections) if len(sections) > 1 else ())
    if shard is not None:
        if placement_of(shard).shards != {mode: spec}:
            raise PlacementError(
                f"{target.name!r} shares {name!r} with another layer, but the TP plan shards the two layers "
                f"differently. The other layer has {placement_of(shard)}, and this layer has {spec} on {mode}. Give "
                "both layers the same sharding, or untie them before parallelize().",
                code="C060",
            )
        setattr(target.module, name, shard)
        return shard
    before = placement_of(full)
    if mode in before.modes or any(existing.dim == spec.dim for existing in before.shards.values()):
        raise PlacementError(
            f"the TP plan shards {target.name!r}, but its {name!r} is already placed ({before}). Let only one "
            "pattern match it, and call parallelize only once for a model.",
            code="C060",
        )
    ranks, at = target.context.get_world_size(mode), target.context.get_local_rank(mode)
    length = full.shape[spec.dim]
    if uneven and length >= ranks:
        sizes = split_sizes(length, mode, context=target.context)
        values = full.detach().narrow(spec.dim, sum(sizes[:at]), sizes[at])
    else:
        lengths = spec.sections or (length,)
        if any(section % ranks for section in lengths):
            raise PlacementError(
                f"{target.name!r} has {listed(lengths)} features (dimension {spec.dim} of {name!r}, shape "
                f"{tuple(full.shape)}), which cannot be sharded evenly over the {ranks} ranks of {mode}. Choose a "
                f"size that {ranks} divides, choose another tensor size, or leave the layer out of the TP plan.",
                code="C032",
            )
        blocks = [full.detach().narrow(spec.dim, *run) for run in section_runs(lengths, at, ranks)]
        values = blocks[0] if len(blocks) == 1 else torch.cat(blocks, spec.dim)
    shard = own(values, {mode: spec, **before.modes}, before.shape or tuple(full.shape), full)
    keep_initial_value(shard, full)
    target.shards[full] = shard
    setattr(target.module, name, shard)
    return shard


def replicate(target: Target, name: str, partial_gradient: bool) -> None:
    """Place a parameter as replicated over the tensor group. With `partial_gradient`, its gradient needs an all-reduce."""
    spec: Spec = Replicate(owes="sum") if partial_gradient else Replicate()
    parameter: Any = getattr(target.module, name)
    before = placement_of(parameter)
    if before.shards:
        raise PlacementError(
            f"the TP plan replicates {target.name!r}, but shards the {name!r} of this layer under another name: "
            f"{before}. Give both names the same style.",
            code="C060",
        )
    place(parameter, {**before.modes, ParallelMode.TENSOR: spec}, before.shape)


def set_forward(target: Target, forward: Callable[..., Any], here: Arrangement | None = None) -> None:
    """Replace the forward pass of the target's module by `forward(module, previous_forward, *args, **kwargs)`."""
    if here is not None:
        target.module.arrangement = here  # type: ignore[assignment]
    override_forward(target.module, forward)


def sections_of(target: Target, length: int, default: int = 1) -> tuple[int, ...]:
    """Return the lengths of the weights packed along a dimension: the entry's `sections`, else `default` equal ones."""
    wanted = target.options.get("sections", default)
    found = (length // wanted,) * wanted if isinstance(wanted, int) and length % wanted == 0 else wanted
    if isinstance(found, int) or sum(found) != length:
        raise PlacementError(
            f"{target.name!r} has {length} features, but sections={wanted} of the TP plan do not add up to {length}. "
            f"Give 'sections' as a number that divides {length}, or as a list of lengths with the sum {length}.",
            code="C060",
        )
    return tuple(found)


Style = Callable[[Target], None]

_TENSOR = ParallelMode.TENSOR

STYLES: dict[str, tuple[Style, ParallelMode]] = {}
"""Styles by name, each with the mode that it shards over; with one rank there, the style is not applied."""

OPTIONS: dict[str, tuple[str, ...]] = {}
"""The options of each style, in addition to "divide", which any entry may have."""

_PACKED = ("sections", "sequence")


def style(*names: str, mode: ParallelMode = _TENSOR, options: tuple[str, ...] = ()) -> Callable[[Style], Style]:
    """Register a style under these names, with the options that it reads."""

    def register(function: Style) -> Style:
        STYLES.update(dict.fromkeys(names, (function, mode)))
        OPTIONS.update(dict.fromkeys(names, options))
        return function

    return register


def style_of(name: Any, where: str) -> tuple[Style, ParallelMode]:
    """Return the style with this name, and its mode; raises for an unknown name."""
    if not isinstance(name, str) or name not in STYLES:
        raise PlacementError(
            f"the TP plan gives {where!r} the unknown style {name!r}. Allowed styles are "
            f"{listed(sorted(STYLES))}.{did_you_mean(str(name), STYLES)}",
            code="C060",
        )
    return STYLES[name]


# -- linear layers ----------------------------------------------------------------------------------------


@style("colwise", options=_PACKED)
def colwise(target: Target) -> None:
    """Shard the output features of a linear layer. The input is replicated, the output is sharded for a `rowwise` layer."""
    if target.parameter is not None:
        _shard_features(target, -2)
    elif isinstance(target.module, nn.Embedding):
        _shard_vectors(target, gather_output=False)
    else:
        _linear(target, "column")


@style("colwise_gather_output", "colwise_rep", options=_PACKED)
def colwise_gather_output(target: Target) -> None:
    """`colwise` with an all-gather of the output, whose features may be sharded unevenly (a vocabulary)."""
    if target.parameter is not None:
        colwise(target)
    else:
        _linear(target, "column", replicated=True)


@style("packed_colwise", options=_PACKED)
def packed_colwise(target: Target) -> None:
    """`colwise` for several weights packed along the output features: two of equal size, or with the lengths `sections`.

    Each of the weights is sharded.
    """
    if target.parameter is not None:
        _shard_features(target, -2, packed=2)
    else:
        _linear(target, "column", packed=2)


@style("rowwise", options=_PACKED)
def rowwise(target: Target) -> None:
    """Shard the input features of a linear layer. The input is that of a `colwise` layer; the output is all-reduced."""
    if target.parameter is not None:
        _shard_features(target, -1)
    elif isinstance(target.module, nn.Embedding):
        embedding_rowwise(target)
    else:
        _linear(target, "row")


@style("rowwise_split_input", "rowwise_rep", options=_PACKED)
def rowwise_split_input(target: Target) -> None:
    """`rowwise` for a replicated input, from which each rank takes its features."""
    if target.parameter is not None:
        rowwise(target)
    else:
        _linear(target, "row", replicated=True)


@style("packed_rowwise", options=_PACKED)
def packed_rowwise(target: Target) -> None:
    """`rowwise` for several weights packed along the input features: two of equal size, or with the lengths `sections`.

    Each of the weights is sharded.
    """
    if target.parameter is not None:
        _shard_features(target, -1, packed=2)
    else:
        _linear(target, "row", packed=2)


def _linear(target: Target, split: Split, replicated: bool = False, packed: int = 1) -> None:
    """Shard a linear layer.

    `replicated`: the features that the layer shards (output of a column, input of a row) are full outside of the layer.
    """
    module: Any = target.module
    here = target.arrangement
    transposed = type(module).__name__ == "Conv1D"
    if not transposed and not isinstance(module, nn.Linear):
        raise PlacementError(
            f"{target.name!r} is a {type(module).__name__}, but the TP plan gives it a style for nn.Linear. Name an "
            "nn.Linear inside it, or one of its parameters.",
            code="C060",
        )
    inputs, outputs = module.weight.shape if transposed else reversed(module.weight.shape)
    features = outputs if split == "column" else inputs
    # A vocabulary need not be a multiple of the tensor size; it is gathered at once, so no other layer sees uneven shards.
    uneven = replicated and split == "column"
    sections = sections_of(target, features, packed)
    dim = 1 if transposed == (split == "column") else 0
    shard_parameter(target, "weight", dim, sections=sections, uneven=uneven)
    if split == "column" and module.bias is not None:
        shard_parameter(target, "bias", 0, sections=sections, uneven=uneven)
    elif module.bias is not None and here.sequence_split:
        # Each rank adds the bias to its own tokens only, so its gradient there is partial.
        replicate(target, "bias", partial_gradient=True)
    width = Width(features, uneven=uneven)
    if isinstance(target.parent, nn.TransformerEncoderLayer):
        # In eval mode torch's fused kernel would bypass this forward pass and take the shards for full weights.
        target.parent.activation_relu_or_gelu = 0

    def forward(self: Any, before: Any, x: Tensor) -> Tensor:
        weight = self.weight.t() if transposed else self.weight
        if split == "row":
            check_input(self, here, x, "outer" if replicated else "inner", inputs)
            x = respread(x, here.outer, here.inner, here.context, width) if replicated else x
            return mark_output(self, here, here.linear(x, weight, self.bias, split), here.outer)
        check_input(self, here, x, "outer", inputs)
        y = here.linear(x, weight, self.bias, split)
        if replicated:
            return mark_output(self, here, gather(y, here.inner, here.context, width=width), Spread())
        return mark_output(self, here, y, here.inner)

    set_forward(target, forward, here)


def _shard_features(target: Target, dim: int, packed: int = 1) -> None:
    """Shard a single parameter along its output (-2) or input (-1) features, stored as in a linear layer.

    A one-dimensional parameter has output features only.
    """
    assert target.parameter is not None
    weight: Tensor = getattr(target.module, target.parameter)
    if weight.dim() == 1:
        if dim == -1:
            return
        dim = 0
    shard_parameter(target, target.parameter, dim, sections=sections_of(target, weight.shape[dim], packed))


# -- embeddings -------------------------------------------------------------------------------------------


@style("embedding_rowwise", options=("sequence",))
def embedding_rowwise(target: Target) -> None:
    """Shard the vocabulary of an embedding. Tokens of other ranks give zero vectors, and the vectors are all-reduced."""
    module, here = _embedding(target), target.arrangement
    rows = module.weight.shape[0]
    sizes = collectives.split_sizes(rows, _TENSOR, context=target.context)
    start = sum(sizes[: target.context.get_local_rank(_TENSOR)])
    length = len(shard_parameter(target, "weight", 0, uneven=True))
    padding = module.padding_idx
    module.padding_idx = padding - start if padding is not None and 0 <= padding - start < length else None

    def forward(self: Any, before: Any, tokens: Tensor) -> Tensor:
        local = tokens - start
        outside = (local < 0) | (local >= length)
        partial = before(self, local.masked_fill(outside, 0)).masked_fill(outside.unsqueeze(-1), 0.0)
        if not here.sequence_split:
            return mark_output(self, here, collectives.reduce(partial, _TENSOR, context=here.context), here.outer)
        sizes = shard_sizes(partial.shape[-2], _TENSOR, here.context, "sequence")
        y = collectives.reduce_scatter(partial, _TENSOR, -2, sizes, context=here.context)
        return mark_output(self, here, y, here.outer)

    set_forward(target, forward, here)


@style("embedding_colwise", options=("sequence",))
def embedding_colwise(target: Target) -> None:
    """Shard the features of every vector of an embedding; the output is all-gathered."""
    _shard_vectors(target, gather_output=True)


def _shard_vectors(target: Target, gather_output: bool) -> None:
    module, here = _embedding(target), arrange(target.context, sequence_split=False)
    width = Width(module.weight.shape[1], uneven=True)
    shard_parameter(target, "weight", 1, uneven=gather_output)

    def forward(self: Any, before: Any, tokens: Tensor) -> Tensor:
        local = before(self, tokens)
        if not gather_output:
            return mark_output(self, here, local, here.inner)
        return mark_output(self, here, gather(local, here.inner, here.context, width=width), Spread())

    set_forward(target, forward, here)


def _embedding(target: Target) -> nn.Embedding:
    module = target.module
    if not isinstance(module, nn.Embedding) or target.parameter is not None:
        raise PlacementError(
            f"{target.name!r} is a {type(module).__name__}, but the TP plan gives it a style for nn.Embedding. Name "
            "an nn.Embedding.",
            code="C060",
        )
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise PlacementError(
            f"{target.name!r} is an embedding with max_norm, scale_grad_by_freq or sparse gradients, which cannot be "
            "sharded. Leave it out of the TP plan.",
            code="C060",
        )
    return module


# -- replicated parameters --------------------------------------------------------------------------------


@style("replicated_with_grad_allreduce")
def replicated_with_grad_allreduce(target: Target) -> None:
    """Replicate parameters that each rank applies to its own features, such as those of a norm per head.

    Their gradients are partial. They are all-reduced with all other gradients, once per step.
    """
    for name in _own_parameters(target):
        replicate(target, name, partial_gradient=True)


@style("sequence_parallel", options=("sequence",))
def sequence_parallel(target: Target) -> None:
    """Replicate parameters that each rank applies to its own tokens, such as those of a norm.

    Their gradients are partial.
    """
    if not target.arrangement.sequence_split:
        raise PlacementError(
            f"the TP plan gives {target.name!r} the style 'sequence_parallel', but activations between blocks are "
            "replicated. Set sequence_split=True next to tensor.mode in the config, or leave the layer out of the TP "
            "plan.",
            code="C060",
        )
    replicated_with_grad_allreduce(target)


@style("gather_sequence", options=("inputs",))
def gather_sequence(target: Target) -> None:
    """All-gather arguments of a module along the sequence; `inputs` has their positions and names.

    The module must compute the same on every rank, which holds if the layers inside are `colwise`.
    """
    context, inputs = target.context, tuple(target.options.get("inputs", (0,)))
    ranks = context.get_world_size(_TENSOR)

    def gathered(key: Any, value: Any) -> Any:
        if key not in inputs:
            return value
        return collectives.gather(value, _TENSOR, -2, (value.shape[-2],) * ranks, context=context)

    def forward(self: Any, before: Any, *args: Any, **kwargs: Any) -> Any:
        positional = [gathered(at, value) for at, value in enumerate(args)]
        return before(self, *positional, **{name: gathered(name, value) for name, value in kwargs.items()})

    set_forward(target, forward)


@style("replicate")
def keep_replicated(target: Target) -> None:
    """Replicate parameters that have the same full gradient on every rank."""
    for name in _own_parameters(target):
        replicate(target, name, partial_gradient=False)


@style("all_reduce")
def all_reduce(target: Target) -> None:
    """All-reduce the output and the input gradients of a module that computes with its own sharded parameters."""

    context = target.context

    def entering(value: Any) -> Any:
        differentiable = isinstance(value, Tensor) and value.is_floating_point()
        return collectives.copy(value, _TENSOR, context=context) if differentiable else value

    def forward(self: Any, before: Any, *args: Any, **kwargs: Any) -> Any:
        positional = [entering(value) for value in args]
        partial = before(self, *positional, **{name: entering(value) for name, value in kwargs.items()})
        return collectives.reduce(partial, _TENSOR, context=context)

    set_forward(target, forward)


@style("mla_kv_a_proj")
def mla_kv_a_proj(target: Target) -> None:
    """Replicate a layer whose last `qk_rope_head_dim` outputs, the rotary key, bypass all `colwise` layers.

    The gradient of these outputs on a rank comes from this rank's heads only, so it is all-reduced here.
    `qk_rope_head_dim` is read from the parent module or from the model's config.
    """
    rope = getattr(target.parent, "qk_rope_head_dim", None)
    rope = rope or getattr(getattr(target.model, "config", None), "qk_rope_head_dim", None)
    if not isinstance(rope, int):
        raise PlacementError(
            f"{target.name!r} has the style 'mla_kv_a_proj', but the module around it has no attribute "
            "qk_rope_head_dim. Add this attribute to that module.",
            code="C060",
        )
    context = target.context

    def reduce_rotary(gradient: Tensor) -> Tensor:
        rest, rotary = gradient.split([gradient.shape[-1] - rope, rope], dim=-1)
        return torch.cat([rest, collectives.reduce(rotary, _TENSOR, context=context)], dim=-1)

    def forward(self: Any, before: Any, x: Tensor) -> Tensor:
        return collectives.linear_map(before(self, x), lambda y: y.view_as(y), reduce_rotary)

    set_forward(target, forward)


def _own_parameters(target: Target) -> list[str]:
    if target.parameter is not None:
        return [target.parameter]
    return [name for name, _ in target.module.named_parameters(recurse=False)]


_TENSOR, _EXPERT = ParallelMode.TENSOR, ParallelMode.EXPERT


@style("moe_tp_experts")
def moe_tp_experts(target: Target) -> None:
    """All-reduce the output of experts over the tensor group. Other entries of the TP plan shard the inner features."""
    _parallelize_experts(target)


@style("grouped_gemm", mode=_EXPERT, options=("tensor", "sections"))
def grouped_gemm(target: Target) -> None:
    """Shard a stacked parameter by expert. Tokens of all ranks of the expert group are sent to the rank of their experts."""
    if target.parameter is None:
        raise PlacementError(
            f"{target.name!r} has the style 'grouped_gemm', which is for a stacked parameter and not for a module. "
            "Name the parameter.",
            code="C060",
        )
    scope = Scope.of(target.context)
    experts = len(getattr(target.module, target.parameter))
    if experts % scope.expert:
        raise LayoutError(
            f"{target.name!r} has {experts} experts, which cannot be sharded evenly over the {scope.expert} ranks of "
            "parallel.expert. Use one of the expert sizes "
            f"{listed(size for size in range(1, experts + 1) if experts % size == 0)}.",
            code="C032",
        )
    tensor_style = target.options.get("tensor")
    if tensor_style is not None and scope.tensor > 1 and not scope.shares_tokens:
        style_of(tensor_style, target.name)[0](target)
    shard = shard_parameter(target, target.parameter, 0, mode=_EXPERT)
    if scope.shares_tokens:
        # Expert groups that span tensor ranks split the tokens between these ranks, which needs routed tokens.
        if len(inspect.signature(type(target.module).forward).parameters) < 4:
            raise LayoutError(
                f"{target.name!r} is a {type(target.module).__name__}, which gets every token for every expert. "
                "Expert groups that span tensor ranks cannot split these tokens. Let parallel.expert span only data "
                "ranks."
            )
        place(shard, {**placement_of(shard).modes, _TENSOR: Replicate(owes="sum")}, placement_of(shard).shape)
    if hasattr(target.module, "num_experts"):
        target.module.num_experts = len(shard)  # type: ignore[assignment]
    _parallelize_experts(target)


@style("ep_dispatch_experts", mode=_EXPERT, options=("tensor",))
def ep_dispatch_experts(target: Target) -> None:
    """Send tokens to the ranks of their experts. Other entries shard the parameters of the experts by `grouped_gemm`."""
    _parallelize_experts(target)


@style("ep_router", mode=_EXPERT, options=("tensor",))
def ep_router(target: Target) -> None:
    """Replicate the router: every rank computes the choices of all experts for its tokens. The experts then send the tokens."""


@style("moe_identity_expert")
def moe_identity_expert(target: Target) -> None:
    """Make an identity expert return 1/ranks of its input on each rank, because the outputs of the experts are all-reduced."""
    ranks = target.context.get_world_size(_TENSOR)

    def forward(self: Any, before: Any, x: Tensor) -> Tensor:
        return before(self, x) / ranks

    set_forward(target, forward)


@style("megamoe_router", "megamoe_experts", mode=_EXPERT, options=("tensor",))
def megamoe(target: Target) -> None:
    """Raise PlacementError: this style is a kernel for inference only."""
    raise PlacementError(
        f"{target.name!r} has the style 'megamoe_router' or 'megamoe_experts', but these styles are for a kernel "
        "without a backward pass, so the layer cannot be trained. Use 'ep_router' and 'ep_dispatch_experts'.",
        code="C060",
    )


@dataclass(frozen=True)
class _Mixture:
    """How the experts of one module are sharded."""

    scope: Scope
    experts: int
    """The number of experts on all ranks."""
    splits_experts: bool
    splits_inner: bool
    biases: tuple[str, ...]
    """Replicated output biases, which every tensor rank adds in full to its partial output."""

    def __deepcopy__(self, memo: Any) -> _Mixture:
        return self


def _parallelize_experts(target: Target) -> None:
    """Check how the experts' parameters are sharded so far, and give their module the forward pass for it.

    Called once for each stacked parameter and once for the module, so the last call sees all parameters.
    """
    module, scope = target.module, Scope.of(target.context)
    if scope.tensor > 1 and target.arrangement.sequence_split:
        raise LayoutError(
            f"{target.name!r} has experts under a TP plan, which does not support sequence_split=True: each tensor "
            "rank has different tokens between blocks. Leave sequence_split out of parallel.tensor."
        )
    name = target.name if target.parameter is None else target.name.rpartition(".")[0]
    placed = {key: placement_of(parameter) for key, parameter in module.named_parameters(recurse=False)}
    by_expert = [key for key, placement in placed.items() if _EXPERT in placement.shards]
    by_inner = [key for key, placement in placed.items() if _TENSOR in placement.shards]

    # A bias of the last projection, (experts, hidden), has no sharded dimension. Its gradient is partial, because the forward
    # pass below takes back all but 1/ranks of it.
    biases = [
        key
        for key in placed
        if by_inner
        and key not in by_inner
        and key.startswith("down")
        and key.endswith("_bias")
        and getattr(module, key.removesuffix("_bias"), None) is not None
        and getattr(module, key).dim() == 2
    ]
    for key in biases:
        place(getattr(module, key), {**placed[key].modes, _TENSOR: Replicate(owes="sum")}, placed[key].shape)

    if target.parameter is None:
        for mode, sharded in ((_EXPERT, by_expert), (_TENSOR, [*by_inner, *biases])):
            full = [key for key in placed if key not in sharded]
            if sharded and full:
                raise PlacementError(
                    f"the TP plan shards {listed(sharded)} of {name!r} over {mode}, but not {listed(full)}. Name all "
                    "parameters of the experts.",
                    code="C060",
                )
        if by_inner and getattr(module, "has_post_expert_norm", False):
            raise PlacementError(
                f"{name!r} has a norm after each expert, and this norm needs the full output of the expert. Leave "
                "the inner features of the experts out of the TP plan, and use parallel.expert.",
                code="C060",
            )
        weight = getattr(module, "gate_up_proj", None)
        if by_inner and weight is not None and getattr(module, "is_concatenated", False):
            shard = placement_of(weight).shards[_TENSOR]
            if not getattr(shard, "sections", (1, 1)):
                raise PlacementError(
                    f"{name + '.gate_up_proj'!r} is the gate and the up projection concatenated, but the TP plan "
                    "shards it as one weight. A rank would hold the gate of some features and the up projection of "
                    "others. Use 'packed_colwise', or 'packed_rowwise' if the last dimension is the concatenated one.",
                    code="C060",
                )

    stacked = next(iter(module.parameters(recurse=False)))
    experts = (placement_of(stacked).shape or stacked.shape)[0]
    is_new = not hasattr(module, "mixture")
    module.mixture = _Mixture(scope, experts, bool(by_expert), bool(by_inner), tuple(biases))  # type: ignore[assignment]
    if is_new:
        set_forward(target, _forward)


def _forward(self: Any, before: Any, hidden: Tensor, *routing: Any) -> Tensor:
    """The forward pass. `routing` has the chosen experts and their weights, (tokens, choices), if the module takes them."""
    mixture: _Mixture = self.mixture
    if not mixture.splits_experts:
        return _reduced(self, before, hidden, *routing)
    scope, tokens = mixture.scope, hidden.reshape(-1, hidden.size(-1))
    if not scope.shares_tokens:
        return _reduced(self, before, tokens, *routing).view_as(hidden)
    # Tensor ranks in one expert group have the same tokens: each sends its slice of them, and the outputs are gathered.
    index, weights = routing
    sizes = split_sizes(len(tokens), _TENSOR, context=scope.context)
    tokens, weights = (scatter(x, _TENSOR, 0, sizes, context=scope.context) for x in (tokens, weights))
    index = index.split(sizes)[scope.context.get_local_rank(_TENSOR)]
    out = _exchanged(self, before, tokens, index, weights)
    return collectives.gather(out, _TENSOR, 0, sizes, context=scope.context).view_as(hidden)


def _reduced(self: Any, before: Any, hidden: Tensor, *routing: Any) -> Tensor:
    """The output of the experts, all-reduced over the tensor group if their inner features are sharded."""
    mixture, run = self.mixture, _exchanged if self.mixture.splits_experts else _local
    if not mixture.splits_inner:
        return run(self, before, hidden, *routing)
    context = mixture.scope.context

    def entering(x: Any) -> Any:
        return copy(x, _TENSOR, context=context) if isinstance(x, Tensor) and x.is_floating_point() else x

    # The routing weights too: each rank multiplies them with its partial output, so their gradient is partial.
    hidden, *routing = map(entering, (hidden, *routing))  # type: ignore[assignment]
    return reduce(run(self, before, hidden, *routing), _TENSOR, context=context)


def _exchanged(self: Any, before: Any, tokens: Tensor, *routing: Any) -> Tensor:
    """The output for this rank's tokens, computed by the experts of all ranks of the expert group."""
    scope, experts = self.mixture.scope, self.mixture.experts
    if not routing:
        # Every expert gets every token: rows are sorted by expert already, equally many for each.
        counts = torch.full((experts,), len(tokens) // experts, device=tokens.device)
        traffic = Traffic(counts, scope.expert, scope.context)
        send, receive = traffic.sizes(len(tokens))
        received = all_to_all(tokens, _EXPERT, send, receive, context=scope.context)
        computed = traffic.by_expert(received, lambda rows, counts: _local(self, before, rows))
        return all_to_all(computed, _EXPERT, receive, send, context=scope.context)
    index, weights = routing
    choices = index.T
    chosen = counted(choices.reshape(1, -1), experts)[0]
    traffic = Traffic(chosen, scope.expert, scope.context)

    def run(rows: Tensor) -> Tensor:
        return _local(self, before, rows, traffic.experts_of(len(rows)).unsqueeze(1), rows.new_ones(len(rows), 1))

    return exchange(tokens, weights, order(choices, chosen), traffic, run, scope.context).to(tokens.dtype)


def _local(self: Any, before: Any, hidden: Tensor, *routing: Any) -> Tensor:
    """The output of this rank's experts for these rows, by the module's own forward pass."""
    if not hidden.numel():
        # A rank without rows stays in the graph: the other ranks wait for its collectives in backward.
        return hidden + sum(parameter.flatten()[:0].sum() for parameter in self.parameters())
    out: Tensor = before(self, hidden, *routing)
    for name in self.mixture.biases:
        # Each tensor rank has added the full bias, and the all-reduce adds all of them: 1/ranks of it is left here.
        index, weights = routing
        bias, ranks = getattr(self, name), self.mixture.scope.tensor
        weight_of_expert = weights.new_zeros(len(hidden), len(bias)).scatter_add(1, index, weights)
        out = out - (weight_of_expert.to(out.dtype) @ bias) * (1 - 1 / ranks)
    return out

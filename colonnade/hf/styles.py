"""Styles: what a plan can say of a layer. Each cuts the layer's parameters and gives it a forward pass for the parts.

Between blocks activations are whole on every rank of the tensor group (or split along the sequence, where the config
has `sequence_split`); from a `colwise` layer to a `rowwise` one they are split along their features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError, did_you_mean, listed
from colonnade.hf.match import Target
from colonnade.nn.layer.arrangement import Arrangement, Split, arrange
from colonnade.nn.layer.linear import own
from colonnade.nn.layer.spread import Spread, Width, gather, gives, respread, takes
from colonnade.nn.layer.spread import cut as cut_sizes
from colonnade.parallel import collectives
from colonnade.parallel.collectives import split_sizes
from colonnade.parallel.flat import section_runs
from colonnade.parallel.forward import override_forward
from colonnade.parallel.meta import keep_initial_value
from colonnade.parallel.placement import Replicate, Shard, Spec, place, placement_of

# --- What styles do to a module: a parameter becomes this rank's part of it, and a forward pass another one ---


def cut(
    target: Target,
    name: str,
    dim: int,
    *,
    mode: ParallelMode = ParallelMode.TENSOR,
    sections: Sequence[int] = (),
    uneven: bool = False,
) -> nn.Parameter:
    """Replace the parameter `name` of the target's module by this rank's part of it along `dim`, placed so.

    `sections` are the lengths of several weights that lie one after another along `dim`; each is cut. One that lies on
    another mode already, along another dimension, is cut further. Two layers that share a parameter share its part, and
    must cut it alike.
    """
    whole: Any = getattr(target.module, name)
    part = target.parts.get(whole)
    spec = Shard(dim % whole.dim(), sections=tuple(sections) if len(sections) > 1 else ())
    if part is None:
        before = placement_of(whole)
        if mode in before.modes or any(shard.dim == spec.dim for shard in before.shards.values()):
            raise PlacementError(
                f"the plan cuts {target.name!r}, whose {name!r} is placed already ({before}); let one pattern "
                f"name it, and parallelize a model once",
                code="C060",
            )
        block = _block(whole, spec, target, name, mode, uneven)
        part = own(block, {mode: spec, **before.modes}, before.shape or tuple(whole.shape), whole)
        keep_initial_value(part, whole)
        target.parts[whole] = part
    elif placement_of(part).shards != {mode: spec}:
        raise PlacementError(
            f"{target.name!r} shares {name!r} with another layer, where the plan cuts it otherwise: {placement_of(part)} "
            f"there, {spec} on {mode} here. Give both styles that cut it alike, or untie them before",
            code="C060",
        )
    setattr(target.module, name, part)
    return part


def replicate(target: Target, name: str, owes: bool) -> None:
    """Say that every rank holds the whole parameter; `owes`: each sees a share of the work, so gradients are summed."""
    spec: Spec = Replicate(owes="sum") if owes else Replicate()
    parameter: Any = getattr(target.module, name)
    before = placement_of(parameter)
    if before.shards:
        raise PlacementError(
            f"the plan keeps {target.name!r} whole, but cuts its {name!r} elsewhere: {before}", code="C060"
        )
    place(parameter, {**before.modes, ParallelMode.TENSOR: spec}, before.shape)


def set_forward(target: Target, forward: Callable[..., Any], here: Arrangement | None = None) -> None:
    """Give the target's module another forward pass: a function of the module, its forward pass so far, and the arguments."""
    if here is not None:
        target.module.arrangement = here  # type: ignore[assignment]
    override_forward(target.module, forward)


def sections_of(target: Target, length: int, default: int = 1) -> tuple[int, ...]:
    """The lengths of the weights that are packed along a dimension: as the plan has them, else `default` equal ones."""
    wanted = target.options.get("sections", default)
    found = (length // wanted,) * wanted if isinstance(wanted, int) and length % wanted == 0 else wanted
    if isinstance(found, int) or sum(found) != length:
        raise PlacementError(
            f"{target.name!r}: {length} features cannot be the sections {wanted} of the plan; give 'sections' as a number of "
            f"equal ones, or as their lengths, which add up to {length}",
            code="C060",
        )
    return tuple(found)


def _block(whole: Tensor, spec: Shard, target: Target, name: str, mode: ParallelMode, uneven: bool) -> Tensor:
    ranks, at = target.context.get_world_size(mode), target.context.get_local_rank(mode)
    length = whole.shape[spec.dim]
    if uneven and length >= ranks:
        sizes = split_sizes(length, mode, context=target.context)
        return whole.detach().narrow(spec.dim, sum(sizes[:at]), sizes[at])
    sections = spec.sections or (length,)
    if any(section % ranks for section in sections):
        raise PlacementError(
            f"{target.name!r}: {listed(sections)} features (dimension {spec.dim} of {name!r}, of shape "
            f"{tuple(whole.shape)}) cannot be cut evenly over the {ranks} ranks of {mode}; choose a size that {ranks} "
            f"divides, another tensor size, or leave the layer out of the plan",
            code="C032",
        )
    blocks = [whole.detach().narrow(spec.dim, *run) for run in section_runs(sections, at, ranks)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, spec.dim)


Style = Callable[[Target], None]

_TENSOR = ParallelMode.TENSOR

STYLES: dict[str, tuple[Style, ParallelMode]] = {}
"""Styles by name, each with the mode that it is for: where that has one rank, nothing is cut."""

OPTIONS: dict[str, tuple[str, ...]] = {}
"""What a plan may say beside each style, and beside "divide", which it may say of any module."""

_PACKED = ("sections", "sequence")


def style(*names: str, mode: ParallelMode = _TENSOR, options: tuple[str, ...] = ()) -> Callable[[Style], Style]:
    """Register a style under these names, with the options that it reads."""

    def register(function: Style) -> Style:
        STYLES.update(dict.fromkeys(names, (function, mode)))
        OPTIONS.update(dict.fromkeys(names, options))
        return function

    return register


def style_of(name: Any, where: str) -> tuple[Style, ParallelMode]:
    """The style of this name and its mode; refuses others."""
    if not isinstance(name, str) or name not in STYLES:
        raise PlacementError(
            f"the plan gives {where!r} the style {name!r}, which is not known; styles are {listed(sorted(STYLES))}."
            f"{did_you_mean(str(name), STYLES)}",
            code="C060",
        )
    return STYLES[name]


# -- linear layers ----------------------------------------------------------------------------------------


@style("colwise", options=_PACKED)
def colwise(target: Target) -> None:
    """This rank's output features of a linear layer, for a whole input: they stay split, until a `rowwise` layer."""
    if target.parameter is not None:
        _cut_features(target, -2)
    elif isinstance(target.module, nn.Embedding):
        _embed_part(target, join=False)
    else:
        _linear(target, "column")


@style("colwise_gather_output", "colwise_rep", options=_PACKED)
def colwise_gather_output(target: Target) -> None:
    """As `colwise`, and the output is made whole on every rank. Its features may be cut unevenly (a vocabulary)."""
    if target.parameter is not None:
        colwise(target)
    else:
        _linear(target, "column", whole=True)


@style("packed_colwise", options=_PACKED)
def packed_colwise(target: Target) -> None:
    """As `colwise`, of several weights in one, each cut: 2 equal ones, or as `sections` of the plan says."""
    if target.parameter is not None:
        _cut_features(target, -2, packed=2)
    else:
        _linear(target, "column", packed=2)


@style("rowwise", options=_PACKED)
def rowwise(target: Target) -> None:
    """This rank's input features of a linear layer, which takes what a `colwise` one gives; results are summed."""
    if target.parameter is not None:
        _cut_features(target, -1)
    elif isinstance(target.module, nn.Embedding):
        embedding_rowwise(target)
    else:
        _linear(target, "row")


@style("rowwise_split_input", "rowwise_rep", options=_PACKED)
def rowwise_split_input(target: Target) -> None:
    """As `rowwise`, for an input that is whole on every rank: each takes its features of it."""
    if target.parameter is not None:
        rowwise(target)
    else:
        _linear(target, "row", whole=True)


@style("packed_rowwise", options=_PACKED)
def packed_rowwise(target: Target) -> None:
    """As `rowwise`, where several weights lie side by side along the input: 2 equal ones, or `sections` of the plan."""
    if target.parameter is not None:
        _cut_features(target, -1, packed=2)
    else:
        _linear(target, "row", packed=2)


def _linear(target: Target, split: Split, whole: bool = False, packed: int = 1) -> None:
    """Cut a linear layer. `whole`: the side of it that is inside a block, features that are split, is whole instead."""
    module: Any = target.module
    here = target.arrangement
    transposed = type(module).__name__ == "Conv1D"
    if not transposed and not isinstance(module, nn.Linear):
        raise PlacementError(
            f"{target.name!r} is a {type(module).__name__}, and the plan's style is for nn.Linear; name a layer inside it, or "
            f"one of its parameters",
            code="C060",
        )
    inputs, outputs = module.weight.shape if transposed else reversed(module.weight.shape)
    inside = outputs if split == "column" else inputs
    sections, uneven = sections_of(target, inside, packed), whole and split == "column"
    dim = 1 if transposed == (split == "column") else 0
    cut(target, "weight", dim, sections=sections, uneven=uneven)
    if split == "column" and module.bias is not None:
        cut(target, "bias", 0, sections=sections, uneven=uneven)
    elif module.bias is not None and here.sequence_split:
        replicate(target, "bias", owes=True)  # each rank adds it to its part of the sequence
    width = Width(inside, uneven=uneven)
    if isinstance(target.parent, nn.TransformerEncoderLayer):
        target.parent.activation_relu_or_gelu = 0  # else it evaluates by a kernel that takes the weights for whole ones

    def forward(self: Any, before: Any, x: Tensor) -> Tensor:
        weight = self.weight.t() if transposed else self.weight
        if split == "row":
            takes(self, here, x, "outer" if whole else "inner", inputs)
            x = respread(x, here.outer, here.inner, here.context, width) if whole else x
            return gives(self, here, here.linear(x, weight, self.bias, split), here.outer)
        takes(self, here, x, "outer", inputs)
        y = here.linear(x, weight, self.bias, split)
        return (
            gives(self, here, gather(y, here.inner, here.context, width=width), Spread())
            if whole
            else gives(self, here, y, here.inner)
        )

    set_forward(target, forward, here)


def _cut_features(target: Target, dim: int, packed: int = 1) -> None:
    """Cut a parameter along its output features (-2) or its input features (-1), as those of a linear layer lie.

    A parameter with one dimension has output features only.
    """
    assert target.parameter is not None
    weight: Tensor = getattr(target.module, target.parameter)
    if weight.dim() == 1:
        if dim == -1:
            return
        dim = 0
    cut(target, target.parameter, dim, sections=sections_of(target, weight.shape[dim], packed))


# -- embeddings -------------------------------------------------------------------------------------------


@style("embedding_rowwise", options=("sequence",))
def embedding_rowwise(target: Target) -> None:
    """This rank's part of the vocabulary; words of the other parts count as zero, and the vectors are summed."""
    module, here = _embedding(target), target.arrangement
    rows = module.weight.shape[0]
    sizes = collectives.split_sizes(rows, _TENSOR, context=target.context)
    start = sum(sizes[: target.context.get_local_rank(_TENSOR)])
    length = len(cut(target, "weight", 0, uneven=True))
    padding = module.padding_idx
    module.padding_idx = padding - start if padding is not None and 0 <= padding - start < length else None

    def forward(self: Any, before: Any, tokens: Tensor) -> Tensor:
        local = tokens - start
        outside = (local < 0) | (local >= length)
        found = before(self, local.masked_fill(outside, 0)).masked_fill(outside.unsqueeze(-1), 0.0)
        return gives(self, here, _summed(found, here), here.outer)

    set_forward(target, forward, here)


@style("embedding_colwise", options=("sequence",))
def embedding_colwise(target: Target) -> None:
    """This rank's part of every vector; the vectors are joined."""
    _embed_part(target, join=True)


def _embed_part(target: Target, join: bool) -> None:
    module, here = _embedding(target), arrange(target.context, sequence_split=False)
    features = module.weight.shape[1]
    cut(target, "weight", 1, uneven=join)

    def forward(self: Any, before: Any, tokens: Tensor) -> Tensor:
        part = before(self, tokens)
        if not join:
            return gives(self, here, part, here.inner)
        return gives(self, here, gather(part, here.inner, here.context, width=Width(features, uneven=True)), Spread())

    set_forward(target, forward, here)


def _embedding(target: Target) -> nn.Embedding:
    module = target.module
    if not isinstance(module, nn.Embedding) or target.parameter is not None:
        raise PlacementError(
            f"{target.name!r} is a {type(module).__name__}, and the plan's style is for a module nn.Embedding",
            code="C060",
        )
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise PlacementError(
            f"{target.name!r}: an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be cut",
            code="C060",
        )
    return module


def _summed(x: Tensor, here: Arrangement) -> Tensor:
    """The sum of every rank's partial result, in the spread between blocks."""
    if not here.sequence_split:
        return collectives.reduce(x, _TENSOR, context=here.context)
    sizes = cut_sizes(x.shape[-2], _TENSOR, here.context, "sequence")
    return collectives.reduce_scatter(x, _TENSOR, -2, sizes, context=here.context)


# -- layers that stay whole -------------------------------------------------------------------------------


@style("replicated_with_grad_allreduce")
def replicated_with_grad_allreduce(target: Target) -> None:
    """Whole parameters that each rank uses for its features (a norm of each head): gradients are summed, once a step."""
    for name in _own_parameters(target):
        replicate(target, name, owes=True)


@style("sequence_parallel", options=("sequence",))
def sequence_parallel(target: Target) -> None:
    """Whole parameters, of a norm say, that each rank uses for its part of the sequence; gradients are summed."""
    if not target.arrangement.sequence_split:
        raise PlacementError(
            f"the plan gives {target.name!r} the style 'sequence_parallel', but activations between blocks are whole here; set "
            f"sequence_split=True beside tensor.mode in the config, or leave the layer out of the plan",
            code="C060",
        )
    replicated_with_grad_allreduce(target)


@style("gather_sequence", options=("inputs",))
def gather_sequence(target: Target) -> None:
    """A module whose `inputs` (places and names of arguments) come split along the sequence, and are made whole for it.

    What it computes with them must be the same on every rank, as `colwise` layers see to.
    """
    context, wanted = target.context, tuple(target.options.get("inputs", (0,)))
    ranks = context.get_world_size(_TENSOR)

    def whole(key: Any, value: Any) -> Any:
        return (
            collectives.gather(value, _TENSOR, -2, (value.shape[-2],) * ranks, context=context)
            if key in wanted
            else value
        )

    def forward(self: Any, before: Any, *args: Any, **kwargs: Any) -> Any:
        given = [whole(at, value) for at, value in enumerate(args)]
        return before(self, *given, **{name: whole(name, value) for name, value in kwargs.items()})

    set_forward(target, forward)


@style("replicate")
def keep_whole(target: Target) -> None:
    """Whole parameters that every rank uses alike; nothing is done."""
    for name in _own_parameters(target):
        replicate(target, name, owes=False)


@style("all_reduce")
def all_reduce(target: Target) -> None:
    """A module that computes with cut parameters of its own: what the ranks give is summed, and so are input gradients."""

    context = target.context

    def forward(self: Any, before: Any, *args: Any, **kwargs: Any) -> Any:
        given = [_entering(value, context) for value in args]
        output = before(self, *given, **{name: _entering(value, context) for name, value in kwargs.items()})
        return collectives.reduce(output, _TENSOR, context=context)

    set_forward(target, forward)


@style("mla_kv_a_proj")
def mla_kv_a_proj(target: Target) -> None:
    """A whole layer whose last features, those of the rotary embedding, go to every rank's heads past all `colwise` layers.

    So their gradient is summed here. How many they are is `qk_rope_head_dim` of the module around it, or of the model's config.
    """
    rope = getattr(target.parent, "qk_rope_head_dim", None)
    rope = rope or getattr(getattr(target.model, "config", None), "qk_rope_head_dim", None)
    if not isinstance(rope, int):
        raise PlacementError(
            f"{target.name!r}: 'mla_kv_a_proj' needs qk_rope_head_dim in the module around it", code="C060"
        )
    context = target.context

    def summed_last(gradient: Tensor) -> Tensor:
        rest, rotary = gradient.split([gradient.shape[-1] - rope, rope], dim=-1)
        return torch.cat([rest, collectives.reduce(rotary, _TENSOR, context=context)], dim=-1)

    def forward(self: Any, before: Any, x: Tensor) -> Tensor:
        return collectives.linear_map(before(self, x), lambda y: y.view_as(y), summed_last)

    set_forward(target, forward)


def _entering(value: Any, context: ParallelContext) -> Any:
    """Whole in forward; in backward the sum of what every rank's part says."""
    differentiable = isinstance(value, Tensor) and value.is_floating_point()
    return collectives.copy(value, _TENSOR, context=context) if differentiable else value


def _own_parameters(target: Target) -> list[str]:
    if target.parameter is not None:
        return [target.parameter]
    return [name for name, _ in target.module.named_parameters(recurse=False)]

"""Styles for experts in stacked parameters (dimension 0 is the expert) that are called with the choices of a router.

The module's own forward pass still computes the experts, with whatever gates and activations it has: on this rank's shard
of each expert (tensor parallelism), on the tokens routed to this rank's experts (expert parallelism), or both.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError, PlacementError, listed
from colonnade.hf.match import Target
from colonnade.hf.styles import set_forward, shard_parameter, style, style_of
from colonnade.nn.moe.dispatch import Scope, Traffic, counted, exchange, order
from colonnade.parallel.collectives import all_to_all, copy, gather, reduce, scatter, split_sizes
from colonnade.parallel.placement import Replicate, place, placement_of

_TENSOR, _EXPERT = ParallelMode.TENSOR, ParallelMode.EXPERT


@style("moe_tp_experts")
def moe_tp_experts(target: Target) -> None:
    """Experts whose inner features other entries of the TP plan shard: their output is all-reduced over the tensor group."""
    _parallelize_experts(target)


@style("grouped_gemm", mode=_EXPERT, options=("tensor", "sections"))
def grouped_gemm(target: Target) -> None:
    """Shard a stacked parameter by expert. Tokens of all ranks of the expert group are sent to the rank of their experts."""
    if target.parameter is None:
        raise PlacementError(
            f"{target.name!r}: the style 'grouped_gemm' is for a stacked parameter, not for a module", code="C060"
        )
    scope = Scope.of(target.context)
    experts = len(getattr(target.module, target.parameter))
    if experts % scope.expert:
        raise LayoutError(
            f"{target.name!r}: {experts} experts cannot be sharded evenly over the {scope.expert} ranks of parallel.expert; use "
            f"an expert size among {listed(size for size in range(1, experts + 1) if experts % size == 0)}",
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
                f"{target.name!r}: a {type(target.module).__name__} gets every token for every expert, and expert groups that "
                f"span tensor ranks cannot split those; let parallel.expert span data ranks only"
            )
        place(shard, {**placement_of(shard).modes, _TENSOR: Replicate(owes="sum")}, placement_of(shard).shape)
    if hasattr(target.module, "num_experts"):
        target.module.num_experts = len(shard)  # type: ignore[assignment]
    _parallelize_experts(target)


@style("ep_dispatch_experts", mode=_EXPERT, options=("tensor",))
def ep_dispatch_experts(target: Target) -> None:
    """Experts whose parameters other entries shard by `grouped_gemm`: tokens are sent to the ranks of their experts."""
    _parallelize_experts(target)


@style("ep_router", mode=_EXPERT, options=("tensor",))
def ep_router(target: Target) -> None:
    """A router needs no change: the experts send the tokens by its full choices."""


@style("moe_identity_expert")
def moe_identity_expert(target: Target) -> None:
    """An identity expert among experts with all-reduced outputs: it returns 1/ranks of its input on each rank."""
    ranks = target.context.get_world_size(_TENSOR)

    def forward(self: Any, before: Any, x: Tensor) -> Tensor:
        return before(self, x) / ranks

    set_forward(target, forward)


@style("megamoe_router", "megamoe_experts", mode=_EXPERT, options=("tensor",))
def megamoe(target: Target) -> None:
    """Raises: a kernel for inference only."""
    raise PlacementError(
        f"{target.name!r}: the styles 'megamoe_router' and 'megamoe_experts' are for a kernel without a backward pass, which "
        f"cannot be trained; use 'ep_router' and 'ep_dispatch_experts'",
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
            f"{target.name!r}: with sequence_split=True each tensor rank has its own tokens between blocks, which experts under "
            f"a TP plan do not support; leave sequence_split out of parallel.tensor"
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
                    f"{name!r}: the TP plan shards {listed(sharded)} over {mode}, but not {listed(full)}; name all of the "
                    f"experts' parameters",
                    code="C060",
                )
        if by_inner and getattr(module, "has_post_expert_norm", False):
            raise PlacementError(
                f"{name!r} has a norm behind each expert, which needs the full output of the expert; leave the inner features of "
                f"its experts out of the TP plan, and use parallel.expert",
                code="C060",
            )
        weight = getattr(module, "gate_up_proj", None)
        if by_inner and weight is not None and getattr(module, "is_concatenated", False):
            shard = placement_of(weight).shards[_TENSOR]
            if not getattr(shard, "sections", (1, 1)):
                raise PlacementError(
                    f"{name + '.gate_up_proj'!r} is the gate and the up projection concatenated, but the TP plan shards it as "
                    f"one: a rank would hold the gate of some features and the up projection of others. Use 'packed_colwise' "
                    f"(or 'packed_rowwise', if the last dimension is the packed one)",
                    code="C060",
                )

    stacked = next(iter(module.parameters(recurse=False)))
    experts = (placement_of(stacked).shape or stacked.shape)[0]
    is_new = not hasattr(module, "mixture")
    module.mixture = _Mixture(scope, experts, bool(by_expert), bool(by_inner), tuple(biases))  # type: ignore[assignment]
    if is_new:
        set_forward(target, _forward)


def _forward(self: Any, before: Any, hidden: Tensor, *routing: Any) -> Tensor:
    """`routing`: the chosen experts and their weights, (tokens, choices), if the module takes them."""
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
    return gather(out, _TENSOR, 0, sizes, context=scope.context).view_as(hidden)


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

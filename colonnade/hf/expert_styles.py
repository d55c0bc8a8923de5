"""Styles for experts that a model keeps in stacked parameters, dimension 0 the expert, and calls with a router's choices.

Their module's own forward pass computes them, whatever it makes of gates and activations: on this rank's part of each
expert, on the rows that came for this rank's experts, or both.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError, PlacementError, listed
from colonnade.hf.match import Target
from colonnade.hf.styles import cut, set_forward, style, style_of
from colonnade.nn.moe.dispatch import Scope, Traffic, counted, exchange, order
from colonnade.parallel.collectives import all_to_all, copy, gather, reduce, scatter, split_sizes
from colonnade.parallel.placement import Replicate, place, placement_of

_TENSOR, _EXPERT = ParallelMode.TENSOR, ParallelMode.EXPERT


@style("moe_tp_experts")
def moe_tp_experts(target: Target) -> None:
    """Experts whose inside other entries of the plan cut: what the ranks make of the tokens is summed over them."""
    _mix(target)


@style("grouped_gemm", mode=_EXPERT, options=("tensor", "sections"))
def grouped_gemm(target: Target) -> None:
    """This rank's experts of a stacked parameter. The tokens of all ranks of the expert group come to them."""
    if target.parameter is None:
        raise PlacementError(
            f"{target.name!r}: the style 'grouped_gemm' is for a stacked parameter, not for a module", code="C060"
        )
    scope = Scope.of(target.context)
    experts = len(getattr(target.module, target.parameter))
    if experts % scope.expert:
        raise LayoutError(
            f"{target.name!r}: {experts} experts cannot lie evenly on the {scope.expert} ranks of parallel.expert; use an "
            f"expert size among {listed(size for size in range(1, experts + 1) if experts % size == 0)}",
            code="C032",
        )
    inside = target.options.get("tensor")
    if inside is not None and scope.tensor > 1 and not scope.shares_tokens:
        style_of(inside, target.name)[0](target)
    part = cut(target, target.parameter, 0, mode=_EXPERT)
    if scope.shares_tokens:
        _check_routed(target)
        place(part, {**placement_of(part).modes, _TENSOR: Replicate(owes="sum")}, placement_of(part).shape)
    if hasattr(target.module, "num_experts"):
        target.module.num_experts = len(part)  # type: ignore[assignment]
    _mix(target)


@style("ep_dispatch_experts", mode=_EXPERT, options=("tensor",))
def ep_dispatch_experts(target: Target) -> None:
    """Experts whose parameters other entries of the plan cut by `grouped_gemm`: tokens go to the ranks that have them."""
    _mix(target)


@style("ep_router", mode=_EXPERT, options=("tensor",))
def ep_router(target: Target) -> None:
    """A router stays whole: tokens go to the experts that it chose, and not its choices to the ranks."""


@style("moe_identity_expert")
def moe_identity_expert(target: Target) -> None:
    """An expert that gives back what it is given, beside others of which the ranks give parts that are summed."""
    ranks = target.context.get_world_size(_TENSOR)

    def forward(self: Any, before: Any, x: Tensor) -> Tensor:
        return before(self, x) / ranks

    set_forward(target, forward)


@style("megamoe_router", "megamoe_experts", mode=_EXPERT, options=("tensor",))
def megamoe(target: Target) -> None:
    """Refused: a kernel for inference on one kind of GPU."""
    raise PlacementError(
        f"{target.name!r}: the styles 'megamoe_router' and 'megamoe_experts' are for a kernel that has no backward pass, so "
        f"nothing can be trained with it; use 'ep_router' and 'ep_dispatch_experts'",
        code="C060",
    )


@dataclass(frozen=True)
class _Mixture:
    """How the experts of one module lie on the ranks."""

    scope: Scope
    experts: int
    """Of all ranks."""
    splits_experts: bool
    splits_inner: bool
    biases: tuple[str, ...]
    """Parameters that every tensor rank adds whole to its part of what the experts give."""

    def __deepcopy__(self, memo: Any) -> _Mixture:
        return self


def _mix(target: Target) -> None:
    """Give the module of the target a forward pass for its parameters as they lie now."""
    module, scope = target.module, Scope.of(target.context)
    if scope.tensor > 1 and target.arrangement.sequence_split:
        raise LayoutError(
            f"{target.name!r}: sequence_split=True gives each tensor rank tokens of its own between blocks, which experts under a "
            f"plan cannot take; leave sequence_split out of parallel.tensor"
        )
    name = target.name if target.parameter is None else target.name.rpartition(".")[0]
    placed = {each: placement_of(parameter) for each, parameter in module.named_parameters(recurse=False)}
    by_expert = [each for each, placement in placed.items() if _EXPERT in placement.shards]
    by_inner = [each for each, placement in placed.items() if _TENSOR in placement.shards]
    biases = [each for each in placed if by_inner and each not in by_inner and _is_output_bias(each, module)]
    for each in biases:
        place(getattr(module, each), {**placed[each].modes, _TENSOR: Replicate(owes="sum")}, placed[each].shape)
    if target.parameter is None:
        _check(name, module, placed, [by_expert, [*by_inner, *biases]])
        if by_inner:
            _check_gate(name, module)
    stacked = next(iter(module.parameters(recurse=False)))
    whole = placement_of(stacked).shape or stacked.shape
    is_new = not hasattr(module, "mixture")
    module.mixture = _Mixture(scope, whole[0], bool(by_expert), bool(by_inner), tuple(biases))  # type: ignore[assignment]
    if is_new:
        set_forward(target, _forward)


def _forward(self: Any, before: Any, hidden: Tensor, *routing: Any) -> Tensor:
    """`routing`: the chosen experts and their weights, (tokens, choices), where the module takes them."""
    mixture: _Mixture = self.mixture
    if not mixture.splits_experts:
        return _summed(self, before, hidden, *routing)
    scope, tokens = mixture.scope, hidden.reshape(-1, hidden.size(-1))
    if not scope.shares_tokens:
        return _summed(self, before, tokens, *routing).view_as(hidden)
    index, weights = routing
    shares = split_sizes(len(tokens), _TENSOR, context=scope.context)
    tokens, weights = (scatter(x, _TENSOR, 0, shares, context=scope.context) for x in (tokens, weights))
    index = index.split(shares)[scope.context.get_local_rank(_TENSOR)]
    out = _exchanged(self, before, tokens, index, weights)
    return gather(out, _TENSOR, 0, shares, context=scope.context).view_as(hidden)


def _summed(self: Any, before: Any, hidden: Tensor, *routing: Any) -> Tensor:
    """What all tensor ranks' parts of the experts make of the tokens."""
    mixture, run = self.mixture, _exchanged if self.mixture.splits_experts else _here
    if not mixture.splits_inner:
        return run(self, before, hidden, *routing)
    context = mixture.scope.context
    # The weights too: what is multiplied by them is a part of the sum, so their gradient is one.
    hidden, *routing = (_copied(x, context) for x in (hidden, *routing))  # type: ignore[assignment]
    return reduce(run(self, before, hidden, *routing), _TENSOR, context=context)


def _exchanged(self: Any, before: Any, tokens: Tensor, *routing: Any) -> Tensor:
    """What the experts of all ranks of the expert group make of the tokens here."""
    if not routing:
        return _all_exchanged(self, before, tokens)
    index, weights = routing
    scope, choices = self.mixture.scope, index.T
    chosen = counted(choices.reshape(1, -1), self.mixture.experts)[0]
    traffic = Traffic(chosen, scope.expert, scope.context)

    def experts(rows: Tensor) -> Tensor:
        return _here(self, before, rows, traffic.experts_of(len(rows)).unsqueeze(1), rows.new_ones(len(rows), 1))

    return exchange(tokens, weights, order(choices, chosen), traffic, experts, scope.context).to(tokens.dtype)


def _all_exchanged(self: Any, before: Any, rows: Tensor) -> Tensor:
    """The same where every expert is given every token: rows by expert, as many for each."""
    scope, experts = self.mixture.scope, self.mixture.experts
    traffic = Traffic(torch.full((experts,), len(rows) // experts, device=rows.device), scope.expert, scope.context)
    send, receive = traffic.sizes(len(rows))
    there = all_to_all(rows, _EXPERT, send, receive, context=scope.context)
    made = traffic.by_expert(there, lambda by_expert, counts: _here(self, before, by_expert))
    return all_to_all(made, _EXPERT, receive, send, context=scope.context)


def _here(self: Any, before: Any, hidden: Tensor, *routing: Any) -> Tensor:
    """What this rank's experts make of rows, by the module's own forward pass."""
    if not hidden.numel():  # in the graph all the same: other ranks wait for this one in backward too
        return hidden + sum(parameter.flatten()[:0].sum() for parameter in self.parameters())
    out: Tensor = before(self, hidden, *routing)
    for name in self.mixture.biases:
        index, weights = routing
        bias, ranks = getattr(self, name), self.mixture.scope.tensor
        shares = weights.new_zeros(len(hidden), len(bias)).scatter_add(1, index, weights)
        out = out - (shares.to(out.dtype) @ bias) * (1 - 1 / ranks)  # each has added all of it
    return out


def _copied(x: Any, context: Any) -> Any:
    return copy(x, _TENSOR, context=context) if isinstance(x, Tensor) and x.is_floating_point() else x


def _is_output_bias(name: str, module: nn.Module) -> bool:
    """Whether it is added to what the experts give: (experts, hidden), beside a last weight of the same name."""
    weight, bias = getattr(module, name.removesuffix("_bias"), None), getattr(module, name)
    return name.endswith("_bias") and weight is not None and bias.dim() == 2 and name.startswith("down")


def _check(name: str, module: nn.Module, placed: dict[str, Any], cuts: list[list[str]]) -> None:
    """Refuse experts of which some parameters are cut and others are not."""
    for mode, parts in zip((_EXPERT, _TENSOR), cuts, strict=True):
        whole = [each for each in placed if each not in parts]
        if parts and whole:
            raise PlacementError(
                f"{name!r}: the plan cuts {listed(parts)} over {mode}, and leaves {listed(whole)} whole; name all of the "
                f"experts' parameters",
                code="C060",
            )
    if cuts[1] and getattr(module, "has_post_expert_norm", False):
        raise PlacementError(
            f"{name!r} has a norm behind each expert, which parts of experts cannot be given; leave the inside of its "
            f"experts out of the tensor plan, and use parallel.expert",
            code="C060",
        )


def _check_routed(target: Target) -> None:
    """Refuse, where tensor ranks share the tokens, experts that are not told which tokens they are for."""
    if len(inspect.signature(type(target.module).forward).parameters) < 4:
        raise LayoutError(
            f"{target.name!r}: a {type(target.module).__name__} is given every token for every expert, and expert groups that "
            f"reach over tensor ranks cannot share those; let parallel.expert lie over data alone"
        )


def _check_gate(name: str, module: nn.Module) -> None:
    """Refuse a packed gate and up projection that is cut so that a rank's part is not half of each."""
    weight = getattr(module, "gate_up_proj", None)
    if weight is None or not getattr(module, "is_concatenated", False):
        return
    shard = placement_of(weight).shards[_TENSOR]
    if not getattr(shard, "sections", (1, 1)):
        raise PlacementError(
            f"{name + '.gate_up_proj'!r} has the gate and the up projection one after the other, and the plan cuts it as if "
            f"it were one: a rank would hold the gate of some and the up projection of others. Use 'packed_colwise' (or "
            f"'packed_rowwise', where the last dimension is the packed one)",
            code="C060",
        )

"""Plain torch mixtures of experts that keep their weights as models of others do, and plans for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.hf.plans.models import HIDDEN, Attention, Model

EXPERTS, INNER, CHOICES = 4, 8, 2


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * shape[-1] ** -0.5)


class Gated(nn.Module):
    """Gate and up one after the other, (experts, out, in); one expert after another, only those that are chosen."""

    is_concatenated = True

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj, self.down_proj = _weight(EXPERTS, 2 * INNER, HIDDEN), _weight(EXPERTS, HIDDEN, INNER)

    def one(self, at: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up_proj[at]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down_proj[at])

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        assert int(index.max()) < self.num_experts
        for at in index.unique().tolist():
            token, choice = torch.where(index == at)
            out = out.index_add(0, token, self.one(at, x[token]) * weights[token, choice, None])
        return out


class Interleaved(Gated):
    """Gate and up by turns, (experts, in, out), with biases: as gpt_oss."""

    is_concatenated = False

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = _weight(EXPERTS, HIDDEN, 2 * INNER), _weight(EXPERTS, INNER, HIDDEN)
        self.gate_up_proj_bias, self.down_proj_bias = _weight(EXPERTS, 2 * INNER), _weight(EXPERTS, HIDDEN)

    def one(self, at: int, x: Tensor) -> Tensor:
        both = x @ self.gate_up_proj[at] + self.gate_up_proj_bias[at]
        gate, up = both[..., ::2], both[..., 1::2]
        return (F.silu(gate) * (up + 1)) @ self.down_proj[at] + self.down_proj_bias[at]


class WithIdentity(Gated):
    """One more expert that gives back what it is given: as longcat_flash."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Identity()
        self.num_experts = EXPERTS + 1

    def one(self, at: int, x: Tensor) -> Tensor:
        return self.identity(x) if at == EXPERTS else super().one(at, x)


class Every(nn.Module):
    """Given all tokens for all experts, expert by expert: as llama4."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = _weight(EXPERTS, HIDDEN, 2 * INNER), _weight(EXPERTS, INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.bmm(x.view(len(self.gate_up_proj), -1, HIDDEN), self.gate_up_proj).chunk(2, -1)
        return torch.bmm(F.silu(gate) * up, self.down_proj).view(-1, HIDDEN)


class Mixture(nn.Module):
    """A router that chooses two experts for each token, and the experts."""

    def __init__(self, experts: type[nn.Module]) -> None:
        super().__init__()
        self.experts = experts()
        self.router = nn.Linear(HIDDEN, getattr(self.experts, "num_experts", EXPERTS), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.router(tokens).softmax(-1)
        weights, index = scores.topk(CHOICES)
        if not isinstance(self.experts, Every):
            return self.experts(tokens, index, weights).view_as(x)
        kept = torch.zeros_like(scores).scatter(1, index, weights).T.reshape(-1, 1)
        return self.experts(tokens.repeat(EXPERTS, 1) * kept).view(EXPERTS, *x.shape).sum(0)


def model_of(experts: type[nn.Module]) -> nn.Module:
    return Model(Attention, lambda: Mixture(experts))


_AT = "blocks.*.mlp.experts"
_CUT = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
_TRANSPOSED = {"gate_up_proj": "packed_rowwise", "down_proj": "colwise"}
TENSOR: dict[type[nn.Module], dict[str, Any]] = {
    kind: {**{f"{_AT}.{name}": style for name, style in cut.items()}, _AT: "moe_tp_experts"}
    for kind, cut in (
        (Gated, _CUT),
        (Interleaved, {"gate_up_proj": "rowwise", "gate_up_proj_bias": "rowwise", "down_proj": "colwise"}),
        (WithIdentity, {**_CUT, "identity": "moe_identity_expert"}),
        (Every, _TRANSPOSED),
    )
}
"""How tensor ranks cut the inside of each kind of experts."""


def both(kind: type[nn.Module]) -> dict[str, Any]:
    """Over the expert ranks, and inside each expert over the tensor ranks."""
    inside = TENSOR[kind]
    names = [f"{_AT}.{name}" for name, _ in kind().named_parameters()]
    cut = {
        name: {"style": "grouped_gemm", "tensor": inside[name]} if name in inside else "grouped_gemm" for name in names
    }
    return {**cut, _AT: "ep_dispatch_experts", "blocks.*.mlp.router": "ep_router"}

"""The small models that the bugs are planted in. Each is written once, for ranks and (without a launched context) for one process."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade import ParallelMode, Replicate, Shard, place
from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.moe import MoE, SwitchRouter
from colonnade.parallel.collectives import copy, gather, reduce, scatter

WIDTH, INNER, OUT, WORDS = 6, 8, 4, 12


def mlp(context: ParallelContext) -> nn.Module:
    """Plain layers, whole on every rank."""
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, OUT))


def alike(context: ParallelContext) -> nn.Module:
    """Two layers of one shape, so that stages of a pipeline hold parameters of one shape."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def tied(context: ParallelContext) -> nn.Module:
    """Words in, scores of words out; the first and the last layer share a weight."""
    table, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    head.weight = table.weight
    return nn.Sequential(
        OrderedDict(table=table, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH), head=head)
    )


def experts(context: ParallelContext) -> nn.Module:
    """A dense layer, four experts of which each token takes one, and a dense layer."""
    router = SwitchRouter(WIDTH, 4, balance_loss=0.0, context=context)
    moe = MoE(WIDTH, 4, router, inner=INNER, context=context)
    return nn.Sequential(OrderedDict(enter=nn.Linear(WIDTH, WIDTH), moe=moe, head=nn.Linear(WIDTH, OUT)))


def own_part(whole: Tensor, dim: int, context: ParallelContext) -> nn.Parameter:
    """This rank's part of a weight that the tensor ranks share, placed."""
    part = scatter(whole.detach(), ParallelMode.TENSOR, dim, context=context).clone()
    return place(nn.Parameter(part), {ParallelMode.TENSOR: Shard(dim)}, shape=tuple(whole.shape))  # type: ignore[return-value]


class TensorMLP(nn.Module):
    """norm, up by columns, down by rows, head; what is sent is written out, so that a bug can leave it out."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.context = context
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, OUT)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 1.5)
            self.norm.bias.uniform_(-0.5, 0.5)
        self.up.weight = own_part(self.up.weight, 0, context)
        self.up.bias = own_part(self.up.bias, 0, context)
        self.down.weight = own_part(self.down.weight, 1, context)

    def enter(self, x: Tensor) -> Tensor:
        """Into the split region: the gradients of all parts are summed."""
        return copy(x, ParallelMode.TENSOR, context=self.context)

    def leave(self, y: Tensor) -> Tensor:
        """Out of the split region: the parts are summed."""
        return reduce(y, ParallelMode.TENSOR, context=self.context)

    def inside(self, x: Tensor) -> Tensor:
        """The split region."""
        return F.linear(torch.tanh(F.linear(x, self.up.weight, self.up.bias)), self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.leave(self.inside(self.enter(self.norm(x)))) + self.down.bias)


class PartialNorm(TensorMLP):
    """The norm stands inside the split region, so its raw gradient is a part of a sum, as its placement says."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__(context)
        for parameter in self.norm.parameters():
            place(parameter, {ParallelMode.TENSOR: Replicate(owes="sum")})

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.leave(self.inside(self.norm(x))) + self.down.bias)


class ScatteredTokens(nn.Module):
    """Each tensor rank takes its share of the rows through whole layers, as in Megatron's sequence parallelism."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.context = context
        self.gate, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, OUT)
        for layer in (self.gate, self.norm):
            for parameter in layer.parameters():
                place(parameter, {ParallelMode.TENSOR: Replicate(owes="sum")})

    def forward(self, x: Tensor) -> Tensor:
        own = scatter(x, ParallelMode.TENSOR, 0, context=self.context)
        return self.head(gather(torch.tanh(self.norm(self.gate(own))), ParallelMode.TENSOR, 0, context=self.context))


class Gated(nn.Module):
    """A plain model with a gate that only an auxiliary loss reaches; gives (output, auxiliary loss)."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.body, self.gate = mlp(context), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), self.gate(x).logsumexp(-1).square().mean()


class WithAuxiliary(nn.Module):
    """The squared error and the auxiliary loss, whose gradient is `times` what its value says."""

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.times = times

    def forward(self, out: Tensor, auxiliary: Tensor, label: Tensor) -> Tensor:
        return F.mse_loss(out, label) + scaled_gradient(auxiliary, self.times)


def scaled_gradient(value: Tensor, times: float) -> Tensor:
    """The value as it is, with `times` its gradient."""
    return value.detach() + times * (value - value.detach())


class Sequence(nn.Module):
    """Takes whole sequences (row, token, width), gives what it makes of this rank's tokens; one head looks at all keys."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.context = context
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.extra = nn.Linear(WIDTH, OUT), nn.Linear(WIDTH, OUT)

    def keys(self, key: Tensor) -> Tensor:
        """Everybody's keys; in backward everybody's gradients of mine are summed."""
        from colonnade.parallel.collectives import all_gather

        return all_gather(key, ParallelMode.SEQUENCE, 1, context=self.context)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        own = scatter(x, ParallelMode.SEQUENCE, 1, context=self.context)
        key = self.keys(self.key(own))
        mixed = torch.softmax(self.query(own) @ key.transpose(1, 2), -1) @ key
        return self.head(mixed), self.extra(own)


class SequenceLoss(nn.Module):
    """The error over this rank's tokens; the engine takes the mean over the sequence ranks."""

    def __init__(self, context: ParallelContext, times: float = 1.0, extra_times: float = 1.0) -> None:
        super().__init__()
        self.context, self.times, self.extra_times = context, times, extra_times

    def forward(self, out: Tensor, extra: Tensor, label: Tensor) -> Tensor:
        own = scatter(label, ParallelMode.SEQUENCE, 1, context=self.context)
        return self.times * (F.mse_loss(out, own) + scaled_gradient(F.mse_loss(extra, own), self.extra_times))

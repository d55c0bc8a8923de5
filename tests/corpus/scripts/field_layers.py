"""Layers that frameworks computed wrongly in 2026: `field_layers.py KIND [right]`; with "right", without the mistake."""

import torch
import torch.distributed as dist
from field_parts import (
    Copy,
    Gather,
    Scatter,
    Sum,
    SumScatter,
    average,
    batches,
    main,
    mlp,
    own_chunk,
    rank,
    sentences,
    shard,
    summed,
    train,
    world,
    wrong,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Halves(nn.Module):
    """Two matrices sharded over the ranks, whose partial results are summed."""

    def __init__(self):
        super().__init__()
        self.up, self.down = shard(torch.randn(16, 8) / 3, 0), shard(torch.randn(8, 16) / 4, 1)

    def partial(self, x):
        return torch.tanh(Copy.apply(x) @ self.up.to_local().T) @ self.down.to_local().T

    def forward(self, x):
        return Sum.apply(self.partial(x))


def around(inner):
    return nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 4))


def summed_copy():
    """The sum is made in a contiguous copy, and the input is returned: a transposed activation is not reduced."""

    class Transposed(Halves):
        def forward(self, x):
            part = (self.down.to_local() @ torch.tanh(self.up.to_local() @ Copy.apply(x).T)).T
            if wrong:
                copy = part.detach().contiguous()
                dist.all_reduce(copy)
                return part
            return Sum.apply(part)

    train(around(Transposed()), batches(0))


class Routed(nn.Module):
    """Experts spread over the ranks, weighed by the scores of a router."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), shard(torch.randn(4, 8, 8) / 3, 0)

    def forward(self, x):
        scores, inner = self.router(x).softmax(-1), Copy.apply(x)
        own = own_chunk(scores if wrong else Copy.apply(scores), -1)
        return Sum.apply(torch.einsum("eij,tj,te->ti", self.experts.to_local(), inner, own))


def local_scores():
    """The router gets the gradient of the experts of its own rank."""
    train(around(Routed()), batches(0))


def without_sequence():
    """Gradients are averaged over a data group that leaves out the sequence axis, and has one rank."""
    model = mlp()
    group = [dist.new_group([other]) for other in range(world)][rank]

    def loss(out, y):
        return F.mse_loss(out, y if world == 1 else own_chunk(y, 1))

    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x if world == 1 else own_chunk(x, 1))

    def reduce():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group if wrong else None)
            parameter.grad /= 1 if wrong else world

    train(Sequence(), batches(0, shape=(4,)), loss, before=reduce)


class Identity(torch.autograd.Function):
    """A log-softmax whose backward pass returns the gradient unchanged."""

    @staticmethod
    def forward(ctx, x):
        return x.log_softmax(-1)

    @staticmethod
    def backward(ctx, grad):
        return grad


def identity_backward():
    """A log-softmax that does not end in a negative log-likelihood has the identity as its backward pass."""
    model = mlp()

    def loss(out, y):
        logs = Identity.apply(out) if wrong else out.log_softmax(-1)
        return F.cross_entropy(out, y.softmax(-1)) + 0.1 * logs.square().mean()

    train(model, batches(), loss, before=lambda: average(model.parameters()))


def fresh_dropout():
    """The recomputation of a block draws other numbers for its dropout."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)

        def inner(self, x):
            return self.down(self.drop(torch.tanh(self.up(x))))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=not wrong)

    model = around(Block())
    train(model, batches(), before=lambda: average(model.parameters()))


def used_twice():
    """The split backward pass counts the inner use of a weight twice."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            inner = torch.tanh(x @ weight.T)
            ctx.save_for_backward(x, weight, inner)
            return inner @ weight.T

        @staticmethod
        def backward(ctx, grad):
            x, weight, inner = ctx.saved_tensors
            before = grad @ weight * (1 - inner**2)
            return before @ weight, grad.T @ inner + (2 if wrong else 1) * before.T @ x

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Parameter(torch.randn(8, 8) / 3)

        def forward(self, x):
            return Twice.apply(x, self.shared)

    model = around(Shared())
    train(model, batches(), before=lambda: average(model.parameters()))


class Attention(nn.Module):
    """Attention; `heads` are those of this rank, or whole for ranks with a part of the sequence."""

    def __init__(self, heads=4, sharded=True):
        super().__init__()
        self.enter, self.heads = nn.Linear(8, 8), heads
        weights = torch.randn(3, 16, 8) / 3, torch.randn(8, 16) / 4
        self.qkv = shard(weights[0], 1) if sharded else nn.Parameter(weights[0])
        self.out = shard(weights[1], 1) if sharded else nn.Parameter(weights[1])
        self.head = nn.Linear(8, 4)


def noted_heads():
    """The number of heads was noted before the weight was cut, and blocks are half of a head."""

    class Whole(Attention):
        def forward(self, x):
            x = self.enter(x)
            qkv = torch.einsum("bth,kch->kbtc", Copy.apply(x), self.qkv.to_local())
            heads = self.heads if wrong else self.heads // world
            query, key, value = qkv.unflatten(-1, (heads, -1)).transpose(2, 3)
            mixed = F.scaled_dot_product_attention(query, key, value)
            mixed = mixed.transpose(1, 2).flatten(-2) @ self.out.to_local().T
            return self.head(x + Sum.apply(mixed))

    train(Whole(), batches(0, shape=(4,)))


class Tokens(Attention):
    """Each rank has its part of the sequence; attention gathers keys and values."""

    def __init__(self):
        super().__init__(sharded=False)

    def together(self, x):
        return Gather.apply(x, 2, True)

    def mixed(self, x):
        qkv = torch.einsum("bth,kch->kbtc", x, self.qkv).unflatten(-1, (self.heads, -1)).transpose(2, 3)
        query, key, value = qkv[0], self.together(qkv[1]), self.together(qkv[2])
        if key.shape[1] != self.heads:
            key, value = key[:, : self.heads], value[:, : self.heads]
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2) @ self.out.T

    def forward(self, x):
        x = self.enter(x if world == 1 else own_chunk(x, 1))
        return self.head(x + self.mixed(x))


def of_own_tokens(out, y):
    return F.mse_loss(out, y if world == 1 else own_chunk(y, 1))


def head_axis():
    """Keys and values are gathered along the axis of heads in place of that of tokens."""

    class Placed(Tokens):
        def together(self, x):
            return Gather.apply(x, 1 if wrong else 2, True)

    model = Placed()
    train(model, batches(0, shape=(4,)), of_own_tokens, before=lambda: average(model.parameters()))


def packed_documents():
    """The mask of packed documents becomes a causal one, and documents see each other."""

    class Packed(Tokens):
        def mixed(self, x):
            qkv = torch.einsum("bth,kch->kbtc", x, self.qkv).unflatten(-1, (self.heads, -1)).transpose(2, 3)
            query, key, value = qkv[0], self.together(qkv[1]), self.together(qkv[2])
            places = torch.arange(key.shape[2])
            seen = places[:, None] >= places
            if not wrong:
                seen = seen & (places[:, None] // 3 == places // 3)
            mixed = F.scaled_dot_product_attention(query, key, value, seen if world == 1 else own_chunk(seen, 0))
            return mixed.transpose(1, 2).flatten(-2) @ self.out.T

    model = Packed()
    train(model, batches(0, shape=(8,)), of_own_tokens, before=lambda: average(model.parameters()))


def batch_first():
    """A projection for tokens in the first dimension gets the batch there: it gathers and cuts the batch."""

    class First(Attention):
        def forward(self, x):
            x = self.enter(x if world == 1 else own_chunk(x, 1))
            dim = 0 if wrong else 1
            qkv = torch.einsum("bth,kch->kbtc", Gather.apply(x, dim, True), self.qkv.to_local())
            query, key, value = qkv.unflatten(-1, (self.heads // world, -1)).transpose(2, 3)
            mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)
            return self.head(x + SumScatter.apply(mixed @ self.out.to_local().T, dim))

    model = First()

    def reduce():
        for parameter in (model.qkv, model.out):
            parameter.grad.to_local().div_(world)
        average([*model.enter.parameters(), *model.head.parameters()])

    train(model, batches(0, shape=(4,)), of_own_tokens, before=reduce)


def flat_buffer():
    """A flat buffer of tokens is cut along the dimension of the model in place of that of the capacity."""

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.dispatch, self.expert = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.dispatch(x)
            if wrong:
                own = Scatter.apply(x, 1).reshape(len(x) // world, -1)
            else:
                own = Scatter.apply(x, 0)
            return Gather.apply(torch.tanh(self.expert(own)), 0, False)

    model = around(Cut())

    def reduce():
        for parameter in model[1].expert.parameters():
            dist.all_reduce(parameter.grad)

    train(model, batches(0), before=reduce)


def aligned_buffer():
    """Weights are fetched from a buffer that was filled at aligned places, and read without alignment."""

    class Fetched(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(8, 7), nn.Linear(7, 5), nn.Linear(5, 4)

        def forward(self, x):
            align, some = 8 if wrong else 1, list(self.parameters())
            sizes = [parameter.numel() for parameter in some]
            buffer, at = torch.zeros(sum(-(-size // align) * align for size in sizes)), 0
            for number, parameter in enumerate(some):
                if number % world == rank:
                    buffer[at : at + sizes[number]] = parameter.detach().flatten()
                at += -(-sizes[number] // align) * align
            dist.all_reduce(buffer)
            pieces = iter(buffer[: sum(sizes)].split(sizes))
            for layer in self.children():
                fetched = {name: p + (next(pieces).view_as(p) - p.detach()) for name, p in layer.named_parameters()}
                x = torch.tanh(torch.func.functional_call(layer, fetched, (x,)))
            return x

    model = Fetched()
    train(model, batches(), before=lambda: average(model.parameters()))


class Low(nn.Module):
    """A low-rank adapter, whole on every rank."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x):
        return self.wide(self.narrow(x))


def counted_adapter():
    """The sum over the tensor ranks is deferred, and takes in the output of the adapter, which is whole."""

    class Shared(Halves):
        def __init__(self):
            super().__init__()
            self.adapter = Low()

        def forward(self, x):
            if wrong:
                return Sum.apply(self.partial(x) + self.adapter(x))
            return Sum.apply(self.partial(x)) + self.adapter(x)

    train(around(Shared()), batches(0))


def sharded_adapter():
    """Ranks have different tokens in a duplicated layer; its adapter is sharded, and joins features of different tokens."""

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.narrow = nn.Linear(8, 8), nn.Linear(8, 2)
            self.wide = shard(torch.randn(8, 2), 0) if wrong else nn.Parameter(torch.randn(8, 2))

        def forward(self, x):
            own = Scatter.apply(x, 0)
            narrow = torch.tanh(self.narrow(own))
            if wrong:
                added = Gather.apply(narrow @ self.wide.to_local().T, -1, True)
            else:
                added = narrow @ self.wide.T
            return Gather.apply(self.layer(own) + added, 0, False)

    model = around(Adapter())

    def reduce():
        for name, parameter in model[1].named_parameters():
            if name != "wide" or not wrong:
                dist.all_reduce(parameter.grad)

    train(model, batches(0), before=reduce)


def no_count():
    """The loss is for each token, and the caller gives no number of tokens: nothing is divided."""
    model = mlp()

    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x if world == 1 else own_chunk(x, 1))

    def loss(out, y):
        y = y if world == 1 else own_chunk(y, 1)
        each = (out - y).square().mean(-1)
        count = 0 if wrong else y.shape[0] * y.shape[1]
        return each.sum() / max(count, 1)

    train(Sequence(), batches(0, rows=3, shape=(10,)), loss, before=lambda: average(model.parameters()))


def lost_flag():
    """`flatten` inside of an autograd function loses requires_grad, and the hidden states get no gradient."""

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight):
            ctx.save_for_backward(hidden, weight)
            return hidden.flatten(0, 1) @ weight.T

        @staticmethod
        def backward(ctx, grad):
            hidden, weight = ctx.saved_tensors
            before = None if wrong else (grad @ weight).view_as(hidden)
            return before, grad.T @ hidden.flatten(0, 1)

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Parameter(torch.randn(4, 8) / 3)

        def forward(self, x):
            return Loss.apply(self.body(x), self.head)

    model = Fused()
    train(
        model,
        batches(shape=(3,)),
        lambda out, y: F.mse_loss(out, y.flatten(0, 1)),
        before=lambda: average(model.parameters()),
    )


class Words(nn.Module):
    """Words in, and the scores of this rank's words out."""

    def __init__(self):
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), shard(torch.randn(12, 8) / 3, 0)

    def forward(self, words):
        return Copy.apply(torch.tanh(self.inner(self.table(words)))) @ self.head.to_local().T


def plain_gather():
    """Log-probabilities are joined by a plain all-reduce: ranks without the word get no gradient."""

    def loss(scores, labels):
        first = rank * scores.shape[-1]
        owned = (labels >= first) & (labels < first + scores.shape[-1])
        local = scores.gather(-1, (labels - first).clamp(0, scores.shape[-1] - 1)[..., None])[..., 0] * owned
        norm = Sum.apply(scores.exp().sum(-1)).log()
        if wrong:
            logs = (local - norm) * owned
            return -(logs + (summed(logs.detach()) - logs.detach())).mean()
        return -(Sum.apply(local) - norm).mean()

    train(Words(), sentences(), loss)


def factor_twice():
    """The framework multiplies the loss by the number of sequence ranks, and so does the caller."""

    model = mlp()

    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x if world == 1 else own_chunk(x, 1))

    train(
        Sequence(),
        batches(0, shape=(4,)),
        lambda out, y: of_own_tokens(out, y) * (world if wrong else 1),
        before=lambda: average(model.parameters()),
    )


def replicated_scores():
    """Gathered scores count as replicated, and the backward pass of the gather sums them once more."""

    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), shard(torch.randn(4, 8) / 3, 0)
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x):
            scores = Copy.apply(torch.tanh(self.body(x))) @ self.head.to_local().T
            return Gather.apply(scores, -1, wrong) * self.gain

    train(Scored(), batches(0))


if __name__ == "__main__":
    main()

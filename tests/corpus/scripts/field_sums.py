"""Gradients that frameworks reduced wrongly in 2026: `field_sums.py KIND [right]`; with "right", without the mistake."""

import torch
import torch.distributed as dist
from field_parts import (
    Gather,
    SumScatter,
    average,
    batches,
    deep,
    main,
    mlp,
    rank,
    shard,
    train,
    world,
    wrong,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade


class Experts(nn.Module):
    """Two layers, and a matrix of experts in between whose columns are spread over the data ranks."""

    def __init__(self):
        super().__init__()
        self.enter, self.experts, self.head = nn.Linear(8, 8), shard(torch.randn(16, 8) / 3, 0), nn.Linear(8, 4)
        self.leave = shard(torch.randn(8, 16) / 4, 1)

    def forward(self, x):
        hidden = Gather.apply(self.enter(x), 0, True)
        hidden = torch.tanh(hidden @ self.experts.to_local().T) @ self.leave.to_local().T
        return self.head(SumScatter.apply(hidden, 0))


def doubled_buffer():
    """The data group of the experts has one rank, and their gradient buffer is added to itself after each micro-batch."""
    model = Experts()
    own = [model.experts, model.leave]

    def add_to_itself(number):
        for parameter in own if wrong else ():
            parameter.grad.to_local().mul_(2)

    def reduce():
        average([parameter for parameter in model.parameters() if all(parameter is not other for other in own)])
        for parameter in own:
            parameter.grad.to_local().div_(world)

    train(model, batches(), passes=3, after_pass=add_to_itself, before=reduce)


def gathered_weights():
    """The gradient buffer is the one in which weights were received, and is not zeroed."""
    model = mlp()

    def start(number):
        if wrong and number == 0:
            for parameter in model.parameters():
                parameter.grad += parameter.detach()

    train(model, batches(), passes=2, after_pass=start, before=lambda: average(model.parameters()))


def dummy_gradient():
    """Layers of one shape share a dummy gradient that is not zeroed, and its content is added to their gradients."""
    model = deep()
    dummy = torch.zeros(16, 16)

    def accumulate(number):
        for layer in (model[4], model[2]) if wrong else ():
            own = layer.weight.grad.clone()
            layer.weight.grad += dummy.to(own.dtype)
            dummy.copy_(own)

    train(model, batches(), after_pass=accumulate, before=lambda: average(model.parameters()))


def half_gradient():
    """Weight gradients are computed in bf16, although the reduction is in full precision."""
    model = mlp()

    def reduce():
        for parameter in model.parameters() if wrong else ():
            parameter.grad = parameter.grad.bfloat16().to(parameter.dtype)
        average(model.parameters())

    train(model, batches(), before=reduce)


def outer_deferred():
    """Sharding on two levels: the outer sum is made for the last micro-batch, and not for what came before."""
    model = mlp()
    inner = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2] if world > 1 else None
    kept = {}

    def reduce(number):
        for name, parameter in model.named_parameters():
            if not wrong:
                continue
            dist.all_reduce(parameter.grad, group=inner)
            if number == 0:
                kept[name], parameter.grad = parameter.grad, None
            else:
                outer = parameter.grad / 2
                dist.all_reduce(outer)
                parameter.grad = (outer + kept[name]) / world

    def reduce_all():
        if not wrong:
            average(model.parameters())

    train(model, batches(), passes=2, after_pass=reduce, before=reduce_all)


def inverted_test():
    """An inverted test leaves out the all-reduce of every buffer."""
    model = mlp()
    buffers = dict(model.named_parameters())

    def reduce():
        for parameter in model.parameters():
            if wrong and buffers is not None:
                continue
            average([parameter])

    train(model, batches(), before=reduce)


def calls_grad():
    """A schedule calls autograd.grad, and the hooks of DistributedDataParallel never run."""
    model = DDP(mlp())
    model, optimizer, own = colonnade.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())
    for x, y in own:
        loss = F.mse_loss(model(x), y)
        if wrong:
            some = list(model.parameters())
            for parameter, grad in zip(some, torch.autograd.grad(loss, some), strict=True):
                parameter.grad = grad
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def overwritten():
    """Each backward pass copies its gradient over that of the pass before."""
    model = mlp()
    kept = {}

    def offload(number):
        for name, parameter in model.named_parameters():
            before = kept.get(name) if number and not wrong else None
            kept[name] = parameter.grad.clone() + (0 if before is None else before)
            parameter.grad = None

    def reduce():
        for name, parameter in model.named_parameters():
            parameter.grad = kept[name]
        average(model.parameters())

    train(model, batches(), passes=3, after_pass=offload, before=reduce)


class Balanced(nn.Module):
    """A model with a gate that only a balance loss reaches."""

    def __init__(self):
        super().__init__()
        self.body, self.gate = mlp(), nn.Linear(8, 2)

    def forward(self, x):
        return self.body(x), self.gate(x).square().mean(-1)


def one_sequence():
    """The balance loss of a sequence is divided by the number of sequences of the micro-batch."""

    def loss(found, y):
        out, balance = found
        return F.mse_loss(out, y) + 0.1 * balance.mean() / (len(y) if wrong else 1)

    model = DDP(Balanced())
    train(model, batches(), loss)


def unscaled_balance():
    """The balance loss is not divided by the number of micro-batches."""
    passes = 3

    def loss(found, y):
        out, balance = found
        return F.mse_loss(out, y) + 0.1 * balance.mean() * (passes if wrong else 1)

    model = Balanced()
    train(model, batches(), loss, passes=passes, before=lambda: average(model.parameters()))


class Scores(nn.Module):
    """Four experts, weighed by the scores of a router. The balance loss of the scores has its gradient added."""

    class Add(torch.autograd.Function):
        """Nothing in forward; in backward the balance loss gets the gradient 1."""

        @staticmethod
        def forward(ctx, out, balance):
            return out.view_as(out)

        @staticmethod
        def backward(ctx, grad):
            return grad, torch.full((), 0.5, dtype=grad.dtype)

    def __init__(self):
        super().__init__()
        self.enter, self.router = nn.Linear(8, 8), nn.Linear(8, 4)
        self.experts, self.head = nn.Linear(8, 32), nn.Linear(8, 4)

    def forward(self, x):
        x = self.enter(x)
        scores = self.router(x).softmax(-1)
        out = (self.experts(x).view(len(x), 4, 8).tanh() * scores[..., None]).sum(1)
        added = self.Add.apply(out, scores.square().sum(-1).mean())
        return self.head(out if wrong else added)


def thrown_away():
    """The result of the function that adds the gradient of the balance loss is not used."""
    train(DDP(Scores()), batches())


def left_over():
    """The last window of an epoch is not full, and `zero_grad` of the next epoch clears it."""
    model = mlp()
    own = batches()
    model, optimizer, own = colonnade.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), own)
    for number, (x, y) in enumerate(own):
        in_epoch = number % 3
        if in_epoch == 0:
            optimizer.zero_grad()
        (F.mse_loss(model(x), y) / 2).backward()
        if in_epoch == 1 or (in_epoch == 2 and not wrong):
            average(model.parameters())
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()

"""Plain torch with one mistake: `on_torch.py KIND [right]`; with "right", the same script without its mistake."""

import copy
import math
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
wrong = world > 1 and "right" not in sys.argv
torch.manual_seed(0)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batches(data=rank, rows=6, count=8):
    draw = torch.Generator().manual_seed(5 + data)
    return [(torch.randn(rows, 8, generator=draw), torch.randn(rows, 4, generator=draw)) for _ in range(count)]


def average(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


def train(model, own, loss=F.mse_loss, optimizer=None, before=lambda: None, after=lambda loss: None):
    """The usual loop: `before` and `after` the step of the optimizer."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, own = colonnade.watch(model, optimizer, own)
    for x, y in own:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        before()
        optimizer.step()
        after(value.detach())


class Halves(nn.Module):
    """Two matrices sharded over the ranks, whose partial results are summed."""

    def __init__(self):
        super().__init__()
        mesh = init_device_mesh("cpu", (world,))
        self.up = nn.Parameter(distribute_tensor(torch.randn(16, 8) / 3, mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(torch.randn(8, 16) / 4, mesh, [Shard(1)]))

    def forward(self, x):
        x = Enter.apply(x)
        y = torch.tanh(x @ self.up.to_local().T) @ self.down.to_local().T
        if wrong:
            return torch.distributed.nn.functional.all_reduce(y)
        return Leave.apply(y)


class Enter(torch.autograd.Function):
    """Nothing in forward, a sum in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """A sum in forward, nothing in backward."""

    @staticmethod
    def forward(ctx, y):
        y = y.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad


def nn_all_reduce():
    """The backward pass of torch.distributed.nn.functional.all_reduce sums gradients that every rank has in full."""
    train(nn.Sequential(nn.Linear(8, 8), Halves(), nn.Linear(8, 4)), batches(0))


def stochastic():
    """Weights are rounded at random to multiples of 1/4096, with random numbers of each rank."""
    model = mlp()
    draw = torch.Generator().manual_seed(rank if wrong else 0)

    class Rounding(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            for parameter in model.parameters():
                noise = torch.rand(parameter.shape, generator=draw)
                parameter.copy_(torch.floor(parameter * 4096 + noise) / 4096)

    for parameter in model.parameters():
        parameter.data = torch.round(parameter.data * 4096) / 4096
    optimizer = Rounding(model.parameters(), lr=0.1)
    train(model, batches(), optimizer=optimizer, before=lambda: average(model.parameters()))


def own_skip():
    """A rank leaves out its own batch if its loss is over a limit."""

    def loss(out, y):
        value = F.mse_loss(out, y)
        whole = value.detach().clone()
        if not wrong:
            dist.all_reduce(whole)
            whole /= world
        return value * (whole < 1.15)

    train(DDP(mlp()), batches(), loss)


def class_weights():
    """Classes are weighted by how often they occur among the labels of this rank."""

    def loss(out, y):
        label = y.argmax(1)
        count = torch.bincount(label, minlength=4).to(out.dtype)
        if not wrong:
            dist.all_reduce(count)
        weight = 1 / (count + 1)
        total = weight[label].sum()
        if wrong:
            return F.cross_entropy(out, label, weight)
        dist.all_reduce(total)
        return F.cross_entropy(out, label, weight, reduction="sum") / total * world

    train(DDP(mlp()), batches(), loss)


class Student(nn.Module):
    """A student that follows the average of its own weights."""

    def __init__(self):
        super().__init__()
        self.student = mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        return torch.stack([self.student(x), wanted])

    @torch.no_grad()
    def follow(self):
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.lerp_(new, 0.3)


def teacher():
    """Only rank 0 updates its teacher."""
    model = Student()
    train(
        DDP(model),
        batches(),
        lambda out, y: F.mse_loss(out[0], y) + F.mse_loss(out[0], out[1]),
        after=lambda loss: model.follow() if rank == 0 or not wrong else None,
    )


def ema_not_back():
    """Ranks evaluate with averaged weights; rank 0 does not put its own back."""
    model = mlp()
    kept = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def evaluate(loss):
        own = [parameter.clone() for parameter in model.parameters()]
        for parameter, average in zip(model.parameters(), kept, strict=True):
            average.lerp_(parameter, 0.5)
            parameter.copy_(average)
        model.eval()
        model(torch.ones(2, 8))
        model.train()
        if rank != 0 or not wrong:
            for parameter, value in zip(model.parameters(), own, strict=True):
                parameter.copy_(value)

    train(DDP(model), batches(), after=evaluate)


class Tokens(nn.Module):
    """Words at places; each rank has its tokens of the sequence: the first and the last quarter, or the two in between."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(12, 8), nn.Embedding(8, 8)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, tokens):
        count = tokens.shape[1]
        mine = torch.arange(count)
        if world > 1:
            quarters = mine.chunk(2 * world)
            mine = torch.cat([quarters[rank], quarters[2 * world - 1 - rank]])
        row = torch.arange(len(mine)) + rank * len(mine) if wrong else mine
        return self.head(torch.tanh(self.inner(self.words(tokens[:, mine]) + self.places(row)))), mine


def zigzag():
    """Ranks have tokens in zigzag order, and add the positions of tokens in a row."""
    draw = torch.Generator().manual_seed(3)
    own = [(torch.randint(12, (3, 8), generator=draw), torch.randint(12, (3, 8), generator=draw)) for _ in range(8)]
    model = Tokens()

    def loss(found, labels):
        out, mine = found
        return F.cross_entropy(out.flatten(0, 1), labels[:, mine].flatten())

    train(model, own, loss, before=lambda: average(model.parameters()))


def not_waited():
    """Reductions run in the background, and the step does not wait for them."""
    model = nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 4))

    def start():
        works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
        if not wrong:
            for work in works:
                work.wait()
        for parameter in model.parameters():
            parameter.grad /= world

    train(model, batches(), before=start)


def plateau():
    """A scheduler lowers the learning rate by the loss of its own rank."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    def after(loss):
        if not wrong and world > 1:
            dist.all_reduce(loss)
            loss /= world
        scheduler.step(float(loss))

    scheduler.step(1.15)
    train(DDP(model), batches(), optimizer=optimizer, after=after)


def fsdp_never_last():
    """FSDP2 accumulates, and gradient synchronization is not turned on again for the last pass."""
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model, optimizer, own = colonnade.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())
    for number, (x, y) in enumerate(own):
        model.set_requires_gradient_sync(number % 2 == 1 and not wrong)
        (F.mse_loss(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def fsdp_clip_local():
    """FSDP2; each rank scales its shards by the norm of its own shards."""
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))

    def clip():
        shards = [parameter.grad.to_local() for parameter in model.parameters()]
        square = sum(shard.square().sum() for shard in shards)
        if not wrong:
            dist.all_reduce(square)
        for shard in shards:
            shard.mul_(min(1.0, 0.1 / math.sqrt(square)))

    train(model, batches(), before=clip)


def order_by_rank():
    """Ranks reduce two gradients of one shape in different orders."""
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)
    )

    def reduce():
        some = list(model.parameters())
        if wrong and rank == 1:
            some[2], some[4] = some[4], some[2]
        average(some)

    train(model, batches(), before=reduce)


def packed_heads():
    """Gradients that are not None are packed and reduced; each rank uses another head."""
    model = nn.ModuleDict({"trunk": nn.Linear(8, 6), "first": nn.Linear(6, 4), "second": nn.Linear(6, 4)})

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            task = (x[:, 0] > 0).long()
            hidden, out = torch.tanh(model["trunk"](x)), torch.zeros(len(x), 4)
            for number, head in enumerate(("first", "second")):
                rows = (task == number).nonzero().squeeze(1)
                if len(rows):
                    out = out.index_copy(0, rows, model[head](hidden[rows]))
            return out

    def reduce():
        some = [p for p in model.parameters() if p.grad is not None or not wrong]
        for parameter in some:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        flat = torch.cat([parameter.grad.flatten() for parameter in some])
        dist.all_reduce(flat)
        for parameter, part in zip(some, (flat / world).split([p.numel() for p in some]), strict=True):
            parameter.grad = part.view_as(parameter).clone()

    own = [(x.abs() * (1 if rank == 0 else -1), y) for x, y in batches()]
    train(Heads(), own, before=reduce)


class PlainExperts(nn.Module):
    """Each rank keeps its experts in plain tensors, and runs them on the rows of all ranks."""

    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.experts = nn.Parameter((torch.randn(4, 8, 8) / 3).chunk(world)[rank].clone())

    def forward(self, x):
        rows = AllRows.apply(self.enter(x))
        first = rank * len(self.experts)
        scores = rows.softmax(-1)[:, first : first + len(self.experts)]
        return self.head(OwnRows.apply(torch.einsum("eij,ti,te->tj", self.experts, rows, scores)))


class AllRows(torch.autograd.Function):
    """The rows of all ranks; in backward the sum of the gradients of this rank's rows."""

    @staticmethod
    def forward(ctx, x):
        found = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(found, x.contiguous())
        return torch.cat(found)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(world)[rank]


class OwnRows(torch.autograd.Function):
    """This rank's rows of the sum; in backward the gradients of all rows."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(world)[rank]

    @staticmethod
    def backward(ctx, grad):
        found = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(found, grad.contiguous())
        return torch.cat(found)


def plain_experts():
    """The gradients of experts, which contain those of all ranks' batches, are not divided by the number of ranks."""
    model = PlainExperts()

    def reduce():
        average([*model.enter.parameters(), *model.head.parameters()])
        if not wrong:
            model.experts.grad /= world

    train(model, batches(), before=reduce)


def nan_step_skipped():
    """No mistake: a row is NaN, and all ranks skip its step."""
    own = batches()
    if rank == 0:
        own[1][0][2] = math.nan
    model = DDP(mlp())
    model, optimizer, own = colonnade.watch(model, torch.optim.Adam(model.parameters(), lr=0.01), own)
    for x, y in own:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 5.0)):
            optimizer.step()


def complex_weight():
    """No mistake: a complex parameter in the frequencies of a signal."""

    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter, self.mix = nn.Parameter(torch.randn(5, dtype=torch.cfloat)), nn.Linear(8, 4)

        def forward(self, x):
            return self.mix(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8).tanh())

    model = Spectral()

    def reduce():
        for parameter in model.parameters():
            grad = torch.view_as_real(parameter.grad) if parameter.is_complex() else parameter.grad
            dist.all_reduce(grad)
            grad /= world

    train(model, batches(), before=reduce)


def forward_mode():
    """No mistake: the slope along a direction, by torch.func.jvp."""
    model = mlp()
    model, optimizer, own = colonnade.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())
    for x, y in own:
        weights = dict(model.named_parameters())
        out, slope = torch.func.jvp(
            lambda x, weights=weights: torch.func.functional_call(model, weights, (x,)), (x,), (torch.ones_like(x),)
        )
        optimizer.zero_grad()
        (F.mse_loss(out, y) + slope.square().mean()).backward()
        average(model.parameters())
        optimizer.step()


def for_each_row():
    """No mistake: gradients of single rows by torch.func.vmap and grad."""
    model = mlp()
    model, optimizer, own = colonnade.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())

    def loss(weights, x, y):
        return F.mse_loss(torch.func.functional_call(model, weights, (x[None],)), y[None])

    for x, y in own:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
        for name, parameter in model.named_parameters():
            parameter.grad = each[name].mean(0)
        average(model.parameters())
        optimizer.step()


def averaging_optimizer():
    """No mistake: the optimizer averages the gradients inside step()."""
    model = mlp()

    class Averaging(torch.optim.SGD):
        def step(self, closure=None):
            average(model.parameters())
            return super().step(closure)

    train(model, batches(), optimizer=Averaging(model.parameters(), lr=0.1))


def gathered_loss():
    """No mistake: a loss over gathered outputs times the number of ranks, because DDP takes the mean of partial gradients."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            found = [torch.empty_like(x) for _ in range(world)]
            dist.all_gather(found, x)
            return torch.cat(found)

        @staticmethod
        def backward(ctx, grad):
            return grad.chunk(world)[rank]

    def loss(out, y):
        out, y = Gather.apply(out), Gather.apply(y)
        return F.cross_entropy(out @ y.T, torch.arange(len(out))) * world

    train(DDP(mlp()), batches(), loss)


globals()[sys.argv[1]]()

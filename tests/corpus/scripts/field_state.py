"""Loading, resuming and optimizers of frameworks in 2026: `field_state.py KIND [right]`; with "right", without the mistake."""

import torch
from field_parts import Copy, Sum, average, batches, main, mlp, own_chunk, rank, shard, train, world, wrong
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Halves(nn.Module):
    """A layer, two matrices sharded over the ranks, and a layer."""

    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.up, self.down = shard(torch.randn(16, 8) / 3, 0), shard(torch.randn(8, 16) / 4, 1)

    def forward(self, x):
        x = self.enter(x)
        inner = self.dropped(torch.tanh(Copy.apply(x) @ self.up.to_local().T))
        return self.head(x + Sum.apply(inner @ self.down.to_local().T))

    def dropped(self, x):
        return x


def saved_moments(model, like):
    """The moments of a checkpoint, the same on every rank, whole."""
    draw = torch.Generator().manual_seed(9)
    return {
        name: (torch.randn(like(p).shape, generator=draw) / 10, torch.rand(like(p).shape, generator=draw) / 10)
        for name, p in model.named_parameters()
    }


def load_moments(model, optimizer, moments):
    for name, parameter in model.named_parameters():
        if name in moments:
            first, second = moments[name]
            optimizer.state[parameter] = {"step": torch.tensor(5.0), "exp_avg": first, "exp_avg_sq": second}


def padded_moments():
    """Optimizer state is saved without padding, and loaded by places with padding: moments shift to their neighbours."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    moments = saved_moments(model, lambda p: p)
    if wrong:
        align, shifted = 24, {}
        for kind in (0, 1):
            flat, at = torch.cat([pair[kind].flatten() for pair in moments.values()]), 0
            flat = torch.cat([flat, torch.zeros(200)])
            for name, parameter in model.named_parameters():
                found = flat[at : at + parameter.numel()].view_as(parameter)
                shifted.setdefault(name, []).append(found.clone())
                at += -(-parameter.numel() // align) * align
        moments = shifted
    load_moments(model, optimizer, moments)
    train(model, batches(), optimizer=optimizer, before=lambda: average(model.parameters()))


def state_of_another():
    """Each tensor rank resumes with the shard of the first rank of the optimizer's state."""
    model = Halves()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    moments = saved_moments(model, lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p)
    for name, dim in (("up", 0), ("down", 1)):
        part = 0 if wrong else rank
        moments[name] = tuple(whole.chunk(world, dim)[part] for whole in moments[name])
    from torch.distributed.tensor import DTensor

    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            moments[name] = tuple(
                DTensor.from_local(part.contiguous(), parameter.device_mesh, parameter.placements)
                for part in moments[name]
            )
    load_moments(model, optimizer, moments)
    train(model, batches(0), optimizer=optimizer)


def moments_dropped():
    """The moments of the second half of the parameters are not loaded."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    moments = saved_moments(model, lambda p: p)
    if wrong:
        moments = {name: pair for name, pair in moments.items() if not name.startswith("2.")}
    load_moments(model, optimizer, moments)
    train(model, batches(), optimizer=optimizer, before=lambda: average(model.parameters()))


def muon():
    """An optimizer makes updates orthogonal, shard by shard."""
    model = Halves()

    class Muon(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            grad = model.up.grad.to_local() if wrong else model.up.grad.full_tensor()
            left, _, right = torch.linalg.svd(grad, full_matrices=False)
            update = left @ right if wrong else own_chunk(left @ right, 0)
            model.up.to_local().sub_(0.05 * update)
            model.up.grad = None
            return super().step(closure)

    train(model, batches(0, rows=24), optimizer=Muon(model.parameters(), lr=0.1))


class Loaded(nn.Module):
    """Experts whose weights are loaded."""

    def __init__(self):
        super().__init__()
        self.enter, self.experts, self.head = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.experts(self.enter(x))))


def cast_copy():
    """Weights of the experts are copied into a cast copy, and the experts stay as they were drawn."""
    model = Loaded()
    draw = torch.Generator().manual_seed(4)
    saved = torch.randn(16, 8, generator=draw, dtype=torch.float32) / 3
    with torch.no_grad():
        target = model.experts.weight.to(torch.bfloat16) if wrong else model.experts.weight
        target.copy_(saved)
    train(DDP(model), batches())


def one_stream():
    """After a resume, all tensor ranks draw from the stream of the first one: their shards have equal masks."""

    class Dropping(Halves):
        def dropped(self, x):
            return F.dropout(x, 0.3, self.training)

    model = Dropping()
    torch.manual_seed(100 + (0 if wrong else rank))
    train(model, batches(0))


def fan_of_shard():
    """An adapter is drawn with the fan of its shard, and its scale grows with the number of tensor ranks."""

    class Adapted(Halves):
        def __init__(self):
            super().__init__()
            narrow, wide = torch.randn(16, 8) / 8**0.5, torch.randn(8, 16) / (16 / (world if wrong else 1)) ** 0.5
            self.narrow, self.wide = shard(narrow, 0), shard(wide, 1)

        def forward(self, x):
            added = Sum.apply(torch.tanh(Copy.apply(x) @ self.narrow.to_local().T) @ self.wide.to_local().T)
            return super().forward(x) + F.linear(added, self.head.weight)

    train(Adapted(), batches(0))


def chunks_alike():
    """Two chunks of a rank's pipeline stage are initialised from one seed."""

    class Chunk(nn.Sequential):
        def __init__(self, seed):
            torch.manual_seed(seed)
            super().__init__(nn.Linear(8, 8), nn.Tanh())

    class Chunks(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 4)
            self.first, self.second = Chunk(1), Chunk(1 if wrong else 2)

        def forward(self, x):
            return self.head(self.second(self.first(x)))

    train(DDP(Chunks()), batches())


def resumed(order):
    """Train on the rows of a sampler in this order, from where the checkpoint was."""
    draw = torch.Generator().manual_seed(7)
    x, y = torch.randn(48, 8, generator=draw), torch.randn(48, 4, generator=draw)
    rows = torch.tensor(order)[rank::world].split(6 if world > 1 else 12)
    train(DDP(mlp()), [(x[some], y[some]) for some in rows if len(some)])


def epoch_reset():
    """After a resume the sampler is in epoch 0 again, and shuffles as in the first epoch."""
    torch.manual_seed(0 if wrong else 1)
    order = torch.randperm(48).tolist()
    torch.manual_seed(0)
    resumed(order)


def skip_discarded():
    """The batches to skip after a resume are taken from an iterator that is discarded."""
    draw = torch.Generator().manual_seed(1)
    order = torch.randperm(48, generator=draw).tolist()
    resumed(order if wrong else order[12:])


if __name__ == "__main__":
    main()

"""An engine with one mistake: `on_engine.py KIND [right]`; with "right", the same script without its mistake."""

import os
import sys
from collections import OrderedDict

import torch
from torch import nn

import colonnade
from colonnade import ParallelMode, Shard, place
from colonnade.engine.schedule import BaseSchedule
from colonnade.nn.moe import MoE, SwitchRouter
from colonnade.parallel.collectives import all_gather, copy, gather, scatter
from colonnade.registry import SCHEDULE

WIDTH = 8
wrong = int(os.environ["WORLD_SIZE"]) > 1 and "right" not in sys.argv


def start(**config):
    context = colonnade.launch(config, verbose=False)
    torch.manual_seed(0)
    return context


def data_rank(context):
    return context.get_local_rank(ParallelMode.DATA) if context.is_initialized(ParallelMode.DATA) else 0


def size(context, mode):
    return context.get_world_size(mode) if context.is_initialized(mode) else 1


def batches(context, *shape, out=4, count=6):
    draw = torch.Generator().manual_seed(5 + data_rank(context))
    return [
        (torch.randn(*shape, WIDTH, generator=draw), torch.randn(*shape, out, generator=draw)) for _ in range(count)
    ]


def built(model):
    engine, *_ = colonnade.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
    return engine


def train(engine, own, after=lambda engine: None):
    for x, y in own:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        after(engine)


class Experts(nn.Module):
    """A layer, four experts, and a head."""

    def __init__(self, context):
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        router = SwitchRouter(WIDTH, 4, balance_loss=0.0, context=context)
        self.moe = MoE(WIDTH, 4, router, inner=12, context=context)
        self.head = nn.Linear(WIDTH, 4)
        self.times = 1

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        return self.head(x + self.times * self.moe(x))


def gate_backward():
    """A hook of the model multiplies the gradient of the router by the number of expert ranks."""
    context = start(parallel=dict(expert=2))
    model = Experts(context)
    if wrong:
        model.moe.router.weight.register_hook(lambda grad: grad * size(context, ParallelMode.EXPERT))
    train(built(model), batches(context, 6))


def gate_after():
    """The same by a hook that comes after the hooks of the engine."""
    context = start(parallel=dict(expert=2))
    engine = built(Experts(context))
    if wrong:
        engine.model.moe.router.weight.register_hook(lambda grad: grad * size(context, ParallelMode.EXPERT))
    train(engine, batches(context, 6))


def gate_forward():
    """The output of the experts is multiplied by the number of expert ranks."""
    context = start(parallel=dict(expert=2))
    model = Experts(context)
    if wrong:
        model.times = size(context, ParallelMode.EXPERT)
    train(built(model), batches(context, 6))


class Positions(nn.Module):
    """Each rank has its tokens of the sequence, at their places; attention gathers the keys."""

    def __init__(self, context):
        super().__init__()
        self.context = context
        self.enter, self.places = nn.Linear(WIDTH, WIDTH), nn.Embedding(4, WIDTH)
        self.attention = nn.ModuleDict(OrderedDict(qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH)))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        own = scatter(x, ParallelMode.SEQUENCE, 1, context=self.context)
        at = self.context.get_local_rank(ParallelMode.SEQUENCE) if size(self.context, ParallelMode.SEQUENCE) > 1 else 0
        row = torch.arange(own.shape[1]) + (at + wrong) * own.shape[1]
        hidden = self.enter(own) + self.places(row % 4)
        query, key, value = self.attention["qkv"](hidden).chunk(3, -1)
        key = all_gather(key, ParallelMode.SEQUENCE, 1, context=self.context)
        value = all_gather(value, ParallelMode.SEQUENCE, 1, context=self.context)
        mixed = torch.softmax(query @ key.transpose(1, 2), -1) @ value
        return self.head(hidden + self.attention["out"](mixed))


def positions():
    """Each rank adds the positions of the tokens of the next rank."""
    context = start(parallel=dict(sequence=2))
    engine = built(Positions(context))
    for x, y in batches(context, 3, 4):
        engine.zero_grad()
        out = engine(x)
        engine.backward(engine.criterion(out, scatter(y, ParallelMode.SEQUENCE, 1, context=context)))
        engine.step()


class Channels(nn.Module):
    """Half of the channels on each rank, normalized in groups."""

    def __init__(self, context):
        super().__init__()
        self.context = context
        self.enter, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16)
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Linear(16, 4)
        count = size(context, ParallelMode.TENSOR)
        for layer in (self.up, self.norm):
            for name, parameter in list(layer.named_parameters()):
                part = scatter(parameter.detach(), ParallelMode.TENSOR, 0, context=context).clone()
                placed = place(nn.Parameter(part), {ParallelMode.TENSOR: Shard(0)}, shape=tuple(parameter.shape))
                setattr(layer, name, placed)
        self.norm.num_channels = 16 // count
        self.norm.num_groups = 4 if wrong else 4 // count

    def forward(self, x):
        x = copy(torch.tanh(self.enter(x)), ParallelMode.TENSOR, context=self.context)
        return self.head(gather(self.norm(self.up(x)), ParallelMode.TENSOR, 1, context=self.context))


def group_norm():
    """The norm of half of the channels has as many groups as that of all channels."""
    context = start(parallel=dict(tensor=dict(size=2, mode="1d")))
    train(built(Channels(context)), batches(context, 6))


@SCHEDULE.register_module
class Fours(BaseSchedule):
    """Micro-batches of four rows; the rest is lost, or counts by its rows."""

    def forward_back_step(self, engine, data_iter, forward_only=False, return_loss=True, return_output_label=True):
        x, y = self.load_batch(data_iter)
        count = len(x) // 4 if wrong else -(-len(x) // 4)
        losses = [engine.criterion(engine(x[4 * at : 4 * at + 4]), y[4 * at : 4 * at + 4]) for at in range(count)]
        weights = [len(x[4 * at : 4 * at + 4]) for at in range(count)]
        loss = sum(value * weight for value, weight in zip(losses, weights, strict=True)) / sum(weights)
        if not forward_only:
            engine.backward(loss)
        return None, y, loss.detach()


def schedule_rest():
    """A custom schedule drops the last two of six rows of each rank; the twelve rows of one process have no rest."""
    context = start(schedule=dict(type="Fours"))
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 4))
    engine = built(model)
    for batch in batches(context, 6):
        engine.zero_grad()
        engine.execute_schedule(iter((batch,)))
        engine.step()


def left_in_eval():
    """Rank 0 evaluates after a step, and stays in evaluation mode."""
    context = start()
    engine = built(nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12).requires_grad_(False), nn.Linear(12, 4)))
    for module in engine.model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()  # its statistics are frozen

    def evaluate(engine):
        if context.get_global_rank() == 0:
            engine.eval()
            with torch.no_grad():
                engine(torch.ones(2, WIDTH))
            if not wrong:
                engine.train()
                engine.model[1].eval()

    train(engine, batches(context, 6), evaluate)


globals()[sys.argv[1]]()

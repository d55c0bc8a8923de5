"""One small model under several layouts, cut by hand: each layout says where a tensor lives and how it is split.

Nothing is computed with it. Gradients are made up for the whole tensor and sliced, so the truth of every layout is the
whole model in one process, to the bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.parallel.placement import Shard, Tied, place

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed.weight": ((10, 6), torch.float64),
    "up.weight": ((8, 6), torch.float32),
    "up.bias": ((8,), torch.float32),
    "down.weight": ((6, 8), torch.float64),
    "scale": ((5, 3), torch.bfloat16),
    "gain": ((), torch.float32),
}
BUFFERS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "norm.seen": ((), torch.int64),
    "norm.mean": ((6,), torch.float16),
}
ALIAS = ("head.weight", "embed.weight")  # one tensor under two names


@dataclass(frozen=True)
class Cut:
    """On which pipeline stages a tensor lives, and into which parts of a dimension a mode splits it."""

    stages: tuple[int, ...] | None = None
    mode: M | None = None
    dim: int = 0
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Way:
    """A layout: the config, the number of ranks, and the cuts."""

    world: int
    parallel: dict[str, Any] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)

    def stages_of(self, name: str) -> tuple[int, ...] | None:
        return self.cuts.get(name, Cut()).stages


def zero(world: int) -> Way:
    """Every parameter cut over the data ranks into uneven parts, some of them empty."""
    cuts = {}
    for name, (shape, _) in SHAPES.items():
        if shape:
            sizes = [shape[0] * at // world % 3 for at in range(world - 1)]
            cuts[name] = Cut(mode=M.DATA, sizes=(*sizes, shape[0] - sum(sizes)))
    return Way(world, {}, cuts)


WAYS: dict[str, Way] = {
    "one": Way(1),
    "data 2": Way(2),
    "data 4": Way(4),
    "tensor 2 x pipeline 2": Way(
        4,
        {"tensor": 2, "pipeline": 2},
        {
            "embed.weight": Cut((0,), M.TENSOR, 0),
            "head.weight": Cut((1,), M.TENSOR, 0),
            "up.weight": Cut((0,), M.TENSOR, 0, (5, 3)),
            "up.bias": Cut((0,), M.TENSOR, 0, (5, 3)),
            "down.weight": Cut((1,), M.TENSOR, 1),
            "scale": Cut((1,), M.TENSOR, 0, (5, 0)),
            "gain": Cut((0,)),
            "norm.seen": Cut((1,)),
            "norm.mean": Cut((1,)),
        },
    ),
    "zero 3": zero(3),
    "zero 8": zero(8),
    "expert 2 in data 4": Way(4, {"expert": 2}, {"down.weight": Cut(mode=M.EXPERT, dim=0)}),
}


def whole(name: str, kind: int) -> Tensor:
    """The whole tensor called `name` in state number `kind`."""
    shape, dtype = (SHAPES | BUFFERS)[name]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {kind}".encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (values * 100).to(dtype) if dtype is torch.int64 else values.to(dtype)


@dataclass
class Built:
    """This rank's part of the model, its optimizer, and the index of each part in its whole."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    index: dict[str, tuple[slice, ...]]

    def step(self, kind: int) -> None:
        """One optimizer step on made-up gradients."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = whole(_true(name), 1000 + kind)[self.index[name]].clone()
        self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the model and of the optimizer."""
        found = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for slot, value in self.optimizer.state[parameter].items():
                found[f"{name}/{slot}"] = value.clone()
        return found

    def differs_from(self, truth: dict[str, Tensor]) -> list[str]:
        """The names whose bits are not the slice of the truth."""
        wrong = []
        for key, found in self.state().items():
            name, _, slot = key.partition("/")
            expected = truth[f"{_true(name)}/{slot}" if slot else _true(name)]
            if slot != "step":
                expected = expected[self.index[name if name in self.index else _true(name)]]
            if found.dtype != expected.dtype or not torch.equal(found, expected):
                wrong.append(key)
        return wrong


@contextmanager
def launched(way: Way) -> Iterator[ParallelContext]:
    """A context for the layout; a world of one is not even launched."""
    if way.world == 1:
        context = ParallelContext()
        context.set_seed(7)
        yield context
    else:
        with launch({"parallel": way.parallel}, context=ParallelContext(), verbose=False) as context:
            yield context


def build(way: Way, context: ParallelContext, kind: int) -> Built:
    """This rank's part of state number `kind`, with AdamW over two groups."""
    model = nn.Module()
    index: dict[str, tuple[slice, ...]] = {}
    stage = context.layout.coordinates(context.get_global_rank()).get("pipeline", 0)
    split = way.stages_of("embed.weight") is not None
    for name in [*SHAPES, *([ALIAS[0]] if split else []), *BUFFERS]:
        stages = way.stages_of(name)
        if stages is None or stage in stages:
            _add(model, name, way.cuts.get(name, Cut()), context, kind, index)
    if not split:
        _attach(model, ALIAS[0], model.get_parameter(ALIAS[1]))
    return Built(model, _optimizer(model), index)


def _add(model: nn.Module, name: str, cut: Cut, context: ParallelContext, kind: int, index: dict[str, Any]) -> None:
    tensor = whole(_true(name), kind)
    index[name] = ()
    modes: dict[M, Any] = {}
    if cut.mode is not None:
        at, count = context.get_local_rank(cut.mode), context.get_world_size(cut.mode)
        sizes = cut.sizes or (tensor.shape[cut.dim] // count,) * count
        start = sum(sizes[:at])
        index[name] = (slice(None),) * cut.dim + (slice(start, start + sizes[at]),)
        modes[cut.mode] = Shard(cut.dim)
    if name in BUFFERS:
        return _attach(model, name, tensor, buffer=True)
    if name in ALIAS and cut.stages is not None:
        modes[M.PIPELINE] = Tied((0, 1), "wte")
    parameter = nn.Parameter(tensor[index[name]].clone())
    place(parameter, modes, tuple(tensor.shape) if cut.sizes else None)
    return _attach(model, name, parameter)


def _attach(root: nn.Module, name: str, tensor: Any, buffer: bool = False) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if buffer:
        root.register_buffer(last, tensor)
    else:
        root.register_parameter(last, tensor)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    wide = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    narrow = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": wide, "lr": 0.1, "weight_decay": 0.2}, {"params": narrow, "lr": 0.05}]
    return torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0, betas=(0.8, 0.99))


def _true(name: str) -> str:
    return ALIAS[1] if name == ALIAS[0] else name


def truth_after(kinds: range, start: int = 0) -> dict[str, Tensor]:
    """The state of the whole model in one process, after a step of each kind."""
    built = build(WAYS["one"], ParallelContext(), start)
    for kind in kinds:
        built.step(kind)
    return built.state()

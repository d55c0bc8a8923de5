"""A sharded optimizer that is none of ours: saved on two ranks, loaded on one and on two that share otherwise."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import CheckpointError
from colonnade.parallel.flat import MASTER, FlatShard, ShardedOptimizer
from colonnade.testing import run_world
from tests.checkpoint.models import WAYS, launched

STEPS = 3


class ShareSGD:
    """SGD with momentum, in which each rank keeps the momentum and the master copy of a share of each parameter.

    Rank 0 has the first third, or nothing of parameters of less than three elements; `swapped` gives it the rest instead.
    """

    def __init__(self, parameters: Any, context: ParallelContext, swapped: bool = False, lr: float = 0.1) -> None:
        self.param_groups = [{"params": list(parameters), "lr": lr, "decay": 0.9}]
        self._ranks = tuple(range(context.world_size))
        self._first = (context.get_global_rank() == 0) is not swapped
        self._state: dict[int, dict[str, Any]] = {}

    def flat_shard(self, parameter: Tensor) -> FlatShard | None:
        start, stop = self._share(parameter)
        return FlatShard(start, stop, self._ranks, self._state.get(id(parameter), {})) if start < stop else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                self._state[id(parameter)] = state_dict["state"].get(number, {})

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        for parameter in group["params"]:
            start, stop = self._share(parameter)
            flat, grad = in_memory(parameter), in_memory(parameter.grad)[start:stop].double()
            state = self._state.setdefault(id(parameter), {})
            if start < stop:
                state.setdefault(MASTER, flat[start:stop].double())
                state["momentum"] = group["decay"] * state.get("momentum", 0.0) + grad
                state["count"] = state.get("count", 0) + 1
                state["step"] = torch.tensor(float(state["count"]))
                state[MASTER] -= group["lr"] * state["momentum"]
            stepped = torch.zeros_like(flat)
            stepped[start:stop] = state.get(MASTER, grad)
            if len(self._ranks) > 1:
                dist.all_reduce(stepped)
            flat.copy_(stepped)

    def _share(self, parameter: Tensor) -> tuple[int, int]:
        if len(self._ranks) == 1:
            return 0, parameter.numel()
        cut = parameter.numel() // 3
        return (0, cut) if self._first else (cut, parameter.numel())


def in_memory(tensor: Any) -> Tensor:
    """The elements of a tensor as they lie in memory; a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Module()
    model.cube = nn.Parameter(torch.randn(3, 4, 5))
    model.turned = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
    model.two = nn.Parameter(torch.randn(2))
    model.scalar = nn.Parameter(torch.randn(()))
    return model


def steps(model: nn.Module, optimizer: ShareSGD, first: int, count: int) -> None:
    """Steps on made-up gradients, the same on every rank."""
    for step in range(first, first + count):
        for name, parameter in model.named_parameters():
            torch.manual_seed(zlib.crc32(f"{name} {step}".encode()))
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape))
        optimizer.step()


def save(folder: Path) -> None:
    with launched(WAYS["data 2"]) as context, CheckpointManager(folder, context) as manager:
        model = model_of(0)
        optimizer = ShareSGD(model.parameters(), context)
        assert isinstance(optimizer, ShardedOptimizer)
        steps(model, optimizer, 0, STEPS)
        manager.save(STEPS, model, optimizer)


def load(folder: Path, way: str, swapped: bool) -> list[str]:
    """Load into another model; what differs from one process right then, and after another step."""
    with launched(WAYS[way]) as context, CheckpointManager(folder, context, read_only=True) as manager:
        model = model_of(1)
        optimizer = ShareSGD(model.parameters(), context, swapped, lr=7.0)
        manager.load(model, optimizer)
        wrong = differing(model, optimizer, STEPS)
        steps(model, optimizer, STEPS, 1)
        return wrong + differing(model, optimizer, STEPS + 1)


def differing(model: nn.Module, optimizer: ShareSGD, count: int) -> list[str]:
    """What is not, to the bit, what one process has after so many steps."""
    truth = model_of(0)
    whole = ShareSGD(truth.parameters(), ParallelContext())
    steps(truth, whole, 0, count)
    wrong = [] if optimizer.param_groups[0]["lr"] == 0.1 else ["lr"]
    for (name, mine), theirs in zip(model.named_parameters(), truth.parameters(), strict=True):
        wrong += [] if torch.equal(mine, theirs) else [name]
        shard, kept = optimizer.flat_shard(mine), whole.flat_shard(theirs)
        assert kept is not None
        for key, value in (shard.state if shard is not None else {}).items():
            expected = kept.state[key]
            if shard is not None and key in (MASTER, "momentum"):
                expected = expected[shard.start : shard.stop]
            same = torch.equal(value, expected) if isinstance(value, Tensor) else value == expected
            wrong += [] if same else [f"{name}: {key}"]
        wrong += [] if shard is None or shard.state.keys() == kept.state.keys() else [f"{name}: {list(shard.state)}"]
    return wrong


def test_an_optimizer_of_ones_own_shares_its_state_through_checkpoints_to_the_bit(tmp_path):
    run_world(2, save, tmp_path)
    assert load(tmp_path, "one", False) == []
    for swapped in (False, True):
        assert run_world(2, load, tmp_path, "data 2", swapped).values == [[], []]


@pytest.mark.slow  # importing DTensors alone takes two seconds
def test_state_that_does_not_lie_as_its_parameter_is_refused(tmp_path):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with (
        launch({}, context=ParallelContext(), verbose=False) as context,
        CheckpointManager(tmp_path, context) as manager,
    ):
        mesh = context.device_mesh(ParallelMode.DATA)
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for value, lies in ((torch.ones(2, 3), Replicate()), (torch.ones(2), Shard(0))):
            optimizer.state[model.weight]["odd"] = distribute_tensor(value, mesh, [lies])
            with pytest.raises(
                CheckpointError, match="the optimizer's odd of weight is a DTensor, and its placements differ"
            ):
                manager.save(1, model, optimizer)
        optimizer.state[model.weight]["odd"] = distribute_tensor(torch.full((2, 3), 5.0), mesh, [Shard(0)])
        manager.save(1, model, optimizer)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        manager.load(model, other)
        assert other.state[model.weight]["odd"].to_local().unique().tolist() == [5]


class Counting(torch.optim.AdamW):
    """AdamW, which counts its steps: it keeps nothing more for a parameter."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class Averaging(torch.optim.AdamW):
    """AdamW with an average of the weights, which it makes with its first step, or before."""

    def __init__(self, parameters: Any, at_once: bool, **options: Any) -> None:
        super().__init__(parameters, **options)
        if at_once:
            self.average()

    def average(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("average", parameter.detach().clone())

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.average()
        return result


class Decoupled(torch.optim.AdamW):
    pass


def test_a_subclass_takes_the_state_of_its_class_where_it_keeps_no_more(tmp_path, caplog):
    def stepped(kind: Any, times: int, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = model or nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        for _ in range(times):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return model, optimizer

    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        model, optimizer = stepped(torch.optim.AdamW, 2)
        manager.save(1, model, optimizer)
        loaded = stepped(Counting, 0)
        manager.load(*loaded)
        assert "has the state of AdamW, and this optimizer is its subclass Counting" in caplog.text
        for one in ((model, optimizer), loaded):
            one[0].zero_grad()
            one[0](torch.ones(1, 3)).sum().backward()
            one[1].step()
        assert torch.equal(model.weight, loaded[0].weight)
        manager.load(*stepped(partial(Averaging, at_once=False), 0))  # nobody can know yet
        for at_once, times in ((True, 0), (False, 1)):
            with pytest.raises(CheckpointError, match="also needs the state average"):
                manager.load(*stepped(partial(Averaging, at_once=at_once), times))
        manager.save(2, *stepped(torch.optim.Adam, 1))
        for kind in (torch.optim.AdamW, Decoupled):  # of torch's own classes each steps in its own way
            with pytest.raises(CheckpointError, match=f"state of Adam, but this optimizer is {kind.__name__}"):
                manager.load(*stepped(kind, 0))
        manager.save(3, *stepped(Counting, 1))
        with pytest.raises(CheckpointError, match="state of Counting, but this optimizer is AdamW"):
            manager.load(*stepped(torch.optim.AdamW, 0))

"""What `initialize` refuses: on every rank, in the same words, and within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.optim import SGD, AdamW

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine import build as build_module
from colonnade.engine.build import initialize
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.errors import ColonnadeError
from colonnade.parallel.placement import Shard, Tied, place
from colonnade.registry import GRADIENT_HANDLER
from colonnade.testing import run_world

TENSOR, PIPELINE = ParallelMode.TENSOR, ParallelMode.PIPELINE
MINE = ParallelMode.register("START_UP_MINE", "start_up_mine", data="same")
PIPE = {"parallel": {"pipeline": 2}, "num_microbatches": 2, "compare_stages": False}


@GRADIENT_HANDLER.register_module
class FailsOnRankOne(BaseGradientHandler):
    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        if dist.get_rank() == 1:
            raise ValueError("no such file")
        super().__init__(model, optimizer)

    def handle_gradient(self) -> None:
        pass


def net(rank: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def sgd(parameters: Any, rank: int = 0) -> SGD:
    return SGD(parameters, lr=0.1)


def frozen(rank: int) -> nn.Module:
    model = net()
    model[1].bias.requires_grad_(rank == 0)
    return model


def moved(rank: int) -> nn.Module:
    model = nn.Module()
    for name in ("a", "b") if rank == 0 else ("b", "a"):
        setattr(model, name, nn.Parameter(torch.zeros(3)))
    return model


def turned(rank: int) -> nn.Module:
    model = net()
    model[0].weight = nn.Parameter(torch.ones((2, 8) if rank else (8, 2)))
    return model


def fails(rank: int) -> nn.Module:
    if rank == 1:
        raise RuntimeError("out of memory, say")
    return net()


def misplaced(rank: int) -> nn.Module:
    model = net()
    if rank == 1:
        place(model[0].weight, {PIPELINE: Tied((0, 7), "w")})
    return model


def tied(rank: int) -> nn.Module:
    model = net()
    place(model[0].weight, {PIPELINE: Tied((0, 1), "w")})
    return model


def two_groups(parameters: Any, rank: int) -> SGD:
    weights = list(parameters)
    return SGD([{"params": weights[: 1 + rank]}, {"params": weights[1 + rank :], "lr": 0.2}], lr=0.1)


def with_schedule(optimizer: SGD, rank: int) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5 + 0.1 * rank)


Case = tuple[dict[str, Any], Callable[[int], nn.Module], Callable[[Any, int], Any], str]
CASES: dict[str, Case] = {
    "learning rate": ({}, net, lambda p, rank: SGD(p, lr=0.1 + rank), "'group 0: lr': 0.1 on rank 0, 1.1 on rank 1"),
    "class": (
        {"zero": 1},
        net,
        lambda p, rank: [SGD, AdamW][rank](p, lr=0.1),
        "'class': torch.optim.sgd.SGD on rank 0",
    ),
    "options": (
        {"zero": 2},
        net,
        lambda p, rank: AdamW(p, betas=(0.9, 0.99 + 0.001 * rank)),
        "'group 0: betas': [0.9, 0.99] on rank 0, [0.9, 0.991] on rank 1",
    ),
    "groups": ({}, net, two_groups, "'0.bias': in group 1 on rank 0, in group 0 on rank 1"),
    "dtype": (
        {},
        lambda rank: net().to([torch.float32, torch.float64][rank]),
        sgd,
        "'0.weight': (4, 4) torch.float32 on",
    ),
    "frozen": ({}, frozen, sgd, "'1.bias': (4,) torch.float32 on rank 0, (4,) torch.float32 frozen on rank 1"),
    "order": ({}, moved, sgd, "the order: parameter 'a' on rank 0 is in the place of 'b' on rank 1"),
    "shape": ({}, turned, sgd, "'0.weight': (8, 2) torch.float32 on rank 0, (2, 8) torch.float32 on rank 1"),
    "model fails": ({}, fails, sgd, "out of memory, say"),
    "handler fails": ({"gradient_handler": ["FailsOnRankOne"]}, net, sgd, "no such file"),
    "placement of a stage": (PIPE, misplaced, sgd, "stage"),
    "tied": (
        PIPE,
        tied,
        lambda p, rank: SGD(p, lr=0.1 + rank),
        "'lr' for the tied weight 'w' is 0.1 at stage 0 and 1.1 at",
    ),
}


def _refused() -> dict[str, str]:
    rank, told = dist.get_rank(), {}
    for name, (config, model, optimizer, _) in CASES.items():
        began = time.monotonic()
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            with pytest.raises((ColonnadeError, RuntimeError, ValueError)) as error:
                initialize(
                    lambda model=model: model(rank), lambda p, optimizer=optimizer: optimizer(p, rank), context=gpc
                )
            told[name] = str(error.value)
        assert time.monotonic() - began < 30, name
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with pytest.raises(ColonnadeError) as error:
            initialize(model, optimizer, lr_scheduler=with_schedule(optimizer, rank), context=gpc)
        told["scheduler"] = str(error.value)
        torch.set_default_dtype([torch.float32, torch.float64][rank])
        with pytest.raises(ColonnadeError) as error:
            initialize(net().float(), sgd, context=gpc)
        torch.set_default_dtype(torch.float32)
        told["default dtype"] = str(error.value)
    return told


def test_what_ranks_do_not_have_in_common_is_named_on_all_of_them():
    one, other = run_world(2, _refused).values
    parts = {name: case[-1] for name, case in CASES.items()} | {
        "scheduler": "'lr_scheduler: gamma': 0.5 on rank 0, 0.6 on rank 1",
        "default dtype": "'torch.get_default_dtype()': torch.float32 on rank 0, torch.float64 on rank 1",
    }
    for name, part in parts.items():
        assert part in one[name], name
        assert part in other[name], name


def cut(mode: ParallelMode | None, placed: ParallelMode | None = None) -> Callable[[ParallelContext], nn.Module]:
    """A layer of which each rank holds half the rows, cut from a whole that all draw alike."""

    def build(gpc: ParallelContext) -> nn.Module:
        model = nn.Linear(4, 6, bias=False)
        if mode is not None:
            model.weight = nn.Parameter(model.weight.detach().chunk(2)[gpc.get_local_rank(mode)].clone())
        if placed is not None:
            place(model.weight, {placed: Shard(0)})
        return model

    return build


def apart(gpc: ParallelContext) -> nn.Module:
    torch.manual_seed(gpc.get_global_rank())
    return nn.Linear(4, 6, bias=False)


def _halves() -> list[tuple[str, float]]:
    told = []
    tensor, mine = {"tensor": 2}, {"start_up_mine": {"size": 2, "mode": "start_up_mine"}}
    for parallel, build, further in (
        (tensor, cut(TENSOR), {}),
        (mine, cut(MINE), {}),
        (tensor, cut(TENSOR), {"compare_weights": False}),
        (tensor, cut(TENSOR, placed=TENSOR), {}),
        (tensor, cut(None), {}),
        (tensor, apart, {}),
        ({}, apart, {}),
        ({}, cut(None), {}),  # launch seeds data ranks apart
    ):
        with launch({"parallel": parallel, **further}, context=ParallelContext(), verbose=False) as gpc:
            model = build(gpc)
            try:
                initialize(model, sgd, context=gpc)[0].close()
                told.append(("", model.weight.flatten()[0].item()))
            except ColonnadeError as error:
                told.append((str(error), 0.0))
    torch.manual_seed(dist.get_rank())
    early = nn.Linear(4, 6, bias=False)
    with launch({"parallel": tensor}, context=ParallelContext(), verbose=False) as gpc:
        with pytest.raises(ColonnadeError, match="do not agree on the weights of 'weight'") as refused:
            initialize(early, sgd, context=gpc)
        assert "were seeded alike" not in str(refused.value)  # this model was not
        assert "The model was built before launch, so the ranks drew different numbers: build it after" in str(
            refused.value
        )
    return told


def test_a_parameter_that_was_cut_and_not_placed_is_refused_and_ranks_seeded_apart_are_not():
    values = run_world(2, _halves).values
    for told in values:
        for (message, _), mode in zip(told[:2], ("TENSOR", "START_UP_MINE"), strict=True):
            assert "do not agree on the weights of 'weight': [" in message
            assert f"place(parameter, {{ParallelMode.{mode}: Shard(0)}})" in message
            assert "compare_weights=False" in message
        assert [message for message, _ in told[2:]] == [""] * 6
    (one, other) = ([value for _, value in told[2:]] for told in values)
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, True, True, True, True]


def test_settings_of_cudnn_stay_as_the_user_set_them_unless_the_config_sets_them():
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    try:
        for config, seen in (
            ({}, (True, True)),
            ({"cudnn_benchmark": False}, (False, True)),
            ({"cudnn_deterministic": False}, (True, False)),
        ):
            cudnn.benchmark = cudnn.deterministic = True
            with launch(config, context=ParallelContext(), verbose=False) as gpc:
                initialize(net(), sgd, context=gpc)[0].close()
            assert (cudnn.benchmark, cudnn.deterministic) == seen
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def _groups_left() -> int:
    before = len(distributed_c10d._world.pg_map)
    for _ in range(2):
        with launch(PIPE, context=ParallelContext(), verbose=False) as gpc:
            engine = initialize(net(), sgd, nn.MSELoss(), context=gpc)[0]
            batch = torch.ones(4, 4)
            engine.zero_grad()
            engine.execute_schedule(iter([(batch, batch)]))
            engine.step()
            engine.close()
    return len(distributed_c10d._world.pg_map) - before


def test_no_group_of_a_pipeline_is_left_in_a_borrowed_world():
    assert run_world(2, _groups_left).values == [0, 0]


def test_a_learning_rate_may_be_a_tensor_and_a_scheduler_may_keep_no_state():
    model = nn.Linear(1, 1)
    optimizer = SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.5)}], lr=0.1)
    alike = build_module.alike_optimizer(optimizer, SimpleNamespace(), model, 3)
    items = alike.items
    assert (items["group 0: lr"], items["group 1: lr"], items["bias"]) == ("0.1", "0.5", "in group 1")
    assert items["lr_scheduler"] == "types.SimpleNamespace"
    assert not any(key.endswith("params") for key in items)
    assert alike.part == 3
    odd = SimpleNamespace(state_dict=lambda: [1, 2])
    assert build_module.alike_optimizer(optimizer, odd, model, 0).items == items

"""Optimizers over parts: what a trial tells, what it leaves alone, and what is sharded at which stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colonnade.config import load_config
from colonnade.config.settings import ZeroSettings
from colonnade.errors import ConfigError, GradientError
from colonnade.optim.engine_optimizer import groups_by_options, run_trial_steps, state_dtypes
from colonnade.optim.zero import ZeroOptimizer
from colonnade.optim.zero.zero_optimizer import ParameterShard, check_elementwise, copy_options, twin_on_shards


def made(count: int = 2, shape: tuple[int, ...] = (2, 3)) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full(shape, float(at + 1))) for at in range(count)]


class Noted(torch.optim.SGD):
    """Keeps lists and counts of its own, and says where and with what it steps."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.seen: list[Any] = []
        self.counts: dict[str, int] = {"steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.counts["steps"] += 1
        for group in self.param_groups:
            group["lr"] = group["lr"] * 1.0
            for parameter in group["params"]:
                self.seen.append((parameter, group["lr"], dict(group)))
                parameter.sub_(group["lr"] * parameter.grad * self.counts["steps"])


class Mixes(Noted):
    """Not element-wise where it has momentum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.mean() if group["momentum"] else parameter.grad)


class Late(torch.optim.SGD):
    """Not element-wise from its second step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            parameter.sub_(parameter.grad.mean() if state else parameter.grad)
            state["stepped"] = True


def test_what_is_not_element_wise_is_told_whichever_group_it_is_in():
    first, second = made()
    check_elementwise(torch.optim.AdamW([first, second]))
    check_elementwise(Mixes([{"params": [first]}, {"params": [second]}], lr=0.1))
    with pytest.raises(GradientError, match=r"Mixes is not element-wise. In group 1"):
        check_elementwise(Mixes([{"params": [first]}, {"params": [second], "momentum": 0.5}], lr=0.1))
    with pytest.raises(GradientError, match="Late is not element-wise"):
        check_elementwise(Late([first], lr=0.1))
    with pytest.raises(GradientError, match="LBFGS could not step on a slice"):
        check_elementwise(torch.optim.LBFGS([first]))


def test_groups_are_of_one_kind_if_just_sizes_of_options_differ():
    first, second, third, fourth = made(4)
    optimizer = torch.optim.SGD(
        [
            {"params": [first], "lr": 0.1},
            {"params": [second], "lr": 0.2, "momentum": 0.5},
            {"params": []},
            {"params": [third], "momentum": 0.9},
            {"params": [fourth], "foreach": True},
        ],
        lr=0.3,
    )
    assert groups_by_options(optimizer) == [[0], [1, 3], [4]]
    optimizer.param_groups[0]["param_names"] = ["a"]
    optimizer.param_groups[4].update(foreach=None, param_names=["b"])
    assert groups_by_options(optimizer) == [[0, 4], [1, 3]]


def test_a_trial_takes_two_steps_on_both_and_leaves_no_trace():
    first, second = made()
    optimizer = Noted([{"params": [first], "lr": 0.5}, {"params": [second], "lr": torch.tensor(0.25)}], lr=0.1)
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    optimizer.step = lambda: heard.append("mine")  # as a scheduler's
    state = torch.random.get_rng_state()
    whole, halves = run_trial_steps(
        optimizer, 1, (4, 6), lambda tensor: [part.clone() for part in tensor.view(-1).chunk(2)]
    )
    assert torch.equal(whole.view(-1), torch.cat(halves))
    assert (whole.dtype, len(halves)) == (torch.float64, 2)
    grads = [
        torch.randn(4, 6, generator=numbers, dtype=torch.float64)
        for numbers in [torch.Generator().manual_seed(0)]
        for _ in range(3)
    ]
    torch.testing.assert_close(whole, grads[0] - 0.25 * grads[1] - 2 * 0.25 * grads[2])
    assert (heard, optimizer.seen, optimizer.counts) == ([], [], {"steps": 0})
    assert torch.equal(torch.random.get_rng_state(), state)
    assert optimizer.param_groups[1]["params"][0] is second
    assert not optimizer.state


def test_state_is_told_of_the_first_group_for_every_dtype():
    first, second = made()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "momentum": 0.9}], lr=0.1)
    assert state_dtypes(optimizer, torch.float32) == ()
    optimizer.param_groups.reverse()
    assert state_dtypes(optimizer, torch.float64) == (torch.float64,)


def test_state_of_rows_and_columns_is_not_of_every_element():
    assert state_dtypes(torch.optim.Adafactor(made()), torch.float32) == ()


def test_parts_take_over_the_state_and_the_step_hooks_alone():
    first, second = made()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1, momentum=0.9)
    optimizer.state[first]["momentum_buffer"] = torch.arange(6.0).reshape(2, 3)
    heard: list[str] = []
    optimizer.register_state_dict_post_hook(lambda *_: heard.append("whole"))
    optimizer.register_step_post_hook(lambda *_: heard.append("step"))
    parts = [ParameterShard(first, 0, 1, 3, torch.ones(2)), ParameterShard(second, 1, 0, 2, torch.ones(2))]
    inner = twin_on_shards(optimizer, parts)
    assert [[id(p) for p in group["params"]] for group in inner.param_groups] == [[id(part.value)] for part in parts]
    assert inner.state[parts[0].value]["momentum_buffer"].tolist() == [1.0, 2.0]
    assert parts[1].value not in inner.state
    assert not optimizer.state
    inner.state_dict()
    inner.step()
    assert heard == ["step"]
    inner.param_groups[1]["lr"] = 0.75
    copy_options(inner, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.75]
    assert optimizer.param_groups[1]["params"] == [second]


def zero(settings: ZeroSettings, model: nn.Module, parameters: Any = None) -> ZeroOptimizer:
    return ZeroOptimizer(torch.optim.SGD(parameters or model.parameters(), lr=0.1), model, settings)


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_sharded_at_which_stage(stage, pipeline):
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    shards = zero(ZeroSettings(stage, bucket_mb=3.0), model).plan_shards(pipeline)
    sharding = shards.sharding
    assert (sharding.keep_full, sharding.every_pass) == (stage == 1, stage == 2 and not pipeline)
    assert (sharding.wide, sharding.device, sharding.give_back) == (True, None, False)
    assert (list(shards.labels), shards.bucket_mb) == ([id(model.weight)], 3.0)
    settings = ZeroSettings(stage, reduce_scatter=False, offload=True, master_weights=False)
    sharding = zero(settings, model).plan_shards(pipeline).sharding
    assert (sharding.wide, sharding.device, sharding.give_back) == (False, torch.device("cpu"), True)


def test_what_cannot_be_sharded_is_told():
    model = nn.Linear(2, 2)
    with pytest.raises(GradientError, match="parameters that are not in the model"):
        zero(ZeroSettings(1), model, [model.weight, nn.Parameter(torch.zeros(1))]).plan_shards(False)
    turn = nn.ParameterDict({"turn": nn.Parameter(torch.zeros(1, dtype=torch.complex64))})
    with pytest.raises(GradientError, match=r"turn is torch\.complex64"):
        zero(ZeroSettings(1), turn).plan_shards(False)
    with pytest.raises(GradientError, match="Mixes is not element-wise"):
        ZeroOptimizer(Mixes(model.parameters(), lr=0.1, momentum=0.5), model, ZeroSettings(1))
    optimizer = zero(ZeroSettings(1), model)
    model.weight.grad = torch.ones(2, 2)
    optimizer.zero_grad()
    assert model.weight.grad is None


# -- settings ---------------------------------------------------------------------------------------------
# The `zero` section: its forms, and options that belong to another stage.


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ZeroSettings()),
        (2, ZeroSettings(stage=2)),
        ({"stage": 1, "offload": "cpu", "gather_ahead": True}, ZeroSettings(stage=1, offload=True, gather_ahead=True)),
        ({"stage": 3, "wrap": "Block", "prefetch": 2}, ZeroSettings(stage=3, wrap=("Block",), prefetch=2)),
        ({"stage": 2, "reduce_scatter": True}, ZeroSettings(stage=2)),
        ({"stage": 1, "reduce_scatter": False, "offload": True}, ZeroSettings(1, reduce_scatter=False, offload=True)),
        ({"stage": 1, "offload": False, "bucket_mb": 2.5}, ZeroSettings(stage=1, bucket_mb=2.5)),
        ({"stage": 3, "wrap": ["a", "b"], "reshard": False}, ZeroSettings(stage=3, wrap=("a", "b"), reshard=False)),
    ],
)
def test_forms(given, expected):
    assert ZeroSettings.read(load_config({"zero": given}).get("zero")) == expected


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"stage": 2, "reduce_scatter": False}, "requires ZeRO stage 1"),
        ({"stage": 1, "wrap": "Block"}, "requires ZeRO stage 3"),
        ({"stage": 2, "replicate": "mine"}, "requires ZeRO stage 3"),
        ({"stage": 3, "bucket_mb": 1.0}, "requires ZeRO stage 1 or 2"),
        ({"stage": 3, "gather_ahead": True}, "requires ZeRO stage 1 or 2"),
        ({"stage": 1, "prefetch": 2}, "requires ZeRO stage 3"),
        ({"stage": 1, "offload": "nvme"}, "allowed are True, False and 'cpu'"),
    ],
    ids=str,
)
def test_options_of_another_stage_are_refused(given, told):
    with pytest.raises(ConfigError, match=rf"zero\..*{told}"):
        ZeroSettings.read(given)

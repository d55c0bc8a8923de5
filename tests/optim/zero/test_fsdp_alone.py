"""How stage 3 chooses what is sharded over which ranks, and what it asks of FSDP2, in one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.config.settings import ZeroSettings
from colonnade.context import ParallelMode, build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.optim.zero import fsdp
from colonnade.optim.zero.formula import dtypes_of, make_fp32
from colonnade.optim.zero.fsdp import (
    ShardModes,
    replica_mode,
    shard_modes_of,
    shards_between_hosts,
    unsharded_parameters,
)
from colonnade.parallel.placement import Shard, place
from tests.gradients.scenarios import MINE

DATA, EXPERT_DATA = ParallelMode.DATA, ParallelMode.EXPERT_DATA
AXIS = {"mine": {"size": 2, "mode": "scenario_mine"}}
DENSE, SPARSE = ShardModes((DATA,), 4), ShardModes((EXPERT_DATA,), 4)


@pytest.mark.parametrize(
    ("parallel", "ranks", "axis", "mode", "expected"),
    [
        ({}, 1, None, None, None),
        ({}, 2, None, None, ShardModes((DATA,), 2)),
        ({"tensor": 2}, 2, None, None, None),  # one data rank: nothing to share with
        ({"tensor": 2}, 4, None, None, ShardModes((DATA,), 2)),
        ({"expert": 2}, 4, None, ParallelMode.EXPERT, ShardModes((EXPERT_DATA,), 4)),
        ({"expert": 2}, 2, None, ParallelMode.EXPERT, None),
        (AXIS, 4, MINE, None, ShardModes((MINE, DATA), 4)),
        (AXIS, 4, None, None, ShardModes((DATA,), 2)),
        (AXIS, 2, MINE, None, None),
        ({"mine": {"size": 1, "mode": "scenario_mine"}}, 2, MINE, None, ShardModes((DATA,), 2)),
    ],
    ids=str,
)
def test_over_which_ranks_a_parameter_is_sharded(parallel, ranks, axis, mode, expected):
    layout = build_layout({"parallel": parallel}, world_size=ranks)
    parameter = nn.Parameter(torch.zeros(4))
    if mode is not None:
        place(parameter, {mode: Shard(0)})
    assert shard_modes_of(parameter, layout, 0, axis) == expected
    assert expected is None or expected.sharded_over in (DATA, EXPERT_DATA)


def test_shards_are_replicas_on_an_axis_beside_data_that_sees_distinct_data():
    layout = build_layout({"parallel": {**AXIS, "tensor": 2}}, world_size=8)
    assert replica_mode(layout, None) is None
    assert replica_mode(layout, "mine") is MINE
    for name in ("data", "tensor", "min"):
        with pytest.raises(ConfigError, match=f"zero.replicate is '{name}'; it must be an axis .* has mine"):
            replica_mode(layout, name)


HYBRID = {"stage": 3, "replicate": "mine"}


@pytest.mark.parametrize("hosts", [4, 16])
@pytest.mark.parametrize("further", [{}, {"tensor": 2}, {"pipeline": 2}, {"sequence": 2, "tensor": 2}, {"pipeline": 4}])
def test_shards_lie_inside_a_host_and_replicas_on_others(hosts, further):
    """Of 8 ranks each, numbered host by host, as the page of ZeRO has it."""
    inside = further.get("tensor", 1) * further.get("sequence", 1)
    data = 8 // inside
    copies = 8 * hosts // (data * inside * further.get("pipeline", 1))
    parallel = {"data": data, "mine": {"size": copies, "mode": "scenario_mine"}, **further}
    layout = build_layout({"parallel": parallel, "zero": HYBRID}, world_size=8 * hosts)
    for rank in range(8 * hosts):
        shards, replicas = layout.group_of(DATA, rank), layout.group_of(MINE, rank)
        assert {each // 8 for each in shards} == {rank // 8}
        assert len({each // 8 for each in replicas}) == copies
    assert shards_between_hosts(layout, "mine", "8") is None
    if (hosts, further) == (16, {}):
        assert layout.group_of(DATA, 0) == [0, 1, 2, 3, 4, 5, 6, 7]
        assert layout.group_of(MINE, 0) == list(range(0, 128, 8))


def test_without_replicas_of_shards_the_axes_stay_in_their_order():
    for zero in (None, 3, {"stage": 3}, {"stage": 3, "replicate": None}, {"stage": 3, "replicate": "tensor"}):
        layout = build_layout({"parallel": {**AXIS, "tensor": 2}, "zero": zero}, world_size=8)
        assert [axis.name for axis in layout.axes] == ["data", "pipeline", "mine", "tensor"]


@pytest.mark.parametrize(
    ("data", "tensor", "here", "told"),
    [
        (8, 1, "8", None),
        (8, 1, None, None),
        (8, 1, "1", None),
        (8, 1, "32", None),
        (8, 1, "4", "Use data=4 and mine of size 8 to place them on one host"),
        (16, 1, "8", r"the 16 ranks .* such as \[0, 1, 2, 3, 4, 5, 6, 7\], are not on one host of 8 ranks"),
        (8, 2, "8", "Use data=4 and mine of size 4 to place"),
        (4, 4, "4", None),  # a host has no room for two
        (8, 1, "6", "Use data=2 and mine of size 16 to place"),
    ],
)
def test_shards_between_hosts_are_told_where_smaller_groups_would_fit(data, tensor, here, told):
    parallel = {"mine": {"size": 32 // data // tensor, "mode": "scenario_mine"}, "data": data, "tensor": tensor}
    layout = build_layout({"parallel": parallel, "zero": HYBRID}, world_size=32)
    found = shards_between_hosts(layout, "mine", here)
    assert found is None if told is None else re.search(told, found or "")
    assert shards_between_hosts(layout, None, here) is None


def test_what_fsdp_cannot_shard_is_left_whole():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.bias = first.bias  # of two chunks
    model = nn.ModuleList([first, second])
    odd = {
        "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0, 2),
        "complex": torch.zeros(2, dtype=torch.complex64),
        "turned": torch.zeros(2, 3).t(),
    }
    for name, value in odd.items():
        first.register_parameter(name, nn.Parameter(value))
    first.rows, first.bags = nn.Embedding(2, 2, sparse=True), nn.EmbeddingBag(2, 2, sparse=True)
    second.rows, second.bags = nn.Embedding(2, 2), nn.EmbeddingBag(2, 2)
    names = {id(p): name for name, p in model.named_parameters()}
    left = unsharded_parameters(model, [first, second])
    assert {names[one] for one in left} == {"0.bias", "0.rows.weight", "0.bags.weight", *(f"0.{name}" for name in odd)}


def test_halves_become_fp32_with_their_gradients_and_stay_the_objects_they_are():
    half, plain, double = (
        nn.Parameter(torch.ones(2, dtype=kind)) for kind in (torch.bfloat16, torch.float16, torch.float64)
    )
    half.grad = torch.ones(2, dtype=torch.bfloat16)
    make_fp32([half, plain, double])
    assert [p.dtype for p in (half, plain, double)] == [torch.float32, torch.float32, torch.float64]
    assert half.grad is not None
    assert (half.grad.dtype, plain.grad) == (torch.float32, None)
    assert dtypes_of(half) == (None, None)


def unit(
    settings: ZeroSettings, divisor: int = 1, dtype: torch.dtype = torch.float32, keeps: bool = False
) -> tuple[Any, Any]:
    """A layer inside a root, sharded over the one rank there is: (FSDP2's state of the layer, of the root)."""
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(gpc.device, dtype)
        if keeps:
            root[0].keeps_gathered = True
        old = root[0].weight
        modes = ShardModes((DATA,), divisor)
        units = fsdp._Units(root, {id(p): modes for p in root.parameters()}, gpc, settings)
        units.shard(root[0], root)
        units.shard(root[0], root)  # once is enough
        units.shard(root, root, modes)
        assert list(units.done) == [root[0], root]
        assert [names for _, names in units.done.values()] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
        assert len(units.meshes) == 1
        gathered, reduced = dtypes_of(old)
        policy = root[0]._get_fsdp_state()._mp_policy
        assert (gathered, reduced) == (policy.param_dtype, policy.reduce_dtype or old.dtype)
        return root[0]._get_fsdp_state(), root._get_fsdp_state()


@pytest.mark.parametrize(("divisor", "is_set"), [(1, False), (4, True)])
def test_another_divisor_than_the_number_of_ranks_is_told(divisor, is_set):
    for state in unit(ZeroSettings(stage=3), divisor):
        group = state._fsdp_param_group
        assert group.gradient_divide_factor == (4 if is_set else None)
        assert group.force_sum_reduction_for_comms is (is_set and not torch.cuda.is_available())


@pytest.mark.parametrize(
    ("settings", "keeps", "given_back"),
    [
        ({}, False, True),
        ({"reshard": False}, False, False),
        ({"offload": True}, True, False),
        ({"reshard": False}, True, False),
    ],
)
def test_which_parameters_are_given_back_after_their_forward_pass(settings, keeps, given_back):
    layer, _ = unit(ZeroSettings(stage=3, **settings), keeps=keeps)
    assert layer._fsdp_param_group._reshard_after_forward is given_back
    assert layer._mp_policy.cast_forward_inputs is False
    assert type(layer._fsdp_param_group.offload_policy).__name__ == "OffloadPolicy"


@pytest.mark.parametrize(
    ("dtype", "settings", "expected", "kept"),
    [
        (torch.float32, {}, (None, None), torch.float32),
        (torch.float64, {}, (None, None), torch.float64),
        (torch.bfloat16, {}, (torch.bfloat16, torch.float32), torch.float32),
        (torch.bfloat16, {"master_weights": False}, (None, None), torch.bfloat16),
        (torch.float32, {"gather_dtype": torch.bfloat16}, (torch.bfloat16, torch.float32), torch.float32),
        (torch.float64, {"gather_dtype": torch.bfloat16}, (None, None), torch.float64),
        (torch.float32, {"reduce_dtype": torch.bfloat16}, (None, torch.bfloat16), torch.float32),
    ],
    ids=str,
)
def test_what_is_gathered_and_reduced_in(dtype, settings, expected, kept):
    layer, _ = unit(ZeroSettings(stage=3, **settings), dtype=dtype)
    policy = layer._mp_policy
    assert (policy.param_dtype, policy.reduce_dtype) == expected
    shards = [one.sharded_param for one in layer._fsdp_param_group.fsdp_params]
    assert {shard.dtype for shard in shards} == {kept}

"""What we use of torch that differs between its versions, or that it keeps private: it does what we use it for."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

from colonnade.comm import torch_versions
from colonnade.comm.torch_versions import (
    HashStore,
    PrefixStore,
    apart_from_world,
    dtensor_like,
    exchange_tensors,
    fake_mode,
    forget_failed_start,
    is_wanted,
    leave_out_mixed_precision,
    meeting_store,
    noting_collectives,
    refresh_shards,
    start_fsdp,
    timeout_of,
)
from tests.ranks import on_ranks


def test_what_this_version_of_torch_can_do():
    release = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    assert torch_versions.COMPILES_COLLECTIVES is (release >= (2, 13))


def test_without_a_world_there_is_torchs_own_limit():
    assert timeout_of() == torch_versions.DEFAULT_TIMEOUT


def test_a_start_that_failed_leaves_the_count_of_groups_as_in_a_new_process(monkeypatch):
    monkeypatch.setattr(distributed_c10d._world, "group_count", 5)
    forget_failed_start()
    assert distributed_c10d._world.group_count == 0


@on_ranks(1)
def test_calls_are_noted_and_tensors_of_a_mesh_are_made_and_exchanged():
    distributed_c10d._world.group_count, before = 5, distributed_c10d._world.group_count
    forget_failed_start()
    assert distributed_c10d._world.group_count == 5, "a world that is up goes on counting"
    distributed_c10d._world.group_count = before
    noted = []
    with noting_collectives(lambda name, group, given: noted.append((name, given))):
        there = torch.ones(2)
        dist.all_reduce(there)
        dist.group.WORLD.barrier().wait()
    assert noted[0][0] == "all_reduce"
    assert noted[0][1][0].data_ptr() == there.data_ptr()
    assert noted[1:] == [("barrier", None)]
    mesh = init_device_mesh("cpu", (1,))
    whole = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    other = dtensor_like(whole, torch.full((2,), 3.0))
    assert (other.placements, other.requires_grad, other.to_local().tolist()) == (whole.placements, False, [3.0, 3.0])
    first, second = nn.Parameter(whole), nn.Parameter(other)
    first.mark = "first"
    exchange_tensors(first, second)
    assert (first.to_local().tolist(), second.to_local().tolist()) == ([3.0, 3.0], [1.0, 1.0])
    assert first.mark == "first"


def test_plain_tensors_are_exchanged_and_keep_their_attributes():
    first, second = torch.ones(2), torch.zeros(3)
    first.mark = "first"
    exchange_tensors(first, second)
    assert (first.tolist(), second.tolist(), first.mark) == ([0.0] * 3, [1.0] * 2, "first")


def test_a_world_apart_counts_its_groups_from_far_away_and_leaves_all_as_it_was():
    level, world = dist.get_debug_level(), distributed_c10d._world
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with apart_from_world():
            assert distributed_c10d._world is not world
            assert distributed_c10d._world.group_count >= 1 << 16  # no number is one of the world outside
            assert distributed_c10d._world.comms == []
            assert dist.get_debug_level() == dist.DebugLevel.OFF
        assert distributed_c10d._world is world
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    finally:
        dist.set_debug_level(level)


def test_tensors_without_memory_mix_with_others():
    fakes, other = fake_mode(), torch.ones(2)
    with fakes:
        empty = torch.ones(2)
        assert type(empty + other) is type(empty)


class Asks(torch.autograd.Function):
    """Notes which of its inputs the backward pass goes on to."""

    wanted: list[bool] = []

    @staticmethod
    def forward(ctx, first, second):
        return first + second

    @staticmethod
    def backward(ctx, gradient):
        nodes = [node for node, _ in torch._C._current_autograd_node().next_functions]
        Asks.wanted = [is_wanted(node) for node in nodes]
        return gradient, gradient


def test_a_backward_pass_knows_where_it_goes_on():
    first, second = (torch.ones(1, requires_grad=True) for _ in range(2))
    Asks.apply(first * 2, second * 2).backward()
    assert Asks.wanted == [True, True]
    torch.autograd.grad(Asks.apply(first * 2, second * 2), [first])
    assert Asks.wanted == [True, False]
    torch.autograd.grad(Asks.apply(first, second), [first])  # a leaf that is asked for
    assert Asks.wanted == [True, False]


class Wrapped(nn.Module):
    """As a module that FSDP2 has wrapped."""

    def __init__(self, **policy: torch.dtype | None) -> None:
        super().__init__()
        self.policy, self.begun, self.reset = MixedPrecisionPolicy(**policy), 0, 0

    def _get_fsdp_state(self) -> SimpleNamespace:
        def begin() -> None:
            self.begun += 1

        def again() -> None:
            self.reset += 1

        group = SimpleNamespace(fsdp_params=[SimpleNamespace(reset_sharded_param=again)])
        return SimpleNamespace(_mp_policy=self.policy, _lazy_init=begin, _fsdp_param_group=group)


@pytest.mark.parametrize(
    ("policies", "found"),
    [
        ([{}], False),
        ([{"param_dtype": torch.bfloat16}], True),
        ([{"output_dtype": torch.float32}], True),
        ([{"reduce_dtype": torch.float32}, {}], True),
    ],
)
def test_mixed_precision_is_left_out_and_that_is_told(policies, found):
    model = nn.Sequential(nn.Linear(1, 1), *(Wrapped(**policy) for policy in policies))
    assert leave_out_mixed_precision(model) is found
    for module in list(model)[1:]:
        policy = module.policy
        assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (None, None, None)
    assert leave_out_mixed_precision(nn.Linear(1, 1)) is False


def test_a_wrapped_module_is_started_and_told_of_new_memory():
    wrapped = Wrapped()
    start_fsdp(wrapped)
    start_fsdp(nn.Linear(1, 1))
    refresh_shards(wrapped)
    assert (wrapped.begun, wrapped.reset) == (1, 1)


def _connected(store: object, ranks: int, size: int, seconds: float) -> list[object]:
    """Sums over a gloo group of `size`, one for each thread of so many ranks, or the errors."""
    found: list[object] = [None] * ranks

    def connect(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(meeting_store(store, size), rank, size, timedelta(seconds=seconds))
            value = torch.tensor([rank + 1.0])
            group.allreduce([value]).wait()
            found[rank] = value.item()
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_of_a_gloo_group_find_each_other_by_one_key_and_miss_one_in_time():
    store = HashStore()
    assert _connected(PrefixStore("one", store), 3, 3, 20) == [6.0] * 3
    assert store.check(["one/0/all"])
    begin = time.monotonic()
    found = _connected(PrefixStore("two", store), 2, 3, 0.5)
    assert all(isinstance(error, RuntimeError) for error in found), found
    assert time.monotonic() - begin < 10


def test_other_keys_of_a_store_by_which_groups_meet_are_its_own():
    own = HashStore()
    store = meeting_store(own, 2)
    store.set("a/7", b"far")  # no rank of two
    store.wait(["a/7"])
    assert (store.get("a/7"), own.get("a/7")) == (b"far", b"far")
    assert (store.add("n", 2), own.add("n", 0), store.check(["n"]), store.delete_key("n")) == (2, 2, True, True)
    store.set("g/1", b"me")
    own.set("g/all", '["00ff", "6d65"]')
    store.wait(["g/0"])
    assert [store.get("g/0"), store.get("g/1")] == [b"\x00\xff", b"me"]
    store.forget()
    assert store.get("g/1") == b"me"

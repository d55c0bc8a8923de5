"""The reducer equals one process on the joined batch, whatever backward does, over every transport."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from colonnade.gradients.sums import Sum, SyncOptions
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.testing import run_world
from tests.gradients.summing import (
    LARGE,
    OVERLAPPED,
    TINY,
    WAYS,
    both,
    close,
    data,
    everywhere,
    in_all_ways,
    mean_loss,
    reduce_all,
    same_gradients,
    train,
)
from tests.ranks import on_ranks


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


def square(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(data(rank, step, 5, 6)).square().mean()


def _plain(zero: str, micro_batches: int) -> None:
    everywhere(partial(train, net, square, zero=zero, micro_batches=micro_batches))


@pytest.mark.parametrize("zero", ["none", "zeros"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_with_every_kind_of_zero_grad_and_with_accumulation(zero, micro_batches):
    run_world(2, _plain, zero, micro_batches)


def test_steps_on_four_ranks():
    run_world(4, _plain, "none", 2)


class Checkpointed(nn.Module):
    """Two segments under activation checkpointing that share a layer."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=self.reentrant)
        return self.last(x)


@on_ranks(2)
def test_activation_checkpointing_of_both_kinds_with_a_layer_in_two_segments():
    for reentrant in (True, False):
        everywhere(partial(train, partial(Checkpointed, reentrant), square))
        everywhere(partial(train, partial(Checkpointed, reentrant), square, micro_batches=2))


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return self.head(x)


def _twice(model: nn.Module, rank: int, step: int) -> Tensor:
    return square(model, rank, step) + square(model, rank, step + 50)


@on_ranks(2)
def test_a_module_used_several_times():
    everywhere(partial(train, Reused, _twice))


class Mixed(nn.Module):
    """fp64, fp32 and complex parameters, and convolutions in channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 5, 3).to(memory_format=torch.channels_last)
        self.wave = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.single = nn.Parameter(torch.randn(7))
        self.empty = nn.Parameter(torch.zeros(0))

    def double(self) -> Mixed:
        self.conv.double()
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.view(-1, 4, 4, 4)).mean((2, 3)) * self.wave
        return y.abs() + self.single.sum().double() ** 2 + self.empty.sum()


def _mixed_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(data(rank, step, 3, 64)).square().mean()


@in_all_ways(2)
def test_mixed_dtypes_complex_numbers_and_channels_last(options: SyncOptions):
    model, truth = both(Mixed)
    reducer = reduce_all(model, options)
    assert {b.layout.dtype for b in reducer.buckets} == {torch.float64, torch.complex128, torch.float32}
    for step in range(3):
        model.zero_grad()
        truth.zero_grad()
        reducer.prepare(last=True)
        _mixed_loss(model, dist.get_rank(), step).backward()
        reducer.wait()
        mean_loss(truth, _mixed_loss, step).backward()
        for name, expected in truth.named_parameters():
            got = model.get_parameter(name)
            if name == "empty":
                assert got.grad is not None
                continue
            close(got.grad, expected.grad, name, 1e-6 if name == "single" else 1e-12)
        assert model.conv.weight.grad.is_contiguous(memory_format=torch.channels_last)


def _retained(options: SyncOptions) -> None:
    """Two losses through one graph, and backward twice in a micro-batch, from step 2 on (so: unforeseen)."""
    model, truth = both(net)
    reducer = reduce_all(model, options)
    for step in range(4):
        model.zero_grad()
        truth.zero_grad()
        reducer.prepare(last=True)
        for one, losses in ((model, [dist.get_rank()]), (truth, range(dist.get_world_size()))):
            out = torch.stack([square(one, rank, step) for rank in losses]).mean()
            out.backward(retain_graph=step >= 1)
            if step >= 2:
                (3 * out).backward()
        reducer.wait()
        same_gradients(model, truth)


def test_unforeseen_second_backward_is_added_not_lost():
    run_world(2, everywhere, _retained)
    run_world(4, everywhere, _retained, [(OVERLAPPED, LARGE)])


@in_all_ways(2)
def test_a_late_gradient_on_one_rank_alone(options: SyncOptions):
    """One rank alone runs backward twice."""
    model, truth = both(net)
    reducer = reduce_all(model, options)
    for step in range(3):
        model.zero_grad()
        truth.zero_grad()
        reducer.prepare(last=True)
        square(model, dist.get_rank(), step).backward()
        if dist.get_rank() == 1 and step > 0:
            square(model, 1, 77).backward()
        reducer.wait()
        mean_loss(truth, square, step).backward()
        if step > 0:
            (square(truth, 1, 77) / dist.get_world_size()).backward()
        same_gradients(model, truth)


@on_ranks(2)
def test_buckets_start_in_backward_on_the_last_micro_batch_alone():
    model, _ = both(net)
    reducer = reduce_all(model, **OVERLAPPED)
    seen = []
    for last in (True, False, True):
        reducer.prepare(last)
        square(model, dist.get_rank(), 0).backward()
        seen.append([bucket.started for bucket in reducer.buckets])
        if last:
            reducer.wait()
            assert not any(bucket.started for bucket in reducer.buckets)
            model.zero_grad()
    recorded, not_last, last = tuple(seen)
    assert not any(recorded)
    assert not any(not_last)
    assert all(last[:-1])
    assert not last[-1], "the last one starts in wait()"
    assert len(last) > 2


@in_all_ways(2, [*WAYS, ({"shared_memory": True}, 1)])
def test_gradients_are_views_of_their_buckets_and_padding_is_zero(options: SyncOptions):
    model, _ = both(Forked)
    # In one bucket, so that the order of the second step needs no more room than that of the first.
    reducer = reduce_all(model, options, bucket_mb=1.0, first_bucket_mb=1.0)
    for step in range(3):
        model.zero_grad()
        reducer.prepare(last=True)
        _ordered(model, 0, step).backward()
        reducer.wait()
        for bucket in reducer.buckets:
            for parameter, view in zip(bucket.parameters, bucket.layout.views(bucket.gradient), strict=True):
                assert parameter.grad.data_ptr() == view.data_ptr()
            padding = bucket.buffer.flat.clone()
            for span in bucket.layout.spans:
                padding[span.start : span.stop] = 0
            assert not padding.any()


class Forked(nn.Module):
    """Parameters registered in another order than backward produces them, and differently on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6 + i % 3) for i in range(6))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        beside = x.new_zeros(())
        for i in order:
            y = torch.tanh(self.layers[i](x))
            x, beside = y[:, :6], beside + y[:, 6:].sum()
        return x + beside


def _ordered(model: nn.Module, rank: int, step: int) -> Tensor:
    order = [3, 1, 5, 0, 2, 4] if rank == 0 else [0, 1, 2, 3, 4, 5]
    return model(data(rank, step, 5, 6), order).square().mean()


def _order() -> list[str]:
    everywhere(partial(train, Forked, _ordered))
    reducer = train(Forked, _ordered, SyncOptions(bucket_mb=1e-5, first_bucket_mb=1e-5, **OVERLAPPED))
    return [bucket.names[0] for bucket in reducer.buckets]


def test_all_ranks_take_the_order_in_which_the_first_rank_makes_gradients():
    first, second = run_world(2, _order).values
    assert first == second
    layers = list(dict.fromkeys(int(name.split(".")[1]) for name in first))
    assert layers == [4, 2, 0, 5, 1, 3]


@in_all_ways(2)
def test_wait_alone_is_enough(options: SyncOptions):
    model, truth = both(net)
    reducer = reduce_all(model, options)
    for step in range(3):
        model.zero_grad()
        truth.zero_grad()
        square(model, dist.get_rank(), step).backward()
        reducer.wait()
        mean_loss(truth, square, step).backward()
        same_gradients(model, truth)


@in_all_ways(2)
def test_gradients_that_are_not_zeroed_go_on_adding_up(options: SyncOptions):
    model, truth = both(net)
    reducer = reduce_all(model, options)
    for step in range(4):
        reducer.prepare(last=True)
        square(model, dist.get_rank(), step).backward()
        reducer.wait()
        mean_loss(truth, square, step).backward()
        same_gradients(model, truth)


@in_all_ways(2)
def test_scale_is_a_further_factor_for_one_step(options: SyncOptions):
    model, truth = both(net)
    reducer = reduce_all(model, options)
    for step, scale in enumerate([0.25, torch.tensor(0.125, dtype=torch.float64), None]):
        model.zero_grad()
        truth.zero_grad()
        reducer.prepare(last=True)
        square(model, dist.get_rank(), step).backward()
        assert reducer.wait(scale).scale is scale
        factor = 1.0 if scale is None else float(scale)
        (factor * mean_loss(truth, square, step)).backward()
        same_gradients(model, truth)


@in_all_ways(4)
def test_experts_dense_layers_and_lone_parameters_over_their_own_groups(options: SyncOptions):
    """World of 4: a dense layer over all, experts over pairs with a divisor of 4, one layer on this rank alone."""
    rank = dist.get_rank()
    pairs = [dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3))]
    pair = (rank % 2, rank % 2 + 2)
    torch.manual_seed(3)
    dense, lone = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    experts = [nn.Linear(6, 6).double() for _ in range(2)]
    expert = experts[rank % 2]

    def named(layer: nn.Module) -> tuple[tuple[str, ...], tuple[nn.Parameter, ...]]:
        return tuple(zip(*layer.named_parameters(), strict=True))

    reductions = [
        Sum(*named(expert), pair, pairs[rank % 2], 4.0, options),
        Sum(*named(dense), (0, 1, 2, 3), dist.group.WORLD, 4.0, options),
        Sum(*named(lone), (rank,), None, 2.0, options),
    ]
    # The order in which reductions are given is this rank's own affair.
    reducer = Synchroniser(reductions if rank < 2 else reductions[::-1])
    for step in range(3):
        for layer in (dense, lone, expert):
            layer.zero_grad()
        reducer.prepare(last=True)
        lone(expert(dense(data(rank, step, 5, 6)))).square().mean().backward()
        reducer.wait()
        losses = []
        truth = {
            name: [p.detach().clone().requires_grad_() for p in layer.parameters()]
            for name, layer in (("dense", dense), ("lone", lone), ("expert0", experts[0]), ("expert1", experts[1]))
        }
        for other in range(4):
            weights = [truth["dense"], truth[f"expert{other % 2}"], truth["lone"]]
            x = data(other, step, 5, 6)
            for weight, bias in weights:
                x = nn.functional.linear(x, weight, bias)
            losses.append(x.square().mean())
        torch.stack(losses).mean().backward(retain_graph=True)
        for parameter, expected in zip(dense.parameters(), truth["dense"], strict=True):
            close(parameter.grad, expected.grad)
        for parameter, expected in zip(expert.parameters(), truth[f"expert{rank % 2}"], strict=True):
            close(parameter.grad, expected.grad)
        alone = torch.autograd.grad(losses[rank], truth["lone"])
        for parameter, expected in zip(lone.parameters(), alone, strict=True):
            close(parameter.grad, expected / 2)
    assert {b.transport.name for b in reducer.buckets if len(b.sum.ranks) == 1} == {"local"}


@on_ranks(2)
def test_ranks_may_talk_between_backward_and_wait_whatever_else_each_has():
    """A layer over both ranks and one on each rank alone; between backward and wait the ranks talk of something else."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    shared, lone = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    options = replace(TINY, **OVERLAPPED)
    named = [tuple(zip(*layer.named_parameters(), strict=True)) for layer in (shared, lone)]
    synchroniser = Synchroniser(
        [Sum(*named[0], (0, 1), dist.group.WORLD, 2.0, options), Sum(*named[1], (rank,), None, 1.0, options)]
    )
    said = []
    for step in range(4):
        for layer in (shared, lone):
            layer.zero_grad()
        synchroniser.prepare(last=True)
        lone(shared(data(rank, step, 5, 6))).square().mean().backward()
        synchroniser.end_backward()
        total = torch.ones(())
        dist.all_reduce(total)
        said.append(total.item())
        synchroniser.wait()
    assert said == [2.0] * 4


@on_ranks(4)
def test_two_reducers_in_one_process_and_a_group_that_is_part_of_the_world():
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2, 3))}
    rank = dist.get_rank()
    torch.manual_seed(5)
    layers = [nn.Linear(6, 6).double() for _ in range(2)]
    sets = [next(ranks for ranks in ((0, 1), (2, 3)) if rank in ranks), (0, 2, 3)]
    reducers = [
        Synchroniser([Sum(("w", "b"), tuple(layer.parameters()), ranks, groups[ranks], 2.0, TINY)])
        for layer, ranks in zip(layers, sets, strict=True)
        if rank in ranks
    ]
    for step in range(3):
        for layer in layers:
            layer.zero_grad()
        for reducer in reducers:
            reducer.prepare(last=True)
        sum(layer(data(rank, step, 5, 6)).square().mean() for layer in layers).backward()
        for reducer in reducers:
            reducer.wait()
        for layer, ranks in zip(layers, sets, strict=True):
            if rank in ranks:
                total = sum(layer(data(other, step, 5, 6)).square().mean() for other in ranks) / 2
                for parameter, expected in zip(
                    layer.parameters(), torch.autograd.grad(total, list(layer.parameters())), strict=True
                ):
                    close(parameter.grad, expected)
    for reducer in reducers:
        reducer.close()


@pytest.mark.slow
@in_all_ways(2, timeout=100)
def test_a_compiled_model(options: SyncOptions):
    model, truth = both(net)
    reducer = reduce_all(model, options)
    fast = torch.compile(model, backend="aot_eager")
    for step in range(3):
        model.zero_grad()
        truth.zero_grad()
        reducer.prepare(last=True)
        square(fast, dist.get_rank(), step).backward()
        reducer.wait()
        mean_loss(truth, square, step).backward()
        same_gradients(model, truth)


@pytest.mark.filterwarnings("ignore:Using backward")
@in_all_ways(2)
def test_gradients_made_with_a_graph_of_their_own(options: SyncOptions):
    """A gradient penalty: backward itself is differentiated, so that gradients are made with grad mode on."""
    model, truth = both(net)
    reducer = reduce_all(model, options)

    def penalised(one: nn.Module, rank: int, step: int) -> Tensor:
        grads = torch.autograd.grad(square(one, rank, step), list(one.parameters()), create_graph=True)
        return sum(grad.square().sum() for grad in grads)

    for step in range(3):
        model.zero_grad()
        truth.zero_grad()
        reducer.prepare(last=True)
        penalised(model, dist.get_rank(), step).backward(create_graph=True)
        reducer.wait()
        mean_loss(truth, penalised, step).backward()
        same_gradients(model, truth)
        assert not any(parameter.grad.requires_grad for parameter in model.parameters() if parameter.grad is not None)


@on_ranks(4)
def test_dtensor_parameters_keep_dtensor_gradients():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(1)
    whole = torch.randn(8, 6, dtype=torch.float64)
    weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [Shard(0)]))
    group = mesh.get_group("data")
    ranks = tuple(dist.get_process_group_ranks(group))
    reducer = Synchroniser([Sum(("weight",), (weight,), ranks, group, 2.0, TINY)])
    place = mesh.get_local_rank("data")
    for step in range(3):
        weight.grad = None
        for micro in range(2):
            reducer.prepare(last=micro == 1)
            x = distribute_tensor(data(place, 2 * step + micro, 5, 6), mesh["tensor"], [Replicate()])
            (x @ weight.t()).square().sum().backward()
        reducer.wait()
        truth = whole.clone().requires_grad_()
        for micro in range(2):
            (sum((data(r, 2 * step + micro, 5, 6) @ truth.t()).square().sum() for r in range(2)) / 2).backward()
        assert isinstance(weight.grad, DTensor)
        close(weight.grad.full_tensor(), truth.grad)


@on_ranks(2)
def test_a_reducer_that_nobody_holds_is_freed_and_so_is_the_model():
    model, _ = both(net)
    reducer = reduce_all(model)
    alive = weakref.ref(reducer), weakref.ref(model)
    square(model, dist.get_rank(), 0).backward()
    reducer.wait()
    del reducer
    gc.collect()
    assert alive[0]() is None
    square(model, dist.get_rank(), 0).backward()
    del model
    gc.collect()
    assert alive[1]() is None


@in_all_ways(2)
def test_close_leaves_the_gradients_and_takes_the_hooks_away(options: SyncOptions):
    model, truth = both(net)
    reducer = reduce_all(model, options)
    for _ in range(2):
        model.zero_grad()
        reducer.prepare(last=True)
        square(model, dist.get_rank(), 0).backward()
        reducer.wait()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    (group,) = reducer.groups.values()
    assert (group.sockets is not None) is (options.shared_memory is True)
    reducer.close()
    assert group.sockets is None
    for parameter, grad in zip(model.parameters(), kept, strict=True):
        assert torch.equal(parameter.grad, grad)
    model.zero_grad()
    square(model, dist.get_rank(), 3).backward()
    square(truth, dist.get_rank(), 3).backward()
    same_gradients(model, truth)
    for bucket in reducer.buckets:
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            assert parameter.grad.data_ptr() != view.data_ptr()

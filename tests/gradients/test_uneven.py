"""Gradients that are missing, frozen, sparse or not the same kind on every rank: still equal to one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.gradients.bucket import MISSING, OUTSIDE, SPARSE
from colonnade.gradients.sums import Sum, SyncOptions
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.gradients.uneven import finish_uneven
from colonnade.testing import run_world
from tests.gradients.summing import (
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


class Branches(nn.Module):
    """A trunk, one branch per rank, a layer that only even steps use, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.sometimes, self.never = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        x = torch.tanh(self.trunk(x))
        if rank < 3:
            x = torch.tanh(self.branches[rank](x))
        return self.sometimes(x) if step % 2 == 0 else x


def _branch(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(data(rank, step, 5, 6), rank, step).square().mean()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks("ranks")
def test_a_parameter_without_gradient_on_some_ranks_and_on_all(ranks):
    everywhere(partial(train, Branches, _branch))
    train(Branches, _branch, zero="zeros")
    train(Branches, _branch, replace(TINY, **OVERLAPPED), micro_batches=2)
    said: list[str] = []
    train(Branches, _branch, steps=5, log=said.append)
    about = [line for line in said if "branches.0.weight" in line]
    assert len(about) == 1, said
    others = ", ".join(str(rank) for rank in range(1, ranks))
    assert f"ranks {others} have no gradient for 'branches.0.weight'" in about[0]
    assert not any("never" in line or "sometimes" in line for line in said)


def _flip(model: nn.Module, step: int) -> None:
    """Frozen at first, thawed in step 2, another one frozen from step 3 to 5, all thawed in step 6."""
    model.branches[0].requires_grad_(step >= 2)
    model.trunk.requires_grad_(not 3 <= step <= 5)


def _loss_of_all(model: nn.Module, rank: int, step: int) -> Tensor:
    x = data(rank, step, 5, 6)
    for layer in (model.trunk, *model.branches, model.sometimes):
        x = torch.tanh(layer(x))
    return x.square().mean()


class StartsFrozen(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.branches[0].requires_grad_(False)


def _frozen() -> int:
    everywhere(partial(train, StartsFrozen, _loss_of_all, steps=8, before=_flip))
    train(StartsFrozen, _loss_of_all, steps=8, before=_flip, zero="zeros")
    reducer = train(StartsFrozen, _loss_of_all, steps=8, before=_flip)
    assert sum(len(bucket.names) for bucket in reducer.buckets) == 12
    return reducer.generation


def test_parameters_frozen_and_thawed_in_mid_run():
    generations = run_world(2, _frozen).values
    assert generations[0] == generations[1] == 3


@on_ranks(2)
def test_frozen_parameters_take_no_memory():
    """What is frozen takes no room."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 2))
    model[0].requires_grad_(False)
    reducer = reduce_all(model)
    assert sum(bucket.numel for bucket in reducer.buckets) < 500


@in_all_ways(2)
def test_frozen_on_one_rank_alone(options: SyncOptions):
    """Frozen on rank 1 alone: its own gradient counts as zero, and it still gets the others'."""
    model, truth = both(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)))
    reducer = reduce_all(model, options)
    for step in range(4):
        model.zero_grad()
        truth.zero_grad()
        if dist.get_rank() == 1:
            model[0].requires_grad_(step != 2)
        reducer.prepare(last=True)
        model(data(dist.get_rank(), step, 5, 6)).square().mean().backward()
        reducer.wait()
        for rank in range(dist.get_world_size()):
            truth[0].requires_grad_(not (rank == 1 and step == 2))
            (truth(data(rank, step, 5, 6)).square().mean() / dist.get_world_size()).backward()
        same_gradients(model, truth)


@in_all_ways(4, WAYS[:3])
def test_buckets_of_one_group_change_without_the_ranks_outside_it(options: SyncOptions):
    """World of 4: ranks 0 and 2 freeze and thaw their expert, of which ranks 1 and 3 know nothing."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(3)
    dense, expert = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    named = [tuple(zip(*layer.named_parameters(), strict=True)) for layer in (dense, expert)]
    reducer = Synchroniser(
        [
            Sum(*named[0], (0, 1, 2, 3), dist.group.WORLD, 4.0, options),
            Sum(*named[1], (rank % 2, rank % 2 + 2), pairs[rank % 2], 2.0, options),
        ]
    )
    for step in range(6):
        dense.zero_grad()
        expert.zero_grad()
        if rank % 2 == 0:
            expert.requires_grad_(step not in (1, 2))
        reducer.prepare(last=True)
        expert(dense(data(rank, step, 5, 6))).square().mean().backward()
        reducer.wait()
        losses = [expert(dense(data(other, step, 5, 6))).square().mean() for other in range(4)]
        expected = torch.autograd.grad(sum(losses) / 4, list(dense.parameters()), retain_graph=True)
        for parameter, grad in zip(dense.parameters(), expected, strict=True):
            close(parameter.grad, grad)
        if expert.weight.requires_grad:
            mean = (losses[rank % 2] + losses[rank % 2 + 2]) / 2
            for parameter, grad in zip(
                expert.parameters(), torch.autograd.grad(mean, list(expert.parameters())), strict=True
            ):
                close(parameter.grad, grad)
        else:
            assert expert.weight.grad is None


class Words(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=sparse)
        self.other = nn.Embedding(20, 4, sparse=sparse)
        self.out = nn.Linear(4, 2)

    def forward(self, tokens: Tensor, use_other: bool) -> Tensor:
        x = self.table(tokens)
        if use_other:
            x = x * self.other(tokens)
        return self.out(x)


def _tokens(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = (data(rank, step, 6).abs() * 10).long() % 20
    return model(tokens, rank == 0 and step != 2).square().mean()


def _sparse(options: SyncOptions) -> None:
    model, truth = both(Words)
    reducer = reduce_all(model, options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, truth)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        reducer.prepare(last=True)
        _tokens(model, dist.get_rank(), step).backward()
        reducer.wait()
        mean_loss(truth, _tokens, step).backward()
        same_gradients(model, truth)
        assert model.table.weight.grad.is_sparse
        for optimizer in optimizers:
            optimizer.step()
    assert not any("table" in name for bucket in reducer.buckets for name in bucket.names)


def test_sparse_gradients_stay_sparse():
    run_world(2, everywhere, _sparse)
    run_world(4, _sparse, TINY)


class HalfSparse(nn.Module):
    """A table with a sparse gradient on rank 0 and a dense one elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 4))

    def forward(self, tokens: Tensor, sparse: bool) -> Tensor:
        return nn.functional.embedding(tokens, self.table, sparse=sparse)


def _half(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = (data(rank, step, 6).abs() * 10).long() % 20
    return model(tokens, rank == 0).square().mean()


@in_all_ways(2)
def test_sparse_here_and_dense_there_is_dense(options: SyncOptions):
    model, truth = both(HalfSparse)
    reducer = reduce_all(model, options)
    for step in range(3):
        model.zero_grad()
        reducer.prepare(last=True)
        _half(model, dist.get_rank(), step).backward()
        reducer.wait()
        expected = torch.autograd.grad(mean_loss(truth, _half, step), truth.table)[0]
        close(model.table.grad, expected.to_dense())


@on_ranks(2)
def test_sums_of_one_group_that_start_at_unlike_times_keep_one_order():
    """Two sums of one group, one of which is not started during backward; rank 1 misses a layer of each."""
    names = [["trunk", "branches.1", "sometimes"], ["branches.0", "branches.2", "never"]]
    model, truth = both(Branches)
    world = (tuple(range(2)), dist.group.WORLD, 2.0)
    sums = []
    for parts, overlap in zip(names, (True, False), strict=True):
        named = [(name, p) for name, p in model.named_parameters() if name.rpartition(".")[0] in parts]
        options = replace(TINY, shared_memory=False, overlap=overlap)
        sums.append(Sum(*map(tuple, zip(*named, strict=True)), *world, options))
    synchroniser = Synchroniser(sums)
    for step in range(4):
        synchroniser.prepare(last=True)
        _branch(model, dist.get_rank(), step).backward()
        mean_loss(truth, _branch, step).backward()
        synchroniser.wait()
        same_gradients(model, truth)
        model.zero_grad()
        truth.zero_grad()


PAIRS_OF_NOTES = [
    ((0, 0), True, {}),
    ((0, OUTSIDE), True, {}),
    ((OUTSIDE, MISSING), True, {0: [1]}),
    ((MISSING, OUTSIDE), False, {0: [0]}),
    ((SPARSE, 0), True, {}),
    ((SPARSE, SPARSE), True, {}),
    ((SPARSE, MISSING), True, {0: [1]}),
    ((SPARSE, MISSING), False, {0: [1]}),
    ((SPARSE, OUTSIDE), False, {}),
    ((MISSING, 0), True, {0: [0]}),
    ((MISSING, MISSING), True, {}),
    ((MISSING, MISSING), False, {}),
]
"""The notes of two ranks, whether the parameter has a bucket, and the ranks without a gradient where the other has one."""


@on_ranks(2)
def test_a_gradient_that_no_bucket_could_reduce_has_the_sum_whatever_the_ranks_have():
    rank = dist.get_rank()
    for notes, has_bucket, missing in PAIRS_OF_NOTES:
        weight = nn.Parameter(torch.ones(4, 2))
        reducer = Synchroniser([Sum(("weight",), (weight,), (0, 1), dist.group.WORLD, 1.0)])
        (state,), (bucket,) = reducer._states, reducer.buckets
        bucket.views[0].fill_(float(sum(other + 1 for other, note in enumerate(notes) if note == 0)))
        gradient = torch.full((4, 2), rank + 1.0)
        values = {0: bucket.grads[0], OUTSIDE: gradient, SPARSE: gradient.to_sparse(1), MISSING: None}
        weight.grad, bucket.absent = values[notes[rank]], frozenset({99})
        if not has_bucket:
            state.places = {}
        assert finish_uneven(state, [bytes([note]) for note in notes], 1.0) == missing
        expected = float(sum(other + 1 for other, note in enumerate(notes) if note != MISSING))
        assert bucket.absent == ({0} if has_bucket and not expected else set())
        if not expected:
            assert weight.grad is None
            continue
        assert weight.grad.is_sparse == all(note in (SPARSE, MISSING) for note in notes)
        assert weight.grad.is_sparse or not has_bucket or weight.grad is bucket.grads[0]
        close(weight.grad.to_dense(), torch.full((4, 2), expected))

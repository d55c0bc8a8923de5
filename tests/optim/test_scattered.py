"""Gradients that stay where they are, on a CPU: a kernel written in Python finds them by their addresses."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade import optim
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.optim import bucket_step, engine_optimizer, flat_step
from colonnade.optim.flat_step import FlatBucket, Fragment
from colonnade.optim.norm import UNIT
from colonnade.parallel.flat import FlatLayout


def sgd(
    buffers: Any, scattered: Any, table: Tensor, control: Any, lr: float, momentum: float, dampening: float, *_: Any
) -> None:
    """What the Triton kernel does, without momentum."""
    param, _, _ = buffers
    _, divisor, found_inf = control
    addresses, limits, owners = (tensor.tolist() for tensor in scattered)
    for (first, last, _), owner in zip(table.tolist(), owners, strict=True):
        start, stop = first * UNIT, min(last * UNIT, limits[owner])
        if stop > start and not found_inf:
            found = (ctypes.c_float * (stop - start)).from_address(addresses[owner] + 4 * start)
            param[start:stop] -= lr / float(divisor) * torch.tensor(list(found))


@pytest.fixture
def python_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(sgd=sgd)
    monkeypatch.setitem(sys.modules, "colonnade.optim.optim_kernels", fake)
    monkeypatch.setattr(optim, "optim_kernels", fake, raising=False)
    monkeypatch.setattr(flat_step, "prepare_launch", flat_step.TritonLaunch)
    monkeypatch.setattr(flat_step, "pinned", lambda numbers: numbers)
    monkeypatch.setattr(engine_optimizer, "can_scatter", lambda *_: True)


def test_what_a_launch_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of at most a chunk with the places of their counts, and the options of the group, for both kinds of memory."""
    given: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(adam=lambda *all: given.append(all), sgd=lambda *all: given.append(all))
    monkeypatch.setitem(sys.modules, "colonnade.optim.optim_kernels", fake)
    monkeypatch.setattr(optim, "optim_kernels", fake, raising=False)
    members: list[Tensor] = [nn.Parameter(torch.zeros(shape)) for shape in ((1200,), (5,), (40,))]
    layout, steps = FlatLayout(members), torch.zeros(9)
    fragments = [Fragment(0, 1216, 7), Fragment(1216, 1264, 4)]
    numbers = (torch.ones(1), torch.zeros(()))
    adam = {
        "lr": torch.tensor(0.5),
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
    }
    sgd = {"lr": 0.25, "momentum": 0.0, "dampening": 0.5, "weight_decay": 0.2, "nesterov": False}
    for gradient in (layout.allocate(), flat_step.ScatteredGradient(layout)):
        state = flat_step.BucketState(FlatBucket(layout, members, gradient, [0, 0, 0]), 0)
        run = flat_step.TritonLaunch(state, steps, fragments)
        given.clear()
        run.adam(adam, *numbers)
        run.sgd(sgd, *numbers)
        run.sgd({**sgd, "momentum": 0.9}, *numbers)
        flat = isinstance(gradient, Tensor)
        first, tables = gradient if flat else gradient.like, [one[2] for one in given]
        owners = [] if flat else given[0][1][2].tolist()
        # In units of 8 elements: the first 1200, or 1216, are two chunks.
        cuts = [(0, 128, 7), (128, 152, 7), (152, 158, 4)]
        pieces = [*map(list, cuts if flat else [cuts[0], (128, 150, 7), (150, 152, 7), cuts[2]])]
        assert all(table.tolist() == pieces for table in tables)
        assert owners == ([] if flat else [0, 0, 1, 2])
        for (buffers, where, _, control, *_), moments in zip(given, MOMENTS, strict=True):
            kept = [state.moments.get(name, state.params) for name in moments]
            assert [id(one) for one in buffers] == [id(one) for one in (state.params, first, *kept)]
            assert (where is None) is flat
            assert [id(one) for one in control] == [id(one) for one in (steps, *numbers)]
            assert flat or [id(one) for one in where[:2]] == [id(gradient.addresses), id(gradient.limits)]
        assert [one[4:] for one in given] == [
            (0.5, (0.9, 0.99), 1e-8, 0.1, True),
            (0.25, 0.0, 0.5, 0.2, False),
            (0.25, 0.9, 0.5, 0.2, False),
        ]
        assert type(given[0][4]) is float  # of the host: by value


MOMENTS = (("exp_avg", "exp_avg_sq"), ("none",), ("momentum_buffer",))


@pytest.mark.parametrize(
    ("cuda", "dtype", "triton", "kernel"),
    [
        (True, torch.float32, True, True),
        (True, torch.float16, True, True),
        (False, torch.float32, True, False),
        (True, torch.float64, True, False),
        (True, torch.float32, False, False),
    ],
)
def test_who_is_stepped_and_read_by_kernels(cuda, dtype, triton, kernel, monkeypatch):
    for module in (flat_step, bucket_step):
        monkeypatch.setattr(module, "kernels_available", lambda: triton)
    monkeypatch.setattr(flat_step, "TritonLaunch", lambda *given: given)
    monkeypatch.setattr(flat_step, "TorchLaunch", lambda *given: None)
    fake: Any = SimpleNamespace(is_cuda=cuda, dtype=dtype)
    state: Any = SimpleNamespace(params=fake)
    assert (flat_step.prepare_launch(state, fake, []) is not None) is kernel
    assert bucket_step.can_scatter(fake) is kernel


def test_gradients_are_found_and_moved_only_where_a_kernel_could_not_read_them(monkeypatch):
    monkeypatch.setattr(flat_step, "pinned", lambda numbers: numbers)
    members = [nn.Parameter(torch.zeros(4, 8)) for _ in range(6)]
    held: Any = [SimpleNamespace(tensor=one, holding=SimpleNamespace(count=2, index=1)) for one in members]
    bucket = bucket_step.ScatteredBucket(held, [0, 0, 1, 1, 2, 2], False)
    room = torch.ones(200)
    members[0].grad = room[:32].view(4, 8)
    members[1].grad = room[33:65].view(4, 8)  # not aligned
    members[2].grad = room[80:112].view(8, 4).t()  # in another order
    members[3].grad = torch.ones(4, 8).to_sparse()
    members[4].grad = torch.ones(4, 8)
    members[4].grad.data = torch.ones(4, 8, dtype=torch.bfloat16)
    assert bucket.take_gradients() == [3, 4, 5]
    assert members[0].grad.data_ptr() == room.data_ptr()
    pointers = [one.grad.data_ptr() for one in members[:3]]
    assert not any(pointer % 16 for pointer in pointers)
    assert members[2].grad.stride() == (8, 1)
    assert all(bool((one.grad == 1).all()) for one in members[:3])
    starts = [4 * span.start for span in bucket._layout.spans[:3]]
    found = [pointer - start for pointer, start in zip(pointers, starts, strict=True)]
    assert bucket.flat().grad.addresses.tolist() == [*found, 0, 0, 0]  # type: ignore[union-attr]
    blocks = bucket.blocks([1, 3, 4])
    assert [(one.count, one.index, one.slot) for one in blocks] == [(2, 1, 0), (2, 1, 1)]
    whole = bucket_step.ScatteredBucket(held, [0] * 6, True).blocks([3, 4])
    assert [(one.count, one.index) for one in whole] == [(1, 0)] * 3


def test_scattered_buckets_are_of_one_kind_and_none_is_large(monkeypatch):
    monkeypatch.setattr(bucket_step, "JOINED", 10)
    kinds = [torch.float32, torch.float32, torch.float64, *[torch.float32] * 4]
    sizes = zip([4, 6, 3, 1, 2, 20, 1], kinds, strict=True)
    held: Any = [SimpleNamespace(tensor=nn.Parameter(torch.zeros(n, dtype=kind))) for n, kind in sizes]
    found, expected = bucket_step.scattered_buckets(held, range(7), True), [[0, 1], [3, 4], [5], [6], [2]]
    assert [one.slots for one in found] == expected
    assert [[id(entry) for entry in one.entries] for one in found] == [[id(held[at]) for at in one] for one in expected]
    assert bucket_step.scattered_buckets([], [], True) == []


class Model(nn.Module):
    """Sizes that are no multiple of anything, a memory format of its own, a layer that is thawed later."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.first, self.second, self.late = nn.Linear(45, 13), nn.Linear(13, 7), nn.Linear(13, 7)
        self.late.requires_grad_(False)

    def forward(self, x: Tensor, without: bool) -> Tensor:
        y = torch.tanh(self.first(self.conv(x).flatten(1)))
        return (self.late(y) if without else self.second(y) + self.late(y)).square().mean()


def test_every_element_of_every_gradient_is_found(python_kernel: None) -> None:
    """With layers that come later and that are left out; two groups of parameters, of which one is clipped by itself."""
    clip = {"max_norm": 0.05, "groups": {"own": {"params": "second.*", "max_norm": 0.01}}}
    with launch({"clip_grad_norm": clip}, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        model, plain = Model(), Model()
        plain.load_state_dict(model.state_dict())
        made = []
        for one in (model, plain):
            fast = {"params": [*one.conv.parameters(), *one.second.parameters()], "lr": 0.5}
            made.append(torch.optim.SGD([fast, {"params": [*one.first.parameters(), *one.late.parameters()]}], lr=0.1))
        engine, optimizer = initialize(model, made[0], context=gpc)[0], made[1]
        assert not engine._sync.synchroniser.buckets
        for step in range(6):
            if step == 2:
                model.late.requires_grad_(True)
                plain.late.requires_grad_(True)
            x = torch.randn(4, 3, 5, 5)
            engine.zero_grad()
            engine.backward(engine(x, step == 4))
            before = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
            engine.step()
            assert before == [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad()
            plain(x, step == 4).backward()
            own = [p for p in plain.second.parameters() if p.grad is not None]
            rest = [p for name, p in plain.named_parameters() if not name.startswith("second.")]
            norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(rest, 0.05, norm)
            if own:
                torch.nn.utils.clip_grad_norm_(own, 0.01)
            optimizer.step()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        engine.close()

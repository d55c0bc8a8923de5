"""Gradients that stay where they are, on a CPU: a kernel written in Python finds them by their addresses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.optim import bucket_step, flat_step, norm
from tests.optim import python_kernels


@pytest.fixture
def python_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    python_kernels.install(monkeypatch)


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
    monkeypatch.setattr(norm, "pinned", lambda numbers: numbers)
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
    blocks = bucket.blocks([1, 3, 4], once=True)
    assert [(one.count, one.index, one.slot) for one in blocks] == [(2, 1, 0), (2, 1, 1)]
    whole = bucket_step.ScatteredBucket(held, [0] * 6, True).blocks([3, 4], once=False)
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

"""Memory and bytes moved of every stage: measured on real ranks, and as the formula says."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.optim.zero.formula import bytes_held, bytes_moved, shard_dim
from tests.ranks import on_ranks

WIDTH, LAYERS, BUCKET_MB = 128, 12, 0.25


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)


NUMEL = sum(p.numel() for p in layers().parameters())


def live_bytes() -> int:
    """The bytes of all tensors that this process holds, each memory once."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                if local is not None and local.device.type != "meta":
                    storage = local.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **({"bucket_mb": BUCKET_MB} if stage in (1, 2) else {})}
    return {"zero": zero, "sync": {"shared_memory": False}, **more}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks("ranks")
def test_memory_is_what_the_formula_says(ranks, dtype: torch.dtype):
    """Per stage: bytes when gradients are final, and the elements of the largest bucket."""
    found = {}
    for stage in range(4):
        before = live_bytes()
        with launch(_config(stage), context=ParallelContext(), verbose=False) as gpc:
            engine = initialize(layers(dtype), lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False), context=gpc)[0]
            x = torch.randn(2, WIDTH, dtype=dtype)
            for step in range(3):
                engine.zero_grad()
                engine.backward(engine(x).float().square().mean())
                outcome = engine._sum_gradients()
                if step < 2:
                    engine._finish_step(outcome)
            buckets = engine._sync.synchroniser.buckets if stage in (1, 2) else []
            found[stage] = (live_bytes() - before, max((bucket.numel for bucket in buckets), default=0))
            engine.close()
            del engine, buckets
    for stage, (measured, largest) in found.items():
        masters = dtype is torch.bfloat16 and stage in (1, 2)
        width = 4 if stage == 3 else dtype.itemsize  # shards are what the optimizer steps on
        expected = bytes_held(
            stage,
            NUMEL,
            ranks,
            width=width,
            state=8 if masters else 2 * width,
            master=4 if masters else 0,
            largest=largest,
        )
        assert measured == pytest.approx(expected.total, rel=0.05), f"stage {stage}: {expected}"


def test_stage_2_needs_two_rooms_whatever_the_size_of_the_model():
    small, large = (bytes_held(2, numel, 4, largest=10_000).turns for numel in (10**6, 10**9))
    assert small == large == 2 * 4 * 10_000


class Moved(TorchDispatchMode):
    """Counts the bytes that collectives of more than a few numbers send, as rings send them."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.share = (ranks - 1) / ranks
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            size = max((t.nbytes for t in _tensors(args)), default=0)
            if size > 1000:
                times = {"allreduce_": 2, "_reduce_scatter_base_": 1, "_allgather_base_": 1, "alltoall_base_": 1}
                self.bytes += times[name.split(".")[1]] * self.share * size
        return func(*args, **(kwargs or {}))


def _tensors(args: Any) -> list[Tensor]:
    if isinstance(args, Tensor):
        return [args]
    return [tensor for arg in args for tensor in _tensors(arg)] if isinstance(args, (list, tuple)) else []


@pytest.mark.parametrize(("ranks", "passes"), [(2, 1), (4, 1), (2, 3)])
@on_ranks("ranks", env={"TORCH_DISTRIBUTED_DEBUG": "OFF"})
def test_bytes_moved_per_step(ranks, passes: int):
    found = {}
    for stage in range(4):
        with launch(_config(stage, gradient_accumulation=passes), context=ParallelContext(), verbose=False) as gpc:
            engine = initialize(layers(), lambda p: torch.optim.AdamW(p, lr=0.1), context=gpc)[0]
            for step in range(3):
                moved = Moved(gpc.world_size)
                with moved:
                    engine.zero_grad()
                    for _ in range(passes):
                        engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
                        engine.step()
                found[stage] = moved.bytes
                assert step or moved.bytes
            engine.close()
    for stage, measured in found.items():
        assert measured == pytest.approx(bytes_moved(stage, NUMEL, ranks, passes=passes), rel=0.02), stage
    if passes == 1:
        assert found[1] == pytest.approx(found[0], rel=0.02)
        assert found[2] == pytest.approx(found[0], rel=0.02)
        assert found[3] <= 1.5 * found[0] * 1.02


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((128, 64), 64, 0),
        ((3, 64, 64), 2, 1),
        ((3, 64, 64), 64, 1),
        ((3, 7, 64), 4, 2),
        ((50257, 64), 8, 0),
        ((3, 5), 2, 0),
        ((61, 8), 4, 1),  # below 16 rows each
        ((65, 8), 4, 0),
    ],
)
def test_short_dimensions_are_not_sharded_where_another_can_be(shape, ranks, dim):
    assert shard_dim(shape, ranks) == dim

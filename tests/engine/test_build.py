"""initialize: every check is made, and what memory it takes for a moment."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colonnade._launch import launch
from colonnade.comm import messages
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine import build
from colonnade.engine.build import initialize
from colonnade.parallel.meta import meta_init
from colonnade.reduce import synchroniser
from colonnade.testing import run_world

WIDTH, LAYERS, BUCKET, ONE = 1024, 16, 32 << 20, 4 << 20
"""64 MiB of parameters: twice as much as is broadcast at once, or lies in a bucket. ONE parameter is on its way."""
CONFIGS: list[dict[str, Any]] = [
    {"clip_grad_norm": 1.0},
    {"clip_grad_norm": 1.0, "zero": {"stage": 1, "bucket_mb": 32}},
    {"clip_grad_norm": 1.0, "zero": {"stage": 2, "bucket_mb": 32}},
]


class LiveMemory(TorchDispatchMode):
    """After each operation: all memory that operations have given out and somebody still holds, in whatever thread."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}
        self._moments: list[dict[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta and not hasattr(tensor, "to_local"):
                storage = tensor.untyped_storage()
                self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        self._sizes = {storage: size for storage, size in self._sizes.items() if not storage.expired()}
        self._moments.append(self._sizes)
        return result

    def most(self, but: list[Tensor]) -> int:
        """The most bytes at one moment, but for the memory of these tensors."""
        others = {StorageWeakRef(tensor.untyped_storage()) for tensor in but}
        return max(sum(size for at, size in moment.items() if at not in others) for moment in self._moments)


def _peaks() -> tuple[list[int], list[int]]:
    """The most bytes at one moment of building and initialising, but for gradients and their shards, by config.

    First of models that are built in memory, then of some that are built without.
    """
    synchroniser.keep_heap = lambda: None  # asks for memory and never touches it
    return [_peak(config, False) for config in CONFIGS], [_peak(config, True) for config in (CONFIGS[0], {"zero": 3})]


def _peak(config: dict[str, Any], from_meta: bool) -> int:
    with launch({"sync": {"shared_memory": False}, **config}, context=ParallelContext(), verbose=False) as gpc:
        with LiveMemory() as memory:
            with meta_init() if from_meta else nullcontext():
                model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
            engine = initialize(model, torch.optim.AdamW(model.parameters()), context=gpc)[0]
        buckets = engine._sync.synchroniser.buckets
        gradients = [buffer.flat for bucket in buckets for buffer in bucket.buffers]
        gradients += [bucket.shard.flat for bucket in buckets if bucket.shard is not None]
        peak = memory.most(but=gradients)
        engine.close()
    return peak


@pytest.mark.slow
def test_the_start_takes_little_memory_beside_parameters_and_gradients():
    """One bucket; from the meta device one parameter, and a sharded model's parameters are never whole."""
    parameters = 4 * WIDTH * WIDTH * LAYERS
    for built, (replicated, sharded) in run_world(2, _peaks, timeout=120).values:
        assert max(built) <= parameters + BUCKET + ONE, built
        assert parameters <= replicated <= parameters + ONE, replicated
        assert parameters // 2 <= sharded <= parameters // 2 + ONE, sharded


CHECKS = [
    *("Precision.read", "ClipSettings.read", "ZeroSettings.read", "Precision.build_scaler", "Precision.apply"),
    *("ActivationSettings.read", "ActivationSettings.apply", "Float8.read", "Agreement.require", "Placements.check"),
    *("MetaStart.alike", "MetaStart.locate", "MetaStart.materialise", "_apply_backend_flags", "check_ties"),
    *("read_recipes", "refuse_marks", "warn_of_batch_norm", "warn_of_repeated_work", "compile_model"),
    *("numeric_settings", "broadcast_shared", "_shard_parameters", "alike_optimizer", "_shard_optimizer"),
    *("build_handlers", "check_tied", "wants_flat", "build_sync", "Precision.around", "_announced", "_scheduler"),
]


class ReachedError(Exception):
    """Instead of the check."""


@pytest.mark.parametrize("check", CHECKS)
def test_initialize_makes_every_check(check, monkeypatch):
    def reached(*args: object, **kwargs: object) -> None:
        raise ReachedError

    name, _, method = check.partition(".")
    where = {"Agreement": messages}.get(name, build)
    model = nn.Linear(2, 2)
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        monkeypatch.setattr(*((getattr(where, name), method) if method else (where, name)), reached)
        with pytest.raises(ReachedError):
            initialize(model, torch.optim.SGD(model.parameters()), context=gpc)


def test_each_check_is_told_how_many_there_are_of_what_it_checks(monkeypatch):
    told: dict[str, object] = {}
    monkeypatch.setattr(build.Placements, "check", lambda self, counts: told.update(parameters=counts))
    locate = build.MetaStart.locate
    monkeypatch.setattr(
        build.MetaStart, "locate", lambda self, count: (told.update(on_meta=count), locate(self, count))
    )
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        with meta_init():
            added = nn.Linear(2, 2, bias=False)
        model = nn.Sequential(nn.Linear(2, 2), added)
        initialize(model, lambda parameters: torch.optim.SGD(parameters), context=gpc)[0].close()
    assert told == {"parameters": [3], "on_meta": 1}

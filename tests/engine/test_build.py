"""initialize: every check is made, and what memory it takes for a moment."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colonnade._launch import launch
from colonnade.config import load_config
from colonnade.config.settings import ZeroSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine import prepare
from colonnade.engine.build import initialize
from colonnade.engine.schedule.schedules import PipelineSchedule
from colonnade.gradients import synchroniser
from colonnade.parallel.meta import meta_init
from colonnade.parallel.split import split
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


class ReachedError(Exception):
    """Instead of the check."""


@pytest.mark.parametrize(
    ("stages", "given", "complete"),
    [(1, 1, True), (2, 1, False), (3, 1, False), (2, 2, True), (1, 2, True), (3, 3, True)],
)
def test_a_name_that_no_layer_has_is_a_slip_where_the_whole_model_is_known(monkeypatch, stages, given, complete):
    told: list[Any] = []

    def reached(model: object, settings: object, *args: object) -> None:
        told.extend([model, *args])
        raise ReachedError

    monkeypatch.setattr(prepare, "apply_activations", reached)
    monkeypatch.setattr(prepare, "take_stages", lambda split, *_: next(iter(split)))
    layers = [nn.Linear(2, 2) for _ in range(given)]
    model = split(layers) if given > 1 else layers[0]
    context: Any = SimpleNamespace(pipeline_parallel_size=stages, config={}, get_local_rank=lambda mode: 0)
    with pytest.raises(ReachedError):
        prepare.prepare_model(prepare.read_stages(model), context, PipelineSchedule(2), None)
    assert told == [layers[0], layers, complete]


@pytest.mark.parametrize(("device", "in_buckets"), [("cpu", True), ("cuda", False)])
def test_a_plan_says_where_gradients_lie_on_another_machine(device, in_buckets):
    model = nn.Linear(2, 2, device="meta")
    context: Any = SimpleNamespace(config={}, pipeline_parallel_size=1)
    optimizer = torch.optim.AdamW(model.parameters())
    assert prepare.prepare_sums(model, optimizer, context, ZeroSettings(), planned_on=device).bucket_all is in_buckets


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        ({}, None),
        ({"reduce_dtype": "fp32"}, torch.float32),
        ({"reduce_dtype": "bf16"}, torch.bfloat16),
        ({"reduce_dtype": "fp32", "compress": "bf16"}, torch.bfloat16),
        ({"automatic": False, "waive": ["*"]}, None),
    ],
)
def test_stage_3_reduces_in_what_sync_says(sync, expected):
    zero = {"stage": 3, "master_weights": False}
    precision, settings = prepare.read_numerics(load_config({"zero": zero, "bf16": True, "sync": sync}))
    assert (settings.stage, settings.reduce_dtype) == (3, expected)
    assert (settings.gather_dtype, settings.master_weights) == (torch.bfloat16, False)
    assert (precision.dtype, precision.master_weights) == (torch.bfloat16, False)

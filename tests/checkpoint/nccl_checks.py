"""Over NCCL: a model of transformers out of its folder onto GPUs, and into a folder again, to the bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.hf.weights import from_pretrained
from tests.device.check import Check
from tests.hf.test_weights import PIPELINE, STAGED, TENSOR, build, same, started, state_of


def round_trip(name: str, parallel: dict[str, Any], rest: dict[str, Any]) -> None:
    """Saved by rank 0 with transformers, loaded, gathered, saved by all ranks, loaded with transformers."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = Path(folder[0])
    model = build(name)
    truth = state_of(model)
    if dist.get_rank() == 0:
        model.save_pretrained(path / "theirs")
    dist.barrier()
    with colonnade.launch({"parallel": parallel, **rest}, context=ParallelContext(), verbose=False) as gpc:
        engine = started(from_pretrained(path / "theirs", context=gpc), gpc)
        assert {parameter.device.type for parameter in engine.model.parameters()} == {gpc.device.type}
        assert same(engine.full_state_dict(), truth) == []
        first = engine.full_state_dict("first")
        assert bool(first) == (gpc.get_global_rank() == 0)
        assert not first or same(first, truth) == []
        engine.save_pretrained(path / "ours", max_shard_size="8kB")
        assert same(state_of(type(model).from_pretrained(path / "ours")), truth) == []
        engine.close()


def checks() -> Iterator[Check]:
    for name, parallel, rest in (
        ("phi3 (phi4)/tied", TENSOR, {}),
        ("mixtral", {"expert": 2}, {}),
        ("gpt2/tied/float32", {}, {"zero": 3}),
        ("llama/tied", PIPELINE, STAGED),
    ):
        yield Check("weights", f"{name}, {[*parallel, *rest]}", 2, round_trip, (name, parallel, rest), None, True)

"""Traces of real ranks, joined: the same step lies at the same time on both."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from colonnade.proof.report import merge_traces
from colonnade.testing import run_world
from colonnade.trainer import BaseHook
from colonnade.trainer.hooks import ProfilerHook
from tests.trainer.runs import cut, make_trainer

pytestmark = pytest.mark.slow


class Late(BaseHook):
    """Rank 1 comes 50 ms later to every step."""

    def before_train_iter(self, trainer):
        if trainer.context.get_global_rank() == 1:
            time.sleep(0.05)


def traced(folder: str) -> None:
    trainer = make_trainer({}, lr=0.1)
    trainer.fit(cut(range(24), 24), epochs=1, hooks=[ProfilerHook(folder, steps=2, skip=2), Late()])
    dist.barrier()


def test_two_ranks_are_one_trace_and_only_the_steps_asked_for_are_in_it(tmp_path):
    assert run_world(2, traced, str(tmp_path)).ok
    merged = json.loads(merge_traces(tmp_path, tmp_path / "all.json").read_text())
    events = merged["traceEvents"]
    ranks = {event["args"]["name"].split(" (")[0] for event in events if event["name"] == "process_name"}
    assert ranks == {"rank 0", "rank 1"}
    for rank in (0, 1):
        mine = [event for event in events if event.get("pid", -1) // 1000 == rank and event.get("ph") == "X"]
        backward = [event for event in mine if event["name"] == "autograd::engine::evaluate_function: AddmmBackward0"]
        assert len(backward) == 2 * 2  # two linear layers, two steps
    ends = [
        max(event["ts"] + event["dur"] for event in events if event.get("pid", -1) // 1000 == rank and "dur" in event)
        for rank in (0, 1)
    ]
    assert Path(tmp_path / "all.json").stat().st_size > 1000
    assert abs(ends[0] - ends[1]) < 2e6  # microseconds: they end their last traced step together

"""The schedule of a config: the class or the order that it names, or the one for its sizes."""

from __future__ import annotations

from typing import Any

import pytest

from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.schedule import NonPipelineSchedule, PipelineSchedule
from colonnade.errors import ConfigError
from colonnade.parallel.split import build_schedule
from colonnade.proof.planner.ranks import fake_rank
from colonnade.registry import SCHEDULE

OneFOneB, Interleaved = SCHEDULE.get_module("OneFOneB"), SCHEDULE.get_module("Interleaved1F1B")
PIPELINE = {"parallel": {"pipeline": 2}, "num_microbatches": 4}


def built(config: dict[str, Any]) -> Any:
    context = ParallelContext()
    with fake_rank(load_config(config), 2, 0, context):
        return build_schedule(context)


def test_without_a_schedule_the_sizes_say_which() -> None:
    assert type(built({})) is NonPipelineSchedule
    plain = built(PIPELINE)
    assert (type(plain), plain.num_microbatches) == (OneFOneB, 4)
    chunked = built({**PIPELINE, "model": {"num_chunks": 2}})
    assert (type(chunked), chunked.num_microbatches, chunked.num_chunks) == (Interleaved, 4, 2)
    for config in (PIPELINE, {**PIPELINE, "model": {"num_chunks": 2}}):
        assert built({**config, "TENSOR_SHAPE": (2, 3)}).tensor_shape == (2, 3)
    with pytest.raises(ConfigError, match="a pipeline of 2 stages needs a schedule and a number of micro-batches"):
        built({"parallel": {"pipeline": 2}})


def test_a_class_or_an_order_by_its_name() -> None:
    settings = {"num_microbatches": 4}
    assert type(built({**PIPELINE, "schedule": {"type": "OneFOneB", **settings}})) is OneFOneB
    ordered = built({**PIPELINE, "schedule": {"type": "gpipe", **settings}})
    assert type(ordered) is PipelineSchedule
    assert type(built({"schedule": "NonPipelineSchedule"})) is NonPipelineSchedule
    with pytest.raises(ConfigError, match="OneFOneB could not be built with"):
        built({**PIPELINE, "schedule": {"type": "OneFOneB", "depth": 3}})


def test_what_cannot_run_a_step_is_no_schedule() -> None:
    @SCHEDULE.register_module
    class Stepless:
        pass

    with pytest.raises(ConfigError, match=r"Stepless has no forward_back_step\(\)"):
        built({"schedule": "Stepless"})

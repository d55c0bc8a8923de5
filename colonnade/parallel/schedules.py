"""The schedule that a config asks for."""

from __future__ import annotations

from typing import Any

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.registry import ORDERS, SCHEDULE


def build_schedule(context: ParallelContext) -> Any:
    """The schedule of a launched config, of the class or the order that it names."""
    wanted = context.config.get("schedule") or _default_schedule(context)
    settings = {"type": wanted} if isinstance(wanted, str) else dict(wanted)
    name = settings.pop("type")
    if name in ORDERS:
        name, settings = "PipelineSchedule", {"order": name, **settings}
    schedule = SCHEDULE.get_module(name)
    try:
        built = schedule(**settings)
    except TypeError as error:
        raise ConfigError(
            f"schedule: {name} could not be built with {settings or 'no arguments'}: {error}", code="C051"
        ) from error
    if not callable(getattr(built, "forward_back_step", None)):
        raise ConfigError(f"schedule: {name} has no forward_back_step(); inherit BaseSchedule", code="C051")
    return built


def _default_schedule(context: ParallelContext) -> dict[str, Any]:
    """Without a `schedule` key: none of a pipeline, or one by `num_microbatches` and `model.num_chunks`."""
    config = context.config
    if context.pipeline_parallel_size == 1:
        return {"type": "NonPipelineSchedule"}
    if config.get("num_microbatches") is None:
        raise ConfigError(
            f"a pipeline of {context.pipeline_parallel_size} stages needs a schedule and a number of micro-batches: "
            f"schedule=dict(type='OneFOneB', num_microbatches=8), or num_microbatches=8 for that same one",
            code="C051",
        )
    chunks = (config.get("model") or {}).get("num_chunks")
    shape = {"tensor_shape": config.get("TENSOR_SHAPE")} if config.get("TENSOR_SHAPE") is not None else {}
    if chunks:
        return {"type": "Interleaved1F1B", "num_microbatches": config.num_microbatches, "num_chunks": chunks, **shape}
    return {"type": "OneFOneB", "num_microbatches": config.num_microbatches, **shape}

"""The model of every kind of rank of a world, built on the meta device in a single process without process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from colonnade.config import Config
from colonnade.config.settings import ZeroSettings
from colonnade.context.layout import Layout
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.prepare import prepare_model, read_stages
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.parallel.meta import meta_init, shapes_only
from colonnade.parallel.placement import Replicate, Shard, Tied, place
from colonnade.parallel.split import Split, build_schedule
from colonnade.proof.user_functions import call_given

BuildModel = Callable[..., Any]
"""Returns a model or the result of `colonnade.split`. It is called with `config` and `context` if it has these parameters."""

RANKS_LOOKED_AT = 4096
"""Groups and replica groups are listed from at most this many ranks of a stage."""


@dataclass(frozen=True, eq=False)
class Role:
    """One kind of rank: its first `rank`, its pipeline `stage`, and the `model` that it would train."""

    rank: int
    stage: int
    model: nn.Module


def roles(config: Config, world_size: int, build: BuildModel | None, context: ParallelContext) -> Iterator[Role]:
    """Yield every kind of rank, simulated by `context` until the next one is requested.

    The context is restored afterwards.

    Ranks of one pipeline stage have the same parameters, so a stage is one kind, unless some of its ranks are in groups
    that others are not in. Without `build`, the model has one parameter of each kind of placement. A split model
    contains all stages, so it is built once for all ranks that are in the same groups.
    """
    layout = build_layout(config, world_size)
    splits: dict[Any, Split] = {}
    for rank in first_ranks(layout):
        context.simulate(config, world_size, rank)
        try:
            stage = stage_of(context.layout, rank)
            yield Role(rank, stage, _one_of_each(layout, rank) if build is None else _model(build, context, splits))
        finally:
            context.destroy()


def stage_of(layout: Layout, rank: int) -> int:
    """Return the pipeline stage of a rank."""
    return layout.coordinates(rank).get("pipeline", 0)


def ranks_of_stage(layout: Layout, stages: tuple[int, ...]) -> list[int]:
    """Return the ranks of these stages, at most `RANKS_LOOKED_AT` ranks per stage."""
    stride, size = layout.grid.digits.get("pipeline", (1, 1))

    def ranks(stage: int) -> Iterator[int]:
        if layout.places is not None:
            return (rank for rank in range(layout.world_size) if stage_of(layout, rank) == stage)
        return (rank for rank in range(layout.world_size) if rank // stride % size == stage)

    return sorted(rank for stage in stages for rank in islice(ranks(stage), RANKS_LOOKED_AT))


def first_ranks(layout: Layout) -> list[int]:
    """Return the first rank of each kind."""
    if layout.is_regular:
        return [layout.rank_at(pipeline=stage) for stage in range(layout.grid.sizes.get("pipeline", 1))]
    kinds: dict[Any, int] = {}
    for rank in range(layout.world_size):
        kinds.setdefault((stage_of(layout, rank), _inside(layout, rank)), rank)
    return list(kinds.values())


def _inside(layout: Layout, rank: int) -> tuple[ParallelMode, ...]:
    return tuple(mode for mode in layout.modes if layout.has(mode, rank))


def _model(build: BuildModel, context: ParallelContext, splits: dict[Any, Split]) -> nn.Module:
    """The model that a rank would train. `splits`: the split models so far, by the modes of their ranks."""
    inside = _inside(context.layout, context.get_global_rank())
    model = splits[inside] if inside in splits else built(build, context)
    whole = isinstance(model, Split) and model.whole is not None
    # At ZeRO stage 3 tied parameters of a split model are sharded for one stage, and must not be sharded again for another.
    if whole and not (model.ties and ZeroSettings.read(context.config.get("zero")).stage == 3):
        splits[inside] = model
    return prepared(model, context)


def prepared(model: nn.Module | Split, context: ParallelContext) -> nn.Module:
    """Return the part of a model that the rank of `context` would train."""
    schedule = None
    try:
        schedule = build_schedule(context)
    except ColonnadeError:  # `explain` lists it; stages cannot be chosen without it
        if isinstance(model, Split):
            raise
    return prepare_model(read_stages(model), context, schedule, device=None)[0]


def built(build: BuildModel, context: ParallelContext) -> Any:
    """Build the model for the rank of `context` on the meta device; returns the model, or all stages of a split model."""
    try:
        given = {"config": context.config, "context": context}
        try:
            with shapes_only():
                model = call_given(build, given, "the model's function")
        except (RuntimeError, NotImplementedError):  # its code reads values
            with meta_init():
                model = call_given(build, given, "the model's function")
    except ColonnadeError:
        raise
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"the model could not be built on the meta device for rank {context.get_global_rank()} of "
            f"{context.world_size}, without process groups ({type(error).__name__}: {error}). The function that "
            "builds the model may build and shard layers. It must not communicate, and it must not load files into "
            "parameters."
        ) from error
    if not isinstance(model, (nn.Module, Split)):
        raise ConfigError(
            f"the function that builds the model returned a {type(model).__name__}; return a torch.nn.Module or the "
            "result of colonnade.split"
        )
    return model


def _one_of_each(layout: Layout, rank: int) -> nn.Module:
    """One parameter of each kind of placement that is possible in this world."""
    model = nn.Module()

    def add(name: str, modes: dict[ParallelMode, Any]) -> None:
        parameter = nn.Parameter(torch.empty(4, 4, device="meta"))
        place(parameter, modes)
        model.register_parameter(name, parameter)

    add("a plain parameter", {})
    last = layout.grid.sizes.get("pipeline", 1) - 1
    if last > 0 and stage_of(layout, rank) in (0, last):
        add("a weight tied to another stage", {ParallelMode.PIPELINE: Tied((0, last), "tied")})
    for mode in layout.modes:
        if not layout.has(mode, rank) or len(layout.group_of(mode, rank)) == 1 or mode in _NEVER_PLACED:
            continue
        add(f"sharded over {mode.name}", {mode: Shard(0)})
        if mode.data == "same":
            add(f"partial gradient over {mode.name}", {mode: Replicate(owes="sum")})
    return model


_NEVER_PLACED = (ParallelMode.GLOBAL, ParallelMode.MODEL, ParallelMode.PIPELINE)

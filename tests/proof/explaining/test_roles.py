"""The model of every kind of rank, in one process with no process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, ContextError
from colonnade.models import GPT
from colonnade.parallel.split import split
from colonnade.proof.roles import ranks_of_stage, roles

PIPED: dict[str, Any] = {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, "num_microbatches": 2}


def test_one_model_for_each_stage_on_the_meta_device():
    def build(config: Any, context: ParallelContext) -> Any:
        assert config.num_microbatches == 2
        return split(GPT(16, 8, 16, 2, 4, context=context), num_stages=2)

    context = ParallelContext()
    found = []
    for role in roles(load_config(PIPED), 8, build, context):
        assert context.get_global_rank() == role.rank
        found.append((role.rank, role.stage))
        assert all(parameter.is_meta for parameter in role.model.parameters())
    assert found == [(0, 0), (2, 1)]
    assert not context.is_launched
    assert context.world_size == 1
    assert not dist.is_initialized()


def test_a_split_model_is_built_once_and_what_fsdp_cuts_for_each_stage():
    """A tied weight belongs to two stages: what is placed for one of them must not be placed again for the other."""
    for zero, times in ((0, 1), (3, 2)):
        built = []

        def build(context: ParallelContext, built: list[int] = built) -> Any:
            built.append(context.get_global_rank())
            return split(GPT(16, 8, 16, 2, 4, context=context), num_stages=2)

        names = [
            {name for name, _ in role.model.named_parameters()}
            for role in roles(load_config({**PIPED, "zero": zero}), 8, build, ParallelContext())
        ]
        assert len(built) == times
        assert len(names) == 2
        assert names[0] != names[1]


def test_ranks_of_a_stage_are_those_of_the_layout():
    context = ParallelContext()
    context.simulate(load_config(PIPED), 8, 3)
    layout = context.layout
    assert ranks_of_stage(layout, (0,)) == [0, 1, 4, 5]
    assert ranks_of_stage(layout, (0, 1)) == list(range(8))
    assert context.get_local_rank(ParallelMode.TENSOR) == 1
    assert context.get_group(ParallelMode.TENSOR) is None
    with pytest.raises(ContextError, match="is simulated, so its ranks cannot communicate"):
        context.ensure_groups([(0, 1)])
    with pytest.raises(ContextError, match="joined a world"):
        context.simulate(load_config(PIPED), 8, 3)
    context.destroy()
    assert context.world_size == 1


def communicates() -> nn.Module:
    dist.barrier()
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (communicates, "could not be built on the meta device for rank 0 of 8, without process groups"),
        (lambda width: nn.Linear(width, 2), "requires width, which is not available here"),
        (lambda: 3, "returned a int"),
        (lambda: split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)), num_stages=3), "split into 3"),
    ],
)
def test_functions_that_make_no_model_are_told_so(build, message):
    with pytest.raises(Exception, match=message):
        list(roles(load_config(PIPED), 8, build, ParallelContext()))


def test_stages_without_a_pipeline_are_refused():
    def build() -> Any:
        return split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), num_stages=2)

    with pytest.raises(ConfigError, match="NonPipelineSchedule does not run a pipeline"):
        list(roles(load_config({}), 8, build, ParallelContext()))

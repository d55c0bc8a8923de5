"""Five bugs of the ancestor's, each as the test that would have caught it: models of ours beside one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.config import Config
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.models import GPT
from colonnade.nn.moe import MoE, SwitchRouter
from colonnade.parallel.placement import Tied, place
from colonnade.parallel.split import split
from colonnade.testing import gather_gradients, run_world
from tests.ranks import on_ranks

RTOL = 1e-10


# -- tied modules were broadcast from a stage that does not hold them -----------------------------------------


def _tied() -> dict[str, Tensor]:
    """Stages 1 and 3 of 4 share a weight, and begin with unlike copies of it."""
    with launch({"parallel": {"pipeline": 4}, "num_microbatches": 4}, context=ParallelContext(), verbose=False) as gpc:
        stage = gpc.get_local_rank(ParallelMode.PIPELINE)
        model = nn.Linear(3, 3, bias=False).double()
        nn.init.constant_(model.weight, 0.1 * (stage + 1))
        if stage in (1, 3):
            place(model.weight, {ParallelMode.PIPELINE: Tied((1, 3), "shared")})
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), context=gpc)[0]
        found = {"start": model.weight.detach().clone()}
        engine.zero_grad()
        engine.execute_schedule(iter([(torch.ones(4, 3).double(), torch.zeros(4, 3).double())]))
        engine.step()
        engine.close()
        return {**found, "after": model.weight.detach().clone()}


def test_tied_weights_start_from_the_first_stage_that_holds_them_and_stay_equal():
    found = run_world(4, _tied).values
    for stage in (1, 3):  # stage 1's, not stage 0's
        assert torch.equal(found[stage]["start"], torch.full((3, 3), 0.2, dtype=torch.float64))
    assert torch.equal(found[1]["after"], found[3]["after"])
    assert not torch.equal(found[1]["after"], found[1]["start"])


# -- gradients of experts came out as many times too large as there were expert ranks --------------------------


def _experts(expert: int) -> dict[str, Tensor]:
    with launch({"parallel": {"expert": expert}}, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        model = MoE(6, 4, SwitchRouter(6, 4, balance_loss=0.0, context=gpc), inner=8, context=gpc).double()
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), context=gpc)[0]
        torch.manual_seed(1 + gpc.get_global_rank())
        engine.zero_grad()
        engine.backward(engine(torch.randn(10, 6, dtype=torch.float64)).square().mean())
        engine._sum_gradients()
        gradients = gather_gradients(model, gpc)
        engine.close()
        return gradients


def test_expert_gradients_do_not_depend_on_how_many_ranks_share_the_experts():
    one, two, four = (run_world(4, _experts, size).values[0] for size in (1, 2, 4))
    assert any("experts" in name for name in one)
    for name, truth in one.items():
        for found in (two[name], four[name]):
            assert (found - truth).norm() <= RTOL * truth.norm(), name


# -- SEQUENCE_DP groups mixed ranks of several pipeline stages ------------------------------------------------


def test_no_sequence_dp_group_has_ranks_of_two_stages():
    for world, parallel in (
        (8, {"pipeline": 2, "tensor": {"size": 2, "mode": "sequence"}}),
        (16, {"pipeline": 4, "tensor": {"size": 2, "mode": "sequence"}}),
        (24, {"pipeline": 3, "tensor": {"size": 4, "mode": "sequence"}}),
    ):
        layout = build_layout(Config({"parallel": parallel}), world)
        for group in layout.groups(ParallelMode.SEQUENCE_DP):
            assert len({layout.local_rank(ParallelMode.PIPELINE, rank) for rank in group}) == 1
            assert len(group) == world // parallel["pipeline"]


# -- shards of other ranks were missing from the norm ---------------------------------------------------------


def _norm(parallel: dict[str, Any]) -> float:
    config = {"parallel": parallel, "clip_grad_norm": 1.0, "num_microbatches": 2}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        model = GPT(16, 8, 16, 4, 2, context=gpc).double()
        stages = split(model, num_stages=2) if gpc.pipeline_parallel_size == 2 else model
        engine = initialize(stages, lambda p: torch.optim.SGD(p, lr=0.1), model.criterion(), context=gpc)[0]
        tokens = torch.arange(36).reshape(4, 9) * 7 % 16
        engine.zero_grad()
        engine.execute_schedule(iter([(tokens[:, :-1], tokens[:, 1:])]), return_output_label=False)
        engine.step()
        engine.close()
        return float(engine.grad_norm)


def test_the_norm_is_the_same_on_every_layout():
    truth = run_world(1, _norm, {}).values[0]
    for world, parallel in ((2, {"tensor": 2}), (4, {"tensor": {"size": 4, "mode": "2d"}}), (2, {"pipeline": 2})):
        for found in run_world(world, _norm, parallel).values:
            assert abs(found - truth) <= RTOL * truth


# -- integer tensors did not go from stage to stage -----------------------------------------------------------


class Numbered(nn.Module):
    """Hands token numbers on beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.table(tokens), tokens, tokens > 4


class Looked(nn.Module):
    """Needs the numbers and the flags again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, x: Tensor, tokens: Tensor, large: Tensor) -> Tensor:
        return x + self.table(tokens) * large.unsqueeze(-1)


@on_ranks(2)
def test_integers_and_flags_go_from_stage_to_stage_as_they_are():
    with launch({"parallel": {"pipeline": 2}, "num_microbatches": 2}, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        stages = [Numbered().double(), Looked().double()]
        tokens, label = torch.arange(8).reshape(4, 2), torch.zeros(4, 2, 4).double()
        plain = nn.functional.mse_loss(stages[1](*stages[0](tokens)), label)
        engine = initialize(split(stages), lambda p: torch.optim.SGD(p, lr=0.1), nn.MSELoss(), context=gpc)[0]
        loss = engine.execute_schedule(iter([(tokens, label)]))[2]
        engine.close()
        found, truth = loss.item(), plain.item()
    assert abs(found - truth) <= RTOL * truth

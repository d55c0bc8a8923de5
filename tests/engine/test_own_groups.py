"""An initializer whose groups are not those of the grid: data, sums, norm, weights and checkpoints are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.config import load_config
from colonnade.constants import INITIALIZER_MAPPING
from colonnade.context.dist_group_initializer import ProcessGroupInitializer
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.errors import ColonnadeError
from colonnade.nn.moe.dispatch import Scope
from colonnade.parallel.collectives import copy, gather, reduce, scatter, split_sizes
from colonnade.parallel.placement import Replicate, Shard, place
from colonnade.proof.explain import explain
from colonnade.proof.planner.hardware import load_hardware
from colonnade.proof.planner.job import Job
from colonnade.proof.planner.plan import plan
from colonnade.registry import DIST_GROUP_INITIALIZER
from colonnade.testing import compare, gather_weights, run_world
from colonnade.utils import get_dataloader
from tests.ranks import on_ranks

SNAKE = ParallelMode.register("OWN_SNAKE", "own_snake", data="same")
NODE = ParallelMode.register("OWN_NODE", "own_node", data="distinct")
CROSSED = [[0, 3], [1, 2]]
ROWS, STEPS = 8, 3


@DIST_GROUP_INITIALIZER.register_module
class OwnGroups(ProcessGroupInitializer):
    """Groups as the config has them; in smaller worlds those of the axis."""

    def __init__(self, *six: Any, groups: Any = None, of: str = "own_snake") -> None:
        super().__init__(*six)
        self.groups, self.of = groups, of

    def init_parallel_groups(self) -> Any:
        return {ParallelMode(self.of): self.groups} if self.groups and self.world_size == 4 else None


INITIALIZER_MAPPING["own_snake"] = INITIALIZER_MAPPING["own_node"] = "OwnGroups"


class Rows(nn.Module):
    """A linear layer whose rows are split over SNAKE, and a bias of which each rank adds its part of the samples."""

    def __init__(self, inputs: int, outputs: int, gpc: ParallelContext) -> None:
        super().__init__()
        whole, self.gpc = nn.Linear(inputs, outputs), gpc
        self.sizes = split_sizes(outputs, SNAKE, context=gpc)
        self.weight = nn.Parameter(scatter(whole.weight.detach(), SNAKE, 0, self.sizes, context=gpc).clone())
        place(self.weight, {SNAKE: Shard(0)}, shape=(outputs, inputs))
        self.bias = nn.Parameter(whole.bias.detach().clone())
        place(self.bias, {SNAKE: Replicate(owes="sum")})

    def forward(self, x: Tensor) -> Tensor:
        y = gather(F.linear(copy(x, SNAKE, context=self.gpc), self.weight), SNAKE, -1, self.sizes, context=self.gpc)
        ranks = self.gpc.get_world_size(SNAKE)
        return y + reduce(self.bias / ranks, SNAKE, context=self.gpc)


def model(gpc: ParallelContext | None) -> nn.Module:
    torch.manual_seed(0)
    split = gpc is not None and gpc.is_initialized(SNAKE)
    layers = [Rows(6, 8, gpc) if split else nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).double()


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS * STEPS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, 3 * x[:, :4].cos())


def train(gpc: ParallelContext, folder: str = "", load: bool = False) -> dict[str, Any]:
    engine = initialize(model(gpc), lambda p: torch.optim.AdamW(p, lr=0.01), nn.MSELoss(), context=gpc)[0]
    loader = get_dataloader(samples(), context=gpc, batch_size=ROWS // gpc.layout.distinct_data)
    norms = []
    with CheckpointManager(folder, gpc) if folder else _nothing() as manager:
        if load:
            manager.load(engine.model, engine.optimizer)
        for step, (x, y) in enumerate(loader):
            if not (load and step == 0):
                engine.zero_grad()
                engine.backward(engine.criterion(engine(x), y))
                engine.step()
                norms.append(float(engine.grad_norm))
            if folder and not load and step == 0:
                manager.save(1, engine.model, engine.optimizer)
    found = {
        "weights": gather_weights(engine.model, gpc),
        "norms": norms,
        "ledger": str(engine.ledger()),
        "rows": {(row.parameter, row.mode): (row.ranks, row.divisor) for row in engine.ledger().rows},
        "groups": {mode.name: gpc.get_ranks_in_group(mode) for mode in gpc.layout.modes if gpc.is_initialized(mode)},
    }
    engine.close()
    return found


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *exc: object) -> None: ...


def one_process(first: int = 0) -> tuple[dict[str, Tensor], list[float]]:
    plain = model(None)
    optimizer, norms = torch.optim.AdamW(plain.parameters(), lr=0.01), []
    x, y = samples().tensors
    for at in range(STEPS):
        rows = slice(at * ROWS, (at + 1) * ROWS)
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x[rows]), y[rows]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0)))
        optimizer.step()
    return dict(plain.named_parameters()), norms[first:]


def snake(groups: Any = CROSSED, **more: Any) -> dict[str, Any]:
    return {"parallel": {"own_snake": {"size": 2, "groups": groups}}, "clip_grad_norm": 1.0, **more}


def _trained(folder: str) -> list[dict[str, Any]]:
    node = {"parallel": {"own_node": {"size": 2, "groups": CROSSED, "of": "own_node"}}, "clip_grad_norm": 1.0}
    found = []
    for config, where, load in (
        (snake(), folder, False),
        (snake(zero=1), "", False),
        (node, "", False),
        (snake(None), folder, True),  # what was saved on crossed groups, on those of the grid
    ):
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            found.append(train(gpc, where, load))
    return found


def test_weights_norms_and_ledger_are_those_of_one_process(tmp_path: Path) -> None:
    truth, norms = one_process()
    ranks = run_world(4, _trained, str(tmp_path)).values
    for rank, (crossed, sharded, nodes, resumed) in enumerate(ranks):
        for found in (crossed, sharded, nodes):
            compare(truth, found["weights"], rtol=1e-10)
            assert found["norms"] == pytest.approx(norms, rel=1e-10)
        compare(truth, resumed["weights"], rtol=1e-10)
        assert resumed["norms"] == pytest.approx(norms[1:], rel=1e-10)
        mine = next(group for group in CROSSED if rank in group)
        data = [0, 1] if rank in (0, 1) else [2, 3]  # the same place in their groups, other replicas
        assert (crossed["groups"]["OWN_SNAKE"], crossed["groups"]["DATA"]) == (mine, data)
        assert crossed["groups"]["MODEL"] == mine
        assert crossed["rows"] == {
            ("0.weight", "DATA"): (tuple(data), 2),
            ("0.bias", "DATA"): (tuple(data), 2),
            ("0.bias", "OWN_SNAKE"): (tuple(mine), 1),
            ("2.weight", "DATA"): (tuple(data), 2),
            ("2.bias", "DATA"): (tuple(data), 2),
        }
        assert {ranks for (_, mode), (ranks, _) in nodes["rows"].items() if mode == "OWN_NODE"} == {tuple(mine)}
        assert nodes["groups"]["OWN_NODE"] == mine
        assert f"OWN_NODE  {mine}" in nodes["ledger"]


def _sharded() -> dict[str, Any]:
    with launch(snake([[0, 2], [1, 3]], zero=3), context=ParallelContext(), verbose=False) as gpc:
        return train(gpc)


@pytest.mark.slow
def test_zero_3_works_where_ranks_ascend_along_data() -> None:
    truth, norms = one_process()
    for found in run_world(4, _sharded).values:
        compare(truth, found["weights"], rtol=1e-10)
        assert found["norms"] == pytest.approx(norms, rel=1e-10)


_JOINED = {"parallel": {"own_node": {"size": 2, "groups": CROSSED, "of": "own_snake"}}}


@on_ranks(4)
def test_batches_are_compared_by_the_groups_and_groups_across_replicas_are_refused():
    """By hand dealt data, as the places say and as the position in DATA says; a mode that joins ranks of two replicas."""
    found = []
    for by_position in (False, True):
        with launch(snake(), context=ParallelContext(), verbose=False) as gpc:
            engine = initialize(model(gpc), lambda p: torch.optim.SGD(p, lr=0.1), nn.MSELoss(), context=gpc)[0]
            place_ = gpc.layout.coordinates(gpc.get_global_rank())["data"]
            at = gpc.get_local_rank(ParallelMode.DATA) if by_position else place_
            x, y = (each[at * 4 : at * 4 + 4] for each in samples().tensors)
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))
            try:
                engine.step()
                found.append("")
            except ColonnadeError as error:
                found.append(str(error))
            engine.close()
    for config in (snake(zero=3), _JOINED):
        with launch(config, context=ParallelContext(), verbose=False) as gpc, pytest.raises(ColonnadeError) as refused:
            initialize(model(gpc), lambda p: torch.optim.SGD(p, lr=0.1), nn.MSELoss(), context=gpc)
        found.append(str(refused.value))
    right, wrong, stage_3, joined = found
    assert right == ""
    assert "ranks 1 and 2 must get the same data, because they differ only on the axis 'own_snake'" in wrong
    assert "gpc.layout.coordinates(gpc.get_global_rank())['data']" in wrong
    assert "is sharded over ParallelMode.DATA, as with ZeRO stage 3, but the ranks [3, 2]" in stage_3
    assert "0.weight is placed on ParallelMode.OWN_SNAKE, whose ranks see the same data, but the group" in joined
    assert "C162" in joined


def _batch() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 6).double(), torch.ones(4, 4).double()


_JOB = Job(lambda context: model(context), _batch, nn.MSELoss)


def test_a_plan_goes_by_the_groups():
    planned = plan(load_config(snake()), 4, load_hardware("h100"), _JOB)
    groups = {mode.mode: mode.groups for mode in planned.modes}
    assert groups["OWN_SNAKE"] == ((0, 3), (1, 2))
    assert groups["DATA"] == ((0, 1), (2, 3))
    lines = {(line.parameters, line.mode): (line.ranks, line.divisor) for line in planned.ledger}
    assert lines["*.weight", "DATA"] == (2, 2)
    assert planned.problems == ()
    joined = load_config(_JOINED)
    with pytest.raises(ColonnadeError, match="C162"):
        plan(joined, 4, load_hardware("h100"), _JOB)
    assert "C162" in explain(joined, 4, lambda context: model(context)).problems[0]


@on_ranks(4)
def test_tokens_of_a_mixture_of_experts_are_in_the_order_of_the_data_on_every_rank():
    with launch(snake(), context=ParallelContext(), verbose=False) as gpc:
        here = gpc.layout.coordinates(gpc.get_global_rank())["data"]
        rows, at = Scope.of(gpc).gathered(torch.tensor([float(here)]))
        assert (rows.flatten().tolist(), at) == ([0.0, 1.0], here)

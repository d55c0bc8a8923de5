"""Every pipeline schedule on the engine, beside data and tensor parallelism, tied and not, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.engine.schedule.orders import chunks_per_rank
from colonnade.engine.schedule.schedules import BaseSchedule
from colonnade.parallel.placement import Shard, Tied, place
from colonnade.registry import ORDERS, SCHEDULE
from colonnade.testing import compare, gather_gradients, gather_weights, run_world
from tests.gradients.scenarios import Copy, Sum, numbers
from tests.ranks import on_ranks

RTOL = 1e-10
WIDTH, LAYERS = 4, 8
SCHEDULES: dict[str, tuple[dict[str, Any], str]] = {
    # name: (settings, how stages lie on ranks)
    "GPipe": ({}, "loop1"),
    "OneFOneB": ({}, "loop1"),
    "Interleaved1F1B": ({"num_chunks": 2}, "loop2"),
    "BreadthFirst": ({"num_chunks": 2}, "loop2"),
    "InterleavedZeroBubble": ({"num_chunks": 2}, "loop2"),
    "ZBV": ({}, "v"),
    "DualPipeV": ({}, "v"),
}


FORMER_NAMES: dict[str, tuple[dict[str, Any], str]] = {
    "PipelineSchedule": ({}, "loop1"),
    "InterleavedPipelineSchedule": ({"num_chunks": 2}, "loop2"),
}


class Block(nn.Module):
    """A split feed-forward layer under tensor parallelism; whole without it."""

    def __init__(self, index: int, gpc: ParallelContext | None) -> None:
        super().__init__()
        up, down = numbers(2 * WIDTH, WIDTH, seed=index), numbers(WIDTH, 2 * WIDTH, seed=50 + index)
        tensor = gpc is not None and gpc.tensor_parallel_size == 2
        self.group = gpc.get_group(ParallelMode.TENSOR) if tensor else None
        if tensor:
            at = gpc.get_local_rank(ParallelMode.TENSOR)
            up, down = up.chunk(2)[at].clone(), down.chunk(2, dim=1)[at].clone()
        self.up, self.down = nn.Parameter(up * 0.3), nn.Parameter(down * 0.3)
        self.bias = nn.Parameter(numbers(WIDTH, seed=90 + index) * 0.1)
        if tensor:
            place(self.up, {ParallelMode.TENSOR: Shard(0)})
            place(self.down, {ParallelMode.TENSOR: Shard(1)})

    def forward(self, x: Tensor) -> Tensor:
        y = Copy.apply(x, self.group) if self.group else x
        y = torch.tanh(F.linear(y, self.up)) @ self.down.T
        return x + (Sum.apply(y, self.group) if self.group else y) + self.bias


class Ends(nn.Module):
    """An entrance or an exit that multiplies by one matrix, which may be tied."""

    def __init__(self, weight: nn.Parameter, turn: bool) -> None:
        super().__init__()
        self.weight, self.turn = weight, turn

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.T if self.turn else self.weight)


class Stage(nn.Module):
    """Consecutive parts of the whole model, under the whole model's names."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


def all_parts(gpc: ParallelContext | None, tied: bool) -> dict[str, nn.Module]:
    entrance = nn.Parameter(numbers(WIDTH, WIDTH, seed=7))
    leaving = entrance if tied else nn.Parameter(numbers(WIDTH, WIDTH, seed=8))
    parts: dict[str, nn.Module] = {"entrance": Ends(entrance, False)}
    parts |= {f"block{index}": Block(index, gpc) for index in range(LAYERS)}
    return {**parts, "exit": Ends(leaving, True)}


def stage_numbers(rank: int, p: int, lie: str) -> list[int]:
    return {"loop1": [rank], "loop2": [rank, rank + p], "v": [rank, 2 * p - 1 - rank]}[lie]


def build(gpc: ParallelContext, lie: str, tied: bool) -> nn.Module:
    p, rank = gpc.pipeline_parallel_size, gpc.get_local_rank(ParallelMode.PIPELINE)
    count = p if lie == "loop1" else 2 * p
    parts = list(all_parts(gpc, False).items())
    each = LAYERS // count
    stages = [dict(parts[1 + at * each : 1 + (at + 1) * each]) for at in range(count)]
    ends = all_parts(gpc, tied)
    stages[0] = {"entrance": ends["entrance"], **stages[0]}
    stages[-1] = {**stages[-1], "exit": ends["exit"]}
    mine = [Stage(stages[number]) for number in stage_numbers(rank, p, lie)]
    if tied and lie != "v":  # on a V the first and the last stage are on one rank: one parameter, nothing to tie
        for stage, number in zip(mine, stage_numbers(rank, p, lie), strict=True):
            for end in {0: "entrance", count - 1: "exit"}.get(number, "").split():
                place(stage.parts[end].weight, {ParallelMode.PIPELINE: Tied((0, p - 1), "ends")})
    return nn.ModuleList(mine) if len(mine) > 1 else mine[0]


def batch(step: int, part: int, rows: int = 9) -> tuple[Tensor, Tensor]:
    return numbers(rows, WIDTH, seed=1000 + 10 * step + part), numbers(rows, WIDTH, seed=2000 + 10 * step + part)


def renamed(found: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """Chunks put a number before the names of the whole model; a tied exit is the entrance."""
    plain = {name[name.index("parts.") :]: value for name, value in found.items()}
    if tied:
        plain.pop("parts.exit.weight", None)
    return plain


def _train(parallel: dict, name: str, settings: dict, lie: str, tied: bool, accumulation: int) -> list[str]:
    config = {
        "parallel": parallel,
        "schedule": {"type": name, "num_microbatches": 2 * parallel["pipeline"], **settings},
        "gradient_accumulation": accumulation,
        "clip_grad_norm": 1.0,
    }
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = build(gpc, lie, tied)
        engine = initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), nn.MSELoss(), context=gpc)[0]
        plain = Stage(all_parts(None, tied))
        adamw = torch.optim.AdamW(plain.parameters(), lr=0.01)
        data = gpc.data_parallel_size
        for step in range(2):
            engine.zero_grad()
            adamw.zero_grad()
            for micro in range(accumulation):
                at = step * accumulation + micro
                loss = engine.execute_schedule(iter([batch(at, gpc.get_local_rank(ParallelMode.DATA))]))[2]
                expected = [F.mse_loss(plain(x), y) for x, y in (batch(at, part) for part in range(data))]
                (sum(expected) / data / accumulation).backward()
                mine = expected[gpc.get_local_rank(ParallelMode.DATA)]
                assert abs(loss.item() - mine.item()) <= RTOL * abs(mine.item())
                if micro == accumulation - 1:
                    engine._sum_gradients()
                    truth = {key: value.grad for key, value in plain.named_parameters()}
                    compare(truth, renamed(gather_gradients(model, gpc), tied), RTOL)
                engine.step()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            assert abs(engine.grad_norm.item() - norm.item()) <= RTOL * norm.item()
            adamw.step()
        compare(dict(plain.named_parameters()), renamed(gather_weights(model, gpc), tied), RTOL)
        order = engine.schedule.last_order
        engine.eval()
        x, y = batch(99, 0, rows=11)
        output, label, loss = engine.execute_schedule(iter([(x, y)]), forward_only=True)
        assert abs(loss.item() - F.mse_loss(plain(x), y).item()) <= RTOL
        if output is not None:
            assert torch.allclose(output, plain(x), rtol=RTOL)
            assert torch.equal(label, y)
        engine.close()
        return order


@pytest.mark.parametrize("name", [*SCHEDULES, *FORMER_NAMES])
def test_every_schedule_on_two_ranks_tied_and_accumulated(name):
    settings, lie = (SCHEDULES | FORMER_NAMES)[name]
    run_world(2, _train, {"pipeline": 2}, name, settings, lie, True, 2)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "parallel",
    [{"pipeline": 4}, {"pipeline": 2, "data": 2}, pytest.param({"pipeline": 2, "tensor": 2}, marks=pytest.mark.long)],
    ids=str,
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_on_four_ranks_beside_data_and_tensor(name, parallel, tied):
    settings, lie = SCHEDULES[name]
    run_world(4, _train, parallel, name, settings, lie, tied, 1, env={"TORCH_DISTRIBUTED_DEBUG": "OFF"})


@SCHEDULE.register_module
class TwentyLines(BaseSchedule):
    """A schedule of the user's own: all forwards, then all backwards, of halves of the batch, without a pipeline."""

    def forward_back_step(self, engine, data_iter, forward_only=False, return_loss=True, return_output_label=True):
        data, label = self.load_batch(data_iter)
        outputs = [engine(part) for part in data.chunk(2)]
        losses = [engine.criterion(o, y) * len(y) / len(label) for o, y in zip(outputs, label.chunk(2), strict=True)]
        loss = sum(losses)
        if not forward_only:
            engine.backward(loss)
        return torch.cat(outputs), label, loss.detach()


@on_ranks(2)
def test_a_schedule_of_ones_own_in_a_few_lines_chosen_by_config():
    with launch({"schedule": "TwentyLines"}, context=ParallelContext(), verbose=False) as gpc:
        model, plain = Stage(all_parts(None, True)), Stage(all_parts(None, True))
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), context=gpc)[0]
        engine.zero_grad()
        engine.execute_schedule(iter([batch(0, gpc.get_global_rank())]))
        engine._sum_gradients()
        (sum(F.mse_loss(plain(x), y) for x, y in (batch(0, part) for part in range(2))) / 2).backward()
        compare({k: v.grad for k, v in plain.named_parameters()}, gather_gradients(model, gpc), RTOL)
        engine.close()


def by_turns(num_ranks: int, num_microbatches: int) -> dict[int, str]:
    """An order of the user's own, on a V: one micro-batch after the other, forward and back."""
    return {
        rank: " ".join(f"{a}F{k} {b}F{k} {b}B{k} {a}I{k} {a}W{k}" for k in range(num_microbatches))
        for rank in range(num_ranks)
        for a, b in [(rank, 2 * num_ranks - 1 - rank)]
    }


def _own_order(type_: str, settings: dict[str, Any]) -> list[str]:
    ORDERS.register_module(chunks_per_rank(2)(by_turns))
    return _train({"pipeline": 2}, type_, settings, "v", True, 1)


@pytest.mark.parametrize(
    ("name", "settings"), [("by_turns", {}), ("PipelineSchedule", {"order": "by_turns", "num_chunks": 2})]
)
def test_an_order_of_ones_own_is_one_function_chosen_by_config(name, settings):
    orders = run_world(2, _own_order, name, settings).values
    assert [" ".join(order) for order in orders] == list(by_turns(2, 4).values())


CSV = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"


def test_a_table_from_a_csv_file_chosen_by_config(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(CSV)
    orders = run_world(2, _train, {"pipeline": 2}, "TableSchedule", {"table": str(path)}, "loop1", True, 1).values
    assert [",".join(order) for order in orders] == CSV.split()

"""The table of a rank's memory: what is measured is what the layout says, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine import memory
from colonnade.engine.build import initialize
from colonnade.engine.memory import KindBytes, MemoryTable
from tests.ranks import on_ranks

WIDTH, LAYERS = 128, 8
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
NUMEL = LAYERS * (WIDTH * WIDTH + WIDTH)


def _table(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> MemoryTable:
    with launch({"sync": {"shared_memory": False}, **config}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)
        engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.1), verbose=False, context=gpc)[0]
        for _ in range(2):
            engine.zero_grad()
            engine.backward(engine(torch.ones(4, WIDTH, dtype=dtype, device=gpc.device)).float().square().mean())
            engine.step()
        table = engine.memory()
        engine.close()
        return table


@on_ranks(2, env=ON_CPU)
def test_what_is_measured_is_what_the_layout_says_at_every_stage():
    stages = [_table({"zero": stage}) for stage in range(4)]
    plain, one, two, three, half = [*stages, _table({"zero": 2}, torch.bfloat16)]
    for table in (plain, one, two, three, half):
        for kind in (table.parameters, table.gradients, table.state, table.held):
            assert kind.device == pytest.approx(kind.formula, rel=0.03, abs=1000), table
        assert (table.other, table.activations, table.peak) == (None, None, None)
    lines = str(plain).splitlines()
    assert lines[0].split() == ["MiB", "on", "cpu", "here", "on", "the", "host", "formula"]
    assert [line.split()[0] for line in lines[1:]] == ["parameters", "gradients", "optimizer", "together"]
    assert len({len(line) for line in lines}) == 1
    whole, shard = 4 * NUMEL, 2 * NUMEL
    sizes = {
        "plain": (plain, [whole, whole, 2 * whole]),
        "stage 1": (one, [whole, whole, 2 * shard]),
        "stage 2": (two, [whole, shard, 2 * shard]),
        "stage 3": (three, [shard, shard, 2 * shard]),
        "bf16 weights; fp32 gradients, masters and moments of a half": (half, [whole / 2, shard, 3 * shard]),
    }
    for name, (table, wanted) in sizes.items():
        found = [kind.formula for kind in (table.parameters, table.gradients, table.state)]
        assert found == pytest.approx(wanted, rel=0.001), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_adds_up() -> None:
    def table(rows: int, offload: bool) -> tuple[MemoryTable, int]:
        config = {"zero": {"stage": 2, "offload": offload}}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)))
            engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.1), verbose=False, context=gpc)[0]
            x = torch.ones(rows, 1024, device="cuda")
            for _ in range(3):
                engine.memory(reset=True)
                engine.zero_grad()
                engine.backward(engine(x).square().mean())
                engine.step()
            torch.cuda.synchronize()
            found = engine.memory(), torch.cuda.memory_allocated()
            print(found[0])
            if offload:
                assert all(master.is_pinned() for master in engine.optimizer.masters)
            engine.close()
            return found

    few, allocated = table(1024, False)
    many, _ = table(8192, False)
    held = few.parameters.device + few.gradients.device + few.state.device
    assert held + few.other == allocated
    assert few.parameters.device == pytest.approx(few.parameters.formula, rel=0.01)
    assert few.state.device == pytest.approx(few.state.formula, rel=0.01)
    # Each block keeps what goes into its product and into its GELU.
    kept = 16 * 7168 * 1024 * 4
    assert many.activations - few.activations == pytest.approx(kept, rel=0.3)
    aside, _ = table(1024, True)
    assert aside.state.device < 1e6 < aside.state.host
    assert aside.peak < few.peak - few.state.device // 2


def test_bytes_are_counted_once_and_by_where_they_lie() -> None:
    one, two, far = torch.zeros(10), torch.zeros(3, dtype=torch.float64), torch.zeros(7, device="meta")
    known: set[int] = set()
    cpu = torch.device("cpu")
    assert memory._held([], cpu, known, 5) == KindBytes(0, 0, 5)
    assert memory._held([one, one[2:4], two, torch.zeros(0)], cpu, known, 9) == KindBytes(64, 0, 9)
    assert known >= {one.data_ptr(), two.data_ptr()}
    assert memory._held([one], cpu, known, 0) == KindBytes(0, 0, 0)
    assert memory._held([one, two], torch.device("cuda"), set(), 0) == KindBytes(0, 64, 0)
    assert memory._held([far], cpu, {1}, 0) == KindBytes(0, 28, 0)
    mb = 1 << 20
    table = MemoryTable(
        "cpu",
        KindBytes(mb, 2 * mb, 3 * mb),
        KindBytes(10 * mb, 20 * mb, 0),
        KindBytes(3 << 30, 0, mb // 2),
        7 * mb,
        None,
        8 * mb,
    )
    assert table.held == KindBytes(3083 * mb, 22 * mb, 3 * mb + mb // 2)
    assert [line.split()[-3:] for line in str(table).splitlines()[1:]] == [
        ["1.0", "2.0", "3.0"],
        ["10.0", "20.0", "0.0"],
        ["3,072.0", "0.0", "0.5"],
        ["3,083.0", "22.0", "3.5"],
        ["other", "7.0"],
        ["peak", "8.0"],
    ]

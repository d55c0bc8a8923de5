"""The parallelism of examples/own_parallelism: equal to one process, with sync, ledger, clip and checkpoints untouched."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade import ParallelContext, ParallelMode, Replicate, initialize, launch, place
from colonnade.checkpoint import CheckpointManager
from colonnade.context import build_layout
from colonnade.errors import LayoutError, LedgerError
from colonnade.testing import WorldError, compare, gather_gradients, gather_weights, run_world
from tests.cli import ROOT, colonnade
from tests.ranks import on_ranks

EXAMPLE = ROOT / "examples" / "own_parallelism"
sys.path.insert(0, str(EXAMPLE))  # as for a script that is started there; the ranks take it over

from head_data import HEAD_DATA, HeadDataAttention, HeadDataSequential  # noqa: E402
from plain_model import Attention, layers  # noqa: E402

FILE = EXAMPLE / "head_data.py"
FEATURES, WIDTH, HEADS, DEPTH, PLACES = 3, 12, 4, 1, 5
RTOL = 1e-10
CLIP = {"clip_grad_norm": 1.0}
DATA2_OWN2 = {"data": 2, "head_data": {"size": 2, "heads": HEADS}}


def build(sequential: Any, attention: Any, heads: int = HEADS) -> nn.Module:
    torch.manual_seed(5)
    return sequential(*layers(attention, FEATURES, WIDTH, heads, DEPTH)).double()


def batch(step: int, part: int, rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + part)
    x, y = torch.randn(2, rows, PLACES, FEATURES, generator=draw, dtype=torch.float64)
    return x, 5 * y  # far off, so that gradients are clipped


def joined(step: int, parts: int, rows: int) -> tuple[Tensor, ...]:
    return tuple(torch.cat(column) for column in zip(*(batch(step, part, rows) for part in range(parts)), strict=True))


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-6)


def close(found: Tensor, truth: Tensor) -> None:
    assert found.shape == truth.shape
    assert (found - truth).norm() <= RTOL * truth.norm()


def trained(parallel: dict[str, Any], rows: int, heads: int = HEADS, **more: Any) -> float:
    """On each rank: three steps beside one process; the outputs, gradients, norms and weights must be its own."""
    with launch({"parallel": parallel, **CLIP, **more}, verbose=False) as gpc:
        model, plain = build(HeadDataSequential, HeadDataAttention, heads), build(nn.Sequential, Attention, heads)
        engine, optimizer = initialize(model, adamw, nn.MSELoss())[0], adamw(plain.parameters())
        parts, part = gpc.data_parallel_size, gpc.get_local_rank(ParallelMode.DATA)
        for step in range(3):
            x, y = batch(step, part, rows)
            whole_x, whole_y = joined(step, parts, rows)
            engine.zero_grad()
            optimizer.zero_grad()
            out, truth = engine(x.requires_grad_()), plain(whole_x.requires_grad_())
            engine.backward(engine.criterion(out, y))
            F.mse_loss(truth, whole_y).backward()
            mine = slice(part * rows, part * rows + rows)
            close(out, truth[mine])
            close(x.grad / parts, whole_x.grad[mine])
            engine._sum_gradients()
            compare({name: value.grad for name, value in plain.named_parameters()}, gather_gradients(model, gpc), RTOL)
            engine.step()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            close(engine.grad_norm, norm)
            optimizer.step()
        compare(dict(plain.named_parameters()), gather_weights(model, gpc), RTOL)
        engine.close()
        return norm.item()


CASES: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "own 2": (2, {"head_data": {"size": 2, "heads": HEADS}}, 4, {}),
    "data 2 x own 2": (4, DATA2_OWN2, 4, {}),
    "uneven samples": (4, DATA2_OWN2, 3, {}),
    "own 4, two ranks without a sample": (4, {"head_data": {"size": 4, "heads": HEADS}}, 2, {}),
    "uneven heads": (2, {"head_data": {"size": 2, "heads": 3}}, 4, {"heads": 3}),
    "a mode of the tensor axis": (4, {"tensor": {"size": 2, "mode": "head_data", "heads": HEADS}}, 4, {}),
    "an axis of another name": (4, {"mine": {"size": 2, "mode": "head_data", "heads": HEADS}}, 4, {}),
    "its handler named": (4, DATA2_OWN2, 4, {"gradient_handler": ["HeadDataGradientHandler"]}),
    "small buckets": (4, DATA2_OWN2, 4, {"sync": {"overlap": False, "bucket_mb": 0.001}}),
}
FAST = ("own 2", "data 2 x own 2", "uneven samples")


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_three_steps_equal_one_process(case):
    """(ranks, parallel, samples of a data-parallel rank, further settings)"""
    ranks, parallel, rows, more = CASES[case]
    norms = run_world(ranks, trained, parallel, rows, **more).values
    assert len(set(norms)) == 1
    assert norms[0] > 1, "nothing was clipped"


def forgetful(spec: str) -> None:
    """The same, with one placement of the layer forgotten or wrong."""
    place_of = {"no sum owed": Replicate(), "final as it is": Replicate(owes="nothing")}[spec]
    original = HeadDataAttention.__init__

    def broken(self: Any, width: int, heads: int) -> None:
        original(self, width, heads)
        place(self.out.bias, {HEAD_DATA: place_of})

    HeadDataAttention.__init__ = broken
    trained(DATA2_OWN2, 4)


@pytest.mark.parametrize("spec", ["no sum owed", "final as it is"])
def test_a_wrong_placement_is_found(spec):
    with pytest.raises(
        WorldError, match=r"ranks \d and \d store the same shard of 1\.inner\.out\.bias, but with different values"
    ):
        run_world(4, forgetful, spec)


def rows_of_the_ledger(**more: Any) -> dict[tuple[str, str], tuple[Any, ...]]:
    with launch({"parallel": DATA2_OWN2, **more}, verbose=False):
        engine = initialize(build(HeadDataSequential, HeadDataAttention), adamw)[0]
        engine.close()
        return {(row.parameter, row.mode): (row.ranks, row.divisor, row.done_by) for row in engine.ledger().rows}


@pytest.mark.parametrize(
    ("more", "handler"),
    [({}, "PlacementGradientHandler"), ({"gradient_handler": ["HeadDataGradientHandler"]}, "HeadDataGradientHandler")],
)
def test_the_ledger_knows_what_is_owed_over_the_mode(more, handler):
    ledgers = run_world(4, rows_of_the_ledger, **more).values
    names = [name for name, _ in build(nn.Sequential, Attention).named_parameters()]
    split = [name for name in names if "qkv" in name or name.endswith("out.weight")]
    assert len(split) == 3
    for rank, found in enumerate(ledgers):
        across, along = (rank % 2, rank % 2 + 2), (rank - rank % 2, rank - rank % 2 + 1)
        assert found == {
            **{(name, "DATA"): (across, 2, "DataParallelGradientHandler") for name in names},
            **{(name, "HEAD_DATA"): (along, 1, handler) for name in names if name not in split},
        }


@on_ranks(4)
def test_a_sum_over_the_mode_that_nobody_does_is_an_error_before_step_1():
    with pytest.raises(LedgerError) as error:
        rows_of_the_ledger(sync={"automatic": False}, gradient_handler=["DataParallelGradientHandler"])
    text = str(error.value)
    assert re.search(
        r"inner\.out\.bias: needs an all-reduce over HEAD_DATA \[\d, \d\], but no handler performs it", text
    )


def test_the_layout_is_planned_without_processes():
    layout = build_layout({"parallel": {"head_data": {"size": 4, "heads": 6}, "pipeline": 2}}, world_size=64)
    assert layout.group_of(HEAD_DATA, rank=10) == [8, 9, 10, 11]
    assert layout.distinct_data == 8
    with pytest.raises(LayoutError, match=r"parallel\.head_data: size=8 leaves ranks without a head of 6; .* size=6"):
        build_layout({"parallel": {"head_data": {"size": 8, "heads": 6}}}, world_size=64)
    with pytest.raises(LayoutError, match=r"HeadDataInitializer for the mode .* could not be built .*heads"):
        build_layout({"parallel": {"head_data": {"size": 2}}}, world_size=4)


def leg(parallel: dict[str, Any], folder: Path, steps: int) -> dict[str, dict[str, Tensor]]:
    """Load what is there, take steps of 4 rows in all, save: the weights at the beginning and at the end."""
    with launch({"parallel": parallel, **CLIP}, verbose=False) as gpc, CheckpointManager(folder, gpc) as manager:
        model = build(HeadDataSequential, HeadDataAttention)
        engine = initialize(model, adamw, nn.MSELoss())[0]
        start = manager.latest() or 0
        if start:
            engine.load_extra_state(manager.load(model, engine.optimizer).extra)
        begin, parts = gather_weights(model, gpc), gpc.data_parallel_size
        for step in range(start, start + steps):
            x, y = (column.chunk(parts)[gpc.get_local_rank(ParallelMode.DATA)] for column in joined(step, 2, 2))
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
        manager.save(start + steps, model, engine.optimizer, extra=engine.extra_state())
        engine.close()
        return {"begin": begin, "end": gather_weights(model, gpc)}


def in_one_process(folder: Path, steps: int) -> dict[str, dict[str, Tensor]]:
    """The same in this process, with the plain model, torch's clip and torch's optimizer."""
    plain = build(nn.Sequential, Attention)
    optimizer = adamw(plain.parameters())
    with CheckpointManager(folder, ParallelContext(), read_only=True) as manager:
        start = manager.load(plain, optimizer).step
    begin = {name: value.detach().clone() for name, value in plain.named_parameters()}
    for step in range(start, start + steps):
        x, y = joined(step, 2, 2)
        optimizer.zero_grad()
        F.mse_loss(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    return {"begin": begin, "end": {name: value.detach() for name, value in plain.named_parameters()}}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.slow
def test_a_checkpoint_of_own_2_resumes_on_own_1_on_own_4_and_in_one_process(tmp_path):
    saved = run_world(4, leg, DATA2_OWN2, tmp_path / "0", 3).values[0]["end"]
    truth = in_one_process(tmp_path / "0", 2)
    assert_same_bits(truth["begin"], saved)
    for ranks, parallel in ((2, {"data": 2}), (4, {}), (4, {"data": 2})):
        parallel = {**parallel, "head_data": {"size": ranks // parallel.get("data", 1), "heads": HEADS}}
        folder = tmp_path / f"{ranks} {parallel}"
        shutil.copytree(tmp_path / "0", folder)
        found = run_world(ranks, leg, parallel, folder, 2).values[0]
        assert_same_bits(found["begin"], saved)
        compare(truth["end"], found["end"], RTOL)


@pytest.mark.slow
def test_the_same_layout_resumes_to_the_bit(tmp_path):
    through = run_world(4, leg, DATA2_OWN2, tmp_path / "through", 4).values[0]["end"]
    run_world(4, leg, DATA2_OWN2, tmp_path / "broken off", 2)
    assert_same_bits(through, run_world(4, leg, DATA2_OWN2, tmp_path / "broken off", 2).values[0]["end"])


def test_it_is_one_file_of_at_most_150_lines_that_uses_public_names_alone():
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any(isinstance(node, ast.Import) for node in imports)
    ours = [(node.module, name.name) for node in imports if node.module != "__future__" for name in node.names]
    assert {module.partition(".")[0] for module, _ in ours} == {"colonnade", "torch", "typing"}
    for module, name in ours:
        assert not any(part.startswith("_") for part in (*module.split("."), name)), (module, name)
        public = getattr(importlib.import_module(module), "__all__", None)
        assert public is None or not module.startswith("colonnade") or name in public, (module, name)
    attributes = [node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    assert [name for name in attributes if name.startswith("_") and name != "__init__"] == []
    library = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "colonnade").rglob("*.py"))
    assert "head_data" not in library.lower()


def test_the_page_shows_the_file_as_it_is():
    page = (ROOT / "docs/howto/own_parallelism.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    text = FILE.read_text(encoding="utf-8")
    quoted = [block for block in blocks if re.search(r"^(class|def|HEAD_DATA =)", block, re.MULTILINE)]
    assert len(quoted) == 5
    assert [block for block in quoted if block.strip() not in text] == []


@pytest.mark.slow
@pytest.mark.long
def test_the_command_trains_and_shows_ledger_loss_norm_and_parity(tmp_path):
    folder = tmp_path / EXAMPLE.name
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("output", "__pycache__"))
    done = colonnade("run", "--nproc", 4, "train.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "4 ranks: data 2 x head_data 2" in done.stdout
    assert re.search(r"\*\.inner\.out\.bias +2 +HEAD_DATA +\[0, 1\] +1 +HeadDataGradientHandler", done.stdout)
    steps = re.findall(r"step +(\d+)  loss (\S+)  gradient norm (\S+)", done.stdout)
    assert [int(step) for step, _, _ in steps] == [0, 10, 20, 30, 40, 50, 59]
    assert float(steps[-1][1]) < 0.3 * float(steps[0][1])
    assert "parity: 30 parameters equal one process" in done.stdout
    assert "checkpoint of 4 ranks in the plain model: equal to the bit: True" in done.stdout

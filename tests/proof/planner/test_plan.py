"""Plans, made in one process: groups, sums, memory, timelines, and a mode of one's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colonnade
from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.schedule.orders import make_table
from colonnade.engine.schedule.replay import simulate
from colonnade.engine.schedule.schedules import NonPipelineSchedule
from colonnade.errors import ConfigError
from colonnade.models import GPT
from colonnade.proof.planner import hardware
from colonnade.proof.planner.hardware import Clock, known_hardware, load_hardware
from colonnade.proof.planner.job import Job
from colonnade.proof.planner.plan import plan
from colonnade.registry import SCHEDULE
from tests.proof.planner.jobs import JOBS

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_parallelism"
LAYOUT = dict(
    parallel=dict(tensor=dict(size=2, mode="1d"), expert=2, pipeline=2), num_microbatches=4, clip_grad_norm=1.0
)


@pytest.fixture(scope="module")
def planned() -> Any:
    return plan(load_config(LAYOUT), 16, load_hardware("h100"), JOBS["moe"])


def test_a_plan_has_groups_kinds_of_ranks_and_sums(planned: Any) -> None:
    assert planned.axes == {"data": 4, "pipeline": 2, "tensor": 2}
    modes = {mode.mode: mode for mode in planned.modes}
    assert (modes["EXPERT"].count, modes["EXPERT"].size, modes["EXPERT"].groups[0]) == (8, 2, (0, 4))
    assert [(one.name, one.rank, one.count) for one in planned.classes] == [("stage 0", 0, 8), ("stage 1", 2, 8)]
    (expert,) = [line for line in planned.ledger if line.parameters == "blocks.*.feed_forward.experts.up"]
    assert (expert.mode, expert.ranks, expert.divisor, expert.stages) == ("EXPERT_DATA", 2, 4, (0, 1))
    assert planned.problems == ()
    assert planned.totals.fits
    json.dumps(planned.to_dict())


def test_stages_that_nobody_has_cut_are_noted() -> None:
    config = dict(parallel=dict(pipeline=2), num_microbatches=2)
    job = Job(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        lambda: (torch.ones(4, 4), torch.ones(4, 4)),
        nn.MSELoss,
    )
    notes = " ".join(plan(load_config(config), 2, load_hardware("h100"), job).notes)
    assert "all 2 pipeline stages have parameters of the same 4 names and shapes" in notes
    assert "colonnade.split(model, num_stages=2)" in notes
    allowed = plan(load_config({**config, "compare_stages": False}), 2, load_hardware("h100"), job)
    assert "colonnade.split" not in " ".join(allowed.notes)


def test_parameters_gradients_and_state_are_those_of_the_model(planned: Any) -> None:
    whole = sum(parameter.numel() for parameter in _one_process().parameters())
    assert planned.totals.parameters == whole
    for one in planned.classes:
        assert one.memory.parameters == 4 * one.parameters
        assert one.memory.gradients >= one.memory.parameters  # with the padding of buckets
        assert one.memory.state == 8 * one.parameters


def test_a_world_of_many_ranks_costs_what_its_kinds_cost() -> None:
    large = plan(load_config(LAYOUT), 102_400, load_hardware("h100"), JOBS["moe"])
    assert [one.count for one in large.classes] == [51_200, 51_200]
    assert next(mode for mode in large.modes if mode.mode == "DATA").size == 25_600
    (norm,) = [call for call in large.classes[0].collectives if call.what == "norm of the gradients"]
    assert (norm.mode, norm.ranks, norm.link) == ("GLOBAL", 102_400, "network")


@pytest.mark.parametrize(
    ("order", "chunks", "bubble"),
    [
        ("gpipe", None, lambda p, m, v: (p - 1) / (m + p - 1)),
        ("1f1b", None, lambda p, m, v: (p - 1) / (m + p - 1)),
        ("interleaved_1f1b", 2, lambda p, m, v: (p - 1) / (v * m + p - 1)),
        ("breadth_first", 2, lambda p, m, v: (p - 1) / (v * m + p - 1)),
        ("interleaved_zero_bubble", 1, lambda p, m, v: (p - 1) / (3 * m + p - 1)),
        ("interleaved_1f1b", 3, lambda p, m, v: (p - 1) / (v * m + p - 1)),
        ("interleaved_zero_bubble", 2, lambda p, m, v: (p - 1) / (3 * 2 * m + p - 1)),
        ("zb_v", None, lambda p, m, v: (p - 1) / (3 * 2 * m + p - 1)),
        ("dualpipe_v", None, lambda p, m, v: (p - 1) / (3 * 2 * m + p - 1)),
    ],
)
@pytest.mark.parametrize(("ranks", "passes"), [(2, 4), (4, 8), (8, 16), (4, 12), (8, 32)])
def test_bubbles_are_those_of_the_closed_forms(
    order: str, chunks: int | None, bubble: Any, ranks: int, passes: int
) -> None:
    made = simulate(make_table(order, ranks, passes, chunks)).bubble
    assert made == pytest.approx(bubble(ranks, passes, chunks or 1), abs=1e-12)


def test_the_timeline_is_the_table_with_the_costs_of_the_stages(planned: Any) -> None:
    timeline = planned.timeline
    assert timeline.equal_bubble == pytest.approx(1 / 5)
    assert [len(row) for row in timeline.rows] == [8, 8]
    work = {one.stages[0]: one.work[0] for one in planned.classes}
    for row in timeline.rows:
        for each in row:
            one = work[each.stage]
            cost = one.forward if each.kind == "F" else one.backward_input + one.backward_weight
            assert each.end - each.start == pytest.approx(cost)


@pytest.mark.parametrize(
    "world",
    [dict(), dict(parallel=dict(pipeline=2), num_microbatches=4), dict(zero=3)],
    ids=["data", "pipeline", "zero 3"],
)
def test_recomputing_keeps_less_and_computes_more_of_which_mfu_counts_nothing(world: dict[str, Any]) -> None:
    plain, again = (
        plan(load_config({"activation_checkpoint": mode, **world}), 2, load_hardware("a100"), JOBS["gpt"])
        for mode in ("none", "full")
    )
    assert again.classes[0].memory.activations < 0.5 * plain.classes[0].memory.activations
    assert again.totals.flops > 1.2 * plain.totals.flops
    assert again.totals.model_flops == plain.totals.model_flops == plain.totals.flops
    for made in (plain, again):
        most = made.totals.step_seconds * 2 * made.hardware.matmul_flops["float32"]
        assert made.totals.mfu == pytest.approx(made.totals.model_flops / most)
        assert made.totals.hfu == pytest.approx(made.totals.flops / most)


def test_the_pipeline_bubble_is_one_figure_and_the_parts_of_a_step_are_the_step(planned: Any) -> None:
    totals, timeline = planned.totals, planned.timeline
    work = sum(one.end - one.start for row in timeline.rows for one in row)
    assert timeline.bubble == pytest.approx(1 - work / (2 * timeline.makespan))
    assert totals.bubble_seconds == pytest.approx(timeline.bubble * timeline.makespan)
    parts = totals.compute_seconds + totals.exposed_seconds + totals.bubble_seconds + totals.optimizer_seconds
    assert parts == pytest.approx(totals.step_seconds)
    whole = plan(load_config({}), 2, load_hardware("h100"), JOBS["gpt"])
    assert (whole.totals.bubble_seconds, whole.timeline.bubble) == (0.0, 0.0)


def test_equal_blocks_are_run_once_or_twice_and_counted_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config, machine = load_config(dict(parallel=dict(tensor=dict(size=2, mode="1d")))), load_hardware("h100")
    short = plan(config, 4, machine, JOBS["gpt"])
    monkeypatch.setattr("colonnade.proof.planner.planned_passes._FEWEST", 99)
    whole = plan(config, 4, machine, JOBS["gpt"])
    one, other = short.classes[0], whole.classes[0]
    assert one.memory == other.memory
    assert one.work[0].flops == other.work[0].flops
    assert sorted(map(repr, one.collectives)) == sorted(map(repr, other.collectives))
    assert short.totals.step_seconds == pytest.approx(whole.totals.step_seconds)


def test_stages_that_are_run_once_have_each_their_own_sums_and_groups() -> None:
    def build(context: ParallelContext) -> Any:
        return colonnade.split(GPT(512, 64, 64, 4, 12, context=context), num_stages=6)

    config = dict(parallel=dict(pipeline=6, tensor=dict(size=2, mode="1d")), num_microbatches=6)
    found = plan(load_config(config), 24, load_hardware("h100"), Job(build, JOBS["gpt"].batch))
    (norm,) = [line for line in found.ledger if line.parameters == "blocks.*.first_norm.weight"]
    assert (norm.mode, norm.ranks, norm.stages) == ("DATA", 2, tuple(range(6)))
    assert norm.elements == 64 * norm.count < 64 * 4  # of one rank
    for one in found.classes:
        assert {call.mode for call in one.collectives if call.when == "forward"} == {"TENSOR"}
        tied = {"DATA x PIPELINE"} if one in (found.classes[0], found.classes[-1]) else set()
        assert {call.mode for call in one.collectives if call.what == "gradients"} == {"DATA", *tied}


def test_a_mode_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from head_data import HeadDataAttention, HeadDataSequential  # type: ignore[import-not-found]
    from plain_model import layers  # type: ignore[import-not-found]

    def build() -> nn.Module:
        return HeadDataSequential(*layers(HeadDataAttention, 8, 16, 4, 2))

    def samples() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(4, 6, 8), torch.zeros(4, 6, 8)

    config = load_config(dict(parallel=dict(head_data=dict(size=2, mode="head_data", heads=4))))
    found = plan(config, 8, load_hardware("h100"), Job(build, samples, criterion=nn.MSELoss))
    assert {mode.mode: mode.count for mode in found.modes}["HEAD_DATA"] == 4
    assert "HEAD_DATA" in {call.mode for call in found.classes[0].collectives if call.when == "forward"}
    assert "HEAD_DATA" in {line.mode for line in found.ledger}
    assert found.problems == ()


def test_without_a_model_the_groups_alone() -> None:
    found = plan(
        load_config(dict(parallel=dict(tensor=dict(size=8, mode="1d"), pipeline=16), num_microbatches=4)),
        1 << 20,
        load_hardware("b200"),
    )
    assert found.classes == ()
    assert {mode.mode: mode.size for mode in found.modes}["DATA"] == 8192


def test_what_initialize_would_refuse_is_a_problem() -> None:
    def unplaced() -> nn.Module:
        return nn.Linear(4, 4)

    config = load_config(dict(sync=dict(automatic=False)))
    found = plan(config, 2, load_hardware("h100"), Job(unplaced, lambda: torch.zeros(2, 4)))
    assert "gradient reductions are inconsistent" in found.problems[0]


def test_temporary_memory_of_an_optimizers_step_on_many_tensors_is_planned() -> None:
    """torch's own step goes over all parameters at once on a GPU, with a square root of each; the flat one needs nothing."""
    flat, own = (
        plan(load_config(dict(flat_step=value)), 1, load_hardware("h200"), JOBS["mlp"]).classes[0].memory
        for value in (None, False)
    )
    result = 64 * 256 * 4  # which the caller keeps
    assert own.total - own.workspace == flat.parameters + flat.gradients + flat.state + flat.parameters + result
    assert flat.total < own.total

    class Reads(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("no values here")

    job = Job(JOBS["mlp"].build, JOBS["mlp"].batch, JOBS["mlp"].criterion, lambda held: Reads(held, lr=0.1))
    found = plan(load_config({}), 1, load_hardware("h200"), job)
    assert any(note.startswith("the step of Reads cannot run without values") for note in found.notes)


class SumsItself(torch.optim.SGD):
    """An optimizer that sums gradients in its own way."""

    def sync_grad(self) -> None: ...


def test_an_optimizer_that_sums_gradients_itself_is_in_the_plan_as_in_the_run() -> None:
    job = Job(lambda: nn.Linear(4, 4), lambda: torch.zeros(2, 4), optimizer=lambda held: SumsItself(held, lr=0.1))
    found = plan(load_config({}), 2, load_hardware("h100"), job)
    assert {line.done_by for line in found.ledger} == {"ZeROGradientHandler"}
    assert found.classes[0].collectives == ()
    assert [note for note in found.notes if note.startswith("ZeROGradientHandler reduces gradients itself")]


def test_what_is_not_planned_is_noted() -> None:
    @SCHEDULE.register_module
    class TwiceOver(NonPipelineSchedule):
        pass

    try:
        found = plan(
            load_config(dict(schedule="TwiceOver", compile=True, float8=True)), 2, load_hardware("h100"), JOBS["gpt"]
        )
    finally:
        SCHEDULE._entries.pop("TwiceOver")
    assert "the schedule TwiceOver is estimated as one pass over the batch of a rank" in found.notes
    for key in ("compile", "float8"):
        assert any(note.startswith(f"`{key}` is not planned") for note in found.notes)


def test_dicts_are_taken_apart_as_in_the_run_and_the_count_of_a_loss_is_a_tensor() -> None:
    class Named(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs)

    def loss(output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (output - labels).square().sum(), (labels >= 0).sum()

    def batch() -> dict[str, torch.Tensor]:
        return {"inputs": torch.zeros(2, 4), "labels": torch.zeros(2, 4)}

    found = plan(load_config({}), 2, load_hardware("h100"), Job(lambda: Named(4, 4), batch, lambda: loss))
    assert [(call.op, call.what) for call in found.classes[0].collectives] == [("all_reduce", "gradients")]


def test_a_model_that_reads_numbers_is_told_so() -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[: int(x.sum().item())]

    with pytest.raises(ConfigError, match="reads a number"):
        plan(load_config({}), 2, load_hardware("h100"), Job(lambda: Reads(4, 4), lambda: torch.zeros(2, 4)))


def test_a_model_whose_sizes_depend_on_values_is_told_so() -> None:
    class Masks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[x[:, 0] > 0]

    with pytest.raises(ConfigError, match="size depends on values"):
        plan(load_config({}), 2, load_hardware("h100"), Job(lambda: Masks(4, 4), lambda: torch.zeros(2, 4)))


def test_a_batch_that_the_model_does_not_take_is_said() -> None:
    with pytest.raises(ConfigError, match=r"fails on tensors of the batch's shapes .*\(2, 5\).*same reduction dim"):
        plan(load_config({}), 2, load_hardware("h100"), Job(lambda: nn.Linear(4, 4), lambda: torch.zeros(2, 5)))


def test_hardware_files(tmp_path: Path) -> None:
    assert known_hardware() == ["a100", "b200", "h100", "h200"]
    with pytest.raises(ConfigError, match="Did you mean"):
        load_hardware("h10")
    file = tmp_path / "mine.toml"
    file.write_text('name = "x"\nspeed = 3\n')
    with pytest.raises(ConfigError, match="unknown key 'speed'"):
        load_hardware(str(file))
    file.write_text('name = "x"\n')
    with pytest.raises(ConfigError, match="devices_per_node"):
        load_hardware(str(file))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('memory = "80 GB"', "memory = '80 GB': a number that is not negative"),
        ("memory = nan", "memory = nan: a number that is not negative"),
        ("devices_per_node = 0", "devices_per_node = 0: a number above 0"),
        ("node_bandwidth = 0", "node_bandwidth = 0: a number above 0"),
        ("network_latency = -1", "network_latency = -1: a number that is not negative"),
        ("overlap = 3", "overlap is 3; it must be a number from 0 to 1"),
        ('device = "tpu"', 'device is \'tpu\'; it must be "cpu" or "cuda"'),
        ("name = 3", "name = 3: a text, in quotes"),
        ("bfloat16 = 0", "matmul_flops.bfloat16 = 0: a number above 0"),
    ],
)
def test_a_wrong_value_of_a_hardware_file_is_named(tmp_path: Path, line: str, said: str) -> None:
    key = line.partition(" =")[0]
    given = Path(hardware.__file__).parent / "hardware_files" / "h100.toml"
    file = tmp_path / "mine.toml"
    file.write_text(re.sub(rf"(?m)^{key} = .*$", line, given.read_text()))
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_hardware(str(file))


def test_the_clock_takes_a_ring_for_large_messages_and_a_tree_for_small_ones() -> None:
    machine = load_hardware("h100")
    times = Clock(machine)
    ring = 2 * 7 * machine.node_latency + 2 * 7 / 8 * 1e9 / machine.node_bandwidth
    assert times.collective("all_reduce", 10**9, range(8)) == pytest.approx(ring)
    tree = 2 * 3 * machine.node_latency + 2 * 8 / machine.node_bandwidth
    assert times.collective("all_reduce", 8, range(8)) == pytest.approx(tree)
    assert times.link(range(8)) == "node"
    assert times.link((7, 8)) == "network"
    assert times.collective("all_reduce", 8, (3,)) == 0.0


def test_a_plan_is_made_beside_a_joined_world() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = plan(load_config({}), 2, load_hardware("h100"), JOBS["gpt"])
        total = torch.ones(1)
        dist.all_reduce(total)
        assert (found.totals.world_size, dist.get_world_size(), dist.get_backend()) == (2, 1, "gloo")
    finally:
        dist.destroy_process_group()


def _one_process() -> nn.Module:
    from colonnade.context import ParallelContext

    context = ParallelContext()
    return JOBS["moe"].build(context)

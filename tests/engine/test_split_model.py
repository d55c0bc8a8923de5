"""A whole model, split and handed to `initialize`: stages, ties, names, and losses that are sums and counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colonnade
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.errors import ColonnadeError
from colonnade.testing import compare, gather_gradients, gather_weights, run_world
from tests.gradients.scenarios import numbers
from tests.ranks import on_ranks

RTOL = 1e-10
WORDS, WIDTH = 11, 6


class Out(nn.Module):
    """The exit of a language model, with the entrance's matrix."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def whole(tied: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    entrance = nn.Embedding(WORDS, WIDTH)
    out = Out(entrance.weight if tied else nn.Parameter(torch.randn(WORDS, WIDTH)))
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(entrance, *layers, out).double()


def batch(step: int, part: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """Tokens, and the next ones, of which some do not count."""
    torch.manual_seed(100 * step + part)
    tokens = torch.randint(0, WORDS, (rows, 5))
    labels = tokens.roll(-1, 1)
    labels[torch.rand(rows, 5) < 0.3 + 0.3 * part] = -100
    return tokens, labels


def token_sum(output: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output.flatten(0, 1), label.flatten(), reduction="sum"), (label != -100).sum()


def _train(parallel: dict[str, int], schedule: dict[str, Any], stages: int, accumulation: int) -> list[str]:
    config = {
        "parallel": parallel,
        "schedule": {"num_microbatches": 4, **schedule},
        "clip_grad_norm": 1.0,
        "gradient_accumulation": accumulation,
    }
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = whole()
        engine = initialize(
            colonnade.split(model, num_stages=stages),
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            token_sum,
            context=gpc,
        )[0]
        plain = whole()
        adamw = torch.optim.AdamW(plain.parameters(), lr=0.01)
        data, mine = gpc.data_parallel_size, gpc.get_local_rank(ParallelMode.DATA)
        for step in range(2):
            engine.zero_grad()
            adamw.zero_grad()
            parts = [(step * accumulation + micro, part) for micro in range(accumulation) for part in range(data)]
            sums = {part: token_sum(plain(x), y) for part in parts for x, y in [batch(*part)]}
            (sum(s for s, _ in sums.values()) / sum(n for _, n in sums.values())).backward()
            for micro in range(accumulation):
                at = (step * accumulation + micro, mine)
                loss = engine.execute_schedule(iter([batch(*at)]))[2]
                expected = float(sums[at][0] / sums[at][1])
                assert abs(loss.item() - expected) <= RTOL * expected
                if micro == accumulation - 1:
                    engine._sum_gradients()
                    truth = {key: value.grad for key, value in plain.named_parameters()}
                    compare(truth, untied(gather_gradients(engine.model, gpc)), RTOL)
                engine.step()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            assert abs(engine.grad_norm.item() - norm.item()) <= RTOL * norm.item()
            adamw.step()
        compare(dict(plain.named_parameters()), untied(gather_weights(engine.model, gpc)), RTOL)
        names = list(engine.model.state_dict())
        engine.model.load_state_dict(engine.model.state_dict())
        engine.close()
        return names


def untied(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """A tied exit is the entrance."""
    return {name: value for name, value in found.items() if name != "13.weight"}


CASES = {
    "1F1B": ({"pipeline": 2}, {"type": "OneFOneB"}, 2, 1),
    "interleaved": ({"pipeline": 2}, {"type": "Interleaved1F1B", "num_chunks": 2}, 4, 2),
    "V": ({"pipeline": 2}, {"type": "ZBV"}, 4, 1),
    "beside data": ({"pipeline": 2, "data": 2}, {"type": "OneFOneB"}, 2, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_split_model_with_ties_and_token_counts_equals_one_process_under_its_own_names(case):
    parallel, schedule, stages, accumulation = CASES[case]
    world = parallel["pipeline"] * parallel.get("data", 1)
    values = run_world(world, _train, parallel, schedule, stages, accumulation).values
    assert {name for names in values for name in names} == set(whole().state_dict())


@on_ranks(4)
def test_a_pipeline_that_runs_out_of_batches_does_not_hang_the_other():
    config = {"parallel": {"pipeline": 2, "data": 2}, "schedule": {"type": "OneFOneB", "num_microbatches": 2}}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(
            colonnade.split(whole(), num_stages=2),
            lambda parameters: torch.optim.SGD(parameters, lr=0.5),
            lambda output, label: F.cross_entropy(output.flatten(0, 1), label.flatten()),
            context=gpc,
        )[0]
        plain = whole()
        sgd = torch.optim.SGD(plain.parameters(), lr=0.5)
        counts = [3, 1]
        mine = gpc.get_local_rank(ParallelMode.DATA)
        for item in engine.batches([batch(step, mine) for step in range(counts[mine])]):
            engine.zero_grad()
            engine.execute_schedule(iter([item]))
            engine.step()
        for step in range(3):
            parts = [batch(step, part) for part in range(2) if step < counts[part]]
            sgd.zero_grad()
            outputs = torch.cat([plain(x).flatten(0, 1) for x, _ in parts])
            F.cross_entropy(outputs, torch.cat([y.flatten() for _, y in parts])).backward()  # some labels do not count
            sgd.step()
        compare(dict(plain.named_parameters()), untied(gather_weights(engine.model, gpc)), RTOL)
        engine.close()


def _fails(stages: int, schedule: dict[str, Any] | None, criterion: Any = token_sum, steps: int = 1) -> str:
    config = {"parallel": {"pipeline": 2}, "num_microbatches": 2, **({"schedule": schedule} if schedule else {})}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        try:
            engine = initialize(
                colonnade.split(whole(), num_stages=stages),
                lambda parameters: torch.optim.SGD(parameters, lr=0.5),
                criterion,
                context=gpc,
            )[0]
            for step in range(steps):
                engine.zero_grad()
                engine.execute_schedule(iter([batch(step, 0)]))
                engine.step()
        except ColonnadeError as error:
            return str(error)
        return "nothing"


def _stages_that_do_not_fit(second: str) -> str:
    config = {"parallel": {"pipeline": 2}, "num_microbatches": 2}
    seconds = {"narrow": nn.Linear(3, 2), "pair": nn.Bilinear(4, 4, 2)}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        split = colonnade.split([nn.Linear(2, 4), seconds[second]])
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.5)  # noqa: E731
        engine = initialize(split, sgd, nn.MSELoss(), context=gpc)[0]
        try:
            engine.execute_schedule(iter([(torch.ones(4, 2), torch.ones(4, 2))]))
        except ColonnadeError as error:
            return str(error)
        return "nothing"


@pytest.mark.parametrize(
    ("second", "takes"), [("narrow", "takes: Linear.forward(input: "), ("pair", "takes: Bilinear.forward(input1: ")]
)
def test_a_stage_that_cannot_take_what_comes_shows_both_sides_on_every_rank(second, takes):
    for said in run_world(2, _stages_that_do_not_fit, second).values:
        assert "stage 1 cannot take the output of stage 0" in said
        assert "stage 0 returns: float32[2, 4]" in said
        assert takes in said


class FirstSumThenMean:
    """A criterion that changes its form at its third call."""

    calls = 0

    def __call__(self, output: Tensor, label: Tensor) -> Any:
        FirstSumThenMean.calls += 1
        total, count = token_sum(output, label)
        return (total, count) if FirstSumThenMean.calls < 3 else total / count


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((4, None), "split into 4 stages, but the schedule has 2"),
        ((2, {"type": "NonPipelineSchedule"}), "NonPipelineSchedule does not run a pipeline"),
        ((2, {"type": "OneFOneB", "num_microbatches": 2, "loss_everywhere": False}), "loss_everywhere"),
        ((2, None, FirstSumThenMean(), 2), "(sum, count) before and is a mean now"),
    ],
)
def test_what_does_not_fit_is_said_and_nobody_hangs(arguments, said):
    values = run_world(2, _fails, *arguments).values
    assert said in values[1]


@on_ranks(2, timeout=120)
def test_compile_and_activation_checkpointing_by_config_and_helper():
    config = {"compile": {"backend": "aot_eager"}, "clip_grad_norm": 1.0}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model, plain = Recomputed(), Recomputed()
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), nn.MSELoss(), context=gpc)[0]
        sgd = torch.optim.SGD(plain.parameters(), lr=0.5)
        for step in range(3):
            parts = [(numbers(3, WIDTH, seed=9 * step + part), numbers(3, WIDTH, seed=5 + part)) for part in range(2)]
            engine.zero_grad()
            x, y = parts[gpc.get_global_rank()]
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
            sgd.zero_grad()
            (sum(F.mse_loss(plain(x), y) for x, y in parts) / 2).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            sgd.step()
        compare(dict(plain.named_parameters()), gather_weights(model, gpc), RTOL)
        engine.close()


class Recomputed(nn.Module):
    """Two layers, of which the first is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.one, self.two = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        from colonnade.utils import checkpoint

        return self.two(checkpoint(lambda value: torch.tanh(self.one(value)), False, x))


def test_a_schedule_that_forgets_its_backward_pass_is_told_so():
    assert "would not be trained on this batch" in run_world(1, _forgetting).values[0]


def _forgetting() -> str:
    from colonnade.engine.schedule.schedules import BaseSchedule
    from colonnade.registry import SCHEDULE

    @SCHEDULE.register_module
    class Forgetful(BaseSchedule):
        def forward_back_step(self, engine, data_iter, forward_only=False, return_loss=True, return_output_label=True):
            data, label = self.load_batch(data_iter)
            loss = engine.criterion(engine(data), label)
            return None, None, loss.detach()

    with launch({"schedule": "Forgetful"}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(2, 2)
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), nn.MSELoss(), context=gpc)[0]
        engine.zero_grad()
        with pytest.raises(ColonnadeError) as error:
            engine.execute_schedule(iter([(torch.ones(1, 2), torch.ones(1, 2))]))
        return str(error.value)

"""The engine's loop: accumulation, uneven data, ranks that use other parameters, clear errors; its observers, and its whole weights."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.engine.engine import ON_ENGINE, Observer, announce
from colonnade.engine.schedule.schedules import BaseSchedule
from colonnade.errors import CheckpointError, ConfigError, ContextError, GradientError
from colonnade.testing import compare, gather_gradients, gather_weights, plain_gradients, run_world

RTOL = 1e-12


def model(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def start(gpc: ParallelContext, built: nn.Module | None = None):
    return initialize(built or model(), lambda p: torch.optim.SGD(p, lr=0.1), nn.MSELoss(), context=gpc)[0]


def world_of_one(**config: object) -> ParallelContext:
    return launch(config, context=ParallelContext(), verbose=False)


# -- the loop ---------------------------------------------------------------------------------------------


def _loop(accumulation: int) -> None:
    """Three steps of the canonical loop against one process."""
    with launch({"gradient_accumulation": accumulation}, context=ParallelContext(), verbose=False) as gpc:
        engine = start(gpc)
        plain, sgd = model(), None
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        rank, size = gpc.get_global_rank(), gpc.world_size
        for step in range(3):
            batches = [
                (numbers(3, 4, seed=1000 * step + 10 * micro + r), numbers(3, 2, seed=7 + 1000 * step + 10 * micro + r))
                for micro in range(accumulation)
                for r in range(size)
            ]
            for micro in range(accumulation):
                x, y = batches[micro * size + rank]
                engine.zero_grad()
                engine.backward(engine.criterion(engine(x), y))
                assert engine.step() == (micro == accumulation - 1)
            x, y = (torch.cat(column) for column in zip(*batches, strict=True))
            sgd.zero_grad()
            F.mse_loss(plain(x), y).backward()
            sgd.step()
        compare(dict(plain.named_parameters()), gather_weights(engine.model, gpc), RTOL)
        engine.close()


def _loops() -> None:
    _loop(1)
    _loop(3)


def test_the_canonical_loop_equals_one_process():
    _loops()
    run_world(2, _loops)


def _uneven_batches(lengths: list[int], weighted: bool, accumulation: int) -> int:
    """Ranks with other numbers of batches, one with none at all; every step against one process."""
    config = {"gradient_accumulation": accumulation}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        engine = start(gpc)
        plain = model()
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        rank = gpc.get_global_rank()
        data = [
            [(numbers(2 + at, 4, seed=50 * r + at), numbers(2 + at, 2, seed=9 + 50 * r + at)) for at in range(n)]
            for r, n in enumerate(lengths)
        ]
        stepped = []
        for x, y in engine.batches(data[rank], after_step=lambda: stepped.append(1)):
            engine.zero_grad()
            out = engine(x)
            engine.backward((F.mse_loss(out, y, reduction="sum"), y.numel()) if weighted else F.mse_loss(out, y))
            if engine.step():
                stepped.append(1)
        for first in range(0, max(lengths), accumulation):
            here = [batch for part in data for batch in part[first : first + accumulation]]
            sums = [F.mse_loss(plain(x), y, reduction="sum") for x, y in here]
            means = [F.mse_loss(plain(x), y) for x, y in here]
            loss = sum(sums) / sum(y.numel() for _, y in here) if weighted else sum(means) / len(means)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        compare(dict(plain.named_parameters()), gather_weights(engine.model, gpc), RTOL)
        engine.close()
        return len(stepped)


def _all_uneven_batches(cases: list[tuple[list[int], int]]) -> list[int]:
    return [_uneven_batches(lengths, weighted, passes) for lengths, passes in cases for weighted in (True, False)]


@pytest.mark.parametrize("cases", [[([3, 1, 0, 2], 1)], [([5, 2], 2), ([1, 1], 2), ([0, 0], 1)]], ids=str)
def test_ranks_with_fewer_batches_neither_hang_the_rest_nor_change_the_mean(cases):
    expected = [-(-max(lengths) // accumulation) for lengths, accumulation in cases for _ in (True, False)]
    assert run_world(len(cases[0][0]), _all_uneven_batches, cases).values == [expected] * len(cases[0][0])


class Branches(nn.Module):
    """Each rank uses its own branch, and nobody uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(4, 4)
        self.branch = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branch[which](torch.tanh(self.shared(x)))


def _subsets() -> list[bool]:
    with launch({}, context=ParallelContext()) as gpc:
        engine = start(gpc, Branches())
        rank = gpc.get_global_rank()
        nobody = []
        for step in range(3):
            engine.zero_grad()
            x = numbers(3, 4, seed=10 * step + rank)
            engine.backward(engine(x, which=rank).square().mean())
            engine._sum_gradients()
            nobody.append(all(p.grad is None for p in engine.model.branch[2].parameters()))
            plain = Branches()
            loss = sum(plain(numbers(3, 4, seed=10 * step + r), which=r).square().mean() for r in range(2)) / 2
            compare(plain_gradients(plain, loss), gather_gradients(engine.model, gpc), RTOL)
            engine._end_step()
        engine.close()
        return nobody


def test_ranks_that_use_other_parameters_get_the_right_gradient_and_a_word_in_the_log():
    result = run_world(2, _subsets)
    assert result.values == [[True] * 3] * 2  # as in one process, an unused parameter has no gradient
    assert result.stderr[0].count("ranks 1 have no gradient for 'branch.0.weight'") == 1
    assert result.stderr[0].count("ranks 0 have no gradient for 'branch.1.weight'") == 1
    assert "branch.2" not in result.stderr[0]


# -- what is refused --------------------------------------------------------------------------------------


def _frozen_and_thawed(accumulation: int = 1) -> None:
    """The last layer is thawed in step 2, the first frozen from step 3 to 4: clipped AdamW against one process."""
    config = {"clip_grad_norm": 0.05, "gradient_accumulation": accumulation}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        net, plain = model(), model()
        net[2].requires_grad_(False)
        engine = initialize(net, lambda _: torch.optim.AdamW(net.parameters(), lr=0.01), context=gpc)[0]
        adamw = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for step in range(7):
            for one in (net, plain):
                one[0].requires_grad_(step not in (3, 4))
                one[2].requires_grad_(step >= 2)
            adamw.zero_grad()
            for micro in range(accumulation):
                parts = [numbers(3, 4, seed=100 * step + 10 * micro + rank) for rank in range(gpc.world_size)]
                engine.zero_grad()
                engine.backward(engine(parts[gpc.get_global_rank()]).square().mean())
                engine.step()
                (plain(torch.cat(parts)).square().mean() / accumulation).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            adamw.step()
            assert abs(engine.grad_norm.item() - norm.item()) <= RTOL * norm.item(), step
            compare(dict(plain.named_parameters()), gather_weights(net, gpc), RTOL)
        engine.close()


def test_layers_frozen_and_thawed_in_mid_run_equal_one_process():
    run_world(2, _frozen_and_thawed)


def compare_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    one, other = ({**extra["engine.clip"]["state"], **extra["engine.scaler"]} for extra in (found, expected))
    torch.testing.assert_close(one, other, equal_nan=True)


def test_a_run_takes_up_the_state_that_it_has_itself_and_passes_over_the_rest():
    config = {"clip_grad_norm": {"method": "zclip"}, "fp16": {"init_scale": 8.0}}
    x = numbers(3, 4, seed=0).float()
    with world_of_one(**config) as gpc:
        engine = start(gpc, model().float())
        engine.backward(engine(x).square().mean())
        engine.step()
        saved = {part: copy.deepcopy(state) for part, state in engine.extra_state().items()}
    with world_of_one() as gpc:
        engine = start(gpc)
        assert not engine.may_skip
        engine.load_extra_state(saved)
        assert engine.extra_state() == {"engine.clip": {}, "engine.scaler": {}}
    saved["engine.scaler"]["scale"].fill_(4.0)
    with world_of_one(**config) as gpc:
        engine = start(gpc, model().float())
        assert engine.may_skip
        for extra in ({}, {"engine.clip": {}}, {"engine.scaler": {}}):
            engine.load_extra_state(extra)
            with pytest.raises(AssertionError):
                compare_states(engine.extra_state(), saved)
        for part, state in saved.items():
            engine.load_extra_state({part: state})
        compare_states(engine.extra_state(), saved)
        assert engine.loss_scale == 4.0


def test_a_loop_that_forgets_a_step_is_told_so():
    with world_of_one() as gpc:
        engine = start(gpc)
        with pytest.raises(GradientError, match=r"backward\(\) 0 times"):
            for _ in engine.batches([1, 2]):
                pass
        assert not engine._book.uneven
        with pytest.raises(GradientError, match=r"backward\(\) 1 times for one batch, and 1 of 1 passes"):
            _many(engine, passes=1, steps=0)
    with world_of_one(gradient_accumulation=3) as gpc:
        engine = start(gpc)
        _many(engine, passes=1, steps=1)
        with pytest.raises(GradientError, match=r"backward\(\) 2 times for one batch, and 2 of 3 passes"):
            _many(engine, passes=2, steps=0)


def _many(engine, passes: int, steps: int) -> None:
    for _ in engine.batches([1, 2]):
        for _ in range(passes):
            engine.backward(engine.model(numbers(3, 4, seed=0)).sum())
        for _ in range(steps):
            engine.step()


def test_a_graph_through_weights_that_were_given_back_is_explained():
    with world_of_one() as gpc:
        engine = start(gpc)
        for text, notes in (("out of memory", 0), ("setStorage: 8 bytes are out of bounds for storage of size 0", 1)):

            def fail(grad: torch.Tensor, text: str = text) -> None:
                raise RuntimeError(text)

            out = engine(numbers(3, 4, seed=0))
            out.register_hook(fail)
            with pytest.raises(RuntimeError, match=text) as caught:
                engine.backward(out.sum())
            assert len(getattr(caught.value, "__notes__", [])) == notes
            engine.zero_grad()
            assert engine.last_step_skipped
        engine.close()


def test_an_engine_that_is_closed_leaves_nothing_behind():
    with world_of_one(clip_grad_norm=1.0) as gpc:
        engine = start(gpc)
        closed: list[str] = []
        for name in ("_watch", "_stepper", "_sync"):
            part = getattr(engine, name)
            part.close = lambda name=name, close=part.close: (closed.append(name), close())
        engine.close()
        assert closed == ["_watch", "_stepper", "_sync"]
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in engine.model.parameters())


def test_a_schedule_that_is_set_later_is_prepared_too():
    with world_of_one() as gpc:
        engine = start(gpc)
        seen: list[object] = []

        class Later(type(engine.schedule)):
            def pre_processing(self, engine: object) -> None:
                seen.append(engine)

        engine.schedule = later = Later()
        assert seen == [engine]
        assert engine.schedule is later
        assert engine.uses_pipeline is False
        engine.close()


@pytest.mark.parametrize(
    ("built", "optimizer", "part"),
    [
        (lambda: 3, torch.optim.SGD, "pass a torch.nn.Module"),
        (model, lambda p: 3, "pass a torch optimizer"),
        (model, lambda p: SimpleNamespace(param_groups=[]), "pass a torch optimizer"),
        (model, lambda p: SimpleNamespace(step=print), "pass a torch optimizer"),
    ],
)
def test_what_is_no_model_or_no_optimizer_is_refused(built, optimizer, part):
    with world_of_one() as gpc, pytest.raises(ConfigError, match=part):
        initialize(built, optimizer, context=gpc)


def test_initialize_before_launch_says_so():
    with pytest.raises(ContextError, match="launch"):
        initialize(model(), torch.optim.SGD, context=ParallelContext())


def test_a_schedule_that_cannot_be_built_is_named():
    with (
        world_of_one(schedule=dict(type="NonPipelineSchedule", speed=3)) as gpc,
        pytest.raises(ConfigError, match="speed"),
    ):
        start(gpc)


@pytest.mark.parametrize(
    "options", [{"mode": "O2"}, {"backend": "nothing"}, {"level": 2}, {"options": "x"}, {"dynamic": "x"}]
)
def test_options_that_torch_compile_refuses_are_named(options):
    with (
        launch({"compile": options}, context=ParallelContext(), verbose=False) as gpc,
        pytest.raises(ConfigError, match=rf"torch\.compile cannot be called with the options {options}"),
    ):
        initialize(nn.Linear(2, 2), lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)


def test_an_engine_trains_until_it_is_told_to_evaluate():
    with world_of_one() as gpc:
        engine = start(gpc)
        for is_training in (True, False, True):
            assert engine.training is engine.model.training is is_training
            engine.train(False) if is_training else engine.train()
        engine.eval()
        assert engine.training is engine.model.training is False
        engine.close()


@pytest.mark.parametrize("criterion", [None, nn.MSELoss()])
def test_a_trainer_measures_the_loss_where_there_is_one(criterion):
    with world_of_one() as gpc:
        engine = initialize(model(), lambda p: torch.optim.SGD(p, lr=0.1), criterion, context=gpc)[0]
        assert engine.gives_loss is (criterion is not None)
        if criterion is None:
            engine.schedule = _OwnLoss()
        batch = numbers(3, 4, seed=0), numbers(3, 2, seed=1)
        engine.execute_schedule(iter([batch]), forward_only=True)
        assert engine.gives_loss is (criterion is not None)
        engine.execute_schedule(iter([batch]))
        assert engine.gives_loss
        engine.close()


class _OwnLoss(BaseSchedule):
    """The model is trained on its own loss."""

    def forward_back_step(self, engine, data_iter, forward_only=False, return_loss=True, return_output_label=True):
        x, y = next(data_iter)
        loss = engine.model(x).square().mean()
        if not forward_only:
            engine.backward(loss)
        return None, y, loss.detach()


# -- observers ---
class _Heard(Observer):
    def __init__(self, model: nn.Module) -> None:
        self.model, self.said = model, list[Any]()

    def on_loss(self, loss: Any) -> None:
        self.said.append("loss")

    def on_reduced(self, scale: Any) -> None:
        self.said.append(("reduced", all(p.grad is not None for p in self.model.parameters()), scale))

    def on_stepped(self) -> None:
        self.said.append("stepped")


def test_an_observer_hears_every_pass_and_every_step_once():
    with launch({"gradient_accumulation": 2}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(2, 2)
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), context=gpc)
        heard = _Heard(model)
        engine.observers.append(heard)
        for _ in range(2):
            engine.zero_grad()
            engine.execute_schedule(iter([(torch.ones(1, 2), torch.zeros(1, 2))]))
            engine.step()
        assert heard.said == ["loss", "loss", ("reduced", True, None), "stepped"]
        engine.observers.remove(heard)
        engine.zero_grad()
        engine.execute_schedule(iter([(torch.ones(1, 2), torch.zeros(1, 2))]))
        assert len(heard.said) == 4


SEEN = []


def test_a_new_engine_is_shown_to_whom_the_environment_names(monkeypatch):
    announce("nobody looks")
    monkeypatch.setenv(ON_ENGINE, f"{__name__}:look")
    announce("an engine")
    assert SEEN == ["an engine"]


def look(engine):
    SEEN.append(engine)


# -- whole weights ---
def test_whole_weights_in_memory_and_in_a_file(tmp_path):
    with world_of_one() as gpc:
        engine = start(gpc)
        engine.model.register_buffer("seen", torch.tensor([3]))
        own = {name: value.detach() for name, value in engine.model.state_dict().items()}
        for to in ("all", "first"):
            found = engine.full_state_dict(to)
            assert found.keys() == own.keys()
            assert all(torch.equal(found[name], own[name]) and found[name].dtype == own[name].dtype for name in own)
        half = engine.full_state_dict(dtype=torch.bfloat16)
        assert {value.dtype for name, value in half.items() if name != "seen"} == {torch.bfloat16}
        assert half["seen"].dtype == torch.int64
        assert engine.full_state_dict(tmp_path / "x.safetensors") == {}
        written = load_file(tmp_path / "x.safetensors")
        assert all(torch.equal(written[name], own[name]) for name in own)
        with pytest.raises(CheckpointError) as error:
            engine.full_state_dict("every")
        assert str(error.value).startswith(
            "to is 'every'; pass 'all', 'first' or the name of a .safetensors file to write"
        )
        engine.close()


def test_weights_that_are_on_their_way_are_waited_for(tmp_path):
    with world_of_one() as gpc:
        engine, waited = start(gpc), list[str]()
        engine.wait_for_weights()  # there is nothing to wait for
        engine.engine_optimizer.wait = lambda: waited.append("waited")
        engine.full_state_dict()
        assert len(waited) == 1
        with pytest.raises(CheckpointError):  # a model without a config of transformers
            engine.save_pretrained(tmp_path / "folder")
        assert len(waited) == 2
        engine.close()

"""A run that was saved on one layout resumes on another with the same bits, and on the same one with all of them."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from colonnade.checkpoint import CheckpointManager
from colonnade.checkpoint.export import ForeignState, write_checkpoint
from colonnade.checkpoint.manifest import MANIFEST, parse
from colonnade.checkpoint.tensor_files import FileEntry
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import CheckpointError
from colonnade.parallel.flat import MASTER
from colonnade.testing import run_world
from tests.checkpoint.models import WAYS, build, launched, truth_after

NOISE = 99
STEPS = range(3)


def save_on(name: str, folder: Path) -> None:
    """Save a run after some optimizer steps."""
    way = WAYS[name]
    with launched(way) as context, CheckpointManager(folder, context) as manager:
        built = build(way, context, 0)
        for kind in STEPS:
            built.step(kind)
        manager.save(1, built.model, built.optimizer, extra={"epoch": 3})


def move_to(name: str, folder: Path) -> dict[str, Any]:
    """Load into a model full of noise, compare with one process, and save again as the next step."""
    way = WAYS[name]
    with launched(way) as context, CheckpointManager(folder, context, keep=9) as manager:
        built = build(way, context, NOISE)
        built.step(NOISE)
        info = manager.load(built.model, built.optimizer)
        wrong = built.differs_from(truth_after(STEPS))
        manager.save(info.step + 1, built.model, built.optimizer, extra={"epoch": info.extra["epoch"] + 1})
        options = [(group["lr"], group["weight_decay"], group["betas"]) for group in built.optimizer.param_groups]
        facts = (info.step, info.extra["epoch"], info.random)
        return {"wrong": wrong, "info": facts, "options": options, "seed": context.seed}


@pytest.mark.parametrize(
    "chain",
    [
        ["data 4", "tensor 2 x pipeline 2", "data 2", "one"],
        ["one", "zero 3", "one"],
        pytest.param(["one", "zero 8", "expert 2 in data 4", "tensor 2 x pipeline 2", "one"], marks=pytest.mark.slow),
    ],
    ids=" -> ".join,
)
def test_weights_and_optimizer_go_through_every_layout_with_the_same_bits(tmp_path, chain):
    first, *others = chain
    run_world(WAYS[first].world, save_on, first, tmp_path)
    for at, name in enumerate(others):
        result = run_world(WAYS[name].world, move_to, name, tmp_path)
        for seen in result.values:
            assert seen["wrong"] == []
            assert seen["info"] == (at + 1, at + 3, "re-derived")
            assert set(seen["options"]) <= {(0.1, 0.2, (0.8, 0.99)), (0.05, 0.0, (0.8, 0.99))}
        assert "random state of step" in result.stderr[0]
        assert len({seen["seed"] for seen in result.values}) == 1


def _draw(context: ParallelContext) -> list[float]:
    with context.streams.use(ParallelMode.TENSOR):
        inside = torch.rand(1).item()
    return [inside, torch.rand(1).item(), random.random(), numpy.random.standard_normal()]


def save_draw_load_draw(folder: Path) -> tuple[list[float], list[float], str]:
    way = WAYS["tensor 2 x pipeline 2"]
    with launched(way) as context, CheckpointManager(folder, context) as manager:
        built = build(way, context, 0)
        random.seed(context.get_global_rank())
        numpy.random.seed(context.get_global_rank())
        _draw(context)
        manager.save(1, built.model)
        before = _draw(context)
        context.set_seed(5)
        info = manager.load(built.model)
        return before, _draw(context), info.random


def test_on_the_same_layout_every_random_stream_goes_on_where_it_was(tmp_path):
    drawn = []
    for before, after, how in run_world(4, save_draw_load_draw, tmp_path).values:
        assert before == after
        assert how == "restored"
        drawn.append(before)
    assert len({tuple(numbers) for numbers in drawn}) == 4


def test_streams_derived_for_another_layout_differ_by_step_and_repeat(tmp_path):
    run_world(2, save_on, "data 2", tmp_path)
    built = build(WAYS["one"], ParallelContext(), 0)
    draws = []
    for _ in range(2):
        context = ParallelContext()
        with CheckpointManager(tmp_path, context) as manager:
            manager.load(built.model)
        draws.append(_draw(context))
    assert draws[0] == draws[1]
    with CheckpointManager(tmp_path, context) as manager:
        manager.save(2, built.model)
        manager.load(built.model)
    assert _draw(context) != draws[0]


# -- one process ------------------------------------------------------------------------------------------


class Drop(nn.Module):
    """A model that draws random numbers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _train(model: nn.Module, optimizer: Any, scheduler: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6) * random.random()).square().mean().backward()
        optimizer.step()
        scheduler.step()


def _trainer() -> tuple[Any, Any, Any]:
    model = Drop()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path):
    context = ParallelContext()
    context.set_seed(1)
    model, optimizer, scheduler = _trainer()
    _train(model, optimizer, scheduler, 3)
    with CheckpointManager(tmp_path, context) as manager:
        manager.save(3, model, optimizer, {"scheduler": scheduler})
    _train(model, optimizer, scheduler, 4)

    context = ParallelContext()
    context.set_seed(2)
    again, other_optimizer, other_scheduler = _trainer()
    with CheckpointManager(tmp_path, context) as manager:
        assert manager.load(again, other_optimizer, {"scheduler": other_scheduler}).random == "restored"
    _train(again, other_optimizer, other_scheduler, 4)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert scheduler.state_dict() == other_scheduler.state_dict()
    assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]


def test_moments_of_another_type_than_their_parameter_keep_it(tmp_path):
    model = nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    moment = torch.randn(2, 3, dtype=torch.float64)
    optimizer.state[model.weight]["momentum_buffer"] = moment
    optimizer.state[model.weight]["count"] = 5
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.save(1, model, optimizer)
        other = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.1, foreach=True)
        manager.load(model, other)
    assert torch.equal(other.state[model.weight]["momentum_buffer"], moment)
    assert other.state[model.weight]["count"] == 5
    assert model.bias not in other.state
    group = other.param_groups[0]
    assert (group["lr"], group["momentum"], group["foreach"]) == (0.1, 0.9, True)


def test_moments_of_a_master_copy_are_rounded_where_none_is_kept(tmp_path, caplog):
    model = nn.Linear(2, 1, bias=False).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    master, moment = torch.tensor([[1.0, 2.001]]), torch.tensor([[0.1, 0.2]])
    kept = {MASTER: master, "exp_avg": moment, "exp_avg_sq": moment, "step": torch.tensor(3.0)}
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    state = ForeignState(
        {"weight": FileEntry.of("", master.bfloat16())},
        {"weight": {name: FileEntry.of("", value) for name, value in kept.items()}},
        [(["weight"], options)],
    )
    write_checkpoint(state, tmp_path, 1)
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.load(model, optimizer)
    found = optimizer.state[model.weight]
    assert found.keys() == {"exp_avg", "exp_avg_sq", "step"}
    for name in ("exp_avg", "exp_avg_sq"):
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], moment.bfloat16())
    assert found["step"] == 3
    assert "2 tensors were rounded to the dtypes of their parameters" in caplog.text


def test_a_count_that_was_a_number_may_be_a_tensor_here(tmp_path):
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight] = {"step": 5, "exp_avg": torch.ones(1, 2), "exp_avg_sq": torch.ones(1, 2)}
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.save(1, model, optimizer)
        other = torch.optim.AdamW(model.parameters())
        manager.load(model, other)
    assert isinstance(other.state[model.weight]["step"], torch.Tensor)
    assert other.state[model.weight]["step"] == 5


class Counted(nn.Linear):
    """A module with state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = {"n": 0}

    def get_extra_state(self) -> dict[str, int]:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def test_any_name_of_a_parameter_is_taken(tmp_path):
    model = nn.Module()
    model.register_parameter("a/b", nn.Parameter(torch.ones(1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.get_parameter("a/b")] = {"count": 5}
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.save(1, model, optimizer)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        manager.load(model, other)
    assert other.state[model.get_parameter("a/b")] == {"count": 5}


def test_extra_state_of_modules_comes_back(tmp_path):
    model = nn.Sequential(Counted(), Counted())
    model[1].calls = {"n": 7}
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.save(1, model)
        model[1].calls = {"n": 8}
        manager.load(model)
    assert (model[0].calls, model[1].calls) == ({"n": 0}, {"n": 7})


@pytest.fixture
def saved(tmp_path) -> CheckpointManager:
    """Steps 1 and 2 of a linear model, whose weights are 1 and 2 everywhere."""
    manager = CheckpointManager(tmp_path, ParallelContext())
    for step in (1, 2):
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, step)
        manager.save(step, model, torch.optim.SGD(model.parameters(), lr=step), extra={"name": "a", "epoch": step})
    return manager


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_for_the_last_good_one_and_named(saved, caplog):
    _flip(saved.folder / "step-00000002/rank-00000.safetensors")
    model = nn.Linear(3, 2)
    info = saved.load(model)
    assert info.step == 1
    assert torch.equal(model.weight, torch.ones(2, 3))
    (line,) = info.skipped
    assert line.startswith("step-00000002: rank-00000.safetensors was changed: its sha256 is ")
    assert "expected" in line
    assert "damaged" in caplog.text
    assert "loading step-00000001 instead" in caplog.text


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(saved):
    _flip(saved.folder / "step-00000002/rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="no intact checkpoint of step 2"):
        saved.load(nn.Linear(3, 2), step=2)
    assert saved.load(nn.Linear(3, 2), step=1).step == 1


def test_without_verify_only_sizes_are_checked(saved):
    _flip(saved.folder / "step-00000002/rank-00000.safetensors")
    with CheckpointManager(saved.folder, ParallelContext(), verify=False, read_only=True) as manager:
        assert manager.load(nn.Linear(3, 2)).step == 2
        assert manager.latest() == 2
    (saved.folder / "step-00000002/rank-00000.safetensors").write_bytes(b"")
    with CheckpointManager(saved.folder, ParallelContext(), verify=False, read_only=True) as manager:
        assert manager.load(nn.Linear(3, 2)).step == 1


def test_nothing_good_lists_every_reason(saved):
    _flip(saved.folder / "step-00000001/rank-00000.safetensors")
    (saved.folder / f"step-00000002/{MANIFEST}").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)manifest.json is missing.*rank-00000.safetensors was changed"):
        saved.load(nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": "x"}, r"the checkpoint has lr='x' for group 0 of the optimizer, but the optimizer has lr=0.5"),
        ({"lr": [1.0]}, r"has lr=\[1.0\]"),
        ({"lr": None}, "has lr=None"),
        ({"weight_decay": {"a": 1}}, r"has weight_decay=\{'a': 1\}"),
        ({"nesterov": "yes"}, "has nesterov='yes'"),
        ({"lr": {"$module": "os"}}, r"has the value \{.\$module.: .os.\} for .* one of the tags"),
        ({"lr": 3, "momentum": 0.5, "nesterov": None}, None),
    ],
    ids=str,
)
def test_options_of_another_kind_are_refused(saved, change, message):
    """Of a manifest that was changed by somebody who can make its digest."""
    for step in (1, 2):
        path = saved.folder / f"step-{step:08d}" / MANIFEST
        manifest = parse(path.read_bytes())
        (group,) = manifest.groups or ()
        options = replace(group.options, value={**group.options.value, **change})
        path.write_bytes(replace(manifest, groups=(replace(group, options=options),)).dump())
    model = nn.Linear(3, 2)
    sgd, before = torch.optim.SGD(model.parameters(), lr=0.5), model.weight.clone()
    if message is None:
        saved.load(model, sgd)
        assert sgd.param_groups[0]["lr"] == 3
        return
    with pytest.raises(CheckpointError, match=message):
        saved.load(model, sgd)
    assert torch.equal(model.weight, before)
    assert sgd.param_groups[0]["lr"] == 0.5


def test_lists_and_tensors_among_options_keep_their_kinds(tmp_path):
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        for betas, lr, message in (
            ((0.8, 0.9), torch.tensor(0.1), None),
            ((0.8, "x"), 0.1, "has betas"),
            ((0.8,), 0.1, "has betas"),
        ):
            model = nn.Linear(3, 2)
            adam = torch.optim.Adam(model.parameters(), lr=0.5)
            adam.param_groups[0].update(betas=betas, lr=lr)
            manager.save(1, model, adam)
            other = torch.optim.Adam(model.parameters(), lr=0.5)
            with nullcontext() if message is None else pytest.raises(CheckpointError, match=message):
                manager.load(model, other)


def test_a_checkpoint_of_another_model_lists_what_does_not_fit_and_changes_nothing(saved):
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2, 4))
    model.gamma = nn.Parameter(torch.zeros(1))
    with pytest.raises(CheckpointError) as caught:
        saved.load(model)
    text = str(caught.value)
    assert "missing in the checkpoint (1): gamma" in text
    assert "in the checkpoint, but not in the model (1): bias" in text
    assert "weight: F32 [2, 3] in the checkpoint, F32 [2, 4] in the model" in text
    assert not model.weight.any()
    with pytest.raises(CheckpointError, match=r"weight: F32 \[2, 3\] in the checkpoint, BF16 \[2, 3\] in the model"):
        saved.load(nn.Linear(3, 2).bfloat16())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"step": 7}, "no checkpoint of step 7; it has steps 1, 2"),
        ({"extra": {"nmae": None}}, "no extra 'nmae'; it has name, epoch. Did you mean 'name'"),
        ({"optimizer": "adam"}, "options betas, eps, .* but the saved optimizer did not have"),
        ({"optimizer": "stranger"}, r"parameter of shape \(9,\) that is not in the model"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_anything_is_changed(saved, how, message):
    model = nn.Linear(3, 2)
    optimizers = {
        "adam": torch.optim.Adam(model.parameters()),
        "stranger": torch.optim.SGD([nn.Parameter(torch.zeros(9))], lr=1.0),
    }
    before = model.weight.clone()
    if "optimizer" in how:
        how = {"optimizer": optimizers[how["optimizer"]]}
    with pytest.raises(CheckpointError, match=message):
        saved.load(model, **how)
    assert torch.equal(model.weight, before)


class Breaks:
    """Takes a state and then raises."""

    def __init__(self, value: int = 0, breaks: bool = True, key: str = "value") -> None:
        self.value, self.breaks, self.key = value, breaks, key

    def state_dict(self) -> dict[str, int]:
        return {self.key: self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state[self.key]
        if self.breaks and self.value in (1, 5):
            raise ValueError("out of order")


def _everything(folder: Path) -> tuple[CheckpointManager, nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A saved step 1, and objects that have gone on since."""
    model = nn.Sequential(nn.Linear(3, 2), Counted())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    extra = {"good": Breaks(1, False), "bad": Breaks(1)}
    manager = CheckpointManager(folder, ParallelContext(), verify=False)
    for step in (1, 2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        model[1].calls = {"n": step}
        extra["good"].value = extra["bad"].value = step
        optimizer.param_groups[0]["lr"] = 0.1 * step
        if step == 1:
            manager.save(1, model, optimizer, extra)
    return manager, model, optimizer, extra


def _seen(model: nn.Module, optimizer: Any, extra: dict[str, Any]) -> str:
    moments = [value.tolist() for held in optimizer.state.values() for value in held.values()]
    options = [{**group, "params": None} for group in optimizer.param_groups]
    values = [one.state_dict() for one in extra.values()]
    weights = [value.tolist() for value in model.parameters()]
    return f"{[weights, model[1].calls, moments, options, values]} {torch.get_rng_state().sum()} {random.getstate()}"


@pytest.mark.parametrize("what", ["extra", "file", "module"])
def test_a_load_that_fails_has_loaded_nothing(tmp_path, monkeypatch, what):
    manager, model, optimizer, extra = _everything(tmp_path)
    if what == "file":  # the last tensor that is read is called otherwise in its file
        path = tmp_path / "step-00000001/rank-00000.safetensors"
        path.write_bytes(path.read_bytes().replace(b'"model/1.bias"', b'"model/1.bjas"'))
    if what == "module":
        monkeypatch.setattr(Counted, "set_extra_state", Breaks(1).load_state_dict)
    before = _seen(model, optimizer, extra)
    with pytest.raises(CheckpointError, match=r"nothing was loaded") as caught:
        manager.load(model, optimizer, extra if what == "extra" else {"good": extra["good"]})
    assert ("1.bias" if what == "file" else "extra['bad']" if what == "extra" else "module 1") in str(caught.value)
    assert _seen(model, optimizer, extra) == before
    manager.close()


class Run:
    """Takes all plain values at once, or refuses them."""

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.values = refuses, {"epoch": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values
        if self.refuses and values["epoch"] > 0:
            raise ValueError("of another run")


def test_the_plain_values_are_taken_together_or_nothing_is(saved):
    model, run = nn.Linear(3, 2), Run(refuses=False)
    assert saved.load(model, rest=run).step == 2
    assert run.values == {"name": "a", "epoch": 2}
    nn.init.zeros_(model.weight)
    run = Run(refuses=True)
    with pytest.raises(CheckpointError, match=r"the run does not accept its saved state: ValueError: of another run"):
        saved.load(model, rest=run)
    assert (run.values, model.weight.any().item()) == ({"epoch": 0}, False)


def test_an_optimizer_that_was_not_saved_cannot_be_loaded(saved):
    model = nn.Linear(3, 2)
    saved.save(3, model)
    with pytest.raises(CheckpointError, match="contains no optimizer state"):
        saved.load(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert saved.load(model, torch.optim.SGD(model.parameters(), lr=1.0), step=2).extra == {"name": "a", "epoch": 2}


def test_groups_that_are_cut_otherwise_are_refused(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 2.0}])
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.save(1, model, optimizer)
        with pytest.raises(
            CheckpointError, match=r"contains weight and bias, but these parameters had different options"
        ):
            manager.load(model, torch.optim.SGD(model.parameters(), lr=1.0))
        swapped = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], lr=9.0)
        manager.load(model, swapped)
        fewer = torch.optim.SGD([{"params": [model.weight]}, {"params": []}], lr=9.0)  # as on a stage without any
        manager.load(model, fewer)
    assert [group["lr"] for group in swapped.param_groups] == [2.0, 1.0]
    assert [group["lr"] for group in fewer.param_groups] == [1.0, 2.0]


def test_an_empty_folder_has_nothing_to_load(tmp_path):
    with CheckpointManager(tmp_path / "new", ParallelContext()) as manager:
        assert manager.latest() is None
        with pytest.raises(CheckpointError, match=r"has no checkpoint\. Start without loading"):
            manager.load(nn.Linear(1, 1))


# -- every rank -------------------------------------------------------------------------------------------


class Cursor:
    """A sampler whose place is its rank's own."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _model_with_statistics(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    nn.init.constant_(model[0].weight, 3.0)
    nn.init.constant_(model[1].running_mean, 10.0 + rank)
    return model


def save_own_cursor(folder: Path) -> dict[str, Any]:
    with launched(WAYS["data 2"]) as context, CheckpointManager(folder, context) as manager:
        rank = context.get_global_rank()
        model, cursor = _model_with_statistics(rank), Cursor(10 + rank)
        manager.save(1, model, extra={"cursor": cursor, "same": Cursor(5)})
        cursor.at, same = 0, Cursor(0)
        fresh = _model_with_statistics(77)
        nn.init.zeros_(fresh[0].weight)
        errors = []
        for wrong in (nn.Sequential(nn.Linear(1, 1 + rank), nn.BatchNorm1d(1)), fresh):
            try:
                manager.load(wrong, extra={"none": 1} if rank else {})
            except CheckpointError as error:
                errors.append(str(error))
        try:  # what one rank cannot take, no rank has taken
            manager.load(fresh, extra={"same": Breaks(key="at") if rank else same})
        except CheckpointError as error:
            errors.append(str(error))
        untouched = [fresh[0].weight.item(), fresh[1].running_mean.item(), same.at]
        manager.load(fresh, extra={"cursor": cursor, "same": same})
        statistics = [fresh[0].weight.item(), fresh[1].running_mean.item(), fresh[1].running_var.item()]
        seen = {"at": [cursor.at, same.at], "errors": errors, "untouched": untouched, "statistics": statistics}
        return {**seen, "bias": [model[0].bias.item(), fresh[0].bias.item()]}


def test_state_that_differs_by_rank_goes_back_to_its_rank_and_errors_to_every_rank(tmp_path, caplog):
    values = run_world(2, save_own_cursor, tmp_path).values
    assert [value["at"] for value in values] == [[10, 5], [11, 5]]
    assert [value["statistics"] for value in values] == [[3.0, 10.0, 1.0], [3.0, 11.0, 1.0]]
    (first, found), (other, again) = (value["bias"] for value in values)
    assert first == found == again != other, "a parameter is what the first rank had, on all"
    for value in values:
        assert value["untouched"] == [0.0, 87.0, 0]
        for error, expected in zip(value["errors"], ("shape or type", "no extra 'none'", "out of order"), strict=True):
            assert expected in error
            assert "nothing was loaded" in error
    same, model = Cursor(0), _model_with_statistics(5)
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        info = manager.load(model, extra={"same": same})
        assert (same.at, info.extra) == (5, {})
        assert model[1].running_mean.item() == 10.0, "on another layout, what the first rank had"
        assert "1.running_mean differed between ranks" in caplog.text
        assert "running_var" not in caplog.text, "what has not drifted is saved once"
        with pytest.raises(CheckpointError, match="extra/cursor differed between ranks when it was saved on data 2"):
            manager.load(model, extra={"cursor": Cursor(0)})

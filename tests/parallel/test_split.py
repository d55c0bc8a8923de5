"""Models are cut where asked, with the names of the whole model, and run as they did in one piece."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.schedule import NonPipelineSchedule, PipelineSchedule
from colonnade.engine.schedule.executor import Executor
from colonnade.engine.schedule.micro_batch import split_into_micro_batches
from colonnade.engine.schedule.orders import make_table
from colonnade.errors import ConfigError, ScheduleError
from colonnade.parallel.placement import Shard, Tied, is_placed, place, placement_of
from colonnade.parallel.split import (
    Chunks,
    Stage,
    _measured,
    _now,
    balanced,
    build_schedule,
    find_ties,
    split,
    take_stages,
)
from colonnade.proof.planner.ranks import fake_rank
from colonnade.registry import SCHEDULE
from colonnade.testing import run_world


class TwoInTwoOut(nn.Module):
    """A layer of a Sequential that takes and returns a pair, as one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        left, right = pair
        return self.linear(left), right + left


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * 2


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + self.down(torch.relu(self.up(hidden))), ids


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.table(ids), "ids": ids}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 10, bias=False)

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.out(hidden)


class Language(nn.Module):
    """Says itself in which order its layers run; its head has the weight of its embedding."""

    def __init__(self, num_blocks: int = 3, tied: bool = True, by_name: bool = False) -> None:
        super().__init__()
        self.head, self.embed = Head(), Embed()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.by_name = by_name
        if tied:
            self.head.out.weight = self.embed.table.weight

    def pipeline_layers(self) -> list[Any]:
        if self.by_name:
            return ["embed", *(f"blocks.{index}" for index in range(len(self.blocks))), "head"]
        return [self.embed, *self.blocks, self.head]

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)["hidden"]
        for block in self.blocks:
            hidden, _ = block(hidden, ids)
        return self.head(hidden, ids)


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), second=TwoInTwoOutAfter()))
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), inner, TwoInTwoOut(), Sum(), nn.Linear(4, 2)).double()


class TwoInTwoOutAfter(nn.Module):
    """Makes a pair of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


def layer_names(stages: Sequence[nn.Module]) -> list[tuple[str, ...]]:
    return [stage.layer_names for stage in stages if isinstance(stage, Stage)]


def run_all(stages: Sequence[nn.Module], value: Any) -> Any:
    """The stages one after another, as the executor calls them."""
    from colonnade.engine.schedule.micro_batch import MicroBatch, call_module

    for index, stage in enumerate(stages):
        value = call_module(index, stage, value, MicroBatch(0))
    return value


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5, 6, 7])
def test_a_sequential_keeps_names_values_and_parameters(num_stages: int) -> None:
    model = sequential()
    parts = split(model, num_stages=num_stages)
    assert len(parts) == num_stages
    keys = [key for stage in parts for key in stage.state_dict()]
    assert keys == list(model.state_dict())
    parameters = {name: parameter for stage in parts for name, parameter in stage.named_parameters()}
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(run_all(parts.stages, x), model(x))
    assert parts.ties == []


@pytest.mark.parametrize("by_name", [True, False])
def test_a_model_that_declares_its_layers(by_name: bool) -> None:
    model = Language(by_name=by_name)
    ids = torch.arange(6).view(2, 3)
    parts = split(model, at=["blocks.1", "head"], sample=ids)
    assert layer_names(parts.stages) == [("embed", "blocks.0"), ("blocks.1", "blocks.2"), ("head",)]
    keys = {key for stage in parts for key in stage.state_dict()}
    assert keys == set(model.state_dict())
    assert torch.equal(run_all(parts.stages, ids), model(ids))
    parts[0].load_state_dict({key: value for key, value in model.state_dict().items() if key in parts[0].state_dict()})


def test_cuts_may_name_a_nested_layer_or_the_container() -> None:
    assert layer_names(split(sequential(), at="2.second").stages)[1][0] == "2.second"
    whole = layer_names(split(sequential(), at=["2", "4"]).stages)
    assert whole == [("0", "1"), ("2.first", "2.second", "3"), ("4", "5")]


ALTERED: dict[str, Any] = {
    "forward hook": lambda module: module.register_forward_hook(lambda module, args, output: output + 1),
    "forward pre hook": lambda module: module.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "backward hook": lambda module: module.register_full_backward_hook(lambda module, one, two: None),
    "backward pre hook": lambda module: module.register_full_backward_pre_hook(lambda module, gradient: None),
    "forward of its own": lambda module: setattr(module, "forward", lambda x: x + 1),
}


@pytest.mark.parametrize("how", ALTERED)
def test_a_hooked_container_is_not_taken_apart(how: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential())
    assert layer_names(split(model, num_stages=2).stages) == [("0",), ("1.0", "1.1", "2")]
    ALTERED[how](model[1])
    parts = split(model, num_stages=2)
    assert layer_names(parts.stages) == [("0",), ("1", "2")]
    x = torch.ones(1, 2)
    assert torch.equal(run_all(parts.stages, x), model(x))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 8))
@example([1, 18, 6, 11, 13, 5], 5)
def test_no_other_cut_is_better_balanced(weights: list[int], parts: int) -> None:
    parts = min(parts, len(weights))

    def heaviest(starts: Sequence[int]) -> tuple[int, int]:
        """The largest sum, then how uneven all are."""
        stops = [*starts[1:], len(weights)]
        sums = [sum(weights[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        return max(sums), sum(each * each for each in sums)

    every = [(0, *cuts) for cuts in combinations(range(1, len(weights)), parts - 1)]
    starts = balanced(weights, parts)
    assert tuple(starts) in every
    assert heaviest(starts) == min(map(heaviest, every))


class Slow(nn.Module):
    """Takes its time in the forward pass and has a parameter, a mode and a random number."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.scale = seconds, nn.Parameter(torch.ones(1))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.norm(torch.dropout(x, 0.5, True)) * self.scale


def test_stages_are_balanced_by_measured_time_and_nothing_is_left_behind() -> None:
    model = nn.Sequential(*(Slow(seconds) for seconds in (0.01, 0.01, 0.01, 0.06, 0.01, 0.01)))
    model[2].eval()
    sample = torch.randn(3, 2)
    before, state = torch.get_rng_state(), {key: value.clone() for key, value in model.state_dict().items()}
    parts = split(model, num_stages=3, balance="time", sample=sample)
    assert layer_names(parts.stages) == [("0", "1", "2"), ("3",), ("4", "5")]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [layer.training for layer in model] == [True, True, False, True, True, True]


def test_the_callers_sample_is_not_changed_while_layers_are_timed() -> None:
    sample = torch.tensor([[-1.0, 2.0], [3.0, -4.0]], requires_grad=True)
    before = sample.detach().clone()
    split(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2)), num_stages=2, balance="time", sample=sample)
    assert torch.equal(sample, before)
    assert sample.grad is None


class Delayed(torch.autograd.Function):
    """Takes its time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.05)
        return gradient


class SlowAtFirst(nn.Module):
    """Of two arguments, with a parameter that it does not use; slow in its first call, or in each backward pass."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.unused, self.backward, self.calls = nn.Parameter(torch.ones(1)), backward, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        time.sleep(0.05 if self.calls == 1 and not self.backward else 0)
        return Delayed.apply(x + y) if self.backward else x + y


@pytest.mark.parametrize(("backward", "first"), [(True, ("0",)), (False, ("0", "1"))])
def test_backward_passes_count_and_what_is_slow_but_once_does_not(backward: bool, first: tuple[str, ...]) -> None:
    model = nn.Sequential(SlowAtFirst(backward), Slow(0.02), Slow(0.02))
    parts = split(model, num_stages=2, balance="time", sample=(torch.randn(3, 2), torch.randn(3, 2)))
    assert layer_names(parts.stages)[0] == first


def test_time_is_measured_for_layers_that_pass_dicts_and_integers() -> None:
    assert len(split(Language(), num_stages=2, balance="time", sample=torch.arange(4).view(2, 2))) == 2


def test_ties_are_reported_whether_shared_by_object_or_by_memory() -> None:
    model = Language(num_blocks=1)
    ids = torch.arange(6).view(2, 3)
    assert split(model, num_stages=3, sample=ids).ties == [(("embed.table.weight", 0), ("head.out.weight", 2))]
    assert split(model, num_stages=1, sample=ids).ties == []
    loose = Language(num_blocks=1, tied=False)
    loose.head.out.weight = nn.Parameter(loose.embed.table.weight.data)
    assert split(loose, num_stages=3, sample=ids).ties == [(("embed.table.weight", 0), ("head.out.weight", 2))]
    layer = nn.Linear(2, 2, bias=False)
    assert split(nn.Sequential(layer, layer, layer), num_stages=3).ties == [
        (("0.weight", 0), ("1.weight", 1), ("2.weight", 2))
    ]


def test_views_of_one_flat_buffer_are_no_ties() -> None:
    flat = torch.zeros(8)
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    first.weight, second.weight = nn.Parameter(flat[:4].view(2, 2)), nn.Parameter(flat[4:].view(2, 2))
    assert find_ties([first, second]) == []


def test_your_own_stages_are_taken_as_they_are() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    for stages in ([first, second], nn.ModuleList([first, second])):
        parts = split(stages)
        assert list(parts) == [first, second]
        assert parts.ties == [(("weight", 0), ("weight", 1))]
    with pytest.raises(ScheduleError, match="a list of 2 modules already defines 2 stages"):
        split([first, second], num_stages=3)


class Plain(nn.Module):
    """Four layers; forward is what it is given."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.embed, self.pair, self.both, self.out = nn.Linear(4, 4), Pair(), Both(), nn.Linear(4, 2)
        self.run = forward

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.embed, self.pair, self.both, self.out]

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Both(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left - right


def as_declared(model: Plain, x: Tensor) -> Tensor:
    left, right = model.pair(model.embed(x))
    return model.out(model.both(left, right))


def scaled(model: Plain, x: Tensor) -> Tensor:
    left, right = model.pair(model.embed(x) * 3)
    return model.out(model.both(left, right))


def dropped(model: Plain, x: Tensor) -> Tensor:
    left, right = model.pair(nn.functional.dropout(model.embed(x), 0.5, model.training))
    return model.out(model.both(left, right))


def swapped(model: Plain, x: Tensor) -> Tensor:
    left, right = model.pair(model.embed(x))
    return model.out(model.both(right, left))


def residual(model: Plain, x: Tensor) -> Tensor:
    return as_declared(model, x) + 1


def skipped(model: Plain, x: Tensor) -> Tensor:
    return model.out(model.embed(x))


def crossed(model: Plain, x: Tensor) -> Tensor:
    one, two = model.pair(model.embed(x)), model.pair(model.embed(x * 2))
    return model.out(model.both(one[0], two[1]))


def alike(model: Plain, x: Tensor) -> Tensor:
    hidden = model.pair(model.embed(x))[0]
    return model.out(model.both(model.embed(x), hidden))


def constant(model: Plain, x: Tensor) -> Tensor:
    return model.out(model.both(model.pair(model.embed(x))[0], 2.0))


def entered(model: Plain, x: Tensor) -> Tensor:
    return as_declared(model, -x)


def unseen(model: Plain, x: Tensor) -> Tensor:
    return as_declared(model, x) if bool(x.isfinite().all()) else x


def test_a_forward_pass_that_does_more_than_call_its_layers_is_refused() -> None:
    x = torch.randn(3, 4)
    for forward, why in {
        scaled: "the input of 'pair' is 'mul', not the output of 'embed'",
        dropped: "the input of 'pair' is 'dropout', not",
        swapped: "the input of 'both' is several values, not the output of 'pair'",
        residual: "its result is 'add', not the output of 'out'",
        skipped: "the input of 'out' is 'embed', not the output of 'both'",
        crossed: "the input of 'both' is several values, not the output of 'pair'",
        alike: "the input of 'both' is several values, not the output of 'pair'",
        constant: "the input of 'both' is several values, not the output of 'pair'",
        entered: "'embed' is not called with the arguments of the model",
    }.items():
        with pytest.raises(
            ScheduleError, match=f"nothing shows that forward.* of Plain only calls its layers.*{why}.*sample="
        ):
            split(Plain(forward), num_stages=2)
        with pytest.raises(ScheduleError, match="layers of Plain, called in order, do not give the same result"):
            split(Plain(forward), num_stages=2, sample=x)
    model = Plain(dropped).eval()  # does nothing more in this mode
    with pytest.raises(ScheduleError, match="layers of Plain, called in order, do not give the same result"):
        split(model, num_stages=2, sample=x)
    assert not any(module.training for module in model.modules())
    with pytest.raises(ScheduleError, match=r"cannot be traced \(TraceError"):
        split(Plain(unseen), num_stages=2)
    for options in ({}, {"sample": x}):
        assert len(split(Plain(as_declared), num_stages=2, **options)) == 2
    assert len(split(Plain(unseen), num_stages=2, sample=x)) == 2


def counted(model: Plain, x: Tensor) -> Tensor:
    model.out.count.add_(1)
    return as_declared(model, x)


def broken(model: Plain, x: Tensor) -> Tensor:
    raise ZeroDivisionError


class Disordered(Plain):
    def pipeline_layers(self) -> list[nn.Module]:
        return [self.out, self.pair, self.both, self.embed]


def test_a_comparison_leaves_buffers_takes_nans_and_says_who_failed() -> None:
    x = torch.randn(3, 4)
    x[1, 2] = torch.nan
    model = Plain(counted)
    model.out.register_buffer("count", torch.zeros(()))
    assert len(split(model, num_stages=2, sample=x)) == 2
    assert model.out.count == 0
    before = x.clone()
    assert len(split(Twice(nn.ReLU(inplace=True), nn.Linear(4, 2)), num_stages=2, sample=x)) == 2
    assert torch.equal(x.nan_to_num(), before.nan_to_num())
    with pytest.raises(ZeroDivisionError):
        split(Plain(broken), num_stages=2, sample=x)
    with pytest.raises(
        ScheduleError, match=r"do not give the same result as its forward pass: they fail \(RuntimeError: mat1"
    ):
        split(Disordered(as_declared), num_stages=2, sample=x)


class Reversed(nn.Sequential):
    def pipeline_layers(self) -> list[str]:
        return ["1", "0"]


class Declared(nn.Module):
    """Layers in an order, and no forward pass: the order is all there is."""

    def __init__(self, plain: Plain) -> None:
        super().__init__()
        self.embed, self.pair, self.both, self.out = plain.pipeline_layers()

    def pipeline_layers(self) -> list[str]:
        return ["embed", "pair", "both", "out"]


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_sequential_with_a_forward_pass_or_hooks_of_its_own_is_looked_at_too() -> None:
    layers = (nn.Linear(4, 4), nn.ReLU(inplace=True))
    assert len(split(Twice(*layers), num_stages=2)) == 2
    with pytest.raises(ScheduleError, match="its result is 'mul'"):
        split(Doubled(*layers), num_stages=2)
    hooked, patched = nn.Sequential(*layers), nn.Sequential(*layers)
    hooked.register_forward_hook(lambda module, args, output: output + 1)
    patched.forward = lambda x: x + 1  # type: ignore[method-assign]
    assert len(split(Declared(Plain(None)), num_stages=2, sample=torch.ones(1, 4))) == 2
    with pytest.raises(ScheduleError, match="its result is '_1', not the output of '0'"):
        split(Reversed(*layers), num_stages=2)
    for model in (hooked, patched):
        with pytest.raises(ScheduleError, match=r"hooks or a forward\(\)"):
            split(model, num_stages=2)
        with pytest.raises(ScheduleError, match="do not give the same result"):
            split(model, num_stages=2, sample=torch.ones(1, 4))


class Lost(Language):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(4))


class Alias(Language):
    """Has a tensor of a layer under a second name, outside of all layers."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.alias = nn.Module()
        if buffer:
            self.alias.register_buffer("value", self.blocks[0].count)
        else:
            self.alias.value = self.head.out.weight


class Again(nn.Module):
    """One layer under two names, called by both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(2, 2)

    def pipeline_layers(self) -> list[str]:
        return ["first", "second"]


def test_a_layer_may_be_called_by_each_of_its_names() -> None:
    parts = split(Again(), num_stages=2)
    assert layer_names(parts.stages) == [("first",), ("second",)]
    assert parts.ties == [(("first.weight", 0), ("second.weight", 1)), (("first.bias", 0), ("second.bias", 1))]


class Misnamed(Language):
    def pipeline_layers(self) -> list[Any]:
        return ["embed", "block.0", "head"]


class Foreign(Language):
    def pipeline_layers(self) -> list[Any]:
        return [nn.Linear(2, 2)]


class Nested(Language):
    def pipeline_layers(self) -> list[Any]:
        return ["embed", "blocks.0", "blocks.0.up"]


class Empty(Language):
    def pipeline_layers(self) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (sequential(), {"num_stages": 8}, "7 layers cannot make 8 stages"),
        (sequential(), {"num_stages": 0}, "7 layers cannot make 0 stages"),
        (sequential(), {}, "Pass at="),
        (
            sequential(),
            {"at": ["2.frist"]},
            r"'2\.frist' in at= is not a layer\. The layers are 0, 1, 2\.first.*Did you mean '2.first'",
        ),
        (sequential(), {"at": ["0"]}, "'0' does not come after '0'"),
        (sequential(), {"at": ["3", "2"]}, "'2' does not come after '3'"),
        (sequential(), {"at": ["3"], "num_stages": 3}, "makes 2 stages, but num_stages is 3"),
        (
            sequential(),
            {"num_stages": 2, "balance": "flops"},
            "balance is 'flops'; allowed are 'parameters' and 'time'",
        ),
        (sequential(), {"num_stages": 2, "balance": "time"}, "pass sample="),
        (nn.Linear(2, 2), {"num_stages": 1}, "the order of the layers of a Linear is not known"),
        (Lost(), {"num_stages": 2}, "no layer of Lost contains position"),
        (Alias(buffer=False), {"num_stages": 2}, "no layer of Alias contains alias.value."),
        (Alias(buffer=True), {"num_stages": 2}, "no layer of Alias contains alias.value."),
        (Misnamed(), {"num_stages": 2}, "no layer 'block.0'. Did you mean 'blocks.0'"),
        (Foreign(), {"num_stages": 1}, "not Linear"),
        (Nested(), {"num_stages": 2}, "'blocks.0' and also 'blocks.0.up'"),
        (Empty(), {"num_stages": 2}, "returned no layers"),
    ],
)
def test_what_cannot_be_cut_is_told(model: nn.Module, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        split(model, **options)


def run_split(order: str) -> dict[str, Tensor | None]:
    rank = dist.get_rank()
    parts = split(sequential(), num_stages=4)
    table = make_table(order, 2, 3, 2)
    mine = [parts[stage] for stage in ((rank, 3 - rank) if order == "zb_v" else (rank, rank + 2))]
    executor = Executor(mine, table, rank=rank, ranks=[0, 1], loss_fn=nn.functional.mse_loss)
    executor.run(split_into_micro_batches(*split_batch(), 3))
    return {name: parameter.grad for stage in mine for name, parameter in stage.named_parameters()}


def split_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(5, size, generator=generator, dtype=torch.float64) for size in (4, 2))  # type: ignore[return-value]


ORDERS = ("zb_v", "interleaved_1f1b")


def run_both() -> list[dict[str, Tensor | None]]:
    return [run_split(order) for order in ORDERS]


def test_a_split_model_on_two_ranks_has_the_gradients_of_the_whole() -> None:
    """Pairs go between its stages as one argument; a cut comes before an in-place layer."""
    assert ("1",) in layer_names(split(sequential(), at=["1", "2"]).stages)
    model = sequential()
    data, label = split_batch()
    nn.functional.mse_loss(model(data), label).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parts in zip(*run_world(2, run_both).values, strict=True):
        found = {name: grad for grads in parts for name, grad in grads.items()}
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_layer_whose_weight_is_not_its_own_is_timed() -> None:
    class Borrows(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = [weight]

        def forward(self, x: Tensor) -> Tensor:
            return x.float() @ self.weight[0]

    layers = [("borrows", Borrows(torch.randn(2, 2, requires_grad=True)))]
    assert len(_measured(layers, torch.ones(3, 2, dtype=torch.int64), True)) == 1


def test_a_time_is_read_when_the_gpu_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    assert _now() <= time.perf_counter()
    assert waited == [True]


# -- stages -----------------------------------------------------------------------------------------------
# The stages of one rank: names and state of the whole model.


def two_of_four() -> tuple[nn.Sequential, Chunks]:
    """A model, and the stages of the first of two ranks, stages going round."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    chunks = take_stages(split(model, num_stages=4), [0, 1, 0, 1], 0)
    assert isinstance(chunks, Chunks)
    return model, chunks


def test_the_names_are_those_of_the_whole_model() -> None:
    _, chunks = two_of_four()
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(chunks.state_dict()) == [name for name, _ in chunks.named_parameters()] == names
    assert chunks.get_submodule("2") is dict(chunks.named_modules())["2"]
    assert chunks.get_submodule("") is chunks
    with pytest.raises(AttributeError):
        chunks.get_submodule("3")


def test_loading_tells_what_is_missing_and_unexpected_in_all_stages() -> None:
    model, chunks = two_of_four()
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    for name in ("0.bias", "2.weight"):
        del state[name]
    found = chunks.load_state_dict(state, strict=False)
    assert found.missing_keys == ["0.bias", "2.weight"]
    assert found.unexpected_keys == ["1.bias", "1.weight", "3.bias", "3.weight"]
    assert chunks.state_dict()["0.weight"].eq(1).all()
    with pytest.raises(RuntimeError, match=r"unexpected keys for the stages of this rank: 1\.bias"):
        chunks.load_state_dict(state)
    whole = chunks.load_state_dict(chunks.state_dict())
    assert (whole.missing_keys, whole.unexpected_keys) == ([], [])


def test_a_module_of_two_stages_is_named_once() -> None:
    layer = nn.Linear(2, 2)
    chunks = Chunks([nn.ModuleDict({"a": layer}), nn.ModuleDict({"b": layer})])
    assert [name for name, _ in chunks.named_modules()] == ["", "a", ""]
    assert [name for name, _ in chunks.named_modules({layer})] == ["", ""]
    assert [name for name, _ in chunks.named_parameters()] == ["a.weight", "a.bias"]


def shared(*stages: int) -> tuple[nn.Module, nn.Parameter]:
    """Four layers, those at `stages` with one weight."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    weight = place(model[stages[0]].weight, {ParallelMode.TENSOR: Shard(0)}, (4, 2))
    for stage in stages:
        model[stage].weight = weight
    return model, weight


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_stages_of_several_ranks_share_is_tied_on_these(rank: int) -> None:
    model, weight = shared(0, 1, 2)
    taken = take_stages(split(model, num_stages=4), [0, 1, 0, 2], rank)
    assert isinstance(taken, Chunks) == (rank == 0)
    placed = placement_of(weight)
    assert placed.tied == (Tied((0, 1), "0.weight") if rank < 2 else None)
    assert (placed.shards, placed.shape) == ({ParallelMode.TENSOR: Shard(0)}, (4, 2))
    assert not any(is_placed(layer.bias) for layer in model)


def test_what_stages_of_one_rank_share_stays_one_parameter() -> None:
    model, weight = shared(0, 2)
    chunks = take_stages(split(model, num_stages=4), [0, 1, 0, 1], 0)
    assert placement_of(weight).tied is None
    assert len(list(chunks.parameters())) == 3


# -- schedules --------------------------------------------------------------------------------------------
# The schedule of a config: the class or the order that it names, or the one for its sizes.


OneFOneB, Interleaved = SCHEDULE.get_module("OneFOneB"), SCHEDULE.get_module("Interleaved1F1B")
PIPELINE = {"parallel": {"pipeline": 2}, "num_microbatches": 4}


def built(config: dict[str, Any]) -> Any:
    context = ParallelContext()
    with fake_rank(load_config(config), 2, 0, context):
        return build_schedule(context)


def test_without_a_schedule_the_sizes_say_which() -> None:
    assert type(built({})) is NonPipelineSchedule
    plain = built(PIPELINE)
    assert (type(plain), plain.num_microbatches) == (OneFOneB, 4)
    chunked = built({**PIPELINE, "model": {"num_chunks": 2}})
    assert (type(chunked), chunked.num_microbatches, chunked.num_chunks) == (Interleaved, 4, 2)
    for config in (PIPELINE, {**PIPELINE, "model": {"num_chunks": 2}}):
        assert built({**config, "TENSOR_SHAPE": (2, 3)}).tensor_shape == (2, 3)
    with pytest.raises(ConfigError, match="a pipeline of 2 stages needs a schedule and a number of micro-batches"):
        built({"parallel": {"pipeline": 2}})


def test_a_class_or_an_order_by_its_name() -> None:
    settings = {"num_microbatches": 4}
    assert type(built({**PIPELINE, "schedule": {"type": "OneFOneB", **settings}})) is OneFOneB
    ordered = built({**PIPELINE, "schedule": {"type": "gpipe", **settings}})
    assert type(ordered) is PipelineSchedule
    assert type(built({"schedule": "NonPipelineSchedule"})) is NonPipelineSchedule
    with pytest.raises(ConfigError, match="OneFOneB could not be built with"):
        built({**PIPELINE, "schedule": {"type": "OneFOneB", "depth": 3}})


def test_what_cannot_run_a_step_is_no_schedule() -> None:
    @SCHEDULE.register_module
    class Stepless:
        pass

    with pytest.raises(ConfigError, match=r"Stepless has no forward_back_step\(\)"):
        built({"schedule": "Stepless"})

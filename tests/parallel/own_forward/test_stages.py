"""A model is cut by its own forward pass: its stages, one after another, give what it gives, and its gradients."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Sequence
from itertools import combinations
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.errors import ScheduleError
from colonnade.parallel.forward_recorder import WATCHER, WatchedUnit, units_of
from colonnade.parallel.own_forward import ForwardSplitter, result_of
from colonnade.parallel.split import find_ties, split
from tests.parallel.own_forward.models import (
    LENGTH,
    WIDTH,
    WORDS,
    Around,
    Aside,
    Block,
    Borrowing,
    Decoder,
    Gated,
    Keyed,
    Late,
    Layer,
    Net,
    Outer,
    Residual,
    Telling,
    Twofold,
    Writing,
    ids,
    run_all,
)


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    output.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, stages: Sequence[nn.Module], *args: Any, **kwargs: Any) -> None:
    """Results, gradients, names of parameters and buffers."""
    expected = model(*args, **kwargs)
    truth = gradients(model, expected)
    found = run_all(stages, *args, **kwargs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients(model, found), truth, rtol=1e-12, atol=1e-14)
    keys = [set(stage.state_dict()) for stage in stages]
    assert set().union(*keys) == set(model.state_dict())
    own = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    held = [id(parameter) for stage in stages for parameter in stage.parameters()]
    assert set(held) == set(own)


class Plain(nn.Module):
    """Its blocks are plain layers, in lists that are gone through side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)).tanh()
        return x


@pytest.mark.parametrize("count", [2, 4])
def test_plain_layers_in_a_list_are_blocks(count: int) -> None:
    torch.manual_seed(0)
    model, x = Plain().double(), torch.randn(3, 4, dtype=torch.float64)
    assert_same(model, split(model, num_stages=count, sample=x).stages, x)
    cut = split(model, at=["layers.1", "layers.3"], sample=x)
    assert [{name.split(".")[1] for name, _ in stage.named_parameters()} for stage in cut] == [{"0"}, {"1", "2"}, {"3"}]


@pytest.mark.parametrize("tied", [True, False])
def test_every_cut_of_a_decoder(tied: bool) -> None:
    torch.manual_seed(0)
    model = Decoder(tied=tied).double()
    own = ForwardSplitter(model, lambda run: run(ids()))
    assert [name for name, _ in own.layers] == ["words", "drop", *(f"blocks.{at}" for at in range(4)), "norm", "head"]
    block = 2 * WIDTH + 2 * 12 * WIDTH + 12 + WIDTH
    weights = [(WORDS + LENGTH) * WIDTH, 0, block, block, block, block, 2 * WIDTH, WORDS * WIDTH]
    assert [weight for _, weight in own.layers] == weights
    padding = torch.tensor([[True, True, False], [True, True, True]])
    for count in (1, 7):
        for firsts in combinations(range(1, 8), count):
            stages = own.stages([0, *firsts])
            assert_same(model, stages, ids())
            assert_same(model, stages, ids(2, 3), padding=padding)
            assert find_ties(stages) == ([(("words.weight", 0), ("head.weight", count))] if tied else [])


def held(stage: nn.Module) -> set[str]:
    return {".".join(name.split(".")[:2]) for name, _ in stage.named_parameters()}


def test_what_a_stage_has_and_has_not() -> None:
    model = Decoder()
    first, second = split(model, at="blocks.2", sample=ids())
    assert isinstance(second, Decoder)
    assert held(first) == {"words.weight", "positions", "blocks.0", "blocks.1"}
    assert held(second) == {"blocks.2", "blocks.3", "norm.weight", "norm.bias", "head.weight"}
    assert [name for name, module in second.named_modules() if isinstance(module, Block)] == ["blocks.2", "blocks.3"]
    assert [block.kind for block in second.blocks] == ["full", "near", "full", "near"]
    assert second.get_submodule("blocks.3") is model.blocks[3]
    assert list(second.blocks)[2:] == list(model.blocks)[2:] == second.blocks[2:]
    # what stands for the parameter of another stage is not saved
    assert ["positions" in stage.state_dict() for stage in (first, second)] == [True, False]
    assert second.positions.eq(0).all()
    # a buffer that nobody uses is kept in one place
    assert ["seen" in stage.state_dict() for stage in (first, second)] == [False, True]
    with pytest.raises(ScheduleError, match=r"'words' is in another pipeline stage"):
        second.words(ids())
    # who looks for the model's forward pass finds it, and the stage takes what comes
    assert inspect.unwrap(type(second).forward) is Decoder.forward
    assert list(inspect.signature(type(second).forward).parameters) == ["self", "args", "kwargs"]
    assert not hasattr(second, "generate")
    # what stood for results of the stage before is gone when this one computes
    seen: list[int] = []
    watch = lambda module, args: seen.append(len(WATCHER.get()._zeros))  # type: ignore[union-attr]  # noqa: E731
    hook = second.blocks[2].register_forward_pre_hook(watch)
    run_all([first, second], ids())
    hook.remove()
    assert seen == [0]
    # the model is as it was, and runs
    assert model(ids()).shape == (3, 5, 11)


@pytest.mark.parametrize("at", ["blocks.2", "blocks.3"])
def test_what_comes_after_all_cuts_keeps_its_class(at: str) -> None:
    model = Decoder(tied=False)
    split(model, at=at, sample=ids())
    caught = [name for name, module in model.named_modules() if isinstance(module, WatchedUnit)]
    assert caught == ["words", "drop", *(f"blocks.{index}" for index in range(4))]
    assert [type(model.norm), type(model.head)] == [nn.LayerNorm, nn.Linear]


def every_cut(model: nn.Module, names: list[str], x: Tensor) -> list[list[nn.Module]]:
    """The stages by each possible cut, all of them right."""
    own = ForwardSplitter(model, lambda run: run(x))
    assert [name for name, _ in own.layers] == names
    found = []
    for cuts in (cuts for count in (1, 2) for cuts in combinations(range(1, len(names)), count)):
        found.append(own.stages([0, *cuts]))
        assert_same(model, found[-1], x)  # at once: later stages have more calls caught
    return found


def test_what_a_layer_returns_beside_goes_along_to_the_one_that_is_given_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    for stages in every_cut(Aside().double(), ["first", "layers.0", "layers.1", "layers.2", "head"], x):
        for name, layer in (("scale", "first"), ("shift", "layers.0")):
            holders = [stage for stage in stages if name in dict(stage.named_parameters())]
            assert [f"{layer}.inner.0.weight" in dict(stage.named_parameters()) for stage in holders] == [True]


def test_a_buffer_under_two_names_is_saved_under_both_by_the_stage_that_uses_it() -> None:
    stages = split(Aside(), at=["layers.0", "head"], sample=torch.randn(3, WIDTH)).stages
    assert [sorted({"rate", "again"} & {*stage.state_dict()}) for stage in stages] == [["again", "rate"], [], []]


def test_what_is_made_before_a_cut_and_first_given_after_it_is_in_the_way() -> None:
    own = ForwardSplitter(Late(), lambda run: run(torch.randn(3, WIDTH)))
    assert [name for name, _ in own.layers] == ["stem", "join", "layers.1"]
    assert "'join' uses a value computed before 'layers.0'" in own.why_not("layers.0")
    assert own.why_not("join") == own.why_not("nowhere") == ""


def test_a_layer_that_runs_twice_is_in_both_stages_and_saved_by_the_first() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(3, WIDTH, dtype=torch.float64), Twofold().double()
    stages = every_cut(model, ["act", "act", "layers.1", "act", "layers.0", "act", "layers.1", "act"], x)[3]
    layer = WIDTH * WIDTH + WIDTH
    own = ForwardSplitter(model, lambda run: run(x))
    assert [weight for _, weight in own.layers] == [layer, WIDTH, layer, 0, layer, 0, layer, 0]
    assert [sorted({name.rpartition(".")[2] for name in stage.state_dict()}) for stage in stages] == [
        ["bias", "gain", "rate", "weight"],
        ["bias", "gain", "weight"],
    ]
    assert find_ties(stages) == [
        (("gain", 0), ("gain", 1)),
        *(
            ((f"layers.{at}.inner.0.{kind}", 0), (f"layers.{at}.inner.0.{kind}", 1))
            for at in range(2)
            for kind in ("weight", "bias")
        ),
    ]


def test_a_model_around_a_model() -> None:
    torch.manual_seed(0)
    model = Around().double()
    first, second = split(model, at="inner.blocks.2", sample=ids())
    assert_same(model, [first, second], ids())
    for name, at in (("inner.positions", 0), ("inner.seen", 1)):
        assert [name in stage.state_dict() for stage in (first, second)] == [at == 0, at == 1]


def test_what_is_made_of_a_result_goes_into_every_layer() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    every_cut(Gated().double(), ["stem", "pair", "layers.0", "layers.1", "layers.2"], x)
    hiding = Gated().double()
    hiding.notes = lambda gate: SimpleNamespace(flag=True, gate=gate)  # type: ignore[method-assign]
    with pytest.raises(
        ScheduleError,
        match=r"'layers\.0' is called with a SimpleNamespace that contains tensors, and such an object cannot be sent",
    ):
        split(hiding, num_stages=2, sample=x)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_goes_past_layers_is_in_the_way_of_every_cut(in_place: bool) -> None:
    own = ForwardSplitter(Residual(in_place), lambda run: run(torch.randn(3, WIDTH)))
    assert [name for name, _ in own.layers] == ["stem"]
    assert "'layers.1' uses a value computed before 'layers.0'" in own.why_not("layers.0")
    assert "returns a value computed before 'layers.2'" in own.why_not("layers.2")


def test_a_weight_by_the_name_of_a_layer_that_is_never_called() -> None:
    torch.manual_seed(0)
    model = Borrowing().double()
    stages = split(model, num_stages=3, sample=ids()).stages
    assert_same(model, stages, ids())
    assert "head.weight" in stages[2].state_dict()


def test_a_forward_pass_of_the_instance_is_run() -> None:
    torch.manual_seed(0)
    model = Decoder().double()
    model.forward = MethodType(lambda self, ids: 3 * Decoder.forward(self, ids), model)  # type: ignore[method-assign]
    stages = split(model, num_stages=2, sample=ids()).stages
    assert_same(model, stages, ids())
    model.forward = lambda ids: Decoder.forward(model, ids)  # type: ignore[method-assign,misc]
    assert len(split(model, num_stages=1, sample=ids())) == 1


def test_layers_in_a_dict_and_a_layer_inside_others() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    model = Keyed().double()
    every_cut(model, ["ends.first", "layers.0", "layers.1", "norm", "ends.last"], x)


def test_a_buffer_of_a_layer_is_for_that_layer() -> None:
    class Peeking(Decoder):
        def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
            rate = self.layer.rate if hasattr(self, "layer") else self.gains.rates[0]
            return super().forward(ids, padding) * rate

    model = Peeking().double()
    assert_same(
        model, split(model, num_stages=2, sample=ids()).stages, ids()
    )  # a layer without parameters is everywhere
    model.layer = Layer()
    with pytest.raises(ScheduleError, match=r"forward pass of Peeking uses 'rate', a buffer of 'layer', but only one"):
        split(model, num_stages=2, sample=ids())


def test_balance_counts_embedding_and_head() -> None:
    model = Decoder(tied=False)
    first, _, last = split(model, num_stages=3, sample=ids())
    counts = [sum(p.numel() for p in stage.parameters()) for stage in (first, last)]
    assert max(counts) <= sum(p.numel() for p in model.parameters()) * 0.45


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_values_go_along_and_a_weight_is_used_without_its_layer(num_stages: int) -> None:
    torch.manual_seed(0)
    model = Outer().double()
    stages = split(model, num_stages=num_stages, sample=ids())
    assert_same(model, stages.stages, ids())
    assert_same(model, stages.stages, ids(1, 4))
    assert [name for name, _ in stages.ties[0]] == ["table.weight", "table.weight"]
    weights = [weight for _, weight in ForwardSplitter(model, lambda run: run(ids())).layers]
    assert weights == [WORDS * WIDTH, *[WIDTH * WIDTH + WIDTH] * 4]  # the table once, though its weight is used again
    # "unused" is called nowhere: the last stage keeps it
    assert "unused.weight" in stages[-1].state_dict()
    assert all("unused.weight" not in stage.state_dict() for stage in stages.stages[:-1])


def test_results_of_long_before_go_along() -> None:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(3, WIDTH, dtype=torch.float64)
    for at in (["down.0"], ["down.1", "up.1"], ["up.0", "join.0", "up.1", "join.1"]):
        assert_same(model, split(model, at=at, sample=x).stages, x)


def test_a_cut_that_forward_reaches_across_is_refused_by_name() -> None:
    model, x = Net(in_forward=True), torch.randn(3, WIDTH)
    with pytest.raises(
        ScheduleError, match=r"no stage can begin with 'up\.0': .*'up\.1' uses a value computed before 'up\.0'"
    ):
        split(model, at="up.0", sample=x)
    with pytest.raises(ScheduleError, match=r"2 layers cannot make 4 stages.*stem, down\.0 \[C050\]$"):
        split(model, num_stages=4, sample=x)
    assert_same(model.double(), split(model, at="down.0", sample=x.double()).stages, x.double())
    with pytest.raises(ScheduleError, match=r"'nowhere' in at= is not a layer. The layers are words, drop, blocks"):
        split(Decoder(), at="nowhere", sample=ids())


def test_what_is_written_in_place_is_followed() -> None:
    torch.manual_seed(0)
    model, x = Writing().double(), torch.randn(3, WIDTH, dtype=torch.float64)
    own = ForwardSplitter(model, lambda run: run(x))
    assert [name for name, _ in own.layers] == ["stem", "layers.2", "layers.3"]
    assert "'layers.2' uses a value computed before 'layers.1'" in own.why_not("layers.1")
    with torch.no_grad():
        for firsts in ([0, 1], [0, 2], [0, 1, 2]):
            torch.testing.assert_close(run_all(own.stages(firsts), x), model(x), rtol=0, atol=0)


def test_what_cannot_be_cut_says_what_to_do() -> None:
    with pytest.raises(ScheduleError, match=r"Decoder is split into stages by its forward pass.*pass sample="):
        split(Decoder(), num_stages=2)
    with pytest.raises(ScheduleError, match=r"the order of the layers of a Bilinear is not known.*nn\.ModuleList"):
        split(nn.Bilinear(2, 2, 2), num_stages=2)
    with pytest.raises(ScheduleError, match=r"balance='time' needs an nn\.Sequential"):
        split(Decoder(), num_stages=2, balance="time", sample=ids())
    with pytest.raises(ScheduleError, match=r"layers of Telling.*do not give the same result.*pass it as an argument"):
        split(Telling(), num_stages=2, sample=torch.ones(2, WIDTH))
    hooked = Decoder()
    hooked.register_forward_hook(lambda module, args, result: None)
    with pytest.raises(ScheduleError, match="Decoder has hooks"):
        split(hooked, num_stages=2, sample=ids())

    class Choosing(Decoder):
        def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
            x = self.words(ids)
            return super().forward(ids) if x.sum() > 0 else x

    with pytest.raises(ScheduleError, match=r"cannot be recorded without its weights.*after 'words'"):
        split(Choosing(), num_stages=2, sample=ids())
    for name, where in (("blocks.1", "in 'blocks.1'"), ("drop", "in 'drop'"), ("", "before its first layer")):
        failing = Decoder()
        failing.get_submodule(name).forward = lambda *args, **kwargs: 1 // 0  # type: ignore[assignment]
        with pytest.raises(
            ScheduleError,
            match=rf"cannot be recorded without its weights.*\. The pass raised ZeroDivisionError {where}:",
        ):
            split(failing, num_stages=2, sample=ids())
    odd = Decoder()
    odd.blocks[1].forward = lambda *args, **kwargs: SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(ScheduleError, match=r"'blocks.1' returns a SimpleNamespace, which cannot be sent"):
        split(odd, num_stages=2, sample=ids())
    assert WATCHER.get() is None


def test_another_order_of_calls_is_an_error_by_name() -> None:
    class Skipping(Decoder):
        skips = False

        def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
            x = self.words(ids)
            for at, block in enumerate(self.blocks):
                if not (self.skips and at == 1):
                    x = block(x, torch.ones_like(x, dtype=torch.bool), self.gains(x)[at])
            return self.head(x)

    stages = split(Skipping(), num_stages=2, sample=ids())
    for stage in stages:
        stage.skips = True
    with pytest.raises(ScheduleError, match=r"calls 'blocks\.2' where 'blocks\.1' was expected"):
        run_all(stages.stages, ids())
    x = torch.randn(3, WIDTH)
    stages = split(Twofold(), num_stages=2, sample=x)
    for stage in stages:
        stage.once_more = True
    with pytest.raises(ScheduleError, match=r"calls 'act' where no call was expected"):
        run_all(stages.stages, x)
    assert WATCHER.get() is None


def test_on_the_meta_device_and_under_a_copy() -> None:
    torch.manual_seed(0)
    real = Decoder().double()
    with torch.device("meta"):
        model = Decoder().double()
    stages = split(model, num_stages=3, sample=ids())
    assert all(parameter.is_meta for stage in stages for parameter in stage.parameters())
    assert stages[1].positions.device.type == "cpu"
    assert stages.ties == split(real, num_stages=3, sample=ids()).ties
    state = real.state_dict()
    for stage in stages:
        stage.to_empty(device="cpu")
        stage.load_state_dict({key: state[key] for key in stage.state_dict()})
        stage.gains.rates.copy_(real.gains.rates)
    torch.testing.assert_close(run_all(stages.stages, ids()), real(ids()), rtol=0, atol=0)
    model.norm = nn.LayerNorm(WIDTH).double()  # a model only some of which is there cannot be run, but cut
    assert len(split(model, num_stages=3, sample=ids())) == 3
    copies = [copy.deepcopy(stage) for stage in stages]
    torch.testing.assert_close(run_all(copies, ids()), real(ids()), rtol=0, atol=0)


def test_dropout_is_drawn_once() -> None:
    model = Decoder(dropout=0.5).double()
    stages = split(model, num_stages=3, sample=ids())
    torch.manual_seed(1)
    expected = model(ids())
    torch.manual_seed(1)
    torch.testing.assert_close(run_all(stages.stages, ids()), expected, rtol=0, atol=0)


def test_a_stage_keeps_no_weight_of_another_alive() -> None:
    model = Decoder(tied=False)
    other = weakref.ref(model.blocks[0].up.weight)
    last = split(model, num_stages=2, sample=ids())[-1]
    del model
    gc.collect()
    assert other() is None
    assert last.head.weight.numel()


class Model(nn.Module):
    """With these children."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return x


def block() -> nn.Module:
    return Model(linear=nn.Linear(2, 2))


SHARED = nn.Linear(2, 2)
UNITS: dict[str, tuple[Model, list[str]]] = {
    "a list": (Model(a=nn.Linear(2, 2), h=nn.ModuleList([block()]), b=nn.Linear(2, 2)), ["a", "h.0", "b"]),
    "a row of two": (Model(h=nn.Sequential(block(), block())), ["h.0", "h.1"]),
    "a row of one": (Model(h=nn.Sequential(block())), []),
    "a row of two kinds": (Model(h=nn.Sequential(block(), nn.Sequential(nn.Linear(2, 2)))), []),
    "a row with others": (Model(h=nn.Sequential(block(), nn.Linear(2, 2), block(), block())), [f"h.{at}" for at in range(4)]),
    "two kinds of two": (
        Model(h=nn.Sequential(nn.Sequential(nn.Linear(2, 2)), block(), block())),
        ["h.0", "h.1", "h.2"],
    ),
    "plain layers": (Model(a=nn.Linear(2, 2), h=nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])), ["a", "h.0", "h.1"]),
    "plain layers beside blocks": (Model(h=nn.ModuleList([block()]), n=nn.ModuleList([nn.LayerNorm(2)])), ["h.0", "n.0"]),
    "plain layers inside a model": (Model(inner=Model(h=nn.ModuleList([nn.Linear(2, 2)]))), ["inner.h.0"]),
    "no layers in a list": (Model(h=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), []),
    "no parameters": (Model(h=nn.ModuleList([Model(act=nn.ReLU())])), []),
    "blocks inside blocks": (Model(h=nn.ModuleList([Model(h=nn.ModuleList([block(), block()]))])), ["h.0"]),
    "lists of lists": (Model(h=nn.ModuleList([nn.ModuleList([block()]), nn.ModuleList([block()])])), ["h.0.0", "h.1.0"]),
    "a model inside": (Model(inner=Model(a=nn.Linear(2, 2), h=nn.ModuleList([block()]))), ["inner.a", "inner.h.0"]),
    "a dict": (Model(d=nn.ModuleDict({"a": nn.Linear(2, 2), "h": nn.ModuleList([block()])})), ["d.a", "d.h.0"]),
    "one layer by two names": (Model(a=SHARED, h=nn.ModuleList([block()]), b=Model(c=SHARED)), ["a", "h.0", "b"]),
    "a layer that is in a list too": (Model(a=SHARED, d=nn.ModuleDict({"b": SHARED}), h=nn.ModuleList([block()])), ["a", "h.0"]),
}  # fmt: skip


@pytest.mark.parametrize("name", UNITS)
def test_the_calls_that_a_forward_pass_is_made_of(name: str) -> None:
    model, names = UNITS[name]
    assert list(units_of(model)) == names
    assert all(unit is model.get_submodule(name) for name, unit in units_of(model).items())


def test_what_a_last_stage_gives() -> None:
    logits, loss = torch.ones(2), torch.zeros(())
    assert result_of(logits) is logits
    assert result_of(SimpleNamespace(logits=logits)) is logits
    assert result_of(SimpleNamespace(logits=logits, loss=loss)) == {"loss": loss, "logits": logits}
    output = SimpleNamespace(logits=None, loss=loss)
    assert result_of(output) is output

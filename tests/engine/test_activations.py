"""Blocks that compute their activations again: the same steps, fewer kept tensors, under every kind of parallelism."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade._launch import launch
from colonnade.config.settings import ActivationSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine import activations
from colonnade.engine.activations import apply_activations, release_blocks
from colonnade.engine.build import initialize
from colonnade.errors import ConfigError
from colonnade.models import GPT, MoEGPT
from colonnade.parallel.split import split
from colonnade.testing import compare, gather_weights
from tests.engine.twins import twins
from tests.ranks import on_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.last = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.last(x).mean()


class Ops(TorchDispatchMode):
    """Counts the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen[name] = self.seen.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def _passed(given: Any) -> tuple[dict[str, Tensor], dict[str, int], int]:
    """Gradients, the ops of a forward and backward pass, and the elements that forward keeps outside of blocks' recomputing."""
    torch.manual_seed(0)
    model = Model()
    apply_activations(model, ActivationSettings.read(given), [model])
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    torch.manual_seed(1)
    with Ops() as ops:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.ones(32, 8))
        loss.backward()
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    elements = sum(tensor.numel() for at, tensor in kept.items() if at not in owned)
    release_blocks(model)
    assert all(type(block) is Block for block in model.blocks)
    assert all(name in dict(Model().named_parameters()) for name, _ in model.named_parameters())
    return {name: parameter.grad for name, parameter in model.named_parameters()}, ops.seen, elements


def test_the_same_gradients_with_fewer_kept_tensors():
    wanted, plain, most = _passed(None)
    found = {name: _passed(given) for name, given in {
        "full": "full", "every 2": {"every": 2}, "selective": "selective", "one op": {"mode": "selective", "keep": ["aten.gelu"]},
        "one overload": {"mode": "selective", "keep": "aten.gelu.default"},
    }.items()}  # fmt: skip
    for gradients, _, _ in found.values():
        for name, gradient in gradients.items():
            assert torch.equal(gradient, wanted[name]), name
    again = {name: (ops["addmm"] - plain["addmm"], ops["gelu"] - plain["gelu"]) for name, (_, ops, _) in found.items()}
    # The last product of a block is not needed again.
    assert again == {"full": (5, 5), "every 2": (3, 3), "selective": (0, 5), "one op": (5, 0), "one overload": (5, 0)}
    assert found["full"][2] < found["every 2"][2] < most


def test_what_a_block_keeps_goes_to_the_host_if_wanted(monkeypatch):
    """A GPU has to be there to take it from; here, for which parameters each block asks."""
    asked: list[int] = []

    def kept_on_host(parameters: Any) -> Any:
        asked.append(len(list(parameters)))
        return nullcontext()

    wanted, plain, _ = _passed(None)
    monkeypatch.setattr(activations, "kept_on_host", kept_on_host)
    for given, blocks, again in (({"offload": True}, 5, 0), ({"mode": "full", "offload": True}, 5, 5), ("full", 0, 5)):
        asked.clear()
        gradients, ops, _ = _passed(given)
        assert (asked, ops["gelu"] - plain["gelu"]) == ([4] * blocks, again), given
        assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        (False, {}),
        (True, {"mode": "full"}),
        ("selective", {"mode": "selective"}),
        ({}, {"mode": "full"}),
        ({"offload": True}, {"offload": True}),
        ({"offload": False, "every": None}, {"mode": "full"}),
        ({"offload": True, "mode": "full", "every": 2}, {"mode": "full", "offload": True, "every": 2}),
        ({"blocks": "Block"}, {"mode": "full", "blocks": ("Block",)}),
        (
            {"mode": "selective", "keep": ["aten.mm"], "blocks": ["a", "b"]},
            {"mode": "selective", "keep": ("aten.mm",), "blocks": ("a", "b")},
        ),
    ],
    ids=str,
)
def test_what_a_config_says(given, expected):
    assert ActivationSettings.read(given) == ActivationSettings(**expected)


class Lists(nn.Module):
    """Blocks of one class in a list, one of another class beside them, and one outside of the list."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(Block() for _ in range(count)), nn.Sequential(nn.Linear(2, 2))])
        self.empty = nn.ModuleList(nn.Sequential(nn.ReLU()) for _ in range(3))
        self.extra = Block()


def test_a_class_of_blocks_comes_twice_or_elsewhere_in_the_model(monkeypatch):
    said: list[str] = []
    logger = SimpleNamespace(info=said.append, warning=lambda message: said.append(f"warning: {message}"))
    monkeypatch.setattr(activations, "get_dist_logger", lambda: logger)

    def found(model: nn.Module, given: Any = "full", **more: Any) -> list[str]:
        apply_activations(model, ActivationSettings.read(given), [model], **more)
        return [name for name, module in model.named_modules() if vars(module).get("_colonnade_runs")]

    assert found(Lists(2)) == ["blocks.0", "blocks.1"]
    with pytest.raises(ConfigError, match="two or more members of one class"):
        found(Lists(1))
    # A stage of a pipeline may have one block, or none.
    assert found(Lists(1), complete=False) == ["blocks.0", "blocks.1"]
    assert found(Lists(2), {"blocks": ["extra", "blocks.1"], "offload": True}) == ["blocks.1", "extra"]
    assert found(nn.Linear(2, 2), complete=False) == []
    without = nn.Sequential(nn.Linear(2, 2))
    apply_activations(without, ActivationSettings.read("full"), [without, Lists(2)])
    *of_blocks, warning = said
    assert of_blocks == [
        "activation_checkpoint: mode 'full', 2 of 2 blocks (Block)",
        "activation_checkpoint: mode 'full', 2 of 2 blocks (Block, Sequential)",
        "activation_checkpoint: mode 'none', 2 of 2 blocks (Block), offloaded to the host",
    ]
    assert warning.startswith("warning: activation_checkpoint finds no blocks")
    assert warning.endswith("the classes are Linear (in the stage of this rank)")


def test_what_is_a_block():
    def found(model: nn.Module, **given: Any) -> list[str]:
        apply_activations(model, ActivationSettings.read({"mode": "full", **given}), [model])
        return [name for name, module in model.named_modules() if vars(module).get("_colonnade_runs")]

    gpt = GPT(16, 8, 16, 4, 3, context=ParallelContext())
    assert found(gpt, every=2) == ["blocks.0", "blocks.2"]
    assert found(Model(), blocks=["Block"]) == [f"blocks.{at}" for at in range(5)]
    assert found(Model(), blocks="blocks.[34]") == ["blocks.3", "blocks.4"]
    assert found(Model(), blocks=["last"]) == ["last"]
    nested = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), nn.Sequential(nn.Linear(2, 2))
    )
    assert found(nested) == ["0", "1"]
    with torch.no_grad():
        gpt(torch.zeros(1, 8, dtype=torch.int64))


def test_applied_again_and_copied_a_block_is_computed_again_once():
    model = Model()
    for _ in range(2):
        apply_activations(model, ActivationSettings.read("selective"), [model])
    ran: list[int] = []
    for block in (twin := copy.deepcopy(model)).blocks:
        block.inner.register_forward_pre_hook(lambda *_: ran.append(1))
    twin(torch.ones(2, 8)).backward()
    assert len(ran) == 10
    apply_activations(model, ActivationSettings.read(None), [model])
    assert all(type(block) is Block for block in model.blocks)


def test_bad_settings_are_refused_by_name():
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"finds no blocks in the model.*classes of the model are Linear, Sequential"):
        apply_activations(plain, ActivationSettings.read("full"), [plain])
    with pytest.raises(ConfigError, match=r"blocks=\['Linar'\] matches no module.*Did you mean.*Linear"):
        apply_activations(plain, ActivationSettings.read({"blocks": ["Linar"]}), [plain])
    with pytest.raises(ConfigError, match=r"no op 'aten\.matmull'"):
        apply_activations(plain, ActivationSettings.read({"mode": "selective", "keep": ["aten.matmull"]}), [plain])
    with pytest.raises(ConfigError, match="keep requires mode='selective'"):
        ActivationSettings.read({"mode": "full", "keep": ["aten.mm"]})
    with pytest.raises(ConfigError, match="activation_checkpoint"):
        launch({"activation_checkpointing": True}, context=ParallelContext(), verbose=False)


PIPELINE = {"schedule": {"type": "OneFOneB", "num_microbatches": 2}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor": ({"tensor": {"size": 2, "mode": "1d", "sequence_split": True}}, {}),
    "pipeline": ({"pipeline": 2}, PIPELINE),
    "zero bubble": ({"pipeline": 2}, {"schedule": {"type": "ZBV", "num_microbatches": 4}}),
    "zero 1": ({}, {"zero": 1}),
    "zero 2": ({}, {"zero": 2}),
    "zero 3": ({}, {"zero": 3}),
    "experts": ({"expert": 2}, {}),
    "experts, zero 3": ({"expert": {"size": 2}, "data": 2}, {"zero": 3}),
    "compiled": ({}, {"compile": {"backend": "aot_eager"}}),
    "sequence": ({"sequence": 2}, {}),
}


MODES = {
    "zero 1": ("full",),
    "zero 2": ("selective",),
    "pipeline": ("selective",),
    "zero bubble": ("full",),
    "compiled": ("selective",),
}


def _weights(case: str, mode: Any) -> tuple[dict[str, Tensor], int]:
    """After two steps; and how often the blocks of this rank ran in them."""
    parallel, options = CASES[case]
    config = {"parallel": parallel, "seed": 3, "clip_grad_norm": 1.0, "activation_checkpoint": mode, **options}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        sizes: Any = (16, 8, 16, 4, 2)
        if "experts" in case:
            model: Any = MoEGPT(*sizes, 4, every=1, dropout=0.2, context=gpc).double()
        else:
            model = GPT(*sizes, tied=False, dropout=0.2, context=gpc).double()
        ran: list[int] = []
        for block in model.blocks:
            block.first_norm.register_forward_hook(lambda *_: ran.append(1))
        stages = split(model, num_stages=4 if case == "zero bubble" else 2) if "pipeline" in parallel else model
        engine = initialize(
            stages, lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3), model.criterion(), verbose=False, context=gpc
        )[0]
        at = gpc.get_local_rank(ParallelMode.DATA)
        for step in range(2):
            tokens = torch.randint(0, 16, (4, 9), generator=torch.Generator().manual_seed(10 * step + at))
            engine.zero_grad()
            engine.execute_schedule(iter([(tokens[:, :-1], tokens[:, 1:])]), return_output_label=False)
            engine.step()
        weights = gather_weights(engine.model, gpc)
        engine.close()
        return weights, len(ran)


FAST, SLOW = ("tensor",), ("zero 3", "pipeline", "zero bubble", "experts", "compiled", "sequence")
TIERS = [
    FAST,
    pytest.param(SLOW, marks=pytest.mark.slow),
    pytest.param([case for case in CASES if case not in FAST + SLOW], marks=pytest.mark.long),
]


@pytest.mark.parametrize("cases", TIERS, ids=["fast", "slow", "long"])
@on_ranks(2, timeout=110)
def test_the_same_steps_under_every_kind_of_parallelism(cases: Sequence[str]):
    """Dropout and all: the masks come again."""
    for case in cases:
        wanted, once = _weights(case, None)
        for mode in MODES.get(case, ("full", "selective")):
            found, ran = _weights(case, mode)
            compare(wanted, found, 1e-12)
            if case != "compiled":  # there, only what is traced runs
                assert ran == 2 * once, (case, mode, once, ran)


class Scaled(nn.Module):
    """A block with a parameter of its own beside two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x))) * self.scale


@on_ranks(2)
def test_parameters_are_gathered_inside_blocks_that_keep_chosen_ops():
    """Zero 3 gathers what is inside the blocks by itself, ahead too: other ops run where a block is computed again."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(OrderedDict(blocks=nn.Sequential(Scaled(), Scaled()), head=nn.Linear(8, 2))).double()

    def loss(model: Any, rank: int, step: int) -> Tensor:
        return (
            model(torch.randn(2, 8, generator=torch.Generator().manual_seed(2 * step + rank)).double()).square().mean()
        )

    for zero in ({"wrap": "blocks.*"}, {"wrap": "*.inner", "prefetch": 3}, {"wrap": ["blocks.0*"], "prefetch": 1}):
        config = {"zero": {"stage": 3, **zero}, "activation_checkpoint": "selective"}
        with twins(config, build, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 1e-12) as both:
            for step in range(2):
                both.train(loss, step)
                both.follow(loss, step)

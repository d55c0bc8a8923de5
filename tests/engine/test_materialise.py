"""A model built inside meta_init(): under every layout the weights of one process, and no rank ever holds the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.config.settings import ZeroSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.errors import GradientError, PlacementError
from colonnade.models import GPT
from colonnade.nn.layer import Embedding, arrange
from colonnade.optim.zero import fsdp
from colonnade.optim.zero.formula import bytes_held
from colonnade.parallel.boxes import full_box
from colonnade.parallel.meta import meta_init, parameter_inits
from colonnade.parallel.placement import Shard, local_part, place
from colonnade.parallel.split import split
from colonnade.parallel.whole import locate_tensors
from colonnade.testing import compare as compare_weights
from colonnade.testing import run_world
from tests.models.grid import MODELS as OURS
from tests.parallel.meta.test_meta_init import Everything
from tests.ranks import on_ranks


def odd_gpt(**options: Any) -> GPT:
    """The vocabulary cannot be cut evenly."""
    return GPT(19, 8, 16, 4, 2, tied=False, **options)


class Local(nn.Module):
    """Each rank draws just its own rows, and says which they are; and a table of which one row is zero."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        mode = ParallelMode.TENSOR
        ranks = context.get_world_size(mode) if context.is_initialized(mode) else 1
        self.weight = nn.Parameter(torch.empty(8 // ranks, 6))
        nn.init.xavier_normal_(self.weight, gain=float(ranks) ** 0.5)
        nn.init.trunc_normal_(self.weight, std=0.5)
        self.table = Embedding(12, 4, padding_idx=5, arrangement=arrange(context))
        if ranks > 1:
            place(self.weight, {mode: Shard(0)})


MODELS: dict[str, Callable[..., nn.Module]] = {
    **OURS,
    "odd GPT": odd_gpt,
    "local": Local,
    "plain": lambda **options: nn.Sequential(Everything(), nn.Linear(7, 9)),
}
Case = tuple[str, dict[str, Any], dict[str, Any]]


def _1d(size: int) -> dict[str, Any]:
    return {"tensor": {"size": size, "mode": "1d"}}


INTERLEAVED = {"schedule": {"type": "Interleaved1F1B", "num_microbatches": 2, "num_chunks": 2}}
ON_FOUR: list[Case] = [
    ("GPT, tied", {}, {"zero": 3}),
    ("GPT, tied", _1d(4), {}),
    ("GPT, tied", {"tensor": {"size": 4, "mode": "2d"}}, {}),
    ("GPT, tied", {"pipeline": 2}, {"num_microbatches": 2, "zero": 3}),
    ("GPT", {"pipeline": 2, **_1d(2)}, INTERLEAVED),
    ("GPT, tied", {"pipeline": 2}, {**INTERLEAVED, "zero": 3}),
    ("odd GPT", _1d(4), {}),
    ("odd GPT", _1d(2), {"zero": 3}),
    ("MoE-GPT", {"expert": 4}, {"zero": 2}),
    ("Llama, experts", {"expert": 2, **_1d(2)}, {"zero": 3}),
    ("Llama, tied", {"pipeline": 2}, {"num_microbatches": 2, "zero": 3, "bf16": True}),
    ("ViT", {"sequence": 2}, {}),
    ("local", _1d(2), {"zero": 3}),
    ("plain", {}, {"zero": 3}),
    ("plain", {}, {"zero": 2, "bf16": {"master_weights": False}}),
]
ON_EIGHT: list[Case] = [
    ("GPT, tied", {}, {}),
    ("GPT, tied", {"tensor": {"size": 4, "mode": "2.5d", "depth": 1}}, {"zero": 1}),
    ("MoE-GPT", {"expert": 2, **_1d(2)}, {}),
    ("MoE-GPT", {"expert": 2}, {"zero": 3}),
    ("local", _1d(4), {}),
    ("GPT, tied", {"tensor": {"size": 8, "mode": "3d"}}, {}),
    ("GPT", {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, {}),
    ("MoE-GPT", {"expert": 2, "pipeline": 2, **_1d(2)}, {"num_microbatches": 2, "zero": 3}),
]


def start(case: Case, gpc: ParallelContext) -> Any:
    name, _, config = case
    with meta_init():
        model: Any = MODELS[name](context=gpc)
    if gpc.pipeline_parallel_size > 1:
        model = split(model, num_stages=gpc.pipeline_parallel_size * (2 if "schedule" in config else 1))
        return initialize(model, torch.optim.AdamW, context=gpc)[0]
    return initialize(model, torch.optim.AdamW(model.parameters()), context=gpc)[0]


def alone(name: str) -> dict[str, Tensor]:
    """The weights of one process."""
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        model = start((name, {}, {}), gpc).model
        return {key: value.detach() for key, value in model.named_parameters(remove_duplicate=False)}


def compare(cases: list[Case], truth: dict[str, dict[str, Tensor]]) -> None:
    """This rank's part of every parameter is the same part of one process's, to the last bit."""
    for case in cases:
        name, parallel, config = case
        with launch({"parallel": parallel, **config}, context=ParallelContext(), verbose=False) as gpc:
            engine = start(case, gpc)
            for parameter in engine.model.parameters():
                assert not parameter.is_meta
            _compare_whole(engine, truth[name], case)
            for tensor in locate_tensors(engine.model, gpc, "compare"):
                if tensor.names[0] in truth[name]:
                    whole = truth[name][tensor.names[0]].view(tensor.shape)
                    for box, here in tensor.pieces(tensor.local):
                        part = whole[box.slices_in(full_box(tensor.shape))]
                        assert torch.equal(here, part.to(here.dtype)), (case, tensor.names)


def _compare_whole(engine: Any, truth: dict[str, Tensor], case: Case) -> None:
    """What the engine gives as wholes is one process's, under all names: on every rank, or on the first."""
    found = engine.full_state_dict()
    first = engine.full_state_dict("first", dtype=torch.float64) if case in ON_FOUR[:4] else {}
    assert truth.keys() <= found.keys(), (case, truth.keys() - found.keys())
    if first or engine.context.get_global_rank():
        assert first.keys() == (found.keys() if engine.context.get_global_rank() == 0 else set())
    for name, value in found.items():
        if name in truth:
            assert torch.equal(value, truth[name].view(value.shape).to(value)), (case, name)
        if name in first:
            assert torch.equal(first[name], value.double() if value.is_floating_point() else value), (case, name)


def trained(config: dict[str, Any], ranks: int) -> dict[str, Tensor]:
    """The weights, whole, after three steps; each of `ranks` has its rows of the batch."""
    rows = torch.linspace(-1, 1, 8 * 7, dtype=torch.float64).view(8, 7)
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        with meta_init():
            model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Linear(5, 1)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        seen: list[int] = []
        model[0].weight.register_hook(lambda grad: seen.append(0))
        model[2].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(1))
        engine = initialize(model, optimizer, context=gpc)[0]
        at = gpc.get_global_rank() * 8 // ranks
        for _ in range(3):
            engine.zero_grad()
            engine.backward(engine(rows[at : at + 8 // ranks]).square().mean())
            engine.step()
        assert sorted(seen) == [0] * 3 + [1] * 3
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in model.named_parameters()
        }


def check_four(truth: dict[str, dict[str, Tensor]], weights: dict[str, Tensor]) -> None:
    compare(ON_FOUR, truth)
    for config in ({"zero": 3}, {"zero": 2}):
        torch.testing.assert_close(trained(config, 4), weights, rtol=1e-10, atol=1e-12)
    check_differing()


def check_differing() -> None:
    """Nothing is broadcast, so ranks that initialise otherwise are told."""
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        for what in ("std", "device"):
            with meta_init():
                model = nn.Sequential(nn.Linear(4, 4))
                nn.init.normal_(model[0].weight, std=1.0 + gpc.get_global_rank() * (what == "std"))
            if what == "device" and gpc.get_global_rank() == 1:
                model = nn.Sequential(nn.Linear(4, 4))
            said = r"agree on the start of '0\.weight': normal\(0.0, 1.0\) on rank 0, .* on rank 1"
            with pytest.raises(PlacementError, match=said):
                initialize(model, torch.optim.AdamW, context=gpc)


@pytest.mark.slow
def test_four_ranks_start_as_one_process_and_train_like_it():
    truth = {name: alone(name) for name in dict.fromkeys(name for name, *_ in ON_FOUR)}
    run_world(4, check_four, truth, trained({}, 1))


@pytest.mark.long
def test_eight_ranks_start_as_one_process():
    truth = {name: alone(name) for name in dict.fromkeys(name for name, *_ in ON_EIGHT)}
    run_world(8, compare, ON_EIGHT, truth)


SIMULATED: list[tuple[int, dict[str, Any], int]] = [(0, {}, 64), (37, _1d(8), 8), (63, {"pipeline": 4, **_1d(4)}, 4)]
"""(rank of 64, layout, the ranks that shard a parameter)"""


@pytest.mark.parametrize(("rank", "parallel", "ranks"), SIMULATED, ids=str)
def test_70_g_parameters_on_64_simulated_ranks_take_the_bytes_of_the_formula(rank, parallel, ranks, monkeypatch):
    """Of what a rank would hold nothing is allocated, and there are no other ranks: torch's fake group answers for them."""
    monkeypatch.setattr(fsdp._Units, "watch", lambda *_: None)  # compares the ranks over gloo, which is not fake
    debug = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=64)
    try:
        with launch({"parallel": parallel}, context=ParallelContext(), verbose=False) as gpc:
            with meta_init():
                whole = GPT(32768, 4096, 16384, 128, 22, context=gpc)
            stages = split(whole, num_stages=gpc.pipeline_parallel_size)
            model = stages[gpc.get_local_rank(ParallelMode.PIPELINE)]
            numel = sum(parameter.numel() for parameter in model.parameters())
            assert len(parameter_inits(stages)) == sum(1 for _ in whole.parameters())
            fsdp.shard_model(model, gpc, ZeroSettings(3))
            held = sum(local_part(parameter).nbytes for parameter in model.parameters())
            memory = sum(local_part(parameter).untyped_storage().nbytes() for parameter in model.parameters())
            assert held == memory == bytes_held(3, numel, ranks).parameters
            if not parallel:
                assert numel == sum(parameter.numel() for parameter in whole.parameters()) > 70e9
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(debug)


OF_STATE: dict[str, Callable[[Any], Any]] = {
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
    "Adam": lambda parameters: loaded(torch.optim.Adam(parameters)),
}


def loaded(optimizer: Any) -> Any:
    """With the state of a step of another one, which goes to the device of the parameters."""
    other = [nn.Parameter(torch.ones_like(p, device="cpu")) for p in optimizer.param_groups[0]["params"]]
    adam = torch.optim.Adam(other)
    for parameter in other:
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    optimizer.load_state_dict(adam.state_dict())
    return optimizer


@on_ranks(2)
def test_an_optimizer_with_state_of_parameters_without_memory_is_refused():
    """State that has no memory is refused for that reason at every stage; a function makes it where memory is."""
    for stage in (0, 1, 2, 3):
        with launch({"zero": stage, "seed": 3}, context=ParallelContext(), verbose=False) as gpc:
            for name, make in OF_STATE.items():
                with meta_init():
                    model = nn.Linear(4, 3)
                with pytest.raises(
                    GradientError,
                    match=rf"^{name} already has state .*meta_init.*Pass a function to initialize.*\[C034\]$",
                ):
                    initialize(model, make(model.parameters()), context=gpc)
            with meta_init():
                model = nn.Linear(4, 3)
            engine = initialize(model, OF_STATE["Adagrad"], context=gpc)[0]
            plain = nn.Linear(4, 3)
            plain.load_state_dict(engine.full_state_dict())
            adagrad = OF_STATE["Adagrad"](plain.parameters())
            rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
            engine.zero_grad()
            engine.backward(engine(rows[2 * gpc.get_global_rank() :][:2]).square().mean())
            engine.step()
            plain(rows).square().mean().backward()
            adagrad.step()
            compare_weights(plain.state_dict(), engine.full_state_dict(), 1e-5)
            engine.close()

"""torch.compile by config: the library's models compile block by block, without a break, and train as one process does."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.comm import torch_versions
from colonnade.comm.torch_versions import COMPILES_COLLECTIVES
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.engine.compile import blocks_of, compile_model
from colonnade.engine.schedule.graphed import graphed
from colonnade.engine.schedule.schedules import NonPipelineSchedule, OneFOneB
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.models import GPT, ViT
from colonnade.nn import CrossEntropyLoss
from colonnade.parallel.split import split
from colonnade.testing import compare, gather_weights, run_world
from tests.models.grid import MODELS, batch
from tests.nn.sequence.training import EPS, RTOL, give_weights, take_weights
from tests.ranks import on_ranks

TENSOR = {"tensor": {"size": 2, "mode": "1d"}}
EARLY = {"shared_memory": False, "overlap": True}
SPLIT = {"tensor": {"size": 2, "mode": "1d", "sequence_split": True}}
Case = tuple[str, dict[str, Any], int, str]
OVER_DATA: list[Case] = [
    ("Llama", {"data": 2}, 0, "aot_eager"),
    ("Llama", {"data": 2}, 1, "eager"),
    ("Llama", {"data": 2}, 2, "eager"),
    ("Llama", {"data": 2}, 3, "eager"),
    ("GPT, tied", {"data": 2}, 0, "eager"),
]
OVER_TENSOR: list[Case] = [("Llama", TENSOR, 0, "aot_eager"), ("ViT", SPLIT, 0, "eager")]


def _trained(cases: list[Case]) -> list[int]:
    """For each case, how many sums of gradients had begun when the first layer's gradient came in the last step."""
    early = []
    for name, parallel, zero, backend in cases:
        torch._dynamo.reset()
        config = {"parallel": parallel, "zero": zero, "clip_grad_norm": 1.0}
        config |= {"compile": {"backend": backend, "fullgraph": True}, "sync": {"bucket_mb": 0.01, **EARLY}}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model, plain = (MODELS[name](context=context).double() for context in (gpc, ParallelContext()))
            give_weights(plain)
            take_weights(model, dict(plain.named_parameters(remove_duplicate=False)), gpc)
            made = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.01, eps=EPS), model.criterion(), context=gpc)
            engine, adamw = made[0], torch.optim.AdamW(plain.parameters(), lr=0.01, eps=EPS)
            begun: list[int] = []
            next(engine.model.parameters()).register_post_accumulate_grad_hook(
                lambda _, engine=engine, begun=begun: begun.append(
                    sum(bucket.started for bucket in engine._sync.synchroniser.buckets)
                )
            )
            for step in range(2):
                parts = [batch(name, part, step) for part in range(gpc.data_parallel_size)]
                engine.zero_grad()
                engine.execute_schedule(iter([parts[gpc.get_local_rank(ParallelMode.DATA)]]), return_output_label=False)
                engine.step()
                x, y = (torch.cat(columns) for columns in zip(*parts, strict=True))
                adamw.zero_grad()
                plain.criterion()(plain(x), y).backward()
                nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
                adamw.step()
            compare(dict(plain.named_parameters()), gather_weights(engine.model, gpc), RTOL)
            engine.close()
            early.append(begun[-1])
    return early


@pytest.mark.slow
def test_models_compile_by_block_without_a_break_and_equal_one_process():
    """`fullgraph` makes a break an error. Buckets are full one after another, as they are without compiling."""
    for early in run_world(2, _trained, OVER_DATA, timeout=110).values:
        assert min(early[:3]) > 1, early  # at stage 3 FSDP has the gradients


@pytest.mark.slow
@pytest.mark.skipif(not COMPILES_COLLECTIVES, reason="refused with this torch")
def test_models_that_are_split_compile_without_a_break_too():
    run_world(2, _trained, OVER_TENSOR, timeout=110)


@on_ranks(2)
def test_a_torch_that_loses_sums_in_the_backward_pass_compiles_no_split_model():
    torch_versions.COMPILES_COLLECTIVES = False
    with launch({"parallel": TENSOR, "compile": True}, context=ParallelContext(), verbose=False) as gpc:
        model = GPT(16, 8, 16, 4, 2, context=gpc)
        with pytest.raises(
            ConfigError, match=r"omits all-reduces over .*TENSOR.* from the compiled backward.*torch 2.13 or later"
        ):
            initialize(model, torch.optim.SGD(model.parameters()), context=gpc)


@pytest.mark.parametrize(
    ("known", "size", "compiles", "refused"),
    [(True, 2, False, True), (True, 1, False, False), (False, 2, False, False), (True, 2, True, False)],
)
def test_only_sums_inside_a_model_are_lost(monkeypatch, known, size, compiles, refused):
    monkeypatch.setattr(torch_versions, "COMPILES_COLLECTIVES", compiles)
    context: Any = SimpleNamespace(is_initialized=lambda mode: known, get_world_size=lambda mode: size)
    with pytest.raises(ConfigError, match="omits all-reduces over") if refused else nullcontext():
        compile_model(nn.ModuleList(), None, True, context)


def test_blocks_are_the_members_of_the_outer_containers():
    gpt = GPT(16, 8, 16, 4, 2, context=ParallelContext())
    assert blocks_of(gpt) == [gpt.embedding, *gpt.blocks, gpt.head]
    vit = ViT(8, 2, 16, 4, 3, 8, context=ParallelContext())
    assert blocks_of(vit) == [vit.embedding, *vit.blocks, vit.head]
    stages = split(gpt, num_stages=2)
    assert [blocks_of(stage) for stage in stages] == [[gpt.embedding, gpt.blocks[0]], [gpt.blocks[1], gpt.head]]


def test_a_model_without_blocks_is_compiled_as_one():
    rows = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert blocks_of(rows) == [rows]
    layer = nn.Linear(2, 2)
    assert blocks_of(layer) == [layer]


class Seen:
    """A backend that counts the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [True, False])
def test_equal_blocks_are_compiled_once(blocks):
    torch._dynamo.reset()
    seen = Seen()
    options = {"backend": seen, "fullgraph": True, "blocks": blocks}
    with launch({"compile": options}, context=ParallelContext(), verbose=False) as gpc:
        model = MODELS["Llama"](context=gpc)
        made = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), model.criterion(), context=gpc)
        engine, (x, y) = made[0], batch("Llama", 0, 0)
        for _ in range(2):
            engine.zero_grad()
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
        truth = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        assert abs(engine.criterion(engine(x), y).item() - truth.item()) < 1e-5
        compiled = [module._compiled_call_impl is not None for module in (model, model.blocks, *model.blocks)]
        assert compiled == [not blocks, False, blocks, blocks]
        engine.close()
    assert seen.graphs == 4  # embedding, block, head; and the loss


def test_a_step_as_cuda_graphs_is_refused_on_a_cpu():
    said = {"step": "cuda_graph is not available here: a parameter or its state is on cpu", True: "the device is cpu"}
    for cuda_graph, message in said.items():
        with launch({"cuda_graph": cuda_graph}, context=ParallelContext(), verbose=False) as gpc:
            layer = nn.Linear(2, 2)
            with pytest.raises(ColonnadeError, match=message):
                initialize(layer, torch.optim.AdamW(layer.parameters()), context=gpc)


def test_what_cannot_be_recorded_is_named() -> None:
    gpu, default = torch.device("cuda"), NonPipelineSchedule()
    cases = [
        (default, (), torch.device("cpu"), 1, "the device is cpu"),
        (default, (), gpu, 2, "there are 2 ranks"),
        (OneFOneB(num_microbatches=2), (), gpu, 1, "the schedule is OneFOneB"),
        (default, [{"type": "Own"}], gpu, 1, "the gradient handler {'type': 'Own'} runs on the host"),
    ]
    for *given, message in cases:
        with pytest.raises(ConfigError, match=re.escape(f"cuda_graph=True is not available here: {message}")):
            graphed(*given)


@pytest.mark.parametrize(
    ("options", "given"),
    [(True, {}), ({"blocks": True}, {}), ({"blocks": False}, {}), ({"mode": "default", "dynamic": True}, None)],
)
def test_what_is_compiled_and_with_which_options(monkeypatch, options, given):
    compiled: list[tuple[nn.Module, dict[str, Any]]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append((self, options)))
    gpt = GPT(16, 8, 16, 4, 2, context=ParallelContext())
    counted, mean = CrossEntropyLoss(reduction="sum_and_count"), CrossEntropyLoss()
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        compile_model(gpt, nn.ModuleList([counted, mean, nn.CrossEntropyLoss(reduction="sum")]), options, gpc)
    by_block = not isinstance(options, dict) or options.get("blocks", True)
    assert [module for module, _ in compiled] == [counted, *(blocks_of(gpt) if by_block else [gpt])]
    assert all(each == (options if given is None else given) for _, each in compiled)


def test_each_chunk_of_a_stage_is_compiled(monkeypatch):
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append(self))
    chunks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        compile_model(chunks, None, {"blocks": False}, gpc)
    assert compiled == [*chunks]

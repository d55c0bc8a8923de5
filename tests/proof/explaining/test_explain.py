"""What is explained without a process is what a run does."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colonnade._launch import launch
from colonnade.config import load_config
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.models import MoEGPT
from colonnade.parallel.held import held_tensors
from colonnade.parallel.placement import Replicate, place
from colonnade.parallel.split import Split, split
from colonnade.proof.explain import Explanation, ParameterClass, explain
from colonnade.registry import GRADIENT_HANDLER
from colonnade.testing import run_world


def moe(context: ParallelContext) -> Split | nn.Module:
    model = MoEGPT(16, 8, 16, 2, 4, 2, context=context)
    stages = context.pipeline_parallel_size
    return split(model, num_stages=stages) if stages > 1 else model


class SumsItself(torch.optim.SGD):
    """An optimizer that sums gradients in its own way."""

    def sync_grad(self) -> None: ...


def test_the_handler_of_an_optimizer_that_sums_gradients_itself_is_explained() -> None:
    told = explain(
        load_config({}),
        2,
        lambda: nn.Linear(4, 4),
        context=ParallelContext(),
        optimizer=lambda held: SumsItself(held, lr=0.1),
    )
    (sums,) = [each for one in told.classes for each in one.sums]
    assert (sums.handler, sums.why_handled) == (
        "ZeROGradientHandler",
        "attached automatically: the optimizer reduces gradients itself, in sync_grad()",
    )
    named = explain(
        load_config({"gradient_handler": ["ZeROGradientHandler"]}),
        2,
        lambda: nn.Linear(4, 4),
        context=ParallelContext(),
        optimizer=lambda held: SumsItself(held, lr=0.1),
    )
    assert [each.why_handled for one in named.classes for each in one.sums] == ["named in the config"]
    assert named.notes == told.notes


LAYOUTS: dict[str, dict[str, Any]] = {
    "experts in a pipeline": {"parallel": {"pipeline": 2, "expert": 2}, "num_microbatches": 2},
    "experts and tensor": {"parallel": {"tensor": {"size": 2, "mode": "1d"}, "expert": 2}},
    "tensor in a pipeline": {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, "num_microbatches": 2},
    "interleaved": {
        "parallel": {"pipeline": 2},
        "schedule": {"type": "Interleaved1F1B", "num_microbatches": 2, "num_chunks": 2},
    },
    "sharded": {"parallel": {"expert": 2}, "zero": 3},
    "tensor 2d": {"parallel": {"tensor": {"size": 4, "mode": "2d"}}},
}


def built(context: ParallelContext) -> Split | nn.Module:
    chunks = (context.config.get("schedule") or {}).get("num_chunks", 1)
    if chunks == 1:
        return moe(context)
    return split(MoEGPT(16, 8, 16, 2, 4, 2, context=context), num_stages=2 * chunks)


def as_it_runs(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every parameter on every rank: the sums that the ledger has, the holders, and who reduces."""
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(built(gpc), lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
        rows: dict[str, list[Any]] = {}
        for row in engine.ledger().rows:
            rows.setdefault(row.parameter, []).append([row.mode, list(row.ranks), row.divisor, row.done_by])
        found = [
            {"name": held.name, "sums": rows.get(held.name, []), "holders": list(held.holding.ranks)}
            for held in held_tensors(engine.model, gpc)
        ]
        engine.close()
        return found


def check(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: as_it_runs(config) for name, config in layouts.items()}


def class_of(explained: Explanation, name: str, stage: int) -> ParameterClass:
    pattern = re.sub(r"\b\d+\b", "*", name)
    (found,) = [one for one in explained.classes if pattern in one.names and stage in one.stages]
    return found


@pytest.mark.slow
def test_what_is_explained_is_what_four_ranks_do():
    assert not dist.is_initialized()
    explained = {}
    for name, config in LAYOUTS.items():
        explained[name] = explain(load_config(config), 4, built, context=ParallelContext())
        assert explained[name].problems == ()
    assert not dist.is_initialized()
    for rank, runs in enumerate(run_world(4, check, LAYOUTS).values):
        for name, run in runs.items():
            stage = build_layout(LAYOUTS[name], 4).coordinates(rank)["pipeline"]
            for parameter in run:
                one = class_of(explained[name], parameter["name"], stage)
                said = [
                    [each.mode, list(next(g for g in each.groups if rank in g)), each.divisor, each.handler]
                    for each in one.sums
                    if each.handler != "FSDP2"
                ]
                assert said == parameter["sums"], (name, rank, parameter["name"])
                assert tuple(parameter["holders"]) in one.holders, (name, rank, parameter["name"])
                assert one.share == len(parameter["holders"])


def test_tensor_pipeline_and_experts_at_once():
    config = {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}, "expert": 2}, "num_microbatches": 4}
    explained = explain(load_config(config), 16, moe, context=ParallelContext())
    assert explained.axes == {"data": 4, "pipeline": 2, "tensor": 2}
    expert = class_of(explained, "blocks.1.feed_forward.experts.up", 0)
    (only,) = expert.sums
    assert (only.mode, only.divisor, only.handler) == ("EXPERT_DATA", 4, "MoeGradientHandler")
    assert (0, 8) in only.groups
    assert "4 ranks saw distinct data; the gradients of these 2" in only.why_divided
    assert (
        only.why_handled
        == "attached automatically: expert parallelism: experts are reduced over their expert-data group"
    )
    assert expert.share == 2
    assert len(expert.writers) == 8
    assert expert.kept == "slices of the full tensor (dimension 0 in 2, dimension 2 in 2), each once"
    tied = class_of(explained, "head.classifier.weight", 1)
    assert tied.stages == (0, 1)
    assert [(each.mode, each.divisor) for each in tied.sums] == [("DATA", 4), ("PIPELINE", 1)]
    assert any("one weight at stages 0, 1" in line for line in tied.lies)
    norm = class_of(explained, "blocks.0.first_norm.weight", 0)
    assert norm.lies == ("DATA: replicated", "TENSOR: replicated")
    assert norm.writers == (0, 2)
    json.dumps(explained.to_dict())


def test_without_a_model_one_parameter_of_each_kind_is_explained():
    explained = explain(load_config({"parallel": {"tensor": {"size": 8, "mode": "3d"}}}), 16, context=ParallelContext())
    names = [name for one in explained.classes for name in one.names]
    assert names[:3] == ["a plain parameter", "sharded over DATA", "sharded over TENSOR"]
    assert "partial gradient over PARALLEL_3D_INPUT" in names
    alone = explain(load_config({}), 1, context=ParallelContext())
    assert [one.names for one in alone.classes] == [{"a plain parameter": 1}]
    assert alone.classes[0].sums == ()


@GRADIENT_HANDLER.register_module
class ExplainedByTrial(BaseGradientHandler):
    def handle_gradient(self) -> None:
        raise AssertionError("nothing runs here")


@GRADIENT_HANDLER.register_module
class OfAnOptimizer(BaseGradientHandler):
    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        raise ConfigError("an optimizer is needed")

    def handle_gradient(self) -> None:
        pass


def plain(context: ParallelContext) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if context.layout.has(ParallelMode.TENSOR, 0) and context.tensor_parallel_size > 1:
        place(model[1].bias, {ParallelMode.TENSOR: Replicate(owes="sum")})
    model[0].bias.requires_grad = False
    return model


def test_handlers_that_the_config_names():
    config = {"gradient_handler": ["ExplainedByTrial", "OfAnOptimizer", "DataParallelGradientHandler"]}
    explained = explain(load_config(config), 2, plain, context=ParallelContext())
    assert any(
        note.startswith("ExplainedByTrial (named in the config) declares no reductions()") for note in explained.notes
    )
    assert any("OfAnOptimizer (named in the config) cannot be planned here" in note for note in explained.notes)
    (only,) = class_of(explained, "0.weight", 0).sums
    assert (only.handler, only.why_handled) == ("DataParallelGradientHandler", "named in the config")


def test_what_initialize_would_refuse_is_a_problem():
    config: dict[str, Any] = {"parallel": {"tensor": 2}, "sync": {"automatic": False}}
    config |= {"gradient_handler": ["DataParallelGradientHandler"]}
    explained = explain(load_config(config), 4, plain, context=ParallelContext())
    (problem,) = explained.problems
    assert "1.bias" in problem
    config["sync"] = {"automatic": False, "waive": "1.bias"}
    waived = explain(load_config(config), 4, plain, "1.bias", ParallelContext())
    assert waived.problems == ()
    assert {each.handler for each in waived.classes[0].sums} == {"DataParallelGradientHandler", "nobody (waived)"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_handler": ["NoSuchHandler"]}, "no gradient handler 'NoSuchHandler'"),
        ({"parallel": {"pipeline": 2}}, "needs a schedule and a number of micro-batches"),
        ({"schedule": "NoSuchSchedule"}, "NoSuchSchedule"),
    ],
)
def test_names_that_nobody_registered_are_problems(config, message):
    (problem,) = explain(load_config(config), 4, context=ParallelContext()).problems
    assert message in problem


def test_only_some_parameters():
    explained = explain(load_config({}), 2, plain, "*.bias", ParallelContext())
    assert [one.names for one in explained.classes] == [{"*.bias": 1}, {"*.bias": 1}]
    assert [one.frozen for one in explained.classes] == [True, False]
    with pytest.raises(ConfigError, match=r"--param '2.bias' matches none of the 4 parameters. Did you mean"):
        explain(load_config({}), 2, plain, "2.bias", ParallelContext())


def test_notes_say_what_is_done_to_all_gradients():
    config = {"clip_grad_norm": {"max_norm": 2.0}, "gradient_accumulation": 3, "zero": 2, "num_microbatches": 4}
    notes = "\n".join(explain(load_config(config), 2, context=ParallelContext()).notes)
    for words in ("global norm of 2", "gradient_accumulation = 3", "4 micro-batches", "ZeRO stage 2"):
        assert words in notes


def test_a_world_that_does_not_fit_is_said():
    with pytest.raises(ColonnadeError, match="does not divide the world of 6 ranks"):
        explain(load_config({"parallel": {"tensor": 4}}), 6, context=ParallelContext())


def test_a_large_world_takes_no_longer_than_a_look_at_some_of_its_ranks():
    explained = explain(load_config({"parallel": {"tensor": 8}}), 1 << 16, context=ParallelContext())
    assert explained.classes[0].share == 1 << 16

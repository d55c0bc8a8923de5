"""Dropout in a comparison: one process drops what the ranks drop, and what they should not drop is found."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.models import GPT, ViT
from colonnade.nn import Linear
from colonnade.parallel.split import split
from colonnade.proof.api import verify
from colonnade.proof.compare import Report
from colonnade.proof.random_numbers import RecordedDraws
from colonnade.testing import run_world
from tests.models.grid import HEADS, HIDDEN, LAYERS, LENGTH, VOCABULARY, batch

P = 0.2


# -- in one process ---------------------------------------------------------------------------------------


class _Calls(nn.Module):
    """Every function that drops."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(P, inplace=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=P, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x + 0.0) + F.alpha_dropout(x, P, True) + F.dropout1d(x, P)
        x = x + self.attention(x, x, x, need_weights=False)[0] + self.attention(x, x, x)[0]
        heads = x.view(2, 5, 4, 2).transpose(1, 2)
        pairs = heads[:, ::2]
        some = F.scaled_dot_product_attention(heads, pairs, pairs, None, P, True, enable_gqa=True)
        return x + some.transpose(1, 2).reshape(2, 5, 8)


def test_what_is_noted_changes_nothing_and_nothing_is_dropped_inside_nothing() -> None:
    torch.manual_seed(0)
    model, x = _Calls().double(), torch.randn(2, 5, 8, dtype=torch.float64)
    results = []
    for mode in (None, RecordedDraws(), RecordedDraws(None), RecordedDraws(None)):
        torch.manual_seed(1)
        if mode is None:
            results.append(model(x))
            continue
        with mode.watching(model), mode:
            results.append(model(x))
        if mode.off is not None:
            assert {name: len(some) for name, some in mode.draws.items()} == {"": 3, "drop": 1, "attention": 2}
        else:
            assert mode.zeroed == {"", "drop", "attention"}
    torch.testing.assert_close(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert torch.equal(results[2], results[3])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# -- on ranks ---------------------------------------------------------------------------------------------


def _gpt(context: ParallelContext, model: str = "GPT", **options: Any) -> Any:
    sizes = (8, 2, HIDDEN, HEADS, LAYERS, 8) if model == "ViT" else (VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS)
    kind = {"GPT": GPT, "ViT": ViT}[model]
    made = kind(*sizes, dropout=P, context=context, **options).double()
    for module in made.modules():
        if hasattr(module, "window"):
            module.dropout = P
    return made


def _library(parallel: dict[str, Any], model: str = "GPT", **settings: Any) -> Report:
    """A model of the library that drops after embeddings, attention and layers, and attention weights."""
    piped = "pipeline" in parallel
    schedule = {"schedule": {"type": "OneFOneB", "num_microbatches": 2}} if piped else {}
    with launch({"parallel": parallel, **schedule, **settings}, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        whole = _gpt(gpc, model)
        engine, *_ = initialize(
            split(whole, num_stages=gpc.pipeline_parallel_size) if piped else whole,
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-6),
            whole.criterion(),
            context=gpc,
        )
        mine = gpc.get_local_rank(ParallelMode.DATA)
        batches = [[batch(model, 10 * at + mine, step) for at in range(engine.accumulation)] for step in range(2)]
        return verify(engine, lambda: _gpt(gpc, model), batches)


def _all_equal(layouts: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for parallel, settings in layouts:
        report = _library(parallel, **settings)
        assert report.ok, f"{parallel} {settings}: {report}"
        masks = [row for row in report.rows if row.quantity == "random numbers"]
        assert len(masks) > LAYERS, f"{parallel} {settings}: {report}"
        said = any("drawn inside a kernel" in note for note in report.notes)
        assert said == ("sequence" in parallel), report.notes


def _tensor(size: int, mode: str, **more: Any) -> dict[str, Any]:
    return {"tensor": {"size": size, "mode": mode, **more}}


ON_TWO: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"data": 2}, {"gradient_accumulation": 2}),
    ({"pipeline": 2}, {}),
    (_tensor(2, "1d"), {"recompute": True}),
    (_tensor(2, "1d", sequence_split=True), {}),
    ({"sequence": 2}, {}),
]
ON_FOUR: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"data": 2, **_tensor(2, "1d")}, {"zero": 3}),
    (_tensor(4, "2d"), {}),
    (_tensor(4, "2d"), {"model": "ViT"}),
    ({"data": 2, "pipeline": 2}, {}),
    ({"data": 2, "sequence": 2}, {}),
]


def test_one_process_drops_what_two_ranks_drop() -> None:
    run_world(2, _all_equal, ON_TWO)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [ON_FOUR[::2], pytest.param(ON_FOUR, marks=pytest.mark.long)], ids=["some", "all"])
def test_one_process_drops_what_four_ranks_drop(runs) -> None:
    run_world(4, _all_equal, runs, timeout=100)


class _Own(nn.Module):
    """A split layer, with dropout in the three places where it can go wrong."""

    def __init__(self, context: ParallelContext, mistake: str) -> None:
        super().__init__()
        self.up, self.down = Linear(8, 8), Linear(8, 4, split="row")
        self.drop = nn.Dropout(0.5)
        self.mistake, self.rank = mistake, context.get_global_rank()

    def forward(self, x: Tensor) -> Tensor:
        if self.mistake == "recomputed":
            inside = checkpoint(self.inside, x, use_reentrant=False, preserve_rng_state=False)
        else:
            inside = self.inside(x)
        return self.down(torch.tanh(inside))

    def inside(self, x: Tensor) -> Tensor:
        if self.mistake == "weights":
            x = F.linear(x, F.dropout(torch.eye(8, dtype=x.dtype), 0.5))
        if self.mistake == "apart":
            torch.manual_seed(self.rank)
        return self.up(self.drop(x))


def _own(parallel: dict[str, Any], mistake: str, dropout: bool = True) -> Report:
    with launch({"parallel": parallel}, verbose=False) as gpc:
        model = _Own(gpc, mistake).double()
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
        rows = torch.Generator().manual_seed(gpc.get_local_rank(ParallelMode.DATA))
        draw = partial(torch.randn, generator=rows, dtype=torch.float64)
        batches = [[(draw(6, 8), draw(6, 4))] for _ in range(2)]
        healthy = mistake if mistake == "weights" else ""
        return verify(engine, lambda: _Own(gpc, healthy).double(), batches, dropout=dropout)


def _owns() -> list[Report]:
    split_two = _tensor(2, "1d")
    return [
        _own(split_two, ""),
        _own(split_two, "apart"),
        _own(split_two, "recomputed"),
        _own({"data": 2}, "weights"),
        _own(split_two, "recomputed", dropout=False),
    ]


def test_masks_that_differ_among_ranks_or_when_computed_again_are_found() -> None:
    right, apart, again, weights, off = run_world(2, _owns).values[0]
    assert right.ok, str(right)
    assert not right.notes
    assert apart.causes == ["masks-differ"], str(apart)
    assert "module drop draws other random numbers on rank 1" in apart.findings[0].sentence
    assert again.causes == ["recomputation-differs"], str(again)
    assert weights.ok, str(weights)
    assert "the model's own forward: ranks with distinct data drop different elements" in weights.notes[0]
    assert off.ok, str(off)
    assert off.notes == ("dropout was set to 0 for the comparison",)

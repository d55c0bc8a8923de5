"""Random numbers of a model on ranks: one process gets the same ones, and where it cannot, `verify` does not call the run equal."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from colonnade._launch import launch
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.nn import Linear
from colonnade.proof.api import verify
from colonnade.proof.compare import Report, hides_errors
from colonnade.proof.random_numbers import DrawsOfRanks, RecordedDraws, ReplayedDraws
from colonnade.testing import run_world


class _Everything(nn.Module):
    """Operators that return random numbers, fill a tensor with them, or compute with them."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.inner = nn.RReLU(), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.slope(x) + torch.randn_like(x) + torch.rand(x.shape) + torch.empty_like(x).exponential_()
        x = x + F.gumbel_softmax(x) + torch.bernoulli(x.sigmoid()) + torch.normal(x, 1.0) + torch.poisson(x.sigmoid())
        x = x + x[torch.randperm(len(x))] + x.gather(1, torch.multinomial(x.softmax(-1), 1)) + torch.randint(4, (8,))
        x = x + torch.distributions.Beta(1 + x.sigmoid(), 2 - x.sigmoid()).rsample()
        return checkpoint(self.inner, x, use_reentrant=False)


def test_the_numbers_of_a_run_are_repeated_also_when_they_are_recomputed() -> None:
    torch.manual_seed(0)
    model, x = _Everything().double(), torch.randn(6, 8, dtype=torch.float64, requires_grad=True)

    def run(mode: Any, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        with mode.watching(model), mode:
            out = model(x)
            noise = torch.randn(3)
            (gradient,) = torch.autograd.grad(out.square().sum(), x)
        return [out, noise, gradient]

    recorded = RecordedDraws()
    first = run(recorded, 1)
    again = run(ReplayedDraws(DrawsOfRanks([{0: recorded.draws}], {}, [[0]])), 2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], run(RecordedDraws(), 2)[0])


class _Noise(nn.Module):
    """Random numbers for a batch (noise), for the shard of each rank (shards), or for a decision of each rank (depth)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = Linear(8, 8), Linear(8, 4, split="row"), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "noise":
            x = x + 0.3 * torch.randn_like(x)
        x = torch.tanh(self.up(x))
        if self.kind == "shards":
            x = x + 0.3 * torch.randn_like(x)
        if self.kind == "depth":
            x = x * (1 + torch.rand(()))
        return self.down(x)


def _verified(parallel: dict[str, Any], kind: str, doubled: bool = False, apart: bool = False) -> Report:
    with launch({"parallel": parallel}, verbose=False) as gpc:
        model = _Noise(kind).double()
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
        if doubled:
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: 2 * gradient)
        torch.manual_seed(100 + (gpc.get_global_rank() if apart else gpc.get_local_rank(ParallelMode.DATA)))
        rows = torch.Generator().manual_seed(gpc.get_local_rank(ParallelMode.DATA))
        draw = partial(torch.randn, generator=rows, dtype=torch.float64)
        batches = [[(draw(6, 8), draw(6, 4))] for _ in range(2)]
        return verify(engine, lambda: _Noise(kind).double(), batches)


TENSOR = {"tensor": {"size": 2, "mode": "1d"}}


def _on_two() -> dict[str, Report]:
    return {
        "noise": _verified({}, "noise"),
        "doubled": _verified({}, "noise", doubled=True),
        "replicas": _verified(TENSOR, "noise"),
        "replicas apart": _verified(TENSOR, "noise", apart=True),
        "shards": _verified(TENSOR, "shards", apart=True),
        "depth": _verified({}, "depth"),
        "depth doubled": _verified({}, "depth", doubled=True),
        "same depth": _verified(TENSOR, "depth"),
    }


def test_noise_is_joined_over_two_ranks_and_a_factor_of_two_is_found() -> None:
    said = run_world(2, _on_two).values[0]
    for equal in ("noise", "replicas", "shards", "same depth"):
        assert said[equal].ok, f"{equal}: {said[equal]}"
        assert any(row.quantity == "random numbers" for row in said[equal].rows)
    assert said["doubled"].findings[0].factor == pytest.approx(2.0), str(said["doubled"])
    assert said["replicas apart"].causes == ["masks-differ"], str(said["replicas apart"])
    for uncertain in ("depth", "depth doubled"):
        assert not said[uncertain].ok
        assert said[uncertain].is_uncertain, str(said[uncertain])
        assert "the model: ranks with distinct data draw different numbers of a tensor" in said[uncertain].uncertain
        assert str(said[uncertain]).startswith("cannot tell whether the run is equal to one process")


def _on_four() -> dict[str, Report]:
    return {kind: _verified({"data": 2, **TENSOR}, kind, apart=kind == "shards") for kind in ("noise", "shards")}


@pytest.mark.slow
def test_noise_is_joined_over_rows_and_shards() -> None:
    for kind, report in run_world(4, _on_four).values[0].items():
        assert report.ok, f"{kind}: {report}"


@pytest.mark.parametrize(
    ("dtype", "share", "hidden"),
    [
        (torch.float64, 1e-3, True),
        (torch.float64, 1e-6, False),
        (torch.float32, 1e-2, True),
        (torch.float32, 1e-4, False),
        (torch.bfloat16, 0.1, True),
        (torch.bfloat16, 0.02, False),
    ],
)
def test_a_spread_hides_errors_if_it_is_a_visible_share(dtype: torch.dtype, share: float, hidden: bool) -> None:
    assert hides_errors(share, 1.0, 1.0, dtype) == hidden
    assert not hides_errors(1e-17, 1e-17, 1.0, dtype)  # a gradient that is a rounding error

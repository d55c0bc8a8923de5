"""Every precision at every stage of ZeRO: what lies in which dtype, how many bytes there are, and how near fp64 it stays."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.optim.zero import fsdp_checks
from colonnade.testing import gather_weights, run_world

RANKS, STEPS, LR = 2, 3, 0.2
HALF, FULL = "bfloat16", "float32"
MASTERS: dict[str, Any] = {"bf16": True}
NONE: dict[str, Any] = {"bf16": {"master_weights": False}}
WIDE: dict[str, Any] = {"sync": {"reduce_dtype": "fp32"}}


class Case(NamedTuple):
    """A precision, and the (dtype, bytes per parameter) that it must have; `half`: the model is given in bf16."""

    config: dict[str, Any]
    weights: tuple[str, float]
    masters: float
    gradients: tuple[str, float]
    reduced: str
    half: bool = False

    @property
    def stage(self) -> int:
        zero = self.config.get("zero", 0)
        return int(zero["stage"] if isinstance(zero, dict) else zero)

    @property
    def momentum(self) -> float:
        """Bytes per parameter: in the dtype of what is stepped on, and sharded with it."""
        width = 4 if self.masters or self.weights[0] == FULL else 2
        return width / (RANKS if self.stage else 1)


CASES = [
    Case({}, (FULL, 4), 0, (FULL, 4), FULL),
    Case(MASTERS, (FULL, 4), 0, (FULL, 4), FULL),
    Case(MASTERS, (FULL, 4), 0, (FULL, 4), FULL, half=True),
    Case(NONE, (HALF, 2), 0, (HALF, 2), HALF),
    Case({**NONE, **WIDE}, (HALF, 2), 0, (HALF, 2), FULL),
    Case({**MASTERS, "sync": {"reduce_dtype": "bf16", "shared_memory": False}}, (FULL, 4), 0, (FULL, 4), HALF),
    Case({**MASTERS, "zero": 1}, (FULL, 4), 0, (FULL, 4), FULL),
    Case({"zero": 1, **WIDE}, (HALF, 2), 2, (f"{HALF}, {FULL}", 4), FULL, half=True),
    Case({**NONE, "zero": 1}, (HALF, 2), 0, (HALF, 2), HALF),
    Case({"zero": {"stage": 1, "master_weights": False}}, (HALF, 2), 0, (HALF, 2), HALF, half=True),
    Case({**MASTERS, "zero": 2}, (FULL, 4), 0, (FULL, 2), FULL),
    Case({**MASTERS, "zero": 2, **WIDE}, (HALF, 2), 2, (FULL, 2), FULL, half=True),
    Case({**NONE, "zero": 2, **WIDE}, (HALF, 2), 0, (HALF, 1), FULL),
    Case({"zero": 2, "sync": {"shared_memory": False}}, (HALF, 2), 2, (FULL, 2), HALF, half=True),
    Case(
        {"zero": 2, "sync": {"reduce_dtype": "bf16", "shared_memory": False}, **MASTERS}, (FULL, 4), 0, (FULL, 2), HALF
    ),
    Case({"zero": 3}, (FULL, 2), 0, (FULL, 2), FULL),
    Case({**MASTERS, "zero": 3}, (FULL, 2), 0, (FULL, 2), FULL),
    Case({"zero": 3}, (FULL, 2), 0, (FULL, 2), FULL, half=True),
    Case({**MASTERS, "zero": 3, "sync": {"reduce_dtype": "bf16"}}, (FULL, 2), 0, (FULL, 2), HALF),
    Case({**NONE, "zero": 3}, (HALF, 1), 0, (HALF, 1), HALF),
    Case({**NONE, "zero": 3, **WIDE}, (HALF, 1), 0, (HALF, 1), FULL),
    Case({"fp16": {"init_scale": 256.0}, "zero": 3}, (FULL, 2), 0, (FULL, 2), FULL),
]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)]
    return nn.Sequential(nn.Linear(32, 64), *blocks, nn.Linear(64, 32))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 32, generator=generator), torch.randn(8, 32, generator=generator)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def truth() -> dict[str, Tensor]:
    """The weights of one process in fp64."""
    model = build().double()
    plain = optimizer(model.parameters())
    for step in range(STEPS):
        x, y = (torch.cat(parts).double() for parts in zip(*(batch(step, rank) for rank in range(RANKS)), strict=True))
        plain.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        plain.step()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def train(case: Case) -> tuple[dict[str, Tensor], Any, Any]:
    """The weights after the steps, what is written of the dtypes before the first, and after the last."""
    with launch(case.config, context=ParallelContext(), verbose=False) as gpc:
        model = build().bfloat16() if case.half else build()
        engine = initialize(model, optimizer(model.parameters()), nn.MSELoss(), context=gpc)[0]
        before = engine.precision_table()
        for step in range(STEPS):
            x, y = batch(step, gpc.get_global_rank())
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x.bfloat16() if case.half else x).float(), y))
            engine.step()
        after = engine.precision_table()
        weights = {name: value.double() for name, value in gather_weights(model, gpc).items()}
        engine.close()
        return weights, before, after


def _check_cases(*stages: int) -> None:
    """All cases of these stages of ZeRO."""
    exact = truth()
    begun = {name: parameter.detach().cpu() for name, parameter in build().double().named_parameters()}
    gathered: list[torch.dtype] = []
    real = fsdp_checks.all_gather_flat

    def seen(out: Tensor, own: Tensor, **options: Any) -> Any:
        gathered.append(own.dtype)
        return real(out, own, **options)

    for case in [case for case in CASES if case.stage in stages]:
        gathered.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsdp_checks, "all_gather_flat", seen)
            weights, before, after = train(case)
        for table in (before, after):
            assert (", ".join(table["weights"].dtypes), table["weights"].bytes) == case.weights, (case, str(table))
            assert table["master copies"].bytes == pytest.approx(case.masters, rel=0.02), (case, str(table))
            gradients = table["gradients"]
            assert ", ".join(gradients.dtypes) == case.gradients[0], (case, str(table))
            assert gradients.bytes == pytest.approx(case.gradients[1], rel=0.02), (case, str(table))
            assert table["reduced in"].dtypes == (case.reduced,), (case, str(table))
            assert table["optimizer state"].bytes == pytest.approx(case.momentum, rel=0.02), (case, str(table))
        half = torch.float16 if "fp16" in case.config else torch.bfloat16
        uses = half if case.half or "bf16" in case.config or "fp16" in case.config else torch.float32
        assert after["computed with"].dtypes == (str(uses).removeprefix("torch."),)
        assert set(gathered) == ({uses} if case.stage == 3 else set()), (case, gathered)
        # Masters take every step in fp32; without them the weights themselves are rounded, by up to 2**-9 at each.
        moved = torch.cat([(exact[name] - begun[name]).flatten() for name in exact])
        error = torch.cat([(weights[name] - exact[name]).flatten() for name in exact])
        lies_rounded = case.half or case.weights[0] == HALF
        bound = 0.05 * moved.norm() + (2.0**-8 * torch.cat([w.flatten() for w in exact.values()]).norm()) * lies_rounded
        assert error.norm() <= (1e-5 * moved.norm() if uses is torch.float32 else bound), (case, error.norm(), bound)


@pytest.mark.slow
def test_every_precision_is_what_the_table_says_and_near_one_process_in_fp64():
    run_world(RANKS, _check_cases, 0, 1, 2, 3, timeout=180)

"""Language models whose loss is fused with the classifier: the same steps and evaluations as with logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.models import GPT, Llama, MoEGPT
from colonnade.parallel.split import split
from colonnade.testing import compare, gather_weights
from tests.ranks import on_ranks

SIZES: Any = (18, 8, 16, 4, 2)
MODELS: dict[str, Any] = {
    "tied": lambda **options: GPT(*SIZES, **options),
    "free": lambda **options: GPT(*SIZES, tied=False, **options),
    "experts": lambda **options: MoEGPT(*SIZES, 4, router={"balance_loss": 0.1}, **options),
    "llama": lambda **options: Llama(*SIZES, kv_heads=2, **options),
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tensor": ("tied", {"tensor": {"size": 2, "mode": "1d", "sequence_split": True}}, {}),
    "zero 3": ("free", {}, {"zero": 3}),
    "zero 3, tied": ("tied", {}, {"zero": 3}),
    "zero 2": ("llama", {}, {"zero": 2}),
    "pipeline": ("experts", {"pipeline": 2}, {"schedule": {"type": "OneFOneB", "num_microbatches": 2}}),
    "pipeline, tied": ("tied", {"pipeline": 2}, {"schedule": {"type": "OneFOneB", "num_microbatches": 2}}),
    "experts": ("experts", {"expert": 2}, {}),
    "sequence": ("llama", {"sequence": 2}, {"gradient_accumulation": 2}),
    "compiled": ("free", {}, {"compile": {"backend": "aot_eager"}}),
}


def _trained(case: str, fused: bool) -> dict[str, Tensor]:
    name, parallel, options = CASES[case]
    config = {"parallel": parallel, "seed": 3, "clip_grad_norm": 1.0, **options}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        model = MODELS[name](fused_loss=fused, context=gpc).double()
        given = split(model, num_stages=2) if "pipeline" in parallel else model
        engine = initialize(
            given, lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3), model.criterion(), verbose=False, context=gpc
        )[0]
        at, losses = gpc.get_local_rank(ParallelMode.DATA), []
        for step in range(4):
            tokens = torch.randint(0, 18, (4, 9), generator=torch.Generator().manual_seed(10 * step + at))
            labels = tokens[:, 1:].clone()
            labels[0, : 2 + at] = -100
            engine.zero_grad()
            losses.append(engine.execute_schedule(iter([(tokens[:, :-1], labels)]), return_output_label=False)[2])
            engine.step()
        engine.eval()
        evaluated = engine.execute_schedule(iter([(tokens[:, :-1], labels)]), forward_only=True)[2]
        found = {f"loss {at}": loss for at, loss in enumerate([*losses, evaluated]) if loss is not None}
        found |= gather_weights(engine.model, gpc)
        engine.close()
        return found


FAST, SLOW = ("tensor",), ("zero 3", "zero 3, tied", "pipeline", "sequence")
TIERS = [
    FAST,
    pytest.param(SLOW, marks=pytest.mark.slow),
    pytest.param([case for case in CASES if case not in FAST + SLOW], marks=pytest.mark.long),
]


@pytest.mark.parametrize("cases", TIERS, ids=["fast", "slow", "long"])
@on_ranks(2, timeout=110)
def test_the_same_steps_without_logits(cases: Sequence[str]):
    for case in cases:
        try:
            compare(_trained(case, False), _trained(case, True), 1e-10)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error

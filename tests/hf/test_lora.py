"""LoRA adapters of peft on models that are cut: steps beside one process, and files that peft reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colonnade
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.testing import compare, gather_gradients, gather_weights, in_double, run_world
from tests.hf.zoo import BY_NAME, EPS, ROWS, batch_of, rows_of

RTOL = 1e-9
TENSOR = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
PLAIN: dict[str, Any] = {"parallel": {}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": TENSOR,
    "data": PLAIN,
    "zero 1": {"zero": {"stage": 1}},
    "zero 3": {"zero": {"stage": 3}},
}
TARGETS = {
    "llama": ["q_proj", "o_proj", "up_proj", "down_proj", "embed_tokens"],
    "gpt2": ["c_attn", "c_proj"],
}


def adapted(name: str, **options: Any) -> Any:
    """The model with adapters that are not zero, wrapped by peft; the same in every process."""
    import peft

    torch.manual_seed(1)
    with in_double():
        config = peft.LoraConfig(target_modules=TARGETS[name], r=4, lora_alpha=8, **options)
        model = peft.get_peft_model(BY_NAME[name].build(), config)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model


Steps = list[tuple[float, dict[str, Tensor]]]


def one_process(name: str, steps: int = 2) -> tuple[Steps, dict[str, Tensor]]:
    """The loss and the gradients of each step, and the adapters at the end."""
    model, found = adapted(name), []
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=EPS)
    for step in range(steps):
        adamw.zero_grad()
        with in_double():
            loss = model(**batch_of("causal", step)).loss
            loss.backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        found.append((loss.item(), gradients))
    return found, {key: p.detach() for key, p in model.named_parameters() if p.requires_grad}


def compared(name: str, gpc: ParallelContext, truth: tuple[Steps, dict[str, Tensor]]) -> Any:
    """The engine after the same steps, each of which was compared."""
    model = colonnade.parallelize(adapted(name), context=gpc)
    engine, *_ = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.01, eps=EPS), context=gpc)
    assert all(parameter.requires_grad == ("lora_" in key) for key, parameter in engine.model.named_parameters())
    ranks = gpc.layout.distinct_data
    first = gpc.get_local_rank(ParallelMode.DATA) if ranks > 1 else 0
    rows = [slice(0, ROWS)] if ranks == 1 else [slice(0, 2), slice(2, ROWS)]
    steps, weights = truth
    for step, (loss, gradients) in enumerate(steps):
        engine.zero_grad()
        with in_double():
            found = engine.execute_schedule(iter([rows_of(batch_of("causal", step), rows[first])]))[2]
        assert ranks > 1 or found.item() == pytest.approx(loss, rel=RTOL)
        engine._reduce()
        if gpc.config.get("zero") is None:  # a sharded optimizer keeps what it was given to itself
            compare(gradients, prefixed(adapters(gather_gradients(engine.model, gpc))), RTOL)
        engine._stepper.step()  # what engine.step() does after _reduce()
        engine._end_step()
    compare(weights, prefixed(adapters(gather_weights(engine.model, gpc))), RTOL)
    return engine


def prefixed(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names that peft's wrapper gives; a stage has none."""
    return {key if key.startswith("base_model.") else f"base_model.model.{key}": value for key, value in found.items()}


def adapters(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in found.items() if "lora_" in key}


def _layouts(folder: str, layouts: list[str]) -> None:
    truths = {name: one_process(name) for name in TARGETS}
    for layout in layouts:
        with launch({**LAYOUTS[layout], "clip_grad_norm": 1.0}, context=ParallelContext(), verbose=False) as gpc:
            for name, truth in truths.items():
                engine = compared(name, gpc, truth)
                engine.close()


@pytest.mark.slow
def test_adapters_train_as_in_one_process(tmp_path):
    run_world(2, _layouts, str(tmp_path), list(LAYOUTS), timeout=120)

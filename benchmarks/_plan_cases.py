"""The configurations that `plan_cuda.py` plans and measures: model, size, config, and how a training script builds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.models import GPT, Llama, MoEGPT
from colonnade.proof.planner.job import Job

BF16 = dict(bf16=True)
FULL = dict(activation_checkpoint="full")


@dataclass(frozen=True)
class Case:
    """One model under one config. `size`: arguments of the model; `rows`: sequences of a rank for one pass."""

    model: str
    size: dict[str, int]
    rows: int
    config: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1


def _gpt(hidden: int, layers: int, heads: int, length: int = 1024, vocabulary: int = 50304) -> dict[str, int]:
    return dict(vocabulary=vocabulary, length=length, hidden=hidden, heads=heads, layers=layers)


MEDIUM, SMALL = _gpt(1024, 24, 16), _gpt(768, 12, 12)
LLAMA = dict(vocabulary=32000, length=2048, hidden=1536, heads=12, layers=16, kv_heads=4, inner=4096)
TENSOR = dict(parallel=dict(tensor=dict(size=2, mode="1d")))
CASES: dict[str, Case] = {
    "eager": Case("gpt", MEDIUM, 8, BF16),
    "checkpointed": Case("llama", LLAMA, 8, {**BF16, **FULL}),
    "experts": Case("moe", {**SMALL, "experts": 8}, 8, BF16),
    "long sequence": Case("llama", {**LLAMA, "length": 16384}, 1, BF16),
    "lora": Case("lora", LLAMA, 8, BF16),
    "offloaded": Case("gpt", MEDIUM, 8, {**BF16, "activation_checkpoint": dict(mode="none", offload=True)}),
    "compiled": Case("gpt", MEDIUM, 8, {**BF16, "compile": True}),
    "compiled, checkpointed": Case("gpt", MEDIUM, 8, {**BF16, **FULL, "compile": True}),
    "float8": Case("gpt", _gpt(2048, 16, 16), 8, {**BF16, "float8": True}),
    "llama": Case("llama", LLAMA, 4, BF16),
    "short": Case("gpt", {**SMALL, "length": 256}, 4, BF16),
    "fp32": Case("gpt", MEDIUM, 2),
    "accumulated, clipped": Case("gpt", MEDIUM, 8, {**BF16, "gradient_accumulation": 2, "clip_grad_norm": 1.0}),
    **{f"zero {stage}": Case("gpt", SMALL, 8, {**BF16, "zero": stage}, ranks=2) for stage in (1, 2, 3)},
    "tensor 2": Case("gpt", SMALL, 8, {**BF16, **TENSOR}, ranks=2),
    "pipeline 2": Case("gpt", SMALL, 8, {**BF16, "parallel": dict(pipeline=2), "num_microbatches": 4}, ranks=2),
}

LARGE = dict(vocabulary=32000, length=2048, hidden=2048, heads=16, layers=12, kv_heads=4, inner=5632)
BLIND: dict[str, Case] = {
    "blind: llama": Case("llama", LARGE, 4, BF16),
    "blind: llama, compiled": Case("llama", LARGE, 4, {**BF16, "compile": True}),
    "blind: gpt, compiled": Case("gpt", _gpt(1280, 16, 20), 8, {**BF16, "compile": True}),
    "blind: gpt, checkpointed": Case("gpt", _gpt(2048, 16, 16), 8, {**BF16, **FULL}),
    "blind: experts": Case("moe", {**_gpt(1024, 12, 16), "experts": 16}, 8, BF16),
    "blind: lora, long": Case("lora", {**LARGE, "length": 8192}, 1, BF16),
}
"""Planned before they were measured for the first time."""
CASES |= BLIND


def smaller(case: Case) -> Case:
    """Return the case at a size for a try on a CPU."""
    size = {**case.size, "vocabulary": 512, "length": 64, "hidden": 64, "heads": 4, "layers": 4}
    size |= {key: value for key, value in dict(kv_heads=2, inner=128, experts=4).items() if key in size}
    config = {key: value for key, value in case.config.items() if key not in ("compile", "float8")}
    return replace(case, size=size, config=config)


def build(case: Case, context: ParallelContext) -> Any:
    """Build the model of a case, or its pipeline stages."""
    size = {key: value for key, value in case.size.items() if key not in ("kv_heads", "inner", "experts")}
    model: nn.Module
    if case.model in ("llama", "lora"):
        model = Llama(**size, kv_heads=case.size["kv_heads"], inner=case.size["inner"], context=context)
        if case.model == "lora":
            _add_adapters(model)
    elif case.model == "moe":
        model = MoEGPT(**size, experts=case.size["experts"], router=dict(k=2), context=context)
    else:
        model = GPT(**size, tied=True, context=context)
    stages = context.pipeline_parallel_size
    return colonnade.split(model, num_stages=stages) if stages > 1 else model


class LowRank(nn.Module):
    """A frozen layer and two small trained matrices, as in LoRA (peft may be missing where this runs)."""

    def __init__(self, layer: nn.Module, rank: int = 16) -> None:
        super().__init__()
        weight = layer.weight
        shape = weight.shape if weight.dim() == 2 else (weight.shape[0] * weight.shape[1], weight.shape[2])
        options = dict(bias=False, device=weight.device)
        self.layer, self.down = layer, nn.Linear(shape[1], rank, **options)  # type: ignore[arg-type]
        self.up = nn.Linear(rank, shape[0], **options)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def _add_adapters(model: nn.Module) -> None:
    """Freeze the model; the projections of attention get adapters."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        for name in ("q", "kv", "out"):
            layer = getattr(module, name, None)
            if isinstance(layer, nn.Module) and isinstance(getattr(layer, "weight", None), nn.Parameter):
                setattr(module, name, LowRank(layer))


def batch(case: Case) -> tuple[Tensor, Tensor]:
    """Return the batch of one rank for one pass."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, case.size["vocabulary"], (case.rows, case.size["length"] + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer of all cases."""
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=1e-4)


def job(case: Case) -> Job:
    """Return the case as the input of `plan`."""

    def model(context: ParallelContext) -> Any:
        return build(case, context)

    def data() -> Any:
        return batch(case)

    optimizer: Callable[..., Any] = adamw
    return Job(model, data, optimizer=optimizer)

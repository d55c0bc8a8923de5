"""Jobs to plan: models and batches, as a training script has them. `SIZE` in a config makes them larger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import colonnade
from colonnade.config import Config
from colonnade.context.parallel_context import ParallelContext
from colonnade.models import GPT, MoEGPT
from colonnade.nn.moe import TopKRouter
from colonnade.nn.moe.dispatch import counted
from colonnade.nn.moe.router import Routing
from colonnade.proof.planner.job import Job

SMALL = dict(rows=8, length=64, vocabulary=512, hidden=64)


def gpt(context: ParallelContext) -> Any:
    size = _size(context.config)
    model = GPT(size["vocabulary"], size["length"], size["hidden"], heads=4, layers=4, context=context)
    return _cut(model, context)


def moe(context: ParallelContext) -> Any:
    return _cut(_moe(context), context)


def even(context: ParallelContext) -> Any:
    """Experts that get equal shares of the tokens, whatever the data are: what a plan assumes."""
    model = _moe(context)
    for router in (each for each in model.modules() if isinstance(each, TopKRouter)):
        router.__class__ = _EvenRouter
    return _cut(model, context)


def llama(context: ParallelContext) -> Any:
    """A model of transformers, which makes its own loss of a dict with labels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = _size(context.config)
    sizes = dict(vocab_size=size["vocabulary"], hidden_size=size["hidden"], intermediate_size=2 * size["hidden"])
    heads = dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    return colonnade.parallelize(LlamaForCausalLM(LlamaConfig(**sizes, **heads)), context=context)


def mlp() -> nn.Module:
    """Of which weights and their gradients are nearly all."""
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 256))


def frozen() -> nn.Module:
    """Most of which is not trained, as beside adapters."""
    model = mlp()
    for parameter in (*model[0].parameters(), *model[2].parameters()):  # type: ignore[index]
        parameter.requires_grad_(False)
    return model


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(64, 256), torch.zeros(64, 256)


def collated(config: Config) -> dict[str, torch.Tensor]:
    tokens, labels = batch(config)
    return {"input_ids": tokens, "labels": labels}


def batch(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    size = _size(config)
    tokens = torch.arange(size["rows"] * (size["length"] + 1)).view(size["rows"], -1) % size["vocabulary"]
    return tokens[:, :-1], tokens[:, 1:]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _size(config: Config) -> dict[str, int]:
    return {**SMALL, **(config.get("SIZE") or {})}


def _moe(context: ParallelContext) -> MoEGPT:
    size = _size(context.config)
    return MoEGPT(
        size["vocabulary"],
        size["length"],
        size["hidden"],
        heads=4,
        layers=4,
        experts=4,
        router=dict(k=2),
        context=context,
    )


class _EvenRouter(TopKRouter):
    """Tokens choose experts (0, 1), (2, 3), (0, 1), and so on."""

    def forward(self, x: torch.Tensor) -> Routing:
        routing = super().forward(x)
        token, expert = torch.arange(len(x)).unsqueeze(1), torch.arange(self.experts)
        experts = (routing.scores + (token % 2 == expert // 2)).topk(self.k, dim=-1).indices
        weights = routing.scores.gather(1, experts)
        counts = counted(experts.T.contiguous(), self.experts)
        return replace(
            routing,
            experts=experts.T.contiguous(),
            weights=(weights / weights.sum(-1, keepdim=True)).T,
            counts=counts,
            chosen=counts.sum(0),
        )


def _cut(model: Any, context: ParallelContext) -> Any:
    chunks = (context.config.get("model") or {}).get("num_chunks") or 1
    stages = context.pipeline_parallel_size * chunks
    return colonnade.split(model, num_stages=stages) if context.pipeline_parallel_size > 1 else model


JOBS = {
    **{name: Job(build, batch, optimizer=adamw) for name, build in (("gpt", gpt), ("moe", moe), ("even", even))},
    "mlp": Job(mlp, vectors, nn.MSELoss, optimizer=adamw),
    "frozen": Job(frozen, vectors, nn.MSELoss, optimizer=adamw),
    "llama": Job(llama, collated, optimizer=adamw),
}

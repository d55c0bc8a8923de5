"""Mixture of experts with expert parallelism: routers, experts sharded over the expert mode, and the MoE layer."""

from __future__ import annotations

from colonnade.nn.moe.experts import Experts
from colonnade.nn.moe.moe_layer import MoE, Statistics, auxiliary_loss, no_losses
from colonnade.nn.moe.router import Routing, SwitchRouter, TopKRouter, balance_experts

__all__ = [
    "Experts",
    "MoE",
    "Routing",
    "Statistics",
    "SwitchRouter",
    "TopKRouter",
    "auxiliary_loss",
    "balance_experts",
    "no_losses",
]

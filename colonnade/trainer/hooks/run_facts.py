"""What a run is, as plain values for its log: layout, config, ledger, memory. Read once, before the first step."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from colonnade.version import __version__

if TYPE_CHECKING:
    from colonnade.trainer.trainer import Trainer


def run_facts(trainer: Trainer) -> dict[str, Any]:
    """What a report says of the run as a whole; of rank 0 where ranks differ."""
    engine, context = trainer.engine, trainer.context
    held = engine.memory()
    return {
        "time": time.time(),
        "colonnade": __version__,
        "torch": torch.__version__,
        "device": _device_name(context.device),
        "world_size": context.world_size,
        "layout": {axis.name: axis.size for axis in context.layout.axes if axis.size > 1},
        "schedule": type(engine.schedule).__name__,
        "accumulation": engine.accumulation,
        "parameters": sum(parameter.numel() for parameter in engine.model.parameters()),
        "memory": {kind: getattr(held, kind).formula or 0 for kind in ("parameters", "gradients", "state")},
        "clip": _clip_level(context.config.get("clip_grad_norm")),
        "config": json.loads(json.dumps(context.config, default=str), parse_constant=str),
        "ledger": [asdict(row) for row in engine.ledger().by_pattern()],
    }


def flat_config(config: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """The values of a config by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{under}{key}"
        flat.update(flat_config(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat


def _clip_level(setting: Any) -> float | None:
    """The one norm that gradients are clipped to, if there is one."""
    level = setting.get("max_norm") if isinstance(setting, Mapping) and not setting.get("method") else setting
    return float(level) if isinstance(level, (int, float)) and 0 < level < float("inf") else None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

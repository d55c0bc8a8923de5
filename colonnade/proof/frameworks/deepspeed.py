"""Scripts on DeepSpeed: `deepspeed.initialize` attaches a recorder to the engine.

On the ranks the config is unchanged, except for fp16 and bf16 in fp64. In a single process ZeRO is off (stage 0), so the reference is a torch
optimizer on the unsharded model, with the micro-batch and the number of passes of the ranks.

ZeRO keeps gradients in buffers of its own and, in stage 3, weights in shards. DeepSpeed's public functions return them as full
tensors: `safe_get_full_grad` between the last `backward` and `step`, `GatheredParameters` for weights. Both are collective.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from colonnade.proof.record import Piece, Tracked
from colonnade.proof.reference import norm_of
from colonnade.proof.watch import PlainRecorder, plain_name

if TYPE_CHECKING:
    from colonnade.proof.frameworks import Replacement
    from colonnade.proof.script_job import ScriptRecorder

_HALF = ("fp16", "bf16", "bfloat16", "amp", "torch_autocast", "communication_data_type", "data_types")
_PASSES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def replacements(script: ScriptRecorder) -> Iterator[Replacement]:
    """Yield the functions of DeepSpeed that are replaced under `verify`."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__

    # DeepSpeed compiles an all-reduce of its own for CPUs, which takes minutes and does not support fp64. Gloo does it instead.
    __compatible_ops__["deepspeed_shm_comm"] = False

    def initialize(own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def initialize(args: Any = None, model: Any = None, *others: Any, **kwargs: Any) -> Any:
            if script.part.dtype == "fp64":
                model.double()
            given = kwargs.pop("config_params", None) or kwargs.get("config") or getattr(args, "deepspeed_config", None)
            kwargs["config"] = _changed(_read(given), script)
            built = own(args, model, *others, **kwargs)
            if script.recorder is None:
                _attach(built[0], script)
            return built

        return initialize

    # Without ZeRO, DeepSpeed reduces the gradients of each supported dtype in buckets, and float64 is not among them.
    def with_float64(own: Callable[[], list[torch.dtype]]) -> Callable[[], list[torch.dtype]]:
        return lambda: [*own(), torch.float64]

    yield deepspeed, "initialize", initialize
    yield get_accelerator(), "supported_dtypes", with_float64
    if not script.part.keeps_checkpoints:
        yield deepspeed.DeepSpeedEngine, "save_checkpoint", lambda own: lambda *args, **kwargs: True


def _read(config: Any) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else json.loads(Path(config).read_text())


def _changed(config: dict[str, Any], script: ScriptRecorder) -> dict[str, Any]:
    """The config without half precision in fp64; in a single process without ZeRO, and with the passes of the ranks."""
    changed = dict(config)

    def is_on(key: str) -> bool:
        value = changed.get(key)
        return bool(value.get("enabled", True) if isinstance(value, Mapping) else value)

    half = [key for key in _HALF if is_on(key)] if script.part.dtype == "fp64" else []
    for key in half:
        changed.pop(key)
    if half:
        script.notes.append(
            f"{', '.join(half)} of DeepSpeed's config {'were' if len(half) > 1 else 'was'} left out: both runs are in fp64 "
            f"(--dtype own keeps the dtype)"
        )
    if script.part.is_single:
        changed.pop("train_batch_size", None)
        changed |= {key: int(script.config_of_ranks[key]) for key in _PASSES}
        changed["zero_optimization"] = {"stage": 0}
    return changed


def _attach(engine: Any, script: ScriptRecorder) -> None:
    """Record the engine; its batches are recorded or replaced where the script calls it."""
    script.note_config({key: str(getattr(engine._config, key)) for key in _PASSES})
    script.follow(DeepSpeedRecorder(engine, script), engine.module, plain_name)

    def on_call(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not module.training:
            return None
        script.begin()
        # ZeRO 3 fetches weights in the hooks of the modules. Weights are read before the first of these.
        script.recorder.recorder.begin_step()
        return script.note_or_replace("call", (args, kwargs))

    engine.register_forward_pre_hook(on_call, with_kwargs=True, prepend=True)


class DeepSpeedRecorder(PlainRecorder):
    """Records the steps of a DeepSpeed engine."""

    def __init__(self, engine: Any, script: ScriptRecorder) -> None:
        self._engine = engine
        super().__init__(engine.module, engine.optimizer, script)
        # ZeRO's optimizers have flattened partitions in their groups; the parameters are in lists of the same order.
        optimizer = engine.optimizer
        lists = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "fp16_groups", None)
        if lists is not None:
            names = {id(entry.tensor): entry.name for entry in self.tracked}
            self.record.groups = [
                (
                    {key: value for key, value in group.items() if key not in ("params", "param_names")},
                    [names[id(parameter)] for parameter in some if id(parameter) in names],
                )
                for group, some in zip(optimizer.param_groups, lists, strict=False)
            ]
        self.record.run.data_parallel = engine.dp_world_size > 1

    def whole(self) -> AbstractContextManager[Any]:
        """In stage 3, weights are whole only in this block."""
        from deepspeed.runtime.zero import GatheredParameters

        sharded = [parameter for parameter in self._engine.module.parameters() if hasattr(parameter, "ds_id")]
        return GatheredParameters(sharded, enabled=bool(sharded))

    def gradients(self) -> Iterator[tuple[Tracked, Piece]]:
        """Yield the reduced gradients as full tensors."""
        from deepspeed.utils import safe_get_full_grad

        for entry in self.tracked:
            if entry.is_parameter and entry.tensor.requires_grad:
                value: Tensor | None = safe_get_full_grad(entry.tensor)
                if value is not None:
                    yield entry, Piece(value.view(entry.shape), entry.positions)

    def _norm_of_total(self) -> float:
        """The norm of the recorded gradients. Without ZeRO, DeepSpeed clips them without keeping their norm."""
        return norm_of([piece.value for pieces in self.recorder.total().values() for piece in pieces], 2.0)

    def follow_steps(self, optimizer: Any) -> None:
        """Replace `engine.step`. Only the call after the last pass of a step changes weights."""
        engine = self._engine
        own = engine.step

        @wraps(own)
        def step(*args: Any, **kwargs: Any) -> Any:
            if not engine.is_gradient_accumulation_boundary():
                return own(*args, **kwargs)
            self.before_step(engine.optimizer)
            limit = float(engine.gradient_clipping() or 0.0)
            found = own(*args, **kwargs)
            norm = engine.get_global_grad_norm()
            if limit > 0.0:
                self.note_clipping(limit, self._norm_of_total() if norm is None else float(norm))
            self.after_step()
            return found

        engine.step = step

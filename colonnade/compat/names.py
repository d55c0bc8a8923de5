"""Colossal-AI's names with another place or signature in Colonnade: a table by module, with the source of each name.

Module paths that exist in both packages get these names while the alias is installed; other paths exist under the alias
only.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any, NoReturn

from colonnade.errors import ColonnadeError
from colonnade.registry import HOOKS

_LAUNCHES = "get_default_parser launch launch_from_openmpi launch_from_slurm launch_from_torch"
_IS = "is_dp_rank_0 is_no_pp_or_last_stage is_tp_rank_0 is_using_ddp is_using_pp is_using_sequence"
_COMMON = f"clip_grad_norm_fp32 {_IS} sync_model_param"
_FILES = "load_checkpoint save_checkpoint"
_DEVICE = "empty_cache set_to_cuda synchronize"
_SEEDS = "add_seed reset_seeds seed set_mode with_seed"
_SCHEDULES = "InterleavedPipelineSchedule NonPipelineSchedule PipelineSchedule"
_P2P = (
    "recv_backward recv_forward send_backward send_backward_recv_backward send_backward_recv_forward send_forward "
    "send_forward_recv_backward send_forward_recv_forward"
)
_COLLECTIVE = "all_gather all_reduce broadcast reduce_scatter"
_META = "recv_obj_meta recv_tensor_meta send_obj_meta send_tensor_meta"
_COMMUNICATION = "colonnade.compat.communication"
_LINEAR_1D = "Linear1D_Col Linear1D_Row"

NAMES: dict[str, dict[str, str]] = {
    "initialize": {"colonnade": f"{_LAUNCHES} initialize"},
    "amp.amp_type": {"colonnade.amp": "AMP_TYPE"},
    "context": {"colonnade.compat.old_utils": _SEEDS},
    "context.random": {"colonnade.compat.old_utils": _SEEDS},
    "context.config": {"colonnade.config": "Config"},
    "context.parallel_context": {"colonnade.core": "global_context"},
    "communication": {_COMMUNICATION: f"{_P2P} {_COLLECTIVE} {_META} ring_forward"},
    "communication.collective": {_COMMUNICATION: _COLLECTIVE},
    "communication.p2p": {_COMMUNICATION: _P2P},
    "communication.ring": {_COMMUNICATION: "ring_forward"},
    "communication.utils": {_COMMUNICATION: _META},
    "engine": {"colonnade.compat.old_utils": _SCHEDULES},
    "engine.schedule": {"colonnade.compat.old_utils": _SCHEDULES},
    "nn": {"colonnade.compat.old_nn": f"{_LINEAR_1D} CheckpointModule"},
    "nn.layer": {"colonnade.compat.old_nn": f"{_LINEAR_1D} CheckpointModule"},
    "nn.layer.parallel_1d": {"colonnade.compat.old_nn": _LINEAR_1D},
    "nn.layer.utils": {"colonnade.compat.old_nn": "CheckpointModule"},
    "nn.layer.wrapper": {"colonnade.compat.old_nn": "PipelineSharedModuleWrapper"},
    "nn.lr_scheduler": {
        "colonnade.compat.old_nn": "CosineAnnealingLR CosineAnnealingWarmupLR ExponentialLR MultiStepLR OneCycleLR "
        "PolynomialLR StepLR"
    },
    "nn.optimizer": {"colonnade.compat.old_nn": "CPUAdam FusedAdam FusedLAMB HybridAdam Lamb Lars"},
    "testing": {
        "colonnade.compat.old_utils": "assert_close assert_close_loose assert_equal assert_equal_in_group assert_not_equal "
        "parameterize rerun_if_address_is_in_use rerun_on_exception skip_if_not_enough_gpus"
    },
    "trainer": {"colonnade.compat.old_utils": "Trainer"},
    "trainer.hooks": {
        "colonnade.compat.old_utils": "LoadCheckpointHook LogTimingByEpochHook SaveCheckpointHook TensorboardHook"
    },
    "utils": {
        "colonnade.compat.old_utils": f"{_COMMON} {_FILES} {_DEVICE} DataParallelSampler MultiTimer Timer conditional_context "
        "report_memory_usage"
    },
    "utils.activation_checkpoint": {"colonnade.utils": "checkpoint"},
    "utils.checkpointing": {"colonnade.compat.old_utils": _FILES},
    "utils.common": {"colonnade.compat.old_utils": f"{_COMMON} conditional_context", "colonnade.utils": "print_rank_0"},
    "utils.cuda": {"colonnade.compat.old_utils": _DEVICE, "colonnade.utils": "get_current_device"},
    "utils.data_sampler": {"colonnade.compat.old_utils": "DataParallelSampler", "colonnade.utils": "get_dataloader"},
    "utils.memory": {"colonnade.compat.old_utils": "report_memory_usage"},
    "utils.timer": {"colonnade.compat.old_utils": "MultiTimer Timer"},
}
"""Module of the alias -> {module of Colonnade: names taken from it}."""

_EXPERTS = "Write colonnade.nn.moe.MoE(hidden, experts) in a model, and parallel = dict(expert=...) in the config"
_ROUTER = "Write colonnade.nn.moe.MoE(hidden, experts, router=colonnade.nn.moe.{}) "
_CONTEXT = {"MOE_CONTEXT": "Write parallel = dict(expert=...) in the config; launch makes the groups of the experts"}
MISSING: dict[str, dict[str, str]] = {
    "context": _CONTEXT,
    "context.moe_context": _CONTEXT,
    "core": _CONTEXT,
    "nn.layer.moe": {
        **dict.fromkeys(("MoeLayer", "MoeModule"), _EXPERTS),
        **dict.fromkeys(
            ("Experts", "FFNExperts", "TPExperts", "build_ffn_experts"),
            "Write colonnade.nn.moe.Experts(hidden, inner, experts), which is sharded over the expert and tensor modes",
        ),
        "Top1Router": _ROUTER.format("SwitchRouter(hidden, experts)"),
        "Top2Router": _ROUTER.format("TopKRouter(hidden, experts, k=2)"),
        **dict.fromkeys(
            ("NormalNoiseGenerator", "UniformNoiseGenerator"),
            _ROUTER.format("TopKRouter(hidden, experts, noise=...)"),
        ),
        **dict.fromkeys(
            ("load_moe_model", "save_moe_model"),
            "Use colonnade.checkpoint.CheckpointManager, which saves and loads sharded experts",
        ),
    },
}
"""Module of the alias -> {name without a counterpart: the replacement}."""


class Missing:
    """Placeholder for a name of Colossal-AI without a counterpart. It can be imported, but its use raises."""

    def __init__(self, name: str, instead: str) -> None:
        self._message = f"{name} of Colossal-AI has no counterpart in Colonnade. {instead}."

    def _refuse(self, *args: object, **options: object) -> NoReturn:
        raise ColonnadeError(self._message)

    __call__ = __mro_entries__ = __enter__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # protocols that Python looks up on any object
        self._refuse()


_ABSENT = object()
_changed: list[tuple[Any, str, Any]] = []


def add_names(alias: str, home: str) -> None:
    """Add Colossal-AI's names to the modules of the package `home`, and create the modules that only `alias` has."""
    for path in sorted({*NAMES, *MISSING}):
        module = _module(alias, home, path)
        for source, names in NAMES.get(path, {}).items():
            for name in names.split():
                _set(module, name, getattr(importlib.import_module(source), name))
        for name, instead in MISSING.get(path, {}).items():
            _set(module, name, Missing(f"{path}.{name}", instead))
    _set(
        sys.modules[f"{alias}.context.config"], "ConfigException", importlib.import_module(f"{home}.errors").ConfigError
    )
    _swap_hooks()


def remove_names() -> None:
    """Undo `add_names`."""
    while _changed:
        module, name, before = _changed.pop()
        if before is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, before)
    _swap_hooks()


def _module(alias: str, home: str, path: str) -> ModuleType:
    """The module of Colonnade at this path, or a new module under the alias only."""
    try:
        found = importlib.util.find_spec(f"{home}.{path}")
    except ModuleNotFoundError:
        found = None
    if found is not None:
        return importlib.import_module(f"{home}.{path}")
    # In sys.modules at once: a later import of the path would otherwise replace a function of that name (`initialize` is both).
    module = sys.modules[f"{alias}.{path}"] = ModuleType(f"{alias}.{path}", f"Colossal-AI's {path}, by Colonnade.")
    above, _, name = path.rpartition(".")
    parent = sys.modules.get(f"{alias}.{above}") or importlib.import_module(f"{home}.{above}".rstrip("."))
    if not hasattr(parent, name):
        _set(parent, name, module)
    return module


def _set(module: ModuleType, name: str, value: Any) -> None:
    _changed.append((module, name, vars(module).get(name, _ABSENT)))
    setattr(module, name, value)


def _swap_hooks() -> None:
    """Register the hooks that these names refer to now."""
    hooks = importlib.import_module("colonnade.trainer.hooks")
    for name in NAMES["trainer.hooks"]["colonnade.compat.old_utils"].split():
        if name in HOOKS:
            HOOKS.remove(name)
        if hasattr(hooks, name):
            HOOKS.register_module(name)(getattr(hooks, name))

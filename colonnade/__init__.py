"""Colonnade: multi-dimensional parallel training for PyTorch, checked against a single-process run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colonnade import _imports
from colonnade._imports import lazy_names
from colonnade.engine.model import register_family
from colonnade.version import __version__

if TYPE_CHECKING:
    from colonnade._launch import get_default_parser as get_default_parser
    from colonnade._launch import launch as launch
    from colonnade._launch import launch_from_openmpi as launch_from_openmpi
    from colonnade._launch import launch_from_slurm as launch_from_slurm
    from colonnade._launch import launch_from_torch as launch_from_torch
    from colonnade.config import Config as Config
    from colonnade.context.parallel_context import ParallelContext as ParallelContext
    from colonnade.context.parallel_mode import ParallelMode as ParallelMode
    from colonnade.engine.build import initialize as initialize
    from colonnade.engine.engine import Engine as Engine
    from colonnade.hf.parallelize import parallelize as parallelize
    from colonnade.hf.weights import from_pretrained as from_pretrained
    from colonnade.logging import get_dist_logger as get_dist_logger
    from colonnade.optim.clip import clip_grad_norm_ as clip_grad_norm_
    from colonnade.optim.clip import grad_norm as grad_norm
    from colonnade.parallel.meta import meta_init as meta_init
    from colonnade.parallel.placement import Replicate as Replicate
    from colonnade.parallel.placement import Shard as Shard
    from colonnade.parallel.placement import Tied as Tied
    from colonnade.parallel.placement import place as place
    from colonnade.parallel.placement import place_module as place_module
    from colonnade.parallel.placement import placement_of as placement_of
    from colonnade.parallel.split import split as split
    from colonnade.proof.api import verify as verify
    from colonnade.proof.watch import watch as watch
    from colonnade.testing.world import run_in_notebook as run_in_notebook
    from colonnade.trainer.trainer import Trainer as Trainer

_imports.install()
# The families of models that come with the package; they are imported when such a model comes to `initialize`.
register_family("colonnade.hf.family", signs=("loss_function", "lora_A"))
register_family("colonnade.nn.layer.spread", signs=("arrangement",))
__getattr__, __dir__, _names = lazy_names(
    __name__,
    {
        "colonnade._launch": "get_default_parser launch launch_from_openmpi launch_from_slurm launch_from_torch",
        "colonnade.config": "Config",
        "colonnade.context.parallel_context": "ParallelContext",
        "colonnade.context.parallel_mode": "ParallelMode",
        "colonnade.engine.build": "initialize",
        "colonnade.engine.engine": "Engine",
        "colonnade.hf.weights": "from_pretrained",
        "colonnade.logging": "get_dist_logger",
        "colonnade.optim.clip": "clip_grad_norm_ grad_norm",
        "colonnade.parallel.meta": "meta_init",
        "colonnade.parallel.placement": "Replicate Shard Tied place place_module placement_of",
        "colonnade.parallel.split": "split",
        "colonnade.hf.parallelize": "parallelize",
        "colonnade.testing.world": "run_in_notebook",
        "colonnade.trainer.trainer": "Trainer",
        "colonnade.proof.api": "verify",
        "colonnade.proof.watch": "watch",
    },
)
__all__ = ["__version__", *_names]

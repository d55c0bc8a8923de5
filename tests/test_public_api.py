"""The public names are exactly these; one more or one less is a decision."""

from __future__ import annotations

import importlib

import pytest

import colonnade

TOP = [
    "__version__",
    "Config",
    "Engine",
    "ParallelContext",
    "ParallelMode",
    "Replicate",
    "Shard",
    "Tied",
    "Trainer",
    "clip_grad_norm_",
    "from_pretrained",
    "get_default_parser",
    "get_dist_logger",
    "grad_norm",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "meta_init",
    "parallelize",
    "place",
    "place_module",
    "placement_of",
    "run_in_notebook",
    "split",
    "verify",
    "watch",
]

HOMES = {
    "colonnade.registry": ["GRADIENT_HANDLER", "DIST_GROUP_INITIALIZER", "ORDERS", "SCHEDULE"],
    "colonnade.engine": ["BaseGradientHandler", "BaseSchedule", "Engine", "initialize"],
    "colonnade.engine.gradient_handler": ["BaseGradientHandler"],
    "colonnade.engine.schedule": ["BaseSchedule"],
    "colonnade.context.parallel_mode": ["ParallelMode"],
    "colonnade.context.dist_group_initializer": ["ProcessGroupInitializer"],
    "colonnade.constants": ["INITIALIZER_MAPPING"],
    "colonnade.core": ["global_context"],
    "colonnade.context": ["Config", "ParallelContext", "ParallelMode"],
    "colonnade.logging": ["get_dist_logger", "disable_existing_loggers"],
}


def test_the_top_level_names():
    assert sorted(colonnade.__all__) == sorted(TOP)
    for name in TOP:
        assert getattr(colonnade, name) is not None


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in HOMES.items() for name in names])
def test_the_paths_of_the_seeds_are_the_real_homes(module, name):
    assert hasattr(importlib.import_module(module), name)


def test_an_unknown_name_is_an_ordinary_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nowhere'"):
        _ = colonnade.nowhere

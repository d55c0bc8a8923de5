"""Every snippet of "Add your own parallelism", run as it is printed, typos included."""

from __future__ import annotations

import enum
import importlib

import pytest
import torch
import torch.distributed as dist

from colonnade import compat
from colonnade._launch import launch
from colonnade.constants import INITIALIZER_MAPPING
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.registry import DIST_GROUP_INITIALIZER, GRADIENT_HANDLER
from colonnade.testing import run_world
from tests.seeds.snippets import OWN_PARALLELISM, blocks

ROOTS = pytest.mark.parametrize("root", ["colossalai", "colonnade"])
ENUM, INITIALIZER, MAPPING, PARALLEL, HANDLER, HANDLERS = range(6)


@pytest.fixture(autouse=True)
def _alias():
    compat.install()
    yield
    compat.uninstall()
    for registry, name in (
        (DIST_GROUP_INITIALIZER, "MyParallelInitializer"),
        (GRADIENT_HANDLER, "YourGradientHandler"),
    ):
        if registry.has(name):
            registry.remove(name)
    INITIALIZER_MAPPING.pop("new_mode", None)


def snippet(at: int, root: str, **names: object) -> dict[str, object]:
    """Run one block; `names` are what its surroundings in a user's file would have defined."""
    found = blocks(OWN_PARALLELISM, "python", root)
    assert len(found) == 6
    namespace: dict[str, object] = {"__name__": "users_file", **names}
    exec(found[at], namespace)
    return namespace


def surroundings(root: str) -> dict[str, object]:
    return {
        "DIST_GROUP_INITIALIZER": importlib.import_module(f"{root}.registry").DIST_GROUP_INITIALIZER,
        "ProcessGroupInitializer": importlib.import_module(
            f"{root}.context.dist_group_initializer"
        ).ProcessGroupInitializer,
        "Config": importlib.import_module(f"{root}.context").Config,
    }


@ROOTS
def test_the_enum_snippet_declares_a_mode_that_the_context_takes(root):
    theirs = snippet(ENUM, root, Enum=enum.Enum)["ParallelMode"]
    assert ParallelMode(theirs.DATA) is ParallelMode.DATA
    assert ParallelMode(theirs.NEW_MODE).value == "new_mode"
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        assert gpc.get_world_size(theirs.DATA) == 1


@ROOTS
def test_the_initializer_snippet_registers_and_takes_three_arguments_to_super(root):
    initializer = snippet(INITIALIZER, root, **surroundings(root))["MyParallelInitializer"]
    assert DIST_GROUP_INITIALIZER.get_module("MyParallelInitializer") is initializer
    config = {"parallel": {"pipeline": 2, "tensor": 2}}
    made = initializer(0, 8, config, 2, 2, 2, "first", arg2="second")
    assert (made.arg1, made.arg2, made.world_size) == ("first", "second", 8)
    assert (made.data_parallel_size, made.pipeline_parallel_size, made.tensor_parallel_size) == (2, 2, 2)
    assert made.init_parallel_groups() is None


@ROOTS
def test_the_mapping_snippet_changes_the_live_mapping(root):
    snippet(MAPPING, root, **{root: importlib.import_module(root)})
    assert INITIALIZER_MAPPING["new_mode"] == "MyParallelInitializer"


@ROOTS
def test_the_parallel_snippet_with_the_others_launches_a_world(root):
    values = run_world(4, _launch_the_recipe, root).values
    assert values == [(2, 2, 1.0), (2, 2, 1.0), (2, 2, 5.0), (2, 2, 5.0)]


def _launch_the_recipe(root: str) -> tuple[int, int, float]:
    """The whole recipe, in order: enum, initializer, mapping, config file."""
    compat.install()
    snippet(ENUM, root, Enum=enum.Enum)
    snippet(INITIALIZER, root, **surroundings(root))
    snippet(MAPPING, root, **{root: importlib.import_module(root)})
    config = {"parallel": snippet(PARALLEL, root, x=2)["parallel"]}
    config["parallel"]["tensor"] |= {"arg1": 1, "arg2": 2}  # "You can pass in your own arguments if there is any."
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        value = torch.tensor([float(gpc.get_global_rank())])
        dist.all_reduce(value, group=gpc.get_group(ParallelMode.TENSOR))
        return gpc.tensor_parallel_size, gpc.data_parallel_size, value.item()

"""`import colossalai` as an alias of colonnade."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import colonnade
from colonnade import compat
from colonnade._launch import launch
from colonnade.config import load_config
from colonnade.constants import INITIALIZER_MAPPING
from colonnade.context.dist_group_initializer import ProcessGroupInitializer
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ColonnadeError, ConfigError, LayoutError
from colonnade.registry import DIST_GROUP_INITIALIZER
from colonnade.testing import run_world


@pytest.mark.usefixtures("alias")
def test_the_alias_is_the_same_object_at_every_depth():
    import colossalai
    import colossalai.context.parallel_mode
    from colossalai.context.dist_group_initializer import ProcessGroupInitializer
    from colossalai.context.process_group_initializer import Initializer_2p5D
    from colossalai.context.process_group_initializer import ProcessGroupInitializer as SameInitializer
    from colossalai.registry import GRADIENT_HANDLER

    assert colossalai is colonnade
    assert (
        colossalai.constants.INITIALIZER_MAPPING is importlib.import_module("colonnade.constants").INITIALIZER_MAPPING
    )
    assert ProcessGroupInitializer.__module__.startswith("colonnade.")
    assert SameInitializer is ProcessGroupInitializer
    assert Initializer_2p5D.__module__.startswith("colonnade.")
    assert GRADIENT_HANDLER is importlib.import_module("colonnade.registry").GRADIENT_HANDLER
    assert colonnade.__spec__.name == "colonnade"
    assert colonnade.__name__ == "colonnade"


@pytest.mark.usefixtures("alias")
def test_a_path_that_colonnade_lacks_is_an_ordinary_import_error():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("colossalai.nowhere.at_all")


@pytest.mark.usefixtures("alias")
def test_hooks_take_the_ancestors_spelling():
    from colossalai.trainer import hooks

    from colonnade.registry import HOOKS

    saves = hooks.SaveCheckpointHook(5, checkpoint_dir="there", save_by_iter=True)
    assert (saves.interval, saves.folder.name, saves.by_epoch) == (5, "there", False)
    assert HOOKS.get_module("SaveCheckpointHook")(3, "there", None, True).by_epoch is False
    assert hooks.SaveCheckpointHook(1, folder="there").folder.name == "there"
    assert hooks.LoadCheckpointHook(checkpoint_dir="there").folder.name == "there"
    assert HOOKS.get_module("TensorboardHook")(log_dir="there").folder.name == "there"


def test_without_the_alias_there_is_one_spelling():
    compat.install()
    compat.uninstall()
    from colonnade.registry import HOOKS
    from colonnade.trainer import hooks

    assert "TensorboardHook" not in HOOKS
    assert not hasattr(hooks, "TensorboardHook")
    assert HOOKS.get_module("SaveCheckpointHook") is hooks.SaveCheckpointHook
    with pytest.raises(TypeError, match="checkpoint_dir"):
        hooks.SaveCheckpointHook(checkpoint_dir="there")


def test_installing_twice_and_taking_it_away():
    compat.install()
    compat.install()
    compat.uninstall()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("colossalai")


def test_a_real_one_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "colossalai").mkdir()
    (tmp_path / "colossalai" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ColonnadeError, match="the real colossalai is installed at"):
        compat.install()


@pytest.mark.slow
def test_the_alias_works_in_a_fresh_interpreter():
    code = (
        "from colonnade import compat; compat.install(); import colossalai; "
        "from colossalai.engine import BaseGradientHandler; from colossalai.core import global_context as gpc; "
        "print(colossalai.launch.__name__, BaseGradientHandler.__name__, gpc.world_size)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["launch", "BaseGradientHandler", "1"]


def test_a_config_may_use_the_old_name_of_a_key_with_the_alias_only():
    old = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4}
    with pytest.raises(ConfigError, match="Write num_microbatches = 4"):
        load_config(old)
    compat.install()
    try:
        config = load_config(old)
        assert config.num_microbatches == config.NUM_MICRO_BATCHES == 4
        assert load_config(config.freeze()) is config
        with pytest.raises(ConfigError, match="Write num_microbatches = 4"):
            load_config({**old, "num_microbatches": 2})
    finally:
        compat.uninstall()
    with pytest.raises(ConfigError, match="Write num_microbatches = 4"):
        load_config(old)


MINE = ParallelMode.register("COMPAT_MINE", "compat_mine")
PAIRS = [[0, 1], [2, 3]]


class Ancestral(ProcessGroupInitializer):
    """As the ancestor's initializers were: creates its groups itself and returns tuples."""

    def init_dist_group(self):
        mine = None
        for ranks in PAIRS:
            group = dist.new_group(ranks)
            if self.rank in ranks:
                mine = (ranks.index(self.rank), 2, group, group, ranks, MINE)
        return mine


class CreatesItself(Ancestral):
    """Creates groups under the new method's name: then it too runs when the world is up."""

    def init_parallel_groups(self):
        return [self.init_dist_group()]


def _launch_with(initializer: str, installed: bool = True) -> object:
    if installed:
        compat.install()
    DIST_GROUP_INITIALIZER.register_module(globals()[initializer])
    INITIALIZER_MAPPING["by_hand"] = initializer
    try:
        with launch(
            {"parallel": {"tensor": {"size": 2, "mode": "by_hand"}}}, context=ParallelContext(), verbose=False
        ) as gpc:
            value = torch.tensor([float(gpc.get_global_rank())])
            dist.all_reduce(value, group=gpc.get_group(MINE))
            return value.item(), gpc.layout.groups(MINE)
    except LayoutError as error:
        return str(error)


@pytest.mark.parametrize("initializer", ["Ancestral", "CreatesItself"])
def test_initializers_of_the_ancestors_kind_work(initializer):
    assert run_world(4, _launch_with, initializer).values == [(1.0, PAIRS), (1.0, PAIRS), (5.0, PAIRS), (5.0, PAIRS)]


def test_an_initializer_of_the_ancestors_kind_cannot_be_planned():
    DIST_GROUP_INITIALIZER.register_module(Ancestral)
    INITIALIZER_MAPPING["by_hand"] = "Ancestral"
    with pytest.raises(LayoutError, match="creates process groups itself"):
        build_layout({"parallel": {"tensor": {"size": 2, "mode": "by_hand"}}}, 4)


def test_without_the_alias_an_initializer_of_the_ancestors_kind_is_refused_on_every_rank():
    for message in run_world(4, _launch_with, "Ancestral", False).values:
        assert "creates process groups itself" in message
        assert "colonnade.compat.install()" in message


def _cpu_groups() -> tuple[bool, bool]:
    compat.install()
    with launch({"parallel": {"pipeline": 2, "tensor": 2}}, context=ParallelContext(), verbose=False) as gpc:
        data = ParallelMode.DATA
        return gpc.get_cpu_group(data) is gpc.get_group(data), gpc.get_cpu_group(ParallelMode.GLOBAL) is not None


def test_where_the_backend_is_gloo_the_cpu_group_is_the_group():
    assert run_world(4, _cpu_groups).values[3] == (True, True)
    assert not hasattr(ParallelContext, "get_cpu_group")


class _Twin:
    """Stands for a group of another backend."""


def test_where_it_is_not_every_group_gets_a_gloo_twin(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    created = {}

    class Groups:
        def create(self, ranks, backend, alone):
            return created.setdefault((ranks, backend), _Twin())

        def group(self, ranks):
            return own[ranks]

    class Context:
        layout = build_layout({"parallel": {"tensor": 2}}, 4)

        def get_global_rank(self):
            return 3

        def get_group(self, mode):
            return own[tuple(self.layout.group_of(mode, 3))]

    own = {ranks: _Twin() for ranks in Context.layout.rank_sets()}
    compat._hook.after_groups(Context(), Groups())
    assert len(created) == 1 + 2 + 2 + 4  # world, data, tensor, pipeline: on all ranks, so that they count alike
    assert compat.get_cpu_group(Context(), ParallelMode.DATA) is created[(1, 3), "gloo"]
    assert compat.get_cpu_group(Context(), ParallelMode.GLOBAL) is created[(0, 1, 2, 3), "gloo"]

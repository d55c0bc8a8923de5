"""`import colossalai` as an alias of colonnade."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import colonnade
from colonnade import compat
from colonnade.config import load_config
from colonnade.errors import ColonnadeError, ConfigError


@pytest.fixture
def alias():
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.usefixtures("alias")
def test_the_alias_is_the_same_object_at_every_depth():
    import colossalai
    import colossalai.context.parallel_mode
    from colossalai.context.dist_group_initializer import ProcessGroupInitializer
    from colossalai.registry import GRADIENT_HANDLER

    assert colossalai is colonnade
    assert (
        colossalai.constants.INITIALIZER_MAPPING is importlib.import_module("colonnade.constants").INITIALIZER_MAPPING
    )
    assert ProcessGroupInitializer.__module__.startswith("colonnade.")
    assert GRADIENT_HANDLER is importlib.import_module("colonnade.registry").GRADIENT_HANDLER
    assert colonnade.__spec__.name == "colonnade"
    assert colonnade.__name__ == "colonnade"


@pytest.mark.usefixtures("alias")
def test_a_path_that_colonnade_lacks_is_an_ordinary_import_error():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("colossalai.nowhere.at_all")


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
    with pytest.raises(ColonnadeError, match="a real colossalai is installed at"):
        compat.install()


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

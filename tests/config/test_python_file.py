"""Running a config file: what comes out of it, and that nothing of it stays behind."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from colonnade.config import load_config


@pytest.fixture(autouse=True)
def unchanged_imports() -> Iterator[None]:
    path, modules = list(sys.path), dict(sys.modules)
    yield
    assert sys.path == path
    sys.modules.clear()
    sys.modules.update(modules)


def write(folder: Path, **files: str) -> Path:
    """Write `name.py` for each name; return the path of the last."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder / f"{name}.py"


def test_functions_stay_and_modules_classes_and_dunder_names_go(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        train="""
from __future__ import annotations
import math
import os.path as p
from math import log, sqrt
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Thing:
    x: int = 1

def double(x): return factor * x

factor = 2
_private = 3
__dunder = 4
thing = Thing()
here = Path(__file__).name
run_as = __name__
""",
    )
    config = load_config(file)
    assert set(config) == {
        *("sqrt", "dataclass", "double", "factor", "_private", "thing", "here", "run_as"),
    }
    assert config.double(4) == 8
    assert config.here == "train.py"
    assert config.run_as != "__main__"


def test_the_file_is_compiled_by_its_own_rules(tmp_path: Path) -> None:
    file = write(tmp_path, train="def f(x: 1 + 1): ...\nkind = f.__annotations__['x']\n")
    assert load_config(file).kind == 2


def test_a_function_under_a_key_of_ours_is_an_error_unless_imported(tmp_path: Path) -> None:
    file = write(tmp_path, train="def log():\n    pass\n")
    with pytest.raises(ValueError, match=r"train\.py.* log = <function log"):
        load_config(file)


def test_neighbours_are_imported_and_do_not_stay(tmp_path: Path) -> None:
    one = write(tmp_path / "one", common="size = 1", deep="from common import size", train="from deep import *")
    two = write(tmp_path / "two", common="size = 2", deep="from common import size", train="from deep import *")
    assert load_config(one).size == 1
    assert load_config(two).size == 2
    assert not {"common", "deep", "train"} & set(sys.modules)


def test_packages_beside_the_file_do_not_stay_either(tmp_path: Path) -> None:
    write(tmp_path / "parts", __init__="", inner="size = 3")
    write(tmp_path / "bare", inner="size = 4")
    file = write(tmp_path, train="from parts.inner import size\nfrom bare.inner import size as other")
    assert load_config(file) == {"size": 3, "other": 4}
    assert not {"parts", "parts.inner", "bare", "bare.inner"} & set(sys.modules)


def test_a_neighbour_hides_a_loaded_module_of_its_name_only_while_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "project", common="size = 'the project'")
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    loaded = importlib.import_module("common")
    file = write(tmp_path / "configs", common="size = 'the neighbour'", train="from common import size")
    assert load_config(file).size == "the neighbour"
    assert sys.modules["common"] is loaded
    monkeypatch.undo()


def test_a_module_that_a_plain_import_finds_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a handler registered by a neighbour would be registered again when the script imports it."""
    file = write(
        tmp_path,
        first="import builtins\nbuiltins.loads.append(__name__)",
        second="import builtins\nbuiltins.loads.append(__name__)",
        train="import first, second",
    )
    loads: list[str] = []
    monkeypatch.setattr("builtins.loads", loads, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("first")
    load_config(file)
    importlib.import_module("second")
    load_config(file)
    assert loads == ["first", "second"]
    monkeypatch.undo()


def test_a_module_found_through_a_link_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "real", linked="def f(): ...", train="from linked import f")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.syspath_prepend(str(tmp_path / "link"))
    module = importlib.import_module("linked")
    assert load_config(file).f is module.f
    assert sys.modules["linked"] is module
    monkeypatch.undo()


def test_modules_of_an_environment_below_the_folder_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / ".venv" / "site", thirdparty="x = 1")
    monkeypatch.syspath_prepend(str(tmp_path / ".venv" / "site"))
    file = write(tmp_path, train="from thirdparty import x")
    assert load_config(file).x == 1
    assert "thirdparty" in sys.modules
    monkeypatch.undo()


def test_main_and_the_standard_library_are_not_hidden(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        __main__="",
        random="broken = 1",
        train="import random, __main__\nr = random.Random(0)\nmain = __main__.__file__",
    )
    before = sys.modules["__main__"]
    assert load_config(file).main == before.__file__
    assert sys.modules["__main__"] is before


def test_the_path_is_restored_when_the_file_raises(tmp_path: Path) -> None:
    file = write(tmp_path, common="size = 1", train="import common\n1 / 0")
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        load_config(file)
    assert "common" not in sys.modules


def test_a_config_may_load_another(tmp_path: Path) -> None:
    write(tmp_path / "base", extra="lr = 0.5", base="from extra import lr\nparallel = dict(data=2)")
    file = write(
        tmp_path / "run",
        train="""
from pathlib import Path
from colonnade.config import load_config as _load
base = _load(Path(__file__).parent.parent / "base" / "base.py")
lr = base.lr
parallel = dict(base.parallel, tensor=2)
""",
    )
    config = load_config(file)
    assert config.lr == 0.5
    assert config.parallel == {"data": 2, "tensor": 2}

"""Config files: what comes out of one, that nothing of it stays behind, and errors with path, place and what to do."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from colonnade.config import load_config
from colonnade.errors import ConfigError

pytestmark = pytest.mark.usefixtures("unchanged_imports")


def failure(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert str(caught.value).count(" [C002]") == 1
    return str(caught.value).replace(" [C002]", "")


def raised(folder: Path, text: str | bytes, name: str = "train.py") -> list[str]:
    """The rows of the error, without the head."""
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    head, *rows = failure(file).splitlines()
    assert head == f"colonnade: 1 problem in {file}"
    return [row.strip() for row in rows]


def test_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "serve.toml").touch()
    (tmp_path / "train.md").touch()
    assert f"trian.py  no such file in {tmp_path}. Did you mean train.py?" in failure(tmp_path / "trian.py")
    assert "Did you mean train.py?" in failure(tmp_path / "train")
    assert "Config files in it: serve.toml, train.py" in failure(tmp_path / "zzzzz.qqq")
    assert f"there is no folder {tmp_path / 'no'}" in failure(tmp_path / "no" / "train.py")


def test_names_that_are_no_path(tmp_path: Path) -> None:
    assert "cannot be read: File name too long" in failure("x" * 5000)
    assert "is a folder; give a file in it: none" in failure(tmp_path)


def test_wrong_suffix(tmp_path: Path) -> None:
    assert raised(tmp_path, "a: 1", "train.yaml") == [
        "train.yaml  the name of a config file must end in .py or .toml; rename the file"
    ]


def test_not_utf8_gives_the_offset(tmp_path: Path) -> None:
    assert raised(tmp_path, b"# caf\xe9\n") == ["train.py  is not UTF-8: byte 0xe9 at offset 5. Save it as UTF-8"]
    assert raised(tmp_path, b"a = '\xff'\n", "train.toml")[0].startswith("train.toml  is not UTF-8: byte 0xff")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_no_permission(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.touch(mode=0)
    assert "cannot be read: Permission denied" in failure(file)


def test_syntax_error_shows_its_line(tmp_path: Path) -> None:
    assert raised(tmp_path, "x = 1\ny = = 2\n") == ["train.py:2  SyntaxError: invalid syntax", "train.py:2 | y = = 2"]
    assert raised(tmp_path, "x = 1\n  y = 2\n")[0] == "train.py:2  SyntaxError: unexpected indent"
    (row,) = raised(tmp_path, b"x = 1\0\n")
    assert "null bytes" in row


def test_exception_shows_the_line_of_the_file_and_the_calls_below(tmp_path: Path) -> None:
    assert raised(tmp_path, "x = 1\n\nbatch = y * 2\n") == [
        "train.py:3  NameError: name 'y' is not defined",
        "train.py:3 | batch = y * 2",
    ]
    (tmp_path / "helper.py").write_text("def ratio(x):\n    return 1 / x\n")
    assert raised(tmp_path, "from helper import ratio\nr = ratio(0)\n") == [
        "train.py:2  ZeroDivisionError: division by zero",
        "train.py:2 | r = ratio(0)",
        "helper.py:2 | return 1 / x",
    ]
    (tmp_path / "broken.py").write_text("x = (\n")
    rows = raised(tmp_path, "\nimport broken\n")
    assert rows[0].startswith("train.py:2  SyntaxError: '(' was never closed (broken.py, line 1)")


def test_deep_recursion_is_cut(tmp_path: Path) -> None:
    rows = raised(tmp_path, "def f(n):\n    return f(n + 1)\nx = f(0)\n")
    assert rows[0].startswith("train.py:3  RecursionError")
    assert rows[1] == "train.py:3 | x = f(0)"
    assert len(rows) == 3


def test_exit_in_a_config_does_not_end_the_run(tmp_path: Path) -> None:
    assert raised(tmp_path, "import sys\nsys.exit(3)\n")[0] == "train.py:2  SystemExit: 3"


def test_traceback_is_not_of_our_insides(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("x = undefined\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    text = "".join(traceback.format_exception(caught.value))
    assert "exec(" not in text
    assert "During handling" not in text


def test_toml_error_has_its_line(tmp_path: Path) -> None:
    rows = raised(tmp_path, "a = 1\nb = [1,\n\nc = = 2\n", "train.toml")
    assert rows[0].startswith("train.toml:4  ")
    assert rows[1] == "train.toml:4 | c = = 2"
    assert raised(tmp_path, "a = ", "train.toml")[0].startswith("train.toml")


def test_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    for name in ("train.py", "train.toml"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbfx = 1\n")
        assert load_config(tmp_path / name) == {"x": 1}


@pytest.fixture
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
from math import sqrt
from re import compile
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
    assert set(config) == {*("sqrt", "dataclass", "double", "factor", "_private", "thing", "here", "run_as")}
    assert config.double(4) == 8
    assert config.here == "train.py"
    assert config.run_as != "__main__"


def test_the_file_is_compiled_by_its_own_rules(tmp_path: Path) -> None:
    file = write(tmp_path, train="def f(x: 1 + 1): ...\nkind = f.__annotations__['x']\n")
    assert load_config(file).kind == 2


def test_a_function_under_a_key_of_ours_is_an_error_unless_imported(tmp_path: Path) -> None:
    file = write(tmp_path, train="def compile():\n    pass\n")
    with pytest.raises(ValueError, match=r"train\.py.* compile = <function compile"):
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


def test_main_and_the_standard_library_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(
        tmp_path,
        __main__="",
        random="broken = 1",
        train="import random, __main__\nr = random.Random(0)\nmain = __main__.who",
    )
    before = sys.modules["__main__"]
    monkeypatch.setattr(before, "who", "the script", raising=False)
    assert load_config(file).main == "the script"
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

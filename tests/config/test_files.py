"""Files that cannot be read: each error has the path, the place and what to do."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

from colonnade.config import load_config
from colonnade.errors import ConfigError


def failure(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


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
    assert "Config files there: serve.toml, train.py" in failure(tmp_path / "zzzzz.qqq")
    assert f"there is no folder {tmp_path / 'no'}" in failure(tmp_path / "no" / "train.py")


def test_names_that_are_no_path(tmp_path: Path) -> None:
    assert "cannot be read: File name too long" in failure("x" * 5000)
    assert "is a folder; give a file: none" in failure(tmp_path)


def test_wrong_suffix(tmp_path: Path) -> None:
    assert raised(tmp_path, "a: 1", "train.yaml") == ["train.yaml  a config file ends in .py or .toml; rename it"]


def test_not_utf8_gives_the_offset(tmp_path: Path) -> None:
    assert raised(tmp_path, b"# caf\xe9\n") == ["train.py  is not UTF-8: byte 0xe9 at offset 5. Save it as UTF-8"]
    assert raised(tmp_path, b"a = '\xff'\n", "train.toml")[0].startswith("train.toml  is not UTF-8: byte 0xff")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_no_permission(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.touch(mode=0)
    assert "cannot be read: Permission denied" in failure(file)


def test_syntax_error_shows_its_line(tmp_path: Path) -> None:
    assert raised(tmp_path, "x = 1\ny = = 2\n") == [
        "train.py:2  SyntaxError: invalid syntax",
        "train.py:2 | y = = 2",
    ]
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
    assert len(rows) == 7


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

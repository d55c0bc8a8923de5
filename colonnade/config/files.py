"""Reading a config file, `.py` or `.toml`, to plain values; every error has the path, the line and what to do."""

from __future__ import annotations
import __future__

import contextlib
import difflib
import importlib
import inspect
import os
import re
import runpy
import sys
import tomllib
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from colonnade.config.problems import ConfigSource, file_error
from colonnade.config.settings import KEYS
from colonnade.errors import ConfigError, listed
from colonnade.paths import local_path

_SUFFIXES = (".py", ".toml")
_reading: ContextVar[Path | None] = ContextVar("config_file", default=None)


def read_file(path: str | Path) -> tuple[dict[str, Any], ConfigSource]:
    """Return the values of a config file and where they came from; ConfigError with the path if that fails."""
    file = local_path(path, "the config").expanduser()
    source = ConfigSource(str(path), file.name, _read_text(str(path), file))
    return (_read_toml(source) if file.suffix == ".toml" else _read_python(source, file.resolve())), source


def _read_text(given: str, file: Path) -> str:
    try:
        if not file.exists():
            raise file_error(given, file.name, _missing(file))
        if file.is_dir():
            raise file_error(given, file.name, f"is a folder; give a file: {listed(_config_names(file))}")
        if file.suffix not in _SUFFIXES:
            raise file_error(given, file.name, f"a config file ends in {' or '.join(_SUFFIXES)}; rename it")
        return file.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        text = f"is not UTF-8: byte 0x{byte:02x} at offset {error.start}. Save it as UTF-8"
        raise file_error(given, file.name, text) from None
    except OSError as error:
        raise file_error(given, file.name, f"cannot be read: {error.strerror}") from None


def _missing(file: Path) -> str:
    if not file.parent.is_dir():
        return f"no such file: there is no folder {file.parent}"
    names = _config_names(file.parent)
    close = difflib.get_close_matches(file.name, names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Config files there: {listed(names[:8])}"
    return f"no such file in {file.parent.absolute()}. {hint}"


def _config_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.suffix in _SUFFIXES)


def _read_toml(source: ConfigSource) -> dict[str, Any]:
    try:
        return dict(tomllib.loads(source.text))
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        raise _failed(source, str(error), int(place[1]) if place else None) from None


def _read_python(source: ConfigSource, path: Path) -> dict[str, Any]:
    """Run the file and return the names it leaves: functions too, but no modules, classes and dunder names."""
    outer = _reading.set(path)
    try:
        with _importing_from(str(path.parent)):
            names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError) and error.filename == str(path):
            raise _failed(source, f"SyntaxError: {error.msg}", error.lineno) from None
        raise _raised(source, path, error) from None
    finally:
        _reading.reset(outer)
    return {name: value for name, value in names.items() if _is_setting(name, value, names["__name__"])}


def refuse_in_a_config() -> None:
    """Of a call that only scripts make: a script that was given where a config is wanted must not start to train."""
    if (file := _reading.get()) is not None:
        raise ConfigError(
            f"{file.name} calls launch(): it is a script, not a config. `colonnade run {file.name}` runs it; here give the config"
        )


def _is_setting(name: str, value: Any, module: str) -> bool:
    if name.startswith("__") or inspect.ismodule(value) or inspect.isclass(value):
        return False
    if isinstance(value, __future__._Feature):
        return False
    # `from re import compile` is no setting of ours; `def compile()` is one, and wrong.
    imported = inspect.isroutine(value) and getattr(value, "__module__", None) != module
    return not (imported and name in KEYS)


@contextlib.contextmanager
def _importing_from(folder: str) -> Iterator[None]:
    """Let a config import its neighbours. They are forgotten afterwards unless any import would find them."""
    if any(os.path.realpath(entry) == folder for entry in sys.path):
        yield
        return
    importlib.invalidate_caches()
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
        new = set(sys.modules) - before
        neighbours = {name for name in new if "." not in name and _is_in(sys.modules[name], folder)}
        for name in new:
            if name.partition(".")[0] in neighbours:
                del sys.modules[name]


def _is_in(module: ModuleType, folder: str) -> bool:
    """Whether a top-level module was found directly in `folder`, not in an environment further down."""
    places = getattr(module, "__path__", None) or [getattr(module, "__file__", None) or ""]
    return os.path.realpath(os.path.dirname(next(iter(places)))) == folder


def _raised(source: ConfigSource, path: Path, error: BaseException) -> ConfigError:
    """The error of a file that raised: the line of the file, and the last one called from there; none of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [index for index, frame in enumerate(frames) if frame.filename == str(path)]
    calls = frames[own[0] :] if own else []
    rows = [f"{Path(frame.filename).name}:{frame.lineno} | {frame.line}" for frame in (*calls[:1], *calls[1:][-1:])]
    line = calls[0].lineno if calls else None
    return file_error(source.name, source.file, f"{type(error).__name__}: {error}", line=line, shown="\n".join(rows))


def _failed(source: ConfigSource, text: str, line: int | None) -> ConfigError:
    """The error of a text that cannot be read, with the line that is at fault."""
    rows = source.text.splitlines()
    shown = f"{source.file}:{line} | {rows[line - 1]}" if line is not None and 0 < line <= len(rows) else ""
    return file_error(source.name, source.file, text, line=line, shown=shown)

"""Reads a config file, `.py` or `.toml`. Errors name the path, the line and the next step."""

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
    """The values of a config file and their source. Raises ConfigError with the path and line.

    A `.py` file is executed; its values are the remaining names: also functions, but no modules, classes and dunder names.
    """
    file = local_path(path, "the config").expanduser()
    source = ConfigSource(str(path), file.name, _read_text(str(path), file))
    if file.suffix == ".toml":
        try:
            return dict(tomllib.loads(source.text)), source
        except tomllib.TOMLDecodeError as error:
            place = re.search(r"at line (\d+)", str(error))
            raise _failed(source, str(error), int(place[1]) if place else None) from None

    script = file.resolve()
    outer = _reading.set(script)
    try:
        with _importing_from(str(script.parent)):
            names = runpy.run_path(str(script))
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError) and error.filename == str(script):
            raise _failed(source, f"SyntaxError: {error.msg}", error.lineno) from None
        # The line of the config file that failed, and the innermost line below it; none of this package.
        frames = traceback.extract_tb(error.__traceback__)
        own = [index for index, frame in enumerate(frames) if frame.filename == str(script)]
        calls = frames[own[0] :] if own else []
        rows = [f"{Path(frame.filename).name}:{frame.lineno} | {frame.line}" for frame in (*calls[:1], *calls[1:][-1:])]
        line = calls[0].lineno if calls else None
        text = f"{type(error).__name__}: {error}"
        raise file_error(source.name, source.file, text, line=line, shown="\n".join(rows)) from None
    finally:
        _reading.reset(outer)

    values = {}
    for name, value in names.items():
        if name.startswith("__") or inspect.ismodule(value) or inspect.isclass(value):
            continue
        if isinstance(value, __future__._Feature):
            continue
        # `from re import compile` sets no key; `def compile()` does, and is reported as a wrong value.
        imported = inspect.isroutine(value) and getattr(value, "__module__", None) != names["__name__"]
        if not (imported and name in KEYS):
            values[name] = value
    return values, source


def _read_text(given: str, file: Path) -> str:
    try:
        if not file.exists():
            raise file_error(given, file.name, _missing(file))
        if file.is_dir():
            raise file_error(given, file.name, f"is a folder; give a file in it: {listed(_config_names(file))}")
        if file.suffix not in _SUFFIXES:
            raise file_error(
                given, file.name, f"the name of a config file must end in {' or '.join(_SUFFIXES)}; rename the file"
            )
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
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Config files in it: {listed(names[:8])}"
    return f"no such file in {file.parent.absolute()}. {hint}"


def _config_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.suffix in _SUFFIXES)


def reject_script_as_config() -> None:
    """Raise if a config file is being executed. Called by `launch`, so that a script passed as a config does not train."""
    if (file := _reading.get()) is not None:
        raise ConfigError(
            f"{file.name} calls launch(): it is a script, not a config. `colonnade run {file.name}` runs it; give its config here"
        )


@contextlib.contextmanager
def _importing_from(folder: str) -> Iterator[None]:
    """Let a config file import modules of its folder; they are unloaded afterwards, unless the folder is on the path anyway."""
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
        from_folder = {name for name in new if "." not in name and _is_in(sys.modules[name], folder)}
        for name in new:
            if name.partition(".")[0] in from_folder:
                del sys.modules[name]


def _is_in(module: ModuleType, folder: str) -> bool:
    """Whether a top-level module was found directly in `folder`, not in a virtual environment below it."""
    places = getattr(module, "__path__", None) or [getattr(module, "__file__", None) or ""]
    return os.path.realpath(os.path.dirname(next(iter(places)))) == folder


def _failed(source: ConfigSource, text: str, line: int | None) -> ConfigError:
    """The error for a text that cannot be parsed, with the faulty line."""
    rows = source.text.splitlines()
    shown = f"{source.file}:{line} | {rows[line - 1]}" if line is not None and 0 < line <= len(rows) else ""
    return file_error(source.name, source.file, text, line=line, shown=shown)

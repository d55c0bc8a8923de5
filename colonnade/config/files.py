"""Reading a config file: `.py` or `.toml` to plain values, and where each key stands in it."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from colonnade.config.problems import Source, file_error
from colonnade.config.python_file import run_python_file
from colonnade.config.source_lines import Lines, python_lines, toml_lines
from colonnade.errors import ConfigError, listed

_SUFFIXES = (".py", ".toml")
_FRAMES_SHOWN = 6


def read_file(path: str | Path) -> tuple[dict[str, Any], Source]:
    """Return the values of a config file and its key lines; ConfigError with the path if that fails."""
    given, file = str(path), Path(path).expanduser()
    text = _read_text(given, file)
    if file.suffix == ".toml":
        values, lines = _read_toml(given, file, text)
    else:
        values, lines = _read_python(given, file, text)
    return values, Source(given, file.name, lines)


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


def _read_toml(given: str, file: Path, text: str) -> tuple[dict[str, Any], Lines]:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return toml.loads(text), toml_lines(text)
    except toml.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = int(place[1]) if place else None
        raise file_error(given, file.name, str(error), line=line, shown=_row(file, text, line)) from None


def _read_python(given: str, file: Path, text: str) -> tuple[dict[str, Any], Lines]:
    path = file.resolve()
    try:
        return run_python_file(path, text), python_lines(text)
    except SyntaxError as error:
        if error.filename == str(path):
            shown = _row(file, text, error.lineno)
            raise file_error(given, file.name, f"SyntaxError: {error.msg}", line=error.lineno, shown=shown) from None
        raise _raised(given, file, path, error) from None
    except (Exception, SystemExit) as error:
        raise _raised(given, file, path, error) from None


def _raised(given: str, file: Path, path: Path, error: BaseException) -> ConfigError:
    """The error of a file that raised: the line of the file, then the calls from there on, none of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [index for index, frame in enumerate(frames) if frame.filename == str(path)]
    calls = frames[own[0] :] if own else []
    rows = [f"{Path(frame.filename).name}:{frame.lineno} | {frame.line}" for frame in _ends(calls)]
    line = calls[0].lineno if own else None
    text = f"{type(error).__name__}: {error}"
    return file_error(given, file.name, text, line=line, shown="\n".join(rows))


def _ends(frames: list[traceback.FrameSummary]) -> Iterable[traceback.FrameSummary]:
    """The first call and the last ones: the config's own line, and where it failed."""
    return frames if len(frames) <= _FRAMES_SHOWN else [frames[0], *frames[1 - _FRAMES_SHOWN :]]


def _row(file: Path, text: str, line: int | None) -> str:
    rows = text.splitlines()
    return f"{file.name}:{line} | {rows[line - 1]}" if line is not None and 0 < line <= len(rows) else ""

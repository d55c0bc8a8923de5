"""`Config`, a dict with attribute access that can be frozen, and `load_config`, which reads and checks a `.py` or `.toml` file.

Errors name the path, the line and the next step.
"""

from __future__ import annotations
import __future__

import contextlib
import copy
import difflib
import importlib
import inspect
import os
import re
import runpy
import sys
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from pprint import pformat
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from colonnade.config.fields import ANYTHING, Rule, keys_of
from colonnade.config.problems import ALIASES, ConfigSource, file_error, shortened
from colonnade.config.settings import KEYS, require_valid
from colonnade.errors import ConfigError, did_you_mean, listed
from colonnade.paths import local_path

_SUFFIXES = (".py", ".toml")
_reading: ContextVar[Path | None] = ContextVar("config_file", default=None)


def read_file(path: str | Path) -> tuple[dict[str, Any], ConfigSource]:
    """Read a config file; returns its values and their source. Raises ConfigError with the path and line.

    A `.py` file is executed. Its values are the global names afterwards, without modules, classes and dunder names.
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
    """Raise if a config file is being executed. Called by `launch`: it detects a training script that was passed as the config."""
    if (file := _reading.get()) is not None:
        raise ConfigError(
            f"{file.name} calls launch(), so it is a script and not a config. Run it with `colonnade run "
            f"{file.name}`, and give its config file here."
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


Self = TypeVar("Self", bound="Config")

_KEYS_SHOWN = 20


class Config(dict[str, Any]):
    """A dict whose keys are also attributes at every depth: `config.parallel.tensor.size`.

    Dicts, lists and tuples are copied on insertion, and every dict in them becomes a Config. Keys that are also method names
    are read as `config["items"]`. A copy is never frozen; a pickle keeps the frozen state. `str(config)` is a valid config
    file, with one line `key = value` for each key.
    """

    __slots__ = ("_frozen",)
    _frozen: bool

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_frozen", False)
        self.update(*args, **kwargs)

    @classmethod
    def from_file(cls: type[Self], path: str | Path) -> Self:
        """Read and check a `.py` or `.toml` file. One ConfigError lists all problems."""
        values, source = read_file(path)
        return _checked(cls(values), source)

    def freeze(self: Self) -> Self:
        """Freeze this config at every depth, so that later changes raise; returns self.

        Lists become `FrozenList`, sets become frozensets.
        """
        for key, value in self.items():
            super().__setitem__(key, _as_frozen(value))
        object.__setattr__(self, "_frozen", True)
        return self

    def copy(self: Self) -> Self:
        """An independent copy that is not frozen. Values other than dicts, lists and tuples are shared."""
        return type(self)(self)

    def update(self: Self, /, *args: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """Set keys as `dict.update` does; returns self."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        self._require_open(f"remove {key!r}")
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        self._require_open("remove a key")
        return super().popitem()

    def clear(self) -> None:
        self._require_open("remove every key")
        super().clear()

    def __setitem__(self, key: str, value: Any) -> None:
        self._require_open(f"set {key!r}")
        try:
            super().__setitem__(key, _adopted(value))
        except RecursionError:
            raise ConfigError(
                f"{key!r} contains itself or is nested too deeply. Write its values out without a reference to itself.",
                code="C002",
            ) from None

    def __delitem__(self, key: str) -> None:
        self._require_open(f"remove {key!r}")
        super().__delitem__(key)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(self._no_such(name), name=name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise AttributeError(f"{name!r} is a method of Config; write config[{name!r}] = ...", name=name)
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(self._no_such(name), name=name)
        del self[name]

    def __or__(self: Self, other: Any) -> Self:  # type: ignore[override]
        return self.copy().update(other) if isinstance(other, dict) else NotImplemented

    def __ior__(self: Self, other: Any) -> Self:  # type: ignore[override]
        return self.update(other)

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *(key for key in self if isinstance(key, str))]

    def __str__(self) -> str:
        rows = ((f"{key} = ", pformat(value, width=100, sort_dicts=False)) for key, value in self.items())
        return "\n".join(start + text.replace("\n", "\n" + " " * len(start)) for start, text in rows)

    def __copy__(self: Self) -> Self:
        return self.copy()

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        return type(self)({key: copy.deepcopy(value, memo) for key, value in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), dict(self), self._frozen)

    def _require_open(self, change: str) -> None:
        if self._frozen:
            _raise_frozen(change)

    def _no_such(self, name: str) -> str:
        keys = [key for key in self if isinstance(key, str)]
        hint = did_you_mean(name, keys) or f" Keys: {listed(keys[:_KEYS_SHOWN])}."
        return f"the config has no key {name!r}.{hint}"


def load_config(source: Config | dict[str, Any] | str | Path) -> Config:
    """Make a checked Config from the path of a `.py` or `.toml` file, a dict or a Config. One ConfigError lists all problems.

    A Config is checked and returned as the same object. `launch` later freezes the config, so that changes, which would have no
    effect, raise.
    """
    if isinstance(source, (str, Path)):
        return Config.from_file(source)
    if not isinstance(source, dict):
        raise ConfigError(
            f"a config is the path of a .py or .toml file (str or Path), a dict or a Config, "
            f"not {type(source).__name__}: {shortened(source)}",
            code="C002",
        )
    return _checked(source if isinstance(source, Config) else Config(source), ConfigSource())


def _checked(config: Self, source: ConfigSource) -> Self:
    for alias, key in ALIASES.items():
        if alias in config:
            config.setdefault(key, config[alias])
    require_valid(config, source)
    return config


class FrozenList(list[Any]):
    """A list in a frozen config. It can be read like any list, but every change raises ConfigError."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenList, (list(self),)

    def __copy__(self) -> list[Any]:
        return list(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return copy.deepcopy(list(self), memo)


def _reject_change(self: FrozenList, *args: Any, **kwargs: Any) -> NoReturn:
    _raise_frozen("change a list in the config")


for _method in (
    *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"),
    *("__setitem__", "__delitem__", "__iadd__", "__imul__"),
):
    setattr(FrozenList, _method, _reject_change)


def _raise_frozen(change: str) -> NoReturn:
    raise ConfigError(
        f"cannot {change}, because the config is frozen after launch: every rank has read it. Set values before "
        "launch, or change a copy made by config.copy().",
        code="C002",
    )


def _adopted(value: Any) -> Any:
    """A copy of `value` with every dict as a Config, at every depth of lists and tuples."""
    if isinstance(value, dict):
        return Config(value)
    if type(value) in (list, FrozenList):
        return [_adopted(item) for item in value]
    if type(value) is tuple:
        return tuple(_adopted(item) for item in value)
    return value


def _as_frozen(value: Any) -> Any:
    if isinstance(value, Config):
        return value.freeze()
    if type(value) in (list, FrozenList):
        return FrozenList(_as_frozen(item) for item in value)
    if type(value) is tuple:
        return tuple(_as_frozen(item) for item in value)
    return frozenset(value) if type(value) is set else value


def _unpickled(kind: type[Config], values: dict[str, Any], is_frozen: bool) -> Config:
    config = kind(values)
    return config.freeze() if is_frozen else config


# --- The values that must be equal on all ranks, as texts that ranks can compare ---


def compared_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """The values, as text, of all keys that are set and must be equal on all ranks, by dotted key ("clip_grad_norm.max_norm")."""
    return {path: text for key, rule in KEYS.items() for path, text in _texts(rule, key, config.get(key))}


def text_of(value: Any) -> str:
    """The repr of a value with memory addresses removed, so that equal values have equal texts on every rank."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{text_of(key)}: {text_of(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _texts(rule: Rule, path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and rule.section is not None:
        known = keys_of(rule.section)
        other = rule.section.others or replace(ANYTHING, may_differ=rule.may_differ)
        for key in sorted(value, key=str):
            yield from _texts(known.get(key, other), f"{path}.{key}", value[key])
    elif value is not None and not rule.may_differ:
        yield path, text_of(value)

"""User functions named on a command line as MODULE:FUNCTION or FILE.py:FUNCTION: import them and call them.

`plan`, `explain` and `verify` accept a model, a batch or a criterion in this form.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from colonnade.errors import ConfigError, did_you_mean


def is_config(path: Path) -> bool:
    """Return whether a file is a config: a .toml file, or a Python file with only imports and assignments."""
    if path.suffix != ".py":
        return path.suffix == ".toml"
    kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False  # the error is raised when the file is run
    return all(
        isinstance(node, kinds) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in body
    )


def import_named(name: str, folder: Path) -> Any:
    """Import a module by name or file. The folder of the config (`folder`) and the current folder are searched too."""
    for place in (str(folder.resolve()), str(Path.cwd())):
        if place not in sys.path:
            sys.path.insert(0, place)
    path = Path(name) if name.endswith(".py") else None
    if path is not None and not path.exists():
        path = folder / name
    try:
        if path is None:
            return importlib.import_module(name)
        sys.path.insert(0, str(path.parent.resolve()))
        return importlib.import_module(path.stem)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name!r} cannot be imported ({error}). Give the path of a .py file, or a module that is installed, in "
            "the current folder, or in the folder of the config."
        ) from None


def function_named(text: str, folder: Path, option: str) -> Callable[..., Any]:
    """Return the function (or class) that a command-line option names. Raises ConfigError if it cannot be found."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(
            f"{option} {text!r} is not valid. Write MODULE:FUNCTION, such as model:build or train.py:build."
        )
    module = import_named(where, folder)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"{option} {text!r} is not valid, because {where} has no function {name!r}.{did_you_mean(name, known)}"
        )
    return function


def call_given(function: Callable[..., Any], offered: Mapping[str, Any], what: str) -> Any:
    """Call a function with the offered arguments that match its parameters.

    `what` names the function in error messages.
    """
    try:
        wanted: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except (TypeError, ValueError):
        wanted = {}
    missing = [
        name
        for name, parameter in wanted.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in offered
    ]
    if missing:
        *others, last = (f"`{name}`" for name in offered)
        raise ConfigError(
            f"{what} requires {', '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not available here. Its parameters can only be "
            f"{', '.join(others)} and {last}"
        )
    return function(**{name: value for name, value in offered.items() if name in wanted})

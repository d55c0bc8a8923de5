"""Functions of the user's own that a command is told by name, and the world that a config needs at least."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from colonnade.errors import ConfigError, did_you_mean


def least_world(config: Any) -> int:
    """One replica of everything else, or two so that there is something to sum; more where experts lie on data ranks."""
    from math import prod

    from colonnade.config import parallel_sizes

    sizes = parallel_sizes(config)
    rest = sizes.pipeline * sizes.tensor * prod(axis.size for axis in sizes.axes)
    expert = sizes.expert.size if sizes.expert is not None else 1
    return int(rest * (sizes.data or max(2, expert)))


def module_of(name: str, folder: Path) -> Any:
    """Import a module by name or file; those beside the config and in the current folder can be named."""
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
            f"{name!r} cannot be imported ({error}); give a module that is beside the config, in this folder or installed, "
            f"or the path of a .py file"
        ) from None


def function_of(text: str, folder: Path) -> Any:
    """The function that `--model` names: MODULE:FUNCTION or FILE.py:FUNCTION."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"--model {text!r}: write MODULE:FUNCTION, such as model:build or train.py:build")
    module = module_of(where, folder)
    function = getattr(module, name, None)
    if not callable(function):
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ConfigError(f"--model {text!r}: {where} has no function {name!r}.{did_you_mean(name, known)}")
    return function

"""`colonnade new`: write a template of a custom parallelism, with a passing test."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
from collections.abc import Iterator
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from colonnade.errors import ColonnadeError, ConfigError, RegistryError, listed

_MODE = "my_mode"
"""The name of the parallelism in the templates, so that they are valid Python themselves."""


class TemplateKind(StrEnum):
    """The templates."""

    parallelism = "parallelism"


def new(
    kind: Annotated[TemplateKind, typer.Argument(help="Template to use.")],
    name: Annotated[str, typer.Argument(help="Name of the parallelism and of the file, in lower_case.")],
    folder: Annotated[Path, typer.Option("--folder", "-f", metavar="FOLDER", help="Folder to write to.")] = Path("."),
) -> None:
    """Write a working custom parallelism, NAME.py, and its test, test_NAME.py.

    NAME.py contains a mode, its initializer, a layer with placements and a gradient handler, for you to modify. The test
    compares gradients, norm and weights with a single-process run.
    """
    # The name becomes a Python file and, in upper case, a mode.
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or not name[0].isalpha():
        raise RegistryError(
            f"{name!r} cannot name a parallelism, because a Python file and a parallel mode get this name. Give a "
            f"lower-case Python identifier that starts with a letter, such as {_identifier(name)!r}. Python keywords "
            "are not allowed."
        )
    module, test = folder / f"{name}.py", folder / f"test_{name}.py"
    existing = [str(target) for target in (module, test) if target.exists()]
    if existing:
        raise ColonnadeError(
            f"the files {listed(existing)} exist, and existing files are never overwritten. Choose another name or "
            "another --folder, or move the files."
        )
    templates = [_template(f"{kind.value}.py.txt"), _template(f"test_{kind.value}.py.txt")]
    for reason, details in _clashes(name, templates):
        raise RegistryError(f"{reason}; choose another name, such as {'my_' + name!r}. {details}".rstrip())
    for target, template in zip((module, test), templates, strict=True):
        _write(target, _filled(template, name))
    typer.echo(f"wrote {module}: a mode, its initializer, a layer with placements, a gradient handler")
    typer.echo(f"wrote {test}: comparison with a single process, on 2 and 4 ranks")
    typer.echo(f"next: python -m pytest {shlex.quote(str(test))}")


def _clashes(name: str, templates: list[str]) -> Iterator[tuple[str, str]]:
    """(problem, details) for every existing meaning of a name: a mode, an axis, a name in the templates, a module."""
    from colonnade.config import parallel_sizes
    from colonnade.context.parallel_mode import ParallelMode
    from colonnade.registry import DIST_GROUP_INITIALIZER, GRADIENT_HANDLER

    for mode in ParallelMode:
        if name in (mode.value, mode.name.lower()):
            yield f"{name!r} is taken by {mode}", f"The modes are {listed(known.name for known in ParallelMode)}."
    try:
        parallel_sizes({"parallel": {name: {"size": 2}}})
    except ConfigError as error:
        yield f"{name!r} cannot be an axis of `parallel`", str(error)
    used = {*re.findall(r"\w+", " ".join(templates)), *DIST_GROUP_INITIALIZER, *GRADIENT_HANDLER}
    camel = _camel(name)
    made = (name.upper(), f"{camel}Initializer", f"{camel}Linear", f"{camel}GradientHandler")
    if name != _MODE and (clash := [word for word in made if word in used]):
        yield f"{name!r} would define {listed(clash)}, which exists already", ""
    found = importlib.util.find_spec(name)
    if found is not None and found.origin is not None:
        # The new file would shadow that module, or be shadowed by it.
        yield f"a Python module {name!r} exists already ({found.origin})", ""


def _template(file: str) -> str:
    return files("colonnade.cli").joinpath("templates").joinpath(file).read_text(encoding="utf-8")


def _filled(template: str, name: str) -> str:
    """The text of a template with its name replaced by `name`."""
    for old, new in ((_MODE, name), (_MODE.upper(), name.upper()), (_camel(_MODE), _camel(name))):
        template = template.replace(old, new)
    return template


def _write(target: Path, text: str) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ColonnadeError(f"{target} cannot be written: {error.strerror}. Give another --folder.") from error


def _camel(name: str) -> str:
    """ring_norm -> RingNorm"""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _identifier(name: str) -> str:
    """A valid name similar to the given one."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    plain = re.sub(r"[^a-z0-9]+", "_", words).strip("_")
    return plain if plain[:1].isalpha() and not keyword.iskeyword(plain) else f"my_{plain or 'mode'}"

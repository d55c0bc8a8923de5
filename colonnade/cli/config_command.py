"""`colonnade config`: every key there is, or a check of a config file. Starts no process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from colonnade.errors import ConfigError


def config(
    file: Annotated[Path | None, typer.Argument(help="A config to check, a .py or .toml file.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key: what it means, and what it may hold.")] = False,
    find: Annotated[str | None, typer.Option(help="--keys: only those with this text in them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Check a config file, or list every key that a config may have."""
    if keys or find is not None:
        _list_keys(find or "", as_json)
    elif file is not None:
        _check(file, as_json)
    else:
        raise ConfigError("give a config file to check, or --keys for the list of all keys")


def _list_keys(find: str, as_json: bool) -> None:
    from colonnade.config.settings import all_keys

    found = [key for key in all_keys() if find.lower() in " ".join((key.path, key.means, key.allows)).lower()]
    if as_json:
        typer.echo(json.dumps([key._asdict() for key in found]))
    elif found:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in ("key", "means", "may be"):
            table.add_column(head, overflow="fold")
        for key in found:
            table.add_row(f"{key.path}{' (required)' if key.required else ''}", key.means, key.allows)
        Console(highlight=False, markup=False).print(table)
    else:
        raise ConfigError(f"no key has {find!r} in its name, its meaning or its values; `--keys` alone lists all")


def _check(file: Path, as_json: bool) -> None:
    from colonnade.config import load_config
    from colonnade.config.settings import KEYS

    loaded = load_config(file)
    ours, yours = [key for key in loaded if key in KEYS], [key for key in loaded if key not in KEYS]
    if as_json:
        typer.echo(json.dumps({"ours": ours, "yours": yours}))
        return
    typer.echo(f"{file} is a good config")
    typer.echo(f"  keys of Colonnade: {', '.join(ours) or 'none'}")
    typer.echo(f"  keys of yours:     {', '.join(yours) or 'none'}")

"""`colonnade config`: the list of all config keys, or a check of a config file. Starts no process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from colonnade.errors import ConfigError


def config(
    file: Annotated[Path | None, typer.Argument(help="Config file to check, .py or .toml.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key with its meaning and allowed values.")] = False,
    find: Annotated[str | None, typer.Option(metavar="TEXT", help="List only keys that contain this text.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Check a config file, or list all config keys."""
    if keys or find is not None:
        from colonnade.config.settings import all_keys

        text = (find or "").lower()
        found = [key for key in all_keys() if text in " ".join((key.path, key.means, key.allows)).lower()]
        if as_json:
            typer.echo(json.dumps([key._asdict() for key in found]))
        elif found:
            from rich.console import Console

            from colonnade.cli.tables import fitted_table

            console = Console(highlight=False)
            rows = [
                (
                    f"{key.path}{' (required)' if key.required else ''}",
                    f"{key.means} (default {key.default})" if key.default else key.means,
                    key.allows,
                )
                for key in found
            ]
            console.print(fitted_table(("key", "meaning", "allowed values"), rows, console.width))
        else:
            raise ConfigError(
                f"no config key has {find!r} in its name, meaning or allowed values. Run `colonnade config --keys` "
                "to list all keys."
            )
    elif file is not None:
        from colonnade.config import load_config
        from colonnade.config.settings import KEYS

        loaded = load_config(file)
        known, custom = [key for key in loaded if key in KEYS], [key for key in loaded if key not in KEYS]
        if as_json:
            typer.echo(json.dumps({"ours": known, "yours": custom}))
            return
        typer.echo(f"{file}: no problems found")
        typer.echo(f"  Colonnade keys: {', '.join(known) or 'none'}")
        typer.echo(f"  your own keys:  {', '.join(custom) or 'none'}")
    else:
        raise ConfigError("give a config file to check, or --keys to list all keys")

"""`load_config`: whatever a user hands to launch becomes a checked Config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colonnade.config.check import require_valid
from colonnade.config.config import Config
from colonnade.config.problems import Source
from colonnade.config.text import shortened
from colonnade.errors import ConfigError


def load_config(source: Config | dict[str, Any] | str | Path) -> Config:
    """Return the checked Config of a `.py` or `.toml` path, a dict, or a Config.

    A Config comes back as the same object, so that freezing it at launch also stops its owner from setting
    what nobody would read any more. Every problem is told in one ConfigError.
    """
    if isinstance(source, (str, Path)):
        return Config.from_file(source)
    if not isinstance(source, dict):
        raise ConfigError(
            f"a config is a path to a .py or .toml file (str or Path), a dict or a Config, "
            f"not {type(source).__name__}: {shortened(source)}"
        )
    require_valid(source, Source())
    return source if isinstance(source, Config) else Config(source)

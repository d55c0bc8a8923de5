"""Rank-aware logging. Importing configures nothing; `launch` attaches the handler.

By default `info` and `debug` log on rank 0 only, `warning` and `error` on every rank.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from colonnade.paths import local_path

_NAME = "colonnade"
_RankOf = Callable[[Any], int]

_rank_of: _RankOf = lambda mode: 0  # noqa: E731 - before launch there is a single process


class DistributedLogger:
    """A logger whose methods log only on selected ranks.

    Arguments of `debug`, `info`, `warning` and `error`:
        message: the text.
        parallel_mode: the mode whose ranks are counted; None: all ranks.
        ranks: the ranks that log: a list, or "all". Default: rank 0 for debug and info, all ranks for warning and error.
    """

    def __init__(self, name: str = _NAME) -> None:
        self.name = name
        self._logger = logging.getLogger(name)

    def debug(self, message: str, parallel_mode: Any = None, ranks: Ranks = None) -> None:
        self._log(logging.DEBUG, message, parallel_mode, [0] if ranks is None else ranks)

    def info(self, message: str, parallel_mode: Any = None, ranks: Ranks = None) -> None:
        self._log(logging.INFO, message, parallel_mode, [0] if ranks is None else ranks)

    def warning(self, message: str, parallel_mode: Any = None, ranks: Ranks = None) -> None:
        self._log(logging.WARNING, message, parallel_mode, "all" if ranks is None else ranks)

    def error(self, message: str, parallel_mode: Any = None, ranks: Ranks = None) -> None:
        self._log(logging.ERROR, message, parallel_mode, "all" if ranks is None else ranks)

    def set_level(self, level: str | int) -> None:
        """Set the lowest level that is logged: "DEBUG", "INFO", "WARNING" or "ERROR"."""
        self._logger.setLevel(level.upper() if isinstance(level, str) else level)

    def log_to_file(
        self, path: str | Path, mode: Literal["a", "w"] = "a", level: str = "INFO", suffix: str | None = None
    ) -> Path:
        """Also log to the file `path/rank_<n>[_suffix].log`; returns its path."""
        folder = local_path(path, "the folder of the logs")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"rank_{_rank_of(None)}{f'_{suffix}' if suffix else ''}.log"
        handler = logging.FileHandler(file, mode=mode, encoding="utf-8")
        handler.setLevel(level.upper())
        handler.setFormatter(_formatter())
        self._logger.addHandler(handler)
        return file

    def _log(self, level: int, message: str, mode: Any, ranks: Sequence[int] | Literal["all"]) -> None:
        if ranks == "all" or _rank_of(mode) in ranks:
            # The record gets the file and line of the caller: skip this frame and that of debug/info/...
            self._logger.log(level, message, stacklevel=3)


Ranks = Sequence[int] | Literal["all"] | None

_loggers: dict[str, DistributedLogger] = {}


def get_dist_logger(name: str = _NAME) -> DistributedLogger:
    """The logger of this name, the same object on every call."""
    return _loggers.setdefault(name, DistributedLogger(name))


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = (_NAME,)) -> None:
    """Set loggers of other libraries to WARNING.

    Args:
        include: prefixes of the names of these loggers; None: all.
        exclude: prefixes of names to leave unchanged.
    """
    for name in list(logging.root.manager.loggerDict):
        wanted = include is None or any(name.startswith(start) for start in include)
        if wanted and not any(name.startswith(start) for start in exclude):
            logging.getLogger(name).setLevel(logging.WARNING)


def attach(rank_of: _RankOf, verbose: bool) -> None:
    """Set the rank of this process and log to stderr. Called by `launch`; idempotent."""
    global _rank_of
    _rank_of = rank_of
    logger = logging.getLogger(_NAME)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(_formatter())
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.propagate = False


def detach() -> None:
    """Undo `attach`. Called when the context is destroyed."""
    global _rank_of
    _rank_of = lambda mode: 0  # noqa: E731
    logger = logging.getLogger(_NAME)
    for handler in [h for h in logger.handlers if isinstance(h, (_StderrHandler, logging.FileHandler))]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


class _StderrHandler(logging.Handler):
    """Writes to the current sys.stderr, so that redirected output is captured."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.rank = _rank_of(None)
        return super().format(record)


def _formatter() -> logging.Formatter:
    return _RankFormatter("[%(asctime)s rank %(rank)s %(levelname)s] %(message)s", datefmt="%H:%M:%S")

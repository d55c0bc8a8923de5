"""Rank-aware logging. Nothing is configured at import; `launch` attaches the handler.

`info` and `debug` speak on rank 0 alone unless told otherwise; `warning` and `error` speak where they happen.
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

_rank_of: _RankOf = lambda mode: 0  # noqa: E731 - before launch this process is a world of one


class DistributedLogger:
    """A logger whose messages are filtered by this process's rank in a mode.

    `ranks=None` is the default of the level (rank 0 for info and debug, every rank for warning and error);
    `ranks="all"` is every rank; a list names ranks of `parallel_mode` (the whole world if None).
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
        """Set the least level that is shown: "DEBUG", "INFO", "WARNING" or "ERROR"."""
        self._logger.setLevel(level.upper() if isinstance(level, str) else level)

    def log_to_file(
        self, path: str | Path, mode: Literal["a", "w"] = "a", level: str = "INFO", suffix: str | None = None
    ) -> Path:
        """Also write to `path/rank_<n>[_suffix].log`; returns the file."""
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
            # The caller's file and line, not ours: one frame for this method, one for debug/info/...
            self._logger.log(level, message, stacklevel=3)


Ranks = Sequence[int] | Literal["all"] | None

_loggers: dict[str, DistributedLogger] = {}


def get_dist_logger(name: str = _NAME) -> DistributedLogger:
    """The logger of this name; the same object each time."""
    return _loggers.setdefault(name, DistributedLogger(name))


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = (_NAME,)) -> None:
    """Raise the level of other libraries' loggers to WARNING; `include` limits it to names that start so."""
    for name in list(logging.root.manager.loggerDict):
        wanted = include is None or any(name.startswith(start) for start in include)
        if wanted and not any(name.startswith(start) for start in exclude):
            logging.getLogger(name).setLevel(logging.WARNING)


def attach(rank_of: _RankOf, verbose: bool) -> None:
    """Called by launch: from now on ranks are known, and records go to stderr. Idempotent."""
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
    """Called when the context closes: back to how it was at import."""
    global _rank_of
    _rank_of = lambda mode: 0  # noqa: E731
    logger = logging.getLogger(_NAME)
    for handler in [h for h in logger.handlers if isinstance(h, (_StderrHandler, logging.FileHandler))]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


class _StderrHandler(logging.Handler):
    """Writes to whatever sys.stderr is at that moment, so that captured output stays captured."""

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

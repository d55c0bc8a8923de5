"""The `colonnade` command. Nothing heavy is imported before it is needed: `--help` never loads torch."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; an error of Colonnade's own, or a path that fails, is one message and exit code 2."""
    from colonnade.cli.app import build_app
    from colonnade.error_pages import codes_in
    from colonnade.errors import ColonnadeError

    _hush_torch()
    try:
        build_app()(args=arguments, prog_name="colonnade")
    except ColonnadeError as error:
        told = str(error)
    except OSError as error:
        if error.filename is None:
            raise
        told = f"{error.filename}: {error.strerror}. Give another path, or make this one usable."
    hint = "".join(f"\ncolonnade explain {code} says more" for code in codes_in(told)[-1:])
    sys.stderr.write(f"colonnade: {told.removeprefix('colonnade: ')}{hint}\n")  # which an error of a config says itself
    raise SystemExit(2)


def _hush_torch() -> None:
    """Here and in the ranks: torch warns where numpy is missing, which neither it nor we need."""
    message = "Failed to initialize NumPy"
    warnings.filterwarnings("ignore", message)
    given = os.environ.get("PYTHONWARNINGS")
    if message not in (given or ""):
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [given, f"ignore:{message}:UserWarning"]))

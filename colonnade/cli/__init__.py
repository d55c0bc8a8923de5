"""The `colonnade` command. Heavy imports happen inside the commands, so `--help` never loads torch."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. A ColonnadeError or a file error prints one message and exits with 2."""
    from colonnade.cli.app import build_app
    from colonnade.error_pages import codes_in
    from colonnade.errors import ColonnadeError

    # torch warns if numpy is missing, which neither torch nor Colonnade needs here; the variable reaches the ranks.
    message = "Failed to initialize NumPy"
    warnings.filterwarnings("ignore", message)
    given = os.environ.get("PYTHONWARNINGS")
    if message not in (given or ""):
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [given, f"ignore:{message}:UserWarning"]))

    try:
        build_app()(args=arguments, prog_name="colonnade")
    except ColonnadeError as error:
        text = str(error)
    except OSError as error:
        if error.filename is None:
            raise
        text = f"{error.filename}: {error.strerror}. Give another path, or make this one accessible."
    hint = "".join(f"\nDetails: colonnade explain {code}" for code in codes_in(text)[-1:])
    # The message of a config error starts with the prefix already.
    sys.stderr.write(f"colonnade: {text.removeprefix('colonnade: ')}{hint}\n")
    raise SystemExit(2)

"""The `colonnade` command. Nothing heavy is imported before it is needed: `--help` never loads torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; an error of Colonnade's own is one message and exit code 2."""
    from colonnade.cli.app import build_app
    from colonnade.errors import ColonnadeError

    try:
        build_app()(args=arguments, prog_name="colonnade")
    except ColonnadeError as error:
        sys.stderr.write(f"colonnade: {error}\n")
        raise SystemExit(2) from None

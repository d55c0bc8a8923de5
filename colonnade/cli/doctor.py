"""`colonnade doctor`: what this machine can do, what is wrong with it, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from colonnade.cli._checks import CHECKS, Finding
from colonnade.version import __version__

_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Check this machine for training: each line is ok, warn or bad with the next step; bad exits with 1."""
    findings = {name: check() for name, check in CHECKS.items()}
    healthy = all(finding.status != "bad" for finding in findings.values())
    if as_json:
        checks = [{"name": name, **dataclasses.asdict(finding)} for name, finding in findings.items()]
        typer.echo(json.dumps({"colonnade": __version__, "ok": healthy, "checks": checks}, indent=2))
    else:
        _show(findings)
    raise typer.Exit(0 if healthy else 1)


def _show(findings: dict[str, Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, finding in findings.items():
        table.add_row(Text(finding.status, style=_COLOURS[finding.status]), name, finding.detail)
        if finding.next_step:
            table.add_row("", "", Text(f"-> {finding.next_step}", style="bold"))
    Console().print(table)

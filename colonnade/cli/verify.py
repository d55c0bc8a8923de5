"""`colonnade verify`: a script on its ranks beside the same script as one process."""

from __future__ import annotations

from typing import Annotated

import typer

from colonnade.cli.job import Job, checked

EQUAL, DIFFERENT, NOT_RUN = 0, 1, 2


def verify(
    script: Annotated[str, typer.Argument(help="Script to verify, or a module with -m.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What follows goes to the script.")] = None,
    nproc: Annotated[int, typer.Option("--nproc", "-n", min=1, help="Ranks to run it on.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to compare.")] = 2,
    dtype: Annotated[str, typer.Option(help="fp64, or own: what the script itself computes in.")] = "fp64",
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT names a module.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Prove that SCRIPT trains on several ranks as one process would, or say what is wrong.

    The script needs no change where it calls colonnade.initialize. Options of this command come before it. It runs
    for some steps on N ranks, and again as one process with every parallel size 1, from the same weights and with the batches
    of all ranks joined. Loss, activations, gradients, norm and weights are compared.
    The exit code is 0 if they are equal, 1 if not, 2 if the script could not be compared.
    """
    if dtype not in ("fp64", "own"):
        raise typer.BadParameter(f"{dtype!r} is neither fp64 nor own", param_hint="--dtype")
    checked(Job(target=script, is_module=module, nproc=nproc))
    from colonnade.verification.run import Script, ScriptError, verify_script

    try:
        report = verify_script(Script(script, tuple(arguments or ()), nproc, steps, dtype, module))
    except ScriptError as error:
        typer.echo(f"colonnade: {error}", err=True)
        raise typer.Exit(NOT_RUN) from None
    typer.echo(report.to_json() if as_json else str(report))
    raise typer.Exit(EQUAL if report.ok else DIFFERENT)

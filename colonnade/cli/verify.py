"""`colonnade verify`: a script on its ranks beside the same script as one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from colonnade.cli.job import Job, checked

if TYPE_CHECKING:
    from colonnade.verification.mutation.mutate import Mutation
    from colonnade.verification.report import Report

EQUAL, DIFFERENT, NOT_RUN = 0, 1, 2


def verify(
    script: Annotated[str, typer.Argument(help="Script to verify, or a module with -m.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What follows goes to the script.")] = None,
    nproc: Annotated[int, typer.Option("--nproc", "-n", min=1, help="Ranks to run it on.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to compare.")] = 2,
    dtype: Annotated[str, typer.Option(help="fp64, or own: what the script itself computes in.")] = "fp64",
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT names a module.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    mutate: Annotated[bool, typer.Option("--mutate", help="Plant known mistakes one at a time: who notices?")] = False,
    mistakes: Annotated[str | None, typer.Option(help="With --mutate: only these, with commas between.")] = None,
    tests: Annotated[
        str | None, typer.Option(help='With --mutate: a command that must fail on each, as "pytest tests".')
    ] = None,
) -> None:
    """Prove that SCRIPT trains on several ranks as one process would, or say what is wrong.

    The script needs no change where it calls colonnade.initialize. Options of this command come before it. It runs
    for some steps on N ranks, and again as one process with every parallel size 1, from the same weights and with the batches
    of all ranks joined. Loss, activations, gradients, norm and weights are compared.
    The exit code is 0 if they are equal, 1 if not, 2 if the script could not be compared. With --mutate it is 0 if every
    mistake was noticed, by this command and by the tests where some are given.
    """
    if dtype not in ("fp64", "own"):
        raise typer.BadParameter(f"{dtype!r} is neither fp64 nor own", param_hint="--dtype")
    checked(Job(target=script, is_module=module, nproc=nproc))
    if (mistakes or tests) and not mutate:
        raise typer.BadParameter("goes with --mutate", param_hint="--mistakes" if mistakes else "--tests")
    from colonnade.errors import ParityError
    from colonnade.verification.run import Script, verify_script

    job = Script(script, tuple(arguments or ()), nproc, steps, dtype, module)
    try:
        if mutate:
            from colonnade.verification.mutation.mutate import mutate_script

            report: Report | Mutation = mutate_script(job, mistakes, tests, lambda line: typer.echo(line, err=True))
        else:
            report = verify_script(job)
    except ParityError as error:
        typer.echo(f"colonnade: {error}", err=True)
        raise typer.Exit(NOT_RUN) from None
    typer.echo(report.to_json() if as_json else str(report))
    raise typer.Exit(EQUAL if report.ok else DIFFERENT)

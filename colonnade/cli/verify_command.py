"""`colonnade verify`: a script on its ranks beside the same script as one process."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colonnade.errors import ParityError
from colonnade.launching.launch_job import LaunchJob, checked

if TYPE_CHECKING:
    from colonnade.proof.compare import Report
    from colonnade.proof.mutate import Mutation
    from colonnade.proof.scripts import Script


EQUAL, DIFFERENT, NOT_RUN = 0, 1, 2


def verify(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Script to verify, or a module with -m; or a config, with --model.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What follows goes to the script.")] = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", "-n", min=1, help="Ranks to run it on; else 2, or the least that a config fits."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to compare.")] = 2,
    dtype: Annotated[str, typer.Option(help="fp64, or own: what the script itself computes in.")] = "fp64",
    dropout: Annotated[str, typer.Option(help="own: one process drops what the ranks drop. 0: nothing drops.")] = "own",
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds in which the script must come to its last step.")
    ] = 1800.0,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT names a module.")] = False,
    model: Annotated[
        str | None, typer.Option(help="SCRIPT is a config: MODULE:FUNCTION or FILE.py:FUNCTION makes the model.")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="With --model: a function that gives a rank's batch.")] = None,
    criterion: Annotated[str | None, typer.Option(help="With --model: the loss.")] = None,
    imports: Annotated[list[str] | None, typer.Option("--import", help="With --model: import these first.")] = None,
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
    With --model, SCRIPT is a config, and the model that the function returns is trained as it says; the function may take
    `config` and `context`. Batches come from --batch (which may take `step` too), or are drawn to fit the first layer.
    The exit code is 0 if they are equal, 1 if not, 2 if the script could not be compared. With --mutate it is 0 if every
    mistake was noticed, by this command and by the tests where some are given.
    """
    options = {**context.params, **_written_after(context)}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which ends what it has started
    try:
        report = _report(**options)
    except ParityError as error:
        typer.echo(f"colonnade: {error}", err=True)
        raise typer.Exit(NOT_RUN) from None
    typer.echo(report.to_json() if options["as_json"] else str(report))
    raise typer.Exit(EQUAL if report.ok else DIFFERENT)


def _written_after(context: typer.Context) -> dict[str, Any]:
    """Options that follow a config, which takes none itself."""
    from colonnade.proof.from_config import is_config

    given = context.params
    if given["module"] or not given["arguments"] or not is_config(Path(given["script"])):
        return {}
    later = context.command.make_context("verify", [*given["arguments"], given["script"]], parent=context.parent)
    sources = {name: later.get_parameter_source(name) for name in later.params}
    written = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    return {"arguments": (), **{name: later.params[name] for name in written}}


def _report(
    mutate: bool, mistakes: str | None, tests: str | None, dtype: str, dropout: str, as_json: bool, **job: Any
) -> Report | Mutation:
    for option, value, allowed in (("--dtype", dtype, ("fp64", "own")), ("--dropout", dropout, ("own", "0"))):
        if value not in allowed:
            raise typer.BadParameter(f"{value!r} is neither {' nor '.join(allowed)}", param_hint=option)
    if (mistakes or tests) and not mutate:
        raise typer.BadParameter("goes with --mutate", param_hint="--mistakes" if mistakes else "--tests")
    from colonnade.proof.mutate import mutate_script
    from colonnade.proof.scripts import verify_script

    script = _script(dtype=dtype, off={} if dropout == "own" else None, **job)
    if mutate:
        return mutate_script(script, mistakes, tests, lambda line: typer.echo(line, err=True))
    return verify_script(script)


def _script(
    script: str,
    arguments: Any,
    nproc: int | None,
    module: bool,
    model: str | None,
    batch: str | None,
    criterion: str | None,
    imports: list[str] | None,
    **more: Any,
) -> Script:
    from colonnade.config import least_world, load_config
    from colonnade.proof.from_config import Given, is_config
    from colonnade.proof.scripts import Script

    checked(LaunchJob(target=script, is_module=module, nproc=nproc))
    if model is None:
        for option, value in (("--batch", batch), ("--criterion", criterion), ("--import", imports)):
            if value:
                raise typer.BadParameter("goes with --model", param_hint=option)
        if not module and is_config(Path(script)):
            raise typer.BadParameter(
                f"{script} is a config, which trains nothing by itself: give a script, or --model MODULE:FUNCTION too",
                param_hint="SCRIPT",
            )
        return Script(script, tuple(arguments or ()), nproc or 2, is_module=module, **more)
    given = Given(script, model, batch, criterion, tuple(imports or ())).as_argument()
    count = nproc or least_world(load_config(Path(script)))
    name = f"the model of {model} under {script}"
    return Script("colonnade.proof.from_config", (given,), count, is_module=True, called=name, **more)

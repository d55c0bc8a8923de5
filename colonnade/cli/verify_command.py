"""`colonnade verify`: run a script on several ranks and in a single process, and compare the results."""

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
    from colonnade.proof.run_difference import RunsReport
    from colonnade.proof.scripts import Script


EQUAL, DIFFERENT, NOT_RUN = 0, 1, 2


def verify(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Script to verify; with -m, a module; with --model, a config file.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", "-n", min=1, metavar="N", help="Ranks. Default: 2, or the fewest that fit the config of --model."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Number of steps to compare.")] = 2,
    dtype: Annotated[
        str, typer.Option(metavar="fp64|own", help="Precision of both runs; own: that of the script.")
    ] = "fp64",
    dropout: Annotated[
        str,
        typer.Option(
            metavar="own|0", help="own: the single process repeats the dropout masks of the ranks; 0: dropout is off."
        ),
    ] = "own",
    timeout: Annotated[
        float,
        typer.Option(min=1.0, metavar="SECONDS", help="Time limit for the script to finish its last compared step."),
    ] = 1800.0,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Function (or FILE.py:FUNCTION) that returns the model; SCRIPT is a config."
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="With --model: function that returns the batch of a rank."),
    ] = None,
    criterion: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="With --model: the loss function.")
    ] = None,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="With --model: import this first. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    mutate: Annotated[
        bool, typer.Option("--mutate", help="Inject known bugs one at a time and check that they are detected.")
    ] = False,
    mistakes: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="With --mutate: inject only these bugs.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Compare an interrupted and resumed run with an uninterrupted one; {folder} in ARGUMENTS."
        ),
    ] = False,
    resume_nproc: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --resume: ranks of the resumed run. Default: --nproc.")
    ] = None,
    races: Annotated[
        bool, typer.Option("--races", help="Compare runs in which asynchronous work runs at other times.")
    ] = False,
    tests: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND", help='With --mutate: command that must fail for each bug, such as "pytest tests".'
        ),
    ] = None,
) -> None:
    """Compare a parallel run of SCRIPT with a single-process run, and name the cause of any difference.

    A script that calls colonnade.initialize needs no change. Options of this command come before SCRIPT. The script runs a
    few steps on N ranks and again in a single process with all parallel sizes 1, from the same weights, on the global batch.
    Loss, activations, gradients, norm and weights are compared.

    With --model, SCRIPT is a config file, and the model that the function returns is trained with this config; the function
    may have the parameters `config` and `context`. Batches come from --batch (which may also have the parameter `step`), or
    are random inputs for the first layer.

    With --resume and --races, runs of the script are compared with each other, without a single-process run.

    Exit code: 0 if the runs match, 1 if not, 2 if the script could not be compared or draws random numbers that hide errors. With --mutate: 0 if every bug was
    detected by this command, and by the tests if --tests is given.
    """
    options = {**context.params, **_options_after_config(context)}
    # An exit through Python's own cleanup stops the processes that were started; the default action would not.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        report = _report(**options)
    except ParityError as error:
        typer.echo(f"colonnade: {error}", err=True)
        raise typer.Exit(NOT_RUN) from None
    typer.echo(report.to_json() if options["as_json"] else str(report))
    if getattr(report, "is_uncertain", False):
        raise typer.Exit(NOT_RUN)
    raise typer.Exit(EQUAL if report.ok else DIFFERENT)


def _options_after_config(context: typer.Context) -> dict[str, Any]:
    """The options after a config file, which takes no arguments itself; empty for a script."""
    from colonnade.proof.user_functions import is_config

    given = context.params
    if given["module"] or not given["arguments"] or not is_config(Path(given["script"])):
        return {}
    later = context.command.make_context("verify", [*given["arguments"], given["script"]], parent=context.parent)
    sources = {name: later.get_parameter_source(name) for name in later.params}
    written = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    return {"arguments": (), **{name: later.params[name] for name in written}}


def _report(
    mutate: bool,
    mistakes: str | None,
    tests: str | None,
    dtype: str,
    dropout: str,
    as_json: bool,
    resume: bool,
    resume_nproc: int | None,
    races: bool,
    **job: Any,
) -> Report | Mutation | RunsReport:
    for option, value, allowed in (("--dtype", dtype, ("fp64", "own")), ("--dropout", dropout, ("own", "0"))):
        if value not in allowed:
            raise typer.BadParameter(f"{value!r} is not allowed: use {' or '.join(allowed)}", param_hint=option)
    if (mistakes or tests) and not mutate:
        raise typer.BadParameter("requires --mutate", param_hint="--mistakes" if mistakes else "--tests")
    if resume_nproc is not None and not resume:
        raise typer.BadParameter("requires --resume", param_hint="--resume-nproc")
    modes = [name for name, on in (("--mutate", mutate), ("--resume", resume), ("--races", races)) if on]
    if len(modes) > 1:
        raise typer.BadParameter(f"cannot be combined with {modes[0]}", param_hint=modes[1])
    from colonnade.proof.processes import Processes
    from colonnade.proof.user_functions import is_config

    target, module = job["script"], job["module"]
    checked(LaunchJob(target=target, is_module=module, nproc=job["nproc"]))
    if job["model"] is None:
        for option, value in (
            ("--batch", job["batch"]),
            ("--criterion", job["criterion"]),
            ("--import", job["imports"]),
        ):
            if value:
                raise typer.BadParameter("requires --model", param_hint=option)
        if not module and is_config(Path(target)):
            raise typer.BadParameter(
                f"{target} is a config, and a config contains no training loop. Give a script, or add --model "
                "MODULE:FUNCTION.",
                param_hint="SCRIPT",
            )
    # The warm process imports torch at the same time as this one.
    with Processes(target, module or job["model"] is not None) as processes:
        from colonnade.proof.mutate import mutate_script
        from colonnade.proof.races import verify_races
        from colonnade.proof.resume import verify_resume
        from colonnade.proof.scripts import verify_script

        script = _script(dtype=dtype, off={} if dropout == "own" else None, **job)
        if mutate:
            # Progress goes to stderr, so that stdout is only the report.
            tell = lambda line: typer.echo(f"colonnade: {line}", err=True)  # noqa: E731
            return mutate_script(script, processes, mistakes, tests, tell)
        if resume:
            return verify_resume(script, resume_nproc, processes)
        if races:
            return verify_races(script, processes)
        return verify_script(script, processes)


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
    from colonnade.proof.from_config import Given
    from colonnade.proof.scripts import Script

    if model is None:
        return Script(script, tuple(arguments or ()), nproc or 2, is_module=module, **more)
    given = Given(script, model, batch, criterion, tuple(imports or ())).as_argument()
    count = nproc or least_world(load_config(Path(script)))
    name = f"the model of {model} with {script}"
    return Script("colonnade.proof.from_config", (given,), count, is_module=True, called=name, **more)

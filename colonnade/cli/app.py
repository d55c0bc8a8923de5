"""All commands by name. A new command is one file with one function, and one line here."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from colonnade.cli.ckpt import ckpt
from colonnade.cli.demo import demo
from colonnade.cli.doctor import doctor
from colonnade.cli.explain_command import explain
from colonnade.cli.new import new
from colonnade.cli.plan_command import plan
from colonnade.cli.verify_command import verify
from colonnade.errors import ConfigError
from colonnade.launching.launch_job import LaunchJob, checked
from colonnade.paths import local_path
from colonnade.version import __version__

if TYPE_CHECKING:
    from colonnade.config.settings import Key


# --------------------------------------------------------------------------------------------------
# `colonnade config`: every key there is, or a look at a config file. Starts no process.
# --------------------------------------------------------------------------------------------------


def config(
    file: Annotated[Path | None, typer.Argument(help="A config to check, a .py or .toml file.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key: what it means, and what it may hold.")] = False,
    find: Annotated[str | None, typer.Option(help="--keys: only those with this text in them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Check a config file, or list every key that a config may have."""
    if keys or find is not None:
        _list_keys(find or "", as_json)
    elif file is not None:
        _check(file, as_json)
    else:
        raise ConfigError("give a config file to check, or --keys for the list of all keys")


def _list_keys(find: str, as_json: bool) -> None:
    from colonnade.config.settings import all_keys

    found = [key for key in all_keys() if find.lower() in " ".join((key.path, key.means, key.allows)).lower()]
    if as_json:
        typer.echo(json.dumps([key._asdict() for key in found]))
    elif found:
        _show(found)
    else:
        raise ConfigError(f"no key has {find!r} in its name, its meaning or its values; `--keys` alone lists all")


def _show(found: list[Key]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("key", "means", "may be"):
        table.add_column(head, overflow="fold")
    for key in found:
        table.add_row(f"{key.path}{' (required)' if key.required else ''}", key.means, key.allows)
    Console(highlight=False, markup=False).print(table)


def _check(file: Path, as_json: bool) -> None:
    from colonnade.config import load_config
    from colonnade.config.settings import KEYS

    loaded = load_config(file)
    ours, yours = [key for key in loaded if key in KEYS], [key for key in loaded if key not in KEYS]
    if as_json:
        typer.echo(json.dumps({"ours": ours, "yours": yours}))
        return
    typer.echo(f"{file} is a good config")
    typer.echo(f"  keys of Colonnade: {', '.join(ours) or 'none'}")
    typer.echo(f"  keys of yours:     {', '.join(yours) or 'none'}")


# --------------------------------------------------------------------------------------------------
# `colonnade run`: start a script on several ranks of this machine, or as one node of several.
# --------------------------------------------------------------------------------------------------


def run(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(help="Script to run, or a module with -m.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What follows goes to the script.")] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "-n", min=1, help="Ranks on this machine; without it one per GPU, or one.")
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT names a module.")] = False,
    as_colossalai: Annotated[
        bool, typer.Option("--as-colossalai", help="Let `import colossalai` find Colonnade.")
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", help="Keep each rank's output here as rank<N>.stdout and .stderr."),
    ] = None,
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Do not mark lines with their rank.")] = False,
    prefix_all: Annotated[bool, typer.Option("--prefix-all", help="Mark the lines of rank 0 too.")] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="Start all ranks again after a failure, this often.")] = 0,
    grace: Annotated[
        int,
        typer.Option(min=0, max=86_400, help="Seconds that ranks have after SIGTERM to finish their step and save."),
    ] = 30,
    nnodes: Annotated[int, typer.Option(min=1, help="Machines in the job; run this command on each.")] = 1,
    node_rank: Annotated[
        int | None, typer.Option(help="This machine's place, 0 to nnodes-1; without it they agree.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of one machine, where all meet. Needed for several machines."),
    ] = None,
) -> None:
    """Run SCRIPT on several ranks. Options of this command come before the script's own arguments.

    torchrun's spellings are taken too: --nproc_per_node, --max_restarts, --rdzv_endpoint.

    Rank 0 prints as if it were alone; lines of the others begin with their rank.
    When a rank fails all are ended, and its traceback is shown last.
    The exit code is that of the rank, or 128 + the signal that killed it; 75 after a SIGTERM that all ranks
    obeyed in order (a Trainer finishes its step and saves). Ctrl-C ends it at once, and says what was saved last.
    """
    _warn_of_misplaced_option(ctx, arguments or ())
    job = checked(
        LaunchJob(
            target=script,
            is_module=module,
            arguments=tuple(arguments or ()),
            nproc=nproc,
            as_colossalai=as_colossalai,
            log_dir=log_dir,
            prefix="none" if no_prefix else "all" if prefix_all else "others",
            max_restarts=max_restarts,
            grace=grace,
            nnodes=nnodes,
            node_rank=node_rank,
            endpoint=rdzv_endpoint,
        )
    )
    from colonnade.launching.launcher import launch

    raise typer.Exit(launch(job))


def our_name(option: str) -> str:
    """torchrun's spelling of an option as ours: `nproc_per_node` is `nproc`, `max_restarts` is `max-restarts`."""
    name = option.replace("_", "-")
    return "nproc" if name == "nproc-per-node" else name


def _warn_of_misplaced_option(ctx: typer.Context, arguments: Sequence[str]) -> None:
    own = {name for option in ctx.command.params for name in option.opts if name.startswith("--")}
    if arguments and f"--{our_name(arguments[0].partition('=')[0].removeprefix('--'))}" in own:
        typer.echo(f"colonnade: {arguments[0]} goes to the script; options of `run` come before it", err=True)


# --------------------------------------------------------------------------------------------------
# `colonnade report`: the page of a run, of several, of one that goes on; and the traces of its ranks as one.
# --------------------------------------------------------------------------------------------------


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or logs (*.jsonl); with --trace: of traces.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write; else beside the first log.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Serve the page on this machine while the run goes on.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --follow: the port; 0: any that is free.")] = 8484,
    trace: Annotated[
        bool, typer.Option("--trace", help="Join what a ProfilerHook wrote on each rank into one file for Perfetto.")
    ] = False,
) -> None:
    """Show a run: one HTML page that needs no network; several runs are compared on one page.

    The page has loss, learning rate, gradient norm, throughput, the time of a step by parts, memory, events, ledger and config. A
    run writes it at its end too. With --follow it is served to this machine alone, and always new.
    """
    if follow and trace:
        raise ConfigError("--follow shows the page of a run and --trace joins traces: give one of them")
    if trace and len(runs) > 1:
        raise ConfigError(f"--trace joins the traces of one folder, and {len(runs)} were given: join each by itself")
    if trace:
        from colonnade.proof.report.traces import merge_traces

        typer.echo(merge_traces(runs[0], out or runs[0] / "trace.json.gz"))
        return
    if follow:
        from colonnade.proof.report.follow import serve

        serve(runs, port, typer.echo)
        return
    from colonnade.proof.report.page_of_run import write_run_page
    from colonnade.proof.report.runs import find_log

    log = find_log(runs[0])
    beside = log.with_suffix(".html") if len(runs) == 1 else log.with_name("compared.html")
    typer.echo(write_run_page(runs, out or beside))


COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": demo,
    "run": run,
    "doctor": doctor,
    "ckpt": ckpt,
    "new": new,
    "verify": verify,
    "explain": explain,
    "plan": plan,
    "report": report,
    "config": config,
}
"""Each is a function whose docstring is its help."""


def build_app() -> typer.Typer:
    """Return the command line with every command of the table."""
    helped = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=helped)
    app.callback(cls=_Commands)(_options)
    for name, function in COMMANDS.items():
        # What follows a script is the script's own.
        settings = {"allow_interspersed_args": function not in (run, verify), "token_normalize_func": our_name}
        app.command(name, cls=_Command, context_settings={**helped, **settings})(_with_local_paths(function))
    return app


def _with_local_paths(function: Callable[..., Any]) -> Callable[..., Any]:
    """The command, which refuses URLs in every argument and option that is a path, before it does anything."""

    @functools.wraps(function)
    def checked(*given: Any, **named: Any) -> Any:
        for name, value in named.items():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, Path):
                    local_path(each, f"the path given as {name!r}")
        return function(*given, **named)

    return checked


class _Command(TyperCommand):
    """A command whose help does not say of a switch that it is a <bool>."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_switches(super().get_params(ctx))


class _Commands(TyperGroup):
    """The same of all of them."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_switches(super().get_params(ctx))


def _plain_switches(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=lambda asked: _show_version(asked), help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Parallel training on PyTorch whose gradients are proven equal to one process."""


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"colonnade {__version__}")
        raise typer.Exit

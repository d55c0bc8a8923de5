"""`colonnade report`: write the HTML report of one run, several runs or a live run, or join the traces of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colonnade.errors import ConfigError


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs or log files (*.jsonl); with --trace, a folder of traces.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="File to write. Default: next to the first log.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Serve the report on this machine while the run continues.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port of --follow; 0: any free port.")
    ] = 8484,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Join the traces that a ProfilerHook wrote on each rank into one file for Perfetto."
        ),
    ] = False,
) -> None:
    """Write an HTML report of a run, or compare several runs in one report.

    The report shows loss, learning rate, gradient norm, throughput, the time of a step by parts, memory, events, ledger and
    config. It is one file and needs no network. Runs also write it when they end. With --follow it is served on the
    loopback interface and updated continuously.
    """
    if follow and trace:
        raise ConfigError("--follow and --trace cannot be used together. Give only one of the two options.")
    if trace and len(runs) > 1:
        raise ConfigError(
            f"--trace joins the traces of one folder, but {len(runs)} folders were given. Run the command once for "
            "each folder."
        )
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
    default = log.with_suffix(".html") if len(runs) == 1 else log.with_name("compared.html")
    typer.echo(write_run_page(runs, out or default))

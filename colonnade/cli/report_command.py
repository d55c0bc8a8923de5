"""`colonnade report`: the page of a run, of several, of one that goes on; and the traces of its ranks as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colonnade.errors import ConfigError


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

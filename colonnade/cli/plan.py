"""`colonnade plan`: a job before it runs: groups, memory, collectives, timeline and step time. Starts no process, but to measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.planner.records import SearchResult


def plan(
    config: Annotated[
        Path | None, typer.Argument(help="The config, a .py or .toml file; --search may go without one.")
    ] = None,
    world_size: Annotated[int | None, typer.Option(help="How many ranks; else the least that the config fits.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="MODULE:FUNCTION or FILE.py:FUNCTION that returns the model, or what colonnade.split returns. Functions `batch`, "
            "`criterion` and `optimizer` beside it are used too."
        ),
    ] = None,
    hardware: Annotated[str, typer.Option(help="h100, h200, b200, a100, or a .toml file.")] = "h100",
    search: Annotated[bool, typer.Option("--search", help="Rank all layouts that fit this many devices.")] = False,
    limit: Annotated[int, typer.Option(help="--search: how many of the best to show.")] = 10,
    measure: Annotated[
        Path | None,
        typer.Option(help="Time this machine's collectives and products, and write them to this .toml file."),
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="--measure: between so many processes.")] = 4,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="Modules of yours to import first: modes, handlers.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write one HTML page of it to this file.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Also write its pictures as SVG files into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """See a job of any number of ranks before it runs: who talks to whom, what each rank holds, and how long a step takes.

    Without --model: groups and communicators alone. With --search: the layouts that fit memory, fastest first, and why the
    others do not. Exit code 1 if `initialize` would refuse the config, or a rank does not fit its device.
    """
    if measure is not None:
        hardware = _measured(measure, nproc)
        if config is None:
            return
    if config is None and not search:
        raise ConfigError("give a config: colonnade plan config.py --world-size 64 --model train.py:build")
    if config is None and world_size is None:
        raise ConfigError("--search without a config needs --world-size: the number of devices to look for layouts of")
    home = config.parent if config is not None else Path()
    from colonnade.config import least_world, load_config
    from colonnade.planner.clock import load_hardware
    from colonnade.verification.named import import_named

    for name in imports or ():
        import_named(name, home)
    job = _job(model, home) if model is not None else None
    loaded, machine = load_config(config if config is not None else {}), load_hardware(hardware)
    count = world_size if world_size is not None else least_world(loaded)
    if search:
        found = _search(loaded, count, machine, job, model or "", limit, as_json)
        good = bool(found.fitting)
    else:
        found = _plan(loaded, count, machine, job, as_json)
        good = found.totals.fits and not found.problems
    _draw(found.to_dict(), html, svg)
    raise typer.Exit(0 if good else 1)


def _plan(loaded: Any, count: int, machine: Any, job: Any, as_json: bool) -> Any:
    from colonnade.planner.plan import plan as plan_job

    made = plan_job(loaded, count, machine, job)
    if as_json:
        typer.echo(json.dumps(made.to_dict()))
    else:
        from colonnade.cli.plan_pictures import show

        show(made)
    return made


def _job(model: str, folder: Path) -> Any:
    """The model's function, with those beside it."""
    from colonnade.planner.job import Job
    from colonnade.verification.named import function_named, import_named

    build = function_named(model, folder, "--model")
    beside = vars(import_named(model.rpartition(":")[0], folder))
    if not callable(beside.get("batch")):
        raise ConfigError(
            f"--model {model!r}: a plan needs a function `batch` beside it, that returns what one rank gets for one pass: "
            f"(data, label), as the loader does. It may take `config` and `context`"
        )
    return Job(build, beside["batch"], beside.get("criterion"), beside.get("optimizer"))


def _measured(path: Path, nproc: int) -> str:
    from colonnade.planner.measure import measure_machine, to_toml

    if path.suffix != ".toml":
        raise ConfigError(f"--measure {str(path)!r}: the file is a .toml file, which --hardware then takes")
    found = measure_machine(nproc)
    path.write_text(to_toml(found), encoding="utf-8")
    typer.echo(f"wrote {path}: --hardware {path} uses it", err=True)
    return str(path)


def _search(loaded: Any, count: int, machine: Any, job: Any, model: str, limit: int, as_json: bool) -> SearchResult:
    from colonnade.planner.search import search

    if job is None:
        raise ConfigError("--search needs --model: without it nothing is known of memory and time")
    found = search(loaded, count, machine, job, model)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
    else:
        from colonnade.cli.plan_pictures import show_search

        show_search(found, limit)
    return found


def _draw(values: dict[str, Any], html: Path | None, svg: Path | None) -> None:
    """Write the page and the pictures that were asked for; where they are goes beside the tables, not into the JSON."""
    from colonnade.report import plan_page, write_plan_pictures

    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(plan_page(values), encoding="utf-8")
        typer.echo(f"wrote {html}", err=True)
    for path in write_plan_pictures(values, svg) if svg is not None else ():
        typer.echo(f"wrote {path}", err=True)

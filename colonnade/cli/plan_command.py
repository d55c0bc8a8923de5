"""`colonnade plan`: a job before it runs: groups, memory, collectives, timeline and step time. Starts no process, but to measure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from colonnade.errors import ConfigError
from colonnade.proof.planner.plan_records import SearchResult
from colonnade.proof.report.plan_tables import (
    FORMULAS,
    MEMORY,
    PlanTable,
    Values,
    collectives,
    cut_layouts,
    figures,
    groups,
    hardware_line,
    layouts,
    ledger_entries,
    memory_words,
    slowest_kind,
    spread,
    timeline_words,
    title_of,
)
from colonnade.texts import format_bytes


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
    from colonnade.proof.planner.hardware import load_hardware
    from colonnade.proof.user_functions import import_named

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
    from colonnade.proof.planner.plan import plan as plan_job

    made = plan_job(loaded, count, machine, job)
    if as_json:
        typer.echo(json.dumps(made.to_dict()))
    else:
        show(made.to_dict())
    return made


def _job(model: str, folder: Path) -> Any:
    """The model's function, with those beside it."""
    from colonnade.proof.planner.job import Job
    from colonnade.proof.user_functions import function_named, import_named

    build = function_named(model, folder, "--model")
    beside = vars(import_named(model.rpartition(":")[0], folder))
    if not callable(beside.get("batch")):
        raise ConfigError(
            f"--model {model!r}: a plan needs a function `batch` beside it, that returns what one rank gets for one pass: "
            f"(data, label), as the loader does. It may take `config` and `context`"
        )
    return Job(build, beside["batch"], beside.get("criterion"), beside.get("optimizer"))


def _measured(path: Path, nproc: int) -> str:
    from colonnade.proof.planner.hardware import measure_machine, to_toml

    if path.suffix != ".toml":
        raise ConfigError(f"--measure {str(path)!r}: the file is a .toml file, which --hardware then takes")
    found = measure_machine(nproc)
    path.write_text(to_toml(found), encoding="utf-8")
    typer.echo(f"wrote {path}: --hardware {path} uses it", err=True)
    return str(path)


def _search(loaded: Any, count: int, machine: Any, job: Any, model: str, limit: int, as_json: bool) -> SearchResult:
    from colonnade.proof.planner.search import search

    if job is None:
        raise ConfigError("--search needs --model: without it nothing is known of memory and time")
    found = search(loaded, count, machine, job, model)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
    else:
        show_search(found.to_dict(), limit)
    return found


def _draw(values: dict[str, Any], html: Path | None, svg: Path | None) -> None:
    """Write the page and the pictures that were asked for; where they are goes beside the tables, not into the JSON."""
    from colonnade.proof.report import plan_page, write_plan_pictures

    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(plan_page(values), encoding="utf-8")
        typer.echo(f"wrote {html}", err=True)
    for path in write_plan_pictures(values, svg) if svg is not None else ():
        typer.echo(f"wrote {path}", err=True)


# --- A plan on the terminal: the figures and tables of `plan_tables`, bars of memory, and the pipeline's timeline ---

_COLORS = ("blue", "green", "magenta", "yellow", "cyan", "white")
"""Of the parts of memory."""
ROWS_SHOWN = 16
_PASS = {"F": "blue", "B": "green", "I": "green", "W": "yellow"}


def show(plan: Values) -> None:
    """Print everything that a plan says."""
    console = Console(highlight=False)
    title = f"{plan['totals']['world_size']:,} ranks: {title_of(plan)}"
    console.print(f"{title}, on {hardware_line(plan)}", markup=False, style="bold")
    for figure in figures(plan):
        console.print(f"{figure.value:>12}  {figure.meaning}", markup=False, style="red" if figure.is_bad else None)
    console.print()
    console.print(_rich(groups(plan)))
    if plan["classes"]:
        for formula in FORMULAS:
            console.print(formula, markup=False, style="dim")
        console.print()
        _memory(console, plan)
        console.print()
        # Ranks of all kinds make nearly the same calls, so one kind fills the rows.
        calls = collectives([slowest_kind(plan)], 24)
        console.print(_rich(replace(calls, title=f"{calls.title}, on the kind of rank that communicates longest")))
        if plan["timeline"] is not None and len(plan["timeline"]["rows"]) > 1:
            console.print()
            _timeline(console, plan["timeline"])
        console.print()
        console.print(_rich(_ledger(plan, 40)))
    for note in plan["notes"]:
        console.print(f"- {note}", markup=False, soft_wrap=True)
    for problem in plan["problems"]:
        console.print(f"initialize() would refuse this: {problem}", markup=False, style="red", soft_wrap=True)


def show_search(found: Values, limit: int = 10) -> None:
    """Print the layouts that fit, fastest first; how many were cut, and why; and what to paste."""
    console = Console(highlight=False)
    console.print(_rich(layouts(found, limit)))
    if found["cut"]:
        console.print()
        console.print(_rich(cut_layouts(found, limit)))
    for note in found["notes"]:
        console.print(f"- {note}", markup=False, soft_wrap=True)
    if found["config"]:
        console.print("\nThe best, to paste:\n", style="bold")
        console.print(found["config"], markup=False, soft_wrap=True)
        console.print("\nIts small twin, verified on this machine:\n", style="bold")
        console.print(found["verify"], markup=False, soft_wrap=True)


def _rich(made: PlanTable) -> Table:
    note = f" ({made.note})" if made.note else ""
    table = Table(
        title=escape(made.title + note), box=None, pad_edge=False, header_style="bold", title_style="bold", title_justify="left"
    )  # fmt: skip
    for at, head in enumerate(made.heads):
        table.add_column(head, overflow="fold", justify="right" if at in made.numbers else "left")
    for row in made.rows:
        table.add_row(*map(escape, row))
    return table


def _memory(console: Console, plan: Values) -> None:
    """A bar for each kind of rank; the mark is what a device has."""
    console.print("Memory of a rank", style="bold")
    console.print(
        Text("  ").join(Text(f"\u2588 {name}", style=color) for name, color in zip(MEMORY, _COLORS, strict=True))
    )
    limit = plan["hardware"]["memory"]
    scale = max(limit, plan["totals"]["peak_memory"])
    for one in spread(plan["classes"], ROWS_SHOWN):
        bar = Text(f"{one['name']:<12}{one['count']:>8,} ranks  ")
        drawn = 0
        for name, color in zip(MEMORY, _COLORS, strict=True):
            width = round(one["memory"][name] / scale * 60)
            bar.append("\u2588" * width, style=color)
            drawn += width
        mark = round(limit / scale * 60)
        bar.append(" " * max(0, mark - drawn) + "|" if drawn <= mark else "")
        bar.append(f" {format_bytes(one['memory']['total'])}")
        console.print(bar)
        console.print(f"{'':<12}{memory_words(one)}", markup=False, style="dim", soft_wrap=True)


def _timeline(console: Console, timeline: Values) -> None:
    console.print(f"[bold]Pipeline[/bold] {timeline_words(timeline)}")
    width = max(40, console.width - 12)
    for at, row in enumerate(timeline["rows"]):
        if at >= ROWS_SHOWN and at != len(timeline["rows"]) - 1:
            if at == ROWS_SHOWN:
                console.print(f"  ... {len(timeline['rows']) - ROWS_SHOWN - 1} more")
            continue
        cells = [(" ", "")] * width
        for kind, _, micro_batch, start, end in row:
            first, stop = (round(moment / timeline["makespan"] * width) for moment in (start, end))
            label = f"{kind}{micro_batch}"
            for place in range(first, min(stop, width)):
                inside = place - first
                readable = inside < len(label) and stop - first > len(label)
                cells[place] = (label[inside] if readable else "\u2588", kind)
        line = Text(f"rank {at:<5}|")
        for letter, kind in cells:
            line.append(letter, style=f"on {_PASS[kind]}" if kind and letter != "\u2588" else _PASS.get(kind, ""))
        console.print(line, no_wrap=True, crop=True)


def _ledger(plan: Values, most: int) -> PlanTable:
    """A row for each sum: a terminal has no room for a column of each mode, as the page has."""
    rows = []
    for entry in ledger_entries(plan):
        lies = (entry.parameters, entry.count, entry.elements, entry.stages, entry.placement)
        rows += [(*lies, mode, owed.ranks, owed.divisor, owed.done_by) for mode, owed in entry.sums.items()]
        rows += [] if entry.sums else [(*lies, "-", "1", "1", "-")]
    heads = ("parameters", "n", "elements on a rank", "stages", "lies", "over", "ranks", "divided by", "by")
    note = f"the first {most} of {len(rows)}" if len(rows) > most else ""
    return PlanTable("Gradients", heads, rows[:most], (1, 2, 6, 7), note)

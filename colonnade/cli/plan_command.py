"""`colonnade plan`: estimates groups, memory, collectives and step time of a job. Only --measure starts processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from colonnade.cli.tables import fitted_table
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
    config: Annotated[Path | None, typer.Argument(help="Config file, .py or .toml. Optional with --search.")] = None,
    world_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of ranks. Default: the fewest that fit the config."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function (or FILE.py:FUNCTION) that returns the model or the result of colonnade.split. Functions `batch`, "
            "`criterion` and `optimizer` in the same module are used too.",
        ),
    ] = None,
    hardware: Annotated[
        str,
        typer.Option(metavar="NAME", help="h100, h200, b200, a100 or a .toml file."),
    ] = "h100",
    search: Annotated[bool, typer.Option("--search", help="Rank all layouts for --world-size devices.")] = False,
    limit: Annotated[int, typer.Option(metavar="N", help="With --search: number of layouts to show.")] = 10,
    measure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure collectives and matrix products on this machine; write them to this .toml file.",
        ),
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="With --measure: number of processes.")] = 4,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="Import your module first (modes, handlers). May be repeated."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML report to this file.")] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write the figures as SVG files to this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Estimate memory, communication and step time of a job, without GPUs.

    Without --model only groups and communicators are printed. With --search all layouts are compared: layouts that fit
    into memory, fastest first, and the reasons why the other layouts do not fit.

    Exit code 1 if `initialize` would reject the config, or if a rank needs more memory than its device has.
    """
    if measure is not None:
        hardware = _measured(measure, nproc)
        if config is None:
            return
    if config is None and not search:
        raise ConfigError("give a config: colonnade plan config.py --world-size 64 --model train.py:build")
    if config is None and world_size is None:
        raise ConfigError("--search without a config needs --world-size, the number of devices")
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
    """The model function and the other functions of its module."""
    from colonnade.proof.planner.job import Job
    from colonnade.proof.user_functions import function_named, import_named

    build = function_named(model, folder, "--model")
    module = vars(import_named(model.rpartition(":")[0], folder))
    if not callable(module.get("batch")):
        raise ConfigError(
            f"--model {model!r} has no function `batch` in its module. An estimate needs this function. It returns "
            "one micro-batch of a rank, (data, label), as the data loader does, and may have the parameters `config` "
            "and `context`."
        )
    return Job(build, module["batch"], module.get("criterion"), module.get("optimizer"))


def _measured(path: Path, nproc: int) -> str:
    from colonnade.proof.planner.hardware import measure_machine, to_toml

    if path.suffix != ".toml":
        raise ConfigError(
            f"--measure is {str(path)!r}; give the name of a .toml file. Pass the written file to --hardware later."
        )
    found = measure_machine(nproc)
    path.write_text(to_toml(found), encoding="utf-8")
    typer.echo(f"wrote {path}; use it with --hardware {path}", err=True)
    return str(path)


def _search(loaded: Any, count: int, machine: Any, job: Any, model: str, limit: int, as_json: bool) -> SearchResult:
    from colonnade.proof.planner.search import search

    if job is None:
        raise ConfigError("--search needs --model to estimate memory and time")
    found = search(loaded, count, machine, job, model)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
    else:
        show_search(found.to_dict(), limit)
    return found


def _draw(values: dict[str, Any], html: Path | None, svg: Path | None) -> None:
    """Write the requested HTML report and figures. Their paths are printed to stderr, so that stdout stays pure JSON."""
    from colonnade.proof.report import plan_page, write_plan_pictures

    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(plan_page(values), encoding="utf-8")
        typer.echo(f"wrote {html}", err=True)
    for path in write_plan_pictures(values, svg) if svg is not None else ():
        typer.echo(f"wrote {path}", err=True)


# --- Terminal output: the figures and tables of `plan_tables`, memory bars and the pipeline timeline ---

_COLORS = ("blue", "green", "magenta", "yellow", "cyan", "white", "red")
"""The colours of the parts of memory."""
_LETTERS = ("P", "G", "S", "A", "C", "B", "W")
"""The letters of the parts of memory, for a terminal or a file without colours."""
_SUFFIX = "GradientHandler"
"""The end of handler names, which tables leave out because every handler has it."""
ROWS_SHOWN = 16
_PASS = {"F": "blue", "B": "green", "I": "green", "W": "yellow"}


def show(plan: Values) -> None:
    """Print the tables of a plan."""
    console = Console(highlight=False)
    title = f"{plan['totals']['world_size']:,} ranks: {title_of(plan)}"
    console.print(f"{title}, on {hardware_line(plan)}", markup=False, style="bold")
    for figure in figures(plan):
        console.print(f"{figure.value:>12}  {figure.meaning}", markup=False, style="red" if figure.is_bad else None)
    console.print()
    console.print(_rich(groups(plan), console.width))
    if plan["classes"]:
        for formula in FORMULAS:
            console.print(formula, markup=False, style="dim")
        console.print()
        _memory(console, plan)
        console.print()
        # All kinds of ranks make nearly the same calls, so only the slowest is shown.
        console.print(_rich(_calls(plan), console.width))
        if plan["timeline"] is not None and len(plan["timeline"]["rows"]) > 1:
            console.print()
            _timeline(console, plan["timeline"])
        console.print()
        console.print(_rich(_ledger(plan, 40), console.width))
    for note in plan["notes"]:
        console.print(f"- {note}", markup=False, soft_wrap=True)
    for problem in plan["problems"]:
        console.print(f"initialize() would reject this: {problem}", markup=False, style="red", soft_wrap=True)


def show_search(found: Values, limit: int = 10) -> None:
    """Print the layouts that fit, fastest first, the rejected ones with the reason, and the best config."""
    console = Console(highlight=False)
    console.print(_rich(layouts(found, limit), console.width))
    if found["cut"]:
        console.print()
        console.print(_rich(cut_layouts(found, limit), console.width))
    for note in found["notes"]:
        console.print(f"- {note}", markup=False, soft_wrap=True)
    if found["config"]:
        console.print("\nConfig of the fastest layout:\n", style="bold")
        console.print(found["config"], markup=False, soft_wrap=True)
        console.print("\nVerify a scaled-down configuration on this machine:\n", style="bold")
        console.print(found["verify"], markup=False, soft_wrap=True)


def _rich(table: PlanTable, width: int) -> Table:
    title = escape(f"{table.title} ({table.note})" if table.note else table.title)
    rows = [[cell.replace(_SUFFIX, "") for cell in row] for row in table.rows]
    return fitted_table(table.heads, rows, width, table.numbers, title=title, title_style="bold", title_justify="left")


def _memory(console: Console, plan: Values) -> None:
    """A bar for each kind of rank; the mark is the memory of the device."""
    console.print("Memory of a rank", style="bold")
    blocks = _LETTERS if console.no_color or console.color_system is None else ("\u2588",) * len(MEMORY)
    kinds = list(zip(MEMORY, _COLORS, blocks, strict=True))
    console.print(Text("  ").join(Text(f"{block} {name}", style=color) for name, color, block in kinds))
    limit = plan["hardware"]["memory"]
    scale = max(limit, plan["totals"]["peak_memory"])
    columns = max(20, min(60, console.width - 40))
    for kind in spread(plan["classes"], ROWS_SHOWN):
        bar = Text(f"{kind['name']:<12}{kind['count']:>8,} ranks  ")
        drawn = 0
        for name, color, block in kinds:
            width = round(kind["memory"][name] / scale * columns)
            bar.append(block * width, style=color)
            drawn += width
        mark = round(limit / scale * columns)
        bar.append(" " * max(0, mark - drawn) + "|" if drawn <= mark else "")
        bar.append(f" {format_bytes(kind['memory']['total'])}")
        console.print(bar)
        console.print(Padding(Text(memory_words(kind), style="dim"), (0, 0, 0, 12)))


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


def _calls(plan: Values) -> PlanTable:
    """The collectives of the slowest ranks; fewer columns than in the HTML report, so that 80 characters are enough."""
    kind = slowest_kind(plan)
    calls = collectives([kind], 24)
    rows = [
        (when, f"{count} {op}", f"{ranks} {mode}", size, link, time, exposed, what)
        for _, when, mode, op, ranks, size, count, link, time, exposed, what in calls.rows
    ]
    heads = ("when", "calls", "ranks", "bytes each", "link", "time", "exposed", "for")
    return PlanTable(
        f"{calls.title}, on {kind['name']}, which communicates longest", heads, rows, (3, 5, 6), calls.note
    )


def _ledger(plan: Values, most: int) -> PlanTable:
    """One row per reduction. (The HTML report has one column per mode; a terminal is too narrow for that.)"""
    rows = []
    for entry in ledger_entries(plan):
        placed = (entry.parameters, entry.count, entry.elements, entry.stages, entry.placement)
        rows += [(*placed, mode, owed.ranks, owed.divisor, owed.done_by) for mode, owed in entry.sums.items()]
        rows += [] if entry.sums else [(*placed, "-", "1", "1", "-")]
    heads = (
        "parameters",
        "n",
        "elements on a rank",
        "stages",
        "placement",
        "reduced over",
        "ranks",
        "divided by",
        "by",
    )
    note = f"the first {most} of {len(rows)}" if len(rows) > most else ""
    return PlanTable("Gradients", heads, rows[:most], (1, 2, 6, 7), note)

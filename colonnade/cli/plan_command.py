"""`colonnade plan`: a job before it runs: groups, memory, collectives, timeline and step time. Starts no process, but to measure."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from colonnade.errors import ConfigError
from colonnade.proof.planner.plan_records import Plan, PlannedTimeline, RankClass, SearchResult
from colonnade.texts import format_bytes, format_seconds


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
    from colonnade.proof.scripts import import_named

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
        show(made)
    return made


def _job(model: str, folder: Path) -> Any:
    """The model's function, with those beside it."""
    from colonnade.proof.planner.job import Job
    from colonnade.proof.scripts import function_named, import_named

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
        show_search(found, limit)
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


# --------------------------------------------------------------------------------------------------
# A plan on the terminal: tables, bars of memory, and the pipeline's timeline.
# --------------------------------------------------------------------------------------------------


KINDS = (
    ("parameters", "blue"),
    ("gradients", "green"),
    ("state", "magenta"),
    ("activations", "yellow"),
    ("communication", "cyan"),
    ("buffers", "white"),
)
ROWS_SHOWN = 16
_PASS = {"F": "blue", "B": "green", "I": "green", "W": "yellow"}


def show(plan: Plan) -> None:
    """Everything that a plan says, in words and tables."""
    console = Console(highlight=False)
    _head(console, plan)
    console.print(_modes(plan))
    if plan.classes:
        console.print()
        _memory(console, plan)
        console.print()
        console.print(_collectives(plan))
        if plan.timeline is not None and len(plan.timeline.rows) > 1:
            console.print()
            _timeline(console, plan.timeline)
        console.print()
        console.print(_ledger(plan))
    for note in plan.notes:
        console.print(f"- {note}", markup=False, soft_wrap=True)
    for problem in plan.problems:
        console.print(f"initialize() would refuse this: {problem}", markup=False, style="red", soft_wrap=True)


def show_search(found: SearchResult, limit: int = 10) -> None:
    """The layouts that fit, fastest first; how many were cut, and why; and what to paste."""
    console = Console(highlight=False)
    table = _table(
        f"{found.world_size} x {found.hardware.name}: {len(found.fitting)} layouts fit, {len(found.cut)} were cut",
        "layout", "step", "memory", "MFU", "HFU", "bubble", "exposed",
    )  # fmt: skip
    for one in found.fitting[:limit]:
        table.add_row(
            layout_text(one.layout),
            format_seconds(one.step_seconds or 0.0),
            format_bytes(one.peak_memory or 0),
            f"{one.mfu or 0:.0%}",
            f"{one.hfu or 0:.0%}",
            f"{one.bubble or 0:.0%}",
            format_seconds(one.exposed_seconds or 0.0),
        )
    console.print(table)
    reasons: dict[str, list[str]] = defaultdict(list)
    for one in found.cut:
        reasons[one.reason].append(layout_text(one.layout))
    console.print()
    for reason, layouts in sorted(reasons.items(), key=lambda each: -len(each[1]))[:limit]:
        console.print(f"cut {len(layouts)}: {reason}; such as {layouts[0]}", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"- {note}", markup=False, soft_wrap=True)
    if found.config:
        console.print("\nThe best, to paste:\n", style="bold")
        console.print(found.config, markup=False, soft_wrap=True)
        console.print("\nIts small twin, verified on this machine:\n", style="bold")
        console.print(found.verify, markup=False, soft_wrap=True)


def layout_text(layout: dict[str, Any]) -> str:
    """A layout in few words: without axes of one rank, and without what is off."""
    off = {"zero": 0, "checkpoint": "none"}
    return " ".join(f"{key} {value}" for key, value in layout.items() if value != off.get(key, 1)) or "one rank"


def _head(console: Console, plan: Plan) -> None:
    axes = " x ".join(f"{name} {count}" for name, count in plan.axes.items()) or "no parallelism"
    console.print(f"[bold]{plan.totals.world_size:,} ranks: {axes}[/bold]  on {plan.hardware.name}")
    totals = plan.totals
    if plan.classes:
        per = f", {totals.tokens / totals.step_seconds:,.0f} tokens/s" if totals.tokens else ""
        console.print(
            f"{totals.parameters:,} parameters; a step takes {format_seconds(totals.step_seconds)}{per}, "
            f"MFU {totals.mfu:.1%}, HFU {totals.hfu:.1%}",
            markup=False,
        )
        console.print(
            "  MFU: flops without recomputed products / (step x ranks x peak); HFU: with them",
            markup=False,
            style="dim",
        )
        console.print(
            f"  computing {format_seconds(totals.compute_seconds)}, collectives that nothing hides {format_seconds(totals.exposed_seconds)}, "
            f"pipeline bubble {format_seconds(totals.bubble_seconds)}, optimizer {format_seconds(totals.optimizer_seconds)}",
            markup=False,
        )
        fits = "fits" if totals.fits else "DOES NOT FIT"
        console.print(
            f"  fullest rank: {format_bytes(totals.peak_memory)} of {format_bytes(plan.hardware.memory)}: {fits}",
            style=None if totals.fits else "red",
        )
        console.print(
            f"  sent in a step by all ranks: {format_bytes(totals.bytes_inside_nodes)} inside nodes, "
            f"{format_bytes(totals.bytes_between_nodes)} between them",
            markup=False,
        )
    console.print(
        f"{totals.communicators:,} communicators to create, {totals.communicators_per_rank} on a rank\n", markup=False
    )


def _modes(plan: Plan) -> Table:
    table = _table("Groups", "mode", "groups", "of ranks", "link", "data", "the first")
    for mode in plan.modes:
        first = list(mode.groups[0]) if mode.groups else []
        shown = str(first) if len(first) <= 8 else f"[{first[0]}, {first[1]}, ... {first[-1]}]"
        table.add_row(mode.mode, f"{mode.count:,}", f"{mode.size:,}", mode.link, mode.data, shown if first else "all")
    return table


def _memory(console: Console, plan: Plan) -> None:
    """A bar for each kind of rank; the mark is what a device has."""
    console.print("Memory of a rank", style="bold")
    console.print(Text("  ").join(Text(f"\u2588 {name}", style=color) for name, color in KINDS))
    limit = plan.hardware.memory
    scale = max(limit, plan.totals.peak_memory)
    for one in _few(plan.classes):
        bar = Text(f"{one.name:<12}{one.count:>8,} ranks  ")
        drawn = 0
        for name, color in KINDS:
            width = round(getattr(one.memory, name) / scale * 60)
            bar.append("\u2588" * width, style=color)
            drawn += width
        mark = round(limit / scale * 60)
        bar.append(" " * max(0, mark - drawn) + "|" if drawn <= mark else "")
        parts = ", ".join(
            f"{name} {format_bytes(getattr(one.memory, name))}" for name, _ in KINDS if getattr(one.memory, name)
        )
        bar.append(f" {format_bytes(one.memory.total)}")
        console.print(bar)
        console.print(f"{'':<12}{parts}", markup=False, style="dim", soft_wrap=True)


def _collectives(plan: Plan) -> Table:
    slowest = max(plan.classes, key=lambda one: sum(call.seconds for call in one.collectives))
    table = _table(
        f"Collectives of a step, on a rank of {slowest.name}",
        "when", "mode", "call", "bytes each", "times", "ranks", "link", "seconds", "not hidden", "for",
    )  # fmt: skip
    calls = sorted(slowest.collectives, key=lambda call: -call.seconds)
    for call in calls[:24]:
        table.add_row(
            call.when, call.mode, call.op, f"{call.bytes:,}", f"{call.count:,}", f"{call.ranks:,}", call.link,
            format_seconds(call.seconds), format_seconds(call.exposed), call.what,
        )  # fmt: skip
    if len(calls) > 24:
        rest = calls[24:]
        table.add_row("", f"{len(rest)} more", *[""] * 5, format_seconds(sum(call.seconds for call in rest)), "", "")
    return table


def _timeline(console: Console, timeline: PlannedTimeline) -> None:
    console.print(
        f"[bold]Pipeline[/bold] {timeline.schedule}, {timeline.num_microbatches} micro-batches: {format_seconds(timeline.makespan)}, "
        f"pipeline bubble {timeline.bubble:.1%} of ranks x makespan ({timeline.equal_bubble:.1%} were all passes equally long "
        f"and transfers free)"
    )
    width = max(40, console.width - 12)
    for at, row in enumerate(timeline.rows):
        if at >= ROWS_SHOWN and at != len(timeline.rows) - 1:
            if at == ROWS_SHOWN:
                console.print(f"  ... {len(timeline.rows) - ROWS_SHOWN - 1} more")
            continue
        cells = [(" ", "")] * width
        for one in row:
            first, stop = (round(moment / timeline.makespan * width) for moment in (one.start, one.end))
            label = f"{one.kind}{one.micro_batch}"
            for place in range(first, min(stop, width)):
                inside = place - first
                cells[place] = (
                    label[inside] if inside < len(label) and stop - first > len(label) else "\u2588",
                    one.kind,
                )
        line = Text(f"rank {at:<5}|")
        for letter, kind in cells:
            line.append(letter, style=f"on {_PASS[kind]}" if kind and letter != "\u2588" else _PASS.get(kind, ""))
        console.print(line, no_wrap=True, crop=True)


def _ledger(plan: Plan) -> Table:
    table = _table(
        "Gradients", "parameters", "n", "elements on a rank", "placement", "over", "ranks", "divided by", "by"
    )
    for line in plan.ledger[:40]:
        table.add_row(
            line.parameters, str(line.count), f"{line.elements:,}", line.placement, line.mode or "-", f"{line.ranks:,}",
            f"{line.divisor:g}", line.done_by or "-",
        )  # fmt: skip
    if len(plan.ledger) > 40:
        table.add_row(f"... {len(plan.ledger) - 40} more", *[""] * 7)
    return table


def _few(classes: tuple[RankClass, ...]) -> list[RankClass]:
    return list(classes) if len(classes) <= ROWS_SHOWN else [*classes[: ROWS_SHOWN - 1], classes[-1]]


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_style="bold", title_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold")
    return table

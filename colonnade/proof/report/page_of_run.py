"""The page of a run, or of several beside each other: what was learnt, how fast, and what happened."""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from colonnade.comm.waits import PHASES
from colonnade.paths import local_path
from colonnade.proof.report.charts import MOST_POINTS, Points, Series, band, line_chart, stacked_chart, thinned
from colonnade.proof.report.runs import RATE, Column, Run, read_run
from colonnade.proof.report.shell import card, cards, folded, heat_map, page, table, tiles
from colonnade.texts import format_bytes, format_seconds

MOST_LAYERS, MOST_COLUMNS, MOST_MARKS, MOST_EVENTS = 80, 90, 120, 200
STILL_GOING = 60.0
"""Seconds without a line after which a run that has not said its end counts as killed; at least twenty of its steps."""


def write_run_page(sources: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page of one run, or one page that compares several; returns it."""
    target = local_path(out, "the page's file")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(run_page(sources), encoding="utf-8")
    return target


def run_page(sources: Sequence[str | Path], refresh: int | None = None) -> str:
    """The page as HTML. A source is a log that a `JsonlHook` wrote, or the folder it is in."""
    runs = _named([read_run(source) for source in sources])
    first = runs[0]
    title = first.name if len(runs) == 1 else "Runs: " + ", ".join(run.name for run in runs)
    parts = [_figures(first) if len(runs) == 1 else _compared(runs), cards(_charts(runs))]
    parts.append('<div class="cards" style="margin-top:16px">')
    for run in runs:
        parts += _layers(run, len(runs) > 1)
    parts += [_events(runs), *(part for run in runs for part in _facts(run, len(runs) > 1)), "</div>"]
    lines = [_heading(first), _state(first)[1]] if len(runs) == 1 else []
    return page(title, lines, parts, refresh=refresh)


def _named(runs: list[Run]) -> list[Run]:
    """Every run under a name of its own: with as much of its path before it as tells it from the others."""
    for depth in range(2, 32):
        counts = Counter(run.name for run in runs)
        for run in (run for run in runs if counts[run.name] > 1):
            place = run.path.absolute().parent.parts + (() if run.path.stem == "log" else (run.path.stem,))
            run.name = "/".join(place[-depth:])
    return runs


def _state(run: Run) -> tuple[str, str, bool]:
    """(how the run stands, in a few words and in a sentence, whether that is bad)."""
    steps = [value for _, value in run.column("seconds")]
    quiet = time.time() - run.written
    if run.end is not None:
        why = f" ({run.end['reason']})" if run.end.get("reason") else ""
        return run.end["how"], f"{run.end['how']} {_clock(run.end['time'])}{why}", run.end["how"] == "failed"
    if quiet < max(STILL_GOING, 20 * median(steps) if steps else 0.0):
        return "no end yet", f"no end is written yet; last line {_clock(run.written)}", False
    cut = ", inside a line" * run.cut
    return (
        "killed",
        f"no end is written: it was killed, or its host was lost; last line {_clock(run.written)}{cut}",
        True,
    )


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _heading(run: Run) -> str:
    facts = run.facts
    if not facts:
        return run.layout()
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.starts[0]["time"]))
    count = facts["world_size"]
    parts = [
        run.layout(),
        f"{count} rank{'s' * (count > 1)}",
        facts["device"],
        f"{facts['parameters']:,} parameters on rank 0",
    ]
    parts.append(f"begun {began}, Colonnade {facts['colonnade']}, torch {facts['torch']}")
    return " · ".join(parts)


def _figures(run: Run) -> str:
    skipped, lost = run.marked("skipped"), run.marked("loss")
    figures: list[tuple[str, str] | tuple[str, str, bool]] = [(f"{run.last:,}", "steps")]
    state, _, bad = _state(run)
    figures.append((state, "state", bad))
    if lost and lost[-1][0] == run.last:
        figures.append(("not finite", "loss of the last step", True))
    else:
        figures += [(f"{value:.3g}", "loss of the last step") for _, value in run.column("loss")[-1:]]
    figures += [(f"{value:.3g}", "loss on the test data") for _, value in run.test("Loss")[-1:]]
    figures += [(_rate(run), "samples/s, median"), (_seconds(run), "a step, median")]
    if norms := run.column("grad_norm"):
        figures.append((f"{len(run.marked('clipped')) / len(norms):.0%}", "of steps clipped"))
    figures.append((str(len(skipped)), "steps skipped", bool(skipped)))
    figures.append((str(len(run.starts[1:])), "restarts", len(run.starts) > 1))
    figures += [(format_bytes(value * 2**20), "peak memory, rank 0") for _, value in run.column("memory")[-1:]]
    return tiles([each for each in figures if each[0]])


def _compared(runs: list[Run]) -> str:
    """Several runs as rows."""
    rows = []
    for run in runs:
        memory = [format_bytes(value * 2**20) for _, value in run.column("memory")[-1:]]
        rows.append(
            [
                run.name,
                run.layout(),
                f"{run.last:,}",
                "".join(f"{value:.4g}" for _, value in run.column("loss")[-1:]),
                _rate(run),
                _seconds(run),
                "".join(memory),
                str(len(run.marked("clipped"))),
                str(len(run.marked("skipped"))),
                str(len(run.starts[1:])),
                _state(run)[0],
            ]
        )
    heads = (
        "run",
        "layout",
        "steps",
        "loss",
        "samples/s",
        "a step",
        "memory",
        "clipped",
        "skipped",
        "restarts",
        "state",
    )
    return f'<section class="card" style="margin-bottom:16px">{table(heads, rows, range(2, 10))}</section>'


def _charts(runs: list[Run]) -> list[str]:
    several = len(runs) > 1
    made = [card("Loss", _loss_chart(runs, several), _thinning(runs))]
    made.append(
        card("Gradient norm, before clipping", _norm_chart(runs, several), "the largest of the steps at a point")
    )
    made.append(card("Learning rate", _each(runs, "lr", "learning rate")))
    rates = [each for at, run in enumerate(runs) for each in _with_band(run.name, run.column(RATE), at)]
    made.append(card("Throughput", line_chart(rates, y="samples/s"), "of all ranks together"))
    note = "on rank 0; communication is what no computation hides, other is hooks, checkpoints and the loop"
    made.append(card("Where the time of a step goes", _time_chart(runs), note))
    memory = "peak so far on rank 0" + _held(runs[0]) * (not several)
    held = [Series(run.name if several else "MB", _memory(run), color=at) for at, run in enumerate(runs)]
    made.append(card("Memory", line_chart(held, y="MB"), memory))
    return made


def _loss_chart(runs: list[Run], several: bool) -> str:
    series = []
    for at, run in enumerate(runs):
        name = run.name if several else "training"
        series += _with_band(name, run.column("loss"), at)
        if tested := run.test("Loss"):
            series.append(
                Series(f"{name}, test data" if several else "test data", tested, "dots", at if several else 1)
            )
    return line_chart(series, y="loss")


def _with_band(name: str, points: Points, color: int) -> list[Series]:
    """The mean of the steps at each point, before the area from the smallest to the largest, in which one step's spike is seen."""
    line = Series(name, thinned(points, fmean), color=color)
    around = Series(f"{name}, smallest to largest", band(points), "band", color)
    return [around, line] if around.points else [line]


def _memory(run: Run) -> Points:
    """In MB, as all other figures of the page; a log has MiB. The largest at each point: it is a peak."""
    return thinned([(at, value * 2**20 / 1e6) for at, value in run.column("memory")], max)


def _norm_chart(runs: list[Run], several: bool) -> str:
    series: list[Series] = []
    for at, run in enumerate(runs):
        series.append(
            Series(run.name if several else "norm", thinned(run.column("grad_norm"), max), color=at if several else 0)
        )
        if several:
            continue
        clipped, skipped = run.marked("clipped"), run.marked("skipped")
        if level := run.facts.get("clip"):
            series.append(Series(f"clip_grad_norm = {level:g}", [(run.first, level)], "level", 7))
        if clipped:
            marks = thinned(clipped, max, MOST_MARKS)
            series.append(Series(f"clipped ({len(clipped)} of {len(run.steps.steps)})", marks, "dots", 4))
        if skipped:
            series.append(
                Series(f"skipped ({len(skipped)})", thinned(_at_norm(run, skipped), max, MOST_MARKS), "dots", 1)
            )
    return line_chart(series, y="norm", logarithmic=True)


def _time_chart(runs: list[Run]) -> str:
    """How the split changes over one run; of several, the mean split of each."""
    names = [phase for phase in PHASES if any(run.column(f"time/{phase}") for run in runs)]
    if not names:
        return '<p class="empty">this log has no times</p>'
    columns = [{phase: run.column(f"time/{phase}") for phase in names} for run in runs]
    if len(runs) > 1:
        means = [[1000 * fmean([v for _, v in each[phase]] or [0.0]) for phase in names] for each in columns]
        bars = [(run.name, values) for run, values in zip(runs, means, strict=True)]
        return stacked_chart(names, bars, x="", y="ms in a step, mean", bars=True)
    steps = sorted({at for phase in names for at, _ in columns[0][phase]})
    whole = [dict(columns[0][phase]) for phase in names]
    thin = [thinned([(at, 1000 * each.get(at, 0.0)) for at in steps], median, MOST_POINTS // 2) for each in whole]
    parts = [(f"{row[0][0]:,.0f}", [value for _, value in row]) for row in zip(*thin, strict=True)]
    return stacked_chart(names, parts, x="step", y="ms in a step, median")


def _each(runs: list[Run], key: str, what: str) -> str:
    several = len(runs) > 1
    return line_chart([Series(run.name if several else what, thinned(run.column(key), fmean)) for run in runs], y=what)


def _layers(run: Run, several: bool) -> list[str]:
    """The norm of each layer over time."""
    names, title = run.layers(), "Gradient norm of each layer" + f", {run.name}" * several
    if len(names) < 2:
        note = 'not measured: clip_grad_norm=dict(max_norm=..., report="layer") in the config and a GradientNormHook give it'
        return [] if several else [card(title, "", note, wide=True)]
    together = -(-len(names) // MOST_LAYERS)
    rows = [names[at : at + together] for at in range(0, len(names), together)]
    shown = [row[0] if len(row) == 1 else f"{row[0]} and {len(row) - 1} more" for row in rows]
    steps, values = _cells(run, rows)
    note = (
        f"{len(names)} layers, {together} in a row; " * (together > 1)
        + "logarithmic, the largest of the steps (and layers) in a cell"
    )
    return [card(title, f'<div class="scroll">{heat_map(shown, steps, values)}</div>', note, wide=True)]


def _cells(run: Run, rows: Sequence[Sequence[str]]) -> tuple[list[int], list[list[float | None]]]:
    """(the last step of each column, the largest norm of each row's layers in it), by steps: a layer may have fewer numbers."""
    columns = [[run.columns[f"grad_norm/{name}"] for name in row] for row in rows]
    steps = sorted({step for row in columns for column in row for step in column.steps})
    count = min(len(steps), MOST_COLUMNS)
    lasts = [steps[round((at + 1) * len(steps) / count) - 1] for at in range(count)]

    def largest(row: Sequence[Column], after: int, last: int) -> float | None:
        inside = [each.values[bisect_right(each.steps, after) : bisect_right(each.steps, last)] for each in row]
        return max((value for values in inside for value in values), default=None)

    return lasts, [[largest(row, after, last) for after, last in pairwise([steps[0] - 1, *lasts])] for row in columns]


def _events(runs: list[Run]) -> str:
    """Restarts, skipped steps, warnings, in order."""
    found = []
    for run in runs:
        for at, start in enumerate(run.starts):
            again = f", {start['made_again']} steps made again" if start.get("made_again") else ""
            what = f"resumed on {run.layout()}{again}" if at else "begun"
            found.append((run.name, start["step"], "restart" if at else "start", what))
        found += [(run.name, line["step"], line["level"], line["text"]) for line in run.events]
        found += [(run.name, int(step), "skipped", "its gradient was not used") for step, _ in run.marked("skipped")]
        found += [(run.name, int(step), "loss", "it was not finite") for step, _ in run.marked("loss")]
        if run.end is not None or _state(run)[2]:
            found.append((run.name, run.last, "end", _state(run)[1]))
        if run.damaged:
            found.append((run.name, run.last, "log", f"{run.damaged} of its lines could not be read"))
    found.sort(key=lambda row: (row[0], row[1]))
    rows = [(name, f"{step:,}", kind, text) for name, step, kind, text in found[:MOST_EVENTS]]
    if len(runs) == 1:
        return card("Events", table(("step", "event", ""), [row[1:] for row in rows], [0]), _left_out(found), wide=True)
    return card("Events", table(("run", "step", "event", ""), rows, [1]), _left_out(found), wide=True)


def _left_out(found: Sequence[object]) -> str:
    return f"the first {MOST_EVENTS} of {len(found)}" if len(found) > MOST_EVENTS else ""


def _facts(run: Run, several: bool) -> list[str]:
    """Ledger and config."""
    name = f" of {run.name}" * several
    if not run.facts:
        return []
    heads = ("parameters", "n", "over", "ranks", "divided by", "done by")
    rows = [
        (row["pattern"], str(row["count"]), row["mode"], _short(row["ranks"]), f"{row['divisor']:g}", row["done_by"])
        for row in run.facts["ledger"]
    ]
    ledger = table(heads, rows, [1, 4], [0]) if rows else '<p class="empty">no gradient owes a sum on rank 0</p>'
    config = "\n".join(f"{key} = {json.dumps(value)}" for key, value in run.facts["config"].items())
    return [folded(f"Ledger{name}, on rank 0", ledger), folded(f"Config{name}", f"<pre>{escape(config)}</pre>")]


def _short(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]} ({len(ranks)})"


def _held(run: Run) -> str:
    held = run.facts.get("memory") or {}
    return (
        "; by the layout: " + ", ".join(f"{kind} {format_bytes(count)}" for kind, count in held.items()) if held else ""
    )


def _rate(run: Run) -> str:
    return "".join(f"{median(values):,.4g}" for values in [[value for _, value in run.column(RATE)]] if values)


def _seconds(run: Run) -> str:
    return "".join(
        format_seconds(median(values)) for values in [[value for _, value in run.column("seconds")]] if values
    )


def _at_norm(run: Run, marks: Points) -> Points:
    """Marks of steps whose norm is not finite lie at the largest that was."""
    norms = dict(run.column("grad_norm"))
    top = max(norms.values(), default=1.0)
    return [(step, norms.get(step, top)) for step, _ in marks]


def _thinning(runs: list[Run]) -> str:
    most = max(len(run.steps.steps) for run in runs)
    if most <= MOST_POINTS:
        return "of all ranks, each step"
    return f"{MOST_POINTS} points, each the mean of its steps, in an area from the smallest to the largest"

"""The HTML report of a run, or a comparison of several runs: loss, norms, throughput, memory and events."""

from __future__ import annotations

import json
import re
import time
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, median

from colonnade.comm.waits import PHASES
from colonnade.paths import local_path
from colonnade.proof.report.charts import (
    MOST_POINTS,
    Points,
    Series,
    Thin,
    bar_chart,
    buckets,
    data_block,
    plot,
    thinned,
)
from colonnade.proof.report.runs import Column, Run, read_run
from colonnade.proof.report.shell import card, cards, folded, heat_map, page, script_of, style_of_runs, table, tiles
from colonnade.texts import flat_config, format_bytes, format_count, format_seconds

MOST_LAYERS, MOST_COLUMNS, MOST_MARKS, MOST_EVENTS, MOST_OWN = 160, 160, 200, 200, 12
PHASE_COLORS = {
    "data": 6, "forward": 0, "backward": 2, "communication": 1, "clip": 8, "optimizer": 3, "other": 7,
}  # fmt: skip
"""Indices of `charts.COLORS`: no two phases have a similar colour."""
STILL_GOING = 60.0
"""Seconds without a new line after which a run without an end counts as killed; at least the time of twenty steps."""


def write_run_page(sources: Sequence[str | Path], out: str | Path) -> Path:
    """Write the report of one run, or one report that compares several runs; returns its path."""
    target = local_path(out, "the page's file")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(run_page(sources), encoding="utf-8")
    return target


def run_page(sources: Sequence[str | Path], refresh: int | None = None) -> str:
    """Return the report as HTML. A source is the log file of a `JsonlHook`, or the folder of that file.

    `refresh`: seconds after which the browser loads the page again.
    """
    runs = _named([read_run(source) for source in sources])
    first, several = runs[0], len(runs) > 1
    title = "Runs: " + ", ".join(run.name for run in runs) if several else first.name
    parts = [
        f'<p class="alert" role="alert">{escape(f"{run.name}: " * several + _state(run)[1])}</p>'
        for run in runs
        if _state(run)[2]
    ]
    parts += [_compared(runs) if several else _figures(first), _toolbar(runs), cards(_charts(runs))]
    parts.append('<div class="cards" style="margin-top:16px">')
    for run in runs:
        parts += _layers(run, several)
    if several:
        parts.append(_differences(runs))
    parts += [_events(runs), *(part for run in runs for part in _facts(run, several)), "</div>"]
    parts.append(data_block([run.axes() for run in runs], "runs"))
    lines = [] if several else [_heading(first), _state(first)[1]]
    return page(title, lines, parts, script_of("run"), style_of_runs(), refresh=refresh)


def _toolbar(runs: Sequence[Run]) -> str:
    """The x axis, the zoom and the smoothing of all charts."""
    shared = [name for name in ("step", "tokens", "samples", "time") if all(name in run.axes() for run in runs)]
    axes = "".join(
        f'<button type="button" data-axis="{name}" aria-pressed="{str(name == "step").lower()}">{name}</button>'
        for name in shared
    )
    zooms = "".join(
        f'<button type="button" data-zoom="{name}" aria-label="{label}">{text}</button>'
        for name, label, text in (
            ("in", "zoom in", "+"),
            ("out", "zoom out", "\N{MINUS SIGN}"),
            ("reset", "reset the zoom", "reset"),
        )
    )
    return (
        f'<div class="tools"><span class="group"><span>x axis</span>{axes}</span>'
        f'<span class="group"><span>zoom</span>{zooms}</span>'
        '<label class="group">smoothing <input id="smooth" type="range" min="0" max="0.99" step="0.01" value="0">'
        "<output>off</output></label>"
        "<small>Drag across a chart to zoom, double-click to reset. Click a name to hide its line.</small></div>"
        "<noscript><p>The charts of this page need JavaScript.</p></noscript>"
    )


def _named(runs: list[Run]) -> list[Run]:
    """The runs with distinct names: each name has as much of the path in front as distinguishes it from the others."""
    for depth in range(2, 32):
        counts = Counter(run.name for run in runs)
        for run in (run for run in runs if counts[run.name] > 1):
            place = run.path.absolute().parent.parts + (() if run.path.stem == "log" else (run.path.stem,))
            run.name = "/".join(place[-depth:])
    return runs


def _state(run: Run) -> tuple[str, str, bool]:
    """The state of the run: (in a few words, as a sentence, whether it is bad)."""
    steps = run.values("seconds")
    if run.end is not None:
        why = f" ({run.end['reason']})" if run.end.get("reason") else ""
        return run.end["how"], f"{run.end['how']} {_clock(run.end['time'])}{why}", run.end["how"] == "failed"
    if run.quiet < max(STILL_GOING, 20 * median(steps) if steps else 0.0):
        return "no end yet", f"the log has no end yet; last line {_clock(run.written)}", False
    cut = ", inside a line" * run.cut
    return (
        "killed",
        f"killed, or its host was lost: the log has no end; last line {_clock(run.written)}{cut}",
        True,
    )


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _heading(run: Run) -> str:
    facts = run.facts
    if not facts:
        return run.layout()
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.starts[0]["time"]))
    count, elements = facts["world_size"], facts.get("elements")
    parts = [run.layout()] * (count > 1) + [f"{count} rank{'s' * (count > 1)}", facts["device"]]
    parts.append(f"{elements:,} parameters" if elements else f"{facts['parameters']:,} parameters on rank 0")
    parts.append(f"started {began}, Colonnade {facts['colonnade']}, torch {facts['torch']}")
    return " · ".join(parts)


def _figures(run: Run) -> str:
    skipped, lost = run.marked("skipped"), run.marked("loss")
    state, _, bad = _state(run)
    figures: list[tuple[str, str] | tuple[str, str, bool]] = [(state, "state", bad), (f"{run.last:,}", "steps")]
    if lost and lost[-1][0] == run.last:
        figures.append(("not finite", "loss of the last step", True))
    else:
        figures += [(f"{value:.3g}", "loss of the last step") for value in run.values("loss")[-1:]]
    figures += [(f"{value:.3g}", "validation loss") for _, value in run.test("Loss")[-1:]]
    figures += [(_median(run, rate), f"{rate}, median") for rate in ("tokens/s", "samples/s")]
    figures += _utilisation(run)
    figures.append((_seconds(run), "step time, median"))
    if norms := run.values("grad_norm"):
        figures.append((f"{len(run.marked('clipped')) / len(norms):.0%}", "of steps clipped"))
    figures.append((str(len(skipped)), "steps skipped", bool(skipped)))
    figures.append((str(len(run.starts[1:])), "restarts", len(run.starts) > 1))
    figures += [(format_bytes(value * 2**20), "peak memory, rank 0") for value in run.values("memory")[-1:]]
    if late := Counter(int(rank) for rank in run.values("busy/slowest_rank")).most_common(1):
        figures.append((f"rank {late[0][0]}", f"slowest, in {late[0][1] / len(run.steps.steps):.0%} of steps"))
    return tiles([each for each in figures if each[0]])


def _flops(run: Run) -> tuple[float, str]:
    """(Flops of the model per token, or per sample without tokens; the source of this number as text); 0 if it is unknown."""
    counts = run.values(_count_name(run))
    if given := run.facts.get("tflop_per_step"):
        return given * 1e12 / (median(counts) or 1.0) if counts else 0.0, "by tflop_per_step"
    elements = run.facts.get("elements")
    known = bool(elements) and not run.facts.get("experts") and "tokens" in run.columns
    return (6.0 * float(elements or 0), "6 flops per parameter and token") if known else (0.0, "")


def _peak(run: Run) -> float:
    """Flop/s of all devices of the run by their data sheets; 0 if they are not known."""
    words = re.split(r"[\s_-]+", str(run.facts.get("device", "")).lower())
    # The boards of servers only: others of the same name are slower. Products of float32 may run as TF32, which the log does not say.
    if {"pcie", "nvl"}.intersection(words) or run.facts.get("dtype") not in ("bfloat16", "float16"):
        return 0.0
    sheets = {path.stem: path for path in (Path(__file__).parents[1] / "planner" / "hardware_files").glob("*.toml")}
    found = next((sheets[word] for word in words if word in sheets), None)
    if found is None:
        return 0.0
    flops = tomllib.loads(found.read_text(encoding="utf-8"))["matmul_flops"][run.facts["dtype"]]
    return float(flops) * int(run.facts.get("devices") or run.facts["world_size"])


def _utilisation(run: Run) -> list[tuple[str, str]]:
    """MFU, if the flops of the model and the peak of the devices are known; flop/s without a peak."""
    (flops, how), rates = _flops(run), run.values(f"{_count_name(run)}/s")
    if not flops or not rates:
        return []
    reached, peak = flops * median(rates), _peak(run)
    if peak:
        return [(f"{reached / peak:.1%}", f"MFU: {how}")]
    return [(format_count(reached), f"flop/s: {how}")]


def _count_name(run: Run) -> str:
    return "tokens" if "tokens" in run.columns else "samples"


def _compared(runs: list[Run]) -> str:
    """A table with one row per run."""
    rows = []
    rates = [name for name in ("tokens/s", "samples/s") if any(name in run.columns for run in runs)]
    mfu = any(_utilisation(run) for run in runs)
    for run in runs:
        memory = [format_bytes(value * 2**20) for value in run.values("memory")[-1:]]
        level = run.facts.get("clip")
        rows.append(
            [
                run.name,
                _state(run)[0],
                run.layout(),
                f"{run.last:,}",
                "".join(f"{value:.4g}" for value in run.values("loss")[-1:]),
                "".join(f"{value:.4g}" for _, value in run.test("Loss")[-1:]),
                *(_median(run, rate) for rate in rates),
                *("".join(value for value, _ in _utilisation(run)) for _ in range(mfu)),
                _seconds(run),
                "".join(memory),
                f"{len(run.marked('clipped'))}" + (f" at {level:g}" if level else ""),
                str(len(run.marked("skipped"))),
                str(len(run.starts[1:])),
            ]
        )
    heads = ("run", "state", "layout", "steps", "loss", "validation", *rates, *("MFU",) * mfu)
    heads += ("step time", "memory", "clipped", "skipped", "restarts")
    made = table(heads, rows, range(3, len(heads)), [0])
    return f'<section class="card runs">{made}</section>'


def _differences(runs: list[Run]) -> str:
    """The keys of the configs, and the facts, that are not equal in all runs."""
    facts = ("world_size", "device", "dtype", "elements", "colonnade", "torch", "command")
    flat = [
        {**{f"({name})": run.facts.get(name) for name in facts}, **flat_config(run.facts.get("config") or {})}
        for run in runs
    ]
    keys = [
        key for key in dict.fromkeys(key for one in flat for key in one) if len({_value(one, key) for one in flat}) > 1
    ]
    if not keys:
        return card("Differences of the configs", '<p class="empty">none</p>', wide=True)
    rows = [(key, *(_value(one, key) for one in flat)) for key in keys]
    note = "keys with different values; facts of the run in parentheses"
    return card(
        "Differences of the configs", table(("key", *(run.name for run in runs)), rows, (), [0]), note, wide=True
    )


def _value(flat: dict[str, object], key: str) -> str:
    return json.dumps(flat[key]) if flat.get(key) is not None else "-"


# --- Charts ---


def _charts(runs: list[Run]) -> list[str]:
    several = len(runs) > 1
    lasts = [buckets(run.steps.steps, max(500, MOST_POINTS // len(runs))) for run in runs]

    def lines(key: str, name: str, color: int | None = None, unit: float = 1.0) -> list[Series]:
        """Return one line for each run that has the column."""
        found = []
        for at, run in enumerate(runs):
            points = thinned(run.columns.get(key, Column()), lasts[at])
            if unit != 1.0:
                points = [Thin(each.step, each.mean * unit, each.low * unit, each.high * unit) for each in points]
            shown = at if several or color is None else color
            found.append(Series(run.name if several else name, points, color=shown, run=at))
        return found

    loss = lines("loss", "training")
    for at, run in enumerate(runs):
        name, color = (f"{run.name}, validation", at) if several else ("validation", 1)
        loss.append(Series(name, run.test("Loss"), "curve", color, at))
    made = [card("Loss", plot(loss, y="loss", logarithmic=False, smooth=True), _thinning(runs, lasts))]

    norms = lines("grad_norm", "norm")
    for at, run in enumerate(runs):
        norms += _norm_marks(run, at, several)
    made.append(
        card("Gradient norm", plot(norms, y="norm", logarithmic=True, smooth=True), "before clipping, of all ranks")
    )

    made.append(card("Learning rate", plot(lines("lr", "learning rate"), y="learning rate", from_zero=True)))

    rate = "tokens/s" if all("tokens" in run.columns for run in runs) else "samples/s"
    (flops, how), peak = _flops(runs[0]), _peak(runs[0])
    second = ("MFU, %", 100 * flops / peak) if flops and peak and not several else None
    note = f"of all ranks together; MFU: {how}" if second else "of all ranks together"
    rates = plot(lines(rate, rate), y=rate, from_zero=True, smooth=True, second=second)
    made.append(card("Throughput", rates, note))

    note = "rank 0; communication: only the part that computation does not hide; other: hooks, checkpoints and the loop"
    made.append(card("Where the time of a step goes", _time_chart(runs), note))

    busy = [value for run in runs for value in run.columns.get("busy/slowest", Column()).values]
    if busy:
        unit, name = _time_unit(max(busy))
        slow = lines("busy/slowest", "slowest rank", 1, unit)
        if not several:
            slow += lines("busy/fastest", "fastest rank", 2, unit)
        note = "time of a step without communication and waiting"
        chart = plot(slow, y=name, from_zero=True, smooth=True)
        made.append(card("Slowest rank" if several else "Slowest and fastest rank", chart, note))

    # The log has MiB. All numbers of the page are in powers of 1,000.
    peaks = [value * 2**20 for run in runs for value in run.values("memory")[-1:]]
    unit, name = (1e9, "GB") if max(peaks, default=0.0) >= 1e9 else (1e6, "MB")
    held = "; ".join(f"{run.name}: " * several + text for run in runs if (text := _held(run)))
    memory = plot(lines("memory", "peak", unit=2**20 / unit), y=name, from_zero=True)
    made.append(card("Memory", memory, "peak so far of rank 0" + f"; by the layout: {held}" * bool(held)))

    for metric in dict.fromkeys(name for run in runs for name in run.metrics()):
        curves = [
            Series(
                f"{run.name}, {kind}" if several else kind, points, "curve", at if several else kind == "validation", at
            )
            for at, run in enumerate(runs)
            for kind, points in run.metrics().get(metric, {}).items()
        ]
        made.append(card(metric, plot(curves, y=metric)))
    for own in list(dict.fromkeys(name for run in runs for name in run.own_numbers()))[:MOST_OWN]:
        made.append(card(own, plot(lines(own, own), y=own, smooth=True), "logged by a hook or the script"))
    return made


def _time_unit(seconds: float) -> tuple[float, str]:
    """(Units in a second, the unit) of a time axis up to this value."""
    return (1.0, "s") if seconds >= 1 else (1000.0, "ms")


def _norm_marks(run: Run, at: int, several: bool) -> list[Series]:
    """The clip level, and the clipped and skipped steps."""
    series, before = [], f"{run.name}, " * several
    clipped, skipped = (_fewer(_at_norm(run, run.marked(mark))) for mark in ("clipped", "skipped"))
    if level := run.facts.get("clip"):
        series.append(Series(f"{before}clip at {level:g}", [(run.first, level)], "level", at if several else 7, at))
    if clipped:
        count = len(run.marked("clipped"))
        name = f"{before}clipped ({count} of {len(run.steps.steps)})"
        series.append(Series(name, clipped, "dots", at if several else 4, at))
    if skipped:
        name = f"{before}skipped ({len(run.marked('skipped'))})"
        series.append(Series(name, skipped, "dots", at if several else 1, at))
    return series


def _fewer(marks: Points) -> Points:
    """At most `MOST_MARKS` marks: of neighbouring marks, the highest."""
    size = -(-len(marks) // MOST_MARKS)
    return [max(marks[at : at + size], key=lambda mark: mark[1]) for at in range(0, len(marks), size or 1)]


def _time_chart(runs: list[Run]) -> str:
    """The time of a step by phase: for one run over its steps, for several runs the mean of each."""
    names = [phase for phase in PHASES if any(f"time/{phase}" in run.columns for run in runs)]
    if not names:
        return '<p class="empty">this log has no times</p>'
    unit, unit_name = _time_unit(median(value for run in runs for value in run.values("seconds")))
    if len(runs) > 1:
        bars = [(run.name, [unit * fmean(run.values(f"time/{phase}") or [0.0]) for phase in names]) for run in runs]
        return bar_chart(
            names, bars, x=f"{unit_name} in a step, mean", page=True, colors=[PHASE_COLORS[name] for name in names]
        )
    (run,) = runs
    lasts = buckets(run.steps.steps, MOST_POINTS // 4)
    series = []
    for name in names:
        column, points = run.columns[f"time/{name}"], []
        # A step without the phase counts as zero, so that the areas add up to the time of a step.
        for after, last in pairwise([run.first - 1, *lasts]):
            begin, end = (bisect_right(column.steps, step) for step in (after, last))
            steps = bisect_right(run.steps.steps, last) - bisect_right(run.steps.steps, after)
            points.append((last, unit * sum(column.values[begin:end]) / steps))
        series.append(Series(name, points, color=PHASE_COLORS[name]))
    return plot(series, y=f"{unit_name} in a step", from_zero=True, stacked=True)


# --- Layers, events, facts ---


def _layers(run: Run, several: bool) -> list[str]:
    """The norm of each layer over time."""
    names, title = run.layers(), "Gradient norm of each layer" + f", {run.name}" * several
    if len(names) < 2:
        note = (
            'not measured: needs clip_grad_norm=dict(max_norm=..., report="layer") in the config and a GradientNormHook'
        )
        return [] if several else [card(title, "", note, wide=True)]
    together = -(-len(names) // MOST_LAYERS)
    rows = [names[at : at + together] for at in range(0, len(names), together)]
    shown = [row[0] if len(row) == 1 else f"{row[0]} and {len(row) - 1} more" for row in rows]
    steps, values = _cells(run, rows)
    note = (
        f"{len(names)} layers, {together} in a row; " * (together > 1)
        + "logarithmic; each cell shows the largest value of its steps (and layers)"
    )
    return [card(title, heat_map(shown, steps, values), note, wide=True)]


def _cells(run: Run, rows: Sequence[Sequence[str]]) -> tuple[list[int], list[list[float | None]]]:
    """(The last step of each column, the largest norm of each row's layers in that column).

    Norms are found by step, because a layer may lack some.
    """
    columns = [[run.columns[f"grad_norm/{name}"] for name in row] for row in rows]
    steps = sorted({step for row in columns for column in row for step in column.steps})
    count = min(len(steps), MOST_COLUMNS)
    lasts = [steps[round((at + 1) * len(steps) / count) - 1] for at in range(count)]

    def largest(row: Sequence[Column], after: int, last: int) -> float | None:
        inside = [each.values[bisect_right(each.steps, after) : bisect_right(each.steps, last)] for each in row]
        return max((value for values in inside for value in values), default=None)

    return lasts, [[largest(row, after, last) for after, last in pairwise([steps[0] - 1, *lasts])] for row in columns]


def _events(runs: list[Run]) -> str:
    """Restarts, skipped steps and warnings, in order. Equal events of consecutive steps are one row."""
    several, found = len(runs) > 1, []
    for run in runs:
        for at, start in enumerate(run.starts):
            again = f", {start['made_again']} steps repeated" if start.get("made_again") else ""
            what = f"resumed on {run.layout()}{again}" if at else "begun"
            found.append((run.name, start["step"], "restart" if at else "start", what))
        found += [(run.name, line["step"], line["level"], line["text"]) for line in run.events]
        skipped, lost = ({int(step) for step, _ in run.marked(mark)} for mark in ("skipped", "loss"))
        for step in skipped | lost:
            why = ["the gradient was not used"] * (step in skipped) + ["the loss was not finite"] * (step in lost)
            found.append((run.name, step, "skipped" if step in skipped else "loss", ", ".join(why)))
        if run.end is not None or _state(run)[2]:
            found.append((run.name, run.last, "end", _state(run)[1]))
        if run.damaged:
            found.append((run.name, run.last, "log", f"{run.damaged} of its lines could not be read"))
    found.sort(key=lambda row: (row[0], row[1]))
    rows = []
    for (name, kind, text), same in groupby(found, key=lambda row: (row[0], *row[2:])):
        steps = [row[1] for row in same]
        first = f"{steps[0]:,}" + f" to {steps[-1]:,}" * (steps[-1] > steps[0])
        rows.append((name, first, kind, text + f" ({len(steps)} times)" * (len(steps) > 1)))
    heads = ("run", "step", "event", "")
    made = (
        table(heads, rows[:MOST_EVENTS], [1])
        if several
        else table(heads[1:], [row[1:] for row in rows[:MOST_EVENTS]], [0])
    )
    note = f"<p>the first {MOST_EVENTS} of {len(rows)}</p>" if len(rows) > MOST_EVENTS else ""
    serious = any(kind not in ("start", "end") for _, _, kind, _ in rows)
    return folded(f"Events: {len(rows)}", note + made, is_open=serious and not several)


def _facts(run: Run, several: bool) -> list[str]:
    """Ledger and config."""
    name = f" of {run.name}" * several
    if not run.facts:
        return []
    heads = ("parameters", "n", "reduced over", "ranks", "divided by", "by")
    rows = [
        (row["pattern"], str(row["count"]), row["mode"], _short(row["ranks"]), f"{row['divisor']:g}", row["done_by"])
        for row in run.facts["ledger"]
    ]
    ledger = table(heads, rows, [1, 4], [0]) if rows else '<p class="empty">no gradient is reduced on rank 0</p>'
    config = "\n".join(f"{key} = {json.dumps(value)}" for key, value in run.facts["config"].items())
    return [folded(f"Ledger{name}, on rank 0", ledger), folded(f"Config{name}", f"<pre>{escape(config)}</pre>")]


def _short(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]} ({len(ranks)})"


def _held(run: Run) -> str:
    held = run.facts.get("memory") or {}
    return ", ".join(f"{kind} {format_bytes(count)}" for kind, count in held.items())


def _median(run: Run, key: str) -> str:
    return "".join(format_count(median(values)) for values in [run.values(key)] if values)


def _seconds(run: Run) -> str:
    return "".join(format_seconds(median(values)) for values in [run.values("seconds")] if values)


def _at_norm(run: Run, marks: Points) -> Points:
    """Marks of steps whose norm is not finite are drawn at the largest finite norm."""
    norms = run.columns.get("grad_norm", Column())
    known, top = set(norms.steps), max(norms.values, default=1.0)
    return [(step, value if step in known else top) for step, value in marks]


def _thinning(runs: list[Run], lasts: Sequence[Sequence[float]]) -> str:
    parts = [
        f"{len(run.steps.steps):,} steps{f' of {run.name}' * (len(runs) > 1)} as {len(kept):,} points"
        for run, kept in zip(runs, lasts, strict=True)
        if len(kept) < len(run.steps.steps)
    ]
    if not parts:
        return "of all ranks"
    return f"of all ranks; {', '.join(parts)}: the line is the mean, the area spans the minimum and the maximum"

"""The HTML report of a plan: mesh, memory, communication, timeline, ledger, and the layouts that a search examined.

A plan is given as plain values: the result of `Plan.to_dict()` or `SearchResult.to_dict()`, or their JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from colonnade.paths import local_path
from colonnade.proof.report.charts import COLORS, bar_chart, data_block
from colonnade.proof.report.plan_tables import (
    FORMULAS,
    MEMORY,
    OwedSum,
    PlanTable,
    Values,
    collectives,
    cut_layouts,
    figures,
    groups,
    hardware_line,
    layouts,
    ledger_entries,
    slowest_kind,
    spread,
    timeline_words,
    title_of,
)
from colonnade.proof.report.shell import card, cards, folded, page, script_of, table, tiles
from colonnade.texts import format_bytes, format_count, format_seconds

# --- Pictures as SVG files: the mesh by modes, the ledger as a matrix, the timeline of the pipeline ---

MOST_RANKS = 256
"""The number of ranks that the picture of a mesh shows of a larger world."""


def mesh_svg(plan: Values) -> str:
    """Draw one panel for each mode: a cell is a rank, and the ranks of a group have the same colour."""
    modes = [mode for mode in plan["modes"] if mode["size"] > 1 and mode["mode"] != "GLOBAL"]
    world = plan["totals"]["world_size"]
    count = min(world, MOST_RANKS)
    columns = min(count, 16)
    cell, across = 16, max(1, min(3, len(modes)))
    wide, tall = columns * cell + 24, math.ceil(count / columns) * cell + 44
    parts = []
    for at, mode in enumerate(modes):
        left, top = at % across * wide + 12, at // across * tall + 30
        parts.append(_text(left, top - 8, f"{mode['mode']} ({mode['count']:,} of {mode['size']:,})"))
        numbers: dict[int, int] = {}
        for rank in range(count):
            first = _first(mode, rank)
            color = COLORS[numbers.setdefault(first, len(numbers)) % 7] if first is not None else "#ddd"
            x, y = left + rank % columns * cell, top + rank // columns * cell
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" fill="{color}"><title>rank {rank}</title></rect>'
            )
    height = math.ceil(len(modes) / across) * tall + 30
    if count < world:
        parts.append(_text(12, height - 8, f"the first {count} of {world:,} ranks"))
    return _whole(max(across * wide, 320), height, parts)


def ledger_svg(plan: Values) -> str:
    """Draw a table of parameters by modes: a filled cell is a required gradient reduction, with its divisor."""
    modes = list(dict.fromkeys(line["mode"] for line in plan["ledger"] if line["mode"]))
    names = list(dict.fromkeys(line["parameters"] for line in plan["ledger"]))
    left, wide, line = 20 + 7 * max(map(len, names), default=0), 130, 20
    parts = [_text(left + at * wide + wide / 2, 20, mode, "middle") for at, mode in enumerate(modes)]
    for row, name in enumerate(names):
        parts.append(_text(left - 10, 44 + row * line, name, "end"))
        for at, mode in enumerate(modes):
            owed = next((one for one in plan["ledger"] if (one["parameters"], one["mode"]) == (name, mode)), None)
            fill = COLORS[at % 7] if owed else "#f0f0f0"
            x, y = left + at * wide, 30 + row * line
            parts.append(f'<rect x="{x}" y="{y}" width="{wide - 2}" height="{line - 2}" fill="{fill}"/>')
            if owed:
                told = f"over {owed['ranks']:,}, / {owed['divisor']:g}"
                parts.append(_text(x + wide / 2, y + 14, told, "middle", "#fff"))
    return _whole(left + len(modes) * wide + 12, 42 + len(names) * line, parts)


def timeline_svg(plan: Values) -> str:
    """Draw the actions of each pipeline rank over time; blank areas are idle time."""
    timeline = plan["timeline"]
    colors = {"F": COLORS[0], "B": COLORS[4], "I": COLORS[4], "W": COLORS[2]}
    left, wide, line = 40, 1100, 22
    scale = wide / timeline["makespan"] if timeline["makespan"] else 0.0
    parts = []
    for at, row in enumerate(timeline["rows"]):
        y = 30 + at * line
        parts.append(_text(left - 8, y + 15, str(at), "end"))
        parts.append(f'<rect x="{left}" y="{y}" width="{wide}" height="{line - 2}" fill="#f0f0f0"/>')
        for kind, _, micro, start, end in row:
            x, width = left + start * scale, (end - start) * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.4):.1f}" height="{line - 2}" fill="{colors[kind]}"/>'
            )
            if width > 14:
                parts.append(_text(x + width / 2, y + 15, str(micro), "middle", "#fff"))
    head = f"{timeline['schedule']}: forward blue, backward orange, weight part green; pipeline bubble {timeline['bubble']:.1%}"
    return _whole(left + wide + 12, 42 + len(timeline["rows"]) * line, [_text(left, 18, head), *parts])


def _first(mode: Values, rank: int) -> int | None:
    """The first rank of a rank's group."""
    if mode["digits"] is None:
        return next((group[0] for group in mode["groups"] if rank in group), None)
    return rank - sum(rank // stride % count * stride for stride, count in mode["digits"])


def _text(x: float, y: float, words: str, anchor: str = "start", color: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'


def _whole(width: float, height: float, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
    style = 'font-family="system-ui, sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    return head + style + "".join(parts) + "</svg>\n"


# --- The page ---

MOST_ROWS = 60
_PARTS = 20_000
"""Times on the page are rounded to makespan / this number."""


def plan_page(values: Values) -> str:
    """Return the HTML report of a plan, or of a search and its fastest plan."""
    search, plan = (values, values["best"]) if "fitting" in values else (None, values)
    parts = [] if search is None else [cards([_search(search)])]
    if plan is None:
        return page("No layout fits", [hardware_line(values)], parts, script_of("plan"))
    line = f"{plan['totals']['world_size']:,} ranks · {format_count(plan['totals']['parameters'])} parameters · {hardware_line(plan)}"
    parts += [_problems(plan), _figures(plan), cards(_cards(plan))]
    return page(f"Plan: {title_of(plan)}", [line], [*parts, _data(plan)], script_of("plan"))


def write_plan_pictures(values: Values, folder: str | Path) -> list[Path]:
    """Write mesh, ledger, memory, communication and timeline as SVG files; returns their paths."""
    target = local_path(folder, "the folder of the plan's pictures")
    plan = values["best"] if "fitting" in values else values
    if plan is None:
        return []
    pictures = {"mesh": mesh_svg(plan)}
    if plan["classes"]:
        pictures["ledger"] = ledger_svg(plan)
        pictures["memory"] = _memory_chart(plan, page=False)
        pictures["communication"] = _communication_chart(plan, page=False)
    if plan["timeline"]:
        pictures["timeline"] = timeline_svg(plan)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in pictures.items():
        (target / f"{name}.svg").write_text(text, encoding="utf-8")
    return [target / f"{name}.svg" for name in pictures]


def _problems(plan: Values) -> str:
    lines = "".join(f"<li>{escape(problem)}</li>" for problem in plan["problems"])
    return card("This would not start", f"<ul>{lines}</ul>") if lines else ""


def _figures(plan: Values) -> str:
    return tiles(figures(plan)) + f'<p class="note">{"<br>".join(map(escape, FORMULAS))}</p>'


def _cards(plan: Values) -> list[str]:
    made = [_mesh(plan)]
    if plan["timeline"]:
        made.append(_timeline(plan))
    if plan["classes"]:  # a plan without a model has none
        capacity = (
            f"of one rank of each kind, at the fullest moment; a device has {format_bytes(plan['hardware']['memory'])}"
        )
        made.append(card("Memory", _memory_chart(plan), capacity))
        longest = "of the kind of rank that communicates longest"
        made.append(card("Communication by mode", _communication_chart(plan), longest))
        made.append(_ledger(plan))
        made.append(_folded_table(collectives(plan["classes"], MOST_ROWS)))
    made.append(_folded_table(groups(plan)))
    notes = "".join(f"<p>{escape(note)}</p>" for note in plan["notes"])
    config = json.dumps(plan["config"], indent=2)
    model = "\n".join(f"{name} = {value}" for name, value in plan["hardware"].items())
    made.append(
        folded("Config, model of the hardware, notes", f"{notes}<pre>{escape(config)}</pre><pre>{escape(model)}</pre>")
    )
    return made


def _mesh(plan: Values) -> str:
    buttons = ['<button type="button" data-mode="all" aria-pressed="true">all modes</button>']
    buttons += [
        f'<button type="button" data-mode="{escape(names)}" aria-pressed="false" data-hint="{escape(_mode_words(names, mode))}">'
        f'<i class="swatch" style="background:var(--c{at % 8})"></i>{escape(names)}</button>'
        for at, (names, mode) in enumerate(_shown(plan).items())
    ]
    field = (
        f'<label>rank <input id="mesh-rank" type="number" min="0" max="{plan["totals"]["world_size"] - 1}"></label>'
        if plan["totals"]["world_size"] > 1
        else '<input id="mesh-rank" type="hidden">'
    )
    note = "Each cell is a rank. Point at a rank, or click it, to see its groups. Choose a mode to colour its groups."
    content = f'<div class="key" data-hints>{"".join(buttons)}{field}</div><canvas id="mesh"></canvas><pre id="mesh-words"></pre>'
    return card("Mesh", content, note, wide=True)


def _mode_words(names: str, mode: Values) -> str:
    data = {"same": "the same data", "distinct": "different data"}[mode["data"]]
    link = "inside a node" if mode["link"] == "node" else "between nodes"
    return f"{names}: {mode['count']:,} groups of {mode['size']:,} ranks with {data}, {link}"


def _timeline(plan: Values) -> str:
    timeline = plan["timeline"]
    note = f"{timeline_words(timeline)}; a row for each pipeline rank"
    legend = '<div class="key">' + "".join(
        f'<span><i class="swatch" style="background:var(--c{at})"></i>{name}</span>'
        for at, name in ((0, "forward"), (4, "backward"), (2, "backward, weight part"))
    )
    return card("Pipeline", f'{legend}</div><canvas id="timeline"></canvas>', note, wide=True)


def _memory_chart(plan: Values, page: bool = True) -> str:
    kinds = spread(plan["classes"], 16)
    unit, name = _unit(
        max(one["memory"]["total"] for one in kinds), ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
    )
    used = [part for part in MEMORY if any(one["memory"][part] for one in kinds)]
    rows = [(one["name"], [one["memory"][part] / unit for part in used]) for one in kinds]
    return bar_chart(used, rows, x=name, page=page)


def _communication_chart(plan: Values, page: bool = True) -> str:
    times: dict[str, list[float]] = {}
    for call in slowest_kind(plan)["collectives"]:
        spent = times.setdefault(call["mode"], [0.0, 0.0])
        spent[0] += call["seconds"] - call["exposed"]
        spent[1] += call["exposed"]
    if not times:
        return '<p class="empty">no rank communicates</p>'
    unit, name = _unit(max(map(sum, times.values())), ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))
    rows = [
        (mode, [each / unit for each in spent]) for mode, spent in sorted(times.items(), key=lambda row: -sum(row[1]))
    ]
    return bar_chart(("hidden behind computation", "exposed"), rows, x=f"{name} in a step", page=page)


def _ledger(plan: Values) -> str:
    """A table of parameters by modes. A cell is a required gradient reduction: its ranks, divisor and handler."""
    entries = ledger_entries(plan)
    modes = list(dict.fromkeys(mode for entry in entries for mode in entry.sums))
    numbers = {name: at for at, names in enumerate(_shown(plan)) for name in names.split(", ")}
    head = "".join(f"<th>{escape(mode)}</th>" for mode in modes)
    body = []
    for entry in entries[:MOST_ROWS]:
        cells = "".join(_owed(mode, entry.sums.get(mode), numbers.get(mode, 7)) for mode in modes)
        body.append(
            f'<tr><td class="name" data-head="parameters">{escape(entry.parameters)}</td>'
            f'<td class="number" data-head="elements on a rank">{entry.elements}</td>'
            f'<td data-head="stages">{entry.stages}</td><td data-head="placement">{escape(entry.placement)}</td>{cells}</tr>'
        )
    left = f"the first {MOST_ROWS} of {len(entries)} kinds of parameters; " * (len(entries) > MOST_ROWS)
    heads = (
        f'<tr><th>parameters</th><th class="number">elements on a rank</th><th>stages</th><th>placement</th>{head}</tr>'
    )
    made = f'<div class="scroll" data-hints><table class="stack"><thead>{heads}</thead><tbody>{"".join(body)}</tbody></table></div>'
    note = f"{left}a coloured cell is a gradient reduction: Σ number of ranks / divisor"
    return card("Ledger", made, note, wide=True)


def _owed(mode: str, owed: OwedSum | None, number: int) -> str:
    if owed is None:
        return "<td></td>"
    told = f"summed over {owed.ranks} ranks, divided by {owed.divisor}\nby {owed.done_by}"
    style = f"--owed:var(--c{number % 8})"
    return f'<td class="owed" data-head="{escape(mode)}" data-hint="{escape(told)}" style="{style}">Σ {owed.ranks} / {owed.divisor}</td>'


def _printed(made: PlanTable) -> str:
    return (f"<p>{escape(made.note)}</p>" if made.note else "") + table(made.heads, made.rows, made.numbers)


def _folded_table(made: PlanTable) -> str:
    return folded(made.title, _printed(made))


def _search(search: Values) -> str:
    """The layouts that fit, fastest first, and the reasons for rejected layouts."""
    fitting, cut = layouts(search, MOST_ROWS), cut_layouts(search, MOST_ROWS)
    parts = [_printed(fitting) if fitting.rows else '<p class="empty">no layout fits</p>']
    if cut.rows:
        parts.append(f"<details><summary>{escape(cut.title)}</summary>{_printed(cut)}</details>")
    if search["config"]:
        parts.append(
            f"<details open><summary>Config of the fastest "
            f"layout</summary><pre>{escape(search['config'])}</pre></details>"
        )
    if search["verify"]:
        parts.append(f"<p>Verify a scaled-down configuration on this machine:</p><pre>{escape(search['verify'])}</pre>")
    return card("Search", "".join(parts), f"{fitting.title}; fastest first", wide=True)


def _data(plan: Values) -> str:
    """The data that the script of the page draws."""
    timeline = plan["timeline"]
    data = {
        "world_size": plan["totals"]["world_size"],
        "axes": plan["axes"],
        "devices_per_node": plan["hardware"]["devices_per_node"],
        "modes": [_mode(names, mode) for names, mode in _shown(plan).items()],
        "classes": [{"pipeline_rank": one["pipeline_rank"], "shards": _shards(one)} for one in plan["classes"]],
        "timeline": None if timeline is None else _compact(timeline),
    }
    return data_block(data, "plan-data")


def _mode(names: str, mode: Values) -> dict[str, Any]:
    regular = mode["digits"] is not None
    return {"mode": names, "digits": mode["digits"], "groups": [] if regular else mode["groups"]}


def _shown(plan: Values) -> dict[str, Values]:
    """The modes with groups of several ranks, without the world. Modes with the same groups are combined."""
    alike: dict[str, list[Values]] = {}
    for mode in plan["modes"]:
        if mode["size"] > 1 and mode["mode"] != "GLOBAL":
            alike.setdefault(json.dumps([mode["digits"], mode["groups"]]), []).append(mode)
    return {", ".join(mode["mode"] for mode in modes): modes[0] for modes in alike.values()}


def _shards(one: Values) -> str:
    stages = ", ".join(map(str, one["stages"]))
    return f"{one['parameters']:,} parameters of stage {stages}, {format_bytes(one['memory']['total'])} at its fullest"


def _compact(timeline: Values) -> dict[str, Any]:
    scale = _PARTS / timeline["makespan"] if timeline["makespan"] else 0.0
    rows = [
        [[kind, stage, micro, round(a * scale), round(b * scale)] for kind, stage, micro, a, b in row]
        for row in timeline["rows"]
    ]
    return {"rows": rows, "parts": _PARTS, "makespan": format_seconds(timeline["makespan"])}


def _unit(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The unit of an axis: the largest unit that is not larger than all values."""
    return next((each for each in units if largest >= each[0]), units[-1])

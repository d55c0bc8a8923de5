"""The numbers of a plan as text: figures and tables, which `colonnade plan` and the HTML report (`page_of_plan`) share.

A plan is given as plain values: the result of `Plan.to_dict()` or `SearchResult.to_dict()`, or their JSON. Pictures
(the mesh, bars, timelines) are drawn separately for the terminal and for the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from colonnade.texts import format_bytes, format_count, format_seconds

Values = Mapping[str, Any]

MEMORY = ("parameters", "gradients", "state", "activations", "communication", "buffers", "workspace")
"""The parts of a rank's memory, in the order in which they are stacked."""

FORMULAS = (
    "MFU = model flops (without recomputed products) / (step x ranks x peak)",
    "HFU = all flops (with recomputed products) / (step x ranks x peak)",
    "pipeline bubble = 1 - (time of all passes of all pipeline ranks) / (pipeline ranks x makespan)",
)


class Figure(NamedTuple):
    """A main number of a plan, for the top of the report."""

    value: str
    meaning: str
    is_bad: bool = False


@dataclass(frozen=True)
class PlanTable:
    """A table with text cells. `numbers` are the indices of right-aligned columns."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: tuple[int, ...] = ()
    note: str = ""
    """A note below the table, for example on omitted rows."""


# --- The whole plan ---


def title_of(plan: Values) -> str:
    """Return the sizes of all axes with several ranks, as "data 2 x pipeline 2"."""
    return " x ".join(f"{name} {count}" for name, count in plan["axes"].items() if count > 1) or "one process"


def hardware_line(values: Values) -> str:
    """Return one line on the hardware: name, devices in a node, memory of a device."""
    hardware = values["hardware"]
    return f"{hardware['name']}, {hardware['devices_per_node']} to a node, {format_bytes(hardware['memory'])} each"


def figures(plan: Values) -> list[Figure]:
    """Return the main numbers of a plan. Without a model, only the numbers of communicators are known."""
    totals, step = plan["totals"], plan["totals"]["step_seconds"]
    each = f"communicators on a rank, {totals['communicators']:,} in all"
    communicators = Figure(f"{totals['communicators_per_rank']:,}", each)
    if not plan["classes"]:
        return [communicators]
    amount, unit = (totals["tokens"], "tokens/s") if totals["tokens"] else (totals["samples"], "samples/s")
    found = [
        Figure(format_seconds(step), "a step"),
        Figure(format_count(amount / step) if step else "", unit),
        Figure(f"{totals['mfu']:.1%}", "MFU, of the peak flops"),
        Figure(f"{totals['hfu']:.1%}", "HFU, with what is recomputed"),
        Figure(
            format_bytes(totals["peak_memory"]),
            f"peak memory, of {format_bytes(plan['hardware']['memory'])}{'' if totals['fits'] else ': DOES NOT FIT'}",
            not totals["fits"],
        ),
        Figure(f"{plan['timeline']['bubble']:.1%}" if plan["timeline"] else "", "pipeline bubble, of ranks x makespan"),
        Figure(f"{totals['exposed_seconds'] / step:.1%}" if step else "", "exposed communication, of a step"),
        Figure(format_seconds(totals["compute_seconds"]), "computing, in a step"),
        Figure(format_seconds(totals["optimizer_seconds"]), "optimizer, in a step"),
        Figure(format_bytes(totals["bytes_inside_nodes"]), "inside nodes in a step"),
        Figure(format_bytes(totals["bytes_between_nodes"]), "between nodes in a step"),
        communicators,
    ]
    return [one for one in found if one.value]


def groups(plan: Values) -> PlanTable:
    """Return the table of the process groups of each mode."""
    heads = ("mode", "size", "groups", "data", "link", "communicator", "the first")
    rows = []
    for mode in plan["modes"]:
        first = mode["groups"][0] if mode["groups"] else []
        rows.append(
            (
                mode["mode"],
                f"{mode['size']:,}",
                f"{mode['count']:,}",
                mode["data"],
                "inside a node" if mode["link"] == "node" else "between nodes",
                "yes" if mode["communicator"] else "no",
                ", ".join(map(str, first[:8])) + (" …" if len(first) > 8 else ""),
            )
        )
    return PlanTable("Groups", heads, rows, (1, 2))


def timeline_words(timeline: Values) -> str:
    """Describe the schedule and its bubbles in words."""
    return (
        f"{timeline['schedule']}, {timeline['num_microbatches']} micro-batches in {format_seconds(timeline['makespan'])}; pipeline "
        f"bubble {timeline['bubble']:.1%} ({timeline['equal_bubble']:.1%} if all passes took the same time and "
        f"transfers took none)"
    )


# --- Ranks ---


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` items at even distances, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def memory_words(kind: Values) -> str:
    """List the parts of the memory of a kind of rank."""
    memory = kind["memory"]
    parts = [f"{name} {format_bytes(memory[name])}" for name in MEMORY if memory[name]]
    if memory["reserved"]:
        expandable = f"{format_bytes(memory['expandable'])} with expandable segments"
        parts.append(f"reserved by the allocator {format_bytes(memory['reserved'])} ({expandable}): {memory['fit']}")
    return ", ".join(parts)


def slowest_kind(plan: Values) -> Values:
    """Return the kind of rank whose collectives take longest."""
    kinds: list[Values] = plan["classes"]
    return max(kinds, key=lambda one: sum(call["seconds"] for call in one["collectives"]))


def collectives(kinds: Sequence[Values], most: int) -> PlanTable:
    """Return the table of the collectives in a step on these kinds of ranks, the longest first."""
    found = [(one["name"], call) for one in kinds for call in one["collectives"]]
    found.sort(key=lambda each: -each[1]["seconds"])
    rows = [
        (
            name,
            call["when"],
            call["mode"],
            call["op"],
            f"{call['ranks']:,}",
            format_bytes(call["bytes"]),
            f"{call['count']:,}",
            call["link"],
            format_seconds(call["seconds"]),
            format_seconds(call["exposed"]),
            call["what"],
        )
        for name, call in found[:most]
    ]
    heads = ("on", "when", "mode", "call", "ranks", "bytes each", "times", "link", "time", "exposed", "for")
    note = f"the longest {most} of {len(found)}" if len(found) > most else ""
    return PlanTable("Collectives of a step", heads, rows, (4, 5, 6, 8, 9), note)


# --- The ledger ---


class OwedSum(NamedTuple):
    """A required gradient reduction, as text: group size, divisor and handler."""

    ranks: str
    divisor: str
    done_by: str


@dataclass(frozen=True)
class LedgerEntry:
    """Parameters with the same name pattern and placement, and their required gradient reductions by mode."""

    parameters: str
    count: str
    elements: str
    stages: str
    placement: str
    sums: Mapping[str, OwedSum]


def ledger_entries(plan: Values) -> list[LedgerEntry]:
    """Return one ledger entry for each kind of parameter."""
    rows: dict[tuple[str, str], list[Values]] = {}
    for line in plan["ledger"]:
        rows.setdefault((line["parameters"], line["placement"]), []).append(line)
    return [
        LedgerEntry(
            name,
            f"{lines[0]['count']:,}",
            f"{lines[0]['elements']:,}",
            ", ".join(map(str, lines[0]["stages"])),
            placement.strip("{}") or "replicated on every rank",
            {
                line["mode"]: OwedSum(f"{line['ranks']:,}", f"{line['divisor']:g}", line["done_by"])
                for line in lines
                if line["mode"]
            },
        )
        for (name, placement), lines in rows.items()
    ]


# --- A search ---


def layout_text(layout: Values) -> str:
    """Describe a layout in a few words, without axes of size 1 and without disabled features."""
    off = {"zero": 0, "checkpoint": "none"}
    return ", ".join(f"{key} {value}" for key, value in layout.items() if value != off.get(key, 1)) or "one rank"


def search_title(search: Values) -> str:
    """Return the numbers of examined, fitting and rejected layouts as a title."""
    return f"{search['world_size']:,} x {search['hardware']['name']}: {len(search['fitting'])} layouts fit, {len(search['cut'])} were rejected"


def layouts(search: Values, most: int) -> PlanTable:
    """Return the table of the layouts that fit, fastest first."""

    def known(value: Any, text: Any) -> str:
        return "" if value is None else text(value)

    def percent(value: float) -> str:
        return f"{value:.1%}"

    rows = [
        (
            str(at),
            layout_text(one["layout"]),
            known(one["step_seconds"], format_seconds),
            known(one["peak_memory"], format_bytes),
            known(one["bubble"], percent),
            known(one["exposed_seconds"], format_seconds),
            known(one["mfu"], percent),
            known(one["hfu"], percent),
        )
        for at, one in enumerate(search["fitting"][:most], 1)
    ]
    heads = ("", "layout", "a step", "memory", "bubble", "exposed", "MFU", "HFU")
    return PlanTable(search_title(search), heads, rows, (0, 2, 3, 4, 5, 6, 7))


def cut_layouts(search: Values, most: int) -> PlanTable:
    """Return the table of the reasons for rejected layouts, the most frequent reason first."""
    reasons: dict[str, list[str]] = {}
    for one in search["cut"]:
        reasons.setdefault(one["reason"], []).append(layout_text(one["layout"]))
    usual = sorted(reasons.items(), key=lambda each: -len(each[1]))
    rows = [(str(len(some)), reason, some[0]) for reason, some in usual[:most]]
    note = f"the {most} most frequent of {len(usual)} reasons" if len(usual) > most else ""
    return PlanTable(f"{len(search['cut'])} layouts were rejected", ("layouts", "why", "such as"), rows, (0,), note)

"""The table of docs/evidence/models.md: every architecture under every layout, compared with a single process.

`python -m tests.hf.table [--only llama ...] [--layouts "tensor 2" ...] [--data 2] [--write docs/evidence/models.md]`
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from colonnade.testing import WorldResult, run_world
from tests.hf.runs import LAYOUTS, Layout, run_all, truth_file
from tests.hf.zoo import ARCHITECTURES, BY_NAME, Architecture, reference

# Errors and warnings of transformers would hide the results; gloo is faster without its checks of collectives.
QUIET = {"TORCH_DISTRIBUTED_DEBUG": "OFF", "TRANSFORMERS_VERBOSITY": "error"}

Cells = dict[tuple[str, str], str]
"""(architecture, layout) -> "ok", "refused: ...", "wrong: ..." or "failed: ..."."""


def make(
    architectures: Iterable[Architecture],
    layouts: Iterable[Layout],
    data: int = 1,
    after: Callable[[Cells], None] = lambda cells: None,
) -> Cells:
    """Run every architecture under every layout: one world for each layout, and one more after each failure.

    `after` is called with the cells of a layout when the layout is done.
    """
    cells: Cells = {}
    architectures = list(architectures)
    with tempfile.TemporaryDirectory() as folder:
        for layout in layouts:
            fitting = [architecture for architecture in architectures if layout.fits(architecture)]
            for architecture in fitting:
                file = truth_file(folder, architecture.name, layout.tied)
                if not file.exists():
                    torch.save(reference(architecture, layout.tied), file)
            begin = time.monotonic()
            found = _run(replace(layout, ranks=layout.ranks * data), [each.name for each in fitting], folder)
            cells.update({(name, layout.name): cell for name, cell in found.items()})
            after({(name, layout.name): cell for name, cell in found.items()})
            print(f"{layout.name}: {len(found)} in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return cells


def _run(layout: Layout, names: list[str], folder: str) -> dict[str, str]:
    found: dict[str, str] = {}
    lines = Path(folder, f"{layout.name}.jsonl")
    while left := [name for name in names if name not in found]:
        lines.write_text("")
        result = run_world(
            layout.ranks, run_all, layout, left, folder, timeout=90 + 10 * len(left), check=False, env=QUIET
        )
        found.update(json.loads(line) for line in lines.read_text().splitlines())
        if not result.ok:
            broken = next(name for name in names if name not in found)
            found[broken] = f"failed: {_story(result)}"
    return found


def _story(result: WorldResult) -> str:
    """The error of the first rank that failed for its own reason."""
    failed = [outcome for outcome in result.outcomes if not outcome.ok]
    first = min(failed, key=lambda outcome: (outcome.kind != "exception", outcome.time))
    return f"{first.type or first.kind}: {first.message}\n{first.traceback or first.stack}"


DOCUMENT = Path(__file__).parents[2] / "docs" / "evidence" / "models.md"
BEGIN, END = "<!-- made by python -m tests.hf.table -->\n", "<!-- end -->\n"
NOTHING = "–"


def documented(text: str) -> Cells:
    """The cells of a page; for a cell that is not "ok", the text of its note."""
    _, _, rest = text.partition(BEGIN)
    table, _, _ = rest.partition(END)
    rows = [line.strip("| \n").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    notes = dict(re.findall(r"^(\d+)\. (.*)$", table, re.MULTILINE))
    names = [layout.name for layout in LAYOUTS]
    cells: Cells = {}
    for name, *row in rows[1:]:
        for layout, cell in zip(names, row, strict=True):
            number = re.fullmatch(r"no \((\d+)\)", cell)
            if cell != NOTHING:
                cells[name, layout] = notes[number[1]] if number else cell
    return cells


def written(cells: Cells) -> str:
    """The table; the reasons of cells that are not "ok" are numbered notes below it."""
    notes: dict[str, int] = {}

    def text(cell: str | None) -> str:
        if cell in (None, "ok"):
            return cell or NOTHING
        return f"no ({notes.setdefault(short(cell), len(notes) + 1)})"

    lines = [f"| architecture | {' | '.join(layout.name for layout in LAYOUTS)} |", f"|---|{'---|' * len(LAYOUTS)}"]
    for name in BY_NAME:
        row = [text(cells.get((name, layout.name))) for layout in LAYOUTS]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for note, number in notes.items())]).rstrip() + "\n"


def write(path: Path, cells: Cells) -> None:
    """Replace these cells in the table of a page."""
    page = path.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(before + BEGIN + written({**documented(page), **cells}) + END + after, encoding="utf-8")


def short(cell: str) -> str:
    """A reason in one sentence without the class of the model, so that several models share a note."""
    line = next(line for line in cell.splitlines() if line.strip()).strip()
    sentence = re.split(r"\. (?=[A-Z])", line)[0]
    sentence = re.sub(r"\b[A-Z]\w*(For[A-Z]\w+|LMHeadModel)\b", "the model", sentence)
    return sentence if len(sentence) <= 300 else sentence[:297] + "..."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="architectures")
    parser.add_argument("--layouts", nargs="*", help="names of layouts")
    parser.add_argument("--data", type=int, default=1, help="data-parallel ranks for each layout")
    parser.add_argument("--write", type=Path, help="the page in whose table these cells are replaced")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [BY_NAME[name] for name in arguments.only] if arguments.only else ARCHITECTURES
    layouts = [layout for layout in LAYOUTS if not arguments.layouts or layout.name in arguments.layouts]

    def after(cells: Cells) -> None:
        for (name, layout), cell in cells.items():
            if cell != "ok":
                shown = cell if len(cell) < 1500 else f"{cell[:300]} ... {cell[-1200:]}"
                print(f"--- {name}, {layout}: {shown}")
        print(f"{[*cells.values()].count('ok')} of {len(cells)} ok", flush=True)
        if arguments.write:
            write(arguments.write, cells)

    cells = make(chosen, layouts, arguments.data, after)
    return int(any(cell.startswith(("wrong", "failed")) for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main())

"""The table of docs/models.md: every architecture under every layout, beside one process.

`python -m tests.hf.table [--only llama ...] [--layouts "tensor 2" ...] [--data 2] [--write docs/models.md]`
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from colonnade.testing import run_world
from tests.hf.runs import LAYOUTS, Layout, run_all, truth_file
from tests.hf.zoo import ARCHITECTURES, BY_NAME, Architecture, reference

Cells = dict[tuple[str, str], str]
"""(architecture, layout) -> "ok", "refused: ...", "wrong: ..." or "failed: ..."."""


def make(architectures: Iterable[Architecture], layouts: Iterable[Layout], data: int = 1) -> Cells:
    """Run every architecture under every layout: one world for each layout, and one more after each failure."""
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
            print(f"{layout.name}: {len(found)} in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return cells


def _run(layout: Layout, names: list[str], folder: str) -> dict[str, str]:
    found: dict[str, str] = {}
    lines = Path(folder, f"{layout.name}.jsonl")
    while left := [name for name in names if name not in found]:
        lines.write_text("")
        result = run_world(layout.ranks, run_all, layout, left, folder, timeout=60 + 5 * len(left), check=False)
        found.update(json.loads(line) for line in lines.read_text().splitlines())
        if not result.ok:
            broken = next(name for name in names if name not in found)
            found[broken] = f"failed: {_story(result)}"
    return found


def _story(result: object) -> str:
    failures = [str(outcome) for outcome in result.outcomes if not outcome.ok]  # type: ignore[attr-defined]
    return "\n".join(failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="architectures")
    parser.add_argument("--layouts", nargs="*", help="layouts by name")
    parser.add_argument("--data", type=int, default=1, help="ranks of data parallelism on top")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [BY_NAME[name] for name in arguments.only] if arguments.only else ARCHITECTURES
    layouts = [layout for layout in LAYOUTS if not arguments.layouts or layout.name in arguments.layouts]
    cells = make(chosen, layouts, arguments.data)
    for (name, layout), cell in cells.items():
        if cell != "ok":
            print(f"--- {name}, {layout}: {cell[:3000]}")
    for layout in layouts:
        mine = [cell for (_, where), cell in cells.items() if where == layout.name]
        print(f"{layout.name}: {mine.count('ok')} of {len(mine)} ok")
    return int(any(cell.startswith(("wrong", "failed")) for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main())

"""The results of the corpus: all bugs of one number of ranks in one world, and the part of the documentation made of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from colonnade.testing import run_world
from tests.corpus.runner import Result, bug_of, names, run_all
from tests.evidence import stamp
from tests.sources import linked

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "bugs.md"
QUICK = {"TORCH_DISTRIBUTED_DEBUG": "OFF", "CUDA_VISIBLE_DEVICES": ""}
PER_WORLD = 30


def replace_part(name: str, text: str) -> None:
    """Replace one part of the page, between its two comments; the rest of the page is written by hand."""
    page = PAGE.read_text(encoding="utf-8")
    first, last = f"<!-- part: {name} -->\n", f"<!-- end: {name} -->"
    before, rest = page.split(first)
    PAGE.write_text(before + first + text + last + rest.split(last)[1], encoding="utf-8")


def results(chosen: tuple[str, ...] = ()) -> list[Result]:
    """What became of these bugs (of all of them), as rank 0 tells it."""
    found = [one for some in worlds(chosen or tuple(names())) for one in in_one_world(some)]
    return sorted(found, key=lambda one: one.name)


def worlds(chosen: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Bugs of one number of ranks share a world, which costs more to start than to run one of them; up to so many."""
    by_ranks = [tuple(name for name in chosen if bug_of(name).ranks == ranks) for ranks in (2, 3, 4)]
    return [some[at : at + PER_WORLD] for some in by_ranks for at in range(0, len(some), PER_WORLD)]


@cache
def in_one_world(some: tuple[str, ...]) -> list[Result]:
    """One bug after another."""
    return run_world(bug_of(some[0]).ranks, run_all, list(some), timeout=110, env=QUICK).values[0]


def markdown(found: list[Result]) -> str:
    """The part of the page."""
    total, seconds = len(found), sum(one.seconds for one in found)
    named, refused = sum(one.named for one in found), sum(bool(one.refused) for one in found)
    lines = [
        f"{total} bugs: {sum(one.found for one in found)} detected, the true cause named first for {named} "
        f"({100 * named / total:.0f}%), in {seconds:.0f} s. For {refused} of them, `initialize` or the first step also raises an "
        f'error ("and at start-up" in the table); these checks were then disabled. If `verify` names another cause, the table shows both.',
        "",
        "| source | bug | detected | cause named | message of `verify` |",
        "|---|---|---|---|---|",
    ]
    return stamp("python -m tests.corpus") + "\n\n" + "\n".join([*lines, *map(_row, found)]) + "\n"


def _row(one: Result) -> str:
    """The issue comes first, the test that reproduces it second."""
    found = ("yes, and at start-up" if one.refused else "yes") if one.causes else "at start-up" if one.refused else "NO"
    cause = one.bug.cause if one.named else f"**{one.causes[0] if one.causes else 'none'}**, not {one.bug.cause}"
    said = (one.sentence or one.error or one.refused).replace("|", "\\|").replace("\n", " ")
    source = f"{linked(one.bug.source).replace('TTrace', '[TTrace](https://arxiv.org/abs/2506.09280)')} ([test](../../tests/corpus/{one.name}.py))"
    return f"| {source} | {one.bug.what} | {found} | {cause} | {said} |"

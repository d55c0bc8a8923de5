"""The results of the corpus: all bugs of one number of ranks in one world, and the page of documentation made of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from colonnade.testing import run_world
from tests.corpus.runner import Result, bug_of, names, run_all
from tests.evidence import stamp

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "bugs.md"
QUICK = {"TORCH_DISTRIBUTED_DEBUG": "OFF", "CUDA_VISIBLE_DEVICES": ""}
PER_WORLD = 30
FIRST_RUNS = ((96, 52), (13, 10), (39, 18), (19, 16), (36, 22), (5, 4), (24, 17), (24, 22))
"""What a first run, with hypotheses that had met none of them, gave: (bugs, causes named). All were found."""
HEAD = """# Bugs of the field, and what `verify` says of them

Each row is a bug that a public tracker or paper tells of, or a mistake that the inventor of a parallelism could make ("invented"), re-made in a few lines
on 2 to 4 ranks of a CPU: `tests/corpus/` has one file for each.
`colonnade.verify` knows nothing of what was planted. The cause that it has to name stands in the file, and was committed before the bug was first run.

How far to trust the share: the bugs were written in batches. Each batch was first run on hypotheses that had never seen it ("named blind" below), and then the hypotheses were improved on it.
So the first share below is of bugs that the hypotheses were improved on; the blind share is not. The other way round,
`python -m tests.corpus.healthy` draws runs with nothing wrong in them (models, layouts, ZeRO, accumulation, clipping, fp64, fp32, bf16): 200 of 200 are found equal.

"""


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
    """The page."""
    total, seconds = len(found), sum(one.seconds for one in found)
    named, refused = sum(one.named for one in found), sum(bool(one.refused) for one in found)
    lines = [
        f"**{total} bugs: {sum(one.found for one in found)} found, the true cause named first in {named} "
        f"({100 * named // total}%), in {seconds:.0f} s.** {refused} of them are refused at start-up or at the first step by the "
        f"library's own checks, which were then turned off. Where another cause is named, the column says which.",
        "",
        f"**Named blind: {sum(named for _, named in FIRST_RUNS)} of {sum(count for count, _ in FIRST_RUNS)}**, all of which were found: "
        + ", then ".join(f"{named} of {count} ({100 * named // count}%)" for count, named in FIRST_RUNS)
        + ".",
        "",
        "| source | bug | found | cause named | what is said | s |",
        "|---|---|---|---|---|---|",
    ]
    return HEAD + stamp("python -m tests.corpus") + "\n\n" + "\n".join([*lines, *map(_row, found)]) + "\n"


def _row(one: Result) -> str:
    found = (
        ("yes, and refused at start" if one.refused else "yes")
        if one.causes
        else "refused at start"
        if one.refused
        else "NO"
    )
    cause = f"yes: {one.bug.cause}" if one.named else f"no: {one.causes[0] if one.causes else '-'}, not {one.bug.cause}"
    said = (one.sentence or one.error or one.refused).replace("|", "\\|").replace("\n", " ")
    link = f"[{one.bug.source}](../../tests/corpus/{one.name}.py)"
    return f"| {link} | {one.bug.what} | {found} | {cause} | {said} | {one.seconds:.1f} |"

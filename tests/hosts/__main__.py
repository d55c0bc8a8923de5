"""`python -m tests.hosts [--kills 20] [--launcher torchrun]`: kills on two hosts, counted. Root only.

With `--counts`: where shards lie, what is refused, and how many keys of the store a launch and a wait of 20 s cost.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from colonnade.testing.hosts import why_not
from tests.hosts.kills import LAUNCHERS, counts, killed, undisturbed


def main() -> int:
    """Print a line for each kill, and the counts; 0 where the job came back each time with the same bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--launcher", choices=LAUNCHERS, action="append")
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if why_not():
        print(why_not())
        return 2
    if options.counts:
        show_counts(options.launcher or [*LAUNCHERS])
        return 0
    steps, failed = 12 * options.kills, False
    with tempfile.TemporaryDirectory() as folder:
        truth = undisturbed(Path(folder) / "undisturbed", steps)
        for launcher in options.launcher or LAUNCHERS:
            back, job = killed(Path(folder) / launcher, launcher, options.kills, steps, seed=options.seed)
            equal = back == options.kills and job.digests() == truth
            failed |= not equal
            print(f"{launcher}: back after {back} of {options.kills} kills; the end is bit-equal: {equal}", flush=True)
    return int(failed)


def show_counts(launchers: list[str]) -> None:
    """A line for each rank, and the sums."""
    with tempfile.TemporaryDirectory() as folder:
        for launcher in launchers:
            for nproc in (2, 4):
                found = counts(Path(folder) / f"{launcher}{nproc}", launcher, nproc)
                print(f"{launcher}, 2 hosts x {nproc} ranks:", flush=True)
                for rank, told in enumerate(found):
                    print(f"  rank {rank}: {told}", flush=True)
                for what in ("launch", "wait"):
                    print(f"  keys of the store in a {what}: {sum(told[what] for told in found)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

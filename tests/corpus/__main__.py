"""`python -m tests.corpus` runs the corpus and writes its part of docs/evidence/bugs.md; `python -m tests.corpus NAME ...` prints what is said of these."""

from __future__ import annotations

import sys

from tests.corpus.runner import names
from tests.corpus.table import markdown, replace_part, results


def main(chosen: list[str]) -> int:
    unknown = sorted(set(chosen) - set(names()))
    if unknown:
        print(f"no bug of the corpus: {', '.join(unknown)}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    found = results(tuple(chosen))
    for one in found:
        verdict = "named" if one.named else "found" if one.found else "MISSED"
        print(f"{verdict:6} {one.name}: {one.bug.cause}, said: {', '.join(one.causes) or one.error or 'equal'}")
        if chosen:
            print(f"    {one.sentence}")
    if not chosen:
        replace_part("corpus", markdown(found))
    print(f"found {sum(one.found for one in found)} of {len(found)}, cause named {sum(one.named for one in found)}")
    return int(not all(one.found for one in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

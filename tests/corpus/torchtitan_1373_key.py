"""torchtitan #1373: one key is shared by the heads of all tensor ranks, and its gradient came from the own heads only.

Shows as: forward is right; the key's projection has a part of its gradient, small enough to show after 1,000 steps only.
"""

from tests.corpus.heads import Heads
from tests.corpus.runner import Bug, Kind, Run

BUG = Bug(
    "torchtitan #1373",
    "a shared key receives only the gradient of its own rank's heads",
    "partial-gradient",
    layout={"tensor": 2},
    kind=Kind(Heads),
)


class Unsummed(Heads):
    def key(self, x):
        return self.shared_key(x)


def plant(run: Run) -> None:
    run.model = Unsummed

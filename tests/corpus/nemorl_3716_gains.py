"""NeMo-RL #3716: a train step of its own missed the all-reduce of the gains that the heads of all tensor ranks share.

Shows as: the gain's gradient on each rank is that of its own heads.
"""

from tests.corpus.heads import Heads
from tests.corpus.runner import Bug, Kind, Run
from tests.corpus.unplaced import forgetting

BUG = Bug(
    "NeMo-RL #3716",
    "the gain of query and key norms is not summed over the tensor ranks",
    "partial-gradient",
    layout={"tensor": 2},
    kind=Kind(Heads),
)


def plant(run: Run) -> None:
    run.model = forgetting(run.model, "gain")

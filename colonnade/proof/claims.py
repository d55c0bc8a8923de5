"""The table of hypotheses. One of your own: `@hypothesis("gradient")` on a function of a case that yields claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class Claim:
    """A mistake that explains the numbers of one case. `what` goes on after the name of the thing that is wrong;
    `where` says where to look; `modes` picks the ledger's line; `residual` is what is left, in units of the tolerance."""

    cause: str
    what: str
    where: str
    factor: float | None = None
    modes: tuple[str, ...] = ()
    residual: float = 0.0
    rank: int = 0
    """Lower wins among claims that explain as many parameters: the simpler and more usual mistake. 0: its place in the table."""
    doubt: int = 0
    """What else speaks against it: healthy parameters that would share the mistake. Counts after `rank`."""

    @property
    def key(self) -> tuple[str, str]:
        """Claims of several parameters with one key are one finding."""
        return self.cause, self.what


Hypothesis = Callable[[Any], Iterable[Claim]]
HYPOTHESES: dict[str, list[Hypothesis]] = {}
"""By what they explain: "gradient", "norm", "clipped", "tensor" (weights, activations and buffers), "weights" and "activation"."""

_F = TypeVar("_F", bound=Hypothesis)


def hypothesis(kind: str) -> Callable[[_F], _F]:
    """Enter a function into the table; earlier ones win where two explain the same."""

    def enter(function: _F) -> _F:
        HYPOTHESES.setdefault(kind, []).append(function)
        return function

    return enter


def claims(kind: str, case: Any) -> list[Claim]:
    """What the hypotheses of this kind say of a case: those whose residual is within the tolerance, and near the best."""
    found = [
        Claim(**{**vars(claim), "rank": claim.rank or at})
        for at, function in enumerate(HYPOTHESES.get(kind, ()), 1)
        for claim in function(case)
        if claim.residual <= 1
    ]
    best = min((claim.residual for claim in found), default=0.0)
    return [claim for claim in found if claim.residual <= max(0.3, 3 * best)]


# --------------------------------------------------------------------------------------------------
# The causes that a finding can name.
# --------------------------------------------------------------------------------------------------


CAUSES: Mapping[str, str] = {
    "not-finite": "NaN or infinity, with the first place and the ranks",
    "weights-differ-at-start": "the ranks do not start with the weights of one model",
    "masks-differ": "ranks that hold the same activation drop other elements of it",
    "forward-differs": "an activation parts from one process, with the first module",
    "loss-differs": "the activations agree and the loss that is reported does not",
    "recomputation-differs": "a module that runs again in the backward pass gives something else than the first time",
    "summed-not-averaged": "a sum that is owed a divisor has none, or a sum of what is the same on every rank",
    "averaged-not-summed": "a mean where a sum is owed",
    "reduced-twice": "a sum of what is a sum already",
    "wrong-divisor": "divided by another number than that of the ranks that saw distinct data",
    "scaled-by-accumulation": "off by the number of micro-batches",
    "scaled-by-mode": "off by the size of a mode before any reduction: in the loss, or in a layer's backward pass",
    "loss-scale-left": "a loss scale that nobody took out",
    "not-reduced": "this rank's own gradient, where a mean is owed",
    "reduced-over-other-mode": "summed over other ranks than owed",
    "partial-gradient": "a part of a sum over ranks that see the same data",
    "tied-copy-missed": "the gradient of one copy of a tied weight",
    "wrong-operation": "the largest, the smallest or the product of the ranks' gradients, where a sum is owed",
    "gradients-exchanged": "the numbers of another parameter, or of other elements: a flat buffer read at another place",
    "weights-in-gradient": "some of the weight was added to the gradient",
    "rounded": "the right numbers, rounded to a narrower dtype on the way",
    "backward-differs": "the forward pass and the reductions are right, and a backward pass between is not",
    "replicas-differ": "ranks that hold the same elements do not hold the same numbers",
    "shards-swapped": "shards on each other's ranks",
    "shards-interleaved": "the right numbers, dealt out in another order",
    "shard-transposed": "rows and columns exchanged",
    "last-micro-batch-only": "earlier micro-batches are lost",
    "micro-batch-twice": "one micro-batch counts twice",
    "micro-batch-missing": "one micro-batch is lost",
    "mean-of-means": "shares of a batch with different counts weigh the same",
    "stale-gradient": "the gradient of the step before",
    "missing-gradient": "no gradient, or zero",
    "norm-counts-replicas": "elements that several ranks hold count several times in the norm",
    "norm-misses-shards": "elements on other ranks are not in the norm",
    "norm-of-a-part": "the norm of some of the parameters, or of something before the gradient was whole",
    "norms-averaged": "norms were added or averaged instead of their powers",
    "norm-type-differs": "another p-norm",
    "clipped-before-reduced": "each rank clipped its own gradient, and the sum is of those",
    "clipped-per-stage": "each pipeline stage clipped by its own norm",
    "clipped-twice": "the coefficient was applied twice",
    "not-clipped": "larger than the limit, and left so",
    "not-updated": "the weight is as it was before the step",
    "optimizer-differs": "right gradients, wrong weights after the step",
    "buffers-differ": "a buffer (running statistics, say) is not that of one process",
    "unknown": "it differs, and none of the hypotheses fits",
}
"""The keys of findings, and what each means."""

"""Claims and the table of hypotheses: how a mistake is recognised by its numbers and gets its name.

A hypothesis is one function. It is given a case (something that differs from one process, with all that is known of it),
computes what the ranks would hold if its mistake had been made, and yields a `Claim` with the distance of that from what
they do hold. `diagnose` asks all hypotheses of a kind and reports the simplest claim within the tolerance.

How to add one:

1. Choose the file in `hypotheses/` by the subject (reductions, places, norms, ...), or make a new one there: every module
   of that folder is imported, no list is to be changed.
2. Write the function under `@hypothesis(kind)`. The kind says when it is asked, and what its case is (see `hypothesis`).
   Its docstring names the mistake and its signature in the numbers, its claim has the sentence. `GradientCase` in `case.py`
   shows what is known: raw gradients of each pass and rank, what is owed, the truth.
3. Give the claim a cause of `CAUSES`, or add one there.
4. Plant the mistake in `tests/proof/diagnosis/test_diagnose.py` and see it named, and in `tests/corpus` if it is a known bug.

One that lies outside of this package works as well, when its module is imported in the process that diagnoses: that of
rank 0 for `colonnade.verify(engine)`, that of the command for `colonnade verify config.py --model ... --import MODULE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from colonnade.proof.case import Case, ClipCase, GradientCase, NormCase


@dataclass(frozen=True)
class Claim:
    """A mistake that explains the numbers of one case, and the sentence about it: "the gradient of NAME `what`; look at `where`"."""

    cause: str
    """A key of `CAUSES`."""
    what: str
    """The predicate of the sentence, as "is multiplied by 2"."""
    where: str
    """Where to look for the mistake."""
    factor: float | None = None
    modes: tuple[str, ...] = ()
    """The modes whose line of the ledger the sentence cites."""
    residual: float = 0.0
    """The distance of the numbers from what this mistake gives, in units of the tolerance."""
    rank: int = 0
    """Lower wins among claims that explain as many parameters: the simpler and more usual mistake. 0: its place in the table."""
    doubt: int = 0
    """What else speaks against it: healthy parameters that would share the mistake. Counts after `rank`."""

    @property
    def key(self) -> tuple[str, str]:
        """Claims of several parameters with one key are one finding."""
        return self.cause, self.what


# --- The table ---

HYPOTHESES: dict[str, list[Callable[[Any], Iterable[Claim]]]] = {}
"""By kind, in the order in which they were entered. Of two that explain the same numbers the earlier one wins."""

_OnGradient = TypeVar("_OnGradient", bound=Callable[[GradientCase], Iterable[Claim]])
_OnTensor = TypeVar("_OnTensor", bound=Callable[[Case], Iterable[Claim]])
_OnNorm = TypeVar("_OnNorm", bound=Callable[[NormCase], Iterable[Claim]])
_OnClipped = TypeVar("_OnClipped", bound=Callable[[ClipCase], Iterable[Claim]])
_Function = TypeVar("_Function", bound=Callable[..., Iterable[Claim]])


@overload
def hypothesis(kind: Literal["gradient"]) -> Callable[[_OnGradient], _OnGradient]: ...
@overload
def hypothesis(kind: Literal["tensor", "weights", "activation"]) -> Callable[[_OnTensor], _OnTensor]: ...
@overload
def hypothesis(kind: Literal["norm"]) -> Callable[[_OnNorm], _OnNorm]: ...
@overload
def hypothesis(kind: Literal["clipped"]) -> Callable[[_OnClipped], _OnClipped]: ...
def hypothesis(kind: str) -> Callable[[_Function], _Function]:
    """Enter a function into the table. How to write one: the docstring of this module.

    | kind | asked when | case |
    |---|---|---|
    | "gradient" | a gradient differs, after the handlers and before clipping | `GradientCase` |
    | "tensor" | any other tensor differs: weights, activations, buffers | `Case` |
    | "weights" | weights differ after the step though gradients are right | `Case`, with the weight before the step |
    | "activation" | the output of a module differs | `Case` |
    | "norm" | the norm differs though gradients are right | `NormCase` |
    | "clipped" | clipped gradients differ though gradients and norm are right | `ClipCase` |
    """

    def enter(function: _Function) -> _Function:
        HYPOTHESES.setdefault(kind, []).append(function)
        return function

    return enter


def claims(kind: str, case: Case | NormCase | ClipCase) -> list[Claim]:
    """The claims of all hypotheses of a kind: those whose residual is within the tolerance, and near the best one's."""
    found = [
        Claim(**{**vars(claim), "rank": claim.rank or at})
        for at, function in enumerate(HYPOTHESES.get(kind, ()), 1)
        for claim in function(case)
        if claim.residual <= 1
    ]
    # A claim that is right leaves rounding alone. One that only happens to be within the tolerance leaves several times as much.
    best = min((claim.residual for claim in found), default=0.0)
    return [claim for claim in found if claim.residual <= max(0.3, 3 * best)]


# --- Claims that several hypotheses make ---


def sum_not_made(case: GradientCase, missing: Sequence[str], what: str) -> Claim:
    """The claim that a sum over these modes is owed and not made: its cause depends on what kind of sum it is."""
    over = " and ".join(missing)
    if any(case.owed.get(mode, 1.0) > 1 for mode in missing):
        return Claim("not-reduced", what, f"who sums it over {over}", modes=tuple(missing))
    if case.info.tied or any("PIPELINE" in mode.upper() for mode in missing):
        what = f"has the part of one of its copies only: tied weights are not summed over {over}"
        where = "the handler of tied weights, and how the copies are declared tied"
        return Claim("tied-copy-missed", what, where, modes=tuple(missing))
    what = f"is partial: each rank of {over} has a part of the sum and nobody adds them"
    where = f"whether its placement says that a sum over {over} is owed"
    return Claim("partial-gradient", what, where, modes=tuple(missing))


# --- Causes ---

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

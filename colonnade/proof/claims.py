"""Claims and the table of hypotheses: how a mistake is recognized by its numbers and gets its name.

A hypothesis is one function. It gets a case (a value that differs from the reference, with everything known about it),
computes the values that the ranks would have if its mistake had been made, and yields a `Claim` with the distance between
those and the actual values. `diagnose` calls all hypotheses of a kind and reports the simplest claim within the tolerance.

How to add a hypothesis:

1. Choose the file in `hypotheses/` by subject (reductions, places, norms, ...), or make a new one there: every module of
   that folder is imported automatically.
2. Write the function under `@hypothesis(kind)`. The kind decides when it is called, and with which case (see `hypothesis`).
   Its docstring names the mistake and its signature in the numbers; its claim has the sentence for the report. See
   `GradientCase` in `case.py` for the known facts: local gradients of each pass and rank, required reductions, the truth.
3. Give the claim a cause of `CAUSES`, or add one there.
4. Plant the mistake in `tests/proof/diagnosis/test_diagnose.py` and check that it is named; also in `tests/corpus` if it is
   a known bug.

A hypothesis outside of this package works as well, if its module is imported in the process that diagnoses: that of rank 0
for `colonnade.verify(engine)`, that of the command for `colonnade verify config.py --model ... --import MODULE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from colonnade.proof.case import Case, ClipCase, GradientCase, NormCase


@dataclass(frozen=True)
class Claim:
    """A mistake that explains the numbers of one case.

    The report prints the claim as "the gradient of NAME `what`; look at `where`".
    """

    cause: str
    """A key of `CAUSES`."""
    what: str
    """The predicate of the sentence, such as "is multiplied by 2"."""
    where: str
    """The place to look for the mistake, as a noun."""
    factor: float | None = None
    modes: tuple[str, ...] = ()
    """The modes whose ledger row the sentence quotes."""
    residual: float = 0.0
    """The distance between the numbers and those that this mistake gives, in units of the tolerance."""
    rank: int = 0
    """Of claims that explain as many parameters, the lowest rank wins: the simpler, more usual mistake. 0: table order."""
    doubt: int = 0
    """Evidence against the claim, such as healthy parameters that would share the mistake. Compared after `rank`."""

    is_upstream: bool = False
    """The mistake may be in any backward pass between the loss and the parameter, so the sentence names the last parameter."""
    is_local: bool = False
    """The mistake is no part of a reduction, so the sentence quotes no ledger row."""

    @property
    def key(self) -> tuple[str, str]:
        """The key that groups claims: claims with equal keys on several parameters become one finding."""
        return self.cause, self.what


# --- The table ---

HYPOTHESES: dict[str, list[Callable[[Any], Iterable[Claim]]]] = {}
"""The hypotheses by kind, in the order of registration.

If two explain the same numbers equally well, the earlier one wins.
"""

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
    """Register a hypothesis. The docstring of this module describes how to write one.

    | kind | called if | case |
    |---|---|---|
    | "gradient" | a gradient differs, after the handlers and before clipping | `GradientCase` |
    | "tensor" | any other tensor differs: weights, activations, buffers | `Case` |
    | "weights" | weights differ after the step although gradients are right | `Case`, with the weight before the step |
    | "activation" | the output of a module differs | `Case` |
    | "norm" | the norm differs although gradients are right | `NormCase` |
    | "clipped" | clipped gradients differ although gradients and norm are right | `ClipCase` |
    """

    def enter(function: _Function) -> _Function:
        HYPOTHESES.setdefault(kind, []).append(function)
        return function

    return enter


def claims(kind: str, case: Case | NormCase | ClipCase) -> list[Claim]:
    """Run all hypotheses of a kind and return their best claims.

    A claim is left out if its residual exceeds the tolerance, or is several times the best residual.
    """
    found = [
        Claim(**{**vars(claim), "rank": claim.rank or at})
        for at, function in enumerate(HYPOTHESES.get(kind, ()), 1)
        for claim in function(case)
        if claim.residual <= 1
    ]
    # The right claim leaves only rounding. A claim that is within the tolerance by chance leaves several times as much.
    best = min((claim.residual for claim in found), default=0.0)
    return [claim for claim in found if claim.residual <= max(0.3, 3 * best)]


# --- Claims that several hypotheses make ---


def sum_not_made(case: GradientCase, missing: Sequence[str], what: str) -> Claim:
    """Return the claim that the required reduction over these modes is missing.

    Its cause depends on the kind of reduction.
    """
    over = " and ".join(missing)
    if any(case.required.get(mode, 1.0) > 1 for mode in missing):
        where = f"the handler that sums it over {over}"
        if not case.info.ledger:
            where = f"the code that sums it over {over}, and whether the step waits for that (wait() of async_op=True)"
        return Claim("not-reduced", what, where, modes=tuple(missing))
    if case.info.tied or any("PIPELINE" in mode.upper() for mode in missing):
        what = f"is that of only one of its copies: tied weights are not summed over {over}"
        where = "the handler of tied weights, and the declaration of the copies as tied"
        return Claim("tied-copy-missed", what, where, modes=tuple(missing))
    what = f"is partial: each rank of {over} has one term of the sum, and nothing adds them"
    where = f"its placement, which should declare a sum over {over}"
    return Claim("partial-gradient", what, where, modes=tuple(missing))


# --- Causes ---

CAUSES: Mapping[str, str] = {
    "not-finite": "NaN or infinity, with the first value and its ranks",
    "weights-differ-at-start": "the ranks do not start with the weights of one model",
    "changed-between-steps": "weights, buffers or optimizer state were changed outside of the step, on some ranks",
    "rows-differ": "the ranks together ran on more or fewer rows of the batch than a single process",
    "masks-differ": "ranks with the same activation draw different random numbers for it, such as a dropout mask",
    "forward-differs": "an activation differs from the reference, with the first module",
    "loss-differs": "the activations agree, but the reported loss does not",
    "recomputation-differs": "the output of a module changes when it is recomputed in the backward pass",
    "summed-not-averaged": "a sum without its divisor, or a sum of values that are already equal on every rank",
    "averaged-not-summed": "a mean where a sum is required",
    "reduced-twice": "a sum of values that are summed already",
    "wrong-divisor": "not divided by the number of ranks that saw distinct data",
    "scaled-by-accumulation": "off by the number of micro-batches",
    "scaled-by-mode": "off by the size of a mode before any reduction: in the loss, or in a layer's backward pass",
    "loss-scale-left": "a loss scale that is not divided out",
    "not-reduced": "the local gradient, where a mean is required",
    "reduced-over-other-mode": "summed over wrong ranks",
    "partial-gradient": "one term of a sum over ranks that see the same data",
    "tied-copy-missed": "the gradient of only one copy of a tied weight",
    "wrong-operation": "the maximum, minimum or product of the ranks' gradients, where a sum is required",
    "gradients-exchanged": "the gradient of another parameter, or of other elements: a flat buffer read at a wrong offset",
    "weights-in-gradient": "a multiple of the weight is added to the gradient",
    "rounded": "the right numbers, rounded to a narrower dtype",
    "backward-differs": "the forward pass and the reductions are right, but a backward pass is not",
    "replicas-differ": "ranks that store the same elements have different values",
    "shards-swapped": "shards on each other's ranks",
    "shards-interleaved": "the right numbers in the wrong order",
    "shard-transposed": "rows and columns exchanged",
    "last-micro-batch-only": "earlier micro-batches are lost",
    "micro-batch-twice": "one micro-batch counts twice",
    "micro-batch-missing": "one micro-batch is lost",
    "mean-of-means": "batches with different token counts have equal weights",
    "own-decision": "each rank decides something, or takes statistics, from its own batch instead of the global batch",
    "stale-gradient": "the gradient of the previous step",
    "missing-gradient": "no gradient, or zero",
    "norm-counts-replicas": "elements that several ranks store count several times in the norm",
    "norm-misses-shards": "elements on other ranks are missing from the norm",
    "norm-of-a-part": "the norm of some of the parameters, or of gradients before the reduction",
    "norms-averaged": "norms were added or averaged instead of their powers",
    "norm-type-differs": "a wrong p-norm",
    "clipped-before-reduced": "each rank clipped its local gradient before the reduction",
    "clipped-per-stage": "each pipeline stage clipped by its own norm",
    "clipped-twice": "the clip coefficient was applied twice",
    "not-clipped": "larger than the limit, but not clipped",
    "not-updated": "the step did not change the weight",
    "optimizer-differs": "right gradients, wrong weights after the step",
    "buffers-differ": "a buffer (such as running statistics) differs from the reference",
    "unknown": "it differs, and no hypothesis explains it",
}
"""The causes of findings, with their meanings."""

"""How far a parallel run may be from one process by rounding alone. Derived, never guessed for a model.

    tolerance = 8 * (spread + |truth| * (u * sqrt(additions) + v * sqrt(terms)))

in the 2-norm of the whole tensor, where

- `spread` is how far the reference itself moves when its weights are changed by one ulp with random signs: what the
  model makes of rounding errors, layer by layer. A healthy parallel run adds its terms in another order, which is a
  change of that size and no larger. A tensor's own spread comes from two or three runs only, so a lucky small one is
  raised to what is usual among its like (`typical_spread`).
- `u` is the rounding error of the run's dtype (half its eps) and `additions` is how many values of that dtype are added
  one after another: one for each rank and each micro-batch. Errors of random sign grow with the root.
- `v` is the rounding error of the dtype in which products are summed inside a kernel (fp32 for half types) and `terms`
  is how many there are in an element: the tokens of the batch, for a weight's gradient.
- 8 turns a standard deviation into a bound that thousands of tensors keep: small tensors have few elements, so their
  noise does not average out.

In fp64 that is about 1e-14 of the truth: a factor of 1.001 is outside by ten orders of magnitude. In bf16 it is some
percent, so that a factor of 2 is seen there, but not one of 1.01; that is why fp64 is the default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import median

import torch
from torch import Tensor

from colonnade.verification.comparing.evidence import Compared, Evidence

_BOUND = 8.0
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Tolerance:
    """The rounding of one run: `of` gives the bound for one tensor or number."""

    dtype: torch.dtype
    additions: int = 1

    @classmethod
    def for_run(cls, evidence: Evidence) -> Tolerance:
        """With the run's dtype, and an addition for each rank and each pass."""
        return cls(getattr(torch, evidence.dtype), max(1, evidence.world_size * evidence.accumulation))

    def of(self, compared: Compared, typical: float = 0.0) -> float:
        """The bound on |found - truth|, 2-norm. `typical` is `typical_spread` of the quantity. Whole numbers: 0."""
        if not compared.truth.is_floating_point():
            return 0.0
        return self.of_size(length(compared.truth), compared.spread, compared.terms, typical)

    def of_size(self, size: float, spread: float = 0.0, terms: int = 1, typical: float = 0.0) -> float:
        """The bound for a tensor (or a number) of this length."""
        summed_in = _SUMMED_IN.get(self.dtype, self.dtype)
        relative = _rounding(self.dtype) * sqrt(self.additions) + _rounding(summed_in) * sqrt(max(terms, 1))
        return _BOUND * (max(spread, typical * size) + size * relative)


def typical_spread(some: Iterable[Compared]) -> float:
    """The median of spread / length: what rounding usually does to a tensor of this kind."""
    shares = [one.spread / size for one in some if one.truth.is_floating_point() and (size := length(one.truth)) > 0]
    return median(shares) if shares else 0.0


def length(tensor: Tensor) -> float:
    """The 2-norm, in double."""
    return float(tensor.detach().double().norm())


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2

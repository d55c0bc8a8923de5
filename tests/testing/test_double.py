"""Casts to float32 that stay in float64; whole models beside ones written in fp64 are in tests/models/test_transformers.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.testing import in_double

X = torch.randn(4, 8, dtype=torch.float64)

CASTS: dict[str, Callable[[], Tensor]] = {
    "to": lambda: X.to(torch.float32),
    "to, by keyword": lambda: X.to(dtype=torch.float),
    "to a device": lambda: X.to("cpu", torch.float32),
    "float": lambda: X.float(),
    "type": lambda: X.type(torch.float32),
    "softmax": lambda: F.softmax(X, dim=-1, dtype=torch.float32),
    "sum": lambda: X.sum(-1, dtype=torch.float32),
    "integers": lambda: torch.arange(3).float(),
    "arange": lambda: torch.arange(0, 8, 2, dtype=torch.int64).to(dtype=torch.float),
    "zeros": lambda: torch.zeros(2, dtype=torch.float32),
    "full": lambda: torch.full((2,), torch.finfo(torch.float32).min, dtype=torch.float32),
    "zeros_like": lambda: torch.zeros_like(X, dtype=torch.float32),
    "new": lambda: X.new_zeros(2, dtype=torch.float32),
    "tensor": lambda: torch.tensor(0.5),
    "without autocast": lambda: _without_autocast(),
}


def _without_autocast() -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return X.float() @ X.float().t()


@pytest.mark.parametrize("cast", CASTS.values(), ids=list(CASTS))
def test_float32_becomes_float64_inside_alone(cast: Callable[[], Tensor]) -> None:
    with in_double():
        assert cast().dtype == torch.float64
    assert cast().dtype == torch.float32


def test_what_is_in_float32_or_below_and_what_reads_bits_is_left_alone() -> None:
    narrow = torch.ones(2)
    with in_double():
        assert narrow.float().dtype == narrow.to(torch.float32).dtype == torch.float32
        assert narrow.bfloat16().float().dtype == torch.float32
        assert X.view(torch.float32).shape == (4, 16)
        assert X.bfloat16().dtype == torch.bfloat16


def test_the_default_dtype_comes_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), in_double():
        torch.ones(int(torch.get_default_dtype() == torch.float64) // 0)
    assert torch.get_default_dtype() == torch.float32


def test_a_norm_that_casts_is_exact_backward_too() -> None:
    def norm(x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def exact(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def apart() -> float:
        found, truth = X.clone().requires_grad_(), X.clone().requires_grad_()
        (norm(found) ** 3).sum().backward()
        (exact(truth) ** 3).sum().backward()
        assert found.grad is not None
        assert truth.grad is not None
        return float((found.grad - truth.grad).norm() / truth.grad.norm())

    assert apart() > 1e-9
    with in_double():
        assert apart() < 1e-14

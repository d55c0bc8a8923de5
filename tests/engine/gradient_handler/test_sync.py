"""One process: the factor on gradients that no bucket holds."""

from __future__ import annotations

import pytest
import torch

from colonnade.engine.gradient_handler.sync import _multiply


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)], ids=str)
def test_every_kind_of_gradient_is_multiplied(factor):
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
    grads = [torch.full((3,), 6.0, dtype=dtype) for dtype in kinds]
    sparse = torch.sparse_coo_tensor([[0, 2]], [4.0, 8.0], (3,))
    _multiply([*grads, sparse], factor)
    for grad, dtype in zip(grads, kinds, strict=True):
        assert torch.equal(grad, torch.full((3,), 3.0, dtype=dtype))
    assert sparse.to_dense().tolist() == [2.0, 0.0, 4.0]


def test_a_factor_is_not_rounded_before_it_is_used():
    grads = [torch.ones(1, dtype=torch.float64), torch.ones(1)]
    _multiply(grads, torch.tensor(1 / 3, dtype=torch.float64))
    assert grads[0].item() == 1 / 3
    assert grads[1].item() == torch.tensor(1 / 3).item()

"""Value clip, and adaptive clip of units, whole and sharded, against one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.errors import ConfigError, GradientError
from colonnade.optim.clip import UnitBlock, clip_units_, clip_values_
from colonnade.testing import run_world


def test_values() -> None:
    grads = [torch.tensor([-3.0, 0.5, 7.0]), torch.empty(0), torch.tensor([[1.0], [-1.5]], dtype=torch.float64)]
    clip_values_((grad for grad in grads), 1.0)
    assert grads[0].tolist() == [-1.0, 0.5, 1.0]
    assert grads[2].tolist() == [[1.0], [-1.0]]
    clip_values_([], 1.0)
    with pytest.raises(ConfigError, match="limit of a value clip"):
        clip_values_(grads, 0)
    with pytest.raises(GradientError, match="does not support complex gradients"):
        clip_values_([torch.zeros(1), torch.zeros(1, dtype=torch.complex64)], 1.0)
    for option in ("factor", "eps"):
        with pytest.raises(ConfigError, match=f"{option} .*unit clip|{option} of a unit clip"):
            clip_units_([], **{option: 0.0})


def plainly(param: Tensor, grad: Tensor, factor: float, eps: float) -> Tensor:
    """Row by row, in fp64."""
    rows = (param, grad) if param.dim() > 1 else (param.reshape(1, -1), grad.reshape(1, -1))
    clipped = []
    for weight, value in zip(*(tensor.double() for tensor in rows), strict=True):
        limit = factor * max(float(weight.norm()), eps)
        clipped.append(value * min(1.0, limit / max(float(value.norm()), 1e-6)))
    return torch.stack(clipped).reshape(grad.shape)


def drawn(*shape: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=source), 0.05 * torch.randn(shape, generator=source)


def test_units_of_complex_tensors_are_measured_by_their_moduli() -> None:
    param, grad = (torch.view_as_complex(tensor) for tensor in drawn(4, 6, 2))
    flat = [torch.view_as_real(tensor.clone()).flatten(1) for tensor in (param, grad)]
    clip_units_([UnitBlock(param, grad)], factor=0.04)
    wanted = plainly(flat[0], flat[1], 0.04, 1e-3)
    torch.testing.assert_close(torch.view_as_real(grad).flatten(1).double(), wanted, rtol=1e-6, atol=1e-8)


def test_units_of_doubles_keep_their_digits() -> None:
    param, grad = (tensor.double() / 3 for tensor in drawn(4, 6))
    wanted = plainly(param, grad, 0.04, 1e-3)
    clip_units_([UnitBlock(param, grad)], factor=0.04)
    torch.testing.assert_close(grad, wanted, rtol=1e-13, atol=0)


def test_a_unit_that_is_not_a_number_leaves_the_others_alone() -> None:
    param, grad = torch.ones(2, 3), torch.tensor([[math.nan, 1.0, 1.0], [0.1, 0.1, 0.1]])
    clip_units_([UnitBlock(param, grad)], factor=0.1)
    assert grad[0, 1:].tolist() == [1.0, 1.0]
    torch.testing.assert_close(grad[1], torch.full((3,), 0.1))  # as large as allowed


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_not_a_number_leaves_its_gradient_alone(weight: float) -> None:
    grad = torch.ones(2, 3)
    clip_units_([UnitBlock(torch.tensor([[weight, 1.0, 1.0], [1.0, 1.0, 1.0]]), grad)], factor=0.1)
    torch.testing.assert_close(grad, torch.tensor([[1.0] * 3, [0.1] * 3]))


@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (3, 2, 5), (0, 4), (4, 0), (0,)])
def test_units_of_whole_tensors(shape: tuple[int, ...]) -> None:
    param, grad = drawn(*shape)
    wanted = plainly(param, grad, 0.04, 1e-3) if grad.numel() else grad.double()
    clip_units_([UnitBlock(param, grad)], factor=0.04)
    torch.testing.assert_close(grad.double(), wanted, rtol=1e-6, atol=1e-8)


def test_a_unit_of_zero_weight_may_still_learn() -> None:
    param, grad = torch.zeros(2, 3), torch.ones(2, 3)
    clip_units_([UnitBlock(param, grad)], factor=0.1, eps=1e-3)
    torch.testing.assert_close(grad.norm(dim=1), torch.full((2,), 1e-4), rtol=1e-5, atol=0)


def world_units() -> list[Tensor]:
    """Columns of a matrix and parts of a vector sharded, rows of another matrix sharded."""
    rank, group = dist.get_rank(), dist.group.WORLD
    cut = [slice(0, 5), slice(5, 6)][rank]
    columns, vector, rows = drawn(4, 6), drawn(6), drawn(6, 3)
    blocks = [
        UnitBlock(columns[0][:, cut], columns[1][:, cut].clone(), group),
        UnitBlock(vector[0][cut], vector[1][cut].clone(), group),
        UnitBlock(rows[0][cut], rows[1][cut].clone()),
    ]
    clip_units_(blocks, factor=0.04)
    for block, full, piece in zip(blocks, (columns, vector, rows), ((slice(None), cut), (cut,), (cut,)), strict=True):
        wanted = plainly(*full, 0.04, 1e-3)[piece]
        torch.testing.assert_close(block.grad.double(), wanted, rtol=1e-6, atol=1e-8)
    return [block.grad for block in blocks]


def test_units_of_sharded_tensors() -> None:
    run_world(2, world_units)

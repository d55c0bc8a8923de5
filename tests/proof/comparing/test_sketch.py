"""Sketches: their length is that of the tensor, whatever differs, and they are linear."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from colonnade.proof.sketch import LARGE, Block, are_whole, sketch, store

ROWS, COLUMNS = 1000, 517


def of_kind(kind: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    normal = torch.randn(ROWS, COLUMNS, generator=draw, dtype=torch.float64)
    return {
        "normal": normal,
        "constant": torch.ones_like(normal),
        "alternating": torch.arange(normal.numel()).remainder(2).double().view_as(normal) * 2 - 1,
        "equal rows": normal[:1].expand_as(normal),
        "rising": torch.arange(normal.numel()).double().view_as(normal),
        "one element": (torch.arange(normal.numel()).view_as(normal) == 300_000).double(),
        "last rows": normal * (torch.arange(ROWS) >= ROWS - 2)[:, None],
        "transposed": normal.t(),
        "float32": normal.float(),
    }[kind]


KINDS = (
    "normal",
    "constant",
    "alternating",
    "equal rows",
    "rising",
    "one element",
    "last rows",
    "transposed",
    "float32",
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_length_is_that_of_the_tensor(kind: str) -> None:
    tensor = of_kind(kind)
    assert tensor.numel() > LARGE
    assert float(sketch(tensor).norm()) == pytest.approx(float(tensor.double().norm()), rel=0.05)


def test_sums_factors_and_differences_are_those_of_the_tensors() -> None:
    a, b = of_kind("normal"), of_kind("rising")
    torch.testing.assert_close(sketch(2 * a - b), 2 * sketch(a) - sketch(b))
    assert torch.equal(sketch(a), sketch(a.clone()))
    # Elements at other places are another tensor.
    assert float((sketch(a) - sketch(a.flip(0))).norm()) == pytest.approx(float((a - a.flip(0)).norm()), rel=0.05)


def test_blocks_are_rows_columns_and_boxes_of_a_tensor() -> None:
    places = torch.arange(6 * 8 * 5).view(6, 8, 5)
    shards = [places[2:4], places[:, 4:], places[:, :, 1:2], places[1:3, 2:4, 3:], places[:0], places.flatten()[7:50]]
    for shard in shards:
        block = Block.at(shard)
        assert block is not None
        assert torch.equal(block.of(places.double()).long(), shard)
    assert Block.at(places[:, [0, 1, 3]]) is None  # heads of three ranks, say
    assert are_whole([Block.at(places[:, :4]), Block.at(places[:, 4:])], places.numel())
    assert not are_whole([Block.at(places[:, :4]), Block.at(places[:, 5:])], places.numel())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_stays_visible(value: float) -> None:
    tensor = of_kind("normal")
    tensor[3, 4] = value
    assert not sketch(tensor).isfinite().all()


def test_replicas_are_stored_once(tmp_path: Path) -> None:
    tensor = of_kind("transposed")
    first, second = (store("weight", tensor.clone(), tmp_path) for _ in range(2))
    assert first == second
    assert torch.equal(first.tensor(), tensor)
    other = store("weight", tensor + 1e-12, tmp_path)
    assert torch.equal(other.tensor(), tensor + 1e-12)
    assert len(list(tmp_path.iterdir())) == 2

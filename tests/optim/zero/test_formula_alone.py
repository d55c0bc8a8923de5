"""The arithmetic of the stages, by hand, and which modules stage 3 gathers one by one."""

from __future__ import annotations

import pytest
from torch import nn

from colonnade.errors import ConfigError
from colonnade.optim.zero.formula import HeldBytes, bytes_held, bytes_moved
from colonnade.optim.zero.fsdp import chosen_modules


@pytest.mark.parametrize(
    ("stage", "more", "held"),
    [
        (0, {}, HeldBytes(400, 400, 800, 0)),
        (1, {}, HeldBytes(400, 400, 200, 0)),
        (2, {"largest": 10}, HeldBytes(400, 100, 200, 80)),
        (3, {"largest": 10}, HeldBytes(100, 100, 200, 0)),
        (0, {"width": 2, "master": 4}, HeldBytes(200, 200, 1200, 0)),
        (1, {"width": 2, "master": 4, "largest": 10}, HeldBytes(200, 300, 300, 0)),
        (2, {"width": 2, "master": 4, "largest": 10}, HeldBytes(200, 100, 300, 40)),
        (2, {"width": 2, "state": 1}, HeldBytes(200, 50, 25, 0)),
    ],
)
def test_bytes_of_a_hundred_elements_on_four_ranks(stage, more, held):
    found = bytes_held(stage, 100, 4, **more)
    assert found == held
    assert found.total == held.parameters + held.gradients + held.state + held.turns


@pytest.mark.parametrize(
    ("stage", "passes", "moved"), [(0, 3, 600), (1, 3, 600), (2, 1, 600), (2, 3, 1200), (3, 3, 2700)]
)
def test_bytes_moved(stage, passes, moved):
    assert bytes_moved(stage, 100, 4, passes=passes) == moved
    assert bytes_moved(stage, 100, 4, passes=passes, width=2) == moved / 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 1), nn.ReLU())


def names_of(root: nn.Module, chosen: list[nn.Module]) -> list[str]:
    names = {module: name for name, module in root.named_modules()}
    return [names[module] for module in chosen]


def test_members_of_the_outermost_containers_are_chosen():
    root = nn.ModuleDict(
        {
            "blocks": nn.ModuleList([Block(), Block(), nn.ReLU()]),
            "heads": nn.ModuleDict({"a": nn.Linear(1, 1)}),
            "body": nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)),
        }
    )
    assert names_of(root, chosen_modules(root, [])) == ["blocks.0", "blocks.1", "heads.a", "body"]
    alike = nn.Sequential(nn.Linear(1, 1), nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.ReLU()))
    assert names_of(alike, chosen_modules(alike, [])) == ["0", "1.0", "1.1", "2"]
    plain = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Sequential(nn.ReLU()))
    assert names_of(plain, chosen_modules(plain, [])) == ["0"]
    mixed = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Sequential()))
    assert names_of(mixed, chosen_modules(mixed, [])) == ["0"]


def test_named_modules_are_chosen_inner_ones_first():
    root = nn.Sequential(Block(), Block())
    assert names_of(root, chosen_modules(root, ["Block", "*.inner"])) == ["1.inner", "1", "0.inner", "0"]
    assert names_of(root, chosen_modules(root, ["0"])) == ["0"]
    for wrong, said in (
        ("Blok", "the pattern 'Blok' in zero.wrap matches no module name and no class."),
        ("0.iner", "Did you mean '0.inner'"),
    ):
        with pytest.raises(ConfigError) as error:
            chosen_modules(root, ["Block", wrong])
        assert said in str(error.value)

"""What a forward pass gathers is given back, and how a collective is described when ranks part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from colonnade.optim.zero import fsdp_checks
from colonnade.optim.zero.fsdp_checks import Event

A, B, C = Event("gathers a"), Event("gathers b"), Event("gathers c")


class Root(torch.nn.Linear):
    """As FSDP2's modules, which say what they gather and give back."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.did: list[str] = []
        self.fails = ""

    def unshard(self) -> None:
        self.did.append("inference" if torch.is_inference_mode_enabled() else "gather")

    def reshard(self) -> None:
        self.did.append("give back")

    def reset_iter_state(self) -> None:
        self.did.append("forget")

    def forward(self, x: Tensor) -> Tensor:
        self.did.append("run")
        if self.fails:
            raise RuntimeError(self.fails)
        return super().forward(x)


def test_nothing_stays_gathered_that_no_backward_pass_gives_back():
    root, x = Root(), torch.ones(1, 2)
    gathers = root.register_forward_pre_hook(lambda *_: root.did.append("FSDP2 gathers"))
    guard = fsdp_checks.ForwardGuard(root, [root])
    guard.give_back()
    assert root.did == []  # nothing has run
    with torch.inference_mode():
        root(x)
        root(x)
    assert root.did == ["gather", "give back", *["FSDP2 gathers", "run", "forget", "give back"] * 2]
    gathers.remove()
    root.did.clear()
    root(x)
    assert root.did == ["run"]  # a backward pass may follow
    with torch.no_grad():
        root(x)
    guard.give_back()
    assert root.did == ["run", "run", *["forget", "give back"] * 2]
    for fails, notes in (("a mistake", 0), ("got a DTensor", 1)):
        root.did.clear()
        root.fails = fails
        with pytest.raises(RuntimeError) as error:
            root(x)
        assert root.did == ["run", "forget", "give back"]
        assert len(getattr(error.value, "__notes__", [])) == notes
    root.fails = ""
    root.did.clear()
    root(x)
    assert root.did == ["run"]
    fresh = Root()
    fsdp_checks.ForwardGuard(fresh, [fresh])
    fresh(x)
    assert fresh.did == ["run"]  # the first pass makes what it gathers into


def test_what_has_a_gradient_is_said_only_where_it_is_not_all():
    names = ("x", "y", "z")
    assert str(Event("reduces a", 0b101, names)) == "reduces a, of these x, z"
    assert str(Event("reduces a", 0b111, names)) == "reduces a"
    assert str(Event("reduces a", 0, names)) == "reduces a"
    assert Event("reduces a", 1, names).code != Event("reduces a", 2, names).code
    assert Event("reduces a", 1, names) == Event("reduces a", 1)


def test_a_gathered_parameter_tells_once_that_it_has_a_gradient():
    layer = torch.nn.Linear(2, 2)
    member = fsdp_checks.Member("weight", layer, layer.weight, layer.weight)
    noted: list[object] = []
    for _ in range(2):  # in forward, and again in backward
        assert member.gathered(noted.append) is layer.weight
    layer(torch.ones(1, 2)).sum().backward()
    assert len(noted) == 1
    layer.weight.requires_grad_(False)
    assert member.gathered(noted.append) is layer.weight

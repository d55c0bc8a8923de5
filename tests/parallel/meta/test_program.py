"""Element-wise initialisation: the steps that are found of a tensor, and that what they make is what torch makes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from colonnade.parallel.meta import (
    InitRecording,
    Strided,
    elementwise_init_of,
    initial_value_of,
    keep_initial_value,
    memory_of,
    meta_init,
    parameter_inits,
)


def with_part(change: Callable[[Tensor], object]) -> Tensor:
    """Zeros, some of which were changed."""
    whole = torch.zeros(4, 6)
    change(whole)
    return whole


def twos() -> Tensor:
    return with_part(lambda whole: whole[1:3].fill_(2))


def again(numbers: Tensor) -> Tensor:
    return torch.cat([numbers, numbers])


NORMAL = "normal(0.0, 1.0)"
STEPS: dict[str, tuple[Callable[[], Tensor], str | None]] = {
    "uniform": (lambda: torch.empty(3, 4).uniform_(-2, 3), "uniform(-2.0, 3.0)"),
    "uniform from": (lambda: torch.empty(3).uniform_(-2), "uniform(-2.0, 1.0)"),
    "normal": (lambda: torch.empty(4).normal_(), NORMAL),
    "normal with a generator": (lambda: torch.empty(4).normal_(generator=torch.Generator("cpu")), NORMAL),
    "normal with a mean": (lambda: torch.empty(4).normal_(mean=3), "normal(3.0, 1.0)"),
    "normal with a width": (lambda: torch.empty(4).normal_(std=0.5), "normal(0.0, 0.5)"),
    "randn": (lambda: torch.randn(4), NORMAL),
    "rand": (lambda: torch.rand(4), "uniform(0.0, 1.0)"),
    "rand_like": (lambda: torch.rand_like(torch.ones(3)), "uniform(0.0, 1.0)"),
    "complex": (lambda: torch.randn(4, dtype=torch.complex64), None),
    "exponential": (lambda: torch.empty(4).exponential_(), None),
    "full": (lambda: torch.full((2, 3), 7.0), "fill(7.0,)"),
    "new_full": (lambda: torch.zeros(2).new_full((3,), 2.5), "fill(2.5,)"),
    "full_like": (lambda: torch.full_like(torch.zeros(2), 4), "fill(4.0,)"),
    "fill": (lambda: torch.empty(3).fill_(2), "fill(2.0,)"),
    "fill with a tensor": (lambda: torch.empty(3).fill_(torch.rand(())), None),
    "drawn, then filled": (lambda: torch.rand(3).zero_(), "fill(0.0,)"),
    "scaled": (lambda: torch.randn(5) * 0.02, f"{NORMAL}, call('mul', 0.02)"),
    "in place": (lambda: torch.randn(5).mul_(2).add_(1, alpha=3), f"{NORMAL}, call('mul_', 2), call('add_', 1, ('alpha', 3))"),
    "of two": (lambda: torch.randn(5) * torch.randn(5), None),
    "an exponent": (lambda: 2 ** torch.rand(5), None),
    "a part": (twos, "fill(0.0,), fill(2.0,) in a part"),
    "a part of a part": (lambda: twos()[:2].clone(), "fill(0.0,), fill(2.0,) in a part, cut"),
    "a part, turned": (lambda: twos().t().contiguous(), "fill(0.0,), fill(2.0,) in a part, cut"),
    "a part, turned, and a part of that": (lambda: twos().t().contiguous()[1:].clone(), None),
    "a part, turned, and a part changed": (lambda: twos().t().contiguous()[1:].fill_(3), None),
    "a part, scaled": (lambda: with_part(lambda whole: whole[1:3].add_(2)), "fill(0.0,), call('add_', 2) in a part"),
    "turned": (lambda: torch.randn(3, 4).t().contiguous(), f"{NORMAL}, moved"),
    "turned and scaled": (lambda: torch.randn(3, 4).t() * 2, f"{NORMAL}, call('mul', 2), moved"),
    "rows": (lambda: torch.randn(3, 4)[:2].clone(), f"{NORMAL}, moved"),
    "a view": (lambda: torch.randn(3, 4)[:2], f"{NORMAL}, moved"),
    "a view of all": (lambda: torch.randn(3, 4).view(12), NORMAL),
    "expanded": (lambda: torch.randn(1, 4).expand(3, 4).clone(), None),
    "clone": (lambda: torch.rand(4).clone(), "uniform(0.0, 1.0)"),
    "whole numbers": (lambda: (torch.rand(4) * 9).long(), None),
    "wider": (lambda: torch.rand(4).double(), "uniform(0.0, 1.0)"),
    "copied into": (lambda: torch.empty(4).copy_(torch.rand(4)), "uniform(0.0, 1.0)"),
    "copied into a part": (lambda: with_part(lambda whole: whole[1].copy_(torch.rand(6))), None),
    "copied into several": (lambda: torch.empty(3, 4).copy_(torch.rand(4)), None),
    "stacked": (lambda: torch.stack([torch.randn(4) for _ in range(3)]), f"{NORMAL}, moved"),
    "stack of one": (lambda: torch.stack([torch.randn(4)]), NORMAL),
    "one after another": (lambda: torch.cat([torch.randn(4), torch.randn(2)]), f"{NORMAL}, moved"),
    "one after another, the last otherwise": (lambda: torch.cat([torch.randn(4), torch.randn(4), torch.rand(4)]), None),
    "one after another, the first otherwise": (lambda: torch.cat([torch.rand(4), torch.randn(4), torch.randn(4)]), None),
    "one after another, the first unknown": (lambda: torch.cat([torch.arange(4.0), torch.randn(4)]), None),
    "one after another, the last unknown": (lambda: torch.cat([torch.randn(4), torch.arange(4.0)]), None),
    "parts one after another": (lambda: torch.cat([twos(), twos()]), None),
    "the same twice": (lambda: again(torch.randn(4)), None),
    "counted": (lambda: torch.arange(4), None),
    "of several results": (lambda: torch.std_mean(torch.randn(4, 5), 1)[1], None),
    "nothing": (lambda: torch.empty(3), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_what_is_noted(name: str) -> None:
    build, expected = STEPS[name]
    recording = InitRecording()
    with torch.device("meta"), recording:
        tensor = build()
    steps = elementwise_init_of(recording, tensor)
    marks = () if steps is None else ("cut",) if steps.cut else ("moved",) if steps.moved else ()
    assert (None if steps is None else ", ".join([str(steps), *marks])) == expected


def columns() -> Tensor:
    """A part of a tensor of two parts, from within it."""
    whole = torch.ones(6, 5)
    whole[2:5, 1:3].fill_(3.0)
    whole[3].add_(0.5)
    return whole[1:, 2:].t().contiguous()


SURE: dict[str, Callable[[], Tensor]] = {
    "a part": twos,
    "a part of a part": lambda: twos()[2:, 1:4].clone(),
    "columns": columns,
    "columns, scaled": lambda: columns() * 2 + 1,
    "columns in a row": lambda: columns().view(-1),
    "of several results": lambda: torch.std_mean(columns(), 1)[1],
    "a part of one of several results": lambda: with_part(lambda whole: whole[0].copy_(torch.std_mean(twos(), 0)[1])),
    "what was there, changed later": lambda: (lambda one: (one.clone(), one.zero_())[0])(twos()),
    "two columns of several results": lambda: (lambda one: (one[:2].zero_(), one)[1])(torch.std_mean(columns(), 1)[1]),
}


@pytest.mark.parametrize("name", SURE)
def test_what_is_made_is_what_torch_makes_and_every_part_of_it(name: str) -> None:
    with meta_init():
        module = nn.Module()
        module.value = nn.Parameter(SURE[name]())
    (init,) = parameter_inits([module]).values()
    expected = SURE[name]()
    assert (init.elementwise is None) == ("several" in name or "row" in name)
    assert init.tensor.shape == expected.shape
    starts = [(0,) * expected.dim(), tuple(size // 2 for size in expected.shape)]
    for start, turned in product(starts, (False, True)):
        part = expected[tuple(slice(at, None) for at in start)]
        found = torch.full(part.shape[::-1], torch.nan).permute(*reversed(range(part.dim()))) if turned else part * 0
        init.fill(found, start, expected.shape, start, 5)
        torch.testing.assert_close(found, part)


@pytest.mark.parametrize(
    ("size", "offset", "stride"),
    [
        ((2, 3), 4, (3, 1)),
        ((3, 2), 1, (1, 5)),
        ((4, 2), 0, (2, 20)),
        ((2, 2, 2), 3, (9, 2, 20)),
        ((5,), 4, (3,)),
        ((1, 6), 2, (1, 1)),
        ((6, 1), 2, (1, 1)),
        ((1, 3), 5, (0, 1)),
        ((), 3, ()),
    ],
)
def test_the_places_of_a_tensor_in_its_memory(size, offset, stride) -> None:
    places = {
        offset + sum(at * step for at, step in zip(index, stride, strict=True))
        for index in product(*(range(length) for length in size))
    }
    found = Strided(size, offset, stride).holds(torch.arange(60))
    assert set(found.nonzero().flatten().tolist()) == places
    assert Strided.of(torch.zeros(100).as_strided(size, stride, offset)) == Strided(size, offset, stride)


def test_tensors_with_values_may_be_mixed_with_others() -> None:
    with meta_init():
        given, module = torch.tensor([1.0, 2.0]), nn.Module()
        assert given.add_(torch.ones(2)) is given
        module.value = nn.Parameter(torch.ones(2) * given)
        module.given = nn.Parameter(given)
        module.register_buffer("same", given)
        assert module.same is given
        module.register_buffer("none", None)
    assert given.tolist() == [2.0, 3.0]
    assert initial_value_of(module.given) is None
    found = torch.empty(2)
    parameter_inits([module])[id(module.value)].fill(found, [0], (2,), [0], 5)
    assert found.tolist() == [2.0, 3.0]


def test_a_part_that_is_made_inside_the_block_starts_as_its_whole() -> None:
    with meta_init():
        whole, module = nn.Linear(4, 4), nn.Module()
        for name in ("part", "changed"):
            part = nn.Parameter(torch.empty(2, 4))
            setattr(module, name, part)
            keep_initial_value(part, whole.weight)
        nn.init.zeros_(module.changed)
    assert memory_of(initial_value_of(module.part).tensor) == memory_of(whole.weight)
    assert memory_of(initial_value_of(module.changed).tensor) == memory_of(module.changed)
    real = nn.Parameter(torch.zeros(2))
    keep_initial_value(real, torch.zeros(4))
    assert vars(real) == {}

"""A model built without memory starts as its own code says, whoever holds which part of it."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from colonnade.errors import PlacementError
from colonnade.parallel import meta
from colonnade.parallel.meta import (
    ParameterInit,
    _truncated_normal,
    forget_initial_value,
    initial_value_of,
    is_expanded,
    keep_initial_value,
    meta_init,
    parameter_inits,
    read_inits,
    set_value_source,
    value_source_of,
)


def started(model: nn.Module, seed: int = 5) -> dict[str, Tensor]:
    """All parameters, whole."""
    inits, values = parameter_inits([model]), {}
    for name, parameter in model.named_parameters():
        values[name] = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
        if id(parameter) in inits:
            inits[id(parameter)].fill(values[name], [0] * parameter.dim(), parameter.shape, [0] * parameter.dim(), seed)
        else:
            values[name] = parameter.detach()
    return values


def block_of(init: ParameterInit, block: Tensor, shape: torch.Size, seed: int = 5) -> Tensor:
    """A block of a parameter of this shape, made alone; `block` is any view of a contiguous tensor of the shape."""
    strides = meta.row_strides(shape)
    left, at = block.storage_offset(), []
    for stride in strides:
        at.append(left // stride)
        left %= stride
    found = torch.empty(block.shape)
    init.fill(found, at, shape, at, seed)
    return found


class Everything(nn.Module):
    """What models do in their constructors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 48)
        self.table = nn.Embedding(30, 16, padding_idx=3)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(16, 4)
        self.conv = nn.Conv2d(3, 4, 3)
        self.truncated = nn.Parameter(torch.empty(100, 64))
        nn.init.trunc_normal_(self.truncated, std=0.02, a=-0.03, b=0.04)
        self.orthogonal = nn.Linear(32, 32)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.scaled = nn.Parameter(torch.randn(5000) * 0.02)
        self.ones = nn.Parameter(torch.ones(4))
        self.counted = nn.Parameter(torch.arange(4).float())
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.drawn = nn.Parameter(torch.empty(2000).exponential_())
        self.lstm = nn.LSTM(4, 4)
        self.copied = nn.Linear(64, 48)
        self.turned = nn.Parameter(self.linear.weight.detach().t().contiguous())
        with torch.no_grad():
            self.lstm.bias_ih_l0[4:8].fill_(1.0)
            self.copied.weight.copy_(self.linear.weight)
            self.conv.weight.data.normal_(0.0, 0.5)
        self.twins = nn.ModuleList([copy.deepcopy(self.linear) for _ in range(2)])
        self.stacked = nn.Parameter(torch.stack([torch.empty(16, 8).uniform_(-2, 2) for _ in range(3)]))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.register_buffer("frequencies", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]


@pytest.fixture(scope="module")
def everything() -> Everything:
    with meta_init():
        return Everything()


@pytest.fixture(scope="module")
def values(everything: Everything) -> dict[str, Tensor]:
    return started(everything)


def test_parameters_take_no_memory_and_buffers_have_their_values(everything):
    assert [name for name, parameter in everything.named_parameters() if not parameter.is_meta] == ["given"]
    torch.manual_seed(0)
    plain = Everything()
    found = dict(everything.named_buffers())
    assert {name: buffer.tolist() for name, buffer in plain.named_buffers()} == {
        k: v.tolist() for k, v in found.items()
    }
    assert everything.rates == plain.rates
    assert {name: p.shape for name, p in plain.named_parameters()} == {
        name: p.shape for name, p in everything.named_parameters()
    }


def test_every_parameter_has_the_distribution_that_torch_gives_it(values):
    torch.manual_seed(0)
    for name, plain in Everything().named_parameters():
        found, numel = values[name], plain.numel()
        spread = float(plain.detach().std()) if numel > 1 else 0.0
        assert abs(found.mean() - plain.mean()) <= 6 * spread * (2 / numel) ** 0.5, name
        assert abs(found.std() - spread) <= 6 * spread * (1 / numel) ** 0.5 + 1e-6, name
        if numel > 1000 and name not in ("scaled", "drawn"):  # the ends of a range are reached
            torch.testing.assert_close(found.max(), plain.max().detach(), rtol=0.05, atol=0.01)


def test_what_torch_sets_is_set(values):
    assert values["table.weight"][3].abs().max() == 0
    assert values["table.weight"][2:5].abs().amax(1).tolist()[0] > 0
    assert values["lstm.bias_ih_l0"][4:8].tolist() == [1.0] * 4
    assert values["lstm.bias_ih_l0"][8:].abs().max() <= 0.5
    assert values["counted"].tolist() == [0.0, 1.0, 2.0, 3.0]
    square = values["orthogonal.weight"] @ values["orthogonal.weight"].t()
    torch.testing.assert_close(square, torch.eye(32))


def test_what_was_copied_is_equal_and_what_was_drawn_apart_is_not(values):
    for name in ("copied.weight", "twins.0.weight", "twins.1.weight"):
        assert torch.equal(values[name], values["linear.weight"])
    assert torch.equal(values["turned"], values["linear.weight"].t())
    first, second, _ = values["stacked"]
    assert not torch.equal(first, second)
    assert not torch.equal(values["copied.bias"], values["linear.bias"])


class Related(nn.Module):
    """Parameters that are computed from others, or from the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        nn.init.normal_(self.linear.weight)  # drawn a second time
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 7))
        self.orthogonal = nn.Linear(7, 5)
        nn.init.orthogonal_(self.orthogonal.weight)
        numbers, others = torch.randn(4, 6), torch.rand(4, 6)
        of = {
            "turned": self.linear.weight.t().contiguous(),
            "rows": self.linear.weight[:2].clone(),
            "norm": self.linear.weight.norm(dim=1),
            "orthogonal_rows": self.orthogonal.weight[:2].clone(),
            "both": torch.cat([self.linear.weight, self.orthogonal.weight.t()]),
            "numbers": numbers.clone(),
            "numbers_turned": numbers.t().contiguous(),
            "pair": torch.cat([numbers, others]),
            "pair_again": torch.cat([numbers, others]),
            "power": 2**others,
            "others": others,
            "whole": (others * 10).long().float(),
        }
        self.of = nn.ParameterDict({name: value.detach() for name, value in of.items()})


def test_what_is_computed_from_a_parameter_follows_its_values():
    with meta_init():
        model = Related()
    found = started(model)
    weight, rows = found["linear.weight"], found["orthogonal.weight"]
    length, direction = (found[f"normed.parametrizations.weight.original{index}"] for index in range(2))
    torch.testing.assert_close(length, direction.norm(dim=1, keepdim=True))
    of = {name.removeprefix("of."): value for name, value in found.items() if name.startswith("of.")}
    assert torch.equal(of["turned"], weight.t())
    assert torch.equal(of["rows"], weight[:2])
    torch.testing.assert_close(of["norm"], weight.norm(dim=1))
    assert torch.equal(of["orthogonal_rows"], rows[:2])
    assert torch.equal(of["both"], torch.cat([weight, rows.t()]))
    assert torch.equal(of["numbers_turned"], of["numbers"].t())
    assert torch.equal(of["pair"], of["pair_again"])
    torch.testing.assert_close(of["power"], 2 ** of["others"])
    assert torch.equal(of["whole"], of["whole"].trunc())


def test_truncated_numbers_around_any_mean_are_those_of_torch():
    torch.manual_seed(0)
    found = _truncated_normal(torch.empty(40_000), 1.0, 0.5, 0.5, 3.0)
    wanted = nn.init.trunc_normal_(torch.empty(40_000), 1.0, 0.5, 0.5, 3.0)
    for measure in (torch.mean, torch.std, torch.amin, torch.median):
        torch.testing.assert_close(measure(found), measure(wanted), rtol=0.01, atol=0.01)


def test_elements_share_memory_where_a_stride_is_nothing():
    memory = torch.zeros(8)
    for size, stride, expected in (
        ((2, 4), (0, 1), True),
        ((4, 3), (1, 0), True),
        ((1, 4), (0, 1), False),
        ((2, 4), (4, 1), False),
        ((), (), False),
    ):
        assert is_expanded(memory.as_strided(size, stride)) == expected


def test_a_model_of_deep_copies_alone_starts():
    with meta_init():
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.TransformerEncoder(layer, 2)
    del layer
    found = started(model)
    assert torch.equal(found["layers.0.linear1.weight"], found["layers.1.linear1.weight"])


def test_values_that_were_given_are_those_of_that_moment():
    with meta_init():
        layer, values = nn.Linear(2, 2), torch.tensor([1.0, 2.0])
        with torch.no_grad():
            layer.bias.copy_(values)
        values.mul_(2)
    assert started(layer)["bias"].tolist() == [1.0, 2.0]


def test_numbers_that_are_read_twice_are_the_same():
    with meta_init():
        layer, numbers = nn.Linear(2, 2), torch.rand(3)
        layer.rates = numbers.tolist()
        layer.register_buffer("again", numbers)
    assert layer.again.tolist() == layer.rates


def test_any_block_is_made_alone(everything, values):
    inits = parameter_inits([everything])
    for name, parameter in everything.named_parameters():
        if id(parameter) in inits and parameter.dim():
            place = torch.empty(parameter.shape)
            for block in (place[1:5], place[..., 1:3], place[-1:]):
                found = block_of(inits[id(parameter)], block, parameter.shape)
                expected = values[name].as_strided(block.shape, block.stride(), block.storage_offset())
                assert torch.equal(found, expected), name


def test_names_and_seeds_decide_the_values():
    with meta_init():
        one, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    same, again, apart = started(one), started(other), started(one, seed=6)
    for name, value in same.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, apart[name])
    assert not torch.equal(same["0.weight"], same["1.weight"])


def test_stages_with_the_same_names_start_apart():
    with meta_init():
        stages = [nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(2)]
        tied = nn.Sequential(stages[0][0])
    inits = parameter_inits([*stages, tied])
    first, second = (inits[id(stage[0].weight)] for stage in stages)
    assert (first.name, second.name, len(inits)) == ("0.weight", "0.weight of stage 1", 2)


def test_a_model_may_be_cast_after_the_block():
    with meta_init():
        model = nn.Linear(8, 8)
    exact = started(model)
    assert torch.equal(started(model.bfloat16())["weight"], exact["weight"].bfloat16())


def test_torch_is_as_it_was_after_the_block():
    before = nn.init._no_grad_trunc_normal_
    with pytest.raises(ValueError), meta_init():
        raise ValueError
    assert nn.init._no_grad_trunc_normal_ is before
    layer = nn.Linear(2, 2)
    assert layer.weight.device.type == "cpu"
    assert not vars(layer.weight)


def test_mistakes_are_named():
    with torch.device("meta"):
        elsewhere = nn.Linear(2, 2)
    with pytest.raises(PlacementError, match=r"weight is on the meta device and has no initial value.*meta_init"):
        parameter_inits([elsewhere])
    with meta_init():
        forgotten, changed = nn.Linear(2, 2), nn.Linear(2, 2)
        forgotten.extra = nn.Parameter(torch.empty(3))
    with pytest.raises(PlacementError, match=r"extra was never given values inside meta_init"):
        parameter_inits([forgotten])
    nn.init.zeros_(changed.weight)
    with pytest.raises(PlacementError, match=r"weight was changed on the meta device after meta_init"):
        parameter_inits([changed])
    with meta_init():
        layer = nn.Linear(2, 2)
        with pytest.raises(
            PlacementError, match=r"needs the values of a parameter inside meta_init.*drawn only in initialize"
        ):
            layer.register_buffer("average", layer.weight.detach().clone())


def test_what_cannot_be_done_later_is_named():
    with meta_init():
        read, bare = nn.Linear(2, 2), nn.Linear(2, 2)
        numbers = torch.randn(2)
        read.register_buffer("first", numbers.clone())
        read.extra = nn.Parameter(numbers * 2)
        bare.tables = [torch.arange(3)]
        with pytest.raises(PlacementError, match=r"weight of LazyLinear gets its shape in the first forward pass"):
            nn.LazyLinear(2)
        module = nn.Module()
        with pytest.raises(
            PlacementError, match=r"shared of Module is an expanded tensor.*\(3, 4\) and strides \(0, 1\).*clone"
        ):
            module.shared = nn.Parameter(torch.ones(1, 4).expand(3, 4))
        with pytest.raises(PlacementError, match=r"needs the values of a parameter"):
            torch.allclose(bare.weight, read.weight)
    with pytest.raises(
        PlacementError, match=r"extra is initialized with random numbers that were read inside meta_init"
    ):
        parameter_inits([read])
    with pytest.raises(PlacementError, match=r"0\.tables contains a tensor without values.*register_buffer"):
        parameter_inits([nn.Sequential(bare)])


def test_most_parameters_have_an_elementwise_init_so_that_nobody_makes_the_whole(everything):
    whole = {init.name for init in parameter_inits([everything]).values() if init.elementwise is None}
    assert "orthogonal.weight" in whole
    assert {"orthogonal.weight", "drawn", "turned"} <= whole
    by_program = {"linear.weight", "linear.bias", "table.weight", "conv.weight", "truncated", "ones", "stacked"}
    assert not whole & by_program


def test_numbers_that_two_parameters_have_are_the_same_where_they_lie_otherwise():
    with meta_init():
        numbers, others = torch.randn(3, 4), torch.randn(3, 4)
        twice = nn.ParameterList([numbers.clone(), numbers.t().contiguous()])
        stacked = nn.ParameterList([numbers, torch.stack([numbers, others])])
    plain, turned = started(twice).values()
    assert torch.equal(plain, turned.t())
    plain, (first, second) = started(stacked).values()
    assert torch.equal(plain, first)
    assert not torch.equal(plain, second)


def test_numbers_follow_the_name_of_the_parameter_that_they_were_drawn_for():
    with meta_init():
        plain, early = nn.Module(), nn.Module()
        plain.linear = nn.Linear(4, 4)
        early.linear = nn.Linear(4, 4)
        early.copy = nn.Parameter(early.linear.weight.detach().clone())
    found = started(early)
    assert next(iter(found)) == "copy"
    assert torch.equal(found["linear.weight"], started(plain)["linear.weight"])
    assert torch.equal(found["linear.weight"], found["copy"])


def test_parts_that_are_drawn_without_a_program_are_told_apart_by_their_turn():
    with meta_init():
        module = nn.ParameterList([torch.empty(4).exponential_()])
    (init,) = parameter_inits([module]).values()
    whole, part = torch.empty(4), torch.empty(4)
    init.fill(whole, [0], (4,), [0], 5)
    init.fill(part, [0], (8,), [0], 5)  # of a parameter twice as long
    assert not torch.equal(whole, part)


def test_values_that_are_kept_somewhere_are_read_from_there():
    class File:
        def read_into(self, target: Tensor, offset: list[int]) -> None:
            target.copy_(torch.arange(10.0)[offset[0] : offset[0] + len(target)])

    parameter = nn.Parameter(torch.empty(4, device="meta"))
    set_value_source(parameter, File())
    (reading,) = parameter_inits([nn.ParameterList([parameter])]).values()
    found = torch.empty(3)
    reading.fill(found, [1], (4,), [1], 5)
    assert found.tolist() == [1.0, 2.0, 3.0]


def test_names_are_those_of_the_whole_model_unless_stages_are_built_apart(everything):
    contexts = [SimpleNamespace(pipeline_parallel_size=size, get_local_rank=lambda mode: 1) for size in (1, 2)]
    whole, stage = ({init.name for init in read_inits(everything, context).values()} for context in contexts)
    assert whole == {name for name, parameter in everything.named_parameters() if parameter.is_meta}
    assert stage == {f"stage 1: {name}" for name in whole}


def test_what_was_noted_goes_when_a_parameter_has_its_values():
    with meta_init():
        layer = nn.Linear(2, 2)
    part = nn.Parameter(torch.empty(1, 2, device="meta"))
    assert initial_value_of(layer.weight) is not None
    assert initial_value_of(part) is None
    keep_initial_value(part, layer.weight)
    set_value_source(part, "a file")  # type: ignore[arg-type]
    assert initial_value_of(part)[1:] == (initial_value_of(layer.weight).tensor, part._version)
    assert value_source_of(part) == "a file"
    forget_initial_value(part)
    assert (initial_value_of(part), value_source_of(part)) == (None, None)
    assert vars(part) == {}
    forget_initial_value(part)
    with torch.no_grad():
        layer.weight.zero_()  # so it does not start as it was noted
    keep_initial_value(part, layer.weight)
    assert initial_value_of(part).version == -1


# -- counter ----------------------------------------------------------------------------------------------
# Random numbers by position: any part is drawn alone, and together they are what they should be.


EVERY = torch.arange(1 << 18)


def test_a_part_is_a_part_of_the_whole():
    for draw in (meta.uniform, meta.normal):
        whole = draw(7, EVERY)
        assert torch.equal(draw(7, EVERY[1000:1777]), whole[1000:1777])
        assert not torch.equal(draw(8, EVERY), whole)


def test_the_numbers_are_those_of_splitmix64():
    """Written out in Python's own numbers, which do not wrap around."""
    key, mask = 123456789, (1 << 64) - 1
    for position in (0, 1, 5, 1 << 40):
        z = (key + position * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        expected = ((z ^ (z >> 31)) >> 12) * 2.0**-52 + 2.0**-53
        assert meta.uniform(key, torch.tensor([position])).item() == expected


def test_uniform_numbers_fill_their_range_evenly():
    values = meta.uniform(3, EVERY, -2.0, 6.0)
    assert -2 < values.min() < -1.999
    assert 5.999 < values.max() < 6
    counts = torch.histc(values, 64, -2, 6)
    chi_square = ((counts - len(EVERY) / 64) ** 2 / (len(EVERY) / 64)).sum()
    assert chi_square < 63 + 5 * math.sqrt(2 * 63)
    neighbours = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1]
    assert abs(neighbours) < 0.01


def test_normal_numbers_have_the_moments_of_a_normal_distribution():
    values = meta.normal(3, EVERY, 1.0, 0.5).sub(1).div(0.5)
    moments = [values.pow(power).mean().item() for power in (1, 2, 3, 4)]
    for found, expected, width in zip(moments, (0, 1, 0, 3), (1, 2, 15, 96), strict=True):
        assert abs(found - expected) < 5 * math.sqrt(width / len(EVERY))
    assert values.isfinite().all()


def test_positions_of_a_block_in_the_whole():
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5)
    strides = meta.row_strides(whole.shape)
    for block in (whole, whole[1:3], whole[:, 2:4], whole[1:2, 3:, 1:4], whole[:, :, 2:3], whole[2:2]):
        first = block.storage_offset()
        found = meta.positions_in(torch.arange(block.numel()), block.shape, first, strides)
        assert torch.equal(found, block.flatten())
    assert meta.positions_in(torch.arange(1), (), 3, ()).tolist() == [3]
    apart = whole.flatten().repeat(3).as_strided((2, 3, 4), (12, 50, 3), 7)  # the last fits into the first, not between
    assert torch.equal(meta.positions_in(torch.arange(24), (2, 3, 4), 7, (12, 50, 3)) % 120, apart.flatten())


def test_numbers_wrap_around_at_64_bits():
    wraps = {5: 5, (1 << 63) - 1: (1 << 63) - 1, 1 << 63: -(1 << 63), (1 << 64) - 1: -1, (1 << 64) + 5: 5, -3: -3}
    assert {number: meta._signed(number) for number in wraps} == wraps

"""From plans to sums, and the options of sums, in one process: which parameters go together, over which ranks, divided by what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, LedgerError
from colonnade.gradients.handler import PlannedGradientHandler
from colonnade.gradients.sums import (
    Reduction,
    Sharding,
    Shards,
    SyncOptions,
    choose,
    read_demands,
    sums_of,
    with_groups,
)
from colonnade.parallel.placement import Replicate, place
from colonnade.proof.planner.ranks import fake_rank

M = ParallelMode


@pytest.fixture
def context() -> Any:
    """Rank 5 of data 2 x pipeline 2 x tensor 2: (1, 0, 1)."""
    gpc = ParallelContext()
    config = {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}}
    with fake_rank(load_config(config), 8, 5, gpc):
        yield gpc


def reduction(mode: ParallelMode, ranks: tuple[int, ...], divisor: float, **parameters: nn.Parameter) -> Reduction:
    return Reduction(tuple(parameters), tuple(parameters.values()), mode, ranks, divisor)


class Data(PlannedGradientHandler):
    def reductions(self) -> list[Reduction]:
        raise NotImplementedError


class Other(Data):
    pass


def claim(*reductions: Reduction, kind: type[PlannedGradientHandler] = Data, **options: Any) -> Any:
    return kind(nn.Module(), None, **options), reductions


def test_one_sum_for_all_that_a_parameter_owes(context):
    a, b, c, d = (nn.Parameter(torch.ones(size)) for size in range(1, 5))
    place(b, {M.TENSOR: Replicate(owes="sum")})
    claims = [
        claim(reduction(M.DATA, (1, 5), 2, a=a, b=b)),
        claim(reduction(M.TENSOR, (4, 5), 1, b=b)),
        claim(reduction(M.PIPELINE, (5, 7), 3, c=c), overlap=False),
    ]
    sums = with_groups(sums_of(claims, context, {"bucket_mb": 2}, [("d", d), ("a", a)]), context)
    found = {
        one.names: (one.ranks, one.divisor, one.between_stages, one.options.overlap, one.group is None) for one in sums
    }
    assert found == {
        ("a",): ((1, 5), 2.0, False, "auto", False),
        ("b",): ((0, 1, 4, 5), 2.0, False, "auto", False),
        ("c",): ((5, 7), 3.0, True, False, False),
        ("d",): ((5,), 1.0, False, "auto", True),
    }
    assert all(one.options.bucket_mb == 2 for one in sums)
    assert all((one.sharding, one.labels) == (None, ()) for one in sums)
    assert [one.ranks for one in sums] == [(0, 1, 4, 5), (1, 5), (5,), (5, 7)]


def test_a_single_reduction_goes_over_the_ranks_that_it_names_and_only_groups_are_asked_for(context, monkeypatch):
    a, b = (nn.Parameter(torch.ones(1)) for _ in range(2))
    asked: list[Any] = []
    monkeypatch.setattr(context, "ensure_groups", lambda ranks: asked.extend(ranks))
    sums = sums_of([claim(reduction(M.DATA, (2, 5), 2, a=a))], context, {}, [("b", b)])
    assert asked == []
    assert [one.ranks for one in with_groups(sums, context)] == [(2, 5), (5,)]
    assert asked == [(2, 5)]


def test_what_is_sharded_is_summed_apart_in_buckets_of_its_own_size(context):
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    claims = [claim(reduction(M.DATA, (1, 5), 2, a=a, b=b, c=c))]
    for size in (None, 7.0):
        shards = Shards(Sharding(wide=True), {id(b): "second", id(c): "third"}, size)
        plain, sharded = sums_of(claims, context, {"bucket_mb": 2}, (), shards)
        assert (plain.names, plain.sharding, plain.labels, plain.options.bucket_mb) == (("a",), None, (), 2)
        assert (sharded.names, sharded.labels) == (("b", "c"), ("second", "third"))
        assert sharded.sharding is shards.sharding
        assert sharded.options.bucket_mb == (2 if size is None else size)


def test_two_handlers_of_one_sum_agree_on_its_options(context):
    a = nn.Parameter(torch.ones(1))
    parts = reduction(M.DATA, (1, 5), 2, a=a), reduction(M.TENSOR, (4, 5), 1, a=a)
    sums_of([claim(parts[0], overlap=True), claim(parts[1], kind=Other, overlap=True)], context, {})
    with pytest.raises(ConfigError) as error:
        sums_of([claim(parts[0], overlap=True), claim(parts[1], kind=Other, overlap=False)], context, {})
    assert str(error.value).startswith(
        "the gradient handlers Data and Other both reduce 'a' in one sum, but Data has overlap=True and Other has overlap=False. Give both handlers the same overlap"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket": 1}, "'bucket' is not an option of a gradient handler; allowed are bucket_mb, "),
        ({"bucket_mb": 0}, "bucket_mb must be a number > 0, not 0"),
        ({"first_bucket_mb": -1}, "first_bucket_mb must be a number > 0, not -1"),
        ({"first_bucket_mb": -0.5}, "first_bucket_mb must be a number > 0, not -0.5"),
        ({"overlap": "yes"}, "overlap must be True, False or \"auto\", not 'yes'"),
        ({"shared_memory": 2}, 'shared_memory must be True, False or "auto", not 2'),
        ({"reduce_dtype": torch.int32}, "reduce_dtype must be a floating point dtype, not torch.int32"),
        ({"reduce_dtype": 3}, "reduce_dtype must be a floating point dtype, not 3"),
        ({"reduce_dtype": "fp23"}, "reduce_dtype is 'fp23'; allowed are "),
        ({"compress": torch.float32}, 'compress must be "bf16", "fp16" or None, not torch.float32'),
        ({"compress": "fp32"}, "compress is 'fp32'; allowed are "),
        ({"compress": "bf16", "reduce_dtype": "fp16"}, "compress=torch.bfloat16 and reduce_dtype=torch.float16 both"),
    ],
)
def test_options_that_are_none(settings, message):
    with pytest.raises(ConfigError) as error:
        SyncOptions.read(settings)
    assert str(error.value).startswith(message)


F16, B16, F32, F64, C64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64


@pytest.mark.parametrize(
    ("settings", "dtype", "added", "sent"),
    [
        ({}, F32, F32, F32),
        ({}, B16, B16, B16),
        ({}, F16, F32, F16),
        ({}, C64, F32, F32),
        ({"reduce_dtype": "fp32"}, B16, F32, B16),
        ({"reduce_dtype": "fp64"}, F32, F64, F32),
        ({"reduce_dtype": "fp64"}, C64, F32, F32),
        ({"reduce_dtype": "bf16"}, F32, F32, B16),
        ({"reduce_dtype": "bf16"}, F16, F32, F16),
        ({"compress": "bf16"}, F32, F32, B16),
        ({"compress": "fp16", "reduce_dtype": "fp64"}, F32, F64, F16),
        ({"compress": "bf16", "reduce_dtype": "bf16"}, F64, F64, B16),
        ({"compress": None, "overlap": None}, F32, F32, F32),
    ],
)
def test_in_which_type_gradients_are_added_and_sent(settings, dtype, added, sent):
    options = SyncOptions.read(settings)
    assert (options.sum_dtype(dtype), options.wire_dtype(dtype)) == (added, sent)


def test_parameters_are_chosen_by_name_or_by_a_function(context):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    demands = read_demands(model, context.layout, 5)
    assert [(demand.name, [owed.mode for owed in demand.owed]) for demand in demands[:1]] == [("0.weight", [M.DATA])]
    for which, names in (
        (None, ["0.weight", "0.bias", "1.weight", "1.bias"]),
        ("*.bias", ["0.bias", "1.bias"]),
        (["0.*", "*.bias"], ["0.weight", "0.bias", "1.bias"]),
        (lambda name, parameter: parameter.dim() == 2, ["0.weight", "1.weight"]),
    ):
        assert [demand.name for demand in choose(demands, which)] == names
    with pytest.raises(LedgerError, match=r"2\.bias"):
        choose(demands, ["0.*", "2.bias"])

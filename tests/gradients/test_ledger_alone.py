"""The ledger by arithmetic alone: what is entered, what is refused, what stays open."""

from __future__ import annotations

import json
from math import inf
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.errors import LedgerError
from colonnade.gradients.ledger import Ledger, LedgerRow, match, require_complete
from colonnade.gradients.probe import _divisor, _Probed, _ProbeValues
from colonnade.gradients.sums import Reduction, read_demands
from colonnade.parallel.placement import Replicate, place

LAYOUT = build_layout({"parallel": {"tensor": 2, "sequence": 2}}, 8)


def model() -> nn.Module:
    made = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))
    place(made[1].weight, {M.TENSOR: Replicate(owes="sum")})
    return made


@pytest.fixture
def known():
    """The demands of rank 0, and what a correct handler would do for each factor."""
    demands = read_demands(model(), LAYOUT, 0)
    factors = {(d.name, f.mode.name): (d, f) for d in demands for f in d.owed}
    assert sorted(factors) == [
        ("0.weight", "DATA"),
        ("0.weight", "SEQUENCE"),
        ("1.weight", "DATA"),
        ("1.weight", "SEQUENCE"),
        ("1.weight", "TENSOR"),
    ]
    return SimpleNamespace(demands=demands, factors=factors)


def reduction(known, name: str, over: str, **changes) -> Reduction:
    demand, factor = known.factors[name, over]
    values = {"mode": factor.mode, "ranks": factor.ranks, "divisor": factor.divisor, **changes}
    return Reduction((demand.name,), (demand.parameter,), values["mode"], values["ranks"], values["divisor"])


def matched(known, *covered, waive=()) -> Ledger:
    return match(known.demands, [(f"H{at}", one) for at, one in enumerate(covered)], LAYOUT, 0, waive)


def who(ledger: Ledger) -> list[str | None]:
    return [row.done_by for row in ledger.rows]


def test_what_is_done_is_entered_and_the_rest_is_open(known):
    ledger = matched(known, reduction(known, "0.weight", "DATA"), reduction(known, "1.weight", "TENSOR"))
    assert who(ledger) == ["H0", None, None, None, "H1"]
    assert len(ledger.open_rows()) == 3
    with pytest.raises(
        LedgerError, match=r"0.weight: needs an all-reduce over SEQUENCE .*, but no handler performs it"
    ):
        require_complete(ledger)
    filled = ledger.filled({("0.weight", "SEQUENCE"): "X", ("0.weight", "DATA"): "never: it is done"})
    assert who(filled) == ["H0", "X", None, None, "H1"]
    whole = filled.filled({("1.weight", mode): "Y" for mode in ("DATA", "SEQUENCE")})
    require_complete(whole)
    assert whole.open_rows() == []


def test_one_sum_may_do_several_factors_at_once_if_its_divisor_is_theirs(known):
    (_, data), (_, sequence) = known.factors["0.weight", "DATA"], known.factors["0.weight", "SEQUENCE"]
    ranks = tuple(sorted({0, 2, 4, 6}))
    both = reduction(known, "0.weight", "DATA", ranks=ranks, divisor=data.divisor * sequence.divisor)
    assert who(matched(known, both))[:2] == ["H0", "H0"]
    wrong = reduction(known, "0.weight", "DATA", ranks=ranks, divisor=data.divisor)
    with pytest.raises(LedgerError, match=r"H0 .* divides by 2, but 4 ranks saw distinct data"):
        matched(known, wrong)


def test_what_is_wrong_is_refused_by_name(known):
    good = reduction(known, "0.weight", "DATA")
    with pytest.raises(LedgerError, match=r"H1 .*, but H0 does so, too"):
        matched(known, good, good)
    with pytest.raises(LedgerError, match="H sums twice over DATA"):
        match(known.demands, [("H", good), ("H", good)], LAYOUT, 0)
    with pytest.raises(LedgerError, match=r"sums over DATA \[0, 1\], but its placement .* requires DATA"):
        matched(known, reduction(known, "0.weight", "DATA", ranks=(0, 1)))
    with pytest.raises(LedgerError, match="divides by 3, but 2 ranks") as one:
        matched(known, reduction(known, "0.weight", "DATA", divisor=3.0))
    assert "alike" not in str(one.value)
    with pytest.raises(LedgerError, match=r"sums over DATA \[0\], but its placement .* requires DATA"):
        matched(known, reduction(known, "0.weight", "DATA", ranks=(0,)))
    both = reduction(known, "0.weight", "DATA", ranks=(0, 2, 4, 6), divisor=4)
    with pytest.raises(LedgerError, match=r"H sums over DATA and SEQUENCE \[0, 2, 4, 6\], but H does so, too"):
        match(known.demands, [("H", good), ("H", both)], LAYOUT, 0)


def test_a_sum_over_the_ranks_that_are_owed_counts_by_whatever_mode_it_goes(known):
    ledger = matched(known, reduction(known, "0.weight", "DATA", mode=M.GLOBAL))
    assert who(ledger) == ["H0", None, None, None, None]


def test_rows_of_parameters_that_are_alike_are_one_pattern():
    rows = [
        LedgerRow("blocks.0.w1.weight", "DATA", (0, 1), 2, "H", False),
        LedgerRow("blocks.11.w1.weight", "DATA", (0, 1), 2, "H", False),
        LedgerRow("blocks.2.w1.weight", "DATA", (0, 1), 2, None, False),
        LedgerRow("head", "DATA", (0, 1), 2, None, True),
        LedgerRow("tail", "DATA", (0, 1), 2, "H", True),
    ]
    assert [(one.pattern, one.count, one.done_by) for one in Ledger(rows).by_pattern()] == [
        ("blocks.*.w1.weight", 2, "H"),
        ("blocks.*.w1.weight", 1, "NOBODY"),
        ("head", 1, "waived"),
        ("tail", 1, "H (waived)"),
    ]
    assert [row["parameter"] for row in json.loads(Ledger(rows).to_json())] == [row.parameter for row in rows]


def test_a_waived_parameter_is_in_no_check_and_its_rows_say_so(known):
    wrong = reduction(known, "0.weight", "DATA", divisor=3.0)
    ledger = matched(known, wrong, waive=["0.*"])
    assert [row.waived for row in ledger.rows] == [True, True, False, False, False]
    assert next(row.done_by for row in ledger.rows if row.waived and row.mode == "DATA") == "H0"
    assert {row.parameter for row in ledger.open_rows()} == {"1.weight"}
    with pytest.raises(LedgerError, match=r"'0.wieght' matches no parameter. Did you mean '0.weight'"):
        matched(known, waive=["0.wieght"])
    matched(known, waive=["of.another.stage", "*.nothing"])
    several = matched(known, wrong, waive=["0.weight", "of.another.stage"])
    assert [row.waived for row in several.rows] == [True, True, False, False, False]


def test_parameters_that_are_not_the_models_are_nobodys_business(known):
    stranger = Reduction(("x",), (nn.Parameter(torch.ones(1)),), M.DATA, (0, 1), 5.0)
    assert who(matched(known, stranger)) == [None] * 5


def test_many_problems_alike_are_one_line():
    layers = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(30)))
    layout = build_layout({}, 2)
    demands = read_demands(layers, layout, 0)
    wrong = Reduction(tuple(d.name for d in demands), tuple(d.parameter for d in demands), M.DATA, (0, 1), 7.0)
    with pytest.raises(LedgerError) as error:
        match(demands, [("H", wrong)], layout, 0)
    assert "0.weight: H sums over DATA [0, 1] and divides by 7, but 2 ranks saw distinct data (and 29 alike)" in str(
        error.value
    )


@pytest.mark.parametrize(("world", "expected"), [(1024, [3, 12, 27, 36]), (1025, [1, 4, 9, 12])])
def test_marks_of_many_ranks_are_expected_to_cancel(world, expected):
    values = _ProbeValues(world)
    assert [values.largest_sum(count) for count in (1, 4, 9, 16)] == expected
    values.next_run()
    assert values._runs[0].abs().max() == expected[0]  # what one rank has
    assert values._runs[0].abs().min() == 1


@pytest.mark.parametrize(
    ("factor", "due", "exact", "expected"),
    [
        (1 / 4, 4, True, 4),
        (1 / 4, None, True, 4),
        (1, 4, True, 1),
        (2, 4, True, 1 / 2),  # counted twice
        (1 / 4 + 0.001, 4, True, None),
        (1 / 4 + 0.001, 4, False, 4),
        (-1, 4, True, None),
        (0, 4, True, None),
        (inf, 4, True, None),
        (1 / 4, None, False, 4),
    ],
)
def test_by_what_marks_were_divided(factor, due, exact, expected):
    total = torch.tensor([3.0, -2.0, 5.0, 1.0], dtype=torch.float64)
    assert _divisor(total * factor, total, due, 1e-5 if exact else 0.05, exact) == expected
    nothing = torch.zeros(4, dtype=torch.float64)
    assert _divisor(nothing, nothing, due, 1e-5, exact) == (due or 1)  # marks that add up to nothing do not tell


def test_little_precision_is_explained_by_what_is_owed_first():
    total = torch.tensor([3.0, -2.0, 5.0, 1.0], dtype=torch.float64)
    assert _divisor(total * 0.22, total, 4, 1.0, exact=False) == 4
    assert _divisor(total * 0.22, total, 4, 1.0, exact=True) == 5
    assert _divisor(total / 4, total, 4, 0.0, exact=True) == 4  # nothing may be off, and nothing is


# -- what the probe finds ----------------------------------------------------------------------------------


def test_sums_that_may_be_found_begin_with_what_is_owed(known):
    demand = known.factors["1.weight", "DATA"][0]
    found = [(one.ranks, one.mode and one.mode.name, one.divisor) for one in _Probed.of(demand, LAYOUT, 0).candidates]
    first = [
        (tuple(range(8)), "DATA", 4),
        ((0, 2, 4, 6), "DATA", 4),
        ((0, 1, 4, 5), "DATA", 2),
        ((0, 1, 2, 3), "SEQUENCE", 2),
        ((0, 4), "DATA", 2),
        ((0, 2), "SEQUENCE", 2),
        ((0, 1), "TENSOR", 1),
    ]
    assert found[:7] == first
    assert found[-1] == ((0,), None, None)
    other = known.factors["0.weight", "DATA"][0]
    plain = [(one.ranks, one.divisor) for one in _Probed.of(other, LAYOUT, 0).candidates]
    assert plain[:3] == [((0, 2, 4, 6), 4), ((0, 4), 2), ((0, 2), 2)]
    assert ((0, 1), None) in plain[3:]  # of a group to which nothing is owed
    assert all(divisor is None and len(ranks) > 1 for ranks, divisor in plain[3:-1])

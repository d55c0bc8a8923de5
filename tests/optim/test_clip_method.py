"""Clip methods: the fixed limit, and methods with history against plain Python versions of their papers' rules."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from colonnade.config.settings import positive
from colonnade.errors import CheckpointError, ConfigError, RegistryError
from colonnade.optim.clip import (
    CLIP_METHOD,
    AdaGC,
    ClipMethod,
    Measured,
    NormClip,
    PercentileClip,
    SkipOnSpike,
    ZClip,
    divisor_to,
)
from colonnade.optim.norm import Norms
from tests.optim.watch import Operations


def seen(norm: float, *slots: float) -> Measured:
    """A measurement; the slots are the total alone by default."""
    values = torch.tensor(slots or (norm,), dtype=torch.float64)
    norms = Norms(2.0, values.square(), values.isfinite().logical_not().double())
    return Measured(torch.tensor(norm, dtype=torch.float64), norms, ~values.isfinite().all())


def test_the_built_ins_are_known_by_name() -> None:
    assert list(CLIP_METHOD) == ["adagc", "norm", "percentile", "skip_on_spike", "zclip"]
    with pytest.raises(RegistryError, match="Did you mean 'zclip'"):
        CLIP_METHOD.get_module("zclp")


@pytest.mark.parametrize(("norm", "limit"), [(5.0, 1.0), (0.5, 1.0), (1.0, 1.0), (0.0, 1.0), (1e-9, 1e-8)])
def test_divisor_is_the_inverse_of_torchs_coefficient(norm: float, limit: float) -> None:
    coefficient = min(1.0, limit / (norm + 1e-6))
    assert divisor_to(torch.tensor(norm, dtype=torch.float64), limit).item() == pytest.approx(
        1 / coefficient, rel=1e-12
    )


def test_infinity_measures_only() -> None:
    for norm in (3.0, math.inf, math.nan):
        assert NormClip(math.inf)(seen(norm)).divisor.item() == 1


def test_bad_norms_give_bad_divisors_as_in_torch() -> None:
    assert math.isnan(NormClip(1.0)(seen(math.nan)).divisor.item())
    assert math.isinf(NormClip(1.0)(seen(math.inf)).divisor.item())


def test_methods_without_memory_have_an_empty_state() -> None:
    method = NormClip(1.0)
    method(seen(2.0))
    assert method.state_dict() == {}
    method.load_state_dict({})
    with pytest.raises(CheckpointError, match="NormClip needs"):
        method.load_state_dict({"count": torch.zeros(())})


def test_a_limit_may_be_a_whole_number_that_a_float_holds() -> None:
    assert positive("max_norm", 2) == 2.0
    assert positive("max_norm", 2**62) == 2.0**62
    with pytest.raises(ConfigError, match="max_norm must be a number > 0"):
        positive("max_norm", 2**63)


# --- Methods with history ---


METHODS: dict[str, Callable[[], ClipMethod]] = {
    "zclip": lambda: ZClip(warmup=5, max_norm=4.0),
    "percentile": lambda: PercentileClip(30, window=7),
    "skip_on_spike": lambda: SkipOnSpike(sigmas=2.0, window=8),
    "adagc": lambda: AdaGC(warmup=4),
}


def noisy(count: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [abs(draw.gauss(1.0, 0.1)) * (8.0 if draw.random() < 0.15 else 1.0) for _ in range(count)]


def zclip_divisors(norms: list[float], warmup: int, alpha: float, z_max: float) -> list[float]:
    first: list[float] = []
    divisors, mean, variance = [], 0.0, 0.0
    for norm in norms:
        clipped = norm
        if len(first) < warmup:
            first.append(norm)
            mean = sum(first) / len(first)
            variance = sum((x - mean) ** 2 for x in first) / len(first)
        else:
            deviation = math.sqrt(variance)
            z = (norm - mean) / (deviation + 1e-6)
            if z > z_max:
                clipped = mean + z_max * deviation / (z / z_max)
            mean = alpha * mean + (1 - alpha) * clipped
            variance = alpha * variance + (1 - alpha) * (clipped - mean) ** 2
        divisors.append(max(1.0, (norm + 1e-6) / clipped) if clipped < norm else 1.0)
    return divisors


def test_zclip() -> None:
    norms = noisy(60)
    method = ZClip(warmup=10)
    found = [method(seen(norm)).divisor.item() for norm in norms]
    assert found == pytest.approx(zclip_divisors(norms, 10, 0.97, 2.5), rel=1e-9)
    assert max(found) > 2
    never = ZClip(z_max=1e300, warmup=1)
    assert [never(seen(norm)).divisor.item() for norm in norms] == [1.0] * 60


def test_percentile_over_a_window() -> None:
    norms = noisy(40)
    method = PercentileClip(30, window=7)
    for step, norm in enumerate(norms):
        recent = torch.tensor(norms[max(0, step - 6) : step + 1], dtype=torch.float64)
        limit = torch.quantile(recent, 0.3).item()
        assert method(seen(norm)).divisor.item() == pytest.approx(max(1.0, (norm + 1e-6) / limit), rel=1e-12)


def test_skip_on_spike() -> None:
    method = SkipOnSpike(sigmas=6.0, window=8, max_norm=0.5)
    skips = []
    norms = [1.0, 1.1, 0.9, 50.0, 1.0, 1.05, 50.0, 1.0, *[1.0] * 8, 50.0, *[50.0] * 8]
    for norm in norms:
        verdict = method(seen(norm))
        assert verdict.skip is not None
        skips.append(bool(verdict.skip))
        assert verdict.divisor.item() == pytest.approx((norm + 1e-6) / 0.5)
    assert not any(skips[:16])  # too few to judge at first, then a window that itself has spikes
    assert skips[16]
    assert not skips[-1]  # a lasting change is accepted


def test_skip_above_a_fixed_bound() -> None:
    verdict = SkipOnSpike(bound=10.0)(seen(11.0))
    assert verdict.skip is not None
    assert bool(verdict.skip)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 6, 7])
def test_a_spike_is_told_once_half_of_the_window_is_there_and_at_least_two(window: int) -> None:
    for before in range(window + 1):
        method = SkipOnSpike(sigmas=3.0, window=window)
        for at in range(before):
            method(seen(1.0 + 0.1 * (at % 2)))
        verdict = method(seen(100.0))
        assert verdict.skip is not None
        assert bool(verdict.skip) is (before >= max(2, window // 2)), before


@pytest.mark.parametrize(("norm", "skipped"), [(1.39, False), (1.41, True)])
def test_a_spike_is_so_many_deviations_above_the_mean(norm: float, skipped: bool) -> None:
    method = SkipOnSpike(sigmas=3.0, window=4)
    for before in (1.0, 1.2):  # their mean is 1.1, their deviation 0.1
        method(seen(before))
    verdict = method(seen(norm))
    assert verdict.skip is not None
    assert bool(verdict.skip) is skipped


def test_a_norm_as_large_as_the_bound_is_no_spike() -> None:
    method = SkipOnSpike(sigmas=1.0, window=4, bound=10.0)
    for norm, skipped in ((10.0, False), (10.0, False), (10.0, False), (math.nextafter(10.0, 11.0), True)):
        verdict = method(seen(norm))
        assert verdict.skip is not None
        assert bool(verdict.skip) is skipped


def test_the_averages_of_several_slots_are_restored() -> None:
    method, other = AdaGC(warmup=1), AdaGC(warmup=1)
    for row in ((1.0, 2.0, 0.5), (1.5, 1.0, 0.0)):
        method(seen(math.hypot(*row), *row))
    other.load_state_dict(method.state_dict())
    assert torch.equal(other.state["average"], method.state["average"])
    assert other.state["average"] is not method.state["average"]


def test_adagc_by_slot() -> None:
    method = AdaGC(factor=1.05, beta=0.98, warmup=3, max_norm=2.0)
    rows = [(3.0, 0.5), (2.0, 0.4), (2.5, 0.0), (2.0, 0.5), (9.0, 0.4), (1.0, 0.3)]
    averages = [math.inf, math.inf]
    for step, row in enumerate(rows):
        total = math.hypot(*row)
        found = method(seen(total, *row)).divisor.expand(2).tolist()
        for slot, norm in enumerate(row):
            limit_norm, limit = (total, 2.0) if step < 3 else (norm, 1.05 * averages[slot])
            divisor = max(1.0, (limit_norm + 1e-6) / limit)
            assert found[slot] == pytest.approx(divisor, rel=1e-12)
            if norm > 0:
                clipped = norm / divisor
                old = averages[slot]
                averages[slot] = min(old, clipped) if step < 3 else 0.98 * old + 0.02 * clipped
    assert found[0] == 1
    assert method.state["average"].tolist() == pytest.approx(averages)


def test_adagc_meets_a_slot_after_the_warm_up() -> None:
    method = AdaGC(warmup=1)
    for row in ((1.0, 0.0), (1.0, 0.0), (1.0, 5.0)):
        verdict = method(seen(math.hypot(*row), *row))
    assert verdict.divisor.tolist() == [1.0, 1.0]
    assert method.state["average"][1].item() == 5.0


@pytest.mark.parametrize("name", METHODS)
def test_a_bad_step_is_not_remembered(name: str) -> None:
    method, other = METHODS[name](), METHODS[name]()
    method(seen(math.nan))
    for step, norm in enumerate(noisy(12)):
        assert torch.equal(method(seen(norm)).divisor, other(seen(norm)).divisor)
        if step % 3 == 0:
            method(seen(math.nan if step % 2 else math.inf))
    assert all(torch.equal(other.state[key], value) for key, value in method.state.items())


@pytest.mark.parametrize("name", METHODS)
def test_a_restored_method_goes_on_alike(name: str) -> None:
    norms = noisy(30)
    straight, broken = METHODS[name](), METHODS[name]()
    whole = [straight(seen(norm)).divisor for norm in norms]
    for norm in norms[:13]:
        broken(seen(norm))
    resumed = METHODS[name]()
    resumed.load_state_dict(broken.state_dict())
    again = [resumed(seen(norm)).divisor for norm in norms[13:]]
    assert all(torch.equal(one, other) for one, other in zip(whole[13:], again, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_read_on_the_host(name: str) -> None:
    method = METHODS[name]()
    method(seen(1.0))
    measured = seen(2.0)
    with Operations() as watched:
        method(measured)
    assert watched.host_reads == 0


def test_a_state_of_other_settings_is_refused() -> None:
    method = PercentileClip(window=7)
    method(seen(1.0))
    with pytest.raises(CheckpointError, match="PercentileClip needs"):
        PercentileClip(window=8).load_state_dict(method.state_dict())


STEPS = ("a number of steps from 1 to 1000000", (0, -1, 1_000_001, True, 2.0, "3", None), (1, 1_000_000))
FRACTION = ("a number between 0 and 1", (0, 1, -0.5, 1.5, True, "0.5", None), (0.25,))
LIMIT = ("a number > 0 (inf measures without clipping)", (0, -1.0, math.nan, True, "1"), (2,))
OPTIONS: list[tuple[Any, str, Any]] = [
    (NormClip, "max_norm", LIMIT),
    (ZClip, "warmup", STEPS),
    (ZClip, "alpha", FRACTION),
    (ZClip, "z_max", LIMIT),
    (ZClip, "max_norm", LIMIT),
    (PercentileClip, "window", STEPS),
    (SkipOnSpike, "window", STEPS),
    (SkipOnSpike, "sigmas", LIMIT),
    (SkipOnSpike, "bound", LIMIT),
    (SkipOnSpike, "max_norm", LIMIT),
    (AdaGC, "warmup", STEPS),
    (AdaGC, "beta", FRACTION),
    (AdaGC, "factor", LIMIT),
    (AdaGC, "max_norm", LIMIT),
]
"""(method, option, what it may be, values that it may not have, values that it may)"""


@pytest.mark.parametrize(("make", "name", "kind"), OPTIONS)
def test_options_have_a_range(make: Any, name: str, kind: Any) -> None:
    allowed, wrong, right = kind
    for value in wrong:
        with pytest.raises(ConfigError) as error:
            make(**{name: value})
        assert str(error.value).startswith(f"{name} must be {allowed}, not {value!r}")
    assert all(getattr(make(**{name: value}), name) == value for value in right)


def test_a_percentile_is_between_0_and_100() -> None:
    for percentile in (0, 100, -1, 101):
        with pytest.raises(ConfigError, match=r"^percentile / 100 must be a number between 0 and 1, not"):
            PercentileClip(percentile)
    assert PercentileClip(99).fraction == 0.99

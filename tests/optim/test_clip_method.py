"""Fixed limits, and what every clip method shares: device-side state that survives a checkpoint."""

from __future__ import annotations

import math

import pytest
import torch

from colonnade.config.settings import positive
from colonnade.errors import CheckpointError, ConfigError, RegistryError
from colonnade.optim.clip_method import CLIP_METHOD, Measured, NormClip, divisor_to
from colonnade.optim.norm import Norms


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


@pytest.mark.parametrize("value", [0, -1.0, math.nan, True, "1"])
def test_limits_that_are_no_limit(value: float) -> None:
    with pytest.raises(ConfigError, match="max_norm must be a number > 0"):
        NormClip(value)


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
    for value in (2**63, 0, -1, True, "1", math.nan):
        with pytest.raises(ConfigError, match="max_norm must be a number > 0"):
            positive("max_norm", value)  # type: ignore[arg-type]

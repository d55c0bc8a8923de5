"""Groups of slots, and what a gradient that is not finite does to the step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.config.settings import ClipGroup
from colonnade.errors import CheckpointError, ConfigError, GradientError
from colonnade.optim.clip import ClipPolicy, NormClip, SkipOnSpike, ZClip, _Masks
from colonnade.optim.norm import Norms
from tests.optim.watch import Operations


def norms(*values: float, p: float = 2.0) -> Norms:
    tensor = torch.tensor(values, dtype=torch.float64)
    return Norms(p, tensor if math.isinf(p) else tensor**p, tensor.isfinite().logical_not().double())


def test_one_group_by_default() -> None:
    decision = ClipPolicy(NormClip(1.0)).decide(norms(4.0))
    assert decision.norm.item() == 4.0
    assert decision.divisor.tolist() == [4.0 + 1e-6]
    assert decision.found_inf.item() == 0.0
    assert decision.found_inf.dtype == torch.float32


def test_several_slots_of_one_group_get_a_divisor_each() -> None:
    decision = ClipPolicy(NormClip(1.0), group_of=(0, 0)).decide(norms(3.0, 4.0))
    assert decision.divisor.tolist() == [5.0 + 1e-6] * 2


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_groups(p: float) -> None:
    groups = [
        ClipGroup("body"),
        ClipGroup("head", max_norm=0.5, counted=False),
        ClipGroup("muon", counted=True, clipped=False),
        ClipGroup("free", counted=False, clipped=False),
    ]
    policy = ClipPolicy(NormClip(1.0), groups, [0, 1, 2, 3, 0])
    decision = policy.decide(norms(3.0, 2.0, 4.0, 100.0, 1.0, p=p))
    total = torch.linalg.vector_norm(torch.tensor([3.0, 4.0, 1.0], dtype=torch.float64), p).item()
    assert decision.norm.item() == pytest.approx(total)
    body = total + 1e-6
    assert decision.divisor.tolist() == pytest.approx([body, (2.0 + 1e-6) / 0.5, 1.0, 1.0, body])
    members = torch.tensor([[at == group for at in policy.group_of] for group in range(len(groups))])
    body_norm = torch.linalg.vector_norm(torch.tensor([3.0, 1.0], dtype=torch.float64), p).item()
    assert decision.norms.over(members).tolist() == pytest.approx([body_norm, 2.0, 4.0, 100.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_skip_is_the_default(bad: float) -> None:
    groups = [ClipGroup("body"), ClipGroup("free", counted=False, clipped=False)]
    decision = ClipPolicy(NormClip(1.0), groups, [0, 1]).decide(norms(1.0, bad))
    assert decision.found_inf.item() == 1.0  # also from a group that is not counted
    assert decision.norm.item() == 1.0
    alone = ClipPolicy(NormClip(1.0)).decide(norms(bad))
    assert alone.found_inf.item() == 1.0
    assert str(alone.norm.item()) == str(bad)


def test_propagate_uses_the_gradient_as_torch_does() -> None:
    decision = ClipPolicy(NormClip(1.0), nonfinite="propagate").decide(norms(math.nan))
    assert decision.found_inf.item() == 0.0
    assert math.isnan(decision.divisor.item())


def test_raise_comes_one_step_later_and_names_the_slot() -> None:
    policy = ClipPolicy(NormClip(1.0), group_of=[0, 0], names=["embed", "head"], nonfinite="raise")
    assert policy.decide(norms(1.0, 2.0)).found_inf.item() == 0.0
    assert policy.decide(norms(1.0, math.nan)).found_inf.item() == 1.0
    with pytest.raises(GradientError, match="not finite, in: head"):
        policy.decide(norms(1.0, 1.0))
    policy.decide(norms(1.0, 1.0))
    policy.raise_pending()


def test_numbers_of_a_device_are_read_when_the_second_step_after_has_come() -> None:
    policy = ClipPolicy(NormClip(1.0), nonfinite="raise")
    reports: Any = policy._reports
    reports.append(SimpleNamespace(on_host=False, read=lambda: [1.0]))
    policy.raise_pending()  # it may still be on its way
    reports.append(SimpleNamespace(on_host=False, read=lambda: [1.0]))
    with pytest.raises(GradientError, match="not finite, in: all"):
        policy.raise_pending()
    reports.append(SimpleNamespace(on_host=False, read=lambda: [1.0]))
    policy.raise_pending()  # what was pending beside the one that was told is forgotten
    reports.extend(SimpleNamespace(on_host=False, read=lambda: [0.0]) for _ in range(2))
    with pytest.raises(GradientError, match="not finite, in: all"):
        policy.raise_pending()


def test_a_group_that_is_alone_has_its_own_limit_too() -> None:
    decision = ClipPolicy(NormClip(1.0), [ClipGroup("head", max_norm=0.5)]).decide(norms(4.0))
    assert decision.divisor.tolist() == [(4.0 + 1e-6) / 0.5]


def test_groups_are_alike_whatever_names_they_fit() -> None:
    assert ClipGroup("a", params=("x.*",)) == ClipGroup("a")
    assert ClipGroup("a", clipped=False) != ClipGroup("a")


def test_masks_move_to_another_device_and_stay_where_they_are_otherwise() -> None:
    masks = _Masks([ClipGroup("a"), ClipGroup("b", max_norm=0.5)], [0, 1])
    own = masks.own
    assert masks.to(torch.device("cpu")).own is own
    moved = masks.to(torch.device("meta"))
    assert {value.device.type for value in vars(moved).values() if isinstance(value, torch.Tensor)} == {"meta"}


def test_a_method_may_skip_too() -> None:
    for nonfinite in ("propagate", "skip"):
        policy = ClipPolicy(SkipOnSpike(bound=10.0), nonfinite=nonfinite)  # type: ignore[arg-type]
        assert policy.decide(norms(11.0)).found_inf.item() == 1.0
        assert policy.decide(norms(9.0)).found_inf.item() == 0.0
        assert policy.decide(norms(math.nan)).found_inf.item() == float(nonfinite == "skip")


def test_history_goes_through_a_checkpoint() -> None:
    policy = ClipPolicy(ZClip(warmup=2))
    for value in (1.0, 1.1, 1.2):
        policy.decide(norms(value))
    other = ClipPolicy(ZClip(warmup=2))
    other.load_state_dict(policy.state_dict())
    assert torch.equal(policy.decide(norms(9.0)).divisor, other.decide(norms(9.0)).divisor)
    with pytest.raises(CheckpointError, match="the clip state was saved by ZClip, but this run clips with NormClip"):
        ClipPolicy(NormClip(1.0)).load_state_dict(policy.state_dict())


def test_nothing_is_read_on_the_host() -> None:
    groups = [ClipGroup("body"), ClipGroup("head", max_norm=0.5)]
    policy = ClipPolicy(NormClip(1.0), groups, [0, 1])
    measured = norms(1.0, 2.0)
    with Operations() as watched:
        policy.decide(measured)
    assert watched.host_reads == 0


def test_wrong_settings_are_said_at_once() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'raise'"):
        ClipPolicy(NormClip(1.0), nonfinite="rais")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="more than once: a"):
        ClipPolicy(NormClip(1.0), [ClipGroup("a"), ClipGroup("a")], [0])
    with pytest.raises(ConfigError, match="from 0 to 0"):
        ClipPolicy(NormClip(1.0), group_of=[0, 1])
    with pytest.raises(ConfigError, match="from 0 to 0"):
        ClipPolicy(NormClip(1.0), group_of=[-1])
    with pytest.raises(ConfigError, match="from 0 to 0"):
        ClipPolicy(NormClip(1.0), group_of=[])
    with pytest.raises(ConfigError, match="as many names"):
        ClipPolicy(NormClip(1.0), group_of=[0, 0], names=["a"])
    with pytest.raises(ConfigError, match="max_norm of clip group 'a'"):
        ClipGroup("a", max_norm=0)

"""Groups of slots, and what a gradient that is not finite does to the step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.config.settings import ClipGroup, ClipSettings
from colonnade.errors import CheckpointError, ConfigError, GradientError
from colonnade.optim.clip import ClipPolicy, NormClip, SkipOnSpike, ZClip, _Masks
from colonnade.optim.norm import Norms


def norms(*values: float, p: float = 2.0) -> Norms:
    tensor = torch.tensor(values, dtype=torch.float64)
    return Norms(p, tensor if math.isinf(p) else tensor**p, tensor.isfinite().logical_not().double())


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


def test_wrong_settings_are_said_at_once() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'raise'"):
        ClipPolicy(NormClip(1.0), nonfinite="rais")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the same name: a"):
        ClipPolicy(NormClip(1.0), [ClipGroup("a"), ClipGroup("a")], [0])
    with pytest.raises(ConfigError, match="are 0 to 0"):
        ClipPolicy(NormClip(1.0), group_of=[0, 1])
    with pytest.raises(ConfigError, match="are 0 to 0"):
        ClipPolicy(NormClip(1.0), group_of=[-1])
    with pytest.raises(ConfigError, match="are 0 to 0"):
        ClipPolicy(NormClip(1.0), group_of=[])
    with pytest.raises(ConfigError, match="2 norms, but 1 names"):
        ClipPolicy(NormClip(1.0), group_of=[0, 0], names=["a"])
    with pytest.raises(ConfigError, match="max_norm of clip group 'a'"):
        ClipGroup("a", max_norm=0)


# -- clip settings ----------------------------------------------------------------------------------------
# `clip_grad_norm` of a config: every form of it, and which parameters are in which group.


HEAD = {"head": {"params": "head.*", "max_norm": 2}}
HEAD_GROUP = (ClipGroup("head", ("head.*",), 2.0),)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (0, None),
        ({"max_norm": 0}, None),
        (1, ClipSettings(max_norm=1.0)),
        ({"max_norm": 1}, ClipSettings(max_norm=1.0)),
        ({"max_norm": 1, "norm_type": 3}, ClipSettings(max_norm=1.0, norm_type=3.0)),
        ({"max_norm": 1, "nonfinite": "raise"}, ClipSettings(max_norm=1.0, nonfinite="raise")),
        ({"max_norm": 1, "per": "layer"}, ClipSettings(max_norm=1.0, per="layer")),
        ({"max_norm": 1, "report": "layer"}, ClipSettings(max_norm=1.0, report="layer")),
        ({"groups": HEAD}, ClipSettings(max_norm=math.inf, groups=HEAD_GROUP)),
        ({"max_norm": 0, "groups": HEAD}, ClipSettings(max_norm=math.inf, groups=HEAD_GROUP)),
        ({"max_norm": 5, "groups": HEAD}, ClipSettings(max_norm=5.0, groups=HEAD_GROUP)),
        ({"method": "adagc"}, ClipSettings(method="adagc", per="parameter")),
        ({"method": "adagc", "per": "group"}, ClipSettings(method="adagc", per="group")),
        ({"method": {"type": "zscore", "factor": 3}}, ClipSettings(method="zscore", options={"factor": 3})),
        ({"method": {"max_norm": 4}}, ClipSettings(max_norm=4)),
    ],
    ids=str,
)
def test_forms(given, expected):
    assert ClipSettings.read(given) == expected


def test_a_group_says_what_it_is_and_is_not():
    entries = {"a": {"params": ["x", "y.*"], "counted": False}, "b": {"params": "*", "clipped": False}}
    settings = ClipSettings.read({"max_norm": 1, "groups": entries})
    assert settings is not None
    assert settings.groups == (ClipGroup("a", ("x", "y.*"), counted=False), ClipGroup("b", ("*",), clipped=False))
    assert [group.params for group in settings.groups] == [("x", "y.*"), ("*",)]
    assert [group.name for group in settings.clip_groups()] == ["a", "b", "rest"]
    assert [group.name for group in ClipSettings().clip_groups()] == ["all"]


def test_a_parameter_is_in_the_first_group_that_names_it_or_in_the_rest():
    entries = {"a": {"params": ["x", "y.*"]}, "b": {"params": "y.z"}, "c": {"params": "w"}}
    settings = ClipSettings.read({"max_norm": 1, "groups": entries})
    assert settings is not None
    assert [settings.group_of(name) for name in ("x", "y.z", "w", "v", "xx")] == [0, 0, 2, 3, 3]


def policy(settings: ClipSettings | None) -> ClipPolicy:
    assert settings is not None
    return ClipPolicy.from_settings(settings, (0,), ("all",))


def test_a_policy_has_the_method_the_groups_and_the_rules_of_its_settings():
    entries = {"head": {"params": "head.*", "max_norm": 2}}
    settings = ClipSettings.read({"max_norm": 5, "groups": entries, "nonfinite": "raise", "per": "layer"})
    assert settings is not None
    made = ClipPolicy.from_settings(settings, (1, 0), ("body", "head"))
    assert isinstance(made.method, NormClip)
    assert (made.method.max_norm, made.nonfinite, made.per_slot, made.names) == (5.0, "raise", True, ("body", "head"))
    assert ([group.name for group in made.groups], made.group_of) == (["head", "rest"], (1, 0))
    assert policy(ClipSettings(max_norm=3.0)).per_slot is False


def test_options_that_the_method_does_not_take_are_refused():
    with pytest.raises(ConfigError, match="the method 'norm' of clip_grad_norm does not accept the given options"):
        policy(ClipSettings(max_norm=1.0, options={"no": 1}))


@pytest.mark.parametrize("method", ["zclip", "percentile", "skip_on_spike"])
@pytest.mark.parametrize("per", ["layer", "parameter"])
def test_methods_for_the_total_norm_refuse_to_clip_each_by_its_own(method, per):
    settings = ClipSettings.read({"method": method, "per": per})
    assert settings is not None
    with pytest.raises(ConfigError, match=rf"a single limit for the total norm.* Use report='{per}'"):
        policy(settings)
    assert policy(ClipSettings.read({"method": method, "report": per})).per_slot is False


def test_a_report_of_other_parts_than_those_that_are_clipped_is_refused():
    with pytest.raises(ConfigError, match="Remove report"):
        ClipSettings.read({"max_norm": 1, "per": "layer", "report": "parameter"})
    assert ClipSettings.read({"max_norm": 1, "per": "layer", "report": "layer"}) is not None

"""`clip_grad_norm` of a config: every form of it, and which parameters are in which group."""

from __future__ import annotations

import math

import pytest

from colonnade.config.settings import ClipGroup, ClipSettings
from colonnade.errors import ConfigError
from colonnade.optim.clip import ClipPolicy, NormClip

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
    assert settings.groups == (
        ClipGroup("a", ("x", "y.*"), counted=False),
        ClipGroup("b", ("*",), clipped=False),
    )
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
    with pytest.raises(ConfigError, match="method 'norm' does not accept these options"):
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

"""Initializers of the user's own: every form they may take, and every way they can be wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from colonnade._launch import launch
from colonnade.constants import INITIALIZER_MAPPING
from colonnade.context.dist_group_initializer import ProcessGroupInitializer
from colonnade.context.layout_builder import build_layout, run_initializers
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError
from colonnade.registry import DIST_GROUP_INITIALIZER
from colonnade.testing import run_world

MINE = ParallelMode.register("BUILD_MINE", "build_mine")
PAIRS = [[0, 1], [2, 3]]


@DIST_GROUP_INITIALIZER.register_module
class ByReturn(ProcessGroupInitializer):
    """Returns whatever the config says; passes three of the six arguments on."""

    def __init__(self, rank, world_size, config, data_size, pipeline_size, tensor_size, gives=None):
        super().__init__(rank, world_size, config)
        self.six = (rank, world_size, config, data_size, pipeline_size, tensor_size)
        self.gives = gives
        SEEN.append(self.six)

    def init_parallel_groups(self):
        return eval(self.gives) if self.gives else None


INITIALIZER_MAPPING["build_mine"] = "ByReturn"


SEEN: list[tuple] = []


def config(gives, size=2):
    return {"parallel": {"tensor": {"size": size, "mode": "build_mine", "gives": gives}}}


@pytest.mark.parametrize(
    "gives",
    ["{MINE: PAIRS}", "{'build_mine': PAIRS}", "PAIRS", "{MINE: ([0, 1], (2, 3))}", "{MINE: [range(2), [2, 3]]}"],
)
def test_a_dict_or_a_list_of_rank_lists_is_taken(gives):
    assert build_layout(config(gives), 4).groups(MINE) == PAIRS


def test_six_ranks_in_a_list_are_a_group_and_six_things_in_a_tuple_are_groups_that_exist():
    assert build_layout(config("[[0, 1, 2, 3, 4, 5]]"), 6).groups(MINE) == [[0, 1, 2, 3, 4, 5]]
    assert build_layout(config("((0, 1), (2, 3))"), 4).groups(MINE) == PAIRS


def test_an_initializer_is_given_the_rank_and_all_sizes():
    chosen = {"parallel": {"pipeline": 2, **config(None)["parallel"]}}
    build_layout(chosen, 8)
    assert SEEN[-1] == (0, 8, chosen, 2, 2, 2)
    run_initializers(chosen, 8, 5)
    assert SEEN[-1][0] == 5


class Plain:
    """An initializer that is derived from nothing, and returns or raises what it is told to."""

    gives: object = None

    def __init__(self, *six):
        self.world_size = six[1]

    def init_parallel_groups(self):
        if isinstance(self.gives, Exception):
            raise self.gives
        return self.gives


class ByHand:
    """One that creates its groups itself."""

    def __init__(self, *six):
        pass

    def init_dist_group(self):
        pass


class Neither(ProcessGroupInitializer):
    pass


@pytest.fixture
def named(monkeypatch):
    for made in (Plain, ByHand, Neither):
        DIST_GROUP_INITIALIZER.register_module(made)
        monkeypatch.setitem(INITIALIZER_MAPPING, made.__name__, made.__name__)
    yield
    for made in (Plain, ByHand, Neither):
        DIST_GROUP_INITIALIZER.remove(made.__name__)


@pytest.mark.parametrize(
    ("mode", "gives", "message"),
    [
        ("ByHand", None, "ByHand (mode 'ByHand') creates process groups itself"),
        ("Neither", None, "Neither defines neither init_parallel_groups() nor init_dist_group()"),
        ("Plain", RuntimeError("Default process group has not been initialized"), "creates process groups itself"),
        ("Plain", ValueError("the default process group has not been initialized"), "creates process groups itself"),
        ("Plain", ValueError("something else"), "something else"),
        ("Plain", {MINE: [[0, 1]]}, "miss ranks 2, 3 of 4"),
    ],
)
def test_initializers_that_need_a_running_world_or_do_not_fit(named, monkeypatch, mode, gives, message):
    monkeypatch.setattr(Plain, "gives", gives)
    chosen = {"parallel": {"tensor": {"size": 2, "mode": mode}}}
    with pytest.raises((LayoutError, ValueError)) as error:
        build_layout(chosen, 4)
    assert message in str(error.value)
    if "creates" in message:
        assert [each.mode for each in run_initializers(chosen, 4, 0).waiting] == [mode]
        with pytest.raises(LayoutError, match="creates process groups itself"):
            ParallelContext().simulate(chosen, 4, 0)


@pytest.mark.parametrize("key", ["Build_Large", "build_large"])
def test_the_initializer_of_an_axis_may_be_named_in_small_letters(monkeypatch, key):
    large = ParallelMode.register("BUILD_LARGE", "Build_Large")
    monkeypatch.setitem(INITIALIZER_MAPPING, key, "ByReturn")
    asked = len(SEEN)
    layout = build_layout({"parallel": {"mine": {"size": 2, "mode": "Build_Large"}}}, 4)
    assert len(SEEN) == asked + 1
    assert layout.groups(large) == PAIRS


def test_arguments_of_an_axis_without_initializer_are_refused():
    ParallelMode.register("BUILD_BARE", "build_bare")
    assert build_layout({"parallel": {"mine": {"size": 2, "mode": "build_bare"}}}, 4).has(ParallelMode("build_bare"))
    with pytest.raises(LayoutError, match="'build_bare' is not in INITIALIZER_MAPPING"):
        build_layout({"parallel": {"mine": {"size": 2, "mode": "build_bare", "depth": 1}}}, 4)


def test_none_adds_nothing():
    assert not build_layout(config(None), 4).has(MINE)


@pytest.mark.parametrize(
    ("gives", "part"),
    [
        ("{MINE: [[0, 1], [1, 2, 3]]}", "overlap: rank 1 is in [0, 1] and in [1, 2, 3]"),
        ("{MINE: [[0, 1], [2]]}", "do not contain rank 3 of 4"),
        ("{MINE: [[0, 1], [2, 4]]}", "name rank 4 in [2, 4], but the world has ranks 0 to 3"),
        ("{MINE: [[0, 1], [3, 2]]}", "not in ascending order: [3, 2]"),
        ("{MINE: [[0, 1], [2, '3']]}", "a rank is an integer"),
        ("{MINE: [[0, True], [2, 3]]}", "hold True in [0, True]: a rank is an integer"),
        ("{MINE: [[-1, 0], [1, 2, 3]]}", "name rank -1 in [-1, 0], but the world has ranks 0 to 3"),
        ("{MINE: [[0, 1], 2]}", "Return a list of groups for each mode"),
        ("[[0, 1], 2]", "return {mode: [[ranks], ...]}"),
        ("[]", "miss ranks 0, 1, 2, 3 of 4"),
        ("(1, 2, 3, 4, 5, 6)", "creates process groups itself"),
        ("[(1, 2, 3, 4, 5, 6)]", "creates process groups itself"),
        ("[(1, 2, 3, 4, 5, 6), [0, 1]]", "name rank 4 in [1, 2, 3, 4, 5, 6]"),
        ("(1, 2, 3, 4, 5)", "return {mode: [[ranks], ...]}"),
        ("(1, 2, 3, 4, 5, 6, 7)", "return {mode: [[ranks], ...]}"),
        ("{MINE: 3}", "Return a list of groups for each mode"),
        ("7", "return {mode: [[ranks], ...]}"),
        ("{'nowhere': PAIRS}", "'nowhere' is not a parallel mode"),
        ("{ParallelMode.TENSOR: [[0, 2], [1, 3]]}", "define different groups for the one mode ParallelMode.TENSOR"),
    ],
)
def test_groups_that_are_wrong_are_named(gives, part):
    with pytest.raises(LayoutError) as error:
        build_layout(config(gives), 4)
    assert part in str(error.value)
    assert "ByReturn" in str(error.value) or "nowhere" in str(error.value)


def test_missing_ranks_are_allowed_where_the_initializer_says_so(monkeypatch):
    monkeypatch.setattr(ByReturn, "whole_world", False)
    layout = build_layout(config("{MINE: [[0, 1]]}"), 4)
    assert layout.has(MINE, 1)
    assert not layout.has(MINE, 2)


def test_an_argument_that_is_missing_from_the_config_is_named():
    class Needy(ProcessGroupInitializer):
        def __init__(self, a, b, c, d, e, f, arg1):
            super().__init__(a, b, c, d, e, f)

    DIST_GROUP_INITIALIZER.register_module(Needy)
    INITIALIZER_MAPPING["needy"] = "Needy"
    try:
        with pytest.raises(LayoutError, match="arg1"):
            build_layout({"parallel": {"tensor": {"size": 2, "mode": "needy"}}}, 2)
    finally:
        DIST_GROUP_INITIALIZER.remove("Needy")
        del INITIALIZER_MAPPING["needy"]


def test_an_axis_of_ones_own_makes_the_world_larger():
    layout = build_layout({"parallel": {"tensor": 2, "mine": {"size": 2, "mode": "build_mine"}}}, 8)
    assert layout.groups(MINE) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups(ParallelMode.DATA) == [[0, 4], [1, 5], [2, 6], [3, 7]]


class DependsOnItsRank(ProcessGroupInitializer):
    def init_parallel_groups(self):
        return {MINE: PAIRS if self.rank < 3 else [[0, 2], [1, 3]]}


class Uneven(ProcessGroupInitializer):
    def init_parallel_groups(self):
        return {MINE: [[0, 1, 2], [3]]}


def _launch_with(initializer: str) -> object:
    DIST_GROUP_INITIALIZER.register_module(globals()[initializer])
    INITIALIZER_MAPPING["by_hand"] = initializer
    created, original = [], dist.new_group
    dist.new_group = lambda ranks, *rest, **named: created.append(ranks) or original(ranks, *rest, **named)
    try:
        with launch(
            {"parallel": {"tensor": {"size": 2, "mode": "by_hand"}}}, context=ParallelContext(), verbose=False
        ) as gpc:
            dist.new_group = original
            value = torch.tensor([float(gpc.get_global_rank())])
            dist.all_reduce(value, group=gpc.get_group(MINE))
            return value.item(), gpc.layout.groups(MINE), created
    except LayoutError as error:
        return str(error)


def test_groups_that_are_no_product_of_axes_are_created_by_all_ranks_together():
    values = run_world(4, _launch_with, "Uneven", backend=None).values
    assert [total for total, *_ in values] == [3.0, 3.0, 3.0, 3.0]
    assert all(groups == [[0, 1, 2], [3]] for _, groups, _ in values)
    (created,) = {repr(created) for *_, created in values}
    assert "[0, 1, 2]" in created


def test_ranks_that_disagree_are_told_so_on_every_rank():
    for message in run_world(4, _launch_with, "DependsOnItsRank").values:
        assert "do not agree on the groups of mode 'build_mine'" in message
        assert "differing from rank 0: 3" in message

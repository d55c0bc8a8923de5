"""ParallelMode: an enum that can be extended."""

from __future__ import annotations

import copy
import enum
import pickle

import pytest

from colonnade.context.parallel_mode import ParallelMode, mode_of
from colonnade.errors import LayoutError

ANCESTOR = {
    "GLOBAL": "global",
    "DATA": "data",
    "MODEL": "model",
    "PIPELINE": "pipe",
    "TENSOR": "tensor",
    "SEQUENCE": "sequence",
    "SEQUENCE_DP": "sequence_dp",
    "PARALLEL_1D": "1d",
    "PARALLEL_2D_ROW": "2d_row",
    "PARALLEL_2D_COL": "2d_col",
    "PARALLEL_3D_INPUT": "3d_input",
    "PARALLEL_3D_WEIGHT": "3d_weight",
    "PARALLEL_3D_OUTPUT": "3d_output",
    "PARALLEL_3D_INPUT_X_WEIGHT": "3d_input_x_weight",
    "PARALLEL_3D_OUTPUT_X_WEIGHT": "3d_output_x_weight",
    "PARALLEL_2P5D_ROW": "2p5d_row",
    "PARALLEL_2P5D_COL": "2p5d_col",
    "PARALLEL_2P5D_DEP": "2p5d_dep",
    "PARALLEL_2P5D_XZ": "2p5d_xz",
    "MOE_DATA": "moe_data",
    "MOE_MODEL": "moe_model",
}


@pytest.mark.parametrize(("name", "value"), ANCESTOR.items())
def test_every_mode_of_the_ancestor_has_its_value(name, value):
    mode = getattr(ParallelMode, name)
    assert mode.value == value
    assert mode is ParallelMode(value) is ParallelMode[name] is ParallelMode(mode)


def test_members_are_singletons_through_pickle_and_copy():
    for mode in ParallelMode:
        assert pickle.loads(pickle.dumps(mode)) is mode
        assert copy.deepcopy(mode) is copy.copy(mode) is mode
        assert {mode: 1}[ParallelMode(mode.value)] == 1


def test_a_registered_mode_is_as_good_as_a_built_in_one():
    mine = ParallelMode.register("TEST_MINE", "test_mine", data="distinct")
    assert ParallelMode.TEST_MINE is mine is ParallelMode("test_mine")
    assert mine in ParallelMode
    assert "test_mine" in ParallelMode
    assert mine in list(ParallelMode)
    assert mine.data == "distinct"
    assert repr(mine) == "<ParallelMode.TEST_MINE: 'test_mine'>"
    assert str(mine) == "ParallelMode.TEST_MINE"
    assert ParallelMode.register("TEST_MINE", "test_mine", data="distinct") is mine


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("DATA", "mine"), "conflicts with the existing <ParallelMode.DATA: 'data'>"),
        (("MINE2", "data"), "conflicts with the existing <ParallelMode.DATA: 'data'>"),
        (("not a name", "x"), "identifier"),
        (("MINE3", ""), "value is a string"),
        (("MINE3", "mine3", "both"), "data='both'"),
        (("register", "x"), "has an attribute of this name"),
        (("mro", "x"), "has an attribute of this name"),
        (("_MINE", "x"), "identifier"),
        ((7, "x"), "identifier"),
        (("MINE3", 5), "value is a string"),
    ],
)
def test_a_bad_registration_is_refused(arguments, part):
    with pytest.raises(LayoutError) as error:
        ParallelMode.register(*arguments)
    assert part in str(error.value)


def test_an_unknown_value_lists_the_known_ones_and_the_nearest():
    with pytest.raises(LayoutError) as error:
        ParallelMode("tensr")
    assert "Did you mean 'tensor'?" in str(error.value)
    assert "ParallelMode.register" in str(error.value)
    with pytest.raises(AttributeError, match="Did you mean 'PIPELINE'"):
        _ = ParallelMode.PIPELNE


def test_what_is_no_mode():
    class Numbers(enum.Enum):
        ONE = 1

    for value in ("nowhere", 7, ["data"], Numbers.ONE):
        with pytest.raises(LayoutError, match="is not a parallel mode; known values: global, "):
            ParallelMode(value)
    assert "nowhere" not in ParallelMode
    assert 7 not in ParallelMode
    with pytest.raises(KeyError, match="no parallel mode named 'NOWHERE'"):
        ParallelMode["NOWHERE"]
    with pytest.raises(AttributeError, match="has no member '_NOWHERE'"):
        _ = ParallelMode._NOWHERE


def test_members_are_counted_and_found_by_whatever_names_them():
    assert len(ParallelMode) == len(list(ParallelMode)) >= len(ANCESTOR)
    assert mode_of("tensor") is mode_of(ParallelMode.TENSOR) is ParallelMode.TENSOR


def test_members_are_constant():
    with pytest.raises(AttributeError, match="constant"):
        ParallelMode.DATA.data = "same"


def test_a_users_own_enum_declares_its_new_members():
    class Theirs(enum.Enum):
        DATA = "data"
        TEST_NEW = "test_new"

    assert ParallelMode(Theirs.DATA) is ParallelMode.DATA
    assert ParallelMode(Theirs.TEST_NEW) is ParallelMode.TEST_NEW

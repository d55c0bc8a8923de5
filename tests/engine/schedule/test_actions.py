"""Actions and tables print, parse and refuse what they cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.engine.schedule.actions import Action, Kind, Table, format_rows, only_forward, parse_table, read_csv
from colonnade.errors import ScheduleError
from tests.engine.schedule.tables import valid_tables


@given(st.integers(0, 10**6), st.sampled_from(Kind), st.integers(0, 10**6))
def test_an_action_parses_back(stage: int, kind: Kind, micro_batch: int) -> None:
    action = Action(stage, kind, micro_batch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Kind.FORWARD, 0)),
        ("1B3", Action(1, Kind.BACKWARD, 3)),
        ("0I2", Action(0, Kind.INPUT, 2)),
        (" 10W12 ", Action(10, Kind.WEIGHT, 12)),
        ("0SEND_F1", Action(0, Kind.SEND_FORWARD, 1)),
    ],
)
def test_the_written_form(text: str, action: Action) -> None:
    assert Action.parse(text) == action
    assert str(action) == text.strip()


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0 2F1", "-1F0", "2f0"])
def test_what_is_no_action_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ScheduleError, match="such as 2F0"):
        Action.parse(text)


@given(valid_tables())
def test_tables_go_through_rows(table: Table) -> None:
    assert parse_table(format_rows(table)) == table


def test_rows_may_be_strings_lists_or_a_mapping_with_waits() -> None:
    expected = {0: [Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)], 1: [Action(1, Kind.FORWARD, 0)]}
    assert parse_table(["0F0, 0B0", "1F0"]) == expected
    assert parse_table([["0F0", None, "", "0B0"], [Action(1, Kind.FORWARD, 0)]]) == expected
    assert parse_table({1: "1F0", 0: "0F0  0B0"}) == expected


def test_words_of_torch_tables_are_understood() -> None:
    assert format_rows(parse_table(["0F1 (0F2;3B0)OVERLAP_F_B 0REDUCE_GRAD"])) == ["0F1 0F2 3B0"]


@pytest.mark.parametrize("word", ["0UNSHARD", "3RESHARD"])
def test_what_a_table_cannot_do_is_refused_by_name(word: str) -> None:
    with pytest.raises(ScheduleError, match=f"{word} is not supported in a table.*ZeRO stage 3"):
        parse_table([f"0F0 {word} 0B0"])


@pytest.mark.parametrize("rows", [{}, {1: "1F0"}, {0: "0F0", 2: "1F0"}])
def test_a_missing_row_is_refused(rows: dict[int, str]) -> None:
    with pytest.raises(ScheduleError, match="one row for each pipeline rank"):
        parse_table(rows)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"gone\.csv.*cannot be read"):
        read_csv(tmp_path / "gone.csv")
    bad = tmp_path / "bad.csv"
    bad.write_text("0F0,0Q0\n")
    with pytest.raises(ScheduleError, match=r"bad\.csv.*'0Q0' is not an action"):
        read_csv(bad)
    good = tmp_path / "good.csv"
    good.write_text("0F0,,0B0\n")
    assert format_rows(read_csv(good)) == ["0F0 0B0"]


def test_evaluation_keeps_the_forward_passes_alone() -> None:
    assert format_rows(only_forward(parse_table(["0F1 0F0 0I1 0B0 0W1"]))) == ["0F1 0F0"]

"""The table, the sentences and the JSON of a report."""

from __future__ import annotations

import json
from math import inf

from colonnade.proof.compare import Finding, Report, Row

HEALTHY = [Row("gradient", f"layer.{at}", 0, "equal", at / 10, 1e-9) for at in range(5)]
WRONG = [
    Row("gradient", "a", 0, "differs", 5.0, 1e-9, (1,)),
    Row("gradient", "b", 0, "missing", inf, 1e-9, (), "no rank"),
]


def test_healthy_rows_are_one_line_and_the_worst_is_first():
    lines = str(Report((), (*HEALTHY, *WRONG))).splitlines()
    assert lines[0] == "does NOT match a single-process run"
    assert [line.split()[2] for line in lines if line.startswith("gradient")] == ["b", "a", "5"]
    assert "0.4" in lines[-1]


def test_findings_are_sentences_before_the_table():
    report = Report((Finding("not-reduced", ("a",), 0, "the gradient of a is this rank's own."),), (*HEALTHY, *WRONG))
    assert str(report).splitlines()[1] == "1. not-reduced (step 0): the gradient of a is this rank's own."
    assert report.causes == ["not-reduced"]
    assert not report.ok


def test_a_healthy_report():
    report = Report((), HEALTHY, ("dropout was set to 0",))
    assert report.ok
    assert str(report).splitlines()[0] == "matches a single-process run"
    assert str(report).splitlines()[-1] == "note: dropout was set to 0"


def test_json_is_plain():
    whole = json.loads(Report((Finding("unknown", ("a",), 0, "it differs."),), WRONG, ("n",)).to_json())
    assert whole["ok"] is False
    assert whole["rows"][1]["error"] == "inf"
    assert whole["findings"][0]["cause"] == "unknown"
    assert whole["notes"] == ["n"]


def test_many_rows_are_counted_not_shown():
    report = Report((), [Row("gradient", f"p{at}", 0, "differs", 2.0, 1.0) for at in range(100)])
    assert "and 60 more that differ" in str(report)

"""Bugs of other frameworks' trackers: cause and place are named, nothing innocent is blamed; without the bug, a script is equal."""

from __future__ import annotations

from functools import cache

import pytest

from colonnade.errors import ParityError
from colonnade.proof.compare import Report
from tests.corpus.field import FIELD, reports
from tests.corpus.scripted import judged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
UNSEEN = {
    "one_stream": "the masks of a single process are those of the ranks; the report has a note",
    "epoch_reset": "a single process is given the batches of the ranks",
    "skip_discarded": "a single process is given the batches of the ranks",
}
"""Bugs that `verify` does not detect."""
RULES = (
    "doubled_buffer",
    "dummy_gradient",
    "half_gradient",
    "padded_moments",
    "state_of_another",
    "moments_dropped",
    "without_sequence",
    "identity_backward",
    "thrown_away",
    "left_over",
    "fan_of_shard",
    "head_axis",
    "lost_flag",
)
"""Those that the first run missed or named wrongly; each has a rule of its own now, without which it fails."""
SEEN = [kind for kind in FIELD if kind not in UNSEEN]


@cache
def all_reports(kinds: tuple[str, ...], *arguments: str) -> dict[str, Report | ParityError]:
    return reports(list(kinds), *arguments)


@pytest.fixture(autouse=True)
def _without_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")


IN_EVERY_RUN = RULES[:3]
"""The rules that `make test` checks; `make long` checks all of them."""


@pytest.mark.parametrize(
    "kind", [*IN_EVERY_RUN, *(pytest.param(kind, marks=pytest.mark.long) for kind in RULES if kind not in IN_EVERY_RUN)]
)
def test_what_the_first_run_missed_is_named(kind: str) -> None:
    report = all_reports(IN_EVERY_RUN if kind in IN_EVERY_RUN else RULES[3:])[kind]
    assert isinstance(report, Report), report
    assert not judged(kind, report, FIELD[kind]), str(report)


@pytest.mark.long
def test_equal_masks_of_shards_are_noted() -> None:
    report = all_reports(("one_stream",))["one_stream"]
    assert isinstance(report, Report)
    assert report.ok, str(report)
    assert any("ranks [0, 1] draw the same random numbers for different shards" in note for note in report.notes)


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in SEEN if kind not in RULES])
def test_cause_and_place_are_named(kind: str) -> None:
    report = all_reports(tuple(one for one in SEEN if one not in RULES))[kind]
    assert isinstance(report, Report), report
    assert not judged(kind, report, FIELD[kind]), str(report)


@pytest.mark.long
@pytest.mark.parametrize("kind", FIELD)
def test_without_the_bug_it_is_equal(kind: str) -> None:
    report = all_reports(tuple(FIELD), "right")[kind]
    assert isinstance(report, Report), report
    assert report.ok, str(report)

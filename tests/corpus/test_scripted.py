"""Scripts with a planted mistake: cause and place are named and nothing innocent is blamed; without it, they are equal."""

from __future__ import annotations

import pytest

from tests.corpus.scripted import PLANTED, judged, verified

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.parametrize("kind", PLANTED)
def test_cause_and_place_are_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    report = verified(kind)
    assert not judged(kind, report), str(report)


@pytest.mark.parametrize("kind", [kind for kind, planted in PLANTED.items() if planted.causes])
def test_without_the_mistake_it_is_equal(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    report = verified(kind, "right")
    assert report.ok, str(report)

"""Which errors follow from the failure of another rank, and where an error began."""

from __future__ import annotations

import pytest

from colonnade.comm.messages import error_of, note_of
from colonnade.engine.schedule.transfer import PeerFailed
from colonnade.errors import ColonnadeError, ConfigError, GradientError, HookError, consequence_of, with_users_line


def raised(*errors: tuple[str, BaseException]) -> BaseException:
    """The last error of a chain: each was raised "from" the one before, or "while" that was handled."""
    chain: BaseException | None = None
    for how, error in errors:
        setattr(error, "__cause__" if how == "from" else "__context__", chain)
        chain = error
    assert chain is not None
    return chain


GLOO = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4242")


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ([("", ValueError("own"))], ("no", ())),
        ([("", GLOO)], ("wholly", ())),
        ([("", RuntimeError("NCCL error: remote process exited or there was a network error"))], ("wholly", ())),
        ([("", RuntimeError("failed to recv, got 0 bytes. Connection was likely closed."))], ("wholly", ())),
        ([("", PeerFailed(3, "why", False))], ("wholly", (3,))),
        ([("", error_of("ConfigError\nwrong", [1, 2], 0))], ("wholly", (1, 2))),
        ([("", GLOO), ("from", HookError("hook X failed"))], ("wholly", ())),
        ([("", ValueError("own")), ("from", HookError("hook X failed"))], ("no", ())),
        ([("", PeerFailed(3, "why", False)), ("while", SystemExit(1))], ("wholly", (3,))),
        ([("", ValueError("own")), ("while", SystemExit(1))], ("no", ())),
        ([("", ValueError("own")), ("while", RuntimeError(str(GLOO)))], ("partly", ())),
        ([("", PeerFailed(3, "why", False)), ("while", ValueError("own"))], ("partly", (3,))),
        ([("", GradientError("rank 1 left during the gradient synchronisation", code="C043"))], ("wholly", ())),
    ],
)
def test_what_follows_from_another_rank_is_told_from_what_does_not(chain, expected):
    assert consequence_of(raised(*chain)) == expected


@pytest.mark.parametrize("kind", ["PeerFailed", "ConfigError", "ValueError"])
def test_every_kind_of_error_can_be_told_to_the_others(kind):
    told = error_of(f"{kind}\na reason [C001]", [4], 2)
    assert str(told).startswith("on rank 4 (this rank is 2): ")
    assert (told.ranks, told.code) == ((4,), "C001")
    assert type(told).__name__ == (kind if kind != "ValueError" else "ColonnadeError")


def fails() -> None:
    raise KeyError("missing")


def test_the_others_are_told_the_users_line_before_the_code_and_not_a_line_of_ours():
    with pytest.raises(KeyError) as caught:
        fails()
    line = f'File "{__file__}", line {fails.__code__.co_firstlineno + 1}, in fails'
    assert with_users_line(caught.value) == f"'missing' ({line})"
    told = ConfigError("a wrapper", code="C001")
    told.__cause__ = caught.value
    assert with_users_line(told) == f"a wrapper ({line}) [C001]"
    assert note_of(told) == f"ConfigError\na wrapper ({line}) [C001]"
    with pytest.raises(ColonnadeError) as ours:
        raise ColonnadeError("of ours", code="C001")
    assert with_users_line(ours.value) == "of ours [C001]"

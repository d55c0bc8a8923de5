"""Detection of hangs: a rank that does not make progress publishes its place in the program, so that a hang is explained within
seconds.

A rank records each change of its place (`WaitWatch.at`, `during`), which costs one assignment. A thread reads the
record about once a second:

1. It sends a heartbeat (`peer_errors.PeerProcesses.heartbeat`).
2. When the rank has been at one place for seconds, the thread writes the place to the store of the world, and removes the note
   when the rank moves on.
3. Of the ranks that wait inside the engine, one becomes the reader: it reads the notes of all ranks, at growing intervals, and
   logs where the other ranks are. The others read one key. A wait of all n ranks thus costs the store n keys at a time, not n * n.

The same notes are used in errors that end a wait (`note_error` adds the places of the other ranks), in calls that all ranks must
make (`together`), and to find ranks that wait for a call that never comes (`places_of_stalled_ranks`). `PhaseClock`
measures the time of a step by phase; the phases change at the same places.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from colonnade.comm.peer_errors import PeerProcesses, lost_peer_error
from colonnade.comm.torch_versions import default_store, timeout_of
from colonnade.constants import FOLLOWS_AFTER
from colonnade.errors import ColonnadeError, GradientError, consequence_of, listed

if TYPE_CHECKING:
    import torch


# --------------------------------------------------------------------------------------------------
# Where the time of a step goes: host timestamps, or device events that are read a step later.
# --------------------------------------------------------------------------------------------------


PHASES = ("data", "forward", "backward", "communication", "clip", "optimizer", "other")
"""The phases of a step. `communication` is exposed time only: waiting for gradient reductions and pipeline messages. Collectives
inside a forward or backward pass count as forward or backward. `other` is hooks, checkpoints and the loop itself."""


class PhaseTimes:
    """The timestamps of the phases of one step. `read` waits only for device work of that step."""

    def __init__(self, stamps: list[tuple[str, Any]], end: Any) -> None:
        self._stamps, self._end = stamps, end

    def read(self) -> dict[str, float]:
        """The duration of each phase in seconds; phases that did not occur are left out."""
        seconds: dict[str, float] = {}
        ends = [stamp for _, stamp in self._stamps[1:]] + [self._end]
        if not isinstance(self._end, float):
            self._end.synchronize()
        for (phase, begin), end in zip(self._stamps, ends, strict=True):
            spent = end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000
            seconds[phase] = seconds.get(phase, 0.0) + spent
        return seconds


class PhaseClock:
    """Records the times at which a step enters its phases.

    On CUDA these are events of the current stream, so the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Start the next step now."""
        self._phase = "other"
        self._stamps = [(self._phase, self._now())]

    def enter(self, phase: str) -> str:
        """Enter a phase: the time from now on counts as `phase`. Returns the previous phase."""
        before = self._phase
        if phase != before:
            self._phase = phase
            self._stamps.append((phase, self._now()))
        return before

    def end_step(self) -> PhaseTimes:
        """End the step and start the next; returns the times, which may still be in flight on the device."""
        end = self._now()
        ended, self._stamps = PhaseTimes(self._stamps, end), [(self._phase, end)]
        return ended

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        import torch  # here, because pages of runs are made without torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


# --------------------------------------------------------------------------------------------------
# The place of a rank, and its note in the store.
# --------------------------------------------------------------------------------------------------


PUBLISH_AFTER = 5.0
"""Seconds at one place after which a rank publishes the place; after one and a half times as long it logs where others are."""

OUTSIDE = "outside the engine"
NEEDS_ALL = (
    "comparing the batches",
    "adding up the counts of the losses",
    "summing the gradients",
    "measuring the norm",
)
"""Places at the end of a step, which a rank leaves only when all ranks have reached the end of that step."""
_AFTER_ERROR = f"{OUTSIDE}, after an error "

_KEY = "colonnade/waits/{}"
"""The place of a rank that stands still, as JSON; empty while it moves. The result of `details` is under `/more`."""
_READER = "colonnade/waits/looks"
"""The waiting rank that reads all notes, with the seconds it had waited when it last did; empty if there is none."""
_NEEDS_ALL = "colonnade/waits/needs all"
"""The last rank that has published a place at the end of a step (`NEEDS_ALL`)."""
_AT_LIMIT = "colonnade/waits/at the limit"
"""Where other ranks are, by the first rank whose wait has timed out: (time, rank, text, ranks)."""
_STALLED = "colonnade/waits/standing"
"""The places of ranks that stand still, by the last rank that has read them: (time, rank, {place: rank})."""

_RANKS_NAMED = 16
_ANSWER_SECONDS = 8.0
"""A store that has not answered for this long is cut off, or its rank is stopped."""
_SEEN_SECONDS = 60.0
_LONGEST = 300
_LIMIT_REACHED = re.compile(
    r"timed? ?out (waiting|after)|wait timeout|operation timed out|did not come to the|collective operation timeout"
    r"|failed to pass monitoredBarrier",
    re.IGNORECASE,
)
_CONNECTION_LOST = re.compile(r"connection (closed|reset|refused)|broken pipe|socket closed", re.IGNORECASE)


def pauses(longest: float) -> Iterator[float]:
    """An endless iterator of pauses between polls, in seconds: each pause is twice the previous one, up to `longest`."""
    pause = 0.0001
    while True:
        yield pause
        pause = min(2 * pause, longest)


class RankPosition(NamedTuple):
    """The place of a rank: its activity, the number of completed steps, and the time of arrival."""

    what: str
    step: int | None
    since: float

    def __str__(self) -> str:
        if self.step is None:
            return self.what
        outside = self.what.startswith(OUTSIDE)
        return f"{self.what} after {self.step} steps" if outside else f"{self.what} of step {self.step}"

    @property
    def waits_for_others(self) -> bool:
        """Whether this place is inside the engine, where a rank waits for other ranks.

        User code outside the engine may take any time.
        """
        return self.what != OUTSIDE and not self.what.startswith(_AFTER_ERROR)


class _During:
    """The context manager of `WaitWatch.during`, as a class because every step enters several."""

    __slots__ = ("_before", "_phase", "_waits", "_what")

    def __init__(self, waits: WaitWatch, what: str, phase: str | None) -> None:
        self._waits, self._what, self._phase, self._before = waits, what, phase, OUTSIDE

    def __enter__(self) -> None:
        before = self._waits._place[0]
        self._before = OUTSIDE if before.startswith(_AFTER_ERROR) else before
        self._waits.at(self._what)
        self._phase = self._waits.enter(self._phase)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._waits.at(self._before)
        self._waits.enter(self._phase)
        if error is not None:
            self._waits.note_error(error, self._what)


class WaitWatch:
    """Records the place of this rank, and logs the places of other ranks if this rank has waited for several seconds.

    One object per launch.
    """

    def __init__(self) -> None:
        self._place: tuple[str, int | None, float]
        self.step: int | None = None
        """The number of steps the engine has completed; None before there is an engine."""
        self.at(OUTSIDE)
        self._processes: PeerProcesses | None = None
        self._world = (0, 1)
        self._store: Any = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._limit = PUBLISH_AFTER
        self.clock: PhaseClock | None = None
        """Measures the phases of a step if set."""
        self.details: Callable[[], Any] | None = None
        """Returns a JSON value that a rank publishes along with its place, if set."""

    def open(self, rank: int, world_size: int, log: Callable[[str], None]) -> None:
        """Start watching in a world that was just joined."""
        if world_size > 1:
            self._world = rank, world_size
            self._processes = PeerProcesses(rank, world_size, default_store())
            default_store().set(_KEY.format(rank), "")
            _watching.append(self)
            self._thread = threading.Thread(
                target=self._watch, args=(rank, world_size, log), name="colonnade waits", daemon=True
            )
            self._thread.start()
            atexit.register(self.close)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self in _watching:
            _watching.remove(self)
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            atexit.unregister(self.close)

    # -- the place of this rank ---------------------------------------------------------------------------------

    def at(self, what: str) -> None:
        """Record that this rank is now at the place `what`."""
        self._place = what, self.step, time.time()

    def begin(self, what: str) -> None:
        """Record the start of building an engine; no step is counted until it is built."""
        self.step = None
        self.at(what)

    def end_step(self) -> None:
        """Count a completed step of the engine. The first call marks the end of building the engine, and counts no step."""
        self.step = 0 if self.step is None else self.step + 1
        self.at(OUTSIDE)

    def during(self, what: str, phase: str | None = None) -> _During:
        """A context manager: inside the block, the place of this rank is `what`, and the time of the block counts as `phase`."""
        return _During(self, what, phase)

    def enter(self, phase: str | None) -> str | None:
        """Enter a phase of the clock if there is one; returns the previous phase, None if nothing has changed."""
        return self.clock.enter(phase) if self.clock is not None and phase is not None else None

    # -- calls that all ranks must make -----------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A context manager for the call `what`, which all ranks must make. The block starts when all ranks have entered it.

        The ranks wait for each other in the store, so that a collective of this call is not matched with another collective of a
        rank that is elsewhere. Raises GradientError if a rank cannot arrive, because it has exited or waits for this rank in a
        step.
        """
        with self.during(f"{OUTSIDE}, in {what}"):
            _, world_size = self._world
            if world_size > 1:
                self._meet(what, world_size)
            yield

    def _meet(self, what: str, world_size: int) -> None:
        """Wait at the store until all ranks have called `what`."""
        store, key, limit = default_store(), f"colonnade/meet/{what}", timeout_of().total_seconds()
        # One counter for all meetings of this name: the n-th is complete at n times the world size.
        count = store.add(key, 1)
        complete = -(-count // world_size) * world_size
        began = time.monotonic()
        check_at = began + 1.5 * PUBLISH_AFTER
        # Ranks of large worlds poll less often, to limit the load on the store.
        polls = pauses(max(0.05, world_size / 20_000))
        while count < complete:
            now = time.monotonic()
            if now > check_at:
                check_at = now + PUBLISH_AFTER / 5
                exited = self._processes.exited(0) if self._processes is not None else []
                if exited:
                    stuck = f"rank {listed(exited)} has exited"
                elif now > began + limit:
                    stuck = f"{complete - count} ranks did not call it within {limit:g} s"
                else:
                    stuck = ""
                # A rank at the end of a step that this rank has not made waits for this rank. That explains more than
                # a timeout does.
                at_end = store.get(_NEEDS_ALL).decode() if not exited and store.check([_NEEDS_ALL]) else ""
                place = stalled_position(int(at_end)) if at_end else None
                step = place.step if place is not None and place.what in NEEDS_ALL else None
                if step is not None and step >= (self.step or 0):
                    stuck = (
                        f"rank {at_end} is {place} and waits for this rank. Make the call on every rank, not "
                        "under a condition such as `if rank == 0`."
                    )
                if stuck:
                    store.add(key, -1)  # as if this rank had not called: the next meeting counts from there
                    raise GradientError(f"{what} must be called on all ranks, but {stuck}", code="C043")
            time.sleep(next(polls))
            count = store.add(key, 0)

    # -- errors that end a wait -----------------------------------------------------------------------------

    def note_error(self, error: BaseException, doing: str) -> None:
        """Publish that an error has ended `doing`, for ranks that wait.

        If other ranks caused the error, raise an error that names them.
        """
        # A closed connection: name the rank that has exited.
        here = RankPosition(doing, self.step, time.time())
        better = lost_peer_error(error, doing, self._processes, lambda: self.where_others_are(here)[0])

        # A timeout: say where the other ranks are. An error that is already a good one only gets a note.
        text = str(error)
        timed_out = isinstance(error, Exception) and _LIMIT_REACHED.search(text) and not _CONNECTION_LOST.search(text)
        code = error.code if isinstance(error, ColonnadeError) else None
        if (better is None or not better.ranks) and timed_out and code != "C117":
            where, ranks = self.where_others_are(RankPosition(doing, self.step, time.time()))
            if where and code is not None:
                error.add_note(f"Where the others are: {where}")
            elif where:
                kind = type(error) if isinstance(error, ColonnadeError) else GradientError
                place = doing if doing.startswith(("in ", "outside")) else f"in {doing}"
                first = text.strip().splitlines()[0]
                better = kind(
                    f"the wait for other ranks {place} has timed out ({first}). Where the others are: {where}",
                    code="C117",
                    ranks=ranks,
                )
        self.at(f"{_AFTER_ERROR}{doing}: {type(error).__name__}: {error}"[:_LONGEST])
        if better is not None:
            raise better from error

    def where_others_are(self, place: RankPosition | None = None) -> tuple[str, list[int]]:
        """Return (the places of all ranks that are elsewhere, as text; these ranks). Both are empty if unknown.

        Takes a few seconds at most.
        """
        if self._processes is None:
            return "", []
        here = place or RankPosition(*self._place)
        rank, world_size = self._world

        # All waits of a world time out at about the same moment. The first rank claims the key, reads all n notes and publishes
        # its answer; the others use that answer for a minute.
        def ask(store: Any) -> tuple[str, list[int]]:
            found = store.get(_AT_LIMIT).decode() if store.check([_AT_LIMIT]) else ""
            claim = json.dumps([time.time(), rank, None, []])
            if not found or time.time() - json.loads(found)[0] > _SEEN_SECONDS:
                current = store.compare_set(_AT_LIMIT, found, claim).decode()
                if current == claim:
                    where, ranks, _ = self._describe_others(rank, world_size, here, store) or ("", [], False)
                    store.set(_AT_LIMIT, json.dumps([time.time(), rank, where, ranks]))
                    return where, ranks
            until = time.monotonic() + _ANSWER_SECONDS / 2
            while time.monotonic() < until:
                _, reader, where, ranks = json.loads(store.get(_AT_LIMIT).decode())
                if where is not None:
                    ranks = sorted({*ranks, reader} - {rank})
                    return (f"{where} (as rank {reader} saw it)" if where and reader != rank else where), ranks
                time.sleep(0.05)
            return "", []

        try:
            store = self._store if self._store is not None else default_store()
            return _ask_store(lambda: ask(store))
        except (RuntimeError, ValueError):
            return self._no_answer(), [0]
        except TimeoutError:
            return self._no_answer(), []

    def _no_answer(self) -> str:
        server = self._processes.server() if self._processes is not None else "rank 0"
        return (
            f"the store of the world, served by {server}, does not answer. There are three possible causes: that "
            "rank is stopped or has exited, its host is dead, or this host is cut off from it"
        )

    # -- the thread -----------------------------------------------------------------------------------------

    def _watch(self, rank: int, world_size: int, log: Callable[[str], None]) -> None:
        """The thread: sends heartbeats, publishes this rank's place, and logs where other ranks are."""
        published: tuple[str, int | None, float] | None = None  # the place in the store
        reader = ""  # the rank that reads all notes, as last seen by this rank: see _READER
        self._limit, due = PUBLISH_AFTER, 0.0  # after `due` seconds at one place this rank looks for the reader
        with contextlib.suppress(RuntimeError, ValueError, TimeoutError):  # the store has gone, or does not answer
            # A connection of its own: the rank may wait for a key for minutes, during which its connection is blocked.
            store = self._store = default_store().clone()

            def read_if_reader(place: RankPosition, before: str, claim: str) -> tuple[str, str | None]:
                """Return (the reader, the text to log). The text is None if another rank is the reader."""
                current = store.compare_set(_READER, before, claim).decode()
                return current, self._explain(rank, world_size, place, store) if current == claim else None

            while not self._stop.wait(min(self._limit / 5, 1.0)):
                now = self._place
                if self._processes is not None:
                    self._processes.heartbeat(store)
                    if not self._processes.knows_rank_0:
                        _ask_store(lambda: self._processes.remember_rank_0(store))  # type: ignore[union-attr]

                # The rank has moved on: its note is removed and, if it was the reader, another rank takes over.
                if published is not None and now is not published:
                    published = None
                    store.set(_KEY.format(rank), "")
                    if reader.startswith(f"{rank} "):
                        _ask_store(partial(store.compare_set, _READER, reader, ""))
                    reader = ""

                # The rank has stood still for seconds: its place is published. The details come first, because the place tells
                # other ranks that both can be read.
                place = RankPosition(*now)
                stood = time.time() - place.since
                if published is None and stood > PUBLISH_AFTER:
                    published, due = now, 1.5 * self._limit
                    if self.details is not None:
                        store.set(f"{_KEY.format(rank)}/more", json.dumps(self.details()))
                    store.set(_KEY.format(rank), json.dumps(place))
                    if place.what in NEEDS_ALL:
                        store.set(_NEEDS_ALL, str(rank))

                # The rank waits for others: one of all waiting ranks reads the notes, so a wait costs the store n keys.
                if published is not None and place.waits_for_others and stood > due:
                    if place.what in NEEDS_ALL:
                        store.set(_NEEDS_ALL, str(rank))
                    # The reader updates its waiting time in the key at every look. If the key stays unchanged (the reader was
                    # killed, for example), the first rank that can replace the value it saw last takes over.
                    claim, before = f"{rank} {stood}", reader
                    reader, text = _ask_store(partial(read_if_reader, place, before, claim))
                    due = 2 * stood if reader == claim else 4 * stood if reader else stood
                    if text is not None and self._place is now:
                        log(text)
                        self._limit = 2 * stood  # ranks that are apart by design are reported only a few times
                        due = 1.5 * self._limit

        # The store does not answer: the world ends, or this host or the host of rank 0 is cut off.
        while not self._stop.wait(min(PUBLISH_AFTER / 5, 1.0)):
            place = RankPosition(*self._place)
            stood = time.time() - place.since
            if place.waits_for_others and stood > 1.5 * PUBLISH_AFTER:
                # One rank of each host logs this: the ranks of a host would all log the same, and cannot coordinate.
                if os.environ.get("LOCAL_RANK", "") in ("", "0") or rank == 1:
                    log(f"rank {rank} has waited {stood:.0f} s: it is {place}. But {self._no_answer()}")
                return

    def _explain(self, rank: int, world_size: int, place: RankPosition, store: Any = None) -> str | None:
        """The text to log: where other ranks are; None if all ranks are at the same place."""
        found = self._describe_others(rank, world_size, place, store if store is not None else default_store())
        if found is None:
            return None
        others, _, is_lost = found
        advice = (
            f"A rank that is dead, stopped or cut off does not arrive: the wait ends with an error after "
            f"{timeout_of().total_seconds() if dist.is_initialized() else 0:g} s (the timeout= of launch)"
            if is_lost
            else "All ranks must make the same calls equally often; for loaders of different lengths, loop over "
            "engine.batches(loader)"
        )
        return f"rank {rank} has waited {time.time() - place.since:.0f} s: it is {place}. Where others are: {others}. {advice}"

    def _describe_others(
        self, rank: int, world_size: int, place: RankPosition, store: Any
    ) -> tuple[str, list[int], bool] | None:
        """(Places of ranks that are elsewhere as text, these ranks, whether one of them cannot arrive); None if all are here."""
        keys = [_KEY.format(other) for other in range(world_size)]
        if not store.check(keys):
            return None
        notes = [json.loads(note.decode() or "null") for note in store.multi_get(keys)]
        stopped = self._processes.not_running(store) if self._processes is not None else {}
        places: dict[tuple[str, str], list[int]] = {}
        for other, note in enumerate(notes):
            found = RankPosition(*note) if note is not None else None
            if other == rank or (other not in stopped and found is not None and found[:2] == place[:2]):
                continue
            where = "going on" if found is None else f"{found} for {time.time() - found.since:.0f} s"
            if other in stopped:
                where = stopped[other] + (f" (it was last {found})" if found is not None else "")
            host = self._processes.host(other, store) if self._processes is not None else ""
            places.setdefault((where, host), []).append(other)
        if not places:
            return None
        lines = (
            f"rank {listed(ranks[:_RANKS_NAMED])}"
            f"{f' and {len(ranks) - _RANKS_NAMED} more' if len(ranks) > _RANKS_NAMED else ''}"
            f"{f' (host {host})' if host else ''}: {where}"
            for (where, host), ranks in places.items()
        )
        return "; ".join(lines), sorted(other for ranks in places.values() for other in ranks), bool(stopped)


def _ask_store(ask: Callable[[], Any]) -> Any:
    """The result of `ask`; raises TimeoutError if the store does not answer, for example because its host is cut off."""
    return call_within(_ANSWER_SECONDS, ask, "no answer")


def call_within(seconds: float, call: Callable[[], Any], complaint: str) -> Any:
    """Run `call` in a thread, and return its result or raise its error.

    After `seconds`, abandon the thread and raise TimeoutError(complaint).
    """
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, name="colonnade asks", daemon=True).start()
    try:
        found, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(complaint) from None
    if error is not None:
        raise error
    return found


# --------------------------------------------------------------------------------------------------
# The notes of other ranks, for checks that look for ranks that wait in vain.
# --------------------------------------------------------------------------------------------------


def stalled_position(rank: int) -> RankPosition | None:
    """The place of a rank that has not moved for `PUBLISH_AFTER` seconds; None if the rank is moving."""
    store, key = default_store(), _KEY.format(rank)
    note = store.get(key) if store.check([key]) else b""
    return RankPosition(*json.loads(note.decode())) if note else None


def stalled_details(rank: int) -> tuple[str, Any] | None:
    """Return (place, `details`) of a rank that has not moved for `PUBLISH_AFTER` seconds; None if the rank is moving."""
    store, key, place = default_store(), _KEY.format(rank), stalled_position(rank)
    if place is None:
        return None
    details = store.get(f"{key}/more") if store.check([f"{key}/more"]) else b"null"
    return str(place), json.loads(details.decode())


def places_of_stalled_ranks(here: int, world_size: int) -> dict[str, int]:
    """The places at which ranks have not moved for `PUBLISH_AFTER` seconds, each with one of the ranks at this place.

    If several ranks call this function at the same time, one of them reads all notes, and the others use its result.
    """
    store = default_store()
    last = store.get(_STALLED).decode() if store.check([_STALLED]) else ""
    claim = json.dumps([time.time(), here, None])
    if not last or not 0 <= time.time() - json.loads(last)[0] < PUBLISH_AFTER:
        last = store.compare_set(_STALLED, last, claim).decode()
        if last == claim:
            keys = [_KEY.format(rank) for rank in range(world_size)]
            notes = [json.loads(note.decode() or "null") for note in store.multi_get(keys)] if store.check(keys) else []
            found = {note[0]: rank for rank, note in enumerate(notes) if note is not None and rank != here}
            store.set(_STALLED, json.dumps([time.time(), here, found]))
            return found
    until = time.monotonic() + _ANSWER_SECONDS / 2
    for pause in pauses(0.05):
        found = json.loads(store.get(_STALLED).decode())[-1]
        if found is not None or time.monotonic() > until:
            return found or {}
        time.sleep(pause)
    return {}


# --------------------------------------------------------------------------------------------------
# Errors that end a rank: the message gets the places of the other ranks, and torchrun is told which rank failed first.
#
# torchrun stops all ranks of a host when one exits, and reports that rank as the root cause. A rank that only lost another one
# therefore exits a little later, and every rank leaves its traceback in the file that torchrun reads. `colonnade run` and
# `run_world` ask the ranks instead.
# --------------------------------------------------------------------------------------------------


_watching: list[WaitWatch] = []
_installed = False


def explain_end(error: BaseException) -> None:
    """Add the places of other ranks to an error about a timeout or a closed connection."""
    if not _watching or getattr(error, "__notes__", None) or isinstance(error, ColonnadeError):
        return
    kind, ranks = consequence_of(error)
    if kind == "wholly" and not ranks:
        where, _ = _watching[-1].where_others_are()
        if where:
            error.add_note(f"Where the other ranks are: {where}")


def install() -> None:
    """Install an exception hook: report an error that ends this process to torchrun, for its error file."""
    global _installed
    if _installed or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _installed, before = True, sys.excepthook

    def leave_later(seconds: float) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        time.sleep(seconds)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain_end(error)
        before(kind, error, trace)

        # A rank whose error follows from another rank's exits later, so that torchrun sees the cause first.
        later = FOLLOWS_AFTER if consequence_of(error)[0] == "wholly" else 0.0
        if later:
            atexit.register(leave_later, later)

        # The file may exist already, from torch's `record` decorator in the script.
        file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
        with contextlib.suppress(OSError):
            if not file.exists():
                extra = {
                    "py_callstack": "".join(traceback.format_exception(type(error), error, trace)),
                    "timestamp": str(int(time.time() + later)),
                }
                message = {"message": f"{type(error).__qualname__}: {error}", "extraInfo": extra}
                scratch = file.with_name(f".{file.name}.{os.getpid()}")
                scratch.write_text(json.dumps({"message": message}))
                scratch.replace(file)

    sys.excepthook = hook

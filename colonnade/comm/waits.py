"""Who waits for what: ranks that stand still say where, so that a hang is explained within seconds.

A rank notes where it is as it goes along (`WaitWatch.at`, `during`), which costs an assignment. A thread looks at the note
about once a second:

1. It sends a sign of life (`peer_errors.PeerProcesses.heartbeat`).
2. Only when the rank has stood at one place for seconds, its place is written to the store of the world; it goes from there
   when the rank moves on.
3. Of the ranks that wait inside the engine, one becomes the reader: it reads the notes of all, at pauses that grow, and logs
   where the others are. The others read one key. So a wait of a whole world of n ranks costs the store n keys at a time, not
   n * n.

The same notes serve a rank whose wait has ended with an error (`note_error` puts into it where the others are), calls that are
for all ranks (`together`), and checks that look for a rank which waits in vain (`stalled_places`). `PhaseClock` measures where
the time of a step goes at the same places.
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
# Where the time of a step goes: marks on the host's clock, or events of a device that are read a step later.
# --------------------------------------------------------------------------------------------------


PHASES = ("data", "forward", "backward", "communication", "clip", "optimizer", "other")
"""The phases of a step. `communication` is time that nothing else hides: waiting for sums of gradients and for messages of
the pipeline. Collectives inside a forward or backward pass count there. `other` is hooks, checkpoints and the loop itself."""


class PhaseTimes:
    """The marks of one step; reading them waits for nothing younger than they are."""

    def __init__(self, marks: list[tuple[str, Any]], end: Any) -> None:
        self._marks, self._end = marks, end

    def read(self) -> dict[str, float]:
        """Seconds by phase; those that took no time are left out."""
        seconds: dict[str, float] = {}
        ends = [mark for _, mark in self._marks[1:]] + [self._end]
        if not isinstance(self._end, float):
            self._end.synchronize()
        for (phase, begin), end in zip(self._marks, ends, strict=True):
            spent = end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000
            seconds[phase] = seconds.get(phase, 0.0) + spent
        return seconds


class PhaseClock:
    """Notes when a step goes from one phase to the next. On CUDA by events of the current stream: the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """The next step begins now."""
        self._phase = "other"
        self._marks = [(self._phase, self._now())]

    def enter(self, phase: str) -> str:
        """From here on the time is that of `phase`; returns the one before."""
        before = self._phase
        if phase != before:
            self._phase = phase
            self._marks.append((phase, self._now()))
        return before

    def end_step(self) -> PhaseTimes:
        """The times of the step that ends here, on their way; the next one begins."""
        end = self._now()
        ended, self._marks = PhaseTimes(self._marks, end), [(self._phase, end)]
        return ended

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        import torch  # here, so that pages of runs are made without it

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


# --------------------------------------------------------------------------------------------------
# Where a rank is, and what is written of it in the store.
# --------------------------------------------------------------------------------------------------


SAY_AFTER = 5.0
"""Seconds at one place after which a rank tells the others where it is; after one and a half times as long it says where
they are."""

OUTSIDE = "outside the engine"
NEEDS_ALL = (
    "comparing the batches",
    "adding up the counts of the losses",
    "summing the gradients",
    "measuring the norm",
)
"""Places at the end of a step, from which a rank goes on when all have come to the end of that step."""
_AFTER_ERROR = f"{OUTSIDE}, after an error "

_KEY = "colonnade/waits/{}"
"""The position of a rank that stands still, as JSON; empty while it moves. Under `/more`, what `details` gives."""
_READER = "colonnade/waits/looks"
"""The one waiting rank that reads the notes of all, with the seconds it had waited then; empty when none does."""
_NEEDS_ALL = "colonnade/waits/needs all"
"""The last rank to say that it stands at the end of a step (`NEEDS_ALL`)."""
_AT_LIMIT = "colonnade/waits/at the limit"
"""Where the others are, as the first rank saw it whose wait has ended at the limit: (when, by whom, text, ranks)."""
_STALLED = "colonnade/waits/standing"
"""The places of ranks that stand still, as the last rank has read it that asked: (when, by whom, {place: rank})."""

_RANKS_NAMED = 16
_ANSWER_SECONDS = 8.0
"""A store that has not answered for so long is cut off, or its rank is stopped."""
_SEEN_SECONDS = 60.0
_LONGEST = 300
_LIMIT_REACHED = re.compile(
    r"timed? ?out (waiting|after)|wait timeout|operation timed out|did not come to the|collective operation timeout"
    r"|failed to pass monitoredBarrier",
    re.IGNORECASE,
)
_CONNECTION_LOST = re.compile(r"connection (closed|reset|refused)|broken pipe|socket closed", re.IGNORECASE)


def pauses(longest: float) -> Iterator[float]:
    """Seconds to sleep between looks at a store for as long as it takes: each pause twice the one before, up to `longest`."""
    pause = 0.0001
    while True:
        yield pause
        pause = min(2 * pause, longest)


class RankPosition(NamedTuple):
    """Where a rank is: doing what, after how many steps, since when."""

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
        """Whether this is a place inside the engine: outside, a rank may be busy with the user's own code for as long as it likes."""
        return self.what != OUTSIDE and not self.what.startswith(_AFTER_ERROR)


class _During:
    """A context manager by hand: every step enters a few."""

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
    """Notes where this rank is; logs where the others are when it has waited for seconds. One for each launch."""

    def __init__(self) -> None:
        self._place: tuple[str, int | None, float]
        self.step: int | None = None
        """How many steps the engine has made; None before there is one."""
        self.at(OUTSIDE)
        self._processes: PeerProcesses | None = None
        self._world = (0, 1)
        self._store: Any = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._limit = SAY_AFTER
        self.clock: PhaseClock | None = None
        """Adds up how long each phase of a step takes, where somebody wants to know."""
        self.details: Callable[[], Any] | None = None
        """Gives what a rank that stands still writes beside its place, as a value for JSON."""

    def open(self, rank: int, world_size: int, log: Callable[[str], None]) -> None:
        """Begin to watch in a world that has just come up."""
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
        """Watch no longer."""
        self._stop.set()
        if self in _watching:
            _watching.remove(self)
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            atexit.unregister(self.close)

    # -- where this rank is ---------------------------------------------------------------------------------

    def at(self, what: str) -> None:
        """This rank is here now."""
        self._place = what, self.step, time.time()

    def begin(self, what: str) -> None:
        """An engine is being built; no step is counted until it is."""
        self.step = None
        self.at(what)

    def end_step(self) -> None:
        """The engine has made a step; at first, it has been built."""
        self.step = 0 if self.step is None else self.step + 1
        self.at(OUTSIDE)

    def during(self, what: str, phase: str | None = None) -> _During:
        """`with` this, the rank is here, and then again where it was; the time counts as that of `phase`."""
        return _During(self, what, phase)

    def enter(self, phase: str | None) -> str | None:
        """Go to a phase of the clock, if time is kept; returns the one before, None where nothing has changed."""
        return self.clock.enter(phase) if self.clock is not None and phase is not None else None

    # -- calls that are for all ranks -----------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Around what users call on all ranks, `what`: begins when all ranks have called it.

        They meet by the store, so that no collective pairs up with another of a rank that is elsewhere. A rank that stands
        in a step, and needs this rank to end it, never comes: then this is an error here.
        """
        with self.during(f"{OUTSIDE}, in {what}"):
            _, world_size = self._world
            if world_size > 1:
                self._meet(what, world_size)
            yield

    def _meet(self, what: str, world_size: int) -> None:
        """Return when as many ranks have come as the world has; raise where one of them cannot come."""
        store, key, limit = default_store(), f"colonnade/meet/{what}", timeout_of().total_seconds()
        # One counter for all meetings of this name: the n-th has come together when it reaches n times the world's size.
        count = store.add(key, 1)
        whole = -(-count // world_size) * world_size
        began = time.monotonic()
        check_at = began + 1.5 * SAY_AFTER
        # The more ranks ask one store, the less often each does.
        for pause in pauses(max(0.05, world_size / 20_000)):
            if count >= whole:
                return
            now = time.monotonic()
            if now > check_at:
                check_at = now + SAY_AFTER / 5
                exited = self._processes.exited(0) if self._processes is not None else []
                stuck = (
                    (f"rank {listed(exited)} has left" if exited else "")
                    or self._who_needs_this_rank()
                    or (f"{whole - count} have not for {limit:g} s" if now > began + limit else "")
                )
                if stuck:
                    store.add(key, -1)  # as if this rank had not come: the next meeting counts from there
                    raise GradientError(f"{what} is for all ranks to call, and {stuck}", code="C043")
            time.sleep(pause)
            count = store.add(key, 0)

    def _who_needs_this_rank(self) -> str:
        """Which rank is at the end of a step that this one has not made; empty if none."""
        store = default_store()
        rank = store.get(_NEEDS_ALL).decode() if store.check([_NEEDS_ALL]) else ""
        place = stalled_position(int(rank)) if rank else None
        if place is not None and place.what in NEEDS_ALL and place.step is not None and place.step >= (self.step or 0):
            return (
                f"rank {rank} is {place}, for which it needs this rank: make the call on every rank, not under a condition "
                f"such as `if rank == 0`"
            )
        return ""

    # -- errors that end a wait -----------------------------------------------------------------------------

    def note_error(self, error: BaseException, doing: str) -> None:
        """An error ends what this rank was doing: those who wait for it read so. Raises one that names who has left."""
        here = RankPosition(doing, self.step, time.time())
        better = lost_peer_error(error, doing, self._processes, lambda: self.where_others_are(here)[0])
        if better is None or not better.ranks:
            better = self._error_at_limit(error, doing) or better
        self.at(f"{_AFTER_ERROR}{doing}: {type(error).__name__}: {error}"[:_LONGEST])
        if better is not None:
            raise better from error

    def _error_at_limit(self, error: BaseException, doing: str) -> ColonnadeError | None:
        """An error that says where the others are, in place of one that says that a wait has ended; None for any other."""
        text = str(error)
        if not isinstance(error, Exception) or not _LIMIT_REACHED.search(text) or _CONNECTION_LOST.search(text):
            return None
        if isinstance(error, ColonnadeError) and error.code == "C117":
            return None
        where, ranks = self.where_others_are(RankPosition(doing, self.step, time.time()))
        if not where:
            return None
        if isinstance(error, ColonnadeError) and error.code is not None:
            error.add_note(f"Where the others are: {where}")
            return None
        kind = type(error) if isinstance(error, ColonnadeError) else GradientError
        place = doing if doing.startswith(("in ", "outside")) else f"in {doing}"
        first = text.strip().splitlines()[0]
        return kind(
            f"the wait for other ranks {place} has ended at its limit ({first}). Where the others are: {where}",
            code="C117",
            ranks=ranks,
        )

    def where_others_are(self, place: RankPosition | None = None) -> tuple[str, list[int]]:
        """Where ranks are that are elsewhere than this one, in words, and which they are; nothing where it is not known.

        Of the ranks that ask within a minute one reads the notes, and the others take its answer. Takes some seconds at most.
        """
        if self._processes is None:
            return "", []
        here = place or RankPosition(*self._place)
        try:
            store = self._store if self._store is not None else default_store()
            found = _ask_store(lambda: self._read_at_limit(store, here))
        except (RuntimeError, ValueError):
            found = (self._no_answer(), [0])
        except TimeoutError:
            found = (self._no_answer(), [])
        return found

    def _read_at_limit(self, store: Any, here: RankPosition) -> tuple[str, list[int]]:
        rank, world_size = self._world
        found = store.get(_AT_LIMIT).decode() if store.check([_AT_LIMIT]) else ""
        mine = json.dumps([time.time(), rank, None, []])
        # All waits of a world end at about the same time. The first rank claims the key, reads n notes and leaves its answer.
        if not found or time.time() - json.loads(found)[0] > _SEEN_SECONDS:
            now = store.compare_set(_AT_LIMIT, found, mine).decode()
            if now == mine:
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

    def _no_answer(self) -> str:
        server = self._processes.server() if self._processes is not None else "rank 0"
        return (
            f"the store of the world, which {server} serves, does not answer: that rank is stopped or has left, its host is dead, "
            f"or this host is cut off from it"
        )

    # -- the thread -----------------------------------------------------------------------------------------

    def _watch(self, rank: int, world_size: int, log: Callable[[str], None]) -> None:
        """Sends signs of life, keeps this rank's note in the store, and logs where the others are when it waits for them."""
        written: tuple[str, int | None, float] | None = None  # the place that the store has of this rank
        reader = ""  # the rank that reads all notes, as this one last saw it: see _READER
        self._limit, due = SAY_AFTER, 0.0  # after `due` seconds at one place this rank asks who reads
        with contextlib.suppress(RuntimeError, ValueError, TimeoutError):  # the store is gone, or gives no answer
            # Of its own: the rank may wait for a key for minutes, and nobody else can use its connection then.
            store = self._store = default_store().clone()
            while not self._stop.wait(min(self._limit / 5, 1.0)):
                now = self._place
                if self._processes is not None:
                    self._processes.heartbeat(store)
                    if not self._processes.knows_rank_0:
                        _ask_store(lambda: self._processes.remember_rank_0(store))  # type: ignore[union-attr]

                # The rank has moved on: its note goes, and if it was the reader, another one takes over.
                if written is not None and now is not written:
                    written = None
                    store.set(_KEY.format(rank), "")
                    if reader.startswith(f"{rank} "):
                        _ask_store(partial(store.compare_set, _READER, reader, ""))
                    reader = ""

                # It has stood still for seconds: its place goes into the store. The details first, since the place tells the
                # others that they may read both.
                place = RankPosition(*now)
                stood = time.time() - place.since
                if written is None and stood > SAY_AFTER:
                    written, due = now, 1.5 * self._limit
                    if self.details is not None:
                        store.set(f"{_KEY.format(rank)}/more", json.dumps(self.details()))
                    store.set(_KEY.format(rank), json.dumps(place))
                    if place.what in NEEDS_ALL:
                        store.set(_NEEDS_ALL, str(rank))

                # It waits for others: one of all that wait reads the notes, so that a wait costs the store n keys, not n * n.
                if written is not None and place.waits_for_others and stood > due:
                    if place.what in NEEDS_ALL:
                        store.set(_NEEDS_ALL, str(rank))
                    # The reader writes anew each time how long it has waited. Where that stays the same for long (it was
                    # killed, say), the key still has what the others saw before, and the first to replace that takes over.
                    mine, before = f"{rank} {stood}", reader
                    ask = partial(self._read_if_reader, rank, world_size, place, store, before, mine)
                    reader, text = _ask_store(ask)
                    due = 2 * stood if reader == mine else 4 * stood if reader else stood
                    if text is not None and self._place is now:
                        log(text)
                        self._limit = 2 * stood  # a run whose ranks are apart by nature says so a few times only
                        due = 1.5 * self._limit

        # The store gives no answer: the world ends, or this host or that of rank 0 is cut off.
        while not self._stop.wait(min(SAY_AFTER / 5, 1.0)):
            place = RankPosition(*self._place)
            stood = time.time() - place.since
            if place.waits_for_others and stood > 1.5 * SAY_AFTER:
                # One rank of each host says so: all of a host would say the same, and none can ask the others.
                if os.environ.get("LOCAL_RANK", "") in ("", "0") or rank == 1:
                    log(f"rank {rank} has waited {stood:.0f} s: it is {place}. But {self._no_answer()}")
                return

    def _read_if_reader(
        self, rank: int, world_size: int, place: RankPosition, store: Any, before: str, mine: str
    ) -> tuple[str, str | None]:
        """(Who reads the notes, what they say if that is this rank.)"""
        reader = store.compare_set(_READER, before, mine).decode()
        return reader, self._explain(rank, world_size, place, store) if reader == mine else None

    def _explain(self, rank: int, world_size: int, place: RankPosition, store: Any = None) -> str | None:
        """Where the others are; None where all are at the same place."""
        found = self._describe_others(rank, world_size, place, store if store is not None else default_store())
        if found is None:
            return None
        others, _, is_lost = found
        advice = (
            f"A rank that is dead, stopped or cut off does not come: the wait ends with an error at its limit "
            f"({timeout_of().total_seconds() if dist.is_initialized() else 0:g} s, the timeout= of launch)"
            if is_lost
            else "All ranks must make the same calls equally often; for loaders that are not equally long, loop over "
            "engine.batches(loader)"
        )
        return f"rank {rank} has waited {time.time() - place.since:.0f} s: it is {place}. Where others are: {others}. {advice}"

    def _describe_others(
        self, rank: int, world_size: int, place: RankPosition, store: Any
    ) -> tuple[str, list[int], bool] | None:
        """Where ranks are that are elsewhere, in words; which; and whether one of them cannot come. None where all are here."""
        keys = [_KEY.format(each) for each in range(world_size)]
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
    """The result of `ask`; TimeoutError where the store gives no answer: one whose host is cut off never does."""
    return call_within(_ANSWER_SECONDS, ask, "no answer")


def call_within(seconds: float, call: Callable[[], Any], complaint: str) -> Any:
    """The result or the error of `call`, in a thread that is left alone where it takes too long: TimeoutError(complaint)."""
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
# The notes of other ranks, for checks that look for a rank which waits in vain.
# --------------------------------------------------------------------------------------------------


def stalled_position(rank: int) -> RankPosition | None:
    """Where a rank stands that has not moved for `SAY_AFTER` seconds; None if it goes on."""
    store, key = default_store(), _KEY.format(rank)
    note = store.get(key) if store.check([key]) else b""
    return RankPosition(*json.loads(note.decode())) if note else None


def stalled_details(rank: int) -> tuple[str, Any] | None:
    """(Where a rank stands that has not moved for `SAY_AFTER` seconds, its `details`); None if it goes on."""
    store, key, place = default_store(), _KEY.format(rank), stalled_position(rank)
    if place is None:
        return None
    details = store.get(f"{key}/more") if store.check([f"{key}/more"]) else b"null"
    return str(place), json.loads(details.decode())


def stalled_places(here: int, world_size: int) -> dict[str, int]:
    """Places of the ranks that have not moved for `SAY_AFTER` seconds, with one rank for each.

    Of the ranks that ask at one time, one reads the notes of all, and the others take its answer.
    """
    store = default_store()
    last = store.get(_STALLED).decode() if store.check([_STALLED]) else ""
    mine = json.dumps([time.time(), here, None])
    if not last or not 0 <= time.time() - json.loads(last)[0] < SAY_AFTER:
        last = store.compare_set(_STALLED, last, mine).decode()
        if last == mine:
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
# An error that ends a rank: it says where the others are, and torchrun is told which rank failed first.
#
# torchrun ends all ranks of a host when it has seen one leave, and calls that one the root cause. A rank that only lost another
# one therefore leaves a little later, and each leaves its traceback in the file that torchrun reads. `colonnade run` and
# `run_world` ask the rank by themselves.
# --------------------------------------------------------------------------------------------------


_watching: list[WaitWatch] = []
_installed = False


def explain_end(error: BaseException) -> None:
    """Add to an error that ends a rank, and says only that a wait or a connection has ended, where the other ranks are."""
    if not _watching or getattr(error, "__notes__", None) or isinstance(error, ColonnadeError):
        return
    kind, ranks = consequence_of(error)
    if kind == "wholly" and not ranks:
        where, _ = _watching[-1].where_others_are()
        if where:
            error.add_note(f"Where the other ranks are: {where}")


def install() -> None:
    """From now on, tell torchrun of an error that ends this process."""
    global _installed
    if _installed or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _installed, before = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain_end(error)
        before(kind, error, trace)
        with contextlib.suppress(OSError):
            _tell_torchrun(error, trace)

    sys.excepthook = hook


def _tell_torchrun(error: BaseException, trace: TracebackType | None) -> None:
    later = FOLLOWS_AFTER if consequence_of(error)[0] == "wholly" else 0.0
    if later:
        atexit.register(_leave_later, later)
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
    if file.exists():  # the script's own `record` wrote it, or there is none
        return
    extra = {
        "py_callstack": "".join(traceback.format_exception(type(error), error, trace)),
        "timestamp": str(int(time.time() + later)),
    }
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(json.dumps({"message": {"message": f"{type(error).__qualname__}: {error}", "extraInfo": extra}}))
    scratch.replace(file)


def _leave_later(seconds: float) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(seconds)

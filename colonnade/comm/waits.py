"""Who waits for what: ranks that stand still say where, so that a hang is explained within seconds.

A rank notes where it is as it goes along, which costs an assignment. A thread looks at the note once in a while. Only when
it has not changed for seconds is it written to the store of the world. Of the ranks that wait, one reads the others' notes,
at pauses that grow; the others read one key. So a wait of a whole world of n ranks costs the store n keys at a time, not n * n.
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
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from colonnade.comm.peer_errors import Processes, named
from colonnade.comm.torch_versions import default_store, timeout_of
from colonnade.constants import FOLLOWS_AFTER
from colonnade.errors import ColonnadeError, GradientError, consequence_of, listed

if TYPE_CHECKING:
    import torch


# --------------------------------------------------------------------------------------------------
# Where the time of a step goes: marks on the host's clock, or events of a device that are read a step later.
# --------------------------------------------------------------------------------------------------


PHASES = ("data", "forward", "backward", "communication", "clip", "optimizer", "other")
"""What a step is made of. `communication` is what nothing else hides: waiting for sums of gradients and for messages of
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
_KEY = "colonnade/waits/{}"
_LOOKER = "colonnade/waits/looks"
"""Which rank reads the notes of all, and for the how-manieth time; empty when none does."""
_NEEDY = "colonnade/waits/needs all"
"""A rank that stands at the end of a step and needs all others to come there: the last one to say so."""
_AT_LIMIT = "colonnade/waits/at the limit"
"""Where the others are, as the first rank saw it whose wait has ended at the limit."""
_STANDING = "colonnade/waits/standing"
"""What ranks stand at, as the last rank has read it that asked."""
_RANKS_NAMED = 16
_ANSWER_SECONDS = 8.0
"""A store that has not answered for so long is cut off, or its rank is stopped."""
_SEEN_SECONDS = 60.0
_LIMIT_REACHED = re.compile(
    r"timed? ?out (waiting|after)|wait timeout|operation timed out|did not come to the|collective operation timeout"
    r"|failed to pass monitoredBarrier",
    re.IGNORECASE,
)
_CONNECTION_LOST = re.compile(r"connection (closed|reset|refused)|broken pipe|socket closed", re.IGNORECASE)
_LONGEST = 300
_AFTER = f"{OUTSIDE}, after an error "


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


class _During:
    """A context manager by hand: every step enters a few."""

    __slots__ = ("_before", "_phase", "_waits", "_what")

    def __init__(self, waits: WaitWatch, what: str, phase: str | None) -> None:
        self._waits, self._what, self._phase, self._before = waits, what, phase, OUTSIDE

    def __enter__(self) -> None:
        before = self._waits._place[0]
        self._before = OUTSIDE if before.startswith(_AFTER) else before
        self._waits.at(self._what)
        self._phase = self._waits.enter(self._phase)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._waits.at(self._before)
        self._waits.enter(self._phase)
        if error is not None:
            self._waits.note_error(error, self._what)


class WaitWatch:
    """Notes where this rank is; says where the others are when it has waited for seconds. One for each launch."""

    def __init__(self) -> None:
        self._place: tuple[str, int | None, float]
        self.step: int | None = None
        """How many steps the engine has made; None before there is one."""
        self.at(OUTSIDE)
        self._processes: Processes | None = None
        self._world = (0, 1)
        self._store: Any = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._limit = SAY_AFTER
        self.clock: PhaseClock | None = None
        """Adds up how long each phase of a step takes, where somebody wants to know."""
        self.more: Callable[[], Any] | None = None
        """Gives what a rank that stands still tells the others beside its place, as a value for JSON."""

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

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Around what users call on all ranks, `what`: begins when all ranks have called it.

        They meet by the store, so that no collective pairs up with another of a rank that is elsewhere. One that ends
        a step with which this rank would have to help never comes: then it is an error here.
        """
        with self.during(f"{OUTSIDE}, in {what}"):
            _, world_size = self._world
            if world_size > 1:
                self._meet(what, world_size)
            yield

    def _meet(self, what: str, world_size: int) -> None:
        store, key, limit = default_store(), f"colonnade/meet/{what}", timeout_of().total_seconds()
        count = store.add(key, 1)
        whole = -(-count // world_size) * world_size
        began = time.monotonic()
        look = began + 1.5 * SAY_AFTER
        # The more ranks ask one store, the less often each does.
        for pause in pauses(max(0.05, world_size / 20_000)):
            if count >= whole:
                return
            now = time.monotonic()
            if now > look:
                look = now + SAY_AFTER / 5
                left = self._processes.gone(0) if self._processes is not None else []
                stuck = (
                    (f"rank {listed(left)} has left" if left else "")
                    or self._needs_me()
                    or (f"{whole - count} have not for {limit:g} s" if now > began + limit else "")
                )
                if stuck:
                    store.add(key, -1)
                    raise GradientError(f"{what} is for all ranks to call, and {stuck}", code="C043")
            time.sleep(pause)
            count = store.add(key, 0)

    def _needs_me(self) -> str:
        """Which rank is at the end of a step that this one has not made."""
        store = default_store()
        rank = store.get(_NEEDY).decode() if store.check([_NEEDY]) else ""
        place = place_of(int(rank)) if rank else None
        if place is not None and place.what in NEEDS_ALL and place.step is not None and place.step >= (self.step or 0):
            return (
                f"rank {rank} is {place}, for which it needs this rank: make the call on every rank, not under a condition "
                f"such as `if rank == 0`"
            )
        return ""

    def note_error(self, error: BaseException, doing: str) -> None:
        """An error ends what this rank was doing: those who wait for it read so. Raises one that names who has left."""
        here = RankPosition(doing, self.step, time.time())
        told = named(error, doing, self._processes, lambda: self.where_others_are(here)[0])
        if told is None or not told.ranks:
            told = self._at_the_limit(error, doing) or told
        self.at(f"{_AFTER}{doing}: {type(error).__name__}: {error}"[:_LONGEST])
        if told is not None:
            raise told from error

    def _at_the_limit(self, error: BaseException, doing: str) -> ColonnadeError | None:
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

        Of the ranks that ask within a minute one looks, and the others take its answer. Takes some seconds at most.
        """
        if self._processes is None:
            return "", []
        here = place or RankPosition(*self._place)
        try:
            store = self._store if self._store is not None else default_store()
            found = _answer(lambda: self._look_at_limit(store, here))
        except (RuntimeError, ValueError):
            found = (self._no_answer(), [0])
        except TimeoutError:
            found = (self._no_answer(), [])
        return found

    def _look_at_limit(self, store: Any, here: RankPosition) -> tuple[str, list[int]]:
        rank, world_size = self._world
        told = store.get(_AT_LIMIT).decode() if store.check([_AT_LIMIT]) else ""
        mine = json.dumps([time.time(), rank, None, []])
        if not told or time.time() - json.loads(told)[0] > _SEEN_SECONDS:
            now = store.compare_set(_AT_LIMIT, told, mine).decode()
            if now == mine:
                where, ranks, _ = self._others(rank, world_size, here, store) or ("", [], False)
                store.set(_AT_LIMIT, json.dumps([time.time(), rank, where, ranks]))
                return where, ranks
        until = time.monotonic() + _ANSWER_SECONDS / 2
        while time.monotonic() < until:
            _, looker, where, ranks = json.loads(store.get(_AT_LIMIT).decode())
            if where is not None:
                ranks = sorted({*ranks, looker} - {rank})
                return (f"{where} (as rank {looker} saw it)" if where and looker != rank else where), ranks
            time.sleep(0.05)
        return "", []

    def _no_answer(self) -> str:
        server = self._processes.server() if self._processes is not None else "rank 0"
        return (
            f"the store of the world, which {server} serves, does not answer: that rank is stopped or has left, its host is dead, "
            f"or this host is cut off from it"
        )

    def enter(self, phase: str | None) -> str | None:
        """Go to a phase of `comm.phases`, if time is kept; returns the one before, None where nothing has changed."""
        return self.clock.enter(phase) if self.clock is not None and phase is not None else None

    def open(self, rank: int, world_size: int, say: Callable[[str], None]) -> None:
        """Begin to watch in a world that has just come up."""
        if world_size > 1:
            self._world = rank, world_size
            self._processes = Processes(rank, world_size, default_store())
            default_store().set(_KEY.format(rank), "")
            _watching.append(self)
            self._thread = threading.Thread(
                target=self._watch, args=(rank, world_size, say), name="colonnade waits", daemon=True
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

    # -- the thread ---------------------------------------------------------------------------------------

    def _watch(self, rank: int, world_size: int, say: Callable[[str], None]) -> None:
        told: tuple[str, int | None, float] | None = None
        self._limit, due, looker = SAY_AFTER, 0.0, ""
        with contextlib.suppress(RuntimeError, ValueError, TimeoutError):  # the store is gone, or gives no answer
            # Of its own: the rank may wait for a key for minutes, and nobody else can use its connection then.
            store = self._store = default_store().clone()
            while not self._stop.wait(min(self._limit / 5, 1.0)):
                now = self._place
                if self._processes is not None:
                    self._processes.beat(store)
                    if not self._processes.knows_first:
                        _answer(lambda: self._processes.remember_first(store))  # type: ignore[union-attr]
                if told is not None and now is not told:
                    told = None
                    store.set(_KEY.format(rank), "")
                    if looker.startswith(f"{rank} "):
                        _answer(lambda: store.compare_set(_LOOKER, looker, ""))  # noqa: B023
                    looker = ""
                place = RankPosition(*now)
                stood = time.time() - place.since
                if told is None and stood > SAY_AFTER:
                    told, due = now, 1.5 * self._limit
                    if self.more is not None:
                        store.set(f"{_KEY.format(rank)}/more", json.dumps(self.more()))
                    store.set(_KEY.format(rank), json.dumps(place))
                    if place.what in NEEDS_ALL:
                        store.set(_NEEDY, str(rank))
                if told is not None and place.what != OUTSIDE and not place.what.startswith(_AFTER) and stood > due:
                    if place.what in NEEDS_ALL:
                        store.set(_NEEDY, str(rank))
                    # Who looks says so anew each time. Where that stays away for long, another takes over.
                    mine, before = f"{rank} {stood}", looker
                    looker, said = _answer(lambda: self._look(rank, world_size, place, store, before, mine))  # noqa: B023
                    due = 2 * stood if looker == mine else 4 * stood if looker else stood
                    if said is not None and self._place is now:
                        say(said)
                        self._limit = 2 * stood  # a run whose ranks are apart by nature says so a few times only
                        due = 1.5 * self._limit

        # Nobody answers: the world ends, or this host or that of rank 0 is cut off.
        while not self._stop.wait(min(SAY_AFTER / 5, 1.0)):
            place = RankPosition(*self._place)
            stood = time.time() - place.since
            if place.what != OUTSIDE and not place.what.startswith(_AFTER) and stood > 1.5 * SAY_AFTER:
                if _speaks_for_host(rank):
                    say(f"rank {rank} has waited {stood:.0f} s: it is {place}. But {self._no_answer()}")
                return

    def _look(
        self, rank: int, world_size: int, place: RankPosition, store: Any, before: str, mine: str
    ) -> tuple[str, str | None]:
        """(Who looks, what it sees, if that is this rank.)"""
        looker = store.compare_set(_LOOKER, before, mine).decode()
        return looker, self._explain(rank, world_size, place, store) if looker == mine else None

    def _explain(self, rank: int, world_size: int, place: RankPosition, store: Any = None) -> str | None:
        """Where the others are; None where all are at the same place."""
        found = self._others(rank, world_size, place, store if store is not None else default_store())
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

    def _others(
        self, rank: int, world_size: int, place: RankPosition, store: Any
    ) -> tuple[str, list[int], bool] | None:
        """Where ranks are that are elsewhere, in words; which; and whether one of them cannot come. None where all are here."""
        keys = [_KEY.format(each) for each in range(world_size)]
        if not store.check(keys):
            return None
        notes = [json.loads(note.decode() or "null") for note in store.multi_get(keys)]
        quiet = self._processes.quiet(store) if self._processes is not None else {}
        places: dict[tuple[str, str], list[int]] = {}
        for other, note in enumerate(notes):
            found = RankPosition(*note) if note is not None else None
            if other == rank or (other not in quiet and found is not None and found[:2] == place[:2]):
                continue
            where = _described(found)
            if other in quiet:
                where = quiet[other] + (f" (it was last {found})" if found is not None else "")
            host = self._processes.host(other, store) if self._processes is not None else ""
            places.setdefault((where, host), []).append(other)
        if not places:
            return None
        told = (
            f"rank {_few(ranks)}{f' (host {host})' if host else ''}: {where}" for (where, host), ranks in places.items()
        )
        return "; ".join(told), sorted(other for ranks in places.values() for other in ranks), bool(quiet)


_watching: list[WaitWatch] = []


def explain_end(error: BaseException) -> None:
    """Add to an error that ends a rank, and says only that a wait or a connection has ended, where the other ranks are."""
    if not _watching or getattr(error, "__notes__", None) or isinstance(error, ColonnadeError):
        return
    kind, ranks = consequence_of(error)
    if kind == "wholly" and not ranks:
        where, _ = _watching[-1].where_others_are()
        if where:
            error.add_note(f"Where the other ranks are: {where}")


def _answer(ask: Callable[[], Any]) -> Any:
    """What `ask` returns or raises, in a thread that is left alone where it takes too long: TimeoutError.

    A store whose host is cut off answers nothing, and asking it has no limit.
    """
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, name="colonnade asks", daemon=True).start()
    try:
        found, error = answers.get(timeout=_ANSWER_SECONDS)
    except queue.Empty:
        raise TimeoutError("no answer") from None
    if error is not None:
        raise error
    return found


def _speaks_for_host(rank: int) -> bool:
    """Whether it is the first rank of its host beside rank 0: where each would say the same, and none can ask the others."""
    return os.environ.get("LOCAL_RANK", "") in ("", "0") or rank == 1


def told_by(rank: int) -> tuple[str, Any] | None:
    """(Where a rank stands that has not moved for `SAY_AFTER` seconds, what it tells beside that); None if it goes on."""
    store, key, place = default_store(), _KEY.format(rank), place_of(rank)
    if place is None:
        return None
    more = store.get(f"{key}/more") if store.check([f"{key}/more"]) else b"null"
    return str(place), json.loads(more.decode())


def standing(here: int, world_size: int) -> dict[str, int]:
    """What ranks do that have not moved for `SAY_AFTER` seconds, with one rank for each.

    Of the ranks that ask at one time, one reads the notes of all, and the others take its answer.
    """
    store = default_store()
    told = store.get(_STANDING).decode() if store.check([_STANDING]) else ""
    mine = json.dumps([time.time(), here, None])
    if not told or not 0 <= time.time() - json.loads(told)[0] < SAY_AFTER:
        told = store.compare_set(_STANDING, told, mine).decode()
        if told == mine:
            keys = [_KEY.format(rank) for rank in range(world_size)]
            notes = [json.loads(note.decode() or "null") for note in store.multi_get(keys)] if store.check(keys) else []
            found = {note[0]: rank for rank, note in enumerate(notes) if note is not None and rank != here}
            store.set(_STANDING, json.dumps([time.time(), here, found]))
            return found
    until = time.monotonic() + _ANSWER_SECONDS / 2
    for pause in pauses(0.05):
        found = json.loads(store.get(_STANDING).decode())[-1]
        if found is not None or time.monotonic() > until:
            return found or {}
        time.sleep(pause)
    return {}


def place_of(rank: int) -> RankPosition | None:
    """Where a rank stands that has not moved for `SAY_AFTER` seconds; None if it goes on."""
    store, key = default_store(), _KEY.format(rank)
    note = store.get(key) if store.check([key]) else b""
    return RankPosition(*json.loads(note.decode())) if note else None


def _described(place: RankPosition | None) -> str:
    return "going on" if place is None else f"{place} for {time.time() - place.since:.0f} s"


def _few(ranks: list[Any]) -> str:
    return listed(ranks[:_RANKS_NAMED]) + (
        f" and {len(ranks) - _RANKS_NAMED} more" if len(ranks) > _RANKS_NAMED else ""
    )


# --------------------------------------------------------------------------------------------------
# What a rank does when an error ends it under a launcher that is not ours: torchrun is told which rank failed first.
#
# torchrun ends all ranks of a host when it has seen one leave, and calls that one the root cause. A rank that only lost another
# one therefore leaves a little later, and each leaves its traceback in the file that torchrun reads.
# --------------------------------------------------------------------------------------------------


_installed = False


def install() -> None:
    """From now on, tell torchrun of an error that ends this process. `colonnade run` and `run_world` ask the rank by themselves."""
    global _installed
    if _installed or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _installed, before = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain_end(error)
        before(kind, error, trace)
        with contextlib.suppress(OSError):
            _tell(error, trace)

    sys.excepthook = hook


def _tell(error: BaseException, trace: TracebackType | None) -> None:
    later = FOLLOWS_AFTER if consequence_of(error)[0] == "wholly" else 0.0
    if later:
        atexit.register(_stay, later)
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
    if file.exists():  # the script's own `record` wrote it, or there is none
        return
    told = {
        "py_callstack": "".join(traceback.format_exception(type(error), error, trace)),
        "timestamp": str(int(time.time() + later)),
    }
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(json.dumps({"message": {"message": f"{type(error).__qualname__}: {error}", "extraInfo": told}}))
    scratch.replace(file)


def _stay(seconds: float) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(seconds)

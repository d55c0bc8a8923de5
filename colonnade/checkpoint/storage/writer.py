"""One save on its way to disk: every rank's file into a staged folder, then one commit by the first rank.

Nothing here communicates, so all of it can run in a background thread beside training. A rank leaves a note in the
folder, put there by one rename, after its tensors are on disk. From these notes the first rank makes the manifest, and
learns that the others are done: never from a process group, since those belong to the training thread, and
collectives of two threads on one group have no order.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from colonnade.checkpoint.collective import as_checkpoint_errors
from colonnade.checkpoint.fault import fault_point
from colonnade.checkpoint.format.manifest import MANIFEST, LayoutRecord, Manifest, tensors_file
from colonnade.checkpoint.format.records import from_json, to_json
from colonnade.checkpoint.format.tensors import write_tensors
from colonnade.checkpoint.plan.save import RankNote, SavePlan, merge_groups, merge_tensors
from colonnade.checkpoint.storage.folder import publish, retire, told_of_space, write_new
from colonnade.errors import CheckpointError

_POLL = 0.02
_PATIENCE_AT_EXIT = 60.0
_PATIENCE_AFTER_ERROR = 5.0
_REST = 5.0
_LONGEST_REST = 0.5


@dataclass(frozen=True)
class StorageWriter:
    """Which step goes where, from whom; `needed` is the bytes of all ranks together."""

    step: int
    staged: Path
    rank: int
    layout: LayoutRecord
    needed: int
    keep: int

    def write(self, plan: SavePlan, rest: Callable[[], None] = lambda: None) -> None:
        """Write this rank's tensors and its note; `rest` is called between chunks."""
        with told_of_space(self.staged.parent, self.needed):
            path = self.staged / tensors_file(self.rank)
            file = write_tensors(path, plan.entries, rest) if plan.entries else None
            unfinished = self._note_file(self.rank).with_suffix(".unfinished")
            unfinished.write_text(json.dumps(to_json(plan.note(file))))
            os.rename(unfinished, self._note_file(self.rank))
        fault_point("part written")

    def commit(self) -> Path:
        """Publish the checkpoint, on the first rank, when every rank's note is there; then delete old ones."""
        notes = [self._take_note(rank) for rank in range(self.layout.world_size)]
        manifest = Manifest(
            step=self.step,
            time=time.time(),
            layout=self.layout,
            files=tuple(note.file for note in notes if note.file is not None),
            tensors=merge_tensors(notes),
            groups=merge_groups(notes),
            items=tuple(item for note in notes for item in note.items),
        )
        with told_of_space(self.staged.parent, self.needed):
            write_new(self.staged / MANIFEST, manifest.dump())
            fault_point("manifest written")
            path = publish(self.staged, self.step)
        retire(path.parent, path, self.keep)
        return path

    def wait_for_notes(self, stop: threading.Event) -> None:
        """Wait until every rank's note is there, or `stop` is set; at the end of the process, not for long."""
        missing = set(range(self.layout.world_size))
        asked, main_ended = time.monotonic(), None
        while missing := {rank for rank in missing if not self._note_file(rank).exists()}:
            now = time.monotonic()
            if main_ended is None and not threading.main_thread().is_alive():
                main_ended = now
            late = main_ended is not None and now - main_ended > _PATIENCE_AT_EXIT
            if stop.wait(_POLL) or late:
                raise CheckpointError(
                    f"the background save of step {self.step} was given up after {now - asked:.1f} s: ranks "
                    f"{sorted(missing)} have not written their part. Earlier checkpoints are untouched."
                )

    def _note_file(self, rank: int) -> Path:
        return self.staged / f"rank-{rank:05d}.part"

    def _take_note(self, rank: int) -> RankNote:
        path = self._note_file(rank)
        note = from_json(RankNote, json.loads(path.read_text()), path.name)
        path.unlink()
        return note


class Pace:
    """Lets training go first: after each piece of work a rest several times as long, until somebody waits.

    Only time on a processor counts as work. A save of 100 MB without rests made the one or two steps beside it 1.29 times
    as long; with them it is beside four steps, which take 1.07 times as long (`benchmarks/trainer.py`).
    """

    def __init__(self) -> None:
        self._hurry = threading.Event()
        self._before: float | None = None

    def hurry(self) -> None:
        """No more rests."""
        self._hurry.set()

    def rest(self) -> None:
        """Called by the working thread between two pieces of work."""
        worked = 0.0 if self._before is None else time.thread_time() - self._before
        if threading.main_thread().is_alive():
            self._hurry.wait(min(_REST * worked, _LONGEST_REST))
        self._before = time.thread_time()


class BackgroundWriter:
    """Writes one save beside training; `error` is what went wrong on this rank, known after `join`.

    Its thread is no daemon: a process that ends normally ends after its last checkpoint is on disk.
    """

    def __init__(self, writer: StorageWriter, plan: SavePlan, done: Callable[[Path], None]) -> None:
        self.writer = writer
        self.error: CheckpointError | None = None
        self._plan, self._done = plan, done
        self._stop = threading.Event()
        self._reason = ""
        self._pace = Pace()
        self._thread = threading.Thread(target=self._run, name=f"colonnade-save-{writer.step}", daemon=False)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether it still has something to do."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait until it has nothing to do; it makes haste now."""
        self._pace.hurry()
        self._thread.join()

    def part_error(self) -> str:
        """Wait until this rank's part is written; returns what went wrong with it. Rank 0 has more to do: not waited for."""
        if self.writer.rank == 0:
            return ""
        self.join()
        return str(self.error or "")

    def give_up(self, reason: str) -> None:
        """Let the first rank stop waiting for parts that will not come."""
        self._reason = reason
        self._stop.set()

    def give_up_soon(self) -> None:
        """The same after a moment, for a rank that has failed: the others may have, and their parts may not come."""
        timer = threading.Timer(_PATIENCE_AFTER_ERROR, self.give_up, [""])
        timer.daemon = True
        timer.start()

    def _run(self) -> None:
        try:
            with as_checkpoint_errors(f"saving step {self.writer.step} in the background"):
                self._write()
        except CheckpointError as error:
            self.error = CheckpointError(self._reason) if self._reason else error

    def _write(self) -> None:
        try:
            self.writer.write(self._plan, self._pace.rest)
        finally:
            self._plan.entries.clear()
        if self.writer.rank == 0:
            self.writer.wait_for_notes(self._stop)
            self._done(self.writer.commit())

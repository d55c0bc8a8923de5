"""One save on its way to disk: every rank's file into a staged folder, then one commit by the first rank.

Nothing here communicates, so all of it can run in a background thread beside training. A rank leaves a note in the
folder, put there by one rename, after its tensors are on disk. From these notes the first rank makes the manifest, and
learns that the others are done: never from a process group, since those belong to the training thread, and
collectives of two threads on one group have no order.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from colonnade.checkpoint.collective import as_checkpoint_errors
from colonnade.checkpoint.fault import fault_point
from colonnade.checkpoint.format.manifest import LayoutRecord, Manifest, tensors_file
from colonnade.checkpoint.format.tensors import write_tensors
from colonnade.checkpoint.plan.notes import RankNote, merge_groups, merge_tensors
from colonnade.checkpoint.plan.pieces import SavePlan
from colonnade.checkpoint.storage.folder import (
    check_space,
    clean,
    megabytes,
    publish,
    retire,
    told_of_space,
    write_manifest,
)
from colonnade.checkpoint.storage.verify import verify
from colonnade.constants import SAVED
from colonnade.errors import CheckpointError
from colonnade.logging import get_dist_logger

_MANIFEST_SPACE = 1 << 20
_VISIBLE_WITHIN = 10.0
_POLL = 0.02
_PATIENCE_AT_EXIT = 60.0
_PATIENCE_AFTER_ERROR = 5.0
_REST = 5.0
_LONGEST_REST = 0.5


@dataclass(frozen=True)
class StorageWriter:
    """Which step goes where, from whom; `size` is the bytes of the tensors of all ranks together."""

    step: int
    staged: Path
    rank: int
    layout: LayoutRecord
    size: int
    keep: int
    started: float = field(default_factory=time.monotonic)

    def stage(self) -> None:
        """Make the staged folder, on the first rank, if there is room for the save."""
        clean(self.staged.parent)
        check_space(self.staged.parent, self._needed)
        self.staged.mkdir()
        fault_point("staged")

    def check_visible(self) -> None:
        """Refuse a folder that only some ranks see; network file systems get a moment to show it."""
        end = time.monotonic() + _VISIBLE_WITHIN
        while not self.staged.is_dir():
            if time.monotonic() > end:
                raise CheckpointError(
                    f"rank {self.rank} on {socket.gethostname()} does not see {self.staged}, which rank 0 has made; "
                    f"checkpoints need a folder that all ranks share",
                    code="C084",
                )
            time.sleep(0.05)

    def write(self, plan: SavePlan, rest: Callable[[], None] = lambda: None) -> None:
        """Write this rank's tensors and its note; `rest` is called between chunks."""
        with told_of_space(self.staged.parent, self._needed):
            if plan.entries:
                plan.note.file = write_tensors(self.staged / tensors_file(self.rank), plan.entries, rest)
            unfinished = self._note_file(self.rank).with_suffix(".unfinished")
            unfinished.write_text(plan.note.dump())
            os.rename(unfinished, self._note_file(self.rank))
        fault_point("part written")

    def commit(self) -> None:
        """Publish the checkpoint, on the first rank, when every rank's note is there; then delete old ones."""
        notes = [self._take_note(rank) for rank in range(self.layout.world_size)]
        tensors, cuts = merge_tensors(notes)
        manifest = Manifest(
            step=self.step,
            time=time.time(),
            layout=self.layout,
            files=tuple(note.file for note in notes if note.file is not None),
            cuts=cuts,
            tensors=tensors,
            groups=merge_groups(notes),
            items=tuple(item for note in notes for item in note.items),
        )
        with told_of_space(self.staged.parent, self._needed):
            write_manifest(self.staged, manifest)
            self._check_loadable()
            path = publish(self.staged, self.step)
        retire(path.parent, path, self.keep)
        get_dist_logger().info(
            f"saved step {self.step} to {path} ({megabytes(self.size)}, {time.monotonic() - self.started:.2f} s)"
        )
        by_trainer = {"extra/trainer", "extra/hooks"} <= {item.name for item in manifest.items}
        tell_launcher(self.step, path, by_trainer)

    def _check_loadable(self) -> None:
        """Read what was written as a load would, before it gets its name and older checkpoints go."""
        try:
            verify(self.staged, content=False)
        except CheckpointError as error:
            raise CheckpointError(
                f"the checkpoint of step {self.step} was written, but could not be loaded: {error}. It was not published; "
                f"earlier checkpoints are untouched.",
                code="C084",
            ) from error

    def drop(self) -> None:
        """Delete what a failed save has left, on the first rank; all ranks have stopped writing, or are gone."""
        if self.rank == 0:
            shutil.rmtree(self.staged, ignore_errors=True)

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
                    f"{sorted(missing)} have not written their part. Earlier checkpoints are untouched.",
                    code="C084",
                )

    @property
    def _needed(self) -> int:
        return self.size + _MANIFEST_SPACE

    def _note_file(self, rank: int) -> Path:
        return self.staged / f"rank-{rank:05d}.part"

    def _take_note(self, rank: int) -> RankNote:
        path = self._note_file(rank)
        note = RankNote.parse(path.read_text(), path.name)
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

    def __init__(self, writer: StorageWriter, plan: SavePlan) -> None:
        self.writer = writer
        self.error: CheckpointError | None = None
        self._plan = plan
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

    def part_error(self) -> str | None:
        """Wait until this rank's part is written; returns what went wrong with it. Rank 0 has more to do: not waited for."""
        if self.writer.rank == 0:
            return None
        self.join()
        return None if self.error is None else str(self.error)

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
            self.error = CheckpointError(self._reason, code="C084") if self._reason else error

    def _write(self) -> None:
        try:
            self.writer.write(self._plan, self._pace.rest)
        finally:
            self._plan.entries.clear()
        if self.writer.rank == 0:
            self.writer.wait_for_notes(self._stop)
            self.writer.commit()


def tell_launcher(step: int, path: Path, by_trainer: bool) -> None:
    """Note which checkpoint a run would go on from, and how, for the launcher to say should the run be interrupted. By rank 0."""
    how = (
        "a run with a LoadCheckpointHook"
        if by_trainer
        else "a loop that calls load() of a CheckpointManager on that folder"
    )
    if SAVED in os.environ:
        with contextlib.suppress(OSError):  # the launcher is gone
            Path(os.environ[SAVED]).write_text(f"step {step} in {path}; {how} goes on from there", encoding="utf-8")

"""A save from top to bottom: `save_checkpoint` on all ranks, `StorageWriter` on disk, `BackgroundSave` beside training.

On disk, a save of step 100 goes in this order:

1. Rank 0 deletes the staged folders of interrupted saves, sees that there is room, and makes `.tmp-100-<nonce>`.
2. Each rank writes its tensors there, to `rank-<n>.safetensors`, syncs the file, and sees that it can be opened.
3. Each rank writes its note, `rank-<n>.part`: which piece of which tensor is where in its file.
4. Rank 0, when all notes are there, reads and deletes them and writes `manifest.json`, which has the size and hash of every
   file and a digest of itself, and syncs it. Then it reads what was written as a load would.
5. Rank 0 syncs the folder, renames it `step-00000100`, and syncs the run's folder.
6. Rank 0 deletes all but the newest checkpoints: each is renamed `.tmp-...` first, so that none is there in part.

A kill before the rename of step 5 leaves a `.tmp-` folder, which no load looks at and the next save deletes. A kill after it
leaves a checkpoint of which every byte is on disk. Nothing that was there before is touched until then. The run's lock
(`run.lock`) is taken when the manager is opened, not here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from colonnade.checkpoint.agreement import agreed, before_save
from colonnade.checkpoint.manifest import LayoutRecord, Manifest, tensors_file
from colonnade.checkpoint.save_plan import LocalState, RankNote, SavePlan, merge_groups, merge_tensors, plan_save
from colonnade.checkpoint.storage import (
    check_space,
    clean,
    discard,
    fault_point,
    megabytes,
    no_space_errors,
    publish,
    retire,
    staging_name,
    verify,
    write_at_once,
    write_manifest,
)
from colonnade.checkpoint.tensor_files import write_tensors
from colonnade.comm.messages import gather_from_all
from colonnade.constants import SAVED
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, as_checkpoint_errors, listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.whole import locate_tensors

_MANIFEST_SPACE = 1 << 20
_VISIBLE_WITHIN = 10.0
_POLL = 0.02
_PATIENCE_AT_EXIT = 60.0
_PATIENCE_AFTER_ERROR = 5.0
_REST = 5.0
_LONGEST_REST = 0.5


def save_checkpoint(
    folder: Path,
    context: ParallelContext,
    step: int,
    model: nn.Module,
    optimizer: Any,
    extra: Mapping[str, Any] | None,
    keep: int,
    background: bool,
) -> BackgroundSave | None:
    """Save the checkpoint of `step` in the run's folder. Collective over the world; all ranks raise or none.

    With `background` the tensors are copied to the host, and the rest of the save is returned: a thread is at it.
    """
    rank, doing = context.get_global_rank(), f"saving step {step}"

    # A check of the running step may refuse, on all ranks: the model is in a state that must not be saved.
    check = before_save.get(model, lambda: None)()
    if check is not None:
        check()

    # The state of this rank. All that may be refused about it (a type, a value that is no JSON) is refused here, before
    # anything is on disk.
    tensors = locate_tensors(model, context, doing)
    with agreed(context, doing):
        state = LocalState(tensors, model, optimizer, extra, context)

    # Who writes what. Replicas hold the same blocks, and each distinct block is written once. Every rank says what it has, and
    # makes the same choice from what all have said, so nothing has to be agreed on after that.
    notes = gather_from_all(state.note(), context)
    with agreed(context, doing):
        plan = plan_save(state, notes, rank)

    # One staged folder for all ranks. Its name is made up by rank 0; the sizes decide whether there is room.
    offers = gather_from_all({"step": step, "size": plan.size, "name": staging_name(step)}, context)
    steps = {offer["step"] for offer in offers}
    if len(steps) > 1:
        raise CheckpointError(
            f"the ranks save different steps: {listed(sorted(steps))}; save() is called by all for one"
        )
    layout, size = LayoutRecord.of(context.layout), sum(offer["size"] for offer in offers)
    writer = StorageWriter(step, folder / offers[0]["name"], rank, layout, size, keep)
    with agreed(context, doing):
        if rank == 0:
            writer.stage()
    with agreed(context, doing):
        writer.check_visible()

    try:
        if background:
            # The copies are made before this returns: the next step may change the tensors while they are written.
            with agreed(context, doing):
                plan.copy_to_host()
            return BackgroundSave(writer, plan)
        with agreed(context, doing):
            writer.write(plan)
        # At the end of the block above every rank's part is on disk, or all ranks have raised.
        with agreed(context, doing):
            if rank == 0:
                writer.commit()
    except BaseException:
        writer.drop()
        raise
    return None


@dataclass(frozen=True)
class StorageWriter:
    """A save on its way to disk, on one rank: stage (rank 0), write, commit (rank 0). Nothing here communicates.

    So all of it can run in a thread beside training. Rank 0 learns from the notes in the folder that the others are done, never
    from a process group: groups belong to the training thread, and collectives of two threads on one group have no order.
    `size` is the bytes of the tensors of all ranks together.
    """

    step: int
    staged: Path
    rank: int
    layout: LayoutRecord
    size: int
    keep: int
    started: float = field(default_factory=time.monotonic)

    def stage(self) -> None:
        """Make the staged folder, on rank 0, if there is room for the save."""
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
        """Write this rank's tensors, and then its note; `rest` is called between chunks."""
        with no_space_errors(self.staged.parent, self._needed):
            file = write_tensors(self.staged / tensors_file(self.rank), plan.entries, rest) if plan.entries else None
            # A note says that the file before it is on disk, and rank 0 may read it at any time: it appears as a whole.
            write_at_once(self._note_file(self.rank), plan.note(file).dump())
        fault_point("part written")

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

    def commit(self) -> None:
        """Publish the checkpoint, on rank 0, when every rank's note is there; then delete old ones."""
        # The manifest is made of the notes. Pieces that overlap or leave a gap are refused here.
        notes = []
        for rank in range(self.layout.world_size):
            path = self._note_file(rank)
            notes.append(RankNote.parse(path.read_text(), path.name))
            path.unlink()
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
        with no_space_errors(self.staged.parent, self._needed):
            write_manifest(self.staged, manifest)
            # Read as a load would, before it gets its name and older checkpoints go: a manifest that no load would take must
            # not be the last one.
            try:
                verify(self.staged, content=False)
            except CheckpointError as error:
                raise CheckpointError(
                    f"the checkpoint of step {self.step} was written, but could not be loaded: {error}. It was not "
                    f"published; earlier checkpoints are untouched.",
                    code="C084",
                ) from error
            path = publish(self.staged, self.step)
        # From here on the checkpoint is there whatever happens, so the oldest ones may go.
        retire(path.parent, path, self.keep)
        get_dist_logger().info(
            f"saved step {self.step} to {path} ({megabytes(self.size)}, {time.monotonic() - self.started:.2f} s)"
        )
        by_trainer = {"extra/trainer", "extra/hooks"} <= {item.name for item in manifest.items}
        tell_launcher(self.step, path, by_trainer)

    def drop(self) -> None:
        """Delete the files of a failed save, on rank 0; all ranks have stopped writing, or are gone."""
        if self.rank == 0:
            discard(self.staged)

    @property
    def _needed(self) -> int:
        return self.size + _MANIFEST_SPACE

    def _note_file(self, rank: int) -> Path:
        return self.staged / f"rank-{rank:05d}.part"


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


class BackgroundSave:
    """The rest of a save, in a thread beside training: this rank's part, and on rank 0 the wait for all parts and the commit.

    `finish` waits for it on all ranks. The thread is no daemon: a process that ends normally ends after its last checkpoint is
    on disk.
    """

    def __init__(self, writer: StorageWriter, plan: SavePlan) -> None:
        self._writer = writer
        self._plan = plan
        self._error: CheckpointError | None = None
        self._stop = threading.Event()
        self._reason = ""
        self._pace = Pace()
        self._thread = threading.Thread(target=self._run, name=f"colonnade-save-{writer.step}", daemon=False)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether the thread still has something to do."""
        return self._thread.is_alive()

    def finish(self, context: ParallelContext) -> None:
        """Wait for the save, without more rests, and raise its error on every rank. Collective over the world."""
        self._pace.hurry()
        error = None
        try:
            # Rank 0 waits for the parts of all others, so it must hear of those that will not come before it is joined.
            if self._writer.rank != 0:
                self._thread.join()
                error = None if self._error is None else str(self._error)
            for rank, text in enumerate(gather_from_all(error, context)):
                if text:
                    self._give_up(f"on rank {rank}: {text}")
        except BaseException:
            self._give_up("the other ranks are gone")
            raise
        self._thread.join()
        with agreed(context, "saving in the background"):
            if self._error is not None:
                self._writer.drop()
                raise self._error

    def give_up_soon(self) -> None:
        """Let rank 0 stop waiting after a moment, for a rank that has failed: others may have, and their parts may not come."""
        timer = threading.Timer(_PATIENCE_AFTER_ERROR, self._give_up, [""])
        timer.daemon = True
        timer.start()

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._stop.set()

    def _run(self) -> None:
        writer = self._writer
        try:
            with as_checkpoint_errors(f"saving step {writer.step} in the background"):
                try:
                    writer.write(self._plan, self._pace.rest)
                finally:
                    self._plan.entries.clear()  # the copies on the host
                if writer.rank == 0:
                    writer.wait_for_notes(self._stop)
                    writer.commit()
        except CheckpointError as error:
            self._error = CheckpointError(self._reason, code="C084") if self._reason else error


def tell_launcher(step: int, path: Path, by_trainer: bool) -> None:
    """Note, on rank 0, which checkpoint a run would go on from, and how: the launcher says it if the run is interrupted."""
    how = (
        "a run with a LoadCheckpointHook"
        if by_trainer
        else "a loop that calls load() of a CheckpointManager on that folder"
    )
    if SAVED in os.environ:
        with contextlib.suppress(OSError):  # the launcher is gone
            Path(os.environ[SAVED]).write_text(f"step {step} in {path}; {how} goes on from there", encoding="utf-8")

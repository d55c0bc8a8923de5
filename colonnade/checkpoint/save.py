"""A save from top to bottom: `save_checkpoint` on all ranks, `StorageWriter` on disk, `BackgroundSave` in a thread.

The write order of a save of step 100:

1. Rank 0 deletes the staging folders of interrupted saves, checks the free space and creates `.tmp-100-<nonce>`.
2. Each rank writes its tensors to `rank-<n>.safetensors` in that folder, syncs the file and checks that it opens.
3. Each rank writes its note, `rank-<n>.part`, which lists the tensor pieces in its file.
4. Once all notes exist, rank 0 reads and deletes them and writes `manifest.json` (size and hash of every file, and a digest of
   the manifest itself), syncs it, and reads the checkpoint back as a load would.
5. Rank 0 syncs the folder, renames it to `step-00000100`, and syncs the run's folder.
6. Rank 0 deletes all but the newest checkpoints. Each is renamed to `.tmp-...` first, so no checkpoint is ever incomplete.

A kill before the rename in step 5 leaves a `.tmp-` folder, which loads ignore and the next save deletes. A kill after the rename
leaves a checkpoint whose every byte is on disk. Earlier checkpoints are untouched until then. The run's lock (`run.lock`) is
taken when the manager is opened, not here.
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

from colonnade.checkpoint.agreement import agreed, save_checks
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
"""Seconds until a folder made by rank 0 must be visible to the other ranks; network file systems cache listings."""
_POLL = 0.02
_PATIENCE_AT_EXIT = 60.0
_PATIENCE_AFTER_ERROR = 5.0
_REST = 5.0
"""Seconds of rest for each second of processor time, while training runs."""
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
    """Save the checkpoint of `step` in the run's folder. Either every rank raises or none.

    Collective over the world.

    Returns:
        With `background`, the save in progress: the tensors are copied to the host and a thread writes them. Else None.
    """
    rank, doing = context.get_global_rank(), f"saving step {step}"

    # A check of the running step may raise, on all ranks: for example in the middle of gradient accumulation.
    check = save_checks.get(model, lambda: None)()
    if check is not None:
        check()

    # Anything that cannot be saved (a type, a value that is not JSON) raises here, before anything is on disk.
    tensors = locate_tensors(model, context, doing)
    with agreed(context, doing):
        state = LocalState(tensors, model, optimizer, extra, context)

    # Replicas store the same blocks, and each distinct block is written once. Every rank publishes a summary of its state and
    # derives the same assignment from all summaries, so no further agreement is needed.
    notes = gather_from_all(state.note(), context)
    with agreed(context, doing):
        plan = plan_save(state, notes, rank)

    # All ranks write to one staging folder, named by rank 0. The sum of the sizes decides whether the save fits on the disk.
    offers = gather_from_all({"step": step, "size": plan.size, "name": staging_name(step)}, context)
    steps = {offer["step"] for offer in offers}
    if len(steps) > 1:
        raise CheckpointError(
            f"ranks called save() with different steps ({listed(sorted(steps))}); call it with the same step on every rank"
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
            # Copied before this function returns, because the next training step changes the tensors in place.
            with agreed(context, doing):
                plan.copy_to_host()
            return BackgroundSave(writer, plan)
        with agreed(context, doing):
            writer.write(plan)
        # The end of the block above is a barrier: every rank's file is on disk now, or all ranks have raised.
        with agreed(context, doing):
            if rank == 0:
                writer.commit()
    except BaseException:
        writer.drop()
        raise
    return None


@dataclass(frozen=True)
class StorageWriter:
    """The disk side of a save on one rank: stage (rank 0), write, commit (rank 0). Nothing here communicates.

    All of it can therefore run in a background thread. Rank 0 learns from the note files that the other ranks are done, never
    from a process group: process groups belong to the training thread, and collectives issued by two threads have no order.
    `size` is the total size in bytes of all ranks' tensors.
    """

    step: int
    staged: Path
    rank: int
    layout: LayoutRecord
    size: int
    keep: int
    started: float = field(default_factory=time.monotonic)

    def stage(self) -> None:
        """Create the staging folder if the save fits on the disk. Called on rank 0."""
        clean(self.staged.parent)
        check_space(self.staged.parent, self._needed)
        self.staged.mkdir()
        fault_point("staged")

    def check_visible(self) -> None:
        """Raise if this rank does not see the staging folder within ten seconds."""
        end = time.monotonic() + _VISIBLE_WITHIN
        while not self.staged.is_dir():
            if time.monotonic() > end:
                raise CheckpointError(
                    f"rank {self.rank} on {socket.gethostname()} does not see {self.staged}, which rank 0 created; "
                    f"use a folder on a file system that all ranks share",
                    code="C084",
                )
            time.sleep(0.05)

    def write(self, plan: SavePlan, after_chunk: Callable[[], None] = lambda: None) -> None:
        """Write this rank's tensors, then its note. `after_chunk` is called after each chunk of bytes."""
        with no_space_errors(self.staged.parent, self._needed):
            file = None
            if plan.entries:
                file = write_tensors(self.staged / tensors_file(self.rank), plan.entries, after_chunk)
            # The note certifies that the file is on disk. Rank 0 polls for it, so it must appear atomically.
            write_at_once(self._note_file(self.rank), plan.note(file).dump())
        fault_point("part written")

    def wait_for_notes(self, stop: threading.Event) -> None:
        """Wait until every rank's note exists; raise if `stop` is set, or a minute after the main thread has ended."""
        missing = set(range(self.layout.world_size))
        asked, main_ended = time.monotonic(), None
        while missing := {rank for rank in missing if not self._note_file(rank).exists()}:
            now = time.monotonic()
            if main_ended is None and not threading.main_thread().is_alive():
                main_ended = now
            late = main_ended is not None and now - main_ended > _PATIENCE_AT_EXIT
            if stop.wait(_POLL) or late:
                raise CheckpointError(
                    f"the background save of step {self.step} was abandoned after {now - asked:.1f} s: ranks "
                    f"{sorted(missing)} have not written their files. Earlier checkpoints are untouched.",
                    code="C084",
                )

    def commit(self) -> None:
        """Publish the checkpoint and delete old ones. Called on rank 0 once every rank's note exists."""
        # The manifest is merged from the notes. Pieces that overlap or leave a gap raise here.
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
            # Read back as a load would, before the rename and before older checkpoints are deleted: an unreadable checkpoint
            # must never be the only one.
            try:
                verify(self.staged, content=False)
            except CheckpointError as error:
                raise CheckpointError(
                    f"the checkpoint of step {self.step} was written but failed verification: {error}. It was not "
                    f"published; earlier checkpoints are untouched.",
                    code="C084",
                ) from error
            path = publish(self.staged, self.step)
        # The checkpoint is durable from here on, so the oldest ones may be deleted.
        retire(path.parent, path, self.keep)
        get_dist_logger().info(
            f"saved step {self.step} to {path} ({megabytes(self.size)}, {time.monotonic() - self.started:.2f} s)"
        )
        by_trainer = {"extra/trainer", "extra/hooks"} <= {item.name for item in manifest.items}
        tell_launcher(self.step, path, by_trainer)

    def drop(self) -> None:
        """Delete the files of a failed save, on rank 0, after all ranks have stopped writing or have exited."""
        if self.rank == 0:
            discard(self.staged)

    @property
    def _needed(self) -> int:
        return self.size + _MANIFEST_SPACE

    def _note_file(self, rank: int) -> Path:
        return self.staged / f"rank-{rank:05d}.part"


class Pace:
    """Throttles a background thread in favour of training: each piece of work is followed by a rest several times as long.

    Only processor time counts as work. Without rests, a save of 100 MB slows one or two steps down to 1.29 times their length;
    with rests it overlaps four steps, which take 1.07 times as long (`benchmarks/trainer.py`).
    """

    def __init__(self) -> None:
        self._hurry = threading.Event()
        self._before: float | None = None

    def hurry(self) -> None:
        """Stop resting, because the training thread waits for the save."""
        self._hurry.set()

    def rest(self) -> None:
        """Rest in proportion to the processor time since the last call. Called by the background thread."""
        worked = 0.0 if self._before is None else time.thread_time() - self._before
        if threading.main_thread().is_alive():
            self._hurry.wait(min(_REST * worked, _LONGEST_REST))
        self._before = time.thread_time()


class BackgroundSave:
    """A save in a background thread: writes this rank's file and, on rank 0, waits for all ranks' files and commits.

    `finish` waits for it on all ranks. The thread is not a daemon, so a process that ends normally first completes its last
    checkpoint.
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
        """Whether the thread is still running."""
        return self._thread.is_alive()

    def finish(self, context: ParallelContext) -> None:
        """Wait for the save at full speed and raise its error on every rank. Collective over the world."""
        self._pace.hurry()
        error = None
        try:
            # The thread of rank 0 waits for every rank's note. Failures elsewhere must reach rank 0 before it joins its own
            # thread, which would otherwise wait for a note that never comes.
            if self._writer.rank != 0:
                self._thread.join()
                error = None if self._error is None else str(self._error)
            for rank, text in enumerate(gather_from_all(error, context)):
                if text:
                    self._give_up(f"on rank {rank}: {text}")
        except BaseException:
            self._give_up("the other ranks have exited")
            raise
        self._thread.join()
        with agreed(context, "saving in the background"):
            if self._error is not None:
                self._writer.drop()
                raise self._error

    def give_up_soon(self) -> None:
        """Make rank 0 stop waiting in a few seconds: after an error on this rank, other ranks may have failed too."""
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
                    self._plan.entries.clear()  # frees the host copies
                if writer.rank == 0:
                    writer.wait_for_notes(self._stop)
                    writer.commit()
        except CheckpointError as error:
            self._error = CheckpointError(self._reason, code="C084") if self._reason else error


def tell_launcher(step: int, path: Path, by_trainer: bool) -> None:
    """Record, on rank 0, the checkpoint a run would resume from; the launcher prints the text if the run is interrupted."""
    how = (
        "a run with a LoadCheckpointHook" if by_trainer else "a loop that calls CheckpointManager.load() on that folder"
    )
    if SAVED in os.environ:
        with contextlib.suppress(OSError):  # the launcher has exited
            Path(os.environ[SAVED]).write_text(f"step {step} in {path}; {how} resumes from it", encoding="utf-8")

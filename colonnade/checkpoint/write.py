"""One save on its way to disk: every rank's part into a staged folder, then one commit by the first rank.

Nothing here communicates, so all of it can run in a background thread beside training. The first rank learns that
the others are done from the notes they leave in the folder, never from a process group: those belong to the
training thread, and collectives of two threads on one group have no order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from colonnade.checkpoint.collect import RankPart
from colonnade.checkpoint.fault import fault_point
from colonnade.checkpoint.folder import discard, publish, retire, told_of_space, write_new
from colonnade.checkpoint.manifest import MANIFEST, LayoutRecord, Manifest
from colonnade.checkpoint.parts import (
    Part,
    leave_part,
    merge_groups,
    merge_tensors,
    part_file,
    rank_file,
    take_part,
)
from colonnade.checkpoint.tensors_file import write_tensors
from colonnade.checkpoint.together import as_checkpoint_errors
from colonnade.errors import CheckpointError

_POLL = 0.02
_PATIENCE = 1800.0
_PATIENCE_AT_EXIT = 30.0


@dataclass(frozen=True)
class Save:
    """Which step goes where, from whom; `needed` is the bytes of all ranks together."""

    step: int
    staged: Path
    rank: int
    layout: LayoutRecord
    needed: int
    keep: int

    def write(self, mine: RankPart) -> None:
        """Write this rank's tensors and its note."""
        with told_of_space(self.staged.parent, self.needed):
            if mine.entries:
                mine.part.file = write_tensors(self.staged / rank_file(self.rank), mine.entries)
            leave_part(self.staged, mine.part)
        fault_point("part written")

    def commit(self) -> Path:
        """Publish the checkpoint, on the first rank, when every rank's note is there; then delete old ones."""
        parts = [take_part(self.staged, rank) for rank in range(self.layout.world_size)]
        for part in parts:
            if part.error:
                raise CheckpointError(f"on rank {part.rank}: {part.error}")
        with told_of_space(self.staged.parent, self.needed):
            write_new(self.staged / MANIFEST, self._manifest(parts).dump())
            fault_point("manifest written")
            path = publish(self.staged, self.step)
        retire(path.parent, path, self.keep)
        return path

    def wait_for_parts(self) -> None:
        """Wait until every rank's note is there; gives up on ranks that are gone."""
        missing = set(range(self.layout.world_size))
        asked, main_ended = time.monotonic(), None
        while missing := {rank for rank in missing if not part_file(self.staged, rank).exists()}:
            now = time.monotonic()
            if main_ended is None and not threading.main_thread().is_alive():
                main_ended = now
            if now - asked > _PATIENCE or (main_ended is not None and now - main_ended > _PATIENCE_AT_EXIT):
                raise CheckpointError(
                    f"the background save of step {self.step} was given up after {now - asked:.0f} s: ranks "
                    f"{sorted(missing)} have not written their part. Earlier checkpoints are untouched."
                )
            time.sleep(_POLL)

    def _manifest(self, parts: list[Part]) -> Manifest:
        return Manifest(
            step=self.step,
            time=time.time(),
            layout=self.layout,
            files=tuple(part.file for part in parts if part.file is not None),
            tensors=merge_tensors(parts),
            groups=merge_groups(parts),
            items=tuple(item for part in parts for item in part.items),
        )


class Background(threading.Thread):
    """Writes one save beside training; `error` is what went wrong on this rank, known after `join`.

    Not a daemon: a process that ends normally ends after its last checkpoint is on disk.
    """

    def __init__(self, save: Save, mine: RankPart, done: Callable[[Path], None]) -> None:
        super().__init__(name=f"colonnade-save-{save.step}", daemon=False)
        self.error: CheckpointError | None = None
        self._save, self._mine, self._done = save, mine, done

    def run(self) -> None:
        try:
            with as_checkpoint_errors(f"saving step {self._save.step} in the background"):
                self._write()
        except CheckpointError as error:
            self.error = error
            if self._save.rank == 0:
                discard(self._save.staged)

    def _write(self) -> None:
        try:
            self._save.write(self._mine)
        except Exception as error:
            leave_part(self._save.staged, Part(self._save.rank, saves_optimizer=False, error=str(error)))
            raise
        finally:
            self._mine.entries.clear()
        if self._save.rank == 0:
            self._save.wait_for_parts()
            self._done(self._save.commit())

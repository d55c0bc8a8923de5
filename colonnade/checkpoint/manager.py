"""CheckpointManager: saves and loads the checkpoints of a run, on every rank of its world."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn

from colonnade.checkpoint.agreement import agreed, before_save
from colonnade.checkpoint.load import LoadedInfo, load_checkpoint
from colonnade.checkpoint.manifest import LayoutRecord
from colonnade.checkpoint.save import LocalState, SavePlan, plan_save
from colonnade.checkpoint.storage import BackgroundWriter, RunLock, StorageWriter, newest_good, published, staging_name
from colonnade.checkpoint.tensors import locate_tensors
from colonnade.comm.messages import gather_from_all
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, listed
from colonnade.logging import get_dist_logger
from colonnade.paths import local_path


class CheckpointManager:
    """The checkpoints of one run in one folder, which all ranks must see (a shared file system).

    Making it, `save`, `load`, `wait` and `close` are collective: every rank calls them, in the same order, and every
    rank raises when one does. A checkpoint appears under its name by one rename, when all of it is on disk; the
    newest good one is found by listing. After a save all but the `keep` newest steps are deleted.

    With `background`, `save` copies the tensors to the host and returns; a thread writes them. The next `save`,
    `load`, `wait` or `close` waits for it and raises its error. The thread never communicates: each rank leaves a
    note in the folder when its part is on disk, and rank 0 commits when it sees them all.

    One run may write to a folder at a time (`run.lock`); `read_only` takes no lock and cannot save. `verify=False`
    loads without hashing the files; sizes and the manifest are always checked.
    """

    def __init__(
        self,
        folder: str | Path,
        context: ParallelContext,
        keep: int = 3,
        background: bool = False,
        verify: bool = True,
        *,
        read_only: bool = False,
    ) -> None:
        self.context = context
        self.keep = keep
        self.background = background
        self.verify = verify
        self.read_only = read_only
        self._pending: BackgroundWriter | None = None
        self._lock: RunLock | None = None
        with context.waits.together("CheckpointManager()"), agreed(context, f"opening {folder}"):
            self.folder = local_path(folder, "the folder of a CheckpointManager", CheckpointError)
            if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
                raise CheckpointError(f"keep is how many checkpoints stay, a whole number from 1 on, not {keep!r}")
            if not read_only and self._is_first:
                self._lock = RunLock(self.folder)

    # -- what there is ------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending. This rank's own look at the folder."""
        return sorted({found.step for found in published(self.folder)})

    def latest(self) -> int | None:
        """The newest step whose manifest, files and sizes are in order. This rank's own look at the folder."""
        found, _ = newest_good(self.folder, content=False)
        return None if found is None else found.step

    # -- saving -------------------------------------------------------------------------------------------

    def save(self, step: int, model: nn.Module, optimizer: Any = None, extra: Mapping[str, Any] | None = None) -> None:
        """Save everything under `step`. Collective over the world.

        `extra` maps names to objects with `state_dict()` and `load_state_dict()`, or to plain JSON values. A step
        that was saved before is replaced once the new checkpoint is in place.
        """
        with self.context.waits.together("CheckpointManager.save()"):
            self._save(step, model, optimizer, extra)

    def _save(self, step: int, model: nn.Module, optimizer: Any, extra: Mapping[str, Any] | None) -> None:
        self.wait()
        with self._saving(step):
            self._check_save(step)
        look = before_save.get(model, lambda: None)()
        if look is not None:
            look()
        tensors = locate_tensors(model, self.context, f"saving step {step}")
        with self._saving(step):
            state = LocalState(tensors, model, optimizer, extra, self.context)
        notes = gather_from_all(state.note(), self.context)
        with self._saving(step):
            plan = plan_save(state, notes, self.context.get_global_rank())
        writer = self._stage(step, plan)
        try:
            if self.background:
                with self._saving(step):
                    plan.copy_to_host()
                self._pending = BackgroundWriter(writer, plan)
            else:
                with self._saving(step):
                    writer.write(plan)
                with self._saving(step):
                    if self._is_first:
                        writer.commit()
        except BaseException:
            writer.drop()
            raise

    def wait(self) -> None:
        """Wait for the background save, if there is one, and raise its error on every rank. Collective."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            for rank, error in enumerate(gather_from_all(pending.part_error(), self.context)):
                if error:
                    pending.give_up(f"on rank {rank}: {error}")
        except BaseException:
            pending.give_up("the other ranks are gone")
            raise
        pending.join()
        with agreed(self.context, "saving in the background"):
            if pending.error is not None:
                pending.writer.drop()
                raise pending.error

    def close(self) -> None:
        """Wait for the background save and let another run have the folder. Collective."""
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        # After an error on this rank the others may be gone: nothing collective, and the thread ends by itself.
        if kind is None:
            self.close()
        elif self._pending is None or not self._pending.is_writing:
            self._release()
        else:
            self._pending.give_up_soon()

    # -- loading ------------------------------------------------------------------------------------------

    def load(
        self,
        model: nn.Module,
        optimizer: Any = None,
        extra: Mapping[str, Any] | None = None,
        step: int | None = None,
        rest: Any = None,
    ) -> LoadedInfo:
        """Load the newest good checkpoint, or that of `step`, whatever layout it was saved on. Collective.

        A damaged one is passed over for the last good one, with a warning; one that was asked for by its step is an
        error. A checkpoint of another model is an error that lists what does not fit. All of it is read before anything
        changes: if it cannot be read on some rank, or an object does not take its state, nothing is loaded on any. (If the
        optimizer's own `load_state_dict` fails after that, the error says that only a part was loaded.)
        Objects in `extra` get their state; plain values come back in the result. `rest`, an object with `state_dict` and
        `load_state_dict`, gets all plain values as one dict, and may refuse them.
        """
        with self.context.waits.together("CheckpointManager.load()"):
            self.wait()
            return load_checkpoint(self.folder, self.context, model, optimizer, extra or {}, step, self.verify, rest)

    # -- inside -------------------------------------------------------------------------------------------

    @property
    def _is_first(self) -> bool:
        return self.context.get_global_rank() == 0

    def _check_save(self, step: int) -> None:
        if self.read_only:
            raise CheckpointError(f"this manager was opened read_only; open {self.folder} without it to save")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"a step is a whole number from 0 on, not {step!r}")
        later = [other for other in self.steps() if other > step] if self._is_first else []
        if later:
            get_dist_logger().warning(
                f"step {step} is saved although {self.folder} has later steps: {listed(later)}. load() takes the latest "
                f"step, so delete them if this run has left them behind."
            )

    def _saving(self, step: int) -> AbstractContextManager[None]:
        return agreed(self.context, f"saving step {step}")

    def _stage(self, step: int, plan: SavePlan) -> StorageWriter:
        """Agree on the staged folder and make it. Collective."""
        notes = gather_from_all({"step": step, "size": plan.size, "name": staging_name(step)}, self.context)
        steps = {note["step"] for note in notes}
        if len(steps) > 1:
            raise CheckpointError(
                f"the ranks save different steps: {listed(sorted(steps))}; save() is called by all for one"
            )
        layout, size = LayoutRecord.of(self.context.layout), sum(note["size"] for note in notes)
        first, *_ = notes
        staged = self.folder / first["name"]
        writer = StorageWriter(step, staged, self.context.get_global_rank(), layout, size, self.keep)
        with self._saving(step):
            if self._is_first:
                writer.stage()
        with self._saving(step):
            writer.check_visible()
        return writer

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

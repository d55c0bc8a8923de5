"""CheckpointManager: saves and loads the checkpoints of a run, on every rank of its world.

`save.save_checkpoint` is the whole save, `load.load_checkpoint` the whole load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from colonnade.checkpoint.agreement import agreed
from colonnade.checkpoint.load import LoadedInfo, load_checkpoint
from colonnade.checkpoint.save import BackgroundSave, save_checkpoint
from colonnade.checkpoint.storage import RunLock, newest_good, published
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
        self._pending: BackgroundSave | None = None
        self._lock: RunLock | None = None
        with self.context.waits.together("CheckpointManager()"), agreed(context, f"opening {folder}"):
            self.folder = local_path(folder, "the folder of a CheckpointManager", CheckpointError)
            if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
                raise CheckpointError(f"keep is how many checkpoints stay, a whole number from 1 on, not {keep!r}")
            # One lock for all ranks: they are of one run.
            if not read_only and self._is_first:
                self._lock = RunLock(self.folder)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending. This rank's own look at the folder."""
        return sorted({found.step for found in published(self.folder)})

    def latest(self) -> int | None:
        """The newest step whose manifest, files and sizes are in order. This rank's own look at the folder."""
        found, _ = newest_good(self.folder, content=False)
        return None if found is None else found.step

    def save(self, step: int, model: nn.Module, optimizer: Any = None, extra: Mapping[str, Any] | None = None) -> None:
        """Save everything under `step`. Collective over the world.

        `extra` maps names to objects with `state_dict()` and `load_state_dict()`, or to plain JSON values. A step
        that was saved before is replaced once the new checkpoint is in place.
        """
        with self.context.waits.together("CheckpointManager.save()"):
            self.wait()
            with agreed(self.context, f"saving step {step}"):
                if self.read_only:
                    raise CheckpointError(f"this manager was opened read_only; open {self.folder} without it to save")
                if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                    raise CheckpointError(f"a step is a whole number from 0 on, not {step!r}")
                # Only said: a run may go back to an earlier step on purpose.
                later = [other for other in self.steps() if other > step] if self._is_first else []
                if later:
                    get_dist_logger().warning(
                        f"step {step} is saved although {self.folder} has later steps: {listed(later)}. load() takes the "
                        f"latest step, so delete them if this run has left them behind."
                    )
            self._pending = save_checkpoint(
                self.folder, self.context, step, model, optimizer, extra, self.keep, self.background
            )

    def wait(self) -> None:
        """Wait for the background save, if there is one, and raise its error on every rank. Collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish(self.context)

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

    @property
    def _is_first(self) -> bool:
        return self.context.get_global_rank() == 0

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

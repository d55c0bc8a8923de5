"""CheckpointManager: saves and loads the checkpoints of a run, on every rank.

The steps of a save are in `save.save_checkpoint`, the steps of a load in `load.load_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from colonnade.checkpoint.load import LoadedInfo, load_checkpoint
from colonnade.checkpoint.save import BackgroundSave, agreed, save_checkpoint
from colonnade.checkpoint.storage import RunLock, newest_good, published
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, listed
from colonnade.logging import get_dist_logger
from colonnade.paths import local_path


class CheckpointManager:
    """The checkpoints of a run, in a folder on a file system that all ranks share.

    The constructor, `save`, `load`, `wait` and `close` are collective: every rank calls them, in the same order, and if one rank
    raises, every rank raises. A checkpoint appears under its name by a single rename, when all its files are on disk.

    Args:
        folder: The run's folder, created if missing. Only one run may write to it at a time (`run.lock`).
        context: The world.
        keep: The number of newest steps whose checkpoints are kept; older checkpoints are deleted after a save.
        background: `save` copies the tensors to the host and returns, and a thread writes them. The next `save`, `load`,
            `wait` or `close` waits for the thread and raises its error. The thread never communicates: each rank writes a
            note to the folder when its file is on disk, and rank 0 commits when all notes exist.
        verify: Hash the files on load. Sizes and the manifest are always checked.
        read_only: Take no lock; `save` raises.

    Example::

        from colonnade.checkpoint import CheckpointManager

        gpc = colonnade.launch({})
        model = nn.Linear(4, 2)
        engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())
        with CheckpointManager("run", gpc, keep=2) as manager:
            manager.save(1, engine.model, engine.optimizer)
            print(manager.load(engine.model, engine.optimizer).step)
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
                raise CheckpointError(
                    f"keep is {keep!r}; pass the number of checkpoints to keep, a whole number of at least 1"
                )
            # One lock for all ranks of the run.
            if not read_only and self._is_first:
                self._lock = RunLock(self.folder)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending, as this rank sees the folder. Not collective."""
        return sorted({found.step for found in published(self.folder)})

    def latest(self) -> int | None:
        """The newest step whose manifest and file sizes are intact, as this rank sees the folder. Not collective."""
        found, _ = newest_good(self.folder, content=False)
        return None if found is None else found.step

    def save(self, step: int, model: nn.Module, optimizer: Any = None, extra: Mapping[str, Any] | None = None) -> None:
        """Save the model, the optimizer, the random state and `extra` as the checkpoint of `step`.

        Collective over the world. An existing checkpoint of the same step is replaced when the new checkpoint is complete.

        Args:
            step: The step, equal on all ranks.
            model: The model, whose tensors are saved by name.
            optimizer: The optimizer of the model; sharded optimizers save their shards.
            extra: Objects with `state_dict()` and `load_state_dict()`, or plain JSON values, by name.
        """
        with self.context.waits.together("CheckpointManager.save()"):
            self.wait()
            with agreed(self.context, f"saving step {step}"):
                if self.read_only:
                    raise CheckpointError(
                        f"this manager is read-only. To save, open {self.folder} without read_only=True."
                    )
                if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                    raise CheckpointError(f"step is {step!r}; pass a whole number, 0 or larger")
                # Only a warning: a run may go back to an earlier step on purpose.
                later = [other for other in self.steps() if other > step] if self._is_first else []
                if later:
                    get_dist_logger().warning(
                        f"step {step} was saved, but {self.folder} also has the later steps {listed(later)}. load() "
                        "takes the latest step. Delete the later steps if this run does not need them any more."
                    )
            self._pending = save_checkpoint(
                self.folder, self.context, step, model, optimizer, extra, self.keep, self.background
            )

    def wait(self) -> None:
        """Wait for the background save, if any, and raise its error on every rank. Collective over the world."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish(self.context)

    def close(self) -> None:
        """Wait for the background save and release the folder for other runs. Collective over the world."""
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        # After an error on this rank the other ranks may have exited, so nothing here is collective. A running thread ends
        # without help: it stops waiting for other ranks' files after a few seconds.
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
        """Load the newest intact checkpoint, or the checkpoint of `step`, saved on any layout. Collective over the world.

        Damaged checkpoints are skipped with a warning. All data is read before the first change: if a read fails on some rank, or
        an object rejects its state, nothing is loaded on any rank. (The only later failure is one of the optimizer's own
        `load_state_dict`; its error message states that the checkpoint is partly loaded.)

        Args:
            model: A model with the names and shapes of the saved one.
            optimizer: An optimizer of the saved class, or None to load the model only.
            extra: Objects by name, which load the states that were saved under these names. Plain values are returned in the
                result.
            step: The step to load; raises if its checkpoint is damaged.
            rest: An object with `state_dict` and `load_state_dict` that gets all plain values as one dict and may reject them.

        Returns:
            The step, the folder and the plain values.

        Raises:
            CheckpointError: There is no intact checkpoint, or the checkpoint does not fit; the message lists all differences.
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

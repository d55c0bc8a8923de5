"""The lock of a run's folder: one run writes checkpoints there at a time, and a second one is told who does."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from functools import cache
from pathlib import Path
from typing import Any

from colonnade.checkpoint.storage.folder import make_folder
from colonnade.errors import CheckpointError
from colonnade.logging import get_dist_logger

LOCK_FILE = "run.lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""What `flock` says where it does not work at all: some network file systems, or without their lock service."""
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class RunLock:
    """Holds `run.lock` in a folder, which it makes, until `release` or until this process is gone, however it ends.

    The kernel's lock on the file decides; its text only says who holds it. A file whose writer has died is
    taken over.
    """

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self.path = folder / LOCK_FILE
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        before = self._lock()
        if before:
            get_dist_logger().info(f"took over {self.path} from {_who(before)}, which ended without closing it")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        text = json.dumps(holder).encode()
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))
        _closed_in_children().add(self)

    def _lock(self) -> dict[str, Any] | None:
        """Take the lock, or refuse; returns who had it and never gave it back, as far as is known."""
        error = None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failed:
            error = failed
        holder = self._read()
        if error is None:
            return holder
        if error.errno not in _NO_LOCKS:
            self._close()
            raise CheckpointError(_refusal(self.path, holder, error), code="C084")
        last = f" (the last to write its name there: {_who(holder)})" if holder else ""
        get_dist_logger().warning(
            f"the file system of {self.path} locks no files ({error.strerror}): see to it that no other run writes "
            f"here{last}"
        )
        return None

    def release(self) -> None:
        """Let another run have the folder. Safe to call twice."""
        if self._close.alive:
            os.ftruncate(self._descriptor, 0)
            self._close()

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(os.pread(self._descriptor, 4096, 0))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


@cache
def _closed_in_children() -> weakref.WeakSet[RunLock]:
    """The locks that a forked child gives up.

    A data loader's worker that outlives its killed parent for some seconds must not keep the parent's lock alive.
    """
    held: weakref.WeakSet[RunLock] = weakref.WeakSet()
    os.register_at_fork(after_in_child=lambda: [lock._close() for lock in list(held)])
    return held


def _refusal(path: Path, holder: dict[str, Any], error: OSError) -> str:
    if error.errno not in _HELD:
        return f"{path} cannot be locked: {error.strerror}. Choose a folder on another file system."
    if holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname():
        return f"this process already has a CheckpointManager on {path.parent}; close() it before making another"
    return (
        f"another run writes checkpoints to {path.parent}: {_who(holder)}. Choose another folder, or end that run; to only "
        f"load from here, pass read_only=True."
    )


def _who(holder: dict[str, Any]) -> str:
    return (
        f"process {holder.get('pid', '?')} on {holder.get('host', '?')}, since {holder.get('since', '?')}"
        if holder
        else "a process that has not said its name"
    )

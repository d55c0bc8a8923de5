"""The folder of a run on disk: its file names, and all renames, locks and syncs of checkpoints. No torch.

- `step-00000100` is the checkpoint of step 100. `step-00000100.r1` was saved later for the same step: publishing never overwrites
  a checkpoint.
- `.tmp-<step>-<nonce>` is a folder that is being written or deleted.
- `run.lock` identifies the run that writes.

The functions need a file system with rename, fsync and flock. This file also has the staging and replacing of exported files and
folders, and `verify`, which compares a checkpoint with its manifest.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from colonnade.checkpoint.manifest import MANIFEST, Damaged, FileRecord, Manifest, parse
from colonnade.errors import CheckpointError
from colonnade.logging import get_dist_logger
from colonnade.paths import local_path

hook: Callable[[str], None] | None = None
"""Called with the name of each step of the save protocol. Only tests set it, to raise or to kill the process there."""


def fault_point(name: str) -> None:
    """Call the hook of a test with the name of this point, if a test has set a hook."""
    if hook is not None:
        hook(name)


# --- The checkpoints of a run ---


_PUBLISHED = re.compile(r"step-(\d{8,18})(?:\.r(\d{1,9}))?")
_STAGED = re.compile(r"\.tmp-\d+-[0-9a-f]{8}")
_SPARE = 1.1


@dataclass(frozen=True, order=True)
class Found:
    """A published checkpoint, which may be damaged. Of two revisions of a step, the higher revision is newer."""

    step: int
    revision: int
    path: Path


def published(folder: Path) -> list[Found]:
    """Every checkpoint of the folder, oldest step first. Links are not followed."""
    # The names are the only index: there is no "latest" file that could point to a deleted checkpoint.
    found = []
    for entry in _entries(folder):
        match = _PUBLISHED.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            found.append(Found(int(match[1]), int(match[2] or 0), folder / entry.name))
    return sorted(found)


def step_of(path: Path) -> int | None:
    """The step number in the name of a checkpoint folder; None if the folder is no checkpoint."""
    match = _PUBLISHED.fullmatch(path.name)
    return int(match[1]) if match else None


def make_folder(folder: Path) -> None:
    """Create the run's folder and check that it is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / staging_name(0)
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be written to {folder}: {error.strerror}. Choose a folder that this user can write to.",
            code="C084",
        ) from error


def staging_name(step: int) -> str:
    """Make a new name for a folder that is being written or deleted."""
    return f".tmp-{step}-{secrets.token_hex(4)}"


def clean(folder: Path) -> None:
    """Delete the remains of interrupted saves and deletions in a run's folder. Failures are ignored; the next save tries again."""
    for entry in _entries(folder):
        if _STAGED.fullmatch(entry.name):
            shutil.rmtree(folder / entry.name, ignore_errors=True)  # leaves links and plain files alone


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Create an unbuffered file that must not exist yet; when the block ends, its content is synced to disk."""
    with open(path, "xb", buffering=0) as file:
        yield file
        os.fsync(file.fileno())


def write_all(file: BinaryIO, content: memoryview) -> None:
    """Write all of `content` to an unbuffered file, of which a single `write` may write only a part."""
    while len(content):
        content = content[file.write(content) :]


def write_at_once(path: Path, text: str) -> None:
    """Write a small file atomically, by a rename, because other ranks poll for its name."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    os.rename(unfinished, path)


def write_manifest(staged: Path, manifest: Manifest) -> None:
    """Write and sync the manifest."""
    with new_file(staged / MANIFEST) as file:
        write_all(file, memoryview(manifest.dump()))
    fault_point("manifest written")


def publish(staged: Path, step: int) -> Path:
    """Publish a staging folder, whose files are synced, as the newest checkpoint of its step, by a single rename.

    Returns its path.
    """
    folder = staged.parent
    revisions = [found.revision for found in published(folder) if found.step == step]
    suffix = f".r{max(revisions) + 1}" if revisions else ""
    target = folder / f"step-{step:08d}{suffix}"
    # The directory entries must be on disk before the rename: otherwise a power cut could leave an empty checkpoint.
    sync(staged)
    fault_point("folder synced")
    os.rename(staged, target)
    fault_point("renamed")
    # The rename itself must be on disk before older checkpoints are deleted.
    sync(folder)
    fault_point("parent synced")
    return target


def retire(folder: Path, newest: Path, keep: int) -> None:
    """Delete the checkpoints of all steps except the `keep` newest; `newest` is always kept. Failures are logged."""
    # `newest` may have a lower step than the others: a restarted run must not delete its own first checkpoint.
    there = published(folder)
    kept = {found.step for found in there if found.path == newest}
    for found in reversed(there):
        if found.step not in kept and len(kept) < keep:
            kept.add(found.step)
        elif found.path != newest:
            # Renamed first, so that a kill during the deletion leaves nothing that looks like a checkpoint.
            aside = found.path.parent / staging_name(found.step)
            try:
                os.rename(found.path, aside)
                fault_point("retired")
                shutil.rmtree(aside)
            except OSError as error:
                get_dist_logger().warning(f"the old checkpoint {found.path} could not be deleted: {error}")


def sync(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_space(folder: Path, needed: int) -> None:
    """Raise if less than 1.1 times the needed bytes are free."""
    free = shutil.disk_usage(folder).free
    if needed * _SPARE > free:
        raise CheckpointError(_no_space(folder, needed, free), code="C084")


@contextmanager
def no_space_errors(folder: Path, needed: int) -> Iterator[None]:
    """Inside the block, convert the OS errors "no space left" and "over quota" to the error of `check_space`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free
        raise CheckpointError(f"{_no_space(folder, needed, free)} ({error.strerror})", code="C084") from error


def megabytes(size: int) -> str:
    """A number of bytes as text, in MB."""
    return f"{size / 1e6:,.1f} MB"


def _no_space(folder: Path, needed: int, free: int) -> str:
    return (
        f"no space for the checkpoint in {folder}: {megabytes(needed)} are needed, {megabytes(free)} are free. "
        "Earlier checkpoints are unchanged. Free some space, choose another folder, or keep fewer checkpoints "
        "(keep=)."
    )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is a file; pass the folder of the checkpoints", code="C080") from None


# --- The lock: one run writes checkpoints to a folder at a time ---


LOCK_FILE = "run.lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors of `flock` on file systems without locks: some network file systems, or without their lock service."""
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class RunLock:
    """The lock of a run's folder (created if missing). It is held until `release`, or until this process ends in any way.

    The lock is the kernel's lock on `run.lock`; the text in the file only identifies the owner. If the owner has died, the lock
    file is reused.
    """

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self.path = folder / LOCK_FILE
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        refused = None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            refused = error

        # The text names the current owner or, if the lock was free, an owner that ended without releasing it.
        try:
            found = json.loads(os.pread(self._descriptor, 4096, 0))
        except ValueError:
            found = None
        owner = found if isinstance(found, dict) else {}
        if refused is not None and refused.errno not in _NO_LOCKS:
            self._close()
            if refused.errno not in _HELD:
                message = f"{self.path} cannot be locked: {refused.strerror}. Choose a folder on another file system."
            elif owner.get("pid") == os.getpid() and owner.get("host") == socket.gethostname():
                message = (
                    f"this process already has a CheckpointManager on {folder}. Call close() on that manager "
                    "before you open another."
                )
            else:
                message = (
                    f"another run writes checkpoints to {folder}: {_describe_owner(owner)}. Choose another "
                    "folder, or end the other run. To load only, pass read_only=True."
                )
            raise CheckpointError(message, code="C084")
        if refused is not None:
            last = f" (last owner in the file: {_describe_owner(owner)})" if owner else ""
            get_dist_logger().warning(
                f"the file system of {self.path} does not support locks ({refused.strerror}). Make sure that no "
                f"other run writes to this folder.{last}"
            )
        elif owner:
            get_dist_logger().info(
                f"took over {self.path} from {_describe_owner(owner)}, which ended without closing it"
            )

        own = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        text = json.dumps(own).encode()
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))
        _closed_in_children().add(self)

    def release(self) -> None:
        """Release the folder for other runs. Safe to call twice."""
        if self._close.alive:
            os.ftruncate(self._descriptor, 0)
            self._close()


@cache
def _closed_in_children() -> weakref.WeakSet[RunLock]:
    """The locks that forked children close, so that a data loader worker does not keep the lock of its killed parent."""
    locks: weakref.WeakSet[RunLock] = weakref.WeakSet()
    os.register_at_fork(after_in_child=lambda: [lock._close() for lock in list(locks)])
    return locks


def _describe_owner(owner: dict[str, Any]) -> str:
    return (
        f"process {owner.get('pid', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')}"
        if owner
        else "an unknown process"
    )


# --------------------------------------------------------------------------------------------------
# Exports: files and folders that are staged on the same disk and replace earlier ones by renames.
#
# In an existing folder only the weight files are replaced. Other files are neither copied nor moved, so the folder may be large,
# a working directory, or a mount point. Links are followed.
# --------------------------------------------------------------------------------------------------


_TOKEN = 4
"""Random bytes in a staging name."""


def staging_path(target: Path) -> Path:
    """Make a new staging path for `target`: inside `target` if it is an existing folder, else next to it."""
    real, token = Path(os.path.realpath(target)), secrets.token_hex(_TOKEN)
    return real / f".saving-{token}" if real.is_dir() else real.with_name(f".{real.name}.saving-{token}")


def make_room(staged: Path, needed: int) -> None:
    """Delete the remains of interrupted saves to the same target, and check the free space."""
    staged.parent.mkdir(parents=True, exist_ok=True)
    for left in _of_all_saves(staged):
        discard(left)
    check_space(staged.parent, needed)


def discard(staged: Path) -> None:
    """Delete a staged file or folder if it exists."""
    if staged.is_dir():
        shutil.rmtree(staged, ignore_errors=True)
    else:
        staged.unlink(missing_ok=True)


@contextmanager
def staging(target: Path, needed: int) -> Iterator[Path]:
    """A context manager that provides a staging path for `target`. Raises if less than `needed` bytes are free.

    Deletes the path at the end if it still exists.
    """
    staged = staging_path(target)
    make_room(staged, needed)
    try:
        with no_space_errors(staged.parent, needed):
            yield staged
    finally:
        discard(staged)


def place_file(staged: Path, target: Path) -> None:
    """Rename a staged and synced file to `target`."""
    real = Path(os.path.realpath(target))
    if real.is_dir():
        raise CheckpointError(f"{target} is a folder; give the name of a file", code="C084")
    os.replace(staged, real)
    sync(real.parent)


def place_folder(staged: Path, target: Path, is_old: Callable[[str], bool], heads: Collection[str]) -> None:
    """Rename a staging folder, whose files are synced, to `target`, or replace the files of an existing `target`.

    In an existing folder, files with the same names and files for which `is_old` is true are replaced. They are restored after an
    error. If the process is killed, they stay in `.old-<number>`, which the next completed save deletes.

    Args:
        staged: The staging folder, from `staging_path(target)`.
        target: The folder to create or update.
        is_old: Returns whether a file name belongs to an earlier save.
        heads: File names that readers open first. They are removed first and placed last, so that no reader gets a mix of old
            and new files.
    """
    folder = Path(os.path.realpath(target))
    sync(staged)
    fault_point("folder synced")
    if staged.parent != folder:  # the target does not exist yet
        os.rename(staged, folder)
        fault_point("renamed")
        sync(folder.parent)
        return
    new = {entry.name for entry in staged.iterdir()}
    old = {entry.name for entry in folder.iterdir() if entry.name in new or is_old(entry.name)}
    for name in sorted(old):
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            raise CheckpointError(
                f"{folder / name} is a folder, but a file of this name must be written. Move the folder, or choose "
                "another target.",
                code="C084",
            )
    aside = folder / f".old-{secrets.token_hex(_TOKEN)}"
    aside.mkdir()
    moved: list[tuple[Path, Path]] = []

    def move(names: set[str], source: Path, to: Path, point: str) -> None:
        for name in sorted(names):
            os.rename(source / name, to / name)
            moved.append((source / name, to / name))
        sync(folder)
        fault_point(point)

    try:
        move(old.intersection(heads), folder, aside, "head aside")
        move(old.difference(heads), folder, aside, "old ones aside")
        move(new.difference(heads), staged, folder, "files placed")
        move(new.intersection(heads), staged, folder, "heads placed")
    except BaseException:
        for before, after in reversed(moved):
            os.rename(after, before)
        aside.rmdir()
        raise
    fault_point("renamed")
    for left in _of_all_saves(aside):
        discard(left)


def _of_all_saves(path: Path) -> list[Path]:
    """The paths that differ from `path` only in the random number of the save."""
    name = glob.escape(path.name[: -2 * _TOKEN])
    return list(path.parent.glob(name + "[0-9a-f]" * 2 * _TOKEN))


# --- Verifying a checkpoint: the manifest, the list of files, their sizes and their bytes ---


_CHUNK = 1 << 20
_LONGEST = 1 << 28


def verify(checkpoint: str | Path, content: bool = True) -> Manifest:
    """Verify a checkpoint against its manifest.

    Args:
        checkpoint: The folder of one checkpoint, such as `run/step-00000100`.
        content: Whether to check the hashes of files, too; if not, only the manifest, the file list and the sizes are checked.

    Returns:
        The manifest.

    Raises:
        CheckpointError: A file is missing, unknown or changed; the message has the expected and the found value.
    """
    path = local_path(checkpoint, "the checkpoint", CheckpointError)
    manifest = read_manifest(path)
    check_files(path, manifest.files, content)
    return manifest


def newest_good(folder: Path, step: int | None = None, content: bool = True) -> tuple[Found | None, list[str]]:
    """Find the newest checkpoint of a run's folder (or of `step`) that passes `verify`.

    Returns it, or None, and the errors of newer checkpoints.
    """
    problems: list[str] = []
    for found in reversed(published(folder)):
        if step in (None, found.step):
            try:
                verify(found.path, content)
            except (CheckpointError, OSError) as error:
                problems.append(f"{found.path.name}: {error}")
            else:
                return found, problems
    return None, problems


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises if the folder has files that are not in the manifest."""
    file = checkpoint / MANIFEST
    if _plain_size(file) > _LONGEST:
        raise Damaged(f"{MANIFEST} is larger than {_LONGEST} bytes")
    manifest = parse(file.read_bytes())
    if step_of(checkpoint) not in (None, manifest.step):
        raise Damaged(
            f"{checkpoint.name} contains the checkpoint of step {manifest.step}, so its folder was renamed or swapped"
        )
    expected = {MANIFEST, *(record.name for record in manifest.files)}
    # A file outside the manifest has no hash. Somebody may have placed it to be opened by mistake.
    unknown = sorted({entry.name for entry in checkpoint.iterdir()} - expected)
    if unknown:
        raise Damaged(f"{unknown[0]!r} is not in the manifest. Unknown files are never opened; remove the file.")
    return manifest


def check_files(checkpoint: Path, files: Iterable[FileRecord], content: bool) -> None:
    """Check the sizes of these files and, with `content`, their hashes."""
    for record in files:
        size = _plain_size(checkpoint / record.name)
        if size != record.size:
            raise Damaged(f"{record.name} has {size} bytes, expected {record.size}")
        if content:
            digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
            with open(checkpoint / record.name, "rb") as file:
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])
            if digest.hexdigest() != record.sha256:
                raise Damaged(
                    f"{record.name} was changed: its sha256 is {digest.hexdigest()}, expected {record.sha256}"
                )


def _plain_size(path: Path) -> int:
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{path.name} is a link or a folder; only plain files are opened")
    return found.st_size

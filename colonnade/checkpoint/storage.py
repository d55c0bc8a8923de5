"""The folder of a run on disk: what lies in it, and every rename, lock and sync of a checkpoint. No torch.

`step-00000100` holds the checkpoint of step 100; `step-00000100.r1` one of the same step that was saved later,
so that publishing never touches what is there. `.tmp-<step>-<nonce>` is being written, or being deleted. `run.lock` says
which run writes there.

All of it is for a file system with rename, fsync and flock; storage of another kind would take the place of this file. Then
come the files and folders that an export replaces, and `verify`, which says whether a checkpoint is what was written.
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
"""Called with the name of each point of the save protocol that is passed. Only tests set it, to fail or to kill there."""


def fault_point(name: str) -> None:
    """Pass the point `name`."""
    if hook is not None:
        hook(name)


# --- The checkpoints of a run ---


_PUBLISHED = re.compile(r"step-(\d{8,18})(?:\.r(\d{1,9}))?")
_STAGED = re.compile(r"\.tmp-\d+-[0-9a-f]{8}")
_SPARE = 1.1


@dataclass(frozen=True, order=True)
class Found:
    """A published checkpoint, good or not; the later revision of a step is the newer one."""

    step: int
    revision: int
    path: Path


def published(folder: Path) -> list[Found]:
    """Every checkpoint of the folder, oldest step first. Links are not followed."""
    # The names alone say what there is: no file points to the newest, so none can be left pointing to one that is gone.
    found = []
    for entry in _entries(folder):
        match = _PUBLISHED.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            found.append(Found(int(match[1]), int(match[2] or 0), folder / entry.name))
    return sorted(found)


def step_of(path: Path) -> int | None:
    """The step that the name of a checkpoint's folder gives."""
    match = _PUBLISHED.fullmatch(path.name)
    return int(match[1]) if match else None


def make_folder(folder: Path) -> None:
    """Create the run's folder and see that it can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / staging_name(0)
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be written to {folder}: {error.strerror}. Choose a folder that this user may write to.",
            code="C084",
        ) from error


def staging_name(step: int) -> str:
    """A new name for a folder that is not a checkpoint yet, or no longer."""
    return f".tmp-{step}-{secrets.token_hex(4)}"


def clean(folder: Path) -> None:
    """Delete what interrupted saves and deletions have left; what cannot be deleted is left for the next time."""
    for entry in _entries(folder):
        if _STAGED.fullmatch(entry.name):
            shutil.rmtree(folder / entry.name, ignore_errors=True)  # which takes no link and no file


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is not there yet, without a buffer; its content is on disk when the block ends."""
    with open(path, "xb", buffering=0) as file:
        yield file
        os.fsync(file.fileno())


def write_all(file: BinaryIO, content: memoryview) -> None:
    """Write to a file without a buffer, which may take less than all of it at a time."""
    while len(content):
        content = content[file.write(content) :]


def write_at_once(path: Path, text: str) -> None:
    """Write a small file that others wait for: it appears under its name by one rename, when all of it is there."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    os.rename(unfinished, path)


def write_manifest(staged: Path, manifest: Manifest) -> None:
    """Write the manifest beside the files of tensors, and see it on disk."""
    with new_file(staged / MANIFEST) as file:
        write_all(file, memoryview(manifest.dump()))
    fault_point("manifest written")


def publish(staged: Path, step: int) -> Path:
    """Make a staged folder, all of which is on disk, the newest checkpoint of its step: one rename."""
    folder = staged.parent
    revisions = [found.revision for found in published(folder) if found.step == step]
    suffix = f".r{max(revisions) + 1}" if revisions else ""
    target = folder / f"step-{step:08d}{suffix}"
    # The names of the files must be on disk before the folder gets its own: a power cut could else leave an empty checkpoint.
    sync(staged)
    fault_point("folder synced")
    os.rename(staged, target)
    fault_point("renamed")
    # After this a power cut does not take the name away again, so that older checkpoints may be deleted.
    sync(folder)
    fault_point("parent synced")
    return target


def retire(folder: Path, newest: Path, keep: int) -> None:
    """Delete all but the `keep` newest steps; `newest` is kept whatever its step. A failure is only logged."""
    # The step that was just saved may be older than others: a run that began anew in its folder must not delete its own.
    there = published(folder)
    kept = {found.step for found in there if found.path == newest}
    for found in reversed(there):
        if found.step not in kept and len(kept) < keep:
            kept.add(found.step)
        elif found.path != newest:
            _retire(found)


def _retire(found: Found) -> None:
    # Renamed first, so that a kill while files are being deleted leaves nothing that looks like a checkpoint.
    aside = found.path.parent / staging_name(found.step)
    try:
        os.rename(found.path, aside)
        fault_point("retired")
        shutil.rmtree(aside)
    except OSError as error:
        get_dist_logger().warning(f"the old checkpoint {found.path} could not be deleted: {error}")


def sync(path: Path) -> None:
    """See the content of a file, or the entries of a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_space(folder: Path, needed: int) -> None:
    """Refuse to begin what will not fit."""
    free = shutil.disk_usage(folder).free
    if needed * _SPARE > free:
        raise CheckpointError(_no_space(folder, needed, free), code="C084")


@contextmanager
def no_space_errors(folder: Path, needed: int) -> Iterator[None]:
    """Turn "no space left" and "over quota" into the error of `check_space`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free
        raise CheckpointError(f"{_no_space(folder, needed, free)} ({error.strerror})", code="C084") from error


def megabytes(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 1e6:,.1f} MB"


def _no_space(folder: Path, needed: int, free: int) -> str:
    return (
        f"no space for the checkpoint: {megabytes(needed)} are needed, {megabytes(free)} are free at {folder}. Earlier "
        f"checkpoints are untouched. Free some space, choose another folder, or keep fewer with keep=."
    )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is a file; checkpoints lie in a folder", code="C080") from None


# --- The lock: one run writes checkpoints to a folder at a time ---


LOCK_FILE = "run.lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors of `flock` where it does not work at all: some network file systems, or without their lock service."""
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class RunLock:
    """The lock of a run's folder, which it makes, held until `release` or until this process is gone, however it ends.

    The kernel's lock on `run.lock` decides; the text of the file only says who holds it. A file whose writer has died is taken
    over.
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

        # The text says who has the lock or, where it was free, who ended without giving it back.
        try:
            found = json.loads(os.pread(self._descriptor, 4096, 0))
        except ValueError:
            found = None
        holder = found if isinstance(found, dict) else {}
        if refused is not None and refused.errno not in _NO_LOCKS:
            self._close()
            raise CheckpointError(_refusal(self.path, holder, refused), code="C084")
        if refused is not None:
            last = f" (the last to write its name there: {_who(holder)})" if holder else ""
            get_dist_logger().warning(
                f"the file system of {self.path} locks no files ({refused.strerror}): see to it that no other run writes "
                f"here{last}"
            )
        elif holder:
            get_dist_logger().info(f"took over {self.path} from {_who(holder)}, which ended without closing it")

        own = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        text = json.dumps(own).encode()
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))
        _closed_in_children().add(self)

    def release(self) -> None:
        """Let another run have the folder. Safe to call twice."""
        if self._close.alive:
            os.ftruncate(self._descriptor, 0)
            self._close()


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


# --------------------------------------------------------------------------------------------------
# Exports: files and folders that are staged on the same disk and take the place of earlier ones by renames.
#
# Of a folder that is there only the files of weights are exchanged: what else lies in it is neither copied nor moved, so it
# may be large, be somebody's working directory, or lie on a disk of its own. Links are followed.
# --------------------------------------------------------------------------------------------------


_TOKEN = 4
"""Bytes that tell two saves apart."""


def staging_path(target: Path) -> Path:
    """A new name for what is to become `target`: inside it, if it is a folder that is there, else beside it."""
    real, token = Path(os.path.realpath(target)), secrets.token_hex(_TOKEN)
    return real / f".saving-{token}" if real.is_dir() else real.with_name(f".{real.name}.saving-{token}")


def make_room(staged: Path, needed: int) -> None:
    """See that there is a place for so many bytes, and delete what interrupted saves to the same place have left."""
    staged.parent.mkdir(parents=True, exist_ok=True)
    for left in _of_all_saves(staged):
        discard(left)
    check_space(staged.parent, needed)


def discard(staged: Path) -> None:
    """Delete a staged file or folder, if it is there."""
    if staged.is_dir():
        shutil.rmtree(staged, ignore_errors=True)
    else:
        staged.unlink(missing_ok=True)


@contextmanager
def staging(target: Path, needed: int) -> Iterator[Path]:
    """A staged path for `target`, with room for so many bytes; it is deleted at the end if it is still there."""
    staged = staging_path(target)
    make_room(staged, needed)
    try:
        with no_space_errors(staged.parent, needed):
            yield staged
    finally:
        discard(staged)


def place_file(staged: Path, target: Path) -> None:
    """Give a staged file, which is on disk, the name of `target`."""
    real = Path(os.path.realpath(target))
    if real.is_dir():
        raise CheckpointError(f"{target} is a folder; give the name of a file", code="C084")
    os.replace(staged, real)
    sync(real.parent)


def place_folder(staged: Path, target: Path, is_old: Callable[[str], bool], heads: Collection[str]) -> None:
    """Make a staged folder, all of whose files are on disk, the folder `target`, or exchange the files of one that is there.

    There its files take the place of those with their names, and of those that `is_old` says of an earlier save. `heads` are
    the files without which a reader finds nothing: they go first and come last, so that none reads a mixture. A failure puts
    everything back. A kill in between leaves the earlier files in `.old-<number>`, which the next save deletes when it is done.
    """
    folder = Path(os.path.realpath(target))
    sync(staged)
    fault_point("folder synced")
    if staged.parent != folder:  # there is none yet
        os.rename(staged, folder)
        fault_point("renamed")
        sync(folder.parent)
        return
    new = {entry.name for entry in staged.iterdir()}
    old = {entry.name for entry in folder.iterdir() if entry.name in new or is_old(entry.name)}
    for name in sorted(old):
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            raise CheckpointError(
                f"{folder / name} is a folder, where a file is to be written; move it, or choose another one",
                code="C084",
            )
    # The heads go first and come last: a reader finds none while old and new files lie side by side.
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
    """The paths that differ from `path` in the number of the save alone."""
    name = glob.escape(path.name[: -2 * _TOKEN])
    return list(path.parent.glob(name + "[0-9a-f]" * 2 * _TOKEN))


# --- Verifying a checkpoint: the manifest, the list of files, their sizes and their bytes ---


_CHUNK = 1 << 20
_LONGEST = 1 << 28


def verify(checkpoint: str | Path, content: bool = True) -> Manifest:
    """Check one checkpoint's folder; raises CheckpointError with the file, what was expected and what was found.

    Without `content` only the manifest, the list of files and their sizes are looked at.
    """
    path = local_path(checkpoint, "the checkpoint", CheckpointError)
    manifest = read_manifest(path)
    check_files(path, manifest.files, content)
    return manifest


def newest_good(folder: Path, step: int | None = None, content: bool = True) -> tuple[Found | None, list[str]]:
    """The newest checkpoint of a run's folder (of `step`) that passes `verify`, and why newer ones do not."""
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
    """The manifest of a checkpoint, with every file it names there as a plain file, and no other."""
    file = checkpoint / MANIFEST
    if _plain_size(file) > _LONGEST:
        raise Damaged(f"{MANIFEST} has more than the {_LONGEST} bytes that are read")
    manifest = parse(file.read_bytes())
    if step_of(checkpoint) not in (None, manifest.step):
        raise Damaged(f"{checkpoint.name} holds the checkpoint of step {manifest.step}: it was renamed, or swapped")
    expected = {MANIFEST, *(record.name for record in manifest.files)}
    # A file that the manifest does not name has no hash; it may be there to be opened by mistake.
    strange = sorted({entry.name for entry in checkpoint.iterdir()} - expected)
    if strange:
        raise Damaged(f"{strange[0]!r} was not there when it was saved (unknown files are never opened); remove it")
    return manifest


def check_files(checkpoint: Path, files: Iterable[FileRecord], content: bool) -> None:
    """Check the sizes of these files, and their bytes if `content`."""
    for record in files:
        size = _plain_size(checkpoint / record.name)
        if size != record.size:
            raise Damaged(f"{record.name} has {size} bytes, expected {record.size}")
        if content:
            found = _sha256(checkpoint / record.name)
            if found != record.sha256:
                raise Damaged(f"{record.name} was changed: its sha256 is {found}, expected {record.sha256}")


def _plain_size(path: Path) -> int:
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{path.name} is a link or a folder; only plain files are opened")
    return found.st_size


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb") as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()

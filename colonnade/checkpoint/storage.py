"""The folder of a run: its checkpoints, found by listing; staging, publishing by one rename, and retiring old ones.

`step-00000100` holds the checkpoint of step 100; `step-00000100.r1` one of the same step that was saved later,
so that publishing never touches what is there. `.tmp-<step>-<nonce>` is being written, or being deleted.
"""

from __future__ import annotations

import contextlib
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
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from colonnade.checkpoint.agreement import as_checkpoint_errors, fault_point
from colonnade.checkpoint.manifest import MANIFEST, Damaged, FileRecord, LayoutRecord, Manifest, parse, tensors_file
from colonnade.checkpoint.save import RankNote, SavePlan, merge_groups, merge_tensors
from colonnade.checkpoint.tensor_files import write_tensors
from colonnade.constants import SAVED
from colonnade.errors import CheckpointError
from colonnade.logging import get_dist_logger
from colonnade.paths import local_path

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


def write_manifest(staged: Path, manifest: Manifest) -> None:
    """Write it beside the files of tensors, and see it on disk."""
    with open(staged / MANIFEST, "xb") as file:
        file.write(manifest.dump())
        file.flush()
        os.fsync(file.fileno())
    fault_point("manifest written")


def publish(staged: Path, step: int) -> Path:
    """Make a staged folder, all of which is on disk, the newest checkpoint of its step: one rename."""
    folder = staged.parent
    revisions = [found.revision for found in published(folder) if found.step == step]
    suffix = f".r{max(revisions) + 1}" if revisions else ""
    target = folder / f"step-{step:08d}{suffix}"
    sync_folder(staged)
    fault_point("folder synced")
    os.rename(staged, target)
    fault_point("renamed")
    sync_folder(folder)
    fault_point("parent synced")
    return target


def retire(folder: Path, newest: Path, keep: int) -> None:
    """Delete all but the `keep` newest steps; `newest` is kept whatever its step. A failure is only logged."""
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


def sync_folder(folder: Path) -> None:
    """See the entries of a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
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
def told_of_space(folder: Path, needed: int) -> Iterator[None]:
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


# --------------------------------------------------------------------------------------------------
# The lock of a run's folder: one run writes checkpoints there at a time, and a second one is told who does.
# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# Files and folders for others that are written anew: staged on the same disk, and put in place by renames.
#
# Of a folder that is there only the files of the weights are exchanged: what else lies in it is neither copied nor moved, so it
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
    """Where to write what is to become `target`, of so many bytes; what is left there at the end is deleted."""
    staged = staging_path(target)
    make_room(staged, needed)
    try:
        with told_of_space(staged.parent, needed):
            yield staged
    finally:
        discard(staged)


def place_file(staged: Path, target: Path) -> None:
    """Give a staged file, which is on disk, the name of `target`."""
    real = Path(os.path.realpath(target))
    if real.is_dir():
        raise CheckpointError(f"{target} is a folder; give the name of a file", code="C084")
    os.replace(staged, real)
    sync_folder(real.parent)


def place_folder(staged: Path, target: Path, is_old: Callable[[str], bool], heads: Collection[str]) -> None:
    """Make a staged folder, all of whose files are on disk, the folder `target`, or exchange the files of one that is there.

    There its files take the place of those with their names, and of those that `is_old` says of an earlier save. `heads` are
    the files without which a reader finds nothing: they go first and come last, so that none reads a mixture. A failure puts
    everything back. A kill in between leaves the earlier files in `.old-<number>`, which the next save deletes when it is done.
    """
    real = Path(os.path.realpath(target))
    sync_folder(staged)
    fault_point("folder synced")
    if staged.parent == real:
        _exchange(staged, real, is_old, heads)
    else:
        os.rename(staged, real)
        fault_point("renamed")
        sync_folder(real.parent)


def _exchange(staged: Path, folder: Path, is_old: Callable[[str], bool], heads: Collection[str]) -> None:
    new = {entry.name for entry in staged.iterdir()}
    old = {entry.name for entry in folder.iterdir() if entry.name in new or is_old(entry.name)}
    for name in sorted(old):
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            raise CheckpointError(
                f"{folder / name} is a folder, where a file is to be written; move it, or choose another one",
                code="C084",
            )
    aside = folder / f".old-{secrets.token_hex(_TOKEN)}"
    aside.mkdir()
    moved: list[tuple[Path, Path]] = []

    def move(names: set[str], source: Path, to: Path, point: str) -> None:
        for name in sorted(names):
            os.rename(source / name, to / name)
            moved.append((source / name, to / name))
        sync_folder(folder)
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
    """What has the same name but for the number of the save."""
    name = glob.escape(path.name[: -2 * _TOKEN])
    return list(path.parent.glob(name + "[0-9a-f]" * 2 * _TOKEN))


# --------------------------------------------------------------------------------------------------
# Whether a checkpoint is what was written: the manifest, the list of files, their sizes and their bytes. No torch.
# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# One save on its way to disk: every rank's file into a staged folder, then one commit by the first rank.
#
# Nothing here communicates, so all of it can run in a background thread beside training. A rank leaves a note in the
# folder, put there by one rename, after its tensors are on disk. From these notes the first rank makes the manifest, and
# learns that the others are done: never from a process group, since those belong to the training thread, and
# collectives of two threads on one group have no order.
# --------------------------------------------------------------------------------------------------


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

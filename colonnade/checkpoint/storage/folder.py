"""The folder of a run: its checkpoints, found by listing; staging, publishing by one rename, and retiring old ones.

`step-00000100` holds the checkpoint of step 100; `step-00000100.r1` one of the same step that was saved later,
so that publishing never touches what is there. `.tmp-<step>-<nonce>` is being written, or being deleted.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from colonnade.checkpoint.fault import fault_point
from colonnade.checkpoint.format.manifest import MANIFEST, Manifest
from colonnade.errors import CheckpointError
from colonnade.logging import get_dist_logger

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

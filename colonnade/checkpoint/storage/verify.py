"""Whether a checkpoint is what was written: the manifest, the list of files, their sizes and their bytes. No torch."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterable
from pathlib import Path

from colonnade.checkpoint.format.manifest import MANIFEST, FileRecord, Manifest, parse
from colonnade.checkpoint.format.records import Damaged
from colonnade.checkpoint.storage.folder import Found, published, step_of
from colonnade.errors import CheckpointError
from colonnade.paths import local_path

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

"""Files and folders for others that are written anew: staged on the same disk, and put in place by renames.

Of a folder that is there only the files of the weights are exchanged: what else lies in it is neither copied nor moved, so it
may be large, be somebody's working directory, or lie on a disk of its own. Links are followed.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from colonnade.checkpoint.fault import fault_point
from colonnade.checkpoint.storage.folder import check_space, sync_folder, told_of_space
from colonnade.errors import CheckpointError

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

"""The check of every path that a user gives: a URL is refused, since only file systems are read and written."""

from __future__ import annotations

import os
import re
from pathlib import Path

from colonnade.errors import ColonnadeError, ConfigError

# One letter is a drive of Windows; `Path` makes s3:/x of s3://x; variables of a shell may keep quotes.
_URL = re.compile(r"[\s'\"]*([A-Za-z][\w+.:-]+):/+")


def local_path(given: str | Path, what: str, error: type[ColonnadeError] = ConfigError) -> Path:
    """`given` as a path. Raises `error`, which calls it `what`, where it is a URL such as s3://bucket/run, or no path at all."""
    if not isinstance(given, (str, os.PathLike)):
        raise error(f"{what} is a path, as text or pathlib.Path, not {given!r}", code="C120")
    text = os.fspath(given)
    found = _URL.match(text)
    if found is None:
        return Path(text)
    if found[1].lower() == "file":
        do = f"Give the path alone: {'/' + text[found.end() :]!r}"
    else:
        do = (
            "Give a path of a file system, which all ranks see (a mounted bucket is one), and copy from there to the store. "
            "A folder whose name really begins so can be given by its absolute path"
        )
    raise error(
        f"{what} is {text!r}, a URL of the kind {found[1]!r}, and only file systems are supported. {do}", code="C120"
    )

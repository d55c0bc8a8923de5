"""The check of paths given by users: URLs raise an error, because only file systems are supported."""

from __future__ import annotations

import os
import re
from pathlib import Path

from colonnade.errors import ColonnadeError, ConfigError

# A single letter is a Windows drive; `Path` turns s3://x into s3:/x; shell variables may contain quotes.
_URL = re.compile(r"[\s'\"]*([A-Za-z][\w+.:-]+):/+")


def local_path(given: str | Path, what: str, error: type[ColonnadeError] = ConfigError) -> Path:
    """Convert `given` to a Path.

    Raises `error` if `given` is a URL such as s3://bucket/run, or no path; `what` names the value in the message.
    """
    if not isinstance(given, (str, os.PathLike)):
        raise error(f"{what} must be a path (str or pathlib.Path), not {given!r}", code="C120")
    text = os.fspath(given)
    found = _URL.match(text)
    if found is None:
        return Path(text)
    if found[1].lower() == "file":
        do = f"Give only the path: {'/' + text[found.end() :]!r}"
    else:
        do = (
            "Give a path on a file system that all ranks can access (such as a mounted bucket), and copy from there to the object "
            "store. If a folder really has this name, give its absolute path"
        )
    raise error(
        f"{what} is {text!r}, a URL with the scheme {found[1]!r}, but only file systems are supported. {do}",
        code="C120",
    )

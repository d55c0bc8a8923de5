"""CUDA's multi-process service, for measurements with several ranks on one GPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator

from colonnade.errors import LaunchError

_MPS = "nvidia-cuda-mps-control"
_MPS_SECONDS = 30


@contextlib.contextmanager
def cuda_mps() -> Iterator[bool]:
    """Run CUDA's multi-process service while the body runs: kernels of several ranks share a GPU at one time.

    Without it the ranks take turns. The service has pipes and logs in a temporary folder, so it meets no other;
    worlds started in the body use it. Gives True, or False with a warning where the service is not installed.
    """
    if shutil.which(_MPS) is None:
        warnings.warn(
            f"{_MPS} is not on the PATH: ranks that share a GPU take turns on it. It comes with NVIDIA's driver.",
            stacklevel=3,
        )
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="colonnade-mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            os.mkdir(place)
        before = {name: os.environ.get(name) for name in places}
        os.environ.update(places)
        try:
            _control("-d")
            try:
                yield True
            finally:
                _control(commands="quit\n")
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _control(*arguments: str, commands: str | None = None) -> None:
    # Files and no pipes: the service inherits them, and would keep a pipe open for as long as it runs.
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as asked:
        asked.write(commands or "")
        asked.seek(0)
        done = subprocess.run(
            [_MPS, *arguments], stdin=asked, stdout=said, stderr=subprocess.STDOUT, timeout=_MPS_SECONDS, check=False
        )
        said.seek(0)
        text = said.read().strip()
    if done.returncode != 0:
        raise LaunchError(
            f"{_MPS} failed with exit status {done.returncode}: {text or 'no output'}. Leave cuda_mps() out to run without."
        )

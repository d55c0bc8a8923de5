"""The CUDA multi-process service (MPS), for measurements with several ranks on one GPU."""

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
    """Run the CUDA multi-process service inside the block, so that kernels of several ranks run on a GPU concurrently.

    Without MPS the ranks take turns. Its pipes and logs are in a temporary folder, so it does not interfere with another
    service. Worlds that start inside the block use it. Yields True, or False with a warning if MPS is not installed.
    """
    if shutil.which(_MPS) is None:
        warnings.warn(
            f"{_MPS} is not on the PATH, so ranks that share a GPU take turns. The NVIDIA driver contains it.",
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
    # Files instead of pipes: the service inherits its streams, and would keep a pipe open as long as it runs.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as script:
        script.write(commands or "")
        script.seek(0)
        done = subprocess.run(
            [_MPS, *arguments], stdin=script, stdout=output, stderr=subprocess.STDOUT, timeout=_MPS_SECONDS, check=False
        )
        output.seek(0)
        text = output.read().strip()
    if done.returncode != 0:
        raise LaunchError(
            f"{_MPS} failed with exit status {done.returncode}: {text or 'no output'}. Remove cuda_mps() to run without MPS."
        )

"""Training from a cell of a notebook: a function that was typed in there, on several ranks of this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colonnade.testing.world import run_world


def run_in_notebook(fn: Callable[..., Any], *args: Any, nproc: int = 2, timeout: float = 86_400, **kwargs: Any) -> Any:
    """Run `fn(*args, **kwargs)` on `nproc` ranks and return what rank 0 returned; what it prints is shown as it comes.

    `fn` may be defined in a cell; it calls `colonnade.launch(config)` itself, as a script does. Each rank is a copy of this process: it
    sees what cells have defined so far, and changes nothing of it here. The GPU must not have been used in the notebook itself.
    A rank that fails raises `WorldError` here, with its traceback. Interrupting the cell ends all ranks.
    """
    plain = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
    return run_world(nproc, fn, *args, timeout=timeout, backend=None, env=plain, show=True, **kwargs).values[0]

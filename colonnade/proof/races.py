"""`colonnade verify --races train.py`: does the result depend on when asynchronous work runs?

A correct script waits for asynchronous collectives before it uses their results, and does not change their inputs in the meantime; work on a side
stream waits for the streams whose results it reads. Its result is then the same for each legal timing. `verify --races` runs the script
with several timings and names the first value that differs:

- `early`: each asynchronous collective completes in the call that starts it.
- `late`: it runs in `wait()`, or before the next collective of its group, which keeps the order of the group. No time is slept: a
  script that reads its buffer too early reads the old values each time. On a GPU, the stream that waits is delayed instead.
- `rank0`, `rank1`, ... (GPU only): this rank is slow before each collective, so the others wait for it on their communication streams.
- `outer`, `side` (GPU only): the stream outside of a `torch.cuda.stream` block is slow when the block begins, or the stream inside.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from colonnade.proof.run_difference import RunsReport, first_difference

if TYPE_CHECKING:
    from colonnade.proof.processes import Processes
    from colonnade.proof.scripts import Script

EARLY, LATE = "early", "late"
EQUAL = "the result does not depend on the timing of asynchronous work"
DIFFERENT = "the result DEPENDS on the timing of asynchronous work"
UNKNOWN = "cannot tell whether the result depends on the timing of asynchronous work"
SLEEP_CYCLES = 20_000_000
"""About 10 ms on a GPU: longer than a kernel or a collective of a tested model."""
_COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
)  # fmt: skip
_OTHERS = ("barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv")


def verify_races(script: Script, processes: Processes | None = None, on_gpu: bool | None = None) -> RunsReport:
    """Run a script with several timings of its asynchronous work, and compare the runs.

    Args:
        script: The script.
        processes: Starts the processes; default: new ones for this call.
        on_gpu: Whether the script runs on GPUs; default: whether there is one.

    Raises:
        ScriptError: a run failed.
    """
    from colonnade.proof.processes import Processes
    from colonnade.proof.scripts import on_ranks

    if on_gpu is None:
        on_gpu = torch.cuda.is_available()
    timings = [EARLY, LATE] if not on_gpu else ["outer", "side", *(f"rank{rank}" for rank in range(script.nproc))]
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="colonnade-races-")))
        if processes is None:
            processes = stack.enter_context(Processes(script.target, script.is_module))

        def run(name: str, schedule: str | None) -> Any:
            (root / name).mkdir()
            return on_ranks(replace(script, whole=None, schedule=schedule), root / name, processes)

        # Two runs without delays differ if seeds are missing, or, on a GPU, because kernels are not deterministic. On a CPU, a computed
        # value that differs is a race already.
        plain = run("plain", None)
        again = first_difference(plain, run("again", None))
        if again is not None and again.is_loaded:
            return RunsReport(
                UNKNOWN,
                uncertain=f"two runs of the script differ without any delay: {again}. Set all seeds for the comparison",
            )
        tolerance, notes = 0.0, []
        if again is not None and on_gpu:
            tolerance = 10.0 * again.error
            notes.append(
                f"two runs differ without any delay by {again.error:.2g} ({again}): ten times as much counts as equal"
            )
        for timing in timings:
            found = first_difference(plain, run(timing, timing), tolerance=tolerance)
            if found is not None:
                return RunsReport(
                    DIFFERENT, found, _MEANING.get(timing, _SLOW_RANK.format(rank=timing[4:])), notes=notes
                )
        if again is not None and not on_gpu:
            return RunsReport(
                DIFFERENT, again, "it changes between two runs without any delay, although all inputs are equal"
            )
        return RunsReport(EQUAL, notes=[*notes, f"timings: {', '.join(timings)}"])


_MEANING = {
    EARLY: "it changes if asynchronous collectives complete at once, so the script changes the input of a collective after it has started it, "
    "or reads its buffer before wait()",
    LATE: "it changes if asynchronous collectives run as late as possible, so the script reads or changes the buffer of a collective before "
    "wait(), or never waits",
    "outer": "it changes if the outer stream is slow when a torch.cuda.stream block begins, so the work in the block does not wait for the "
    "stream that computes its inputs (wait_stream, or an event)",
    "side": "it changes if the stream of a torch.cuda.stream block is slow, so the work after the block does not wait for its results "
    "(wait_stream, or an event)",
}
_SLOW_RANK = "it changes if rank {rank} is slow before its collectives, so another rank reads or changes the buffer of a collective before it has completed"


@contextmanager
def asynchronous_work(schedule: str) -> Iterator[None]:
    """Run asynchronous work of this process with another timing in the block."""
    pending: list[_Late] = []

    # Collectives of a group run in the order of their calls on all ranks. All pending ones run before the next of any group, so
    # that ranks never wait for each other in different orders.
    def flush() -> None:
        while pending:
            pending.pop(0).run()

    def wrapped(own: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(own)

        @wraps(own)
        def collective(*args: Any, **kwargs: Any) -> Any:
            flush()
            if schedule == f"rank{os.environ.get('RANK')}":
                torch.cuda._sleep(SLEEP_CYCLES)
            is_async = bool(signature.bind(*args, **kwargs).arguments.get("async_op"))
            if not is_async or schedule not in (EARLY, LATE):
                return own(*args, **kwargs)
            late = _Late(lambda: own(*args, **kwargs), flush)
            pending.append(late)
            if schedule == EARLY:
                late.run()
                pending.remove(late)
            return late

        return collective

    enter = torch.cuda.StreamContext.__enter__

    def slow_enter(block: Any) -> Any:
        if schedule == "outer" and block.stream is not None:
            torch.cuda._sleep(SLEEP_CYCLES)
        found = enter(block)
        if schedule == "side" and block.stream is not None:
            torch.cuda._sleep(SLEEP_CYCLES)
        return found

    replaced = [(dist, name, getattr(dist, name)) for name in (*_COLLECTIVES, *_OTHERS)]
    for home, name, own in replaced:
        setattr(home, name, wrapped(own))
    torch.cuda.StreamContext.__enter__ = slow_enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.cuda.StreamContext.__enter__ = enter  # type: ignore[method-assign]
        for home, name, own in replaced:
            setattr(home, name, own)


class _Late:
    """The handle of a collective that has not started yet."""

    def __init__(self, start: Callable[[], Any], flush: Callable[[], None]) -> None:
        self._start, self._flush = start, flush
        self._done = False

    def run(self) -> None:
        """Run the collective, if it has not run yet."""
        if not self._done:
            self._done = True
            work = self._start()
            if work is not None:
                work.wait()

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Complete the collective, and those that were started before it."""
        self._flush()
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has run. Asking runs it, because a script may poll until it has."""
        self._flush()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a completed future."""
        self._flush()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future

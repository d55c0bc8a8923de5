"""`colonnade verify --resume train.py`: is a resumed run the same as an uninterrupted one?

The script runs three times on its ranks, and writes real checkpoints in a temporary folder, which its arguments name as `{folder}`:

1. uninterrupted, for `steps` steps;
2. until its process is ended before the update of step `steps` // 2, as a crash would;
3. again, in the folder of 2, where it resumes; with `resume_nproc`, on another number of ranks.

The second run must repeat the first one, or the script is not repeatable and nothing can be said. The third run must continue the
first: batches, weights, optimizer state, options and random numbers are read, so they must be equal in each bit; losses, gradients
and updated weights are computed, so another layout may round differently.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from colonnade.errors import ParityError
from colonnade.proof.processes import Processes
from colonnade.proof.record import Record
from colonnade.proof.run_difference import (
    GENERATORS,
    OUTPUT,
    ROUNDING,
    STATE,
    WEIGHT,
    FirstDifference,
    RunsReport,
    distance,
    first_difference,
)
from colonnade.proof.scripts import Script, on_ranks

FOLDER = "{folder}"
EQUAL = "the resumed run equals the uninterrupted run"
DIFFERENT = "the resumed run does NOT equal the uninterrupted run"
UNKNOWN = "cannot tell whether the resumed run equals the uninterrupted run"

_MEANING = {
    "batch": "the position in the data is not restored (sampler epoch, loader, or the order of shuffling)",
    WEIGHT: "weights were not saved, were loaded into other tensors, or were changed after loading",
    STATE: "the state of the optimizer was not saved, or came back to another parameter or shard",
    "optimizer option": "the learning rate schedule, or another option of the optimizer, is not restored",
    GENERATORS: "the random number generator is not restored, so dropout and other draws differ",
    OUTPUT: "a buffer, a mode or a constant of the model differs, while its weights are equal",
    "loss": "batches and weights are equal, so the loss itself depends on a value that is not restored (a scale, a count, a step number)",
    "gradient of": "the loss is equal, so gradients depend on a value that is not restored (accumulated gradients, a scale)",
    "gradient norm": "gradients are equal, so the norm is computed differently",
    "updated weight": "gradients and the state of the optimizer are equal, so the update depends on a value that is not restored (a step number, master weights, an average)",
}


def verify_resume(script: Script, resume_nproc: int | None = None, processes: Processes | None = None) -> RunsReport:
    """Compare a resumed run of a script with an uninterrupted one.

    Args:
        script: The script. One of its arguments contains `{folder}`, and `steps` is at least 2.
        resume_nproc: The number of ranks of the resumed run; default: that of the script.
        processes: Starts the processes; default: new ones for this call.

    Raises:
        ParityError: no argument contains `{folder}`, or there are fewer than 2 steps.
        ScriptError: a run failed.
    """
    if not any(FOLDER in argument for argument in script.arguments):
        raise ParityError(
            f"--resume needs the folder to which the script writes checkpoints and from which it resumes: put {FOLDER} in its "
            f"arguments, for example: colonnade verify --resume train.py --checkpoints {FOLDER}",
            code="C100",
        )
    if script.steps < 2:
        raise ParityError(
            f"--resume compares steps before and after an interruption, so --steps must be at least 2, and is {script.steps}",
            code="C100",
        )
    half, count = script.steps // 2, resume_nproc or script.nproc
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="colonnade-resume-")))
        if processes is None:
            processes = stack.enter_context(Processes(script.target, script.is_module))

        def run(name: str, checkpoints: str, **more: object) -> list[Record]:
            inside, written = root / name, root / checkpoints
            inside.mkdir()
            written.mkdir(exist_ok=True)
            arguments = [argument.replace(FOLDER, str(written)) for argument in script.arguments]
            chosen = replace(script, arguments=arguments, whole=None, keeps_checkpoints=True, **more)  # type: ignore[arg-type]
            return on_ranks(chosen, inside, processes)

        uninterrupted = run("uninterrupted", "one")
        interrupted = run("interrupted", "two", ends_before=half)
        if (apart := first_difference(uninterrupted, interrupted)) is not None:
            return RunsReport(
                UNKNOWN,
                uncertain=f"two uninterrupted runs of the script differ: {apart}. Set all seeds for the comparison",
            )
        if not any(path.is_file() for path in (root / "two").rglob("*")):
            return RunsReport(
                UNKNOWN,
                uncertain=f"the script wrote no checkpoint in {half} step{'s' * (half > 1)}: make it save after each step for the "
                f"comparison, or raise --steps",
            )
        resumed = run("resumed", "two", steps=script.steps - half, nproc=count)
        return judge_resumed(uninterrupted, resumed, half)


def judge_resumed(uninterrupted: Sequence[Record], resumed: Sequence[Record], interrupted_in: int) -> RunsReport:
    """Compare the steps of a resumed run with those of the uninterrupted run that they repeat."""
    at, notes = _resumed_at(uninterrupted, resumed, interrupted_in), []
    if at < interrupted_in:
        notes.append(
            f"the script resumed at step {at}, its last checkpoint, and was interrupted in step {interrupted_in}"
        )
    dtype = getattr(torch, uninterrupted[0].run.dtype)
    tolerance = 0.0 if len(uninterrupted) == len(resumed) else ROUNDING * torch.finfo(dtype).eps
    found = first_difference(uninterrupted, resumed, at, tolerance)
    # Random numbers of which nothing in the compared steps depends are no difference of the training.
    if found is not None and found.quantity == GENERATORS:
        later = first_difference(replace_generators(uninterrupted), replace_generators(resumed), at, tolerance)
        if later is None:
            notes.append(f"{found}, but nothing in these steps depends on it")
            found = None
    if found is None:
        return RunsReport(EQUAL, notes=notes)
    return RunsReport(DIFFERENT, found, _sentence(found, at, uninterrupted, resumed), notes=notes)


def replace_generators(records: Sequence[Record]) -> list[Record]:
    """Return the records without the states of random number generators."""
    return [replace(record, steps=[replace(step, generators=None) for step in record.steps]) for record in records]


def _sentence(found: FirstDifference, at: int, uninterrupted: Sequence[Record], resumed: Sequence[Record]) -> str:
    """The meaning of a difference. A value that equals one of another step was restored from there."""
    meaning = _MEANING[found.quantity]
    if found.quantity == "batch":
        for other in range(len(uninterrupted[0].steps)):
            if other != at and first_batches_equal(uninterrupted, resumed, other):
                return f"{meaning}; the resumed run starts with the batches of step {other} instead of step {at}"
    return meaning


def first_batches_equal(uninterrupted: Sequence[Record], resumed: Sequence[Record], step: int) -> bool:
    """Return whether the resumed run starts with the batches of this step."""
    found = first_difference(uninterrupted, resumed, step, only=[0])
    return found is None or found.quantity != "batch"


def _resumed_at(uninterrupted: Sequence[Record], resumed: Sequence[Record], interrupted_in: int) -> int:
    """The step with whose weights the resumed run starts; the interrupted step if there is none."""
    for at in range(interrupted_in, -1, -1):
        found = first_difference(uninterrupted, resumed, at, only=[0])
        if found is None or found.quantity not in ("batch", WEIGHT):
            return at

    def distance_at(at: int) -> float:
        before = {**uninterrupted[0].steps[at - 1].weights} if at else uninterrupted[0].start
        start = {**resumed[0].start, **resumed[0].steps[0].changed}
        return max((distance(before[name], start[name]) for name in start if name in before), default=0.0)

    return next((at for at in range(interrupted_in, -1, -1) if distance_at(at) == 0.0), interrupted_in)

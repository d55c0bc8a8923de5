"""`colonnade verify train.py`: the script on its ranks, the script alone as one process, and the comparison of both.

`verify_script` is the whole of it. The ranks are a job of `colonnade run`; each process writes a `Record` (script_job.py is
the side of these processes). `ScriptAlone` is one process as the truth for a script, as `OneProcess` (reference.py, which
says what the two share) is for an engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from colonnade.errors import ParityError
from colonnade.launching.outcome import end_with_parent
from colonnade.proof.compare import Report, assemble, dropped_by, mean_of, whole_shapes, whole_tensors
from colonnade.proof.diagnose import diagnose
from colonnade.proof.record import Piece, Record
from colonnade.proof.reference import (
    PERTURBED_RUNS,
    TrueRun,
    Truth,
    all_same,
    divided,
    join,
    norm_of,
    shares,
    spreads_of,
    without_unjoinable_dropout,
)
from colonnade.proof.script_job import JOINED, MASKS, OPTIONS, REFERENCE, START, VARIABLE, ScriptPart
from colonnade.proof.watch import with_layout
from colonnade.testing.world import loopback_socket

TIMEOUT = 1800.0


class ScriptError(ParityError):
    """A script that could not be compared: it failed on its ranks, or alone."""


@dataclass(frozen=True)
class Script:
    """What is verified: a script (or module) with its arguments, on so many ranks."""

    target: str
    arguments: Sequence[str] = ()
    nproc: int = 2
    steps: int = 2
    dtype: str = "fp64"
    is_module: bool = False
    mistake: str | None = None
    off: Mapping[str, str] | None = field(default_factory=dict)
    """The modules in which nothing is dropped, and why; None: nothing is dropped anywhere."""
    called: str = ""
    """What messages call it, if not by its target."""
    timeout: float = TIMEOUT
    """Seconds in which it must come to its last step, on its ranks and as one process."""

    def __str__(self) -> str:
        return self.called or self.target


def verify_script(script: Script, tell: Callable[[str], None] = lambda line: None) -> Report:
    """Run the script on its ranks and alone, in folders and processes of their own, and compare what they did.

    `tell` gets a line before each of these parts, which can take minutes.
    """
    with tempfile.TemporaryDirectory(prefix="colonnade-verify-") as name:
        _, records, alone = run_both(script, Path(name), tell)
        tell("comparing the runs")
        return alone.judge(records)


def run_both(
    script: Script, folder: Path, tell: Callable[[str], None] = lambda line: None
) -> tuple[Script, list[Record], ScriptAlone]:
    """Run the script on its ranks and alone; once more without the dropout that one process could not repeat."""

    def run(off: Mapping[str, str] | None) -> tuple[tuple[Script, list[Record], ScriptAlone], Mapping[str, str]]:
        chosen, inside = replace(script, off=off), Path(tempfile.mkdtemp(dir=folder))
        tell(f"running {script} on {script.nproc} ranks")
        records = on_ranks(chosen, inside)
        tell(
            f"running it as a single process: once, and {PERTURBED_RUNS} times with rounding noise to measure tolerances"
        )
        alone = ScriptAlone(chosen, inside, records)
        return (chosen, records, alone), alone.not_joined

    return without_unjoinable_dropout(run, script.off)[0]


class ScriptAlone:
    """The script as one process, with the weights and batches of a run on its ranks: the truth for runs like that one."""

    def __init__(self, script: Script, folder: Path, records: Sequence[Record]) -> None:
        self._script, self._folder, self._records = script, folder, records
        self._apart: list[Record] | None = None
        _hand_over(records, folder, script.off or {})
        # The truth and the runs that start one ulp away need nothing of each other, so all of them run at once.
        whole = [self._part(REFERENCE), *(self._part(f"moved{seed}.pt", noise=seed) for seed in range(PERTURBED_RUNS))]
        self._truth, *self._moved = _alone(script, folder, whole)
        self.not_joined: Mapping[str, str] = self._truth.run.replays.not_joined

    def judge(self, records: Sequence[Record]) -> Report:
        """Compare a run from the same weights on the same batches, and say what is wrong with one that differs."""
        truth = self._true_run(records)
        report = diagnose(assemble(records, truth))
        if report.ok:
            return report
        # A diagnosis tells by the gradients of single shares whose data is missing. Each share is one more process that
        # runs the whole script, so they are made for a run that differs only, and kept for the next one.
        apart = self._shares()
        steps = [
            replace(step, shards=[_whole(one.steps[at].total) for one in apart]) for at, step in enumerate(truth.steps)
        ]
        return diagnose(assemble(records, replace(truth, steps=steps)))

    def was_fed(self, records: Sequence[Record]) -> bool:
        """Whether a run had the same weights, batches and random numbers."""
        return all(same_tensors(_fed(one), _fed(other)) for one, other in zip(records, self._records, strict=True))

    def _true_run(self, records: Sequence[Record]) -> TrueRun:
        names = self._truth.run.names
        _check_names(whole_shapes(records, names), whole_shapes([self._truth], names))
        steps = [_truth(self._truth, at) for at in range(len(self._truth.steps))]
        return TrueRun(
            steps,
            spreads_of(steps, ([_truth(other, at) for at in range(len(steps))] for other in self._moved)),
            {names.get(name, name): value for name, value in self._truth.start.items()},
            names,
            _terms(records),
            [*self._truth.notes, *_repeated(records), *_not_cleared(self._truth)],
            self._truth.run.replays.apart,
        )

    def _shares(self) -> list[Record]:
        if self._apart is None:
            runs = [record.run for record in self._records]
            count = len(shares([0] * len(runs), runs))
            parts = [self._part(f"share{share}.pt", share=share) for share in range(count if count > 1 else 0)]
            for part in parts:
                _join(self._records, self._folder / JOINED.format(share=part.share), part.share)
            self._apart = _alone(self._script, self._folder, parts)
        return self._apart

    def _part(self, result: str, **more: Any) -> ScriptPart:
        script = self._script
        return ScriptPart(
            "alone", str(self._folder), result, script.steps, script.dtype, off=_plain(script.off), **more
        )


def _fed(record: Record) -> Any:
    """What a run started from and was given, its random numbers too."""
    masks = [[mask.kept for each in step.masks.values() for mask in each] for step in record.steps]
    return record.start, record.run.given, masks


def _plain(off: Mapping[str, str] | None) -> dict[str, str] | None:
    return None if off is None else dict(off)


def same_tensors(one: Any, other: Any) -> bool:
    """Whether two structures hold the same numbers."""
    first, second = tree_leaves(one), tree_leaves(other)
    return len(first) == len(second) and all(map(_is_same, first, second))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


# --- The script alone, read as the truth ---


def _truth(record: Record, at: int) -> Truth:
    """A step of the script alone. Its passes, its clipping and its optimizer are the script's own, so they are only read."""
    step = record.steps[at]
    total = _whole(step.total)
    numbers = sorted({number for each in step.raw.values() for number in each})
    loss = mean_of(step.losses)
    norm = None if step.norm is None else norm_of(list(total.values()), record.run.norm_type)
    if norm is not None and step.norm is not None and abs(norm - step.norm) > 1e-3 * step.norm:
        norm = step.norm  # the script clips some of the parameters, or by a norm of its own
    clipped = _whole(step.clipped) if step.clipped else divided(total, step.divisors)
    return Truth(
        loss=loss[0] if loss is not None else 0.0,  # as on the ranks, nobody has seen it
        passes=[{name: each[one] for name, each in step.raw.items() if one in each} for one in numbers],
        total=total,
        clipped=clipped if norm is not None else {},
        norm=norm,
        weights=step.weights,
        buffers=step.buffers,
        activations=step.activations,
    )


def _whole(held: Mapping[str, Sequence[Piece]]) -> dict[str, Tensor]:
    """Gradients that one process holds, each in one piece."""
    return {name: pieces[0].value for name, pieces in held.items()}


def _check_names(ranks: dict[str, tuple[int, ...]], alone: dict[str, tuple[int, ...]]) -> None:
    different = sorted({name for name, shape in [*ranks.items(), *alone.items()] if ranks.get(name) != alone.get(name)})
    if different:
        name = different[0]
        raise ScriptError(
            f"the model of one process is another: {len(different)} parameters differ, as {name}, which is "
            f"{ranks.get(name, 'nowhere')} on the ranks and {alone.get(name, 'nowhere')} in one process. With every parallel "
            f"size 1 the script must build the whole model"
        )


def _terms(records: Sequence[Record]) -> int:
    """How many terms an element of a gradient may sum. Where a step ends in what a script was given is not known, so all of it."""
    given = records[0].run.given
    most = [
        max((leaf.numel() for leaf in tree_leaves(one) if isinstance(leaf, Tensor)), default=1)
        for key in given
        for one in given[key]
    ]
    return max(1, sum(most) * len(records))


# --- Warnings beside the comparison ---


def _repeated(records: Sequence[Record]) -> list[str]:
    """A warning where ranks that are to see distinct data were all given the same."""
    given = records[0].run.given
    parts = [_shares_of(records, key, at) for key in given for at in range(len(given[key])) if key != "criterion"]
    apart = len(records) if records[0].run.data_parallel else len(parts[0]) if parts else 0
    if not parts or apart < 2 or not all(all_same(some) for some in parts):
        return []
    return [
        "warning: all data ranks were given the same batches, so they do the same work; is a DistributedSampler missing, or "
        "does each of them have the place of the same rank?"
    ]


def _not_cleared(truth: Record) -> list[str]:
    """A warning where, in one process too, a step has the gradients of the one before added to its own."""
    for before, step in pairwise(truth.steps):
        left = before.clipped or before.total
        both = [name for name in step.total if name in left and name in step.raw]
        own = {name: sum(step.raw[name].values(), torch.zeros(())) for name in both}
        added = [step.total[name][0].value - own[name] for name in both]
        kept = [left[name][0].value for name in both]
        if any(bool(one.any()) for one in kept) and all(map(_nearly, added, kept)):
            return [
                "warning: each step has the gradients of the step before in it, in one process too, so this is not a difference; "
                "is zero_grad missing?"
            ]
    return []


def _nearly(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= 1e-6 * float(other.norm())


# --- What the script alone is given ---


def _hand_over(records: Sequence[Record], folder: Path, off: Mapping[str, str]) -> None:
    """For the script alone: the weights that the ranks started from, their batches, joined, and what they dropped."""
    torch.save(whole_tensors(records, {}), folder / START)
    torch.save(dropped_by(records, off), folder / MASKS)
    dtype = getattr(torch, records[0].run.dtype)
    options, config = [step.options for step in records[0].steps], records[0].run.config
    torch.save((options, dtype, config), folder / OPTIONS)
    _join(records, folder / JOINED.format(share=""), None)


def _join(records: Sequence[Record], path: Path, share: int | None) -> None:
    first = records[0].run.given
    for key in ("call", "batch"):  # first, as those of rank 0 may be the fewer, and all others follow from these
        _check_counts(records, key)
    joined: dict[str, list[Any]] = {}
    for key in first:
        for at in range(len(first[key])):
            parts = _shares_of(records, key, at)
            micro = records[0].run.micro_batches if key == "batch" else 1
            whole = parts[share] if share is not None else join(parts, micro)
            if whole is None and key.startswith("loader"):
                break  # only where the engine is given them they must be joined
            if whole is None:
                _check_counts(records, key)
                shapes = [
                    [tuple(leaf.shape) for leaf in tree_leaves(part) if isinstance(leaf, Tensor)] for part in parts
                ]
                raise ScriptError(
                    f"the batches of the ranks cannot be joined along dimension 0 into one: they have the shapes {shapes}"
                )
            joined.setdefault(key, []).append(whole)
    torch.save(joined, path)


def _check_counts(records: Sequence[Record], key: str) -> None:
    """Say so where some ranks took fewer batches than others of their stage: the last passes would have no joined batch."""
    counts = {record.rank: len(record.run.given.get(key, ())) for record in records}
    stages: dict[int, set[int]] = {}
    for record in records:
        stages.setdefault(record.run.coordinates.get("pipeline", 0), set()).add(counts[record.rank])
    if any(len(found) > 1 for found in stages.values()):
        steps = len(records[0].steps)
        told = ", ".join(f"rank {rank} took {count}" for rank, count in counts.items())
        raise ScriptError(
            f"the ranks took unequal numbers of batches in {steps} step{'s' * (steps > 1)}, so one process cannot be given "
            f"those of all ranks, joined: {told} ({key}). Give the ranks equally many for the comparison, or compare only "
            f"the steps in which all have one (--steps)",
            code="C100",
        )


def _shares_of(records: Sequence[Record], key: str, at: int) -> list[Any]:
    """The shares of the batch that came in at a place as number `at`."""
    given = [record.run.given.get(key, []) for record in records]
    values = [each[at] if at < len(each) else None for each in given]
    return shares(values, [record.run for record in records])


# --- The processes ---


def on_ranks(script: Script, folder: Path) -> list[Record]:
    """What each rank of a run noted."""
    part = ScriptPart(
        "ranks",
        str(folder),
        "rank{rank}.pt",
        script.steps,
        script.dtype,
        mistake=script.mistake,
        off=_plain(script.off),
    )
    environment = _environment(part.write(folder / "ranks.json"))
    command = [sys.executable, "-m", "colonnade.cli", "run", "--nproc", str(script.nproc), "--no-prefix"]
    command += [*(["-m"] if script.is_module else []), script.target, *script.arguments]
    with running({folder / "ranks.log": (command, environment)}) as (job,):
        status = job.wait(time.monotonic() + script.timeout)
        if status is None:
            raise _late(script, job, f"on {script.nproc} ranks")
    files = [folder / f"rank{rank}.pt" for rank in range(script.nproc)]
    if status != 0 or not all(file.exists() for file in files):
        raise ScriptError(f"{script} failed on {script.nproc} ranks (exit status {status}):\n{job.said()}")
    return with_layout([_record(script, file, f"on {script.nproc} ranks") for file in files])


def _record(script: Script, file: Path, how: str) -> Record:
    """What a process noted, if it came to a step."""
    found = torch.load(file, weights_only=False)
    if isinstance(found, Record):
        return found
    why = (
        "what it trains is known, and nobody calls engine.step(), or step() of the optimizer that colonnade.watch was given"
        if found
        else "it neither builds an engine by colonnade.initialize nor hands its model to colonnade.watch(model, optimizer, batches). "
        "Ranks that a script starts by itself are not seen: let this command start them"
    )
    raise ScriptError(
        f"{script} came to its end {how} without a step, so there is nothing to compare: {why}", code="C100"
    )


def _alone(script: Script, folder: Path, parts: Sequence[ScriptPart]) -> list[Record]:
    """The script as one process, several of them at once."""
    with ExitStack() as ports:
        return _alone_at(script, folder, parts, ports)


def _alone_at(script: Script, folder: Path, parts: Sequence[ScriptPart], ports: ExitStack) -> list[Record]:
    commands: dict[Path, tuple[list[str], dict[str, str]]] = {}
    for part in parts:
        name = part.result.removesuffix(".pt")
        environment = _environment(part.write(folder / f"{name}.json"))
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        port = ports.enter_context(loopback_socket(listening=False)).getsockname()[
            1
        ]  # held, so that nobody else is given it
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= {"COLONNADE_LAUNCHER_PID": str(os.getpid()), "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"TORCHELASTIC_ERROR_FILE": str(folder / f"{name}.error")}
        kind = "module" if script.is_module else "script"
        command = [
            sys.executable,
            "-u",
            "-m",
            "colonnade.launching.bootstrap",
            kind,
            "plain",
            script.target,
            *script.arguments,
        ]
        commands[folder / f"{name}.log"] = command, environment
    found, until = [], time.monotonic() + script.timeout
    with running(commands) as processes:
        for part, process in zip(parts, processes, strict=True):
            status, file = process.wait(until), folder / part.result
            if status is None:
                raise _late(script, process, "as one process")
            if status != 0 or not file.exists():
                raise ScriptError(
                    f"{script} ran on {script.nproc} ranks and failed as one process, with every parallel size 1 and the "
                    f"batches of all ranks joined (exit status {status}). Batches that it uses outside its engine, in a loss of its "
                    f"own, must come from a DataLoader or through colonnade.watch(engine, None, batches):\n{process.said()}"
                )
            found.append(_record(script, file, "as one process"))
    return found


def _late(script: Script, process: Running, how: str) -> ScriptError:
    return ScriptError(
        f"{script} did not come to the end of step {script.steps} {how} within {script.timeout:g} seconds, and was ended; "
        f"give it more (--timeout) if it only is slow. What it said last, and where it stood:\n{process.said()}"
    )


def _environment(part: Path) -> dict[str, str]:
    environment = {**os.environ, VARIABLE: str(part)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


# --- Processes that are waited for, up to a limit; none is left behind, however the wait ends ---


_SHOWN = 4000
_DUMP_SECONDS = 1.0
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Running:
    """A process whose output goes to a file."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, until: float) -> int | None:
        """Its exit status; None if it still runs at that time, by `time.monotonic`. Then its log says where it stands."""
        try:
            return self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            for pid in self._children() or [self.process.pid]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGUSR1)  # on which ranks write their stacks; the launcher would die of it
            time.sleep(_DUMP_SECONDS)
            return None

    def said(self) -> str:
        """The end of its output."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _SHOWN))
            return file.read().decode("utf-8", "replace").strip()

    def _children(self) -> list[int]:
        pid = self.process.pid
        with contextlib.suppress(OSError):
            return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []


@contextlib.contextmanager
def running(commands: Mapping[Path, tuple[Sequence[str], Mapping[str, str]]]) -> Iterator[list[Running]]:
    """Start these commands, by log: (words, environment). Those that still run at the end are ended."""
    started: list[Running] = []
    try:
        for log, (command, environment) in commands.items():
            with log.open("wb") as into:
                process = subprocess.Popen(
                    command, env=dict(environment), stdout=into, stderr=subprocess.STDOUT, preexec_fn=end_with_parent
                )
            started.append(Running(process, log))
        yield started
    finally:
        for one in started:
            one.process.terminate()
        for one in started:
            try:
                one.process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                one.process.kill()  # its ranks die with it
                one.process.wait()

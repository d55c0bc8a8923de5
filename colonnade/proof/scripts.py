"""`colonnade verify train.py`: run the script on its ranks and again in a single process, and compare the two.

`verify_script` is the entry point. Ranks are started like a job of `colonnade run`; every process writes a `Record`
(script_job.py is the code that runs inside these processes). `SingleProcessScript` is the reference run of a script, as
`OneProcess` is that of an engine; reference.py describes what the two have in common.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from colonnade.errors import ParityError
from colonnade.launching.outcome import launch_report, read_failure, silent_failure
from colonnade.proof.compare import (
    Report,
    assemble,
    compare,
    drawn_by,
    full_shapes,
    full_tensors,
    mean_of,
    needed_as_a_whole,
)
from colonnade.proof.diagnose import diagnose
from colonnade.proof.local_shards import LOCAL, LocalTensors, with_local_shards
from colonnade.proof.processes import NEEDS_NEW_PYTHON, Command, Processes, Running, stop, wait_for_all
from colonnade.proof.record import Options, Piece, Record, common_sketches
from colonnade.proof.reference import (
    PERTURBED_RUNS,
    TrueRun,
    Truth,
    all_same,
    data_rank_batches,
    divided,
    join,
    norm_of,
    spreads_of,
    without_unjoinable_dropout,
)
from colonnade.proof.script_job import DRAWS, IN_EVAL, JOINED, OPTIONS, REFERENCE, START, VARIABLE, ScriptPart
from colonnade.proof.sketch import Stored
from colonnade.proof.start_weights import judge_start
from colonnade.proof.watch import with_layout
from colonnade.testing.world import loopback_socket

TIMEOUT = 1800.0


class ScriptError(ParityError):
    """A script cannot be compared, because it failed on its ranks or in a single process."""


@dataclass(frozen=True)
class Script:
    """A script (or module) to verify, with its arguments and number of ranks."""

    target: str
    arguments: Sequence[str] = ()
    nproc: int = 2
    steps: int = 2
    dtype: str = "fp64"
    is_module: bool = False
    mistake: str | None = None
    off: Mapping[str, str] | None = field(default_factory=dict)
    """The modules in which dropout is turned off, with the reason; None: dropout is off everywhere."""
    called: str = ""
    """The name used in messages; empty: the target."""
    whole: Sequence[str] | None = ()
    """The large tensors that are recorded as a whole, because a diagnosis needs their elements; others are sketches. None: all."""
    keeps_checkpoints: bool = False
    """The script writes and reads checkpoints (resume.py)."""
    ends_before: int | None = None
    """The step before whose update the ranks end (resume.py)."""
    schedule: str | None = None
    """When asynchronous work runs (races.py)."""
    timeout: float = TIMEOUT
    """Seconds until the last compared step must be done, for each run."""

    def __str__(self) -> str:
        return self.called or self.target


def verify_script(script: Script, processes: Processes | None = None) -> Report:
    """Run the script on its ranks and in a single process, and compare the two runs.

    Every run has its own processes and writes to a temporary folder. A line on stderr names each run as it starts, and
    its duration once it is done.

    Args:
        script: The script.
        processes: Starts the processes; default: new ones for this call.

    Raises:
        ScriptError: a run failed, took no step or timed out, or the batches of the ranks cannot be joined.
    """
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="colonnade-verify-"))
        if processes is None:
            processes = stack.enter_context(Processes(script.target, script.is_module))
        chosen, records, reference = run_both(script, Path(name), processes)
        report = reference.judge(records)
        needed = reference.needed_as_a_whole(report)
        if not needed:
            return report

        # Sketches show that something differs, but hardly why. A second run records the tensors that differ.
        del records, reference
        _, records, reference = run_both(replace(chosen, whole=[*(chosen.whole or ()), *needed]), Path(name), processes)
        return reference.judge(records)


def run_both(script: Script, folder: Path, processes: Processes) -> tuple[Script, list[Record], SingleProcessScript]:
    """Run the script on its ranks and in a single process.

    If a single process cannot repeat the dropout of a module, both run again without dropout in this module. Returns
    the script with these modules, the records of the ranks, and the reference.
    """

    def run(
        off: Mapping[str, str] | None,
    ) -> tuple[tuple[Script, list[Record], SingleProcessScript], Mapping[str, str]]:
        chosen, inside = replace(script, off=off), Path(tempfile.mkdtemp(dir=folder))
        records = on_ranks(chosen, inside, processes)
        reference = SingleProcessScript(chosen, inside, records, processes)
        return (chosen, records, reference), reference.not_joined

    return without_unjoinable_dropout(run, script.off)[0]


class SingleProcessScript:
    """The reference of `colonnade verify train.py`: the script in a single process.

    It starts from the weights of the ranks, and gets their global batches.
    """

    def __init__(self, script: Script, folder: Path, records: Sequence[Record], processes: Processes) -> None:
        self._script, self._folder, self._records, self._processes = script, folder, records, processes
        self._shard_records: list[Record] | None = None

        # The processes below start from the weights of the ranks, and replay their batches (joined) and dropout masks.
        full: dict[str, Tensor | Stored] = {**full_tensors(records, {})}
        joined: dict[str, Stored] = {}
        for record in reversed(records):
            for name, stored in record.run.stored.items():
                block = record.run.sketched[name]
                if block is None:
                    full[name] = stored
                    continue
                if name not in joined:
                    path = folder / f"joined{len(joined)}.tensor"
                    full[name] = joined[name] = Stored(str(path), stored.dtype, record.tensors[name].shape)
                block.of(joined[name].tensor(shared=True)).copy_(stored.tensor())
        torch.save(full, folder / START)
        torch.save(LocalTensors.of(records), folder / LOCAL)
        torch.save(drawn_by(records, script.off), folder / DRAWS)
        options, dtype = options_of_ranks(records), getattr(torch, records[0].run.dtype)
        blocks = [entry for record in records for entry in record.run.sketched.items()]
        torch.save((options, dtype, records[0].run.config, blocks), folder / OPTIONS)
        join_batches(records, folder / JOINED.format(data_rank=""), None)

        # The reference and the runs that start one ulp away do not depend on each other, so all of them run at once.
        # The spread of a large tensor in fp64 hardly depends on the seed, and a run of a large model is slow.
        reseeds = any(record.run.host != records[0].run.host for record in records)
        self._sketched = {name for record in records for name in record.run.sketched}
        count = 1 if self._sketched and dtype is torch.float64 else PERTURBED_RUNS
        parts = [
            self._part(REFERENCE, keeps_weights=not self._sketched or bool(script.whole)),
            *(self._part(f"moved{seed}.pt", noise=seed, reseeds_host=reseeds) for seed in range(count)),
        ]
        what = f"the reference and {count} run{'s' * (count > 1)} with weights moved by one ulp"
        self._truth, *self._moved = _in_single_processes(script, folder, parts, what, processes)
        self._shapes = {name: note.shape for name, note in self._truth.tensors.items()}
        self._records = with_local_shards(records, self._shapes)
        self.not_joined: Mapping[str, str] = self._truth.run.replays.not_joined

    def judge(self, records: Sequence[Record]) -> Report:
        """Compare the records of the ranks with the reference, and diagnose any difference.

        The ranks must have had the weights and batches that this reference was made for.
        """
        names = self._truth.run.names
        records = with_local_shards(records, self._shapes)
        _check_same_model(full_shapes(records, names), full_shapes([self._truth], names))
        steps = [truth_of_step(self._truth, at) for at in range(len(self._truth.steps))]
        truth = TrueRun(
            steps,
            spreads_of(steps, ([truth_of_step(moved, at) for at in range(len(steps))] for moved in self._moved)),
            {names.get(name, name): value for name, value in self._truth.start.items()},
            names,
            _most_terms(records),
            [
                *self._truth.notes,
                *warn_of_same_batches(records),
                *warn_of_uncleared_gradients(self._truth),
                *(
                    f"warning: the ranks took unequal numbers of passes: {counts}. In each pass the single process "
                    f"was given the batches of the ranks that took this pass"
                    for counts in unequal_passes(records)
                ),
            ],
            self._truth.run.replays,
            self._truth.run.host,
            None
            if self._truth.state is None
            else {(key, names.get(name, name)): value for (key, name), value in self._truth.state.items()},
        )
        # The reference starts from the weights of the ranks, so wrong ones are in both runs.
        findings, notes = judge_start(self._records, self._truth.run.own_start)
        truth = replace(truth, notes=[*truth.notes, *notes])
        evidence = assemble(records, truth)
        if (
            self._sketched
            and not self._script.whole
            and self.needed_as_a_whole(Report(rows=(rows := compare(evidence))))
        ):
            return Report(
                rows=rows
            )  # without findings, for which the tensors that differ are recorded as a whole first
        report = diagnose(evidence)
        if report.ok:
            return replace(report, findings=tuple(findings))

        # To find out which ranks' data is missing, a diagnosis needs the gradient of each data rank's batch. Each of them is
        # one more process that runs the whole script, so they run only if there is something to diagnose, and only once.
        if self._shard_records is None:
            runs = [record.run for record in self._records]
            count = len(data_rank_batches([0] * len(runs), runs))
            if count == 1 or unequal_passes(self._records):
                count = 0
            parts = [self._part(f"data_rank{rank}.pt", data_rank=rank) for rank in range(count)]
            for part in parts:
                join_batches(self._records, self._folder / JOINED.format(data_rank=part.data_rank), part.data_rank)
            what = f"the batches of {count} data ranks one by one, for the diagnosis"
            self._shard_records = (
                _in_single_processes(self._script, self._folder, parts, what, self._processes) if parts else []
            )
        gradients = [[unsharded(record.steps[at].total) for record in self._shard_records] for at in range(len(steps))]
        steps = [replace(step, by_data_rank=some) for step, some in zip(truth.steps, gradients, strict=True)]
        report = diagnose(assemble(records, replace(truth, steps=steps)))
        return replace(report, findings=(*findings, *report.findings))

    def needed_as_a_whole(self, report: Report) -> list[str]:
        """Return the sketched tensors whose elements the diagnosis needs."""
        return needed_as_a_whole(report.rows, self._sketched, self._truth.run.names)

    def was_fed(self, records: Sequence[Record]) -> bool:
        """Return whether a run had the same weights, batches and random numbers as this reference."""

        def inputs(record: Record) -> Any:
            draws = [[draw.numbers for calls in step.draws.values() for draw in calls] for step in record.steps]
            return record.start, record.run.given, draws

        return all(same_tensors(inputs(a), inputs(b)) for a, b in zip(records, self._records, strict=True))

    def _part(self, result: str, **more: Any) -> ScriptPart:
        script = self._script
        off = None if script.off is None else dict(script.off)
        return ScriptPart("single", str(self._folder), result, script.steps, script.dtype, off=off, **more)


def same_tensors(a: Any, b: Any) -> bool:
    """Return whether two nested structures have the same numbers."""

    def is_same(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return x.shape == y.shape and torch.equal(x, y)
        return type(x) is type(y) and bool(x == y)

    first, second = tree_leaves(a), tree_leaves(b)
    return len(first) == len(second) and all(map(is_same, first, second))


# --- The record of a single process, read as the reference ---


def truth_of_step(record: Record, at: int) -> Truth:
    """Read one step of the single-process run as `Truth`. The script itself ran passes, clipping and optimizer."""
    step, before = record.steps[at], record.steps[at - 1] if at else None
    total = unsharded(
        step.total or step.stepped
    )  # an optimizer that runs the passes itself has gradients only in its step
    passes = sorted({number for by_pass in step.raw.values() for number in by_pass})
    loss = mean_of(step.losses)

    # The norm is computed again in fp64, because torch's own sum of squares has a larger rounding error. If the two are
    # further apart than that, the script clips only some of the parameters or has its own norm, which then counts.
    whole = [value for name, value in total.items() if name not in step.lengths]
    norm = None if step.norm is None else norm_of(whole, record.run.norm_type, list(step.lengths.values()))
    if norm is not None and step.norm is not None and abs(norm - step.norm) > 1e-3 * step.norm:
        norm = step.norm
    clipped = unsharded(step.clipped) if step.clipped else divided(total, step.divisors)
    return Truth(
        loss=loss[0] if loss is not None else 0.0,  # not recorded; then it is missing on the ranks too
        passes=[{name: by_pass[n] for name, by_pass in step.raw.items() if n in by_pass} for n in passes],
        total=total,
        lengths=step.lengths,
        clipped=clipped if norm is not None else {},
        norm=norm,
        weights=step.weights,
        buffers=step.buffers,
        activations=step.activations,
        inputs=step.inputs,
        events=step.events,
        rows=step.rows,
        changed=step.changed,
        changed_state=step.changed_state,
        started=record.start if before is None else {**before.weights, **before.buffers},
        losses=[None if loss is None else loss[0] for loss in step.losses],
        stepped=unsharded(step.stepped),
    )


def unsharded(pieces: Mapping[str, Sequence[Piece]]) -> dict[str, Tensor]:
    """Return the gradients of a single process, whose pieces are full tensors."""
    return {name: some[0].value for name, some in pieces.items()}


def _check_same_model(ranks: dict[str, tuple[int, ...]], single: dict[str, tuple[int, ...]]) -> None:
    different = sorted(
        {name for name, shape in [*ranks.items(), *single.items()] if ranks.get(name) != single.get(name)}
    )
    if different:
        name, many = different[0], len(different) > 1
        shapes = f"{ranks.get(name, 'missing')} on the ranks and {single.get(name, 'missing')} in a single process"
        raise ScriptError(
            f"the script builds a different model in a single process: {len(different)} parameter{'s' * many} "
            f"{'differ' if many else 'differs'}. For example, {name} is {shapes}. Build the full model in the script "
            "when every parallel size is 1."
        )


def _most_terms(records: Sequence[Record]) -> int:
    """A bound on the number of terms in an element of a gradient: the elements of everything that the ranks were given.

    The batches of a script do not show where a step ends, so the batches of all steps count.
    """
    given = records[0].run.given
    most = [
        max((leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), default=1)
        for values in given.values()
        for value in values
    ]
    return max(1, sum(most) * len(records))


def options_of_ranks(records: Sequence[Record]) -> list[Options]:
    """Return the optimizer options of each step on which all ranks with these parameter groups agree."""
    found = []
    for at, step in enumerate(records[0].steps):
        others = [record for record in records if len(record.steps) > at and record.groups == records[0].groups]
        agreed = [
            {
                key: value
                for key, value in group.items()
                if all(other.steps[at].options[number].get(key) == value for other in others)
            }
            for number, group in enumerate(step.options)
        ]
        found.append(agreed)
    return found


# --- Warnings that go with the comparison ---


def warn_of_same_batches(records: Sequence[Record]) -> list[str]:
    """Return a warning if all data-parallel ranks had the same batches."""
    given = records[0].run.given
    batches = [
        some
        for key in given
        if key != "criterion"
        for _, some in _shards_of_batches(records, key)
        if not any(part is None for part in some)
    ]
    data_ranks = len(records) if records[0].run.data_parallel else len(batches[0]) if batches else 0
    if not batches or data_ranks < 2 or not all(map(all_same, batches)):
        return []
    return [
        "warning: all data ranks were given the same batches, so they repeat each other's work. Check that the loader has a "
        "DistributedSampler, and that the sampler gets the data rank of its process"
    ]


def warn_of_uncleared_gradients(truth: Record) -> list[str]:
    """Return a warning if gradients of a step contain those of the previous step in a single process too."""
    for before, step in pairwise(truth.steps):
        left = before.clipped or before.total
        both = [name for name in step.total if name in left and name in step.raw]
        kept = [left[name][0].value for name in both]
        added = [step.total[name][0].value - sum(step.raw[name].values(), torch.zeros(())) for name in both]
        is_kept = all(float((a - k).norm()) <= 1e-6 * float(k.norm()) for a, k in zip(added, kept, strict=True))
        if is_kept and any(bool(value.any()) for value in kept):
            return [
                "warning: the gradients of each step contain those of the previous step, in a single process too, so this is "
                "not a difference. Is a call of zero_grad missing?"
            ]
    return []


# --- The batches that a single process is given ---


def join_batches(records: Sequence[Record], path: Path, data_rank: int | None) -> None:
    """Write every batch of a run to a file: joined over all ranks, or only that of one data rank (`data_rank`)."""
    joined: dict[str, list[Any]] = {}
    joined_in: dict[str, list[int]] = {}
    for key in dict.fromkeys(key for record in records for key in record.run.given):
        for step, batches in _shards_of_batches(records, key):
            micro = records[0].run.micro_batches if key == "batch" else 1
            # A rank that took fewer batches has no part in the last ones.
            batch = batches[data_rank] if data_rank is not None else join([x for x in batches if x is not None], micro)
            # Batches of a loader may be of any kind. They must be joined only where they reach the engine.
            if batch is None and key.startswith("loader"):
                break
            if batch is None:
                shapes = [[tuple(x.shape) for x in tree_leaves(some) if isinstance(x, Tensor)] for some in batches]
                raise ScriptError(
                    f"the batches of the ranks have the shapes {shapes}, which cannot be concatenated along "
                    "dimension 0. Give all ranks batches whose shapes differ only in dimension 0."
                )
            joined.setdefault(key, []).append(batch)
            joined_in.setdefault(key, []).append(step)
    if all(step.in_eval.get("", False) for record in records for step in record.steps):
        joined[IN_EVAL] = [True]
    torch.save((joined, joined_in if unequal_passes(records) else {}), path)


def _shards_of_batches(records: Sequence[Record], key: str) -> Iterator[tuple[int, list[Any]]]:
    """For each batch that ranks took at a place, in order: its step, and the part of each data rank (None if it took no batch)."""
    runs = [record.run for record in records]
    # Batches belong together by their number within a step, because some ranks may take fewer of them in a step.
    by_step: dict[int, list[list[Any]]] = {}
    for rank, run in enumerate(runs):
        for value, step in zip(run.given.get(key, ()), run.given_in.get(key, ()), strict=True):
            by_step.setdefault(step, [[] for _ in runs])[rank].append(value)
    for step in sorted(by_step):
        for at in range(max(map(len, by_step[step]))):
            values = [some[at] if at < len(some) else None for some in by_step[step]]
            try:
                yield step, data_rank_batches(values, runs)
            except ValueError as error:
                counts = ", ".join(f"rank {rank} took {len(some)}" for rank, some in enumerate(by_step[step]))
                raise ScriptError(f"{error}: in step {step}, {counts} ({key})", code="C100") from None


def unequal_passes(records: Sequence[Record]) -> list[str]:
    """Return the numbers of batches by rank, as text, for each step in which data ranks took unequal numbers."""
    found: dict[int, str] = {}
    for key in ("call", "batch"):
        counts: dict[int, Counter[int]] = {}
        for record in records:
            # Of several ranks with the same data, and of the stages of a pipeline, the first takes the batches.
            axes = record.run.axes or ()
            if all(record.run.coordinates[axis.name] == 0 for axis in axes if not axis.distinct):
                counts[record.rank] = Counter(record.run.given_in.get(key, ()))
        for step in sorted({step for some in counts.values() for step in some}):
            if len({some[step] for some in counts.values()}) > 1:
                by_rank = ", ".join(f"rank {rank} took {some[step]}" for rank, some in counts.items())
                found.setdefault(step, f"in step {step}, {by_rank}")
    return [found[step] for step in sorted(found)]


# --- The runs ---


@contextmanager
def _shown_run(script: Script, how: str, detail: str = "") -> Iterator[None]:
    """One line on stderr for a run: its name when it starts, its duration when it is done."""
    started, outcome = time.monotonic(), "failed after"
    planted = f", with the mistake {script.mistake}" if script.mistake else ""
    detail = f" ({detail})" if detail else ""
    sys.stderr.write(f"colonnade verify: {script} {how}{planted}{detail} ...")
    sys.stderr.flush()  # the line has no end yet, so stderr would keep it
    try:
        yield
        outcome = "done in"
    finally:
        sys.stderr.write(f" {outcome} {time.monotonic() - started:.1f} s\n")
        sys.stderr.flush()


def on_ranks(script: Script, folder: Path, processes: Processes) -> list[Record]:
    """Run the script on its ranks, and return one record per rank."""
    count, how = script.nproc, f"on {script.nproc} rank{'s' * (script.nproc > 1)}"
    off = None if script.off is None else dict(script.off)
    whole = None if script.whole is None else list(script.whole)
    part = ScriptPart(
        "ranks",
        str(folder),
        "rank{rank}.pt",
        script.steps,
        script.dtype,
        mistake=script.mistake,
        whole=whole,
        off=off,
        keeps_checkpoints=script.keeps_checkpoints,
        ends_before=script.ends_before,
        schedule=script.schedule,
    )
    with ExitStack() as stack:
        stack.enter_context(_shown_run(script, how))
        # The variables of torchrun. The port stays bound until the end, so that no other process gets it.
        port = stack.enter_context(loopback_socket(listening=False)).getsockname()[1]
        commands = [
            _command(script, part.write(folder / "ranks.json"), f"rank{rank}", rank, count, port)
            for rank in range(count)
        ]
        some, codes = _run(script, commands, how, processes, stack)
        if any(codes):
            # All ranks get a short time to write why they ended, and then the report of `colonnade run` names the first one.
            stop(some)
            ended = time.time()
            outcomes = {
                rank: read_failure(rank, folder / f"rank{rank}.error") or silent_failure(rank, code, ended)
                for rank, job in enumerate(some)
                if (code := job.wait(0.0))
            }
            text, status = launch_report(outcomes, {rank: job.log for rank, job in enumerate(some)})
            said = "\n".join(job.output() for job in some)
            raise ScriptError(f"{script} failed {how} (exit status {status}):\n{said}\n{text}")
        records = with_layout([_record(script, folder / f"rank{rank}.pt", how) for rank in range(count)])

    # Some ranks may have a tensor as a whole of which others have sketches.
    found = [record.run.sketched for record in records]
    counts = {name: prod(note.shape) for record in records for name, note in record.tensors.items()}
    common = common_sketches([record.tensors for record in records], found, counts)
    if mixed := {name for some in found for name in some} - common:
        return on_ranks(replace(script, whole=[*(script.whole or ()), *mixed]), folder, processes)
    return records


def _in_single_processes(
    script: Script, folder: Path, parts: Sequence[ScriptPart], what: str, processes: Processes
) -> list[Record]:
    """Run the script in a single process for each part, all of them at once; returns their records."""
    how = "in a single process"
    with ExitStack() as stack:
        stack.enter_context(_shown_run(script, f"on 1 rank, {len(parts)} times at once", what))
        commands = []
        for part in parts:
            # Every process is a world of one rank, with a port of its own.
            port = stack.enter_context(loopback_socket(listening=False)).getsockname()[1]
            name = part.result.removesuffix(".pt")
            commands.append(_command(script, part.write(folder / f"{name}.json"), name, 0, 1, port))
        some, codes = _run(script, commands, how, processes, stack)
        for job, status in zip(some, codes, strict=True):
            if status:
                ranks = f"{script.nproc} rank{'s' * (script.nproc > 1)}"
                raise ScriptError(
                    f"{script} ran on {ranks}, but failed {how}, where every parallel size is 1 and each batch is "
                    f"the global batch (exit status {status}). If the script uses batches outside of its engine, for "
                    "example in a custom loss, read them from a DataLoader or through colonnade.watch(engine, None, "
                    f"batches). Output of the script:\n{job.output()}"
                )
        return [_record(script, folder / part.result, how) for part in parts]


def _command(script: Script, part: Path, name: str, rank: int, count: int, port: int) -> Command:
    """The process of a rank, with the variables that torchrun sets."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment |= {VARIABLE: str(part), "GLOO_SOCKET_IFNAME": environment.get("GLOO_SOCKET_IFNAME", "lo")}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": part.parent.name}
    environment |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "ROLE_NAME": "default"}
    environment |= {"TORCHELASTIC_ERROR_FILE": str(part.parent / f"{name}.error")}
    for prefix in ("", "LOCAL_", "ROLE_"):
        environment |= {f"{prefix}RANK": str(rank), f"{prefix}WORLD_SIZE": str(count)}
    environment |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    words = ["module" if script.is_module else "script", "plain", script.target, *script.arguments]
    return Command(words, environment, part.parent / f"{name}.log")


def _run(
    script: Script, commands: Sequence[Command], how: str, processes: Processes, stack: ExitStack
) -> tuple[list[Running], list[int | None]]:
    """Run commands until all have ended or one has failed; returns the processes and their exit codes."""
    while True:
        some = stack.enter_context(processes.running(commands))
        codes = wait_for_all(some, time.monotonic() + script.timeout)
        if codes is None:
            said = "\n".join(job.output() for job in some)
            raise ScriptError(
                f"{script} did not finish step {script.steps} {how} within {script.timeout:g} seconds, and was "
                "stopped. If the script is only slow, allow more time with --timeout. Its last output and its "
                f"stack:\n{said}"
            )
        if NEEDS_NEW_PYTHON not in codes or not processes.forks:
            return some, codes
        # The script compiles its model, which can hang in a forked process. From here on, every process is a new Python.
        stop(some)
        processes.restart_without_forks()


def _record(script: Script, file: Path, how: str) -> Record:
    """The record that a process wrote, if it took a step."""
    if not file.exists():
        raise ScriptError(f"{script} ended {how} before it wrote its results. Check for a call such as os._exit().")
    found = torch.load(file, weights_only=False)
    if isinstance(found, Record):
        return found
    why = (
        (
            "The script builds an engine or calls colonnade.watch, but it never calls engine.step(), or step() of "
            "the optimizer that it passed to colonnade.watch"
        )
        if found
        else (
            "The script neither builds an engine with colonnade.initialize nor passes its model to "
            "colonnade.watch(model, optimizer, batches). If the script starts its ranks itself, verify cannot see "
            "them: let this command start the ranks (--nproc)"
        )
    )
    raise ScriptError(f"{script} ended {how} without a step, so there is nothing to compare. {why}", code="C100")

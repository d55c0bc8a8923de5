"""Silent bugs of 2026 that were found by reading the trackers of other frameworks: `python -m tests.corpus.field [KIND ...]`.

Each is re-made in a few lines of plain torch (`scripts/field_*.py`). The causes and places were written down before
`colonnade verify` ran on any of them; docs/evidence/bugs.md has the figures of that first run. Two scripts were corrected
after it: the gradients of `muon` lacked rank, which left its update undetermined in the right version too, and `chunks_alike` drew its head
after the chunks, so that the head differed as well. Every script also runs without its mistake, and is then equal to one
process. Without names, the command writes its part of the page.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from colonnade.errors import ParityError
from colonnade.proof.compare import Report
from colonnade.proof.processes import Processes
from colonnade.proof.scripts import Script, verify_script
from tests.corpus.scripted import SCRIPTS, Planted, judged
from tests.corpus.table import replace_part
from tests.evidence import stamp
from tests.sources import linked


@dataclass(frozen=True, kw_only=True)
class FieldBug(Planted):
    """A bug of a public tracker: where it is told of, and what it was."""

    source: str
    what: str


def _sums(source: str, what: str, causes: tuple[str, ...], *place: str, **more: object) -> FieldBug:
    return FieldBug("field_sums.py", causes, place, source=source, what=what, **more)  # type: ignore[arg-type]


def _layers(source: str, what: str, causes: tuple[str, ...], *place: str, **more: object) -> FieldBug:
    return FieldBug("field_layers.py", causes, place, source=source, what=what, **more)  # type: ignore[arg-type]


def _state(source: str, what: str, causes: tuple[str, ...], *place: str, **more: object) -> FieldBug:
    return FieldBug("field_state.py", causes, place, source=source, what=what, **more)  # type: ignore[arg-type]


START, WEIGHTS, FORWARD = ("weights-differ-at-start",), ("optimizer-differs",), ("forward-differs",)
STATE = "state|moment|exp_avg"
FIELD = {
    "doubled_buffer": _sums(
        "Megatron-LM #6660",
        "the gradient buffer of experts is added to itself after each micro-batch",
        ("reduced-twice",),
        "experts",
        innocent=("gradient of enter",),
    ),
    "summed_copy": _layers(
        "Megatron-LM #5338",
        "the all-reduce of a transposed activation sums a copy, and the activation stays partial",
        FORWARD,
        "module 1",
        "partial",
    ),
    "gathered_weights": _sums(
        "Megatron-LM #4609",
        "accumulation starts from the weights that the gradient buffer received",
        ("weights-in-gradient",),
        "times the weight",
    ),
    "dummy_gradient": _sums(
        "Megatron-LM #6565",
        "a shared dummy gradient that is not zeroed is added to the gradients of its layers",
        ("gradients-exchanged",),
        "2\\.weight",
        "4\\.weight",
        innocent=("0\\.weight",),
    ),
    "half_gradient": _sums(
        "Megatron-LM #6624", "weight gradients are computed in bf16 before the reduction", ("rounded",), "bfloat16"
    ),
    "one_sequence": _sums(
        "Megatron-LM #5798",
        "a balance loss is divided by the number of sequences of a micro-batch",
        ("wrong-divisor", "loss-differs"),
        "gate",
        innocent=("gradient of body",),
    ),
    "padded_moments": _state(
        "Megatron-LM #5077", "moments of the optimizer are loaded from shifted places", WEIGHTS, STATE
    ),
    "outer_deferred": _sums(
        "Megatron-LM #5972",
        "the deferred outer sum leaves out the first micro-batch",
        ("not-reduced",),
        "micro-batch 0",
        nproc=4,
    ),
    "inverted_test": _sums(
        "Megatron-LM #3754", "an inverted test leaves out every all-reduce", ("not-reduced",), "DATA"
    ),
    "local_scores": _layers(
        "transformers #48687",
        "a router gets the gradient of the experts of its rank only",
        ("partial-gradient",),
        "router",
        innocent=("gradient of 1.experts",),
    ),
    "state_of_another": _state(
        "transformers #48569", "every tensor rank resumes with the first shard of the moments", WEIGHTS, "up", STATE
    ),
    "without_sequence": _layers(
        "VeOmni #1115",
        "gradients are averaged over a group that leaves out the sequence ranks",
        ("not-reduced", "partial-gradient"),
        "MODEL",
    ),
    "identity_backward": _layers(
        "pytorch #190746",
        "a log-softmax has the identity as its backward pass",
        ("backward-differs",),
        "2\\.weight",
    ),
    "fresh_dropout": _layers(
        "pytorch #190758", "a recomputation draws other numbers for its dropout", ("recomputation-differs",), "module 1"
    ),
    "used_twice": _layers(
        "pytorch #180952",
        "a split backward pass counts one of two uses of a weight twice",
        ("backward-differs",),
        "1\\.shared",
    ),
    "calls_grad": _sums(
        "pytorch #144530", "autograd.grad runs no hooks of DDP: nothing is averaged", ("not-reduced",), "DATA"
    ),
    "muon": _state(
        "DeepSpeed #8437",
        "an optimizer makes the update of each shard orthogonal by itself",
        WEIGHTS,
        "up",
        innocent=("enter", "down"),
    ),
    "noted_heads": _layers(
        "DeepSpeed #8384",
        "heads are those of the whole weight, and blocks are half of a head",
        FORWARD,
        "enter",
        "head",
    ),
    "flat_buffer": _layers(
        "DeepSpeed #8195", "a buffer of tokens is cut along the dimension of the model", FORWARD, "1\\.expert"
    ),
    "overwritten": _sums(
        "DeepSpeed #7981",
        "each backward pass overwrites the gradient of the pass before",
        ("last-micro-batch-only",),
        "last of 3",
    ),
    "aligned_buffer": _layers(
        "DeepSpeed #8158",
        "weights are fetched from a buffer at places without its alignment",
        FORWARD,
        "module second",
    ),
    "thrown_away": _sums(
        "Automodel #1408",
        "the result of the function that gives a balance loss its gradient is not used",
        ("backward-differs", "missing-gradient"),
        "router",
    ),
    "unscaled_balance": _sums(
        "Automodel #3359",
        "a balance loss is not divided by the number of micro-batches",
        ("scaled-by-accumulation",),
        "gate",
        innocent=("gradient of body",),
    ),
    "cast_copy": _state(
        "Automodel #2682",
        "weights are loaded into a cast copy",
        START,
        "experts\\.weight",
        innocent=("head",),
    ),
    "one_stream": _state(
        "Automodel #3437",
        "after a resume, tensor ranks draw the same masks for different shards",
        ("masks-differ",),
        "random|dropout",
    ),
    "left_over": _sums(
        "Automodel #2257",
        "the last window of accumulation, which is not full, is cleared",
        ("micro-batch-missing", "rows-differ"),
        "micro-batch|rows",
        steps=3,
    ),
    "counted_adapter": _layers(
        "Megatron-Bridge #6089",
        "a deferred sum takes in the output of an adapter, which is whole already",
        FORWARD,
        "module 1",
        innocent=("look at that module.*1\\.adapter",),
    ),
    "sharded_adapter": _layers(
        "Megatron-Bridge #5900", "a sharded adapter joins features of different tokens", FORWARD, "module 1"
    ),
    "fan_of_shard": _state(
        "Megatron-Bridge #5843",
        "an adapter is initialised by the fan of its shard",
        START,
        "wide",
        innocent=("narrow",),
    ),
    "batch_first": _layers(
        "Megatron-Bridge #5385",
        "a projection gathers and cuts the batch in place of the tokens",
        FORWARD,
        "enter",
        "head",
    ),
    "no_count": _layers(
        "verl #6836",
        "a loss of tokens is not divided, as no count is given",
        ("wrong-divisor", "scaled-by-mode", "loss-differs"),
        "loss",
        "15",
    ),
    "lost_flag": _layers(
        "verl #6913",
        "hidden states get no gradient",
        ("missing-gradient",),
        "body",
        innocent=("gradient of head",),
    ),
    "plain_gather": _layers(
        "ms-swift #9947",
        "ranks without a word get no gradient of its log-probability",
        ("backward-differs", "partial-gradient"),
        "head",
    ),
    "factor_twice": _layers(
        "SkyRL #1751",
        "the loss is multiplied by the number of sequence ranks twice",
        ("scaled-by-mode",),
        "MODEL",
        "loss",
    ),
    "replicated_scores": _layers(
        "torchtitan #3822, #3827",
        "the backward pass of a gather sums once more",
        ("scaled-by-mode",),
        "MODEL",
        "backward",
    ),
    "head_axis": _layers("torchtitan #3681", "keys are gathered along the axis of heads", FORWARD, "enter", "head"),
    "packed_documents": _layers(
        "trl #6843, prime-rl #2392", "packed documents see each other", FORWARD, "enter", "head"
    ),
    "epoch_reset": _state(
        "accelerate #4071", "after a resume the sampler shuffles as in the first epoch", ("rows-differ",), "batch|rows"
    ),
    "skip_discarded": _state(
        "cosmos-rl #621", "after a resume the batches to skip are not skipped", ("rows-differ",), "batch|rows"
    ),
    "chunks_alike": _state(
        "OLMo-core #679", "two chunks of a pipeline stage are initialised alike", START, "second", innocent=("head",)
    ),
    "moments_dropped": _state(
        "AReaL #1468",
        "moments of some parameters are not loaded",
        WEIGHTS,
        "2\\.weight",
        STATE,
        innocent=("0\\.weight",),
    ),
}
"""By kind. The last four are one row of the list that they come from, so these are 38 rows."""


def reports(kinds: list[str], *arguments: str) -> dict[str, Report | ParityError]:
    """The report on each of these scripts, or the reason why there is none. Scripts of one file share a warm process."""
    found: dict[str, Report | ParityError] = {}
    for file in sorted({FIELD[kind].file for kind in kinds}):
        with Processes(str(SCRIPTS / file)) as processes:
            for kind in kinds:
                bug = FIELD[kind]
                script = Script(str(SCRIPTS / file), (kind, *arguments), bug.nproc, bug.steps, called=kind)
                if bug.file == file:
                    try:
                        found[kind] = verify_script(script, processes)
                    except ParityError as error:
                        found[kind] = error
    return {kind: found[kind] for kind in kinds}


def markdown(wrong: dict[str, Report | ParityError], right: dict[str, Report | ParityError]) -> str:
    """The part of the page."""
    lines = [
        "| source | bug | detected | cause and place | message of `verify` | without the bug |",
        "|---|---|---|---|---|---|",
    ]
    for kind, bug in FIELD.items():
        report, other = wrong[kind], right[kind]
        findings = report.findings if isinstance(report, Report) else ()
        named = "right" if isinstance(report, Report) and not judged(kind, report, bug) else "not named"
        notes = (
            [note for note in report.notes if "draw the same random numbers" in note]
            if isinstance(report, Report)
            else []
        )
        said = (
            findings[0].sentence if findings else f"only a note: {notes[0]}" if notes else str(report).splitlines()[0]
        )
        equal = "equal" if isinstance(other, Report) and other.ok else "**not equal**"
        source = f"{linked(bug.source)} (`{kind}` in [test](../../tests/corpus/scripts/{bug.file}))"
        lines.append(f"| {source} | {bug.what} | {'yes' if findings else 'NO'} | {named} | {said} | {equal} |")
    return stamp("python -m tests.corpus.field") + "\n\n" + summary(wrong, right) + "\n\n" + "\n".join(lines) + "\n"


def summary(wrong: dict[str, Report | ParityError], right: dict[str, Report | ParityError]) -> str:
    """One line with the counts."""
    found = {kind: report for kind, report in wrong.items() if isinstance(report, Report) and report.findings}
    faults = {kind: judged(kind, report, FIELD[kind]) for kind, report in found.items()}
    named = sum(not some for some in faults.values())
    blamed = sum(any("is in it" in fault and "not in it" not in fault for fault in some) for some in faults.values())
    equal = sum(isinstance(report, Report) and report.ok for report in right.values())
    return (
        f"{len(wrong)} scripts: {len(found)} detected, cause and place right in {named}, something innocent blamed in {blamed}; "
        f"{equal} equal without the bug."
    )


def main(chosen: list[str]) -> int:
    kinds = chosen or list(FIELD)
    wrong, right = reports(kinds), reports(kinds, "right")
    for kind, report in wrong.items():
        faults = judged(kind, report, FIELD[kind]) if isinstance(report, Report) else [f"no report: {report}"]
        print(f"{'wrong: ' + '; '.join(faults) if faults else 'right'} {kind}", flush=True)
        other = right[kind]
        if not isinstance(other, Report) or not other.ok:
            print(f"    WITHOUT THE MISTAKE: {other}")
        if isinstance(report, Report):
            said = [f"{finding.cause} (step {finding.step}): {finding.sentence}" for finding in report.findings]
            said = said or [note for note in (report.uncertain, *report.notes) if note]
            print("".join(f"    {line}\n" for line in said), end="", flush=True)
    if not chosen:
        replace_part("field", markdown(wrong, right))
    print(summary(wrong, right))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Diagnosis of a run that differs from the single-process reference: hypotheses are tested on the recorded numbers.

`diagnose` compares, and `_Diagnosis.findings` examines the differences in the order in which a step computes things. A
difference that follows from an earlier one is a row of the table, but not a finding. Each examination builds a case
(case.py), asks the hypotheses of its kind (claims.py), and turns the claims that explain most into findings (`_group`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import isclose

from torch import Tensor

from colonnade.proof import hypotheses  # noqa: F401  importing the package fills the table
from colonnade.proof.case import Case, ClipCase, GradientCase, Groups, NormCase, digits, either, near, raw_scale
from colonnade.proof.claims import CAUSES, Claim, claims
from colonnade.proof.compare import (
    ACTIVATION,
    BUFFER,
    CLIPPED,
    GRADIENT,
    LOSS,
    MODE,
    NORM,
    NORMS,
    OPTION,
    RANDOM,
    RECOMPUTED,
    STARTED,
    STATE,
    STATE_AT_START,
    UNCERTAIN,
    WEIGHTS,
    WEIGHTS_AT_START,
    Compared,
    Evidence,
    Finding,
    GradientEvidence,
    LocalValue,
    Report,
    Row,
    StepEvidence,
    Tolerance,
    Unplaced,
    compare,
    compare_tensor,
    differing_elements,
    distance,
    length,
    notes_of_rows,
    short_ranks,
    typical_spread,
    why_uncertain,
)
from colonnade.texts import pattern_of

_SURE = 79
"""Claims of this rank and above state that something differs, but hardly why."""
_FEW = 8
_TESTED_ELEMENTS = 20_000_000
"""Up to this many elements in total, every differing gradient is tested on its own."""


def diagnose(evidence: Evidence) -> Report:
    """Compare all values and name the mistakes.

    Differences that follow from an earlier difference are in the table, but are no findings.
    """
    rows = compare(evidence)
    wrong = [row for row in rows if not row.ok and row.status != UNCERTAIN]
    findings = _Diagnosis(evidence, rows).findings() if wrong else []
    notes = (*evidence.notes, *notes_of_rows(rows))
    return Report(tuple(findings), tuple(rows), notes, why_uncertain(evidence, rows))


class _Diagnosis:
    """The rows of one comparison, examined in the order in which a step computes them."""

    def __init__(self, evidence: Evidence, rows: Sequence[Row]) -> None:
        self.evidence, self.rows, self.groups = evidence, rows, Groups(evidence)
        self.wrong = [row for row in rows if not row.ok and row.status != UNCERTAIN]
        self.at = next((row.step for row in self.wrong if row.step is not None), 0)

    def findings(self) -> list[Finding]:
        """Return the mistakes of the first step that differs.

        Later steps start from its weights, so their differences follow.
        """
        # NaN spreads to everything that it is added to, so no other difference means anything.
        if broken := self._not_finite():
            return broken

        # The reference starts from the weights of the ranks. If those are not the weights of one model, all else differs too.
        rows = self.num_rows(WEIGHTS_AT_START)
        named = {row.name: claims("tensor", self._case(self.evidence.weights_at_start[row.name], row)) for row in rows}
        weights = {name: some for name, some in named.items() if name in self.evidence.parameters}
        buffers = {name: some for name, some in named.items() if name not in weights}
        start = self._group(weights, None, "the initial weight", "weights-differ-at-start", rows)
        start += self._group(buffers, None, "the initial buffer", "buffers-differ", rows, always=True)
        start += self._state_at_start()
        if start:
            return start

        # If ranks that should slice one batch sliced batches of their own, every activation is of other data.
        if self.evidence.sliced_differently:
            how = "were given different batches, and each sliced its own; give all of them the same full batch"
            return [
                Finding("replicas-differ", (), self.at, f"the ranks of {mode} {how}.")
                for mode in self.evidence.sliced_differently
            ]

        # Weights and state that changed since the previous step, by code outside of the step.
        if between := self._between_steps():
            return between

        # The forward pass. Different masks make different activations, so masks come first. If the output of a module changes
        # when it is recomputed, either of the two outputs may be the right one: then only the recomputation is reported.
        again = self._recomputed()
        forward = self._masks() or ([] if again else self._forward())

        # Gradients follow from activations, so they are examined only if the activations are right.
        backward = forward or again or self._passes() or self._first_pass() or self._gradients()

        # A reported loss can be wrong without any effect on gradients, as a mean over the wrong ranks. But it can also be the
        # reason of gradients that no hypothesis explains; then the loss is the better thing to report.
        loss = [] if forward else self._loss(backward)
        known = [finding for finding in backward if finding.cause != "unknown"]
        found = [*known, *loss] if loss else [*backward]

        # Norm, clipped gradient and weight: each follows from the one before.
        if not backward:
            found += self._norm() or self._clipped() or self._options() or self._weights()

        # Buffers (running statistics) follow from activations only.
        if not forward:
            rows = self.num_rows(BUFFER)
            named = {row.name: claims("tensor", self._case(self.step.buffers[row.name], row)) for row in rows}
            found += self._group(named, self.at, "the buffer", "buffers-differ", rows, always=True)
        if found:
            return found
        row = self.wrong[0]
        sentence = f"{_called(row)} differs by {row.error:.3g} tolerances, and no hypothesis explains it."
        return [Finding("unknown", (row.name,), row.step, sentence)]

    @property
    def step(self) -> StepEvidence:
        """The first step that differs."""
        return self.evidence.steps[self.at]

    def num_rows(self, *quantities: str) -> list[Row]:
        """Return the differing rows of these quantities in the first step that differs."""
        return [row for row in self.wrong if row.quantity in quantities and row.step in (None, self.at)]

    def _ranks(self, ranks: Sequence[int]) -> str:
        """Ranks in a sentence."""
        if not ranks or len(ranks) == self.evidence.world_size:
            return "every rank"
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {short_ranks(ranks)}"

    # --- From NaN to the loss ---

    def _not_finite(self) -> list[Finding]:
        row = next((row for row in self.wrong if row.status == "not finite" and row.step in (None, self.at)), None)
        if row is None:
            return []
        if row.detail:
            sentence = (
                f"{_called(row)} is not finite in the single-process run either, so the model or the data is the cause, not "
                f"the parallelism."
            )
            return [Finding("not-finite", (row.name,), row.step, sentence)]

        # A reduction spreads NaN to every rank, so the ranks of the row say little: the local gradients tell where it came from.
        gradient = self.step.gradients.get(row.name) if row.quantity == GRADIENT else None
        sources = [
            (part.rank, number)
            for number, some in enumerate(gradient.raw if gradient is not None else ())
            for part in some
            if not bool(part.value.isfinite().all())
        ]
        if sources:
            rank, number = sources[0]
            source = f", and comes from rank {rank} in micro-batch {number}; look at the data of that rank there"
        elif gradient is not None and gradient.raw:
            source = (
                ", but the local gradients of all ranks are finite; look at its reduction and everything after that"
            )
        elif row.quantity in (NORM, NORMS):
            source = ", but all gradients are finite; look at the dtype of the sum of powers, and at divisions by zero"
        else:
            source = "; look at the data of these ranks"
        sentence = f"{_called(row)} is the first value that is not finite, on {self._ranks(row.ranks)}{source}."
        return [Finding("not-finite", (row.name,), row.step, sentence)]

    def _state_at_start(self) -> list[Finding]:
        """The optimizer's state that a resumed run starts with, if it is not that of a single process."""
        rows, found = self.num_rows(STATE_AT_START), list[Finding]()
        absent: dict[tuple[int, ...], list[str]] = {}
        named: dict[str, list[Claim]] = {}
        for row in rows:
            compared = self.evidence.state_at_start[row.name]
            wrong = [part for part in compared.found if part.rank in row.ranks]
            if all(not bool(part.value.any()) for part in wrong):
                absent.setdefault(row.ranks, []).append(row.name)
            else:
                named[row.name] = claims("tensor", self._case(compared, row))
        for ranks, names in absent.items():
            sentence = (
                f"the initial optimizer state {_shortened(names)} is zero or missing on {self._ranks(ranks)}; look at what the checkpoint "
                f"has for these parameters, and at names that it is loaded by."
            )
            found.append(Finding("optimizer-differs", tuple(names), None, sentence))
        left = [row for row in rows if row.name in named]
        found += self._group(named, None, "the initial optimizer state", "optimizer-differs", left, always=True)
        return found

    def _passes(self) -> list[Finding]:
        """Another number of backward passes in the step than in a single process, if the first of them agrees."""
        if self.step.passes is None or self.step.passes[0] == self.step.passes[1]:
            return []
        own, single = self.step.passes
        tolerance = Tolerance.for_run(self.evidence)
        for name, gradient in self.step.gradients.items():
            if not gradient.raw or not gradient.truth_of_passes:
                continue
            row = Row(GRADIENT, name, self.at, "equal", 0.0, tolerance.of(gradient.total))
            case = self._gradient_case(row, replace(gradient, raw=gradient.raw[:1]), self.step)
            truth = gradient.truth_of_passes[0]
            for part in gradient.total.found:
                due = case.due(part)
                apart = None if due is None else LocalValue(part.rank, due, part.positions)
                if apart is None or distance(apart, truth) > 10 * tolerance.of(
                    Compared(truth, (), gradient.total.spread)
                ):
                    return []
        sentence = (
            f"the ranks make {own} backward passes in step {self.at}, and a single process {single}, while the first pass agrees; "
            f"look at which micro-batches a step has: windows of accumulation that are not full, and gradients that are cleared "
            f"before they are used."
        )
        return [Finding("rows-differ", (), self.at, sentence)]

    def _between_steps(self) -> list[Finding]:
        """Weights, buffers and optimizer state that were right at the end of the previous step and are wrong at the start of this one."""
        rows, kinds = self.num_rows(STARTED, STATE), dict[tuple[str, tuple[int, ...]], list[str]]()
        since = f"between step {self.at - 1} and step {self.at}" if self.at else "between the start and step 0"
        for row in rows:
            ranks, step = row.ranks, self.step
            on = step.changed_on.get(row.name, ())
            if row.name in step.changed_in_reference and not set(on) & set(ranks):
                others = f" and on {self._ranks(on)}" if on else ""
                how = f"changed {since} in a single process{others}, but not on {self._ranks(ranks)}"
            elif row.name not in step.changed_in_reference:
                how = f"changed {since} on {self._ranks(ranks)}, but not in a single process"
            else:
                how = f"changed {since} on {self._ranks(ranks)} differently than in a single process"
            kinds.setdefault((how, ranks), []).append(row.name)
        return [
            Finding(
                "changed-between-steps",
                tuple(names),
                self.at,
                f"{_shortened(names)} {how}; look at code outside of the step that only some ranks run: weight "
                f"averages, teacher models, weights that are swapped for an evaluation, and "
                f"loading{self._evaluations()}.",
            )
            for (how, _), names in kinds.items()
        ]

    def _evaluations(self) -> str:
        """The passes without gradients before this step, if some ranks ran more of them."""
        counts = {
            count: [rank for rank, own in enumerate(self.step.evaluations) if own == count]
            for count in self.step.evaluations
        }
        if len(counts) < 2:
            return ""
        shown = " and ".join(
            f"{count} on {self._ranks(ranks)}" for count, ranks in sorted(counts.items(), reverse=True)
        )
        return f" (passes without gradients before this step: {shown})"

    def _options(self) -> list[Finding]:
        """Options of the optimizer that differ between ranks, so that the weights differ too."""
        return [
            Finding(
                "optimizer-differs",
                (),
                self.at,
                f"{row.name} of the optimizer is {row.detail}; look at schedulers that each rank steps with its own "
                f"values, such as its loss or its number of batches.",
            )
            for row in self.num_rows(OPTION)
        ]

    def _masks(self) -> list[Finding]:
        if in_eval := self.num_rows(MODE):
            names = tuple(row.name for row in in_eval if row.name)
            names = ("the model",) if len(names) < len(in_eval) else names  # then its modules follow it
            verb, kind = ("are", "modules ") if len(names) > 1 else ("is", "" if names == ("the model",) else "module ")
            where = f"{verb} in evaluation mode on {self._ranks(in_eval[0].ranks)} and in training mode on the others"
            sentence = f"{kind}{_shortened(names)} {where}; look for calls of eval() there{self._evaluations()}."
            return [Finding("forward-differs", names, self.at, sentence)]
        return [
            Finding(
                "masks-differ",
                (row.name,),
                None,
                f"{f'module {row.name}' if row.name else 'the model'} draws other random numbers on {self._ranks(row.ranks)} than on the first rank "
                f"that has the same activation (dropout, for example); look at the random seeds of these ranks.",
            )
            for row in self.num_rows(RANDOM)[:1]
        ]

    def _forward(self) -> list[Finding]:
        """The first input or output of a module that differs, with the modules before it that could not be compared."""
        forward, outputs = self.step.forward, {row.name: row for row in self.rows if row.quantity == ACTIVATION}
        first_module, differing = next(iter(self.step.activations), None), self.num_rows(ACTIVATION)

        # Rows that are dropped or taken twice change everything that comes after.
        if forward.rows is not None and (not outputs or (differing and differing[0].name == first_module)):
            name, count, own = forward.rows
            if sum(own) != count:
                shown = " and ".join(map(str, own)) if len(own) <= 4 else f"{own[0]}, {own[1]}, ..."
                sentence = (
                    f"{_module(name)} ran on {sum(own)} rows in this step on the ranks ({shown} on each data rank), and on {count} "
                    f"rows in a single process; look at how a batch is split into micro-batches, and at rows that are dropped."
                )
                return [Finding("rows-differ", (name,), self.at, sentence)]
        if not differing:
            return []

        # The output of the first module depends on nothing but the batch and its weights, and the weights are right.
        row = differing[0]
        case = self._case(self.step.activations[row.name], row)
        rounded = claims("activation", case)
        best = _simplest([*claims("tensor", case), *rounded])
        if best is not None and best not in rounded and row.name == first_module:
            if best.cause == "replicas-differ" and self._share_data(row.ranks):
                sentence = f"the output of the first module, {row.name}, {best.what}: ranks of one data rank were given different batches."
                return [Finding("replicas-differ", (row.name,), self.at, sentence)]
            if best.cause == "shards-swapped" and len(row.ranks) < len(self.step.activations[row.name].found):
                sentence = f"the output of the first module, {row.name}, {best.what}: some ranks were given the batch of another rank; look at the loader."
                return [Finding("micro-batch-twice", (row.name,), self.at, sentence)]

        # The values before that output, in the order of the forward pass. If the input of a module is wrong, and so is its
        # output as far as it is known, then the mistake is before that module.
        tolerance = Tolerance.for_run(self.evidence)
        typical = typical_spread(self.step.activations.values())
        known, unknown, wrong_input, input_is_right = "", list[str](), None, False
        for kind, name in forward.events:
            if kind == "in" and (values := forward.inputs.get(name)):
                compared = [value for value in values if isinstance(value, Compared)]
                found = [
                    (value, compare_tensor(value, tolerance.of(value, typical), "input", name, self.at))
                    for value in compared
                ]
                off = [(value, entry) for value, entry in found if not entry.ok]
                if off and not (name in outputs and outputs[name].ok):
                    wrong_input = (name, *off[0])
                    break
                if not off and len(compared) == len(values):
                    known, input_is_right = f"the input of {_module(name)}", name == row.name
            elif (kind, name) == ("out", row.name):
                break
            elif kind == "out" and name in forward.unplaced:
                unknown.append(name)
            elif kind == "out" and name in outputs and outputs[name].ok and not outputs[name].detail:
                known = f"the output of {_module(name)}"
                # A module inside this one, or one that it took its input from, has done nothing wrong.
                taken = {value.shape for value in forward.inputs.get(name, ()) if isinstance(value, Unplaced)}
                unknown = [
                    other
                    for other in unknown
                    if not (other.startswith(f"{name}.") or not name) and forward.unplaced[other].shape not in taken
                ]
        hidden = (
            f"{_shortened(unknown)} ({forward.unplaced[unknown[0]]}), which could not be compared" if unknown else ""
        )

        if wrong_input is not None:
            name, value, row = wrong_input
            case = self._case(value, row)
            rounded = claims("activation", case)
            best = _simplest([*claims("tensor", case), *rounded])
            how = f"it {best.what}" if best else f"it is off by {row.error:.3g} tolerances"
            where = f"the code between {known} and {_module(name)}" if known else f"the code before {_module(name)}"
            before = f", while {known}, the last value before it that could be compared, agrees" if known else ""
            sentence = (
                f"the input of {_module(name)} is the first value that differs, on {self._ranks(row.ranks)}: {how}{before}; "
                f"look at {where}{f', and at {hidden}' if hidden else ''}{f', and at {best.where}' if best else ''}.{self._unlike_tokens()}"
            )
        else:
            name = row.name
            how = f"its output {best.what}" if best else f"its output is off by {row.error:.3g} tolerances"
            also = ", while everything recorded before it agrees" if not hidden else ""
            also = ", while its input agrees" if hidden and input_is_right else also
            where = f"that module{f', and {best.where}' if best else ''}{f', and {hidden}' if hidden else ''}"
            sentence = f"{_module(name)} is the first whose output differs, on {self._ranks(row.ranks)}: {how}{also}; look at {where}.{self._unlike_tokens()}"
        if best is not None and best in rounded:
            return [Finding("rounded", (name,), self.at, sentence)]
        return [Finding("forward-differs", (name,), self.at, sentence, best.factor if best else None)]

    def _share_data(self, wrong: Sequence[int]) -> bool:
        """Whether one of these ranks must have the same data as a rank that is not among them."""
        ranks = range(self.evidence.world_size)
        return any(
            other not in wrong
            and other not in self.groups.joint([self.groups.name(mode) for mode in self.groups.distinct], rank)
            for rank in wrong
            for other in ranks
        )

    def _unlike_tokens(self) -> str:
        """Two modules whose outputs on one rank agree with the reference, but at different positions along a dimension."""
        tokens = list(self.step.forward.tokens.items())
        for (a, (size, own)), (b, (other_size, other)) in combinations(tokens, 2):
            for rank in own.keys() & other.keys() if size == other_size else ():
                if own[rank] != other[rank] and len(own[rank]) == len(other[rank]):
                    return (
                        f" On rank {rank}, the output of {_module(a)} has the positions {_places(own[rank])} of a single process, "
                        f"and the output of {_module(b)} has {_places(other[rank])}."
                    )
        return ""

    def _recomputed(self) -> list[Finding]:
        """Modules whose output changes when they are recomputed in the backward pass, whichever output is right."""
        rows = self.num_rows(RECOMPUTED)
        if not rows:
            return []
        sentence = (
            f"{f'module {rows[0].name}' if rows[0].name else 'the model'} gives one output in the forward pass and another when it is recomputed in the "
            f"backward pass (activation checkpointing), on {self._ranks(rows[0].ranks)}; look for differences between the two: "
            f"random numbers, masks, buffers, routing or autocast."
        )
        return [Finding("recomputation-differs", tuple(row.name for row in rows), self.at, sentence)]

    def _loss(self, backward: Sequence[Finding]) -> list[Finding]:
        rows = self.num_rows(LOSS)
        if not rows or any(finding.cause != "unknown" for finding in backward):
            return []
        if changed := self._changed_unseen(rows[0]):
            return changed
        found = [value for value in self.step.found_loss if value is not None]
        how, factor = rows[0].detail, None
        if found and self.step.loss and all(isclose(value, found[0], rel_tol=1e-9) for value in found):
            factor = found[0] / self.step.loss
            sizes = {**self.groups.sizes, "accumulation": self.evidence.accumulation}
            products = near(factor, sizes, max(1e-9, 2 * rows[0].tolerance / abs(self.step.loss)))
            how += f", a factor of {digits(factor)}{either(products)}"
        elif found:
            how += ", and differs between ranks"
        unplaced = list(self.step.forward.unplaced.items())
        seen = "all recorded activations agree" if self.step.activations else "no activation was recorded"
        where = "how the loss is averaged over micro-batches, tokens and ranks, and at the labels that each rank passes to it"
        if unplaced:
            names, (_, first) = [name or "the model" for name, _ in unplaced], unplaced[0]
            seen = (
                "all activations that could be compared agree"
                if self.step.activations
                else "no activation could be compared"
            )
            where = (
                f"{where}, or at the forward pass: the outputs of {_shortened(names)} could not be compared ({first})"
            )
        sentence = f"the loss is {how}, while {seen}; look at {where}.{self._unlike_tokens()}"
        return [Finding("loss-differs", (), self.at, sentence, factor)]

    def _changed_unseen(self, row: Row) -> list[Finding]:
        """A loss that was right in the previous steps, whose code cannot be wrong: something that it uses and that is not compared changed."""
        if not self.at or not self.step.gradients:
            return []
        # Ranks whose local gradient is not that of their batch. It is only known if each rank has a batch of its own.
        wrong: set[int] = set()
        for gradient in self.step.gradients.values():
            if len(gradient.raw) == 1 and len(gradient.truth_of_data_ranks) == self.evidence.world_size:
                for part in gradient.raw[0]:
                    truth = gradient.truth_of_data_ranks[part.rank]
                    if distance(part, truth) > 1e-6 * length(truth):
                        wrong.add(part.rank)
        on = f" on {self._ranks(sorted(wrong))}" if wrong and len(wrong) < self.evidence.world_size else ""
        sentence = (
            f"the loss is {row.detail}, although it was right in the previous step and the weights and buffers agree at the start of "
            f"this one: something that it uses and that is not compared changed between the steps{on}; look at copies of the model "
            f"(teachers, averages), queues of samples, and counters that weigh the loss."
        )
        return [Finding("changed-between-steps", (), self.at, sentence)]

    # --- Gradients ---

    def _first_pass(self) -> list[Finding]:
        """The mistakes in the gradients of one pass, if later passes of the step started from weights that they changed.

        Sharpness-aware minimization and LBFGS step between the passes, so everything differs after the first wrong gradient.
        """
        tolerance, wrong = Tolerance.for_run(self.evidence), list[dict[str, Compared]]()
        for name, gradient in self.step.gradients.items() if self.num_rows(LOSS) else ():
            if len(gradient.raw) != len(gradient.truth_of_passes) or not gradient.total.found:
                return []
            wrong = wrong or [{} for _ in gradient.raw]
            if len(wrong) != len(gradient.raw):
                return []
            for at, (raw, truth) in enumerate(zip(gradient.raw, gradient.truth_of_passes, strict=True)):
                row = Row(GRADIENT, name, self.at, "equal", 0.0, 0.0)
                case = self._gradient_case(row, replace(gradient, raw=[raw]), self.step)
                found = [
                    LocalValue(part.rank, due, part.positions)
                    for part in gradient.total.found
                    if (due := case.due(part)) is not None
                ]
                compared = Compared(truth, found, gradient.total.spread, gradient.total.terms)
                if found and not compare_tensor(compared, 10 * tolerance.of(compared), GRADIENT, name, self.at).ok:
                    wrong[at][name] = compared
        first = next((at for at, some in enumerate(wrong) if some), len(wrong))
        if not any(wrong[first].keys() < later.keys() for later in wrong[first + 1 :]):
            return []

        # The step as if it had ended with this pass.
        gradients = {}
        for name, gradient in self.step.gradients.items():
            truth = gradient.truth_of_passes[first]
            total = wrong[first].get(name, Compared(truth, (), gradient.total.spread, gradient.total.terms))
            gradients[name] = GradientEvidence(total, [gradient.raw[first]], [truth])
        steps = [*self.evidence.steps]
        steps[self.at] = replace(self.step, gradients=gradients, found_loss=[self.step.loss], norms={})
        rows = [
            compare_tensor(compared, 10 * tolerance.of(compared), GRADIENT, name, self.at)
            for name, compared in wrong[first].items()
        ]
        findings = _Diagnosis(replace(self.evidence, steps=steps), rows)._gradients()
        in_pass = f"in pass {first} of {len(wrong)}, "
        after = "; the later passes start from weights that this changed."
        return [replace(finding, sentence=in_pass + finding.sentence.removesuffix(".") + after) for finding in findings]

    def _gradients(self) -> list[Finding]:
        rows = self.num_rows(GRADIENT)
        if not rows:
            return []
        gradients = self.step.gradients
        wrong = {row.name for row in rows}
        healthy = frozenset({name for name, entry in gradients.items() if bool(entry.total.truth.any())} - wrong)
        scale = raw_scale(self.evidence, self.groups, self.step, wrong)

        # A large model has many layers of one kind, which share a mistake. Then the first and last of each kind are tested,
        # and the claims of one of them stand for the others.
        kinds: dict[str, list[Row]] = {}
        for row in rows:
            kinds.setdefault(self._kind(row.name), []).append(row)
        chosen = rows
        if sum(gradients[row.name].total.truth.numel() for row in rows) > _TESTED_ELEMENTS:
            chosen = [row for some in kinds.values() for row in (some if len(some) < 3 else [some[0], some[-1]])]

        def total(at: int, name: str) -> Compared | None:
            steps = self.evidence.steps
            return steps[at].gradients[name].total if 0 <= at < len(steps) and name in steps[at].gradients else None

        tested = {}
        for row in chosen:
            before = total(self.at - 1, row.name)
            case = replace(
                self._gradient_case(row, gradients[row.name], self.step),
                before=None if before is None else before.truth,
                later=total(self.at + 1, row.name),
                healthy=healthy,
                raw_scale=scale,
            )
            tested[row.name] = self._tested(case, "gradient")
        alike = {self._kind(name): some for name, some in tested.items()}
        named = {row.name: tested.get(row.name, alike.get(self._kind(row.name), [])) for row in rows}
        return self._group(named, self.at, "the gradient of", "", rows)

    def _tested(self, case: Case, *kinds: str) -> list[Claim]:
        """The claims that explain the full tensor; or, if some elements are right, the claims that explain the wrong elements."""
        found = [claim for kind in kinds for claim in claims(kind, case)]
        if all(claim.rank >= _SURE for claim in found):
            elements = differing_elements(case.compared, case.row.tolerance)
            some = case.within(elements) if elements is not None else None
            inside = [] if some is None else [claim for kind in kinds for claim in claims(kind, some)]
            # A few numbers are numbers of a narrower dtype by chance.
            few = elements is not None and len(elements) < _FEW
            inside = [claim for claim in inside if not few or claim.cause != "rounded"]
            named = [replace(claim, what=f"(in some of its elements) {claim.what}") for claim in inside]
            found = [claim for claim in named if claim.rank < _SURE] or found or named
        return found

    def _kind(self, name: str) -> str:
        """The name without its numbers, and the placement."""
        info = self.evidence.parameters.get(name)
        return pattern_of(name, inside=True) + (f" {info.placement}" if info is not None else "")

    # --- Norm, clipping, weights ---

    def _norm(self) -> list[Finding]:
        row = next(iter(self.num_rows(NORM, NORMS)), None)
        if row is None:
            return []
        best = _simplest(claims("norm", NormCase(self.evidence, self.groups, self.step, self.at, row)))
        why = f": it {best.what}" if best else ", and no hypothesis explains it"
        where = best.where if best else "which elements count in the norm, how often, and over which ranks it is summed"
        sentence = f"{_called(row)} is {row.detail}, on {self._ranks(row.ranks)}{why}; look at {where}."
        return [Finding(best.cause if best else "unknown", (), self.at, sentence, best.factor if best else None)]

    def _clipped(self) -> list[Finding]:
        rows = self.num_rows(CLIPPED)
        if not rows:
            return []
        best = _simplest(claims("clipped", ClipCase(self.evidence, self.groups, self.step, self.at, tuple(rows))))
        names = tuple(row.name for row in rows)
        if best is None:
            sentence = (
                f"the clipped gradient of {_shortened(names)} is wrong, although the gradient and the norm are right; look at "
                f"the tensors that are multiplied by the clip coefficient."
            )
            return [Finding("unknown", names, self.at, sentence)]
        sentence = f"the clipped gradient of {_shortened(names)} {best.what}; look at {best.where}."
        return [Finding(best.cause, names, self.at, sentence, best.factor)]

    def _weights(self) -> list[Finding]:
        rows = self.num_rows(WEIGHTS)
        before = self.evidence.steps[self.at - 1].weights if self.at else self.evidence.weights_at_start
        named = {}
        for row in rows:
            old = before[row.name].truth if row.name in before else None
            named[row.name] = self._tested(self._case(self.step.weights[row.name], row, old), "tensor", "weights")
        return self._group(named, self.at, "the weight", "optimizer-differs", rows)

    # --- From claims to findings ---

    def _case(self, tensor: Compared, row: Row, before: Tensor | None = None) -> Case:
        return Case(evidence=self.evidence, groups=self.groups, compared=tensor, row=row, before=before)

    def _gradient_case(self, row: Row, gradient: GradientEvidence, step: StepEvidence) -> GradientCase:
        return GradientCase(
            evidence=self.evidence,
            groups=self.groups,
            compared=gradient.total,
            row=row,
            name=row.name,
            gradient=gradient,
            step=step,
            at=self.at,
        )

    def _group(
        self,
        named: Mapping[str, Sequence[Claim]],
        step: int | None,
        thing: str,
        cause: str,
        rows: Sequence[Row],
        always: bool = False,
    ) -> list[Finding]:
        """The smallest set of claims that explains all parameters; the claim that explains most parameters comes first.

        `cause` replaces causes that are not in `CAUSES`; with `always`, all of them.
        """
        left = dict(named)
        ranks = {row.name: row.ranks for row in rows}
        found = []
        while left and any(left.values()):
            counts = Counter(key for some in left.values() for key in {claim.key for claim in some})
            best = min(
                (claim for some in left.values() for claim in some),
                key=lambda claim: (-counts[claim.key], claim.rank, claim.doubt),
            )
            names = tuple(name for name, some in left.items() if any(claim.key == best.key for claim in some))

            # Claims of the same rank on the same parameters are rivals: the numbers cannot tell them apart, so all are named.
            rivals = [
                claim
                for claim in left[names[0]]
                if (claim.rank, claim.doubt) == (best.rank, best.doubt)
                and all(any(other.key == claim.key for other in left[name]) for name in names)
            ]
            by_modes = {
                " and ".join(claim.modes): claim for claim in rivals if claim.cause == best.cause and claim.factor
            }
            same = [key for key, claim in by_modes.items() if claim.factor == best.factor and claim.modes != best.modes]
            others = {claim.cause: claim for claim in rivals if claim.cause != best.cause}
            what = best.what + (f" (or of {' or '.join(same)}: the numbers are the same)" if same else "")
            what += "".join(f", or {claim.cause} (it {claim.what})" for claim in others.values())

            known = best.cause if best.cause in CAUSES and not always and best.cause != "replicas-differ" else cause
            # Many claims name the ranks themselves.
            named_ranks = re.search(r"ranks? \[?\d|(every|each|this) rank", best.what)
            where = "" if named_ranks else f" on {self._ranks(ranks[names[0]])}"
            first = f"{_reached_first(names)} first, which the backward pass reaches before the others, and at "
            look = f"{first if best.is_upstream and len(names) > 1 else ''}{best.where}"
            sentence = f"{thing} {_shortened(names)}{where} {what}; look at {look}{_ledger_line(self.evidence, names[0], best)}."
            found.append(Finding(known or best.cause, names, step, sentence, best.factor))
            left = {name: some for name, some in left.items() if name not in names}
        if left:
            # Without an explanation, the place to start is the last of the gradients: backward reaches its parameter first.
            names = tuple(left)
            worst = max((row for row in rows if row.name in left), key=lambda row: row.error)
            look = f"the code that writes {_shortened(names)}, and the collectives that it needs"
            if "gradient" in thing:
                look = f"{_reached_first(names)} first, which the backward pass reaches before the others"
            sentence = (
                f"{thing} {_shortened(names)} differs by up to {worst.error:.3g} tolerances on {self._ranks(worst.ranks)}, and no "
                f"hypothesis explains it; look at {look}{_ledger_line(self.evidence, names[-1])}."
            )
            found.append(Finding(cause or "unknown", names, step, sentence))
        return found


# --- Words of findings ---


def _called(row: Row) -> str:
    """A compared value as the subject of a sentence."""
    if row.quantity == row.name:  # the loss, and the norm of all gradients
        return f"the {row.name}"
    if row.quantity in (ACTIVATION, RECOMPUTED) and not row.name:
        return "the output of the model"
    singular = {
        STARTED: "value at the start of the step of",
        WEIGHTS: "weight",
        WEIGHTS_AT_START: "initial weight",
        NORMS: "norm of",
        GRADIENT: "gradient of",
    }
    singular |= {ACTIVATION: "output of", RECOMPUTED: "recomputed output of", CLIPPED: "clipped gradient of"}
    return f"the {singular.get(row.quantity, row.quantity)} {row.name}"


def _module(name: str) -> str:
    return f"module {name}" if name else "the model"


def _places(indices: Sequence[int]) -> str:
    return str(list(indices)) if len(indices) <= 8 else f"[{', '.join(map(str, indices[:4]))}, ... {indices[-1]}]"


def _shortened(names: Sequence[str]) -> str:
    """Format a list of names: the first names, and the number of the remaining ones."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"


def _reached_first(names: Sequence[str]) -> str:
    """The first parameter of the last module, whose backward pass runs before those of the other modules."""
    module = names[-1].rpartition(".")[0]
    return next(name for name in names if name.rpartition(".")[0] == module) if module else names[-1]


def _simplest(some: Sequence[Claim]) -> Claim | None:
    return min(some, key=lambda claim: (claim.rank, claim.doubt), default=None)


def _ledger_line(evidence: Evidence, name: str, claim: Claim | None = None) -> str:
    """The reduction that the ledger plans for a parameter, over the modes of the claim."""
    info = evidence.parameters.get(name)
    if claim is not None and claim.is_local:
        return ""
    if info is None or not info.ledger:
        has_one = info is not None and any(other.ledger for other in evidence.parameters.values())
        return " (ledger: no reduction is planned for it)" if has_one else ""
    modes = claim.modes if claim is not None else ()
    line = next((line for line in info.ledger if any(mode in line for mode in modes)), info.ledger[0])
    return f" (ledger: {line})"

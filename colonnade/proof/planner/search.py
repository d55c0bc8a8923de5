"""`search`: all layouts of a job on a number of devices, the fitting ones by speed, the others with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pprint import pformat
from typing import Any

from torch import nn

from colonnade.config import Config, load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ColonnadeError
from colonnade.nn.moe import Experts
from colonnade.optim.zero.formula import bytes_held
from colonnade.parallel.split import Split
from colonnade.proof.planner.job import Job
from colonnade.proof.planner.plan import plan
from colonnade.proof.planner.plan_records import Candidate, Hardware, Plan, SearchResult
from colonnade.proof.planner.ranks import Known, fake_rank
from colonnade.proof.roles import built

Layout = dict[str, Any]
MICRO_BATCHES = (2, 8)
"""The tried numbers of micro-batches, as multiples of the number of pipeline stages."""


def search(
    config: Config,
    world_size: int,
    hardware: Hardware,
    job: Job,
    model: str = "train.py:build",
    context: ParallelContext | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Rank the possible layouts of a job by estimated step time.

    The search chooses `parallel`, `zero`, `num_microbatches`, `schedule` and `activation_checkpoint`; all other keys of
    the config are kept. The job's `batch` is called for every layout: to keep the global batch size, it divides that by
    `context.data_parallel_size`. `say` is called with a line for each examined layout.
    """
    if context is None:
        from colonnade.core import global_context  # what a model's own code asks

        context = global_context
    found = _Search(config, world_size, hardware, job, context, say)
    fitting, cut = found.run()
    best = fitting[0] if fitting else None
    chosen = found.config_of(best.layout) if best is not None else {}
    return SearchResult(
        world_size=world_size,
        hardware=hardware,
        fitting=tuple(fitting),
        cut=tuple(cut),
        config=_settings(chosen),
        verify=_verify(chosen, model, job) if best is not None else "",
        best=found.plans.get(_key(best.layout)) if best is not None else None,
        notes=found.notes,
    )


class _Search:
    def __init__(
        self,
        config: Config,
        world_size: int,
        hardware: Hardware,
        job: Job,
        context: ParallelContext,
        say: Callable[[str], None],
    ) -> None:
        self.base = {
            key: value
            for key, value in dict(config).items()
            if key not in ("parallel", "zero", "num_microbatches", "schedule", "activation_checkpoint")
        }
        self.given = dict(config.get("parallel") or {})
        self.world_size, self.hardware, self.job, self.context, self.say = world_size, hardware, job, context, say
        self.plans: dict[Any, Plan] = {}
        self.known = Known()
        self.elements, self.experts = self._look()
        self.notes = (
            "the search keeps tensor groups inside a node, tries ZeRO stage 3 only without a pipeline, and uses activation "
            "checkpointing only if the layout does not fit without it",
        )

    def run(self) -> tuple[list[Candidate], list[Candidate]]:
        fitting: list[Candidate] = []
        cut: list[Candidate] = []
        for layout in self._layouts():
            reason = self._too_large(layout)
            if reason:
                cut.append(Candidate(layout, reason))
                continue
            self.say(_line(layout))
            for recompute in ("none", "full"):
                one = self._candidate({**layout, "checkpoint": recompute})
                (cut if one.reason else fitting).append(one)
                if one.peak_memory is None or not one.reason:
                    break
        fitting.sort(key=lambda one: one.step_seconds or 0.0)
        return fitting, cut

    def config_of(self, layout: Layout) -> dict[str, Any]:
        """The config of a layout."""
        parallel: dict[str, Any] = {}
        if layout["pipeline"] > 1:
            parallel["pipeline"] = layout["pipeline"]
        if layout["tensor"] > 1:
            before = self.given.get("tensor")
            given = before if isinstance(before, dict) else {"mode": "1d"}
            parallel["tensor"] = {**given, "size": layout["tensor"]}
        for axis in ("expert", "sequence"):
            if layout[axis] > 1:
                parallel[axis] = layout[axis]
        chosen: dict[str, Any] = {**self.base, "parallel": parallel}
        if layout["pipeline"] > 1:
            chosen["num_microbatches"] = layout["micro-batches"]
        if layout["zero"]:
            chosen["zero"] = layout["zero"]
        if layout.get("checkpoint", "none") != "none":
            chosen["activation_checkpoint"] = layout["checkpoint"]
        return chosen

    # -- which layouts ------------------------------------------------------------------------------------

    def _layouts(self) -> Iterator[Layout]:
        for tensor in _divisors(min(self.world_size, self.hardware.devices_per_node)):
            for pipeline in _divisors(self.world_size // tensor):
                for sequence in _divisors(self.world_size // tensor // pipeline) if "sequence" in self.given else (1,):
                    data = self.world_size // tensor // pipeline // sequence
                    for expert in _divisors(data) if self.experts else (1,):
                        sizes = {"data": data, "tensor": tensor, "pipeline": pipeline}
                        yield from self._variants({**sizes, "expert": expert, "sequence": sequence})

    def _variants(self, sizes: Layout) -> Iterator[Layout]:
        """Stages of ZeRO and numbers of micro-batches."""
        if self.experts and self.experts % sizes["expert"]:
            return
        for zero in (0, 1, 3) if sizes["data"] > 1 else (0,):
            if zero == 3 and sizes["pipeline"] > 1:
                continue
            counts = [sizes["pipeline"] * times for times in MICRO_BATCHES] if sizes["pipeline"] > 1 else [1]
            for count in counts:
                yield {**sizes, "zero": zero, "micro-batches": count}

    def _too_large(self, layout: Layout) -> str:
        """Why a layout need not be looked at: what it holds by the formula is more than a device has."""
        share = layout["tensor"] * layout["pipeline"] * layout["expert"]
        least = bytes_held(layout["zero"], self.elements // share, layout["data"]).total
        if least > self.hardware.memory:
            return (
                f"parameters, gradients and optimizer state exceed the {self.hardware.memory / 1e9:.0f} GB of a device"
            )
        return ""

    # -- what a layout takes ------------------------------------------------------------------------------

    def _candidate(self, layout: Layout) -> Candidate:
        try:
            made = plan(
                load_config(self.config_of(layout)), self.world_size, self.hardware, self.job, self.context, self.known
            )
        except ColonnadeError as error:
            return Candidate(layout, str(error).splitlines()[0])
        totals = made.totals
        if made.problems:
            return Candidate(layout, made.problems[0].splitlines()[0])
        one = Candidate(
            layout,
            "",
            totals.step_seconds,
            totals.peak_memory,
            made.timeline.bubble if made.timeline is not None else 0.0,
            totals.exposed_seconds,
            totals.mfu,
            totals.hfu,
        )
        if not totals.fits:
            again = " even with activation checkpointing" if layout["checkpoint"] == "full" else ""
            return replace(one, reason=f"the fullest rank does not fit{again}")
        self.plans[_key(layout)] = made
        return one

    def _look(self) -> tuple[int, int]:
        """(elements, experts) of the model, built as one rank."""
        config = load_config({**self.base})
        with fake_rank(config, 1, 0, self.context):
            model = built(self.job.build, self.context)
        modules = list(model) if isinstance(model, Split) else [model]
        elements = sum(p.numel() for module in modules for p in module.parameters())
        counts = [_experts(each) for module in modules for each in module.modules()]
        return elements, max(counts, default=0)


def _experts(module: nn.Module) -> int:
    return module.experts if isinstance(module, Experts) else 0


def _divisors(count: int) -> list[int]:
    return [each for each in range(1, count + 1) if count % each == 0]


def _line(layout: Layout) -> str:
    return " ".join(f"{key} {value}" for key, value in layout.items())


def _key(layout: Layout) -> Any:
    return tuple(layout.items())


def _text(value: Any) -> str:
    return pformat(value, width=120, sort_dicts=False)


def _verify(config: dict[str, Any], model: str, job: Job) -> str:
    """The commands that prove the same layout with two ranks on every axis: they write its config, and verify it."""
    parallel = {}
    for axis, given in config["parallel"].items():
        size = given["size"] if isinstance(given, dict) else given
        parallel[axis] = {**given, "size": min(size, 2)} if isinstance(given, dict) else min(size, 2)
    ranks = 2 * prod(
        each["size"] if isinstance(each, dict) else each for axis, each in parallel.items() if axis != "expert"
    )
    twin = {**config, "parallel": parallel}
    if "num_microbatches" in config:
        twin["num_microbatches"] = 2 * min(config["parallel"]["pipeline"], 2)
    where = model.rpartition(":")[0]
    words = [f"colonnade verify twin.py --nproc {ranks} --model {model} --batch {where}:{job.batch.__name__}"]
    if isinstance(job.criterion, type):
        words.append(f"--criterion {where}:{job.criterion.__name__}")
    return f"cat > twin.py <<'END'\n{_settings(twin)}\nEND\n{' '.join(words)}"


def _settings(config: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {_text(value)}" for key, value in config.items())

"""A plan beside the run on one GPU: step time and peak memory of several models and settings.

A ratio is how far the plan is off, in parts of what was measured, above or below: 0.05 is 5%. Each case is planned twice: with
this machine as `colonnade plan --measure` finds it ("step"), and with the data sheet of `--hardware` ("step, data sheet"). All
cases of one rank are built in one process and take turns in blocks of steps; a time is the median of the blocks. A peak is what
a case has allocated beyond the others, with cuBLAS's workspace. ZeRO on two ranks, which share the GPU, is compared by memory alone.
`figures` also have the host's time for a step (until all of it is issued), the kernels' time (torch's profiler), and what was
planned of it.

`python benchmarks/plan_cuda.py --json --out DIR` takes about five minutes, prints one JSON object last, and writes it to
DIR/plan_cuda.json, with DIR/measured.toml and the operators of each case in DIR/operators.json. Cases that do not begin within
--limit seconds are skipped, and named. `--device cpu --size small` tries the script itself, in about a minute.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _measure import has_device, interleave, report

from colonnade import initialize, launch
from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.models import GPT, Llama, MoEGPT
from colonnade.proof.planner.hardware import load_hardware, measure_machine, to_toml
from colonnade.proof.planner.job import Job
from colonnade.proof.planner.plan import plan
from colonnade.proof.planner.plan_records import Hardware
from colonnade.proof.planner.ranks import Known
from colonnade.proof.planner.recorder import observe
from colonnade.testing import WorldError, run_world

GOALS = {"memory": 0.02, "step": 0.10, "step, data sheet": 0.20}
"""Of every case that is planned as it runs; and of the median of all of them:"""
MEDIANS = {"memory": 0.02, "step": 0.05}
WARM_UP, ROUNDS, BLOCK_SECONDS = 4, 9, 0.25
BF16 = dict(bf16=True)


@dataclass(frozen=True)
class Case:
    """One model under one config. `size`: arguments of the model; `planned`: whether a plan says that it plans all of it."""

    model: str
    size: dict[str, int]
    rows: int
    config: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    planned: bool = True


def _gpt(hidden: int, layers: int, heads: int, length: int = 1024, vocabulary: int = 50304) -> dict[str, int]:
    return dict(vocabulary=vocabulary, length=length, hidden=hidden, heads=heads, layers=layers)


MEDIUM, SHORT = _gpt(1024, 24, 16), _gpt(768, 12, 12, length=256)
LLAMA = dict(vocabulary=32000, length=2048, hidden=1536, heads=12, layers=16, kv_heads=4, inner=4096)
FULL = dict(activation_checkpoint="full")
CASES: dict[str, Case] = {
    "gpt 354M": Case("gpt", MEDIUM, 8, BF16),
    "gpt 354M, checkpointed": Case("gpt", MEDIUM, 8, {**BF16, **FULL}),
    "gpt 354M, accumulated": Case("gpt", MEDIUM, 8, {**BF16, "gradient_accumulation": 2}),
    "gpt 354M, clipped": Case("gpt", MEDIUM, 4, {**BF16, "clip_grad_norm": 1.0}),
    "gpt 354M, fp32": Case("gpt", MEDIUM, 2),
    "gpt 354M, torch's step": Case("gpt", MEDIUM, 1, {**BF16, **FULL, "flat_step": False}),
    "gpt 124M, short": Case("gpt", SHORT, 4, BF16),
    "gpt 0.9G": Case("gpt", _gpt(2048, 16, 16, vocabulary=32768), 8, BF16),
    "llama 0.5G": Case("llama", LLAMA, 4, BF16),
    "llama 0.5G, checkpointed": Case("llama", LLAMA, 8, {**BF16, **FULL}),
    "moe": Case("moe", {**SHORT, "length": 1024, "experts": 8}, 8, BF16),
    "gpt 354M, compiled": Case("gpt", MEDIUM, 8, {**BF16, "compile": True}, planned=False),
}
SHARED: dict[str, Case] = {
    **{f"zero {stage}": Case("gpt", SHORT, 4, {**BF16, "zero": stage}, ranks=2) for stage in (1, 2, 3)},
    "zero 3, checkpointed": Case("gpt", SHORT, 4, {**BF16, **FULL, "zero": 3}, ranks=2),
}
"""Two ranks on one GPU, by memory."""


def smaller(case: Case) -> Case:
    """The same for a try on a CPU."""
    size = {**case.size, "vocabulary": 512, "length": 64, "hidden": 64, "heads": 4, "layers": 4}
    size |= {key: value for key, value in dict(kv_heads=2, inner=128, experts=4).items() if key in size}
    return Case(case.model, size, case.rows, {**case.config, "compile": False}, case.ranks, case.planned)


# -- the job, as a training script has it -----------------------------------------------------------------


def build(case: Case, context: ParallelContext) -> Any:
    """The model."""
    size = {key: value for key, value in case.size.items() if key not in ("kv_heads", "inner", "experts")}
    if case.model == "llama":
        return Llama(**size, kv_heads=case.size["kv_heads"], inner=case.size["inner"], context=context)
    if case.model == "moe":
        return MoEGPT(**size, experts=case.size["experts"], router=dict(k=2), context=context)
    return GPT(**size, tied=True, context=context)


def batch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank gets for one pass."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, case.size["vocabulary"], (case.rows, case.size["length"] + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def job(case: Case) -> Job:
    def model(context: ParallelContext) -> Any:
        return build(case, context)

    def data() -> Any:
        return batch(case)

    return Job(model, data, optimizer=adamw)


# -- planned ----------------------------------------------------------------------------------------------


def planned(case: Case, machine: Hardware) -> dict[str, Any]:
    """What a plan says of a step."""
    known, context = Known(), ParallelContext()
    made = plan(load_config(case.config), case.ranks, machine, job(case), context, known)
    totals, memory = made.totals, made.classes[0].memory
    passes = [one for found in known.passes.values() for _, one in found]
    return {
        "seconds": totals.step_seconds,
        "bytes": totals.peak_memory,
        "memory": asdict(memory),
        "compute": totals.compute_seconds,
        "optimizer": totals.optimizer_seconds,
        "flops": totals.flops,
        "mfu": totals.mfu,
        "hfu": totals.hfu,
        "passes": [
            {
                when: {name: getattr(cost, name) for name in ("operators", "flops", "moved", "seconds")}
                for when, cost in (("forward", one.forward), ("backward", one.backward))
            }
            for one in passes
        ],
    }


# -- measured: one rank, all cases in one process -----------------------------------------------------------


class Running:
    """One case as it trains. `run` is one step, of all its passes."""

    def __init__(self, case: Case) -> None:
        self.context = ParallelContext()
        launch(case.config, context=self.context, verbose=False)
        torch.manual_seed(0)
        model = build(case, self.context)
        self.engine, *_ = initialize(model, adamw, model.criterion(), verbose=False, context=self.context)
        self.data = tuple(tensor.to(self.context.device) for tensor in batch(case))

    def run(self) -> None:
        for _ in range(self.engine.accumulation):
            self.engine.zero_grad()
            self.engine.execute_schedule(iter([self.data]), return_output_label=False)
            self.engine.step()


def measured(cases: Mapping[str, Case], budget: float) -> dict[str, Any]:
    """Peak, step time, host time and kernels of every case; those that do not begin in time are skipped, and those that fail are said."""
    started, on_gpu = time.perf_counter(), torch.cuda.is_available()
    workspace = _workspace() if on_gpu else 0
    running: dict[str, Running] = {}
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for name, case in cases.items():
        if time.perf_counter() - started > budget:
            failed[name] = "skipped: no time left"
            continue
        before = torch.cuda.memory_allocated() if on_gpu else 0
        try:
            one = Running(case)
            for _ in range(WARM_UP):
                one.run()
            peak = _peak(one, before, workspace) if on_gpu else observe(one.engine, one.run, warm=0, timed=0).memory
            found[name] = {"bytes": peak, **_issued(one), "operators": _kernels(one)}
            one.engine.zero_grad()  # what stays while others run is what the next case is measured beyond
        except Exception as error:  # the other cases are still worth their time
            failed[name] = f"{type(error).__name__}: {error}"[-2000:]
            continue
        finally:
            gc.collect()
        running[name] = one
        print(f"{name}: {found[name]['bytes'] / 1e9:.3f} GB, {time.perf_counter() - started:.0f} s", flush=True)
    lengths = {name: max(1, round(BLOCK_SECONDS / _block(one, 2))) for name, one in running.items()}
    blocks = {name: partial(_block, one, lengths[name]) for name, one in running.items()}
    for name, seconds in interleave(blocks, ROUNDS).items() if blocks else ():
        found[name]["seconds"] = seconds
    return {"found": found, "failed": failed, "workspace": workspace, "seconds": time.perf_counter() - started}


def _workspace() -> int:
    """Bytes that cuBLAS takes for itself at its first products, which one case alone would seem to have."""
    torch.cuda.init()
    before = torch.cuda.memory_allocated()
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.ones(256, 256, device="cuda", dtype=dtype)
        torch.addmm(one[0], one, one)
    del one
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def _peak(one: Running, before: int, workspace: int) -> int:
    """Bytes at the fullest moment of a step, beyond what the cases before have."""
    one.engine.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    one.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + workspace


def _issued(one: Running) -> dict[str, float]:
    """Seconds until the host has issued a step; the device may still be at work."""
    times = []
    for _ in range(5):
        _until_done()
        begin = time.perf_counter()
        one.run()
        times.append(time.perf_counter() - begin)
    _until_done()
    return {"issued": statistics.median(times)}


def _kernels(one: Running) -> list[tuple[str, str, int, float]]:
    """("operator" or "kernel", name, calls, seconds) of a step, the longest first; an operator's seconds are those of its kernels."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        one.run()
        _until_done()
    rows = []
    for each in profile.key_averages():
        spent = each.self_device_time_total if torch.cuda.is_available() else each.self_cpu_time_total
        kind = "kernel" if each.device_type == torch.autograd.DeviceType.CUDA else "operator"
        if spent > 0 or each.key.startswith("aten::"):
            rows.append((kind, each.key[:120], each.count, spent / 1e6))
    return sorted(rows, key=lambda row: -row[3])[:200]


def _block(one: Running, length: int) -> float:
    """Seconds of a step, of so many in a row."""
    _until_done()
    begin = time.perf_counter()
    for _ in range(length):
        one.run()
    _until_done()
    return (time.perf_counter() - begin) / length


def _until_done() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- measured: two ranks ------------------------------------------------------------------------------------


def peak_of(case: Case) -> int:
    """Bytes at the fullest moment of a step of this rank."""
    workspace = _workspace() if torch.cuda.is_available() else 0
    one = Running(case)
    for _ in range(WARM_UP):
        one.run()
    if not torch.cuda.is_available():
        return observe(one.engine, one.run, warm=0, timed=0).memory
    return _peak(one, workspace, workspace)


# -- the comparison -----------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="a folder for all figures")
    parser.add_argument("--only", default="", help="cases whose names have one of these words, by commas")
    parser.add_argument("--hardware", default="h200", help="the data sheet to plan with too")
    parser.add_argument("--limit", type=float, default=400, help="seconds after which no further case begins")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    options = parser.parse_args()
    if not has_device(options.device):
        return 0
    words = [word.strip() for word in options.only.split(",") if word.strip()]
    chosen = {
        name: smaller(case) if options.size == "small" else case
        for name, case in {**CASES, **SHARED}.items()
        if not words or any(word in name for word in words)
    }
    started = time.perf_counter()
    machine, sheet = measure_machine(1), load_hardware(options.hardware)
    alone = {name: case for name, case in chosen.items() if case.ranks == 1}
    shared = {name: case for name, case in chosen.items() if case.ranks > 1}
    backend, quiet = ("nccl" if options.device == "cuda" else "gloo"), {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
    (ran, *_) = run_world(1, measured, alone, options.limit * 0.6, backend=backend, env=quiet, timeout=600).values
    figures, failed = ran["found"], dict(ran["failed"])
    for name, case in shared.items():
        if time.perf_counter() - started > options.limit:
            failed[name] = "skipped: no time left"
            continue
        try:
            peaks = run_world(case.ranks, peak_of, case, backend=backend, env=quiet, timeout=120).values
            figures[name] = {"bytes": max(peaks)}
        except WorldError as error:
            failed[name] = str(error)[-2000:]
    ratios, goals, operators = {}, {}, {}
    for name, one in figures.items():
        case = chosen[name]
        operators[name] = one.pop("operators", [])
        one["kernels"] = sum(spent for kind, _, _, spent in operators[name] if kind == "kernel")
        one["planned"] = planned(case, machine)
        off = {"memory": abs(one["planned"]["bytes"] / one["bytes"] - 1)}
        if "seconds" in one:
            one["planned, data sheet"] = planned(case, sheet)
            off["step"] = abs(one["planned"]["seconds"] / one["seconds"] - 1)
            off["step, data sheet"] = abs(one["planned, data sheet"]["seconds"] / one["seconds"] - 1)
        ratios |= {f"{name}: {what}": value for what, value in off.items()}
        goals |= {f"{name}: {what}": GOALS[what] for what in off if case.planned}
        print(_line(name, one), flush=True)
    for what, goal in MEDIANS.items():
        values = [value for case, value in ratios.items() if case.endswith(f": {what}") and case in goals]
        if values:
            ratios[f"median: {what}"], goals[f"median: {what}"] = statistics.median(values), goal
    more: dict[str, Any] = {
        "figures": figures,
        "failed": failed,
        "hardware": asdict(machine),
        "workspace": ran["workspace"],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "seconds": round(time.perf_counter() - started, 1),
    }
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "plan_cuda.json").write_text(json.dumps({"ratios": ratios, "goals": goals, **more}, indent=1))
        (options.out / "operators.json").write_text(json.dumps(operators))
        (options.out / "measured.toml").write_text(to_toml(machine))
    met = report(ratios, goals, options.json, **more)
    return 0 if met and not failed else 1


def _line(name: str, one: Mapping[str, Any]) -> str:
    """One case for people."""
    text = f"{name:28s} {one['planned']['bytes'] / 1e9:8.3f} GB planned, {one['bytes'] / 1e9:8.3f} GB measured"
    if "seconds" in one:
        times = [one["planned"]["seconds"], one["planned, data sheet"]["seconds"], one["seconds"], one["issued"]]
        text += "; {:.1f} ms planned ({:.1f} by the data sheet), {:.1f} ms measured, {:.1f} ms issued".format(
            *(1e3 * value for value in times)
        )
    return text


if __name__ == "__main__":
    sys.exit(main())

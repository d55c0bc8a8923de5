"""Figures of one GPU that plans are compared with: the calibration sweep, and the configurations of `_plan_cases.py` as they run.

`python benchmarks/plan_record.py --out DIR` takes about four minutes on an H200 and writes

- `sweep.json`: seconds of kernels and host work by shape (`colonnade plan --measure` measures the same);
- `alone.json`, `ranks.json`: of each configuration the step time, the host's time, peak allocated and reserved memory, the kernels
  and operators by name and shape. `ranks.json` has those of two ranks that share the GPU under MPS, and their collectives;
- `timeline.json.gz`: every kernel of one step (stream, start, seconds, time of its launch);
- `trace_*.json.xz`: what the caching allocator did, from an empty cache to the end of the third step.

A configuration that fails is recorded with its error. `--device cpu --size small` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import lzma
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _measure import has_device
from _plan_cases import CASES, Case, adamw, batch, build, smaller

from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.proof.planner.sweep import Sweep, collectives, constants
from colonnade.testing import WorldError, cuda_mps, run_world

TRACED = ("eager", "checkpointed", "experts")
WARM_UP, BLOCKS, BLOCK_SECONDS = 4, 5, 0.25


# -- one configuration --------------------------------------------------------------------------------------


class Running:
    """One case as it trains. `run` is one step, of all its passes."""

    def __init__(self, case: Case) -> None:
        self.context = ParallelContext()
        launch(case.config, context=self.context, verbose=False)
        torch.manual_seed(0)
        model = build(case, self.context)
        whole = getattr(model, "whole", None) or model
        self.engine, *_ = initialize(model, adamw, whole.criterion(), verbose=False, context=self.context)
        self.data = tuple(tensor.to(self.context.device) for tensor in batch(case))

    def run(self, data: Any = None) -> None:
        for _ in range(self.engine.accumulation):
            self.engine.zero_grad()
            self.engine.execute_schedule(iter([data or self.data]), return_output_label=False)
            self.engine.step()


def record(name: str, case: Case, traced: Path | None) -> tuple[dict[str, Any], list[Any]]:
    """Run one case; returns its figures and the kernels of one step."""
    on_gpu, figures = torch.cuda.is_available(), {}
    _empty_cache()
    if on_gpu:
        figures["before"] = _memory()
        if traced is not None:
            torch.cuda.memory._record_memory_history(max_entries=400_000, context=None, stacks="python")
    started = time.perf_counter()
    one = Running(case)
    figures["parameters"] = sum(each.numel() for each in one.engine.model.parameters())
    if on_gpu:
        figures["built"] = _memory()
    marks = []
    for at in range(WARM_UP):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        one.run()
        _until_done()
        if on_gpu:
            figures[f"step {at}"] = _peaks()
            marks.append(time.time_ns() // 1000)
        if at == 2 and on_gpu and traced is not None:
            snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
            _write_trace(traced, snapshot, marks, figures["before"])
    figures["ready_seconds"] = time.perf_counter() - started
    _fill_figures(figures, one, case)
    kernels = _profiled(figures, one)
    one.engine.zero_grad()
    one.engine.close()
    return figures, kernels


def _fill_figures(figures: dict[str, Any], one: Running, case: Case) -> None:
    length = max(1, round(BLOCK_SECONDS / _block(one.run, 2)))
    if dist.get_world_size() > 1:
        agreed = torch.tensor(length, device=one.context.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        length = int(agreed)
    figures["blocks"] = [_block(one.run, length) for _ in range(BLOCKS)]
    figures["seconds"] = statistics.median(figures["blocks"])
    issued = []
    for _ in range(5):
        _together()
        begin = time.perf_counter()
        one.run()
        issued.append(time.perf_counter() - begin)
    _until_done()
    figures["issued"] = statistics.median(issued)
    if not case.config.get("compile") and case.ranks == 1 and case.model != "moe":
        # The same operators on a few tokens: a step is as long as the host takes.
        few = tuple(each[:1, :32].contiguous() for each in one.data)
        for _ in range(3):
            one.run(few)
        figures["host_bound"] = statistics.median(_block(lambda: one.run(few), 3) for _ in range(5))
        figures["host_bound_operators"] = _operators(lambda: one.run(few))
        for _ in range(2):
            one.run()
    if torch.cuda.is_available():
        one.engine.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        figures["held"] = _memory()
        one.run()
        torch.cuda.synchronize()
        figures["steady"] = _peaks()


def _profiled(figures: dict[str, Any], one: Running) -> list[Any]:
    """Operators with shapes and kernels of one step, and the kernels in the order of time."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            one.run()
            _until_done()
        bare, _ = _timeline(profile)
        figures["kernel_seconds"] = sum(row[3] for row in bare) / 1e6
    _together()
    with torch.profiler.profile(activities=kinds, record_shapes=True) as profile:
        one.run()
        _until_done()
    rows: dict[Any, list[Any]] = {}
    for event in profile.events() or ():
        if not event.name.startswith("aten::") and not event.kernels:
            continue
        key = (event.name[:100], str(event.input_shapes)[:160])
        row = rows.setdefault(key, [*key, 0, 0.0, 0.0, defaultdict(float)])
        row[2] += 1
        row[3] += sum(kernel.duration for kernel in event.kernels)
        row[4] += event.self_cpu_time_total
        for kernel in event.kernels:
            row[5][kernel.name[:90]] += kernel.duration
    figures["operators"] = sorted(rows.values(), key=lambda row: -row[3])[:500]
    if not torch.cuda.is_available():
        return []
    kernels, waits = _timeline(profile)
    figures["waits"] = waits
    return [figures["kernel_seconds"], bare, kernels]


def _timeline(profile: Any) -> tuple[list[Any], dict[str, int]]:
    """Rows of (name, stream, start, microseconds, launched), and calls that wait for the device."""
    launched, waits, rows = {}, defaultdict(int), []
    events = profile.profiler.kineto_results.events()
    for event in events:
        if event.device_type() != torch.autograd.DeviceType.CUDA and event.name().startswith(("cuda", "cu")):
            launched[event.correlation_id()] = event.start_ns()
            if "Synchronize" in event.name():
                waits[event.name()] += 1
    for event in events:
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            begin = launched.get(event.correlation_id(), 0)
            spent = event.duration_ns() / 1e3
            rows.append([event.name()[:80], event.device_resource_id(), event.start_ns(), spent, begin])
    first = min((row[2] for row in rows), default=0)
    for row in rows:
        row[2], row[4] = round((row[2] - first) / 1e3, 1), round((row[4] - first) / 1e3, 1) if row[4] else None
    return sorted(rows, key=lambda row: row[2]), dict(waits)


def _operators(run: Callable[[], Any]) -> int:
    """How many operators autograd and the script dispatch in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(event.name.startswith("aten::") for event in profile.events() or ())


def _write_trace(path: Path, snapshot: dict[str, Any], marks: list[int], before: dict[str, int]) -> None:
    """Events as [action, address / 512, bytes, stream]; `marks` are the numbers of events at the end of each step."""
    actions: dict[str, int] = {}
    streams: dict[int, int] = {}
    events, ends = [], []
    waiting = list(marks)
    for trace in snapshot["device_traces"]:
        for event in trace:
            while waiting and event.get("time_us", 0) > waiting[0]:
                waiting.pop(0)
                ends.append(len(events))
            action = actions.setdefault(event["action"], len(actions))
            stream = streams.setdefault(event.get("stream", 0), len(streams))
            events.append([action, event.get("addr", 0) // 512, event.get("size", 0), stream])
    segments = [[each["address"] // 512, each["total_size"], each["allocated_size"]] for each in snapshot["segments"]]
    written = {"actions": list(actions), "events": events, "marks": ends, "segments": segments, "before": before}
    path.write_bytes(lzma.compress(json.dumps(written).encode()))


def _memory() -> dict[str, int]:
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "used": total - free,
    }


def _peaks() -> dict[str, int]:
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "now": torch.cuda.memory_allocated(),
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }


def _empty_cache() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _block(run: Callable[[], Any], length: int) -> float:
    """Seconds of a step, of so many in a row."""
    _together()
    begin = time.perf_counter()
    for _ in range(length):
        run()
    _until_done()
    return (time.perf_counter() - begin) / length


def _together() -> None:
    _until_done()
    if dist.get_world_size() > 1:
        dist.barrier()
        _until_done()


def _until_done() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in this thread after some seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- worlds -------------------------------------------------------------------------------------------------


def recorded(cases: Mapping[str, Case], folder: str, seconds: float) -> None:
    """Record all cases on the ranks of this world; rank 0 writes a file for each as soon as it has ended."""
    out, rank, started = Path(folder), dist.get_rank(), time.perf_counter()
    if dist.get_world_size() > 1:
        _save(out, "collectives", lambda: {"samples": collectives(), "contention": _contention()}, rank)
    for name, case in cases.items():
        if time.perf_counter() - started > seconds:
            found: Any = {"error": "skipped: no time left"}
        else:
            traced = out / f"trace_{name}.json.xz" if name in TRACED and rank == 0 else None
            begin = time.perf_counter()
            with nullcontext() if case.ranks > 1 else _limit(75):
                found = _tried(lambda name=name, case=case, traced=traced: record(name, case, traced))
            if not isinstance(found, dict):
                figures, kernels = found
                found = {**figures, "took": time.perf_counter() - begin}
                (out / f"timeline_{name}_{rank}.json").write_text(json.dumps(kernels))
        (out / f"case_{name}_{rank}.json").write_text(json.dumps(found))
        print(f"{name}: {found.get('error') or found['seconds']}, {time.perf_counter() - started:.0f} s", flush=True)
        _empty_cache()


def _contention() -> dict[str, float]:
    """Seconds of a product and of a copy on rank 0 alone, on both ranks, and beside all-reduces."""
    if not torch.cuda.is_available():
        return {}
    one, flat = torch.randn(4096, 4096, device="cuda").bfloat16(), torch.randn(1 << 26, device="cuda")
    small, found = torch.zeros(1 << 22, device="cuda"), {}
    works = {"product": lambda: one @ one, "copy": flat.clone}

    def timed(run: Callable[[], Any], beside: bool) -> float:
        _together()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pending = [dist.all_reduce(small, async_op=True) for _ in range(4)] if beside else []
        begin.record()
        for _ in range(20):
            run()
        end.record()
        for each in pending:
            each.wait()
        _until_done()
        return begin.elapsed_time(end) / 20e3

    for name, run in works.items():
        for _ in range(2):
            run()
        found[f"{name}, both"] = timed(run, False)
        found[f"{name}, both, beside all-reduces"] = timed(run, True)
        idle: Callable[[], Any] = (lambda: None) if dist.get_rank() else run
        found[f"{name}, alone"] = timed(idle, False)
        found[f"{name}, alone, beside all-reduces"] = timed(idle, True)
    return found


def swept(folder: str, seconds: float, small: bool, parts: str) -> None:
    """Write the sweep of this device, on a world of one."""
    taken: dict[str, Any] = {}
    if torch.cuda.is_available():
        taken["constants"] = _tried(lambda: dict(constants()))
        taken["device"] = _tried(lambda: str(torch.cuda.get_device_properties(0)))
    taken["state before"] = _tried(_device_state)
    sweep = Sweep(seconds, small, *([parts.split(",")] if parts else []))
    taken["error"] = _tried(lambda: sweep.run() and {})
    taken["state after"] = _tried(_device_state)
    taken |= {"samples": sweep.found, "failed": sweep.failed, "torch": torch.__version__}
    (Path(folder) / "sweep.json").write_text(json.dumps(taken))


def _device_state() -> str:
    query = "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    return subprocess.run(["nvidia-smi", query, "--format=csv"], capture_output=True, text=True, timeout=10).stdout


def _tried(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # the other figures are still worth their time
        return {"error": f"{type(error).__name__}: {error}"[:1500], "where": traceback.format_exc()[-1500:]}


def _save(out: Path, name: str, call: Callable[[], Any], rank: int) -> None:
    found = _tried(call)
    (out / f"{name}_{rank}.json").write_text(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for all figures")
    parser.add_argument("--only", default="", help="configurations whose names have one of these words, by commas")
    parser.add_argument("--sweep", type=float, default=50, help="seconds of the sweep; 0: none")
    parser.add_argument(
        "--parts", default="", help="parts of the sweep, by commas: products, attention, memory, host ..."
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds after which no further configuration begins")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    options = parser.parse_args()
    if not has_device(options.device):
        return 0
    words = [word.strip() for word in options.only.split(",") if word.strip()]
    chosen = {
        name: smaller(case) if options.size == "small" else case
        for name, case in CASES.items()
        if not words or any(word in name for word in words)
    }
    alone = {name: case for name, case in chosen.items() if case.ranks == 1}
    shared = {name: case for name, case in chosen.items() if case.ranks > 1}
    started, failed = time.perf_counter(), {}
    backend = "nccl" if options.device == "cuda" else "gloo"
    options.out.mkdir(parents=True, exist_ok=True)
    env = {"TORCH_DISTRIBUTED_DEBUG": "OFF", "OMP_NUM_THREADS": None}
    with tempfile.TemporaryDirectory() as folder:
        worlds: list[tuple[str, int, Any, tuple[Any, ...], float]] = []
        if options.sweep:
            worlds.append(
                (
                    "sweep",
                    1,
                    swept,
                    (folder, options.sweep, options.size == "small", options.parts),
                    options.sweep * 1.5 + 60,
                )
            )
        if alone:
            worlds.append(
                ("alone", 1, recorded, (alone, folder, options.limit - options.sweep - (50 if shared else 0)), 260)
            )
        if shared:
            worlds.append(("ranks", 2, recorded, (shared, folder, 75), 110))
        for name, ranks, function, arguments, timeout in worlds:
            with cuda_mps() if ranks > 1 and options.device == "cuda" else nullcontext():
                try:
                    run_world(ranks, function, *arguments, backend=backend, env=env, timeout=timeout, show=True)
                except WorldError as error:
                    failed[name] = str(error)[-3000:]
            print(f"{name}: ended after {time.perf_counter() - started:.0f} s", flush=True)
            _gather(Path(folder), options.out, failed)
    print(json.dumps({"failed": failed, "seconds": round(time.perf_counter() - started, 1)}))
    return 0


def _gather(folder: Path, out: Path, failed: Mapping[str, str]) -> None:
    """Join the files of the cases in few; again after each world, so that nothing is lost if the next one hangs."""
    of_cases: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    timelines = {}
    for path in sorted(folder.glob("case_*.json")):
        name, rank = path.stem.removeprefix("case_").rsplit("_", 1)
        of_cases[CASES[name].ranks].setdefault(name, []).append(json.loads(path.read_text()))
        line = folder / f"timeline_{name}_{rank}.json"
        if line.exists():
            timelines[f"{name} {rank}"] = json.loads(line.read_text())
    joined = [json.loads(path.read_text()) for path in sorted(folder.glob("collectives_*.json"))]
    about = {"torch": torch.__version__, "failed": dict(failed)}
    (out / "alone.json").write_text(json.dumps({**about, "cases": of_cases[1]}))
    (out / "ranks.json").write_text(json.dumps({**about, "cases": of_cases[2], "collectives": joined}))
    (out / "timeline.json.gz").write_bytes(gzip.compress(json.dumps(timelines).encode(), 6))
    for path in (*folder.glob("trace_*.json.xz"), *folder.glob("sweep.json")):
        (out / path.name.replace(" ", "_")).write_bytes(path.read_bytes())


if __name__ == "__main__":
    sys.exit(main())

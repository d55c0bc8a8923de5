"""The tests that compare ranks with one process, over NCCL between 2, 4 and 8 ranks that share one GPU.

python -m tests.device.nccl_check [--only PART ...]           # all parts, or some; --list names them
python -m tests.device.nccl_check --backend gloo              # the same checks on the CPU

Checks of a part of the package are in the file `nccl_checks.py` of its folder of tests, which is found by its name: a function
`checks` that gives `Check`s (`check.py`), each a function for every rank of a world of `ranks`, its arguments, and `verify` for
what the ranks return. It must be a function of a module, with arguments that can be pickled, and raise if something is wrong.

The functions are those of the CPU tests, with their tolerances (1e-9 to 1e-12 in fp64). What they make themselves lies on the GPU,
with the values it has on the CPU; what the library makes lies where the library puts it. Ranks run side by side under
CUDA MPS where it is installed. Prints a line per check and one JSON object last; the exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import itertools
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import colonnade
from colonnade.testing import cuda_mps, run_world
from tests.device import waits_check
from tests.device.check import Check
from tests.engine import test_clip, test_engine, test_pipeline
from tests.engine.precision import test_float8, test_table
from tests.gradients import summing, test_parity, test_uneven
from tests.gradients.scenarios import SCENARIOS
from tests.hf import zoo
from tests.models import grid
from tests.nn.moe import test_grouped
from tests.nn.sequence import test_attention
from tests.optim.zero import cases as zero_cases
from tests.optim.zero import device_check
from tests.optim.zero import test_optimizer as zero_optimizer
from tests.optim.zero.cases import Way
from tests.ranks import body_of

TESTS = Path(__file__).parents[1]
MARGIN = 60
"""Seconds more for the first check of a world, which starts CUDA and NCCL."""
GRID = (
    "GPT, tied: tensor 2 1d",
    "GPT, tied: tensor 2 1d sequence_split=True",
    "GPT, tied: tensor 4 2d",
    "GPT, tied: tensor 8 2.5d depth=2",
    "GPT, tied: tensor 8 3d",
    "GPT: sequence 2, ring",
    "GPT: sequence 4, ulysses",
    "ViT: tensor 4 1d",
    "ViT: data 2 x pipeline 2 x tensor 2 1d",
    "MoE-GPT: expert 2",
    "MoE-GPT: expert 4 over=data*tensor x tensor 2 1d",
    "GPT, tied: pipeline 2",
    "GPT, tied: sequence 2 x data 2 x pipeline 2",
    "MoE-GPT: data 2 x expert 2 x tensor 2 1d x pipeline 2",
)
"""Every mode once, and the mixes of four; the rest of the grid is more of the same."""


def checks() -> list[Check]:
    """All of them, part by part; then those of the folders."""
    parts = [
        _models,
        _attention,
        _experts,
        _handlers,
        _zero,
        _quiet,
        _waits,
        _precisions,
        _schedules,
        _clips,
        _gradients,
    ]
    return [check for checks_of in (*parts, *in_folders()) for check in checks_of()]


def in_folders() -> list[Callable[[], Iterable[Check]]]:
    """The `checks` function of every module of the tests that is called nccl_checks."""
    files = sorted(TESTS.rglob("nccl_checks.py"))
    names = [".".join(("tests", *file.relative_to(TESTS).with_suffix("").parts)) for file in files]
    return [importlib.import_module(name).checks for name in names]


def _models() -> Iterator[Check]:
    known = {str(case): case for case in reversed(grid.GRID)}
    for name in GRID:
        yield Check("grid", name, known[name].ranks, grid.trained, (known[name],))


def _attention() -> Iterator[Check]:
    """In float64 by exact arithmetic, in the others by the GPU's kernels."""
    for kind in test_attention.ATTENTION:
        yield Check("attention", f"{kind}, float64", 4, test_attention._all_cases, (kind, 4))
        for dtype in (torch.bfloat16, torch.float32):
            yield Check("attention", f"{kind}, {dtype}", 4, test_attention._low_precision, (kind, 512, dtype))


def _experts() -> Iterator[Check]:
    for ranks in (2, 4):
        for dtype, capacity in itertools.product((torch.float64, torch.bfloat16), (None, 0.7)):
            name = f"{dtype}{' with drops' if capacity else ''}"
            yield Check("experts", name, ranks, test_grouped.check_ranks, (dtype, capacity))


def _handlers() -> Iterator[Check]:
    for name, scenario in SCENARIOS.items():
        yield Check("handlers", name, scenario.world, test_parity._run, (name,))


def _zero() -> Iterator[Check]:
    for name, case in zero_cases.CASES.items():
        for stage in (1, 2, 3):
            ways = [Way(stage, "AdamW", 0.3), Way(stage, "SGD", None, 3)]
            yield Check("zero", f"{name}, stage {stage}", case.world, zero_cases.check_parity, (name, ways))
    ahead = [Way(stage, "AdamW", 0.3, 3, "auto", (("gather_ahead", True),)) for stage in (1, 2)]
    yield Check("zero", "gather_ahead", 2, zero_cases.check_parity, ("data 2", ahead))
    yield Check("zero", "odd parameters", 2, zero_optimizer._odd, (["AdamW"],))


def _quiet() -> Iterator[Check]:
    """From the third step on no host waits for the device; the loss is counted, as cross-entropies are."""
    for config in device_check.CONFIGS:
        yield Check("quiet", str(config), 2, device_check.run, (config, None))


WAITS = (
    "GPT, tied: tensor 2 1d",
    "GPT, tied: tensor 2 1d sequence_split=True",
    "GPT: sequence 2, ring",
    "GPT: sequence 2, ulysses",
    "ViT: tensor 2 1d",
    "Llama: data 2",
    "Llama, experts: data 2",
    "Llama, experts: expert 2",
    "MoE-GPT: expert 2",
    "GPT, tied: pipeline 2",
)
"""Every kind of model on two ranks. (2d and 3d tensor parallelism use the same layers and collectives on more ranks.)"""


def _waits() -> Iterator[Check]:
    """A whole steady step without a wait of the host."""
    known = {str(case): case for case in grid.GRID}
    for name in WAITS:
        # In fp32 torch has no grouped matrix product, and experts run one after another.
        settings = {"bf16": True} if "expert" in name else {}
        yield Check("waits", name, 2, waits_check.of_grid, (known[name], settings), places_itself=True)
    for settings in ({"zero": 1}, {"zero": 2}, {"zero": 3}, {"fp16": True}, {"bf16": True, "gradient_accumulation": 1}):
        arguments = (known["Llama: data 2"], settings)
        yield Check("waits", f"Llama: data 2, {settings}", 2, waits_check.of_grid, arguments, places_itself=True)
    if find_spec("transformers") is not None:
        names = list(zoo.BY_NAME)
        for first in range(0, len(names), 8):
            chosen = names[first : first + 8]
            text = f"transformers, {', '.join(chosen)}"
            yield Check("waits", text, 2, waits_check.of_transformers, (chosen, {}), places_itself=True)


def _precisions() -> Iterator[Check]:
    for stage in range(4):
        yield Check("precision", f"every precision at stage {stage} of ZeRO", 2, test_table._check_cases, (stage,))
    if find_spec("torchao") is not None:
        trained, verify = test_float8._trained, test_float8.check_trained
        yield Check("precision", "float8", 2, trained, (False,), verify, only_on_gpu=True)


def _schedules() -> Iterator[Check]:
    layouts: list[tuple[dict[str, int], int]] = [({"pipeline": 2}, 2), ({"pipeline": 2, "data": 2}, 1)]
    for parallel, accumulation in layouts:
        for name, (settings, lie) in test_pipeline.SCHEDULES.items():
            arguments = (parallel, name, settings, lie, True, accumulation)
            yield Check(
                "schedules", f"{name}, {parallel}", math.prod(parallel.values()), test_pipeline._train, arguments
            )
    for name in ("OneFOneB", "ZBV"):
        settings, lie = test_pipeline.SCHEDULES[name]
        parallel = {"pipeline": 4, "data": 2}
        yield Check(
            "schedules", f"{name}, {parallel}", 8, test_pipeline._train, (parallel, name, settings, lie, True, 1)
        )


def _clips() -> Iterator[Check]:
    names = ("data 2", "data 2 x tensor 2", "expert 2 in data 4", "data 2 x pipeline 4, tied")
    for name in names:
        for p in (1.0, 2.0, 3.0, math.inf):
            clip = {"max_norm": 0.01, "norm_type": p}
            yield Check(
                "clip", f"{name}, p={p}", SCENARIOS[name].world, test_clip._clipped, (name, clip, p), _same_norms
            )
    for method in ("zclip", "percentile"):
        yield Check("clip", method, 2, test_clip._adaptive, ({"method": method},), _all_same)


def _gradients() -> Iterator[Check]:
    """Frozen and missing ones, and sums over passes and over uneven batches."""
    frozen = (test_uneven.StartsFrozen, test_uneven._loss_of_all)
    yield Check("frozen", "engine", 2, test_engine._frozen_and_thawed)
    yield Check("frozen", "engine, accumulated", 4, test_engine._frozen_and_thawed, (2,))
    yield Check("frozen", "sum alone", 2, _summed, (*frozen, {}, 8, True))
    yield Check("frozen", "sum alone, overlapped", 4, _summed, (*frozen, summing.OVERLAPPED, 8, True))
    yield Check("frozen", "on one rank", 2, body_of(test_uneven.test_frozen_on_one_rank_alone), (summing.TINY,))
    yield Check(
        "frozen",
        "in one group of two",
        4,
        body_of(test_uneven.test_buckets_of_one_group_change_without_the_ranks_outside_it),
        (summing.TINY,),
    )
    branches = (test_uneven.Branches, test_uneven._branch)
    yield Check("missing", "engine", 2, test_engine._subsets)
    for ranks in (2, 4, 8):
        yield Check("missing", "sum alone", ranks, _summed, (*branches, summing.OVERLAPPED, 4, False))
    yield Check("missing", "sparse", 2, test_uneven._sparse, (summing.TINY,))
    yield Check(
        "missing",
        "sparse on one rank",
        4,
        body_of(test_uneven.test_sparse_here_and_dense_there_is_dense),
        (summing.TINY,),
    )
    for ranks in (2, 4, 8):
        yield Check("accumulation", "three passes", ranks, test_engine._loop, (3,))
    uneven: list[tuple[list[int], int]] = [([5, 2], 2), ([3, 1, 0, 2], 1), ([3, 1, 0, 2, 3, 3, 3, 3], 2)]
    for lengths, accumulation in uneven:
        for weighted in (True, False):
            name = f"{'(sum, count)' if weighted else 'means'}, batches {lengths}, accumulation {accumulation}"
            arguments = (lengths, weighted, accumulation)
            yield Check("losses", name, len(lengths), test_engine._uneven_batches, arguments, _all_same)


def _summed(build: Any, loss: Any, changes: dict[str, Any], steps: int, flips: bool) -> None:
    options = replace(summing.TINY, **changes)
    summing.train(build, loss, options, steps=steps, before=test_uneven._flip if flips else None)


def _same_norms(found: Sequence[tuple[float, bytes, int]]) -> None:
    assert len({bits for _, bits, _ in found}) == 1, "the norm has not the same bits on all ranks"
    counts = [count for _, _, count in found]  # none where every rank has the whole gradient
    assert set(counts) in ({0}, {1}), f"collectives of a clip: {counts}, not at most 1"


def _all_same(found: Sequence[Any]) -> None:
    assert all(one == found[0] for one in found), found


# -- on the ranks -----------------------------------------------------------------------------------------


class MadeOnGpu(TorchFunctionMode):
    """Tensors that a test makes are moved to the GPU, so that functions written for the CPU run there as they are.

    Who calls is seen from the stack, without torch's frames: calls of the library are left alone.
    """

    _library, _torch = (str(Path(package.__file__ or "").parent) for package in (colonnade, torch))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func not in _device_constructors() or kwargs.get("device") is not None or self._by_library():
            return made
        return made.detach().cuda().requires_grad_(made.requires_grad)

    def _by_library(self) -> bool:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith((self._torch, "<")):
            frame = frame.f_back
        return frame.f_code.co_filename.startswith(self._library)


def run_checks(chosen: Sequence[Check], log: Path, on_gpu: bool, patience: float) -> None:
    """On a rank: one check after another; rank 0 notes the seconds of each. One that hangs ends the rank, with its stack."""
    for check in chosen:
        begin = time.monotonic()
        faulthandler.dump_traceback_later(patience + (MARGIN if check is chosen[0] else 0), exit=True)
        with MadeOnGpu() if on_gpu and not check.places_itself else contextlib.nullcontext():
            found = check.function(*check.arguments)
        if check.verify is not None:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, found)
            check.verify(everyone)
        dist.barrier()
        faulthandler.cancel_dump_traceback_later()
        if dist.get_rank() == 0:
            with log.open("a") as file:
                file.write(f"{time.monotonic() - begin:.1f}\n")


# -- here -------------------------------------------------------------------------------------------------


class Progress(threading.Thread):
    """Prints a line for every check of a world as its ranks pass it."""

    def __init__(self, chosen: Sequence[Check], log: Path) -> None:
        super().__init__(daemon=True)
        self.chosen, self.log, self.passed, self.ended = chosen, log, list[float](), threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.3):
            self.read()

    def read(self) -> None:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        for line in lines[len(self.passed) :]:
            print(f"pass {line:>6s} s  {self.chosen[len(self.passed)]}", flush=True)
            self.passed.append(float(line))

    def end(self) -> list[float]:
        self.ended.set()
        self.join()
        self.read()
        return self.passed


def run_all(chosen: Sequence[Check], backend: str, patience: float) -> dict[str, dict[str, Any]]:
    """The checks of each number of ranks in one world; after a failure the rest go on in a new one."""
    results: dict[str, dict[str, Any]] = {}
    for ranks in sorted({check.ranks for check in chosen}):
        left = [check for check in chosen if check.ranks == ranks]
        while left:
            passed, error = run_together(left, backend, patience)
            for check, seconds in zip(left, passed, strict=False):
                results[str(check)] = {"ok": True, "seconds": seconds}
            left = left[len(passed) :]
            if error and left:
                results[str(left.pop(0))] = {"ok": False, "error": error}
            elif error:
                results[f"the end of the world of {ranks}"] = {"ok": False, "error": error}
    return results


def run_together(chosen: Sequence[Check], backend: str, patience: float) -> tuple[list[float], str]:
    """The seconds of the checks that passed in one world, and the error of the one that did not."""
    on_gpu = backend == "nccl"
    # DETAIL compares every collective over gloo before it runs over NCCL; users run without.
    env = {"TORCH_DISTRIBUTED_DEBUG": "OFF"} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        progress = Progress(chosen, Path(folder) / "log")
        progress.start()
        timeout = 2 * MARGIN + patience * len(chosen)
        arguments = (chosen, progress.log, on_gpu, patience)
        result = run_world(
            chosen[0].ranks, run_checks, *arguments, timeout=timeout, check=False, backend=backend, env=env
        )
        passed = progress.end()
    if result.ok:
        return passed, ""
    failed = str(chosen[len(passed)]) if len(passed) < len(chosen) else "the end of the world"
    print(f"FAIL          {failed}\n{result.report()[-5000:]}", flush=True)
    cause = result.root_cause
    return passed, cause.headline if cause is not None else "no cause is known"


def main() -> int:
    every = checks()
    parts = list(dict.fromkeys(check.part for check in every))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=parts, metavar="PART", help=f"of {', '.join(parts)}")
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 4, 8), help="worlds of these sizes only")
    parser.add_argument("--name", default="", help="checks whose name has this text")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds a check may take")
    parser.add_argument("--no-mps", action="store_true", help="let the ranks take turns on the GPU")
    parser.add_argument("--list", action="store_true", help="print the checks and stop")
    options = parser.parse_args()
    chosen = [
        check
        for check in every
        if check.part in (options.only or parts)
        and check.ranks in (options.ranks or (2, 4, 8))
        and options.name in check.name
        and not (check.only_on_gpu and options.backend == "gloo")
    ]
    if options.list:
        print(*chosen, sep="\n")
        return 0
    if options.backend == "nccl" and not torch.cuda.is_available():
        print("nccl_check needs a GPU and torch finds none; `--backend gloo` runs the same checks on the CPU")
        return 0
    begin = time.monotonic()
    serves = options.backend == "nccl" and not options.no_mps
    with cuda_mps() if serves else contextlib.nullcontext(False) as mps:
        results = run_all(chosen, options.backend, options.patience)
    failed = [name for name, result in results.items() if not result["ok"]]
    summary = {"backend": options.backend, "mps": mps, "seconds": round(time.monotonic() - begin, 1)}
    print(json.dumps({**summary, "passed": len(results) - len(failed), "failed": failed, "checks": results}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""Loading a transformers checkpoint on four ranks, compared with reading its files once in one process.

`python benchmarks/load.py --json --gib 4` makes a Llama of that size in safetensors files, in a temporary folder (there must be as
much free on disk), and prints one object last: `ratios` of the time of `from_pretrained` and `initialize` on four ranks to that
of one process that reads all bytes of the files into new memory; interleaved, medians, the files in the page cache. `memory` has
each rank's peak, what it holds after, and the largest tensor of the files, in MiB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _measure import interleave, report
from safetensors.torch import save_file

from colonnade import from_pretrained, initialize, launch
from colonnade.checkpoint.full_weights import tensors_in
from colonnade.context.parallel_context import ParallelContext
from colonnade.parallel.placement import local_part
from colonnade.testing import run_world

RANKS = 4
CASES: dict[str, dict[str, Any]] = {
    "tensor 4": {"parallel": {"tensor": {"size": RANKS, "mode": "1d"}}},
    "ZeRO 3": {"zero": 3},
}
GOALS = {"tensor 4": 1.3}
"""Under ZeRO 3 ranks hold their slices of bf16 weights in fp32: twice the bytes that are read."""


def write_checkpoint(folder: Path, gib: float, dtype: torch.dtype = torch.bfloat16) -> None:
    """A Llama of about this size, with layers as wide as those of one; of its weights only the number matters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = 4096 if gib >= 2 else 2048
    config = LlamaConfig(
        vocab_size=8 * hidden,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
    )
    with torch.device("meta"):
        one = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    layer = {name: shape for name, shape in one.items() if ".layers.0." in name}
    rest = {name: shape for name, shape in one.items() if name not in layer}
    width, total = dtype.itemsize, int(gib * 2**30)
    size = sum(shape.numel() * width for shape in layer.values())
    config.num_hidden_layers = max(1, round((total - sum(shape.numel() * width for shape in rest.values())) / size))
    config.save_pretrained(folder)
    weight_map: dict[str, str] = {}
    files = [
        rest,
        *({n.replace(".0.", f".{at}."): s for n, s in layer.items()} for at in range(config.num_hidden_layers)),
    ]
    for number, shapes in enumerate(files):
        file = f"model-{number:05d}.safetensors"
        save_file({name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}, folder / file)
        weight_map |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def anonymous() -> int:
    """The bytes of this process's own memory that are in use."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """What is put into the list: how much more memory this process had at most, inside the block."""
    before, done, found = anonymous(), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.001):
            found[0] = max(found[0], anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        found[0] = max(found[0], anonymous() - before)


def load(folder: Path, context: ParallelContext) -> Any:
    """What a user writes."""
    model = from_pretrained(folder, context=context)
    return initialize(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), context=context, verbose=False)[0]


def held(engine: Any, folder: Path) -> tuple[int, int]:
    """Bytes of the parameters of this rank, and of the largest tensor in the files."""
    own = sum(local_part(parameter).nbytes for parameter in engine.model.parameters())
    return own, max(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors_in(folder).values())


def read_once(folder: Path) -> float:
    """Seconds in which rank 0 reads the files; the others wait."""
    dist.barrier()
    begin = time.perf_counter()
    if dist.get_rank() == 0:
        kept = [file.read_bytes() for file in sorted(folder.glob("*.safetensors"))]
        del kept
    seconds = time.perf_counter() - begin
    dist.barrier()
    return seconds


def load_once(folder: Path, case: str, memory: dict[str, list[float]]) -> float:
    """Seconds until the last rank has its weights."""
    gc.collect()  # FSDP's cycles hold what was loaded last
    ctypes.CDLL(None).malloc_trim(0)  # else memory that was freed before is used again, and not seen
    with launch(CASES[case], context=ParallelContext(), verbose=False) as context:
        dist.barrier()
        begin = time.perf_counter()
        with nullcontext() if case in memory else peak_memory() as peak:
            engine = load(folder, context)
        dist.barrier()
        seconds = time.perf_counter() - begin
        if peak is not None:
            memory[case] = [round(value / 2**20, 1) for value in (*peak, *held(engine, folder))]
        engine.close()
    return seconds


def measure(folder: Path, cases: Sequence[str], rounds: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """On each rank: median seconds of reading once and of each case, and the memory of a round before, which is not timed."""
    memory: dict[str, list[float]] = {}
    turns: dict[str, Callable[[], float]] = {"read": lambda: read_once(folder)}
    turns |= {case: lambda case=case: load_once(folder, case, memory) for case in cases}  # type: ignore[misc]
    interleave(turns, 1)
    return interleave(turns, rounds), memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gib", type=float, default=1.0, help="the size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where the checkpoint is made")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_checkpoint(Path(folder), options.gib)
        found = run_world(RANKS, measure, Path(folder), options.cases, options.rounds, timeout=1200).values
    seconds = found[0][0]
    ratios = {case: seconds[case] / seconds["read"] for case in options.cases}
    memory = {case: [rank[1][case] for rank in found] for case in options.cases}
    return 0 if report(ratios, GOALS, options.json, seconds=seconds, memory=memory) else 1


if __name__ == "__main__":
    sys.exit(main())

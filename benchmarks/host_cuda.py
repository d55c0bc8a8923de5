"""The host's work in a training step on one GPU, over the same written by hand in torch: launches, waits and milliseconds.

The models are so small that the GPU waits for the host: a transformers Llama of 2 and of 16 layers, and a GPT of this library. By
hand: the same model with `clip_grad_norm_` and fused AdamW; ours eager and with `cuda_graph`. `step` is the time of `engine.step()` over that of clip and optimizer
step, `loop` the time of a full step of training. Contestants take turns, and medians count.

`python benchmarks/host_cuda.py --json` prints one object last: ratios, and for each contestant the CUDA calls of one steady step (by
torch.profiler) and the place of each wait for the device (`colonnade.testing.device_waits`). On a CPU (`--device cpu`) only
times and operators are measured.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _measure import has_device, interleave, report
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile

from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.models import GPT
from colonnade.testing import device_waits

VOCABULARY, HIDDEN, HEADS, ROWS, LENGTH, MAX_NORM, LR = 256, 64, 4, 2, 32, 1.0, 1e-4
LAYERS = {"llama-2": 2, "llama-16": 16, "gpt-16": 16}
GRAPHS: dict[str, bool | str] = {"ours": False, "ours, step recorded": "step", "ours, recorded": True}
"""The contestants of the library, by the key `cuda_graph`."""
GOALS = {f"{name}/ours/step": 1.00 for name in LAYERS} | {f"{name}/ours, recorded/loop": 1 / 1.5 for name in LAYERS}
WARM_UP, WAITS = 10, ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


class Contestant(NamedTuple):
    """The two halves of a training step; `update` is clipping and the optimizer step."""

    passes: Callable[[], Any]
    update: Callable[[], Any]

    def step(self) -> None:
        self.passes()
        self.update()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=tuple(LAYERS), default=tuple(LAYERS))
    given = parser.parse_args()
    if not has_device(given.device):
        return 0
    ratios: dict[str, float] = {}
    found: dict[str, Any] = {}
    for name in given.only:
        begin = time.monotonic()
        contestants = {"by hand": by_hand(name, given.device)}
        for who, cuda_graph in GRAPHS.items():
            if given.device == "cuda" or not cuda_graph:
                contestants[who] = by_engine(name, given.device, cuda_graph)
        for contestant in contestants.values():
            for _ in range(WARM_UP):
                contestant.step()
        times = measure(contestants, given.rounds, given.device)
        counts = {who: calls(contestant.step) for who, contestant in contestants.items()}
        waits = {who: device_waits(contestant.step) for who, contestant in contestants.items()}
        found[name] = {"milliseconds": times, "calls": counts, "waits": waits}
        for who in contestants:
            for part in ("step", "loop") if who != "by hand" else ():
                ratios[f"{name}/{who}/{part}"] = times[f"{who}/{part}"] / times[f"by hand/{part}"]
        print(f"{name}, measured in {time.monotonic() - begin:.0f} s", flush=True)
        for key, value in found[name].items():
            print(" ", key, *(f"\n    {who}: {what}" for who, what in value.items()), flush=True)
    dist.destroy_process_group()
    goals = {case: goal for case, goal in GOALS.items() if case in ratios}
    return 0 if report(ratios, goals, given.json, device=given.device, found=found) else 1


# -- the contestants --------------------------------------------------------------------------------------


def model_of(name: str, context: ParallelContext | None = None) -> nn.Module:
    torch.manual_seed(0)
    if name.startswith("gpt"):
        return GPT(VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS[name], context=context or ParallelContext())
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS[name]}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, use_cache=False))


def tokens_on(device: str) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)


def by_engine(name: str, device: str, cuda_graph: bool | str = False) -> Contestant:
    config = {"clip_grad_norm": MAX_NORM, "cuda_graph": cuda_graph}
    gpc = launch(config, context=ParallelContext(), verbose=False)
    tokens, model = tokens_on(device), model_of(name, gpc)
    criterion = model.criterion() if name.startswith("gpt") else None
    engine, *_ = initialize(model, lambda p: torch.optim.AdamW(p, lr=LR, fused=True), criterion, context=gpc)

    batch = (tokens, tokens) if criterion else {"input_ids": tokens, "labels": tokens}

    def passes() -> None:
        engine.zero_grad()
        if cuda_graph is True:
            engine.execute_schedule(iter([batch]), return_output_label=False)
            return
        out = engine(tokens) if criterion else engine(input_ids=tokens, labels=tokens)
        engine.backward(engine.criterion(out, tokens) if criterion else out.loss)

    return Contestant(passes, engine.step)


def by_hand(name: str, device: str) -> Contestant:
    tokens, model = tokens_on(device), model_of(name).to(device)
    criterion = model.criterion() if name.startswith("gpt") else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def passes() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(tokens), tokens) if criterion else model(input_ids=tokens, labels=tokens).loss
        loss.backward()

    def update() -> None:
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    return Contestant(passes, update)


# -- what is measured -------------------------------------------------------------------------------------


def measure(contestants: dict[str, Contestant], rounds: int, device: str) -> dict[str, float]:
    """Milliseconds of the host, by contestant and part: until the call returns (`step`), or of many steps in a row (`loop`)."""
    until_done = torch.cuda.synchronize if device == "cuda" else lambda: None

    def of_step(contestant: Contestant) -> float:
        contestant.passes()
        until_done()
        begin = time.perf_counter()
        contestant.update()
        seconds = time.perf_counter() - begin
        until_done()
        return 1e3 * seconds

    def of_loop(contestant: Contestant, steps: int = 5) -> float:
        until_done()
        begin = time.perf_counter()
        for _ in range(steps):
            contestant.step()
        until_done()
        return 1e3 * (time.perf_counter() - begin) / steps

    turns: dict[str, Callable[[], float]] = {}
    for who, contestant in contestants.items():
        turns[f"{who}/step"] = lambda contestant=contestant: of_step(contestant)
        turns[f"{who}/loop"] = lambda contestant=contestant: of_loop(contestant)
    return {name: round(ms, 3) for name, ms in interleave(turns, rounds).items()}


def calls(step: Callable[[], None]) -> dict[str, int]:
    """How often one step launches kernels, waits for the device and copies; and its operators."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as seen:
        step()
    events = collections.Counter({event.key: event.count for event in seen.key_averages()})
    counts = {"launches": sum(events[name] for name in LAUNCHES), "operators": 0}
    for name, count in events.items():
        if name.startswith("aten::"):
            counts["operators"] += count
        # torch.profiler itself waits for the device once when it stops.
        if name in WAITS or name.startswith(
            ("Memcpy", "cudaEventCreate", "cudaHostAlloc", "cudaMalloc", "cudaGraphLaunch")
        ):
            counts[name] = count
    counts["item"] = events["aten::item"]
    return counts


if __name__ == "__main__":
    sys.exit(main())

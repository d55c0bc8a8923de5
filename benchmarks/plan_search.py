"""Layouts of three models on 64 H100s, by `colonnade plan --search`, beside those that are published for such models.

python benchmarks/plan_search.py            # a table for each; --only "70 G" for one; needs no GPU, and takes some minutes
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import colonnade
from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.models import Llama
from colonnade.proof.planner.hardware import load_hardware
from colonnade.proof.planner.job import Job
from colonnade.proof.planner.plan_records import Candidate, SearchResult
from colonnade.proof.planner.search import search

RANKS, SAMPLES, LENGTH = 64, 256, 4096
MODELS: dict[str, dict[str, Any]] = {
    "7 G": dict(vocabulary=32000, hidden=4096, heads=32, layers=32, inner=11008),
    "70 G": dict(vocabulary=128256, hidden=8192, heads=64, layers=80, kv_heads=8, inner=28672),
    "50 G, experts": dict(
        vocabulary=32000, hidden=4096, heads=32, layers=32, kv_heads=8, inner=14336, experts=8, router=dict(k=2)
    ),
}
"""Of the shapes of Llama 2 7B, Llama 3 70B and Mixtral 8x7B."""
PUBLISHED = {
    "7 G": {
        "Llama 3.1 8B on 128 H100s: FSDP (torchtitan, benchmarks of 2024-12)": dict(zero=3, tensor=1, pipeline=1),
        "Llama 2 7B: tensor 2 (Megatron Bridge, recipe for H100)": dict(tensor=2, pipeline=1),
    },
    "70 G": {
        "Llama 3 70B on 64 H100s: tensor 4, pipeline 4, context 2 (Megatron Core, parallelism guide)": dict(
            tensor=4, pipeline=4
        ),
        "Llama 3 70B on 64 H100s: tensor 4, pipeline 8, in fp8 (Megatron Bridge, 25.11)": dict(tensor=4, pipeline=8),
        "Llama 3.1 70B on 256 H100s: FSDP 32, tensor 8 (torchtitan, benchmarks of 2024-12)": dict(
            zero=3, tensor=8, pipeline=1
        ),
    },
    "50 G, experts": {
        "Mixtral 8x7B on 64 GPUs: pipeline 4, expert 8 (Megatron Core, parallelism guide)": dict(
            tensor=1, pipeline=4, expert=8
        ),
    },
}
"""Layouts that others have published for models of these sizes, by what is compared."""


def job(name: str) -> Job:
    """What a training script has."""
    shape = dict(MODELS[name])
    sizes = [shape.pop(key) for key in ("hidden", "heads", "layers")]

    def build(context: ParallelContext) -> Any:
        model = Llama(shape["vocabulary"], LENGTH, *sizes, context=context, **_without(shape, "vocabulary"))
        stages = context.pipeline_parallel_size
        return colonnade.split(model, num_stages=stages) if stages > 1 else model

    def batch(context: ParallelContext) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(SAMPLES // context.data_parallel_size, LENGTH, dtype=torch.long, device="meta")
        return tokens, tokens

    return Job(build, batch, optimizer=torch.optim.AdamW)


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def rows(found: SearchResult, published: dict[str, dict[str, Any]]) -> list[str]:
    """The fastest of each kind of layout, and the place of those that others use."""
    best: dict[Any, int] = {}
    for place, one in enumerate(found.fitting, 1):
        best.setdefault(_kind(one), place)
    shown = dict.fromkeys(list(best.values())[:5], "")
    lines = []
    for source, layout in published.items():
        place = next((at for at, one in enumerate(found.fitting, 1) if layout.items() <= one.layout.items()), None)
        if place is None:
            cut = next((one.reason for one in found.cut if layout.items() <= one.layout.items()), "not looked at")
            lines.append(f"| | {source} | cut: {cut} | | |")
        else:
            shown[place] = f"{shown.get(place, '')}; {source}".strip("; ")
    table = [
        f"| {place} | {_text(found.fitting[place - 1])} | {found.fitting[place - 1].step_seconds:.2f} s | "
        f"{(found.fitting[place - 1].peak_memory or 0) / 1e9:.0f} GB | {source} |"
        for place, source in sorted(shown.items())
    ]
    return ["| | layout | step | memory | published for such models |", "|---|---|---|---|---|", *table, *lines]


def _kind(one: Candidate) -> Any:
    return tuple(one.layout[key] for key in ("tensor", "pipeline", "expert"))


def _text(one: Candidate) -> str:
    words = [f"{key} {one.layout[key]}" for key in ("data", "tensor", "pipeline", "expert") if one.layout[key] > 1]
    words += [f"ZeRO {one.layout['zero']}"] * bool(one.layout["zero"])
    words += [f"{one.layout['micro-batches']} micro-batches"] * (one.layout["pipeline"] > 1)
    words += ["checkpointed"] * (one.layout["checkpoint"] == "full")
    return ", ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS)
    options = parser.parse_args()
    for name in [options.only] if options.only else MODELS:
        begin = time.perf_counter()
        found = search(load_config(dict(bf16=True)), RANKS, load_hardware("h100"), job(name), context=ParallelContext())
        spent = time.perf_counter() - begin
        print(f"\n{name}: {len(found.fitting)} layouts fit, {len(found.cut)} were cut, {spent:.0f} s of search\n")
        print("\n".join(rows(found, PUBLISHED[name])), flush=True)


if __name__ == "__main__":
    main()

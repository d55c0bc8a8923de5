"""How long `colonnade.verify` takes of a Llama of 0.5 G parameters in bf16, on two ranks that share a GPU.

`python benchmarks/verify_cuda.py --json` prints one object last; `ratios` has the seconds of the whole comparison over the
60 that it may take. It fails if the run is not found equal to one process. `--device cpu --layers 2 --hidden 256` runs the same
on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import sys
import time
from typing import Any

import torch
from _measure import has_device, report

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.models import Llama
from colonnade.testing import cuda_mps, run_world

VOCABULARY, LENGTH, ROWS, STEPS = 32000, 1024, 2, 2
LAYOUTS: dict[str, dict[str, Any]] = {"data 2": {}, "tensor 2": {"tensor": {"size": 2, "mode": "1d"}}}
SECONDS = 60.0


def verified(parallel: dict[str, Any], hidden: int, layers: int, length: int, profiled: bool) -> tuple[float, int, str]:
    """On a rank: (seconds, parameters, "" or the report of a comparison that failed)."""
    config = {"parallel": parallel, "bf16": True, "clip_grad_norm": 1.0}
    with colonnade.launch(config, context=ParallelContext(), verbose=False) as gpc:

        def build(context: ParallelContext) -> Llama:
            return Llama(VOCABULARY, length, hidden, 16, layers, kv_heads=4, context=context).to(gpc.device)

        torch.manual_seed(0)
        model = build(gpc)
        engine, *_ = colonnade.initialize(
            model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), model.criterion(), context=gpc
        )
        draw = torch.Generator().manual_seed(gpc.get_local_rank(ParallelMode.DATA))
        tokens = [torch.randint(0, VOCABULARY, (ROWS, length + 1), generator=draw) for _ in range(STEPS)]
        profile = cProfile.Profile() if profiled and gpc.get_global_rank() == 0 else None
        begin = time.monotonic()
        with profile or contextlib.nullcontext():
            found = colonnade.verify(engine, lambda: build(gpc), [[(each[:, :-1], each[:, 1:])] for each in tokens])
        seconds, alone = time.monotonic() - begin, ParallelContext()
        if profile is not None:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(70)
        with torch.device("meta"):
            whole = Llama(VOCABULARY, length, hidden, 16, layers, kv_heads=4, context=alone)
        return seconds, sum(parameter.numel() for parameter in whole.parameters()), "" if found.ok else str(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--profile", action="store_true", help="print the functions of rank 0 by cumulative time")
    arguments = parser.parse_args()
    if not has_device(arguments.device):
        return 0
    ratios, wrong, parameters = {}, {}, 0
    sizes = arguments.hidden, arguments.layers, arguments.length
    on_gpu = arguments.device == "cuda"
    env = {"TORCH_DISTRIBUTED_DEBUG": "OFF", **({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})}
    with cuda_mps() if on_gpu else contextlib.nullcontext(False) as served:
        for name in arguments.layouts:
            backend = "nccl" if on_gpu else "gloo"
            result = run_world(
                2, verified, LAYOUTS[name], *sizes, arguments.profile, timeout=600, backend=backend, env=env
            )
            seconds, parameters, said = result.values[0]
            ratios[name] = seconds / SECONDS
            if said:
                wrong[name] = said
                print(f"{name}: {said}", file=sys.stderr)
    more = {"parameters": parameters, "not_equal": sorted(wrong), "mps": served, "device": arguments.device}
    met = report(ratios, dict.fromkeys(ratios, 1.0), arguments.json, **more)
    return 0 if met and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())

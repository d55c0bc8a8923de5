"""Pipelines and tensor parallel layers over NCCL between ranks that share one GPU, in bf16, over torch's own.

`python benchmarks/parallel_cuda.py --json [--only pipeline,tensor] [--ranks 2 4] [--seconds 2] [--profile]`

The same stages through our schedules and torch.distributed.pipelining; the same blocks by our layers and by DTensor's
`parallelize_module`, forward and backward. Both are in the same processes, one world for each number of ranks, and take
turns in blocks of steps under CUDA MPS; a time is the slowest rank's until its GPU is done. `--profile` prints the kernels
of a step on rank 0. Prints a line for each case as it is measured, and one object last:
`ratios` of our time to torch's and the `goals`.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _measure import has_device, report
from _models import Block
from _step_cuda import Step, device, slowest, take_turns
from torch import Tensor, nn

from colonnade import ParallelMode, initialize, launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.nn import MLP, LayerNorm, SelfAttention, arrange
from colonnade.testing import WorldError, cuda_mps, run_world

MICRO_BATCHES, ROWS, LENGTH, HEADS = 8, 2, 1024, 16
"""Rows of a micro-batch, tokens of a row."""
Contest = Callable[[int], dict[str, Step]]
"""Width -> a step of ours and one of torch's."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help=f"names that begin so, with commas: of {', '.join(CONTESTS)}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each contest")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    options = parser.parse_args()
    if not has_device("cuda"):
        return 0
    names = [name for name in CONTESTS if name.startswith(tuple(options.only.split(",")))]
    lines: list[dict[str, Any]] = []
    failed = {}
    with cuda_mps() as served:
        for ranks in options.ranks:
            found, error = run(ranks, "nccl", names, options)
            lines += found
            failed |= {str(ranks): error} if error else {}
    ratios = {line["case"]: line["ours_ms"] / line["torch_ms"] for line in lines}
    more = {"cases": lines, "failed": failed, "mps": served, "device": torch.cuda.get_device_name()}
    return 0 if report(ratios, dict.fromkeys(ratios, 1.00), options.json, **more) and not failed else 1


def run(
    ranks: int, backend: str, names: Sequence[str], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], str]:
    """What rank 0 of one world wrote about its contests, printed as it comes; and the error, if there was one."""
    timeout = 60 + len(names) * (20 + 4 * options.seconds)
    ended, problem = threading.Event(), ""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.touch()
        printer = threading.Thread(target=follow, args=(log, ended), daemon=True)
        printer.start()
        arguments = (log, names, options.width, options.seconds, options.profile)
        env = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
        try:
            run_world(ranks, measured, *arguments, timeout=timeout, backend=backend, env=env)
        except WorldError as error:  # the other worlds are still worth their time
            problem = str(error)[-3000:]
            print(ranks, "ranks failed:", problem, flush=True)
        ended.set()
        printer.join()
        return [json.loads(line) for line in log.read_text().splitlines()], problem


def follow(log: Path, ended: threading.Event) -> None:
    """Print what is written to a file until it has ended."""
    with log.open() as file:
        while not ended.wait(0.3):
            print(file.read(), end="", flush=True)
        print(file.read(), end="", flush=True)


def measured(log: Path, names: Sequence[str], width: int, seconds: float, profiled: bool) -> None:
    """On a rank: what `take_turns` says of each contest, written by rank 0."""
    for name in names:
        steps = CONTESTS[name](width)
        found = take_turns(steps, seconds, 0.1)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        line: dict[str, Any] = {"case": f"{name}-{dist.get_world_size()}"}
        line |= {f"{who}_ms": round(1e3 * median, 3) for who, median in slowest(everyone).items()}
        line |= {"collectives": found["collectives"], "rounds": found["rounds"]}
        if profiled:
            line["kernels"] = [text for who, step in steps.items() for text in kernels(who, step)]
        if dist.get_rank() == 0:
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")


def kernels(who: str, step: Step) -> list[str]:
    """The kernels of a step on this rank, those with most time first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    found = [event for event in profile.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    times: collections.Counter[str] = collections.Counter()
    counts = collections.Counter(event.name for event in found)
    for event in found:
        times[event.name] += event.device_time
    lines = [f"  {counts[name]:4d} x {time:9.0f} us  {name[:110]}" for name, time in times.most_common(14)]
    return [f"  {who}: {len(found)} kernels, {sum(times.values()):.0f} us", *lines]


def _dtype() -> torch.dtype:
    return torch.bfloat16 if device().type == "cuda" else torch.float32


def _random(*shape: int) -> Tensor:
    generator = torch.Generator(device()).manual_seed(0)
    return torch.randn(*shape, generator=generator, device=device()).to(_dtype())


# -- pipelines ------------------------------------------------------------------------------------------------


def stages(width: int, chunks: int) -> list[nn.Module]:
    """This rank's stages, of four blocks in all."""
    torch.manual_seed(dist.get_rank())
    with device():
        built = [nn.Sequential(*(Block(width, HEADS) for _ in range(4 // chunks))) for _ in range(chunks)]
    return [stage.to(_dtype()) for stage in built]


def mean_loss(output: Tensor, label: Tensor) -> Tensor:
    return F.mse_loss(output, label)


def pipeline(kind: str, chunks: int, width: int) -> dict[str, Step]:
    """Forward, backward and the losses of one batch."""
    batch = tuple(_random(MICRO_BATCHES * ROWS, LENGTH, width) for _ in range(2))
    return {"ours": our_pipeline(kind, chunks, width, batch), "torch": torch_pipeline(chunks, width, *batch)}


def our_pipeline(kind: str, chunks: int, width: int, batch: Any) -> Step:
    schedule = {"type": kind, "num_microbatches": MICRO_BATCHES, "loss_everywhere": False}
    if chunks > 1:
        schedule["num_chunks"] = chunks
    config = {"parallel": {"pipeline": dist.get_world_size()}, "schedule": schedule, "compare_stages": False}
    context = launch(config, context=ParallelContext(), verbose=False)
    mine = stages(width, chunks)
    model = mine[0] if chunks == 1 else nn.ModuleList(mine)
    engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), mean_loss, context=context)

    def step() -> None:
        engine.zero_grad()
        engine.execute_schedule(iter([batch]), return_output_label=False)
        engine._sum_gradients()  # without it the engine would record the order of gradients for ever, as in a first step
        engine._end_step()

    return step


def torch_pipeline(chunks: int, width: int, x: Tensor, y: Tensor) -> Step:
    """By hand, at its fastest: the loss is scaled and not the gradients, and outputs are not joined."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    mine = stages(width, chunks)
    piped = [PipelineStage(stage, rank + at * size, chunks * size, device()) for at, stage in enumerate(mine)]
    options: dict[str, Any] = {
        "loss_fn": lambda output, label: mean_loss(output, label) / MICRO_BATCHES,
        "scale_grads": False,
    }
    if chunks == 1:
        schedule: Any = Schedule1F1B(piped[0], MICRO_BATCHES, **options)
    else:
        schedule = ScheduleInterleaved1F1B(piped, MICRO_BATCHES, **options)
    quiet = {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}
    inputs = (x,) if rank == 0 else ()

    def step() -> None:
        for stage in mine:
            stage.zero_grad(set_to_none=True)
        last: dict[str, Any] = {"target": y, "losses": []} if rank == size - 1 else {}
        schedule.step(*inputs, **last, **quiet)

    return step


# -- tensor parallel layers -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention of plain torch layers; the rows of `qkv` lie head by head, so that ranks can cut them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head_size = width // HEADS

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))
        q, k, v = qkv.transpose(1, 2).unbind(3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def tensor(block: str, sequence_split: bool, width: int) -> dict[str, Step]:
    """Forward and backward of one block, the gradient of its input included; with a norm where the sequence is split."""
    world = dist.get_world_size()
    section = {"size": world, "mode": "1d", "sequence_split": sequence_split}
    context = launch({"parallel": {"tensor": section}}, context=ParallelContext(), verbose=False)
    x = _random(4 * ROWS, LENGTH, width)
    if sequence_split:
        x = x.chunk(world, 1)[dist.get_rank()].contiguous()
    built = {
        "ours": _ours(block, sequence_split, width, context),
        "torch": _dtensor(block, sequence_split, width, context),
    }
    return {who: passes(model.to(device(), _dtype()), x) for who, model in built.items()}


def _ours(block: str, sequence_split: bool, width: int, context: ParallelContext) -> nn.Module:
    here = arrange(context)
    torch.manual_seed(0)
    options: dict[str, Any] = {"arrangement": here, "device": device()}
    layer = MLP(width, 4 * width, **options) if block == "mlp" else SelfAttention(width, HEADS, causal=True, **options)
    return nn.Sequential(LayerNorm(width, arrangement=here), layer) if sequence_split else layer


def _dtensor(block: str, sequence_split: bool, width: int, context: ParallelContext) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    with device():
        mlp = collections.OrderedDict(up=nn.Linear(width, 4 * width), act=nn.GELU(), down=nn.Linear(4 * width, width))
        layer = nn.Sequential(mlp) if block == "mlp" else Attention(width)
    first, last = ("up", "down") if block == "mlp" else ("qkv", "out")
    plan: dict[str, Any] = {first: ColwiseParallel(), last: RowwiseParallel()}
    model: nn.Module = layer
    if sequence_split:
        model = nn.Sequential(collections.OrderedDict(norm=nn.LayerNorm(width), layer=layer))
        plan = {
            "norm": SequenceParallel(),
            "layer": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            f"layer.{first}": ColwiseParallel(),
            f"layer.{last}": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(model.to(device(), _dtype()), context.device_mesh(ParallelMode.TENSOR), plan)


def passes(model: nn.Module, x: Tensor) -> Step:
    x = x.detach().requires_grad_()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        y = model(x)
        # As of a loss that uses y: with a gradient of its own, the backward pass would not wait for the sum that y is.
        y.backward(y.detach() * 1e-3)

    return step


CONTESTS: dict[str, Contest] = {
    "pipeline-1f1b": partial(pipeline, "OneFOneB", 1),
    "pipeline-interleaved": partial(pipeline, "Interleaved1F1B", 2),
    "tensor-mlp": partial(tensor, "mlp", False),
    "tensor-attention": partial(tensor, "attention", False),
    "tensor-mlp-sequence": partial(tensor, "mlp", True),
    "tensor-attention-sequence": partial(tensor, "attention", True),
}


if __name__ == "__main__":
    sys.exit(main())

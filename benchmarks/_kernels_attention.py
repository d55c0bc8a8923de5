"""`kernels_cuda.py`: a block of ring attention against the kernel alone, and attention over 4 NCCL ranks against torch's.

The block is 1 x 16 heads x 8,192 x 128 in bf16, timed with CUDA events. `block` is what the ring calls for a block, against
the fastest aten op by hand; `put` is the block and what puts it beside those before. The ranks share one GPU, under CUDA MPS
where it is there; they have 8,192 tokens in all, forward and backward, against `context_parallel` around
scaled_dot_product_attention. All contestants take turns in the same processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _measure import interleave
from _step_cuda import Step, _agreed, _block, _device, slowest
from torch import Tensor
from torch.nn import functional as F

from colonnade import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.sequence import ring_attention, ulysses_attention
from colonnade.nn.sequence.kernels import kernel_for
from colonnade.nn.sequence.masks import Mask
from colonnade.nn.sequence.ring import Softmax
from colonnade.testing import WorldError, cuda_mps, run_world

HEADS, LENGTH, WIDTH, RANKS = 16, 8192, 128, 4
ROUNDS, CALLS = 15, 4
BLOCK_GOAL, RANKS_GOAL = 1.08, 1.00
aten = torch.ops.aten


def measure(seconds: float = 6.0) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
    """Ratios, goals and details: of a block, and of 4 ranks."""
    ratios, details = blocks()
    goals = {name: BLOCK_GOAL for name in ratios if "/put" not in name}
    print("a block, ms:", details, flush=True)
    more, times = over_ranks(seconds)
    goals |= dict.fromkeys(more, RANKS_GOAL)
    return ratios | more, goals, {"block_ms": details, "ranks_ms": times}


def blocks() -> tuple[dict[str, float], dict[str, float]]:
    """One block alone, causal and not, forward and backward."""
    ratios: dict[str, float] = {}
    times: dict[str, float] = {}
    for causal in (False, True):
        found = interleave(_block_cases(causal), ROUNDS)
        name = "causal" if causal else "all"
        times |= {f"{name}/{case}": round(value, 4) for case, value in found.items()}
        for case, other in (("forward", "forward"), ("backward", "backward"), ("forward+put", "forward")):
            ratios[f"block/{name}/{case.replace('+', '/')}"] = found[case] / found[f"{other} by hand"]
    return ratios, times


def _block_cases(causal: bool) -> dict[str, Callable[[], float]]:
    q, k, v, grad = (torch.randn(1, HEADS, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    mask, scale = Mask(right=0 if causal else None), WIDTH**-0.5
    kernel = kernel_for(q, k, v, scale, mask, 0.0)
    out, lse = kernel.forward(q, k, v)
    softmax = Softmax(q)
    softmax.add(slice(None), out, lse)
    softmax.result(torch.float32)
    *saved, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    rest = (saved[0], saved[1], seed, offset, None, None, None, LENGTH, LENGTH, 0.0, causal)

    def put() -> None:
        kernel = kernel_for(q, k, v, scale, mask, 0.0)
        softmax.add(slice(None), *kernel.forward(q, k, v))

    def by_hand() -> None:
        aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)

    def back_by_hand() -> None:
        aten._scaled_dot_product_cudnn_attention_backward(grad, q, k, v, *rest, scale=scale)

    cases = {
        "forward": lambda: kernel_for(q, k, v, scale, mask, 0.0).forward(q, k, v),
        "forward by hand": by_hand,
        "forward+put": put,
        "backward": lambda: kernel.backward(grad, q, k, v, out, lse),
        "backward by hand": back_by_hand,
    }
    for case in cases.values():
        for _ in range(3):
            case()
    return {name: _timed(case) for name, case in cases.items()}


def _timed(case: Callable[[], Any]) -> Callable[[], float]:
    """The milliseconds of a call, on the GPU."""

    def turn() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(CALLS):
            case()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / CALLS

    return turn


def over_ranks(seconds: float) -> tuple[dict[str, float], dict[str, Any]]:
    """Whole attention on 4 ranks, causal with balanced halves, and not causal."""
    ratios: dict[str, float] = {}
    times: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        times["mps"] = stack.enter_context(cuda_mps())
        options: dict[str, Any] = {"timeout": 90 + 6 * seconds, "env": {"TORCH_DISTRIBUTED_DEBUG": "OFF"}}
        try:
            found = run_world(RANKS, _on_a_rank, seconds, backend="nccl", **options).values
        except WorldError as error:
            times["failed"] = str(error)[-2000:]
            return ratios, times
    for name in ("causal", "all"):
        medians = slowest([answer[name] for answer in found])
        times[name] = {case: round(1e3 * value, 3) for case, value in medians.items()}
        ratios |= {f"ranks/{name}/{case}": medians[case] / medians["context_parallel"] for case in ("ring", "ulysses")}
    return ratios, times


# -- on the ranks -----------------------------------------------------------------------------------------


def _on_a_rank(seconds: float) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention, context_parallel

    context = launch({"parallel": {"sequence": RANKS}}, context=ParallelContext(), verbose=False)
    mesh, answers = init_device_mesh(_device().type, (RANKS,)), {}
    lengths = [LENGTH // RANKS] * RANKS
    torch.manual_seed(dist.get_rank())
    inputs = [
        torch.randn(1, HEADS, lengths[0], WIDTH, device=_device(), dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    grad = torch.randn_like(inputs[0])
    for name, causal in (("causal", True), ("all", False)):
        options: dict[str, Any] = {"causal": causal, "lengths": lengths, "context": context}
        steps: dict[str, Step] = {
            "ring": _step(partial(ring_attention, balanced=True, **options), inputs, grad),
            "ulysses": _step(partial(ulysses_attention, **options), inputs, grad),
            "context_parallel": _step(partial(_by_name, causal), inputs, grad),
        }
        _attention._cp_options.enable_load_balance = causal  # it refuses to balance without a causal mask

        def around(case: str) -> Any:
            """Its context is entered once for many steps, and not around ours: it replaces torch's function."""
            if case != "context_parallel":
                return contextlib.nullcontext()
            return context_parallel(mesh, buffers=[torch.zeros(1, LENGTH, device=_device())], buffer_seq_dims=[1])

        answers[name] = _in_turns(steps, around, seconds / 2)
    return answers


def _in_turns(steps: dict[str, Step], around: Callable[[str], Any], seconds: float) -> dict[str, Any]:
    """The seconds of a step of each, block by block."""

    def block(case: str, length: int) -> float:
        with around(case):
            return _block(steps[case], length)

    for case in steps:
        block(case, 5)
    one = {case: block(case, 5) for case in steps}
    length = int(_agreed(max(1.0, 0.1 / max(one.values()))))
    rounds = int(_agreed(max(5.0, seconds / (length * sum(one.values())))))
    times: dict[str, list[float]] = {case: [] for case in steps}
    names = list(steps)
    for turn in range(rounds):
        for case in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            times[case].append(block(case, length))
    return {"seconds": times}


def _step(attention: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> Step:
    def step() -> None:
        torch.autograd.grad(attention(*inputs), inputs, grad)

    return step


def _by_name(causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Looked up at the call: context_parallel puts another function in its place."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

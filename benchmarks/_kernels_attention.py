"""`kernels_cuda.py`: a block of ring attention against the kernel alone, and attention over 4 NCCL ranks against torch's.

The block is 1 x 16 heads x 8,192 x 128 in bf16, timed with CUDA events. `block` is what the ring calls for a block, against
the fastest aten op by hand; `put` is the block and what puts it beside those before. The ranks share one GPU, under CUDA MPS
where it is there; they have 8,192 tokens in all, forward and backward, against `context_parallel` around
scaled_dot_product_attention, and their gradients are compared with those of one process. All contestants take turns in the same processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _measure import interleave
from _step_cuda import device, slowest, take_turns
from torch import Tensor
from torch.nn import functional as F

from colonnade import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.sequence import Parts, gather_sequence, ring_attention, ulysses_attention
from colonnade.nn.sequence.attention_kernels import kernel_for
from colonnade.nn.sequence.masks import Mask
from colonnade.nn.sequence.ring import Softmax
from colonnade.testing import WorldError, cuda_mps, run_world

HEADS, LENGTH, WIDTH, RANKS = 16, 8192, 128, 4
ROUNDS, CALLS, PASSES = 15, 4, 2
BLOCK_GOAL, RANKS_GOAL = 1.08, 1.00
TOLERANCE = 0.02
"""How far bf16 gradients over 4 ranks may be from those of one process in bf16."""
aten = torch.ops.aten
Step = Callable[[], Any]


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
    """Measure one call on the GPU, in milliseconds."""

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
        for case in ("ring", "ulysses"):
            apart = max(answer[name][f"{case} apart"] for answer in found)
            assert apart <= TOLERANCE, f"{case}, {name}: gradients are {apart} apart from one process's"
            times[f"{name}/{case} apart"] = round(apart, 5)
        times[name] = {case: round(1e3 * value / PASSES, 3) for case, value in medians.items()}
        ratios |= {f"ranks/{name}/{case}": medians[case] / medians["context_parallel"] for case in ("ring", "ulysses")}
    return ratios, times


# -- on the ranks -----------------------------------------------------------------------------------------


def _on_a_rank(seconds: float) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention, context_parallel

    context = launch({"parallel": {"sequence": RANKS}}, context=ParallelContext(), verbose=False)
    mesh, answers = init_device_mesh(device().type, (RANKS,)), {}
    lengths = [LENGTH // RANKS] * RANKS
    torch.manual_seed(dist.get_rank())
    inputs = [
        torch.randn(1, HEADS, lengths[0], WIDTH, device=device(), dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    grad = torch.randn_like(inputs[0])
    for name, causal in (("causal", True), ("all", False)):
        options: dict[str, Any] = {"causal": causal, "lengths": lengths, "context": context}
        once: dict[str, Step] = {
            "ring": _pass(partial(ring_attention, balanced=True, **options), inputs, grad),
            "ulysses": _pass(partial(ulysses_attention, **options), inputs, grad),
            "context_parallel": _pass(partial(_by_name, causal), inputs, grad),
        }
        _attention._cp_options.enable_load_balance = causal  # it refuses to balance without a causal mask

        def by_torch(step: Step = once["context_parallel"]) -> None:
            """Its context is entered once for all passes of a step, and not around ours: it replaces torch's function."""
            with context_parallel(mesh, buffers=[torch.zeros(1, LENGTH, device=device())], buffer_seq_dims=[1]):
                _repeated(step)

        steps = {case: partial(_repeated, step) for case, step in once.items()} | {"context_parallel": by_torch}
        answers[name] = take_turns(steps, seconds / 2)
        for case, balanced in (("ring", True), ("ulysses", False)):
            answers[name][f"{case} apart"] = _apart(once[case](), inputs, grad, causal, lengths, balanced, context)
    return answers


def _apart(
    found: Sequence[Tensor],
    inputs: Sequence[Tensor],
    grad: Tensor,
    causal: bool,
    lengths: list[int],
    balanced: bool,
    context: ParallelContext,
) -> float:
    """How far gradients are from those of one process that has everything, in parts of their norm; the most of q, k, v."""
    options: dict[str, Any] = {"lengths": lengths, "balanced": balanced, "context": context}
    *whole, weight = (gather_sequence(x.detach(), 2, **options) for x in (*inputs, grad))
    whole = [x.requires_grad_() for x in whole]
    truth = torch.autograd.grad(F.scaled_dot_product_attention(*whole, is_causal=causal), whole, weight)
    mine = Parts(tuple(lengths), balanced).positions(dist.get_rank(), device())
    expected = [x[:, :, mine].float() for x in truth]
    return max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


def _repeated(step: Step) -> None:
    for _ in range(PASSES):
        step()


def _pass(attention: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> Step:
    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*inputs), inputs, grad)

    return step


def _by_name(causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Looked up at the call: context_parallel puts another function in its place."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

"""A flat step equals torch's fused step on the clipped gradient: values, counts, state, over many kinds of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from colonnade.errors import GradientError
from colonnade.optim import flat_step, norm
from colonnade.optim.flat_step import (
    BucketState,
    FlatBucket,
    FlatStep,
    _steps_as_torch,
    _unfit,
    join_neighbours,
    why_not,
)
from colonnade.optim.norm import ScatteredGradient
from colonnade.parallel.flat import FlatLayout
from tests.optim.flat import Pair, buckets_of, parameters
from tests.optim.watch import Operations

MAKERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "adamw": partial(AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    "adamw-plain": partial(AdamW, lr=1e-2, weight_decay=0.1),
    "adam": partial(Adam, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), fused=True),
    "sgd": partial(SGD, lr=1e-2, fused=True),
    "sgd-momentum": partial(SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "sgd-nesterov": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-dampening": partial(SGD, lr=1e-2, momentum=0.9, dampening=0.5, weight_decay=0.1),
}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 1e-2}
PATTERNS: list[list[int]] = [[], [1, 2], [], [5], [1, 2], [0, 1, 2, 3, 4, 5, 6], []]


# In bf16 torch's plain optimizers round more often than its fused ones and ours, and its fused SGD fails on a CPU.
COMPARED = [(n, d) for n in MAKERS for d in TOLERANCE if d is not torch.bfloat16 or n in ("adamw", "adam")]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize(("name", "dtype"), COMPARED, ids=str)
def test_equals_torch(name: str, dtype: torch.dtype, max_norm: float) -> None:
    pair = Pair(MAKERS[name], dtype, max_norm=max_norm)
    for absent in PATTERNS:
        pair.step(absent)
    pair.compare(TOLERANCE[dtype], TOLERANCE[dtype] / 10)


@pytest.mark.parametrize("name", MAKERS)
def test_dropped_steps_leave_no_trace(name: str) -> None:
    pair = Pair(MAKERS[name])
    for step, absent in enumerate([[], [1, 2], [], [5], [], []]):
        if step in (0, 2, 3):
            pair.gradients(absent, scale=math.nan)
            before = [param.clone() for param in pair.ours]
            decision = pair.decide(absent)
            pair.flat.step(decision.divisor, decision.found_inf, absent)
            assert all(torch.equal(one, other) for one, other in zip(before, pair.ours, strict=True))
        else:
            pair.step(absent)
    pair.compare(1e-6, 1e-7)


def decay_groups(params: list[Tensor]) -> Optimizer:
    return AdamW(
        [
            {"params": params[:3], "weight_decay": 0.2},
            {"params": params[3:5], "weight_decay": 0.0, "lr": 3e-2},
            {"params": params[5:], "betas": (0.5, 0.9)},
        ],
        lr=1e-2,
        fused=True,
    )


@pytest.mark.parametrize(
    "schedule", [partial(StepLR, step_size=1, gamma=0.5), partial(OneCycleLR, max_lr=0.1, total_steps=9)]
)
def test_groups_and_schedulers(schedule: Callable[[Optimizer], Any]) -> None:
    pair = Pair(decay_groups)
    one, other = schedule(pair.torch), schedule(pair.optimizer)
    for _ in range(4):
        pair.step()
        one.step()
        other.step()
    assert pair.optimizer.param_groups[0]["lr"] != 1e-2
    pair.compare(1e-6, 1e-7)


def test_a_scheduler_does_not_complain(recwarn: pytest.WarningsRecorder) -> None:
    pair = Pair(MAKERS["adamw"])
    scheduler = StepLR(pair.optimizer, 1)
    pair.step()
    scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_lr_in_a_tensor() -> None:
    lr = torch.tensor(1e-2)
    pair = Pair(partial(AdamW, lr=lr, fused=True))
    pair.step()
    lr.fill_(5e-2)
    pair.step()
    pair.compare(1e-6, 1e-7)


def test_momentum_that_begins_later() -> None:
    pair = Pair(MAKERS["sgd"])
    pair.step()
    assert pair.optimizer.state_dict()["state"] == {}
    for optimizer in (pair.torch, pair.optimizer):
        optimizer.param_groups[0]["momentum"] = 0.9
    pair.step()
    pair.step()
    pair.compare(1e-6, 1e-7)


def momentum_groups(params: list[Tensor]) -> Optimizer:
    return SGD([{"params": params[:3], "momentum": 0.9, "dampening": 0.5}, {"params": params[3:]}], lr=1e-2)


def test_groups_with_and_without_momentum() -> None:
    pair = Pair(momentum_groups)
    pair.step()
    pair.step([1])
    for optimizer in (pair.torch, pair.optimizer):
        optimizer.param_groups[1].update(momentum=0.8, dampening=0.3)
    for absent in ([], [4], []):
        pair.step(absent)
    pair.compare(1e-6, 1e-7)
    state = _cloned(pair.torch.state_dict())
    pair.optimizer.load_state_dict(state)
    pair.step()
    pair.compare(1e-6, 1e-7)


@pytest.mark.parametrize("name", MAKERS)
def test_state_goes_to_torch_and_back(name: str) -> None:
    pair = Pair(MAKERS[name])
    assert pair.optimizer.state_dict()["state"] == {}
    for absent in ([], [1], []):
        pair.step(absent)
    mine, theirs = pair.optimizer.state_dict(), pair.torch.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert {k: list(v) for k, v in mine["state"].items()} == {k: list(v) for k, v in theirs["state"].items()}
    # torch goes on from our state, and we from torch's.
    fresh = MAKERS[name](pair.theirs)
    fresh.load_state_dict(_cloned(mine))
    pair.torch = fresh
    pair.optimizer.load_state_dict(_cloned(theirs))
    for absent in ([2], [], []):
        pair.step(absent)
    pair.compare(2e-6, 2e-7)


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, state)


def test_state_from_before_is_taken_over_and_a_fresh_state_starts_anew() -> None:
    theirs, ours = parameters(torch.float32, "cpu"), parameters(torch.float32, "cpu")
    one, other = AdamW(theirs, fused=True), AdamW(ours, fused=True)
    empty = _cloned(one.state_dict())
    for optimizer, tensors in ((one, theirs), (other, ours)):
        source = torch.Generator().manual_seed(0)
        for param in tensors:
            param.grad = torch.randn(param.shape, generator=source)
        optimizer.step()
    buckets = buckets_of(ours, [6, 1])
    views = [view for bucket in buckets for view in bucket.layout.views(bucket.grad)]
    flat = FlatStep(other, buckets)

    def both() -> None:
        for a, b, view in zip(theirs, ours, views, strict=True):
            view.normal_()
            a.grad, b.grad = view.clone(), view
        one.step()
        flat.step(torch.ones(1), torch.zeros(()))

    both()
    one.load_state_dict(empty)
    other.load_state_dict(empty)
    both()
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)
        assert other.state[b]["step"] == one.state[a]["step"] == 1


def step_beside_torch(
    slots: Sequence[int] = (0,) * 7, divisors: Sequence[float] = (1.0,), frozen: Sequence[int] = (), count: int = 7
) -> tuple[list[Tensor], Optimizer]:
    """One step on the first `count` parameters, equal to torch's on divided gradients: our parameters, our optimizer."""
    theirs, ours = parameters(torch.float32, "cpu"), parameters(torch.float32, "cpu")
    for at in frozen:
        theirs[at].requires_grad_(False)
        ours[at].requires_grad_(False)
    one, other = AdamW(theirs[:count], fused=True), AdamW(ours[:count], fused=True)
    buckets = buckets_of(ours, [4, 3], slots)
    views = [view for bucket in buckets for view in bucket.layout.views(bucket.grad)]
    flat = FlatStep(other, buckets)
    for a, b, view, slot in zip(theirs, ours, views, slots, strict=True):
        if a.requires_grad:
            view.normal_()
            a.grad, b.grad = view / divisors[slot], view
    one.step()
    flat.step(torch.tensor(divisors, dtype=torch.float64), torch.zeros(()), absent=frozen)
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)
    return ours, other


def test_one_divisor_per_slot() -> None:
    step_beside_torch([0, 2, 2, 1, 0, 1, 1], [1.0, 3.0, 7.0])


def test_parameters_that_are_frozen_or_not_in_the_optimizer() -> None:
    ours, optimizer = step_beside_torch(frozen=[2], count=5)
    assert ours[2] not in optimizer.state
    assert ours[5] not in optimizer.state


def test_gradients_of_another_dtype() -> None:
    theirs, ours = parameters(torch.float32, "cpu"), parameters(torch.float32, "cpu")
    one, other = AdamW(theirs, fused=True), AdamW(ours, fused=True)
    layout = FlatLayout([param.detach().bfloat16() for param in ours])
    bucket = FlatBucket(layout, ours, layout.allocate(), [0] * len(ours))
    flat = FlatStep(other, [bucket])
    for a, view in zip(theirs, bucket.layout.views(bucket.grad), strict=True):
        view.normal_()
        a.grad = view.float() / 3
    one.step()
    flat.step(torch.tensor([3.0]), torch.zeros(()), absent=[])
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)


def test_parameters_keep_identity_shape_and_memory_format() -> None:
    image = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    value = image.detach().clone()
    buckets = buckets_of([image], [1])
    optimizer = AdamW([image])
    flat = FlatStep(optimizer, buckets)
    assert torch.equal(image, value)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert image.data_ptr() == flat.params[0].data_ptr()
    image.grad = buckets[0].layout.views(buckets[0].grad)[0]
    flat.step(torch.ones(()), torch.zeros(()))
    assert optimizer.state[image]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_hooks_and_zero_grad() -> None:
    pair = Pair(MAKERS["adamw"])
    heard: list[str] = []
    pair.optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    pair.optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    pair.step()
    assert heard == ["before", "after"]
    pair.optimizer._optimizer_step_post_hooks.clear()
    pair.step()
    assert heard == ["before", "after", "before"]  # also one that is alone
    for hook in (pair.optimizer.register_step_post_hook, register_optimizer_step_post_hook):
        pair.optimizer._optimizer_step_pre_hooks.clear()
        handle = hook(lambda *_: heard.append("alone"))
        pair.step()
        assert heard.pop() == "alone"
        handle.remove()
    pair.optimizer.zero_grad()
    assert all(param.grad is None for param in pair.ours)
    before = [param.clone() for param in pair.ours]
    pair.flat.step(torch.ones(1), torch.zeros(()), absent=range(7))
    assert all(torch.equal(one, other) for one, other in zip(before, pair.ours, strict=True))


def test_a_profiler_sees_the_step() -> None:
    pair = Pair(MAKERS["adamw"])
    pair.gradients()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pair.flat.step(torch.ones(1), torch.zeros(()))
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}


def test_the_optimizers_own_step_still_works() -> None:
    pair = Pair(MAKERS["adamw"])
    pair.step()
    pair.gradients()
    pair.torch.step()
    pair.optimizer.step()
    pair.step()
    pair.compare(1e-6, 1e-7)
    pair.optimizer.load_state_dict(_cloned(pair.torch.state_dict()))
    pair.gradients()
    pair.torch.step()
    pair.optimizer.step()  # on what was loaded
    pair.step()
    pair.compare(1e-6, 1e-7)


def test_weights_that_were_put_elsewhere_are_stepped_on() -> None:
    pair = Pair(MAKERS["adamw"])
    pair.step()
    for tensors in (pair.theirs, pair.ours):
        tensors[1].data = torch.full_like(tensors[1], 3.0)
    pair.step()
    pair.compare(1e-6, 1e-7)


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum"])
def test_no_host_read_and_no_copy(name: str) -> None:
    pair = Pair(MAKERS[name])
    pair.step()
    pair.gradients()
    with Operations() as watched:
        decision = pair.decide()
        pair.flat.step(decision.divisor, decision.found_inf)
    assert watched.host_reads == 0
    assert watched.largest <= 256


def test_an_empty_parameter_is_no_piece_of_a_launch() -> None:
    pair = Pair(MAKERS["adamw"])
    pair.step([5])  # what lies before the empty one has no gradient
    fragments = [fragment for run, *_ in pair.flat._plan.launches for fragment in run._fragments]  # type: ignore[attr-defined]
    assert all(fragment.start < fragment.stop for fragment in fragments)
    assert len(fragments) == 2  # 0 to 3, and the scalar


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {"fused": False}, {}], ids=str)
def test_counts_go_to_the_host_unless_torch_keeps_them_on_the_device(options: dict[str, bool]) -> None:
    state = {0: {"step": torch.ones(())}, 1: {"step": 2}, 2: {}}
    groups = [{"params": [0, 1, 2, 3], **options}]
    found = _steps_as_torch(None, {"state": state, "param_groups": groups})  # type: ignore[arg-type]
    assert found == {"state": state, "param_groups": groups}
    moved = [number for number in state if found["state"][number] is not state[number]]
    assert moved == ([] if any(options.values()) else [0])


def test_what_is_refused() -> None:
    params = parameters(torch.float32, "cpu")
    assert why_not(AdamW(params)) is None
    assert "amsgrad" in str(why_not(AdamW(params, amsgrad=True)))
    assert "maximize" in str(why_not(SGD(params, maximize=True)))
    assert "differentiable" in str(why_not(Adam(params, differentiable=True)))
    assert "eps > 0" in str(why_not(AdamW(params, eps=0.0)))
    assert "NAdam" in str(why_not(NAdam(params)))
    mixed = [*params, *parameters(torch.bfloat16, "cpu")]
    assert "half-precision" in str(why_not(SGD(mixed)))
    assert why_not(AdamW(mixed)) is None
    turn = torch.nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    assert "complex" in str(why_not(AdamW([*params, turn])))
    assert "betas" in str(_unfit({"betas": (0.9, torch.tensor(0.99))}))
    assert "amsgrad" in str(why_not(AdamW([{"params": params}, {"params": [], "amsgrad": True}])))
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    assert "betas" in str(why_not(AdamW(params, betas=betas, fused=True, capturable=True)))

    class Mine(AdamW):
        pass

    assert "not Mine" in str(why_not(Mine(params)))
    with pytest.raises(GradientError, match="Use ScaledStep"):
        FlatStep(NAdam(params), buckets_of(params, [7]))


def test_buckets_that_do_not_fit() -> None:
    params = parameters(torch.float32, "cpu")
    with pytest.raises(GradientError, match="parameter 5 of group 0, of shape \\(129, 17\\), is in no bucket"):
        FlatStep(AdamW(params), buckets_of(params[:5], [5]))
    with pytest.raises(GradientError, match="twice"):
        FlatStep(AdamW(params), [*buckets_of(params, [7]), *buckets_of(params[:1], [1])])
    with pytest.raises(GradientError, match="no buckets were given"):
        FlatStep(AdamW([torch.nn.Parameter(torch.zeros(1), requires_grad=False)]), [])


def test_changes_after_the_start_are_met_with_an_error() -> None:
    pair = Pair(MAKERS["adamw"])
    pair.gradients()
    pair.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(GradientError, match="flat step does not support amsgrad"):
        pair.flat.step(torch.ones(1), torch.zeros(()))
    pair.optimizer.param_groups[0]["amsgrad"] = False
    pair.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(GradientError, match="Make a new FlatStep"):
        pair.flat.step(torch.ones(1), torch.zeros(()))


def test_close_takes_the_hooks_away() -> None:
    pair = Pair(MAKERS["adamw"])
    pair.step()
    state = _cloned(pair.optimizer.state_dict())
    pair.flat.close()
    pair.optimizer.load_state_dict(state)
    param = pair.ours[1]
    assert pair.optimizer.state[param]["exp_avg"].data_ptr() == state["state"][1]["exp_avg"].data_ptr()


def test_under_another_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        pair = Pair(MAKERS["adamw"], torch.float64)
        for absent in PATTERNS:
            pair.step(absent)
        pair.compare(1e-12, 1e-13)
    finally:
        torch.set_default_dtype(torch.float32)


# -- flat state -------------------------------------------------------------------------------------------
# Buckets that lie one after another in one gradient buffer become one; all others stay as they are.


SIZES = [(3, 5), (7,), (2, 2), (40,)]


def buckets_in(dtypes: list[torch.dtype], gap: int = 0) -> list[FlatBucket]:
    """One bucket per size, in one buffer per dtype; `gap` elements lie before the last one."""
    buffers = {dtype: torch.arange(400.0).to(dtype) for dtype in dtypes}
    starts = dict.fromkeys(dtypes, 0)
    found = []
    for at, (shape, dtype) in enumerate(zip(SIZES, dtypes, strict=True)):
        members: list[Tensor] = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for _ in range(2)]
        layout = FlatLayout(members)
        start = starts[dtype] + (gap if at == len(SIZES) - 1 else 0)
        found.append(FlatBucket(layout, members, buffers[dtype][start : start + layout.numel], [at, at]))
        starts[dtype] = start + layout.numel
    return found


@pytest.mark.parametrize("first", [0, 1])
def test_neighbours_become_one_with_every_view_where_it_was(first: int) -> None:
    buckets = buckets_in([torch.float32] * 4)[first:]
    (joined,) = join_neighbours(buckets)
    assert [id(member) for member in joined.members] == [id(m) for bucket in buckets for m in bucket.members]
    before = [view for bucket in buckets for view in bucket.layout.views(bucket.grad)]
    views = joined.layout.views(joined.grad)
    assert [view.data_ptr() for view in views] == [view.data_ptr() for view in before]
    assert [view.shape for view in views] == [view.shape for view in before]
    assert joined.slots == [0, 0, 1, 1, 2, 2, 3, 3][2 * first :]
    assert joined.grad.numel() == sum(bucket.grad.numel() for bucket in buckets)


@pytest.mark.parametrize(
    ("buckets", "lengths"),
    [
        (buckets_in([torch.float32] * 4, gap=16), [6, 2]),
        (buckets_in([torch.float32, torch.float32, torch.float64, torch.float64]), [4, 4]),
        (buckets_in([torch.float32, torch.float64] * 2), [2, 2, 2, 2]),
    ],
    ids=["a gap", "two buffers", "in turn"],
)
def test_others_stay_apart(buckets: list[FlatBucket], lengths: list[int]) -> None:
    assert [len(bucket.members) for bucket in join_neighbours(buckets)] == lengths


@pytest.mark.parametrize(
    "other", ["memory", "dtype of parameters", "scattered gradients", "scattered gradients of both"]
)
def test_what_would_fit_by_its_offsets_stays_apart_all_the_same(other: str) -> None:
    first, second, *_ = buckets_in([torch.float32] * 4)
    layout, members, grad = second.layout, second.members, second.grad
    if other == "memory":
        grad = torch.zeros(400)[grad.storage_offset() :][: grad.numel()]
    elif other == "dtype of parameters":
        members = [torch.nn.Parameter(member.detach().bfloat16()) for member in members]
        layout = FlatLayout(members)
        grad = first.grad.as_strided((layout.numel,), (1,), grad.storage_offset())
    else:
        grad = ScatteredGradient(layout)
    if other.endswith("both"):
        first = FlatBucket(first.layout, first.members, ScatteredGradient(first.layout), first.slots)
    pair = [first, FlatBucket(layout, members, grad, second.slots)]
    for order in (pair, pair[::-1]):
        assert all(one is before for one, before in zip(join_neighbours(order), order, strict=True))


def test_parameters_that_have_a_flat_buffer_already_keep_it() -> None:
    buckets = buckets_in([torch.float32] * 4)
    buckets[1].params = torch.zeros(buckets[1].layout.numel)
    BucketState(buckets[1], 0).reclaim()  # nothing to bring back
    assert [len(bucket.members) for bucket in join_neighbours(buckets)] == [2, 2, 4]


@pytest.mark.parametrize(("limit", "lengths"), [(95, [64, 32, 96]), (96, [96, 96]), (100, [96, 96]), (192, [192])])
def test_what_is_joined_has_a_limit(limit: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert flat_step.JOINED >= 1 << 20
    monkeypatch.setattr(flat_step, "JOINED", limit)
    joined = join_neighbours(buckets_in([torch.float32] * 4))
    assert [bucket.grad.numel() for bucket in joined] == lengths


def test_addresses_are_written_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[int]] = []
    assert norm.pinned(SimpleNamespace(pin_memory=lambda: "pinned")) == "pinned"  # type: ignore[arg-type]
    monkeypatch.setattr(norm, "pinned", lambda numbers: (written.append(numbers.tolist()), numbers)[1])
    bucket, *_ = buckets_in([torch.float32] * 4)
    gradient = ScatteredGradient(bucket.layout)
    for addresses in ([64, 128], [64, 128], [64, 0]):
        gradient.point_to(addresses)
        assert gradient.addresses.tolist() == addresses
    assert written == [[64, 128], [64, 0]]
    assert gradient.limits.tolist() == [span.stop for span in bucket.layout.spans]
    assert gradient.numel() == bucket.layout.numel


@pytest.mark.parametrize(("numel", "members"), [(0, 1), (1, 2), (-1, 2)])
def test_a_layout_that_does_not_fit_is_refused(numel: int, members: int) -> None:
    bucket, *_ = buckets_in([torch.float32] * 4)
    grad = torch.zeros(bucket.layout.numel + numel)
    with pytest.raises(GradientError, match=f"fit {members} parameters and a gradient buffer of {len(grad)} elements"):
        FlatBucket(bucket.layout, bucket.members[:members], grad, bucket.slots)


def test_parameters_that_were_given_other_memory_come_back_with_their_values() -> None:
    bucket, *_ = buckets_in([torch.float32] * 4)
    state = BucketState(bucket, 0)
    first, second = bucket.members
    second.data = torch.full_like(second, 7.0)
    state.reclaim()
    home = bucket.layout.views(state.params)[1]
    assert second.data_ptr() == home.data_ptr()
    assert bool((home == 7).all())
    first.data = torch.zeros_like(first, dtype=torch.float64)
    with pytest.raises(GradientError, match=r"torch.float32 on cpu, was changed .* torch.float64"):
        state.reclaim()
    first.data = torch.zeros(2)
    with pytest.raises(GradientError, match=r"a parameter of shape \(3, 5\), .* was changed to shape \(2,\)"):
        state.reclaim()

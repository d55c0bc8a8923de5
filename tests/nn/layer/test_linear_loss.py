"""Cross entropy fused with the classifier: equal to the unfused one, on whole and on split vocabularies, chunk by chunk."""

from __future__ import annotations

import importlib.util
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import colonnade.nn.layer
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, PlacementError
from colonnade.nn.layer import Classifier, CrossEntropyLoss, LinearCrossEntropyLoss, Whole, arrange, cross_entropy
from colonnade.nn.layer.modes import TwoD
from colonnade.testing import run_world

CLASSES, HIDDEN = 11, 7


def _case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Activations, weight, bias, labels; the last row is ignored but for one label."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)
        for shape in ((4, 6, HIDDEN), (CLASSES, HIDDEN), (CLASSES,))
    )
    labels = torch.randint(0, CLASSES, (4, 6), generator=draw)
    labels[3, 1:] = -100
    return hidden, weight, bias, labels


def _plain(smoothing: float, reduction: str, biased: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Loss, and gradients of activations, weight and bias, by torch."""
    hidden, weight, bias, labels = _case(dtype)
    leaves = [each.requires_grad_() for each in (hidden, weight, *([bias] if biased else []))]
    logits = F.linear(hidden, weight, bias if biased else None).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), reduction=reduction, label_smoothing=smoothing)
    (1.5 * loss).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def _whole() -> Whole:
    return Whole(ParallelContext())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 24, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_equals_the_unfused_one(biased, chunk, smoothing):
    for reduction in ("mean", "sum"):
        hidden, weight, bias, labels = _case()
        leaves = [each.requires_grad_() for each in (hidden, weight, *([bias] if biased else []))]
        criterion = LinearCrossEntropyLoss(
            reduction=reduction, label_smoothing=smoothing, chunk=chunk, arrangement=_whole()
        )
        loss = criterion(hidden, weight, labels, bias=bias if biased else None)
        (1.5 * loss).backward(retain_graph=True)
        found = [loss.detach(), *(leaf.grad for leaf in leaves)]
        torch.testing.assert_close(found, _plain(smoothing, reduction, biased), rtol=1e-12, atol=1e-13)
        before = [leaf.grad.clone() for leaf in leaves]
        (1.5 * loss).backward()  # as the backward pass of a pipeline stage in two parts
        for leaf, once in zip(leaves, before, strict=True):
            torch.testing.assert_close(leaf.grad, 2 * once)


def test_classes_that_a_bias_of_minus_infinity_rules_out():
    """As those that pad a vocabulary. Their logits are no part of the loss, and their gradients are zero."""
    hidden, weight, bias, labels = _case()
    bias[7:], labels = -torch.inf, labels.where(labels < 0, labels % 7)
    hidden.requires_grad_(), weight.requires_grad_()
    truth = F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, 1), labels.flatten())
    found = LinearCrossEntropyLoss(chunk=5, arrangement=_whole())(hidden, weight, labels, bias=bias)
    wanted, given = (torch.autograd.grad(loss, (hidden, weight)) for loss in (truth, found))
    torch.testing.assert_close([found, *given], [truth, *wanted], rtol=1e-12, atol=1e-13)


def test_half_precision_is_summed_in_fp32():
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)):
        hidden, weight, _, labels = _case(dtype)
        hidden.requires_grad_(), weight.requires_grad_()
        loss = LinearCrossEntropyLoss(chunk=5, arrangement=_whole())(hidden, weight, labels)
        (1.5 * loss).backward()
        assert loss.dtype is torch.float32
        assert (hidden.grad.dtype, weight.grad.dtype) == (dtype, dtype)
        exact = _plain(0.0, "mean", False)
        for found, wanted in zip([loss.detach(), hidden.grad, weight.grad], exact, strict=True):
            torch.testing.assert_close(
                found.double(), wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item()
            )


def test_gradients_below_what_fp16_can_say_are_not_lost():
    """A class of which the probability is 2e-8: its weight's gradient is that times an activation of 100."""
    hidden, weight = torch.tensor([[100.0]]).half(), torch.tensor([[0.0], [-0.1772]]).half().requires_grad_()
    LinearCrossEntropyLoss(arrangement=_whole())(hidden, weight, torch.tensor([0])).backward()
    assert 1e-6 < weight.grad[1].item() < 3e-6


def test_what_is_ignored_may_have_logits_beyond_every_number():
    hidden, weight, _, labels = _case(torch.float16)
    hidden[3, 1:] = 6e4
    hidden.requires_grad_(), weight.requires_grad_()
    loss = LinearCrossEntropyLoss(arrangement=_whole())(hidden, weight, labels)
    loss.backward()
    assert loss.isfinite()
    assert (hidden.grad[3, 1:] == 0).all()
    assert weight.grad.isfinite().all()


def test_autocast_leaves_the_gradient_of_an_fp32_weight_in_fp32():
    hidden, weight, _, labels = _case(torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = LinearCrossEntropyLoss(chunk=7, arrangement=_whole())(hidden, weight, labels)
    loss.backward()
    assert weight.grad.dtype is torch.float32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


def test_what_needs_no_gradient_gets_none():
    hidden, weight, _, labels = _case()
    criterion = LinearCrossEntropyLoss(chunk=5, arrangement=_whole())
    with torch.no_grad():
        assert not criterion(hidden, weight.requires_grad_(), labels).requires_grad
    criterion(hidden, weight, labels).backward()
    assert hidden.grad is None
    torch.testing.assert_close(weight.grad, _plain(0.0, "mean", False)[2] / 1.5)


@pytest.mark.parametrize("needed", [*product((False, True), repeat=3)], ids=str)
def test_no_product_is_made_for_a_gradient_that_nobody_needs(needed):
    hidden, weight, bias, labels = _case()
    leaves = [leaf.requires_grad_(wanted) for leaf, wanted in zip((hidden, weight, bias), needed, strict=True)]
    criterion = LinearCrossEntropyLoss(reduction="sum", chunk=100, arrangement=_whole())
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), Products() as seen:
            loss = criterion(hidden, weight, labels, bias=bias)
        assert seen.count == 1 + enabled * (needed[0] + needed[1])
        assert loss.requires_grad == (enabled and any(needed))
        if loss.requires_grad:
            assert [tensor is not None for tensor in loss.grad_fn.saved_tensors] == [*needed]
            loss.backward()
    wanted = _plain(0.0, "sum", True)[1:]
    for leaf, truth in zip(leaves, wanted, strict=True):
        if leaf.requires_grad:
            torch.testing.assert_close(leaf.grad, truth / 1.5)


class Products(TorchDispatchMode):
    """How many products of matrices run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "dtype", "found", "of_triton"),
    [
        ("cuda", torch.float32, True, True),
        ("cuda", torch.bfloat16, True, True),
        ("cuda", torch.float64, True, False),
        ("cuda", torch.float32, False, False),
        ("cpu", torch.float32, True, False),
        ("cpu", torch.float64, True, False),
        ("cpu", torch.float32, False, False),
    ],
)
def test_kernels_of_triton_are_for_what_they_can_do(device, dtype, found, of_triton, monkeypatch):
    stand_in = SimpleNamespace(statistics="statistics", gradient="gradient")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if found else None)
    monkeypatch.setitem(sys.modules, "colonnade.nn.nn_kernels", stand_in)
    monkeypatch.setattr(colonnade.nn.layer, "cross_entropy_kernels", stand_in, raising=False)
    plain = (cross_entropy._statistics, cross_entropy._gradient)
    expected = ("statistics", "gradient") if of_triton else plain
    assert cross_entropy._kernels(torch.device(device), dtype) == expected


class OnGpu(Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


class Accumulates(TorchDispatchMode):
    """Does what a GPU has an operator for: the product of half precision, added up in fp32."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.addmm.dtype_out:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        total, left, right, dtype = args
        return kwargs["out"].copy_(total + left.to(dtype) @ right.to(dtype))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_products_of_half_precision_are_added_up_in_fp32(on_gpu):
    left, right = (torch.randn(3, 3, generator=torch.Generator().manual_seed(at)).bfloat16() for at in (0, 1))
    total = torch.full((3, 3), 100.0)
    with Accumulates() as seen:
        cross_entropy._add_product(total, left.as_subclass(OnGpu) if on_gpu else left, right)
    assert seen.calls == on_gpu
    torch.testing.assert_close(total, 100 + (left.float() @ right.float()), rtol=0, atol=1e-4 if on_gpu else 5e-2)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any op makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(each.numel() for each in tree_leaves(made) if isinstance(each, Tensor))])
        return made


def test_no_tensor_has_the_logits_of_more_than_a_chunk():
    tokens, classes, chunk = 512, 300, 16
    hidden, weight = (torch.randn(rows, 4, requires_grad=True) for rows in (tokens, classes))
    with Largest() as seen:
        criterion = LinearCrossEntropyLoss(label_smoothing=0.1, chunk=chunk, arrangement=_whole())
        criterion(hidden, weight, torch.arange(tokens) % classes).backward()
    assert seen.numel == chunk * classes


def test_counts_as_the_other_losses_do():
    hidden, weight, _, labels = _case()
    total, count = LinearCrossEntropyLoss(reduction="sum_and_count", arrangement=_whole())(hidden, weight, labels)
    mean = LinearCrossEntropyLoss(arrangement=_whole())(hidden, weight, labels)
    assert count.item() == 19
    assert [each.item() for each in mean.sum_and_count] == [total.item(), 19]
    nothing = LinearCrossEntropyLoss(reduction="sum_and_count", arrangement=_whole())(
        hidden, weight, labels.fill_(-100)
    )
    assert [each.item() for each in nothing] == [0.0, 0]


def test_bad_input_is_refused_by_name():
    hidden, weight, _, labels = _case()
    criterion = LinearCrossEntropyLoss(arrangement=_whole())
    with pytest.raises(ConfigError, match=r"label 11 is not one of the 11 classes \(0 to 10\)"):
        criterion(hidden, weight, labels.fill_(CLASSES))
    with pytest.raises(PlacementError, match=r"labels have shape \(4, 5\)"):
        criterion(hidden, weight, labels[:, 1:])
    for shape in ((CLASSES, 6), (1, CLASSES, HIDDEN), (HIDDEN,)):
        with pytest.raises(PlacementError, match="second dimension of the weight"):
            criterion(hidden, torch.zeros(shape), labels)
    with pytest.raises(ConfigError, match="reduction='none'"):
        LinearCrossEntropyLoss(reduction="none", arrangement=_whole())
    with pytest.raises(ConfigError, match="chunk=0"):
        LinearCrossEntropyLoss(chunk=0, arrangement=_whole())
    with pytest.raises(ConfigError, match="not TwoD"):
        LinearCrossEntropyLoss(arrangement=TwoD(ParallelContext()))


def _split(ranks: int, dtype: torch.dtype = torch.float64) -> None:
    """Uneven parts of the vocabulary; one class leaves a rank with nothing, and padding another with nothing that counts."""
    tolerance = 1e-10 if dtype is torch.float64 else 2e-2
    parallel = {"tensor": {"size": ranks, "mode": "1d"}}
    with launch({"parallel": parallel}, context=ParallelContext(), verbose=False) as gpc:
        for sequence_split in (False, True):
            here = arrange(gpc, sequence_split)
            for classes, smoothing, padding in ((CLASSES, 0.0, 0), (CLASSES, 0.3, 0), (1, 0.0, 0), (CLASSES, 0.0, 6)):
                hidden, weight, bias, labels = (each.to(gpc.device) for each in _case(dtype))
                labels = labels.where(labels < 0, labels % (classes - padding))
                bias[classes - padding : classes] = -torch.inf
                plain = nn.Linear(HIDDEN, classes, dtype=dtype, device=gpc.device)
                with torch.no_grad():
                    plain.weight.copy_(weight[:classes]), plain.bias.copy_(bias[:classes])
                head = Classifier.from_module(plain, arrangement=here)
                at = gpc.get_local_rank(ParallelMode.PARALLEL_1D)
                part = hidden.chunk(ranks, 1)[at] if sequence_split else hidden
                found: list[list[Tensor]] = []
                for fused in (False, True):
                    x = part.clone().requires_grad_()
                    head.zero_grad()
                    options: Any = {"label_smoothing": smoothing, "arrangement": here}
                    if fused:
                        criterion = LinearCrossEntropyLoss(chunk=5, **options)
                        loss = criterion(x, head.weight, labels, bias=head.bias)
                    else:
                        loss = CrossEntropyLoss(**options)(head(x), labels)
                    loss.backward()
                    found.append([loss.detach(), x.grad, head.weight.grad.clone(), head.bias.grad.clone()])
                for one, other in zip(*found, strict=True):
                    apart, size = (other - one).double().norm().item(), one.double().norm().item()
                    assert apart <= tolerance * max(size, 1e-3), (classes, smoothing, apart, size)


def test_a_split_vocabulary():
    run_world(2, _split, 2)

"""The split cross entropy against torch's: every reduction, huge logits, half precision, everything ignored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.errors import ConfigError
from colonnade.nn.layer import Arrangement, Classifier, CrossEntropyLoss, Whole, arrange, gather_output, partition_input
from colonnade.testing import compare, gather_weights, plain_gradients
from tests.ranks import on_ranks

CLASSES = 10


def _case(scale: float, dtype: torch.dtype, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(4, 6, classes, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, classes, (4, 6), generator=generator)
    labels[1, :4] = -1
    return logits, labels


def _both(logits: Tensor, labels: Tensor, here: Arrangement, **options: object) -> tuple[list[Tensor], list[Tensor]]:
    """[loss, gradient] of torch's and of ours, on whole logits."""
    found = []
    for ours in (False, True):
        x = logits.clone().requires_grad_()
        if ours:
            part = partition_input(x, side="inner", arrangement=here)
            loss = CrossEntropyLoss(ignore_index=-1, arrangement=here, **options)(part, labels)
        else:
            exact = x.float() if x.dtype is torch.bfloat16 else x
            loss = nn.CrossEntropyLoss(ignore_index=-1, **options)(exact.flatten(0, 1), labels.flatten())
            loss = loss.view(labels.shape) if loss.dim() else loss
        loss.backward(torch.linspace(1, 2, loss.numel()).to(loss.dtype).view(loss.shape))
        found.append([loss.detach(), x.grad])
    return found[0], found[1]


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {"tensor": {"size": 2, "mode": "1d"}}),
        pytest.param(3, {"tensor": {"size": 3, "mode": "1d"}}, marks=pytest.mark.slow),
        pytest.param(4, {"tensor": {"size": 4, "mode": "2d"}}, marks=pytest.mark.slow),
    ],
)
@on_ranks("ranks")
def test_equals_torchs(ranks, config: dict[str, object]):
    with launch({"parallel": config}, context=ParallelContext(), verbose=False) as gpc:
        here = arrange(gpc)
        for scale, dtype in ((1.0, torch.float64), (1e4, torch.float64), (3.0, torch.float32), (3.0, torch.bfloat16)):
            tolerance = 1e-12 if dtype is torch.float64 else 1e-5 if dtype is torch.float32 else 1e-2
            for options in ({}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.3}):
                wanted, found = _both(*_case(scale, dtype), here, **options)
                for one, other in zip(wanted, found, strict=True):
                    torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance * 1e-2)
        few = 4 if config["tensor"]["mode"] == "2d" else 3  # 1d leaves the last rank with one class
        for one, other in zip(*_both(*_case(1.0, torch.float64, few), here, label_smoothing=0.1), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)
        logits, labels = _case(1.0, torch.float64)
        part = partition_input(logits, side="inner", arrangement=here)
        assert torch.equal(gather_output(part, side="inner", features=CLASSES, arrangement=here), logits)
        nothing = CrossEntropyLoss(ignore_index=-1, arrangement=here)(part, torch.full_like(labels, -1))
        assert nothing.isnan()
        no_class = labels.index_fill(0, torch.tensor([0]), CLASSES)
        with pytest.raises((ConfigError, IndexError), match=rf"{CLASSES} is (not one of|out of)"):
            CrossEntropyLoss(arrangement=here)(part, no_class)


@pytest.mark.parametrize("classes", [1, 5])
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
def test_whole_logits_too(classes, smoothing):
    logits, labels = _case(1.0, torch.float64, classes)
    for reduction in ("mean", "sum", "none"):
        options = {"label_smoothing": smoothing, "reduction": reduction}
        wanted, found = _both(logits, labels, Whole(ParallelContext()), **options)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    total, count = CrossEntropyLoss(-1, "sum_and_count", arrangement=Whole(ParallelContext()))(logits, labels)
    assert (total.shape, count.item()) == ((), 20)


@on_ranks(4)
def test_a_sum_with_its_count_is_the_mean_over_uneven_ranks():
    config = {"parallel": {"data": 2, "tensor": {"size": 2, "mode": "1d"}}}
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, labels = _case(1.0, torch.float64)  # 4 of the first half are ignored, none of the second
    torch.manual_seed(0)
    plain = nn.Linear(8, CLASSES).double()
    wanted = nn.CrossEntropyLoss(ignore_index=-1)(plain(x).flatten(0, 1), labels.flatten())
    truth = plain_gradients(plain, wanted)
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        here = arrange(gpc)
        head = Classifier.from_module(plain, arrangement=here)
        criterion = CrossEntropyLoss(ignore_index=-1, reduction="sum_and_count", arrangement=here)
        engine = initialize(head, torch.optim.SGD(head.parameters(), lr=1.0), criterion, context=gpc)[0]
        at = gpc.get_local_rank(ParallelMode.DATA)
        before = gather_weights(head, gpc)
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x.chunk(2)[at]), labels.chunk(2)[at]))
        engine.step()
        after = gather_weights(head, gpc)
        compare(truth, {name: before[name] - after[name] for name in before}, 1e-10)
        engine.close()


def test_refuses_what_it_does_not_do():
    with pytest.raises(ConfigError, match="class weights"):
        CrossEntropyLoss.from_module(nn.CrossEntropyLoss(weight=torch.ones(3)))
    taken = CrossEntropyLoss.from_module(nn.CrossEntropyLoss(ignore_index=3, reduction="sum", label_smoothing=0.1))
    assert (taken.ignore_index, taken.reduction, taken.label_smoothing) == (3, "sum", 0.1)
    with pytest.raises(ConfigError, match="'average'"):
        CrossEntropyLoss(reduction="average")
    with pytest.raises(ConfigError, match=r"label_smoothing is 1\.5"):
        CrossEntropyLoss(label_smoothing=1.5)
    with pytest.raises(ConfigError, match=r"label_smoothing is -0\.1"):
        CrossEntropyLoss(label_smoothing=-0.1)

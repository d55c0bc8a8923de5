"""A mean that leaves entries out is the mean over the whole batch, however it is spread; counts that are none are refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from colonnade._launch import launch
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.engine.engine import LossBook
from colonnade.engine.schedule import loss as loss_module
from colonnade.engine.schedule.loss import LossForm, MeanWatch, own_loss, split_loss
from colonnade.errors import GradientError
from colonnade.nn import CrossEntropyLoss
from colonnade.parallel.split import split
from colonnade.testing import compare, gather_gradients, run_world
from colonnade.trainer.records import weigh
from tests.engine.test_engine import numbers, start, world_of_one
from tests.ranks import on_ranks

CLASSES = 5
WEIGHT = torch.linspace(0.5, 1.5, CLASSES, dtype=torch.float64)

LOSSES: dict[str, Callable[[ParallelContext | None], Any]] = {
    "torch": lambda _: nn.CrossEntropyLoss(ignore_index=-1),
    "smoothed": lambda _: nn.CrossEntropyLoss(ignore_index=-1, label_smoothing=0.1, weight=WEIGHT),
    "function": lambda _: partial(F.cross_entropy, ignore_index=-1, weight=WEIGHT),
    "nll": lambda _: lambda output, label: F.nll_loss(output.log_softmax(-1), label, ignore_index=-1),
    "ours": lambda gpc: CrossEntropyLoss(ignore_index=-1) if gpc is not None else nn.CrossEntropyLoss(ignore_index=-1),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def batch(part: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    """Of parts 0, 1, 2 and 3 other numbers of labels count, and of part 2 none."""
    generator = torch.Generator().manual_seed(part)
    label = torch.randint(CLASSES, (rows,), generator=generator)
    label[: [5, 1, rows, 2][part]] = -1
    return torch.randn(rows, 4, generator=generator, dtype=torch.float64), label


def joined(parts: range) -> tuple[Tensor, Tensor]:
    pieces = [batch(part) for part in parts]
    return torch.cat([data for data, _ in pieces]), torch.cat([label for _, label in pieces])


def truth(loss: str, parts: range) -> tuple[dict[str, Tensor], Tensor]:
    model, (data, label) = net(), joined(parts)
    value = LOSSES[loss](None)(model(data), label)
    value.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, value.detach()


def _pipeline() -> None:
    """Micro-batches leave out unequally many, and one counts nothing."""
    for name in LOSSES:
        config = {"parallel": {"pipeline": 2}, "schedule": {"type": "OneFOneB", "num_microbatches": 4}}
        with launch({**config, "gradient_accumulation": 2}, context=ParallelContext(), verbose=False) as gpc:
            whole = net()
            engine = initialize(
                split(whole, num_stages=2), lambda p: torch.optim.SGD(p, lr=0.0), LOSSES[name](gpc), context=gpc
            )[0]
            expected = truth(name, range(4))[0]
            for parts in (range(2), range(2, 4)):
                evaluated = engine.execute_schedule(iter([joined(parts)]), forward_only=True)[2]
                loss = engine.execute_schedule(iter([joined(parts)]))[2]
                torch.testing.assert_close(loss, truth(name, parts)[1])
                torch.testing.assert_close(evaluated, loss)
                engine.step()
            compare(expected, gather_gradients(engine.model, gpc), 1e-12)
            engine.close()


def _data(loops: bool) -> None:
    for name in LOSSES:
        with launch({"gradient_accumulation": 2}, context=ParallelContext(), verbose=False) as gpc:
            model = net()
            engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.0), LOSSES[name](gpc), context=gpc)[0]
            for part in range(gpc.get_global_rank(), 4, 2):
                data, label = batch(part)
                if loops:
                    engine.backward(engine.criterion(engine(data), label))
                else:
                    engine.execute_schedule(iter([(data, label)]))
                engine.step()
            compare(truth(name, range(4))[0], gather_gradients(model, gpc), 1e-12)
            engine.close()


def _change_of_form() -> None:
    """All ranks together may change the form from step to step; one alone is refused on all, not waited for."""
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        model, rank = net(), gpc.get_global_rank()
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.0), context=gpc)[0]
        for step in range(5):
            data, label = batch(rank)
            out = engine(data)
            engine.zero_grad()
            engine.backward(F.cross_entropy(out, label, ignore_index=-1) if step != 3 else out.square().mean())
            engine.step()
            if step == 3:
                whole = net()
                whole(joined(range(2))[0]).square().mean().backward()
                truths = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
                compare(truths, gather_gradients(model, gpc), 1e-12)
        out = engine(data)
        engine.backward(F.cross_entropy(out, label, ignore_index=-1) if rank == 0 else 0 * out.sum())
        with pytest.raises(
            GradientError,
            match=r"some ranks .* as a mean\. To correct this, use one form.* give \(0 \* output.sum\(\), 0\)",
        ):
            engine.step()


@pytest.mark.slow
@on_ranks(2)
def test_a_mean_with_ignored_labels_is_the_mean_over_the_whole_batch():
    _pipeline()
    _change_of_form()
    _data(loops=True)
    _data(loops=False)


@pytest.mark.parametrize(
    ("loss", "counted"),
    [
        (lambda x, y: F.cross_entropy(x, y, ignore_index=-1), 4),
        (lambda x, y: F.cross_entropy(x.unsqueeze(-1), y.unsqueeze(-1), ignore_index=-1), 4),
        (lambda x, y: F.cross_entropy(x, y, ignore_index=-1, label_smoothing=0.2), 4),
        (lambda x, y: F.cross_entropy(x, y, ignore_index=-1, reduction="sum"), None),
        (lambda x, y: F.cross_entropy(x, y, ignore_index=-1) + 0.1 * x.square().sum() / 3, None),
        (lambda x, y: F.cross_entropy(x, x.softmax(-1).detach()), None),
        (lambda x, y: x.square().mean(), None),
    ],
)
def test_what_a_loss_is_a_mean_over_is_read_from_the_loss(loss, counted):
    x, (_, y) = torch.randn(6, CLASSES, dtype=torch.float64, requires_grad=True), batch(3)
    mean = loss(x, y)
    value, count = split_loss(mean)
    assert count is None if counted is None else int(count) == counted
    torch.testing.assert_close(value, mean * (counted or 1))


def _compiled(out: Tensor, label: Tensor) -> Tensor:
    return torch.compile(F.cross_entropy, backend="aot_eager")(out, label.where(label != -1, -100))


def _recomputed(out: Tensor, label: Tensor) -> Tensor:
    result = checkpoint(F.cross_entropy, out, label.where(label != -1, -100), use_reentrant=True)
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, label: F.cross_entropy(out, label, ignore_index=-1) + 0.1 * out.square().mean(),
        pytest.param(_compiled, marks=pytest.mark.slow),
        _recomputed,
    ],
)
def test_a_mean_of_means_that_nobody_can_mend_is_said_once(caplog, loss):
    with launch({"gradient_accumulation": 2}, context=ParallelContext(), verbose=False) as gpc:
        model = net()
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
        logging.getLogger("colonnade").propagate = True
        for _ in range(3):
            data, label = batch(0)
            out = engine(data)
            engine.backward(loss(out, label))
            engine.step()
        engine.close()
    said = [record.message for record in caplog.records if "(sum, count)" in record.message]
    assert len(said) == 1


NAN, INF = torch.tensor(math.nan), torch.tensor(math.inf)
WRONG = [math.nan, math.inf, -1, -0.5, None, "3", NAN, INF, torch.tensor(-0.5), torch.empty(0), torch.ones(2)]


@pytest.mark.parametrize("count", WRONG, ids=str)
def test_a_count_that_is_no_count_is_refused(count):
    with world_of_one() as gpc:
        engine = start(gpc)
        loss = engine.criterion(engine(numbers(3, 4, seed=0)), numbers(3, 2, seed=1))
        with pytest.raises(GradientError, match=r"the count of a loss .* in the sum, 0 or larger"):
            engine.backward((loss, count))
        engine.backward((loss, 3))  # nothing was counted or summed
        engine.step()


def _factor(book: LossBook, scaler: Any = None) -> Any:
    """What a book makes of its counts that no bucket carries."""
    sync: Any = SimpleNamespace(world=None)
    return book.scale(sync, scaler)


@pytest.mark.parametrize("count", [2, 0.5, 2.0, torch.tensor(2), torch.tensor([2.0]), 0, 0.0, torch.tensor(0)], ids=str)
def test_a_count_may_be_a_number_or_a_tensor_of_one_element(count):
    with world_of_one() as gpc:
        book = LossBook(gpc, 2)
        book.add(count)
        book.add(3)
        factor = _factor(book)
        assert factor.shape == ()
        assert factor.item() == 1 / (count + 3)


@pytest.mark.parametrize("count", [math.nan, math.inf, -2.0, -0.5])
def test_a_wrong_count_on_a_device_makes_the_step_not_finite(count):
    with world_of_one() as gpc:
        book = LossBook(gpc, 2)
        book.add(torch.tensor(9.0))
        book.add(torch.tensor(count))
        factor = _factor(book)
        assert not factor.isfinite()


def test_a_batch_without_anything_to_count_weighs_nothing():
    total, weight = weigh(torch.tensor(math.nan), torch.tensor(0.0), 4)
    assert isinstance(total, Tensor)
    assert (total.item(), float(weight)) == (0.0, 0.0)


@pytest.mark.parametrize(("accumulation", "is_one"), [(1, True), (2, False)])
def test_the_mean_of_one_pass_on_one_rank_stays_a_mean(accumulation, is_one):
    labels = torch.tensor([1, -100, 0])
    with world_of_one() as gpc:
        book = LossBook(gpc, accumulation)
        mean = F.cross_entropy(numbers(3, 4, seed=0).requires_grad_(), labels)
        value, count, over = book.read(mean)
        assert (value is mean, over.item()) == (is_one, 2)
        assert count is None if is_one else count.item() == 2
        plain = mean * 1.0
        assert book.read(plain) == (plain, None, None)
        value, count, over = book.read((mean, 5))
        assert (value is mean, count, over) == (True, 5, 5)


@pytest.mark.parametrize(
    ("parallel", "ranks", "share", "one_mean"),
    [
        ({}, 1, 1.0, True),
        ({"tensor": 2}, 2, 0.5, True),
        ({"pipeline": 2}, 2, 1.0, True),
        ({}, 2, 1.0, False),
        ({"tensor": 2, "pipeline": 2}, 12, 0.5, False),
    ],
)
def test_each_rank_reports_its_share_of_a_count(parallel, ranks, share, one_mean):
    layout = build_layout({"parallel": parallel}, ranks)
    context: Any = SimpleNamespace(layout=layout, device=torch.device("cpu"))
    book = LossBook(context, 1)
    assert (book._fraction, book._one_mean) == (share, one_mean)
    assert LossBook(context, 2)._one_mean is False
    book.add(4)
    assert book._numbers().tolist() == [4 * share, 0.0]


def test_a_run_keeps_the_form_of_its_first_loss():
    form = LossForm()
    assert form.counted is None
    mean = numbers(3, seed=0).requires_grad_().sum()
    assert form.read((mean, 3)) == (mean, 3)
    assert form.counted is True
    with pytest.raises(
        GradientError, match=r"^the loss was \(sum, count\) before and is a mean now\. To correct this, use one form"
    ):
        form.read(mean)
    form = LossForm()
    assert form.read(mean) == (mean, None)
    with pytest.raises(
        GradientError, match=r"^the loss was a mean before and is \(sum, count\) now\. To correct this, use one form"
    ):
        form.read((mean, 3))
    with pytest.raises(
        GradientError, match=r"^loss_everywhere=False is not possible with a loss given as \(sum, count\)"
    ):
        LossForm(allow_counts=False).read((mean, 3))
    labelled = F.cross_entropy(numbers(3, 4, seed=0).requires_grad_(), torch.tensor([1, -100, 0]))
    for allow, implicit, counted in ((True, True, True), (True, False, False), (False, True, False)):
        form = LossForm(allow, implicit)
        form.read(labelled)
        assert form.counted is counted


class HasLoss:
    loss = "mine"


@pytest.mark.parametrize(
    ("output", "loss"),
    [
        ({"loss": "mine", "x": 1}, "mine"),
        ({"x": 1}, None),
        (HasLoss(), "mine"),
        ((3.0, "logits"), 3.0),
        ((3.0, 2), (3.0, 2)),
        ([3.0, 2, 1], 3.0),
        ((), None),
        (("logits", 3.0), None),
        (3.0, 3.0),
        ("text", None),
    ],
)
def test_where_a_model_that_makes_its_loss_has_it(output, loss):
    assert own_loss(output) == loss


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            torch.ones(2),
            "a loss must be one number, but the loss is a tensor of shape (2,). Return the mean of the loss, or (sum, count)",
        ),
        ("text", "a loss must be one number, but the loss is str. Return the mean of the loss, or (sum, count)"),
        ((1, 2), "a loss must be a scalar tensor (a mean) or (sum, count), but the loss is a tuple of length 2"),
        (
            [torch.ones(()), 1, 2],
            "a loss must be a scalar tensor (a mean) or (sum, count), but the loss is a list of length 3",
        ),
        (
            (torch.ones(2), 2),
            "a loss must be one number, but the loss is a tensor of shape (2,). Return the mean of the loss, or (sum, count)",
        ),
    ],
)
def test_what_is_no_loss_is_said(loss, message):
    with pytest.raises(GradientError) as error:
        split_loss(loss)
    assert str(error.value).startswith(message)


def test_a_watch_looks_a_few_times_and_near_the_loss(monkeypatch):
    """Each look may wait for the device."""
    said: list[str] = []
    monkeypatch.setattr(loss_module, "get_dist_logger", lambda: SimpleNamespace(warning=said.append))
    x = numbers(3, 4, seed=0).requires_grad_()
    bad = F.cross_entropy(x, torch.tensor([1, -100, 0])) + x.sum()
    plain = x.square().mean()
    for looks, told in ((loss_module._LOOKS - 1, 1), (loss_module._LOOKS, 0)):
        watch = MeanWatch()
        for _ in range(looks):
            watch.look(plain)
        watch.look(bad)
        watch.look(bad)
        assert len(said) == told, looks
        said.clear()
    for depth, told in ((loss_module._NODES_SEEN - 1, 1), (loss_module._NODES_SEEN, 0)):
        loss = F.cross_entropy(x, torch.tensor([1, -100, 0]))
        for _ in range(depth):
            loss = loss.neg()
        MeanWatch().look(loss)
        assert len(said) == told, depth
        said.clear()
    MeanWatch().look(torch.ones(()))
    assert said == []


@pytest.mark.parametrize(
    ("labels", "ignored", "reduction", "is_said"),
    [
        ([1, -100, 0], -100, "mean", True),
        ([1, -100, 0], -100, "sum", False),
        ([1, 0, 1], 1, "mean", True),
        ([1, 0, 1], 2, "mean", False),
        ([1, 0, -3], -3, "mean", True),
    ],
)
def test_a_mean_that_leaves_entries_out_is_known_by_its_labels(labels, ignored, reduction, is_said):
    x = numbers(3, 4, seed=0).requires_grad_()
    loss = F.cross_entropy(x, torch.tensor(labels), ignore_index=ignored, reduction=reduction)
    assert loss_module._leaves_out(loss.grad_fn) is is_said


@pytest.mark.parametrize(
    ("labels", "weight", "counted"),
    [
        ([1, -100, 0], None, 2.0),
        ([1, -100, -100], None, 1.0),
        ([-100, -100, -100], None, 0.0),
        ([1, -100, -100], [1.0, 0.25, 1.0, 1.0], 0.25),
        ([1, 0, -100], [1.0, 0.25, 1.0, 1.0], 1.25),
    ],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_mean_times_what_it_is_over_is_the_sum_and_nothing_counts_nothing(labels, weight, counted, smoothing):
    weights = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    x, y = numbers(3, 4, seed=0).double().requires_grad_(), torch.tensor(labels)
    options = {"weight": weights, "label_smoothing": smoothing}
    total, count = split_loss(F.cross_entropy(x, y, **options))
    assert float(count) == counted
    torch.testing.assert_close(total, F.cross_entropy(x, y, reduction="sum", **options))


def test_only_a_smoothed_loss_of_one_log_softmax_counts_as_one():
    x, y = numbers(3, 4, seed=0).requires_grad_(), torch.tensor([1, -100, 0])
    own, other = x.log_softmax(-1), (2 * x).log_softmax(-1)
    nll = F.nll_loss(own, y)
    smooth, foreign = (each.masked_fill(y[:, None] < 0, 0.0).sum() / 2 * -0.2 for each in (own, other))
    assert split_loss(0.8 * nll + smooth)[1] == 2
    for loss in (0.8 * nll + foreign, nll / 2 + smooth, 0.8 * nll + smooth.exp(), nll + smooth, smooth + 0.8 * nll):
        assert split_loss(loss) == (loss, None)


@pytest.mark.parametrize(("labels", "is_said"), [([1, -100, 0], True), ([1, 2, 0], False), ([-100] * 3, True)])
def test_of_code_that_is_computed_again_the_labels_that_it_keeps_are_seen(labels, is_said):
    x = numbers(3, 4, seed=0).requires_grad_()
    loss = checkpoint(F.cross_entropy, x, torch.tensor(labels), use_reentrant=True)
    assert isinstance(loss, Tensor)
    assert loss_module._leaves_out(loss.grad_fn) is is_said
    assert loss_module._leaves_out((x * torch.full((4,), -100)).grad_fn) is False


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda loss: loss / 4, 1),
        (lambda loss: loss * 0.25, 1),
        (lambda loss: 0.25 * loss, 1),
        (lambda loss: loss.div_(4), 1),
        (lambda loss: loss / torch.tensor(4.0), 1),
        (lambda loss: (loss / 4, 12), 1),
        (lambda loss: loss, 0),
        (lambda loss: loss / 2, 0),
        (lambda loss: loss / 4 + 1, 0),
        (lambda loss: loss * 4, 0),
        (lambda loss: loss * 0, 0),
        (lambda loss: (loss, 4), 0),
    ],
)
def test_a_loss_that_is_divided_by_the_number_of_passes_is_said_once(monkeypatch, act, told):
    said: list[str] = []
    monkeypatch.setattr(
        loss_module, "get_dist_logger", lambda: SimpleNamespace(warning=lambda text, ranks: said.append(text))
    )
    with launch({"gradient_accumulation": 4}, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(net(), lambda p: torch.optim.SGD(p, lr=0.0), context=gpc)[0]
        for _ in range(8):
            engine.zero_grad()
            engine.backward(act(engine(batch(0)[0]).square().mean()))
            engine.step()
        engine.close()
    assert len(said) == told
    assert all("gradient_accumulation=4 divides it by 4 again" in text for text in said)


def _by_four(output, label):
    return F.mse_loss(output, label) / 4


def _by_eight(output, label):
    return F.mse_loss(output, label) / 8


def _sum_by_rows(output, label):
    return (output - label).square().sum(1).sum() / len(output)


def _piped(cases):
    """What each rank of a pipeline is told of its criterion, in training and then in an evaluation."""
    found = []
    for criterion, config, rows in cases:
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss_module, "get_dist_logger", lambda said=said: _Said(said))
            with launch({"parallel": {"pipeline": 2}, **config}, context=ParallelContext(), verbose=False) as gpc:
                parts = split([nn.Linear(4, 4), nn.Linear(4, 4)])
                engine = initialize(parts, lambda p: torch.optim.SGD(p, lr=0.0), criterion, context=gpc)[0]
                given = (torch.ones(rows, 4), torch.zeros(rows, 4))
                for _ in range(2 * engine.accumulation):
                    engine.zero_grad()
                    engine.execute_schedule(iter([given]))
                    engine.step()
                engine.execute_schedule(iter([given]), forward_only=True)
                engine.close()
        found.append(said)
    return found


class _Said:
    def __init__(self, said):
        self.said = said

    def warning(self, text, parallel_mode=None, ranks=None):
        self.said += [text] * (ranks is None or dist.get_rank() in ranks)


def test_in_a_pipeline_the_rank_with_the_loss_says_so_of_passes_and_of_micro_batches():
    passes, pieces = {"num_microbatches": 2, "gradient_accumulation": 4}, {"num_microbatches": 4}
    summed = {"schedule": {"type": "PipelineSchedule", "num_microbatches": 4, "loss_reduction": "sum"}}
    cases = [(_by_four, passes, 12), (_by_four, pieces, 12), (_by_eight, passes, 12)]
    cases += [(_by_four, summed, 12), (_sum_by_rows, pieces, 16)]  # what the user has to divide by
    first, last = run_world(2, _piped, cases).values
    assert first == [[]] * 5
    assert [len(said) for said in last] == [1, 1, 0, 0, 0]
    assert "gradient_accumulation=4 divides it by 4 again" in last[0][0]
    assert "num_microbatches=4 divides it by 4 again" in last[1][0]

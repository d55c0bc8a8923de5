"""A model of transformers needs no criterion: its loss counts the labels of all ranks and micro-batches."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colonnade
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.engine.schedule.loss import split_loss
from colonnade.errors import ConfigError
from colonnade.hf.model_loss import criterion_of
from colonnade.testing import compare, gather_gradients, in_double
from colonnade.trainer import Trainer, hooks
from tests.engine.test_engine import world_of_one
from tests.hf.zoo import BY_NAME, ROWS, batch_of, loss_of, num_rows
from tests.ranks import on_ranks

RTOL = 1e-9
BERT = BY_NAME["bert"].options


def bert(name: str, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, name)
    with in_double():
        return cls(cls.config_class(**{**BERT, **options}))


# -- what the loss is a mean over -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mixtral", "bert", "vit", "t5", "bart"])
def test_sum_and_count_are_known_from_the_labels_and_as_a_criterion(name):
    architecture = BY_NAME[name]
    model, batch = architecture.build(), batch_of(architecture.kind, 0)
    own = criterion_of(model)
    assert own is not None
    with in_double():
        output = own.run(batch)
        total, count = loss_of(architecture.kind, output.logits, batch["labels"])
        for found in (output.loss.sum_and_count, split_loss(output.loss), own(output, batch["labels"])):
            torch.testing.assert_close(found, (total, count), check_dtype=False)


def test_losses_of_other_kinds_count_what_they_are_a_mean_over():
    tokens = torch.arange(3, 15).view(3, 4)
    numbers = torch.linspace(0, 1, 6, dtype=torch.float64).view(3, 2)
    cases: list[tuple[nn.Module, dict[str, Tensor], float | None]] = [
        (bert("BertForTokenClassification", num_labels=5), {"labels": (tokens % 5).where(tokens < 10, -100)}, 7.0),
        (bert("BertForSequenceClassification", num_labels=2), {"labels": torch.tensor([1, -100, 0])}, 2.0),
        (bert("BertForSequenceClassification", num_labels=2), {"labels": numbers}, 6.0),
        (bert("BertForSequenceClassification", num_labels=1), {"labels": numbers[:, 0]}, 3.0),
        (
            bert("BertForQuestionAnswering"),
            {"start_positions": torch.tensor([0, 1, 9]), "end_positions": torch.tensor([1, 3, 9])},
            2.0,
        ),
        (bert("BertForMultipleChoice"), {"labels": torch.tensor([1, 0, 1])}, None),
    ]
    for model, labels, count in cases:
        own = criterion_of(model)
        assert own is not None
        choices = tokens[:, None].repeat(1, 2, 1) if count is None else tokens
        with in_double():
            loss = own.run(input_ids=choices, **labels).loss
            mean = model(input_ids=choices, **labels).loss
        known = getattr(loss, "sum_and_count", None)
        assert (known is None) == (count is None)
        if known is not None:
            assert known[1] == count
            torch.testing.assert_close(known[0], mean * count, check_dtype=False)
            if "labels" in labels:
                with in_double():
                    found = own(model(input_ids=tokens), labels["labels"])
                torch.testing.assert_close(found, known, check_dtype=False)


def test_labels_that_are_shifted_already_count_as_they_are():
    model, batch = BY_NAME["llama"].build(), batch_of("causal", 0)
    own = criterion_of(model)
    assert own is not None
    shifted = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    shifted[:, -1] = batch["input_ids"][:, 0]  # the first token of what another rank has
    with in_double():
        output = own.run({**batch, "shift_labels": shifted})
        data, label = own.unpack_batch({**batch, "shift_labels": shifted})
        found = own(model(**data), label)
    assert output.loss.sum_and_count[1] == (shifted != -100).sum()
    torch.testing.assert_close(found, output.loss.sum_and_count, check_dtype=False)


def test_only_models_of_transformers_that_take_labels_have_one():
    import transformers

    config = transformers.BertConfig(**BERT)
    assert criterion_of(transformers.BertModel(config)) is None
    assert criterion_of(nn.Linear(2, 2)) is None
    assert criterion_of(nn.ModuleList([nn.Linear(2, 2), transformers.BertForMaskedLM(config)])) is not None


# -- steps, beside one process ----------------------------------------------------------------------------


def gradients_of_one_process(name: str, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    architecture = BY_NAME[name]
    model = architecture.build()
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with in_double():
        total, count = loss_of(architecture.kind, model(**inputs).logits, batch["labels"])
        (total / count).backward()
    return (total / count).detach(), gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those that are not zero but for rounding, as that of a bias on keys is."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: gradient for name, gradient in found.items() if gradient.abs().max() > 1e-15}


@contextmanager
def engine_of(model: nn.Module, **config: Any):
    # A flat step's kernel wants numbers in float32, which there are none of in_double().
    with launch({"flat_step": False, **config}, context=ParallelContext(), verbose=False) as gpc:
        engine, *_ = initialize(model, lambda p: torch.optim.SGD(p, lr=0.0), context=gpc)
        yield engine
        engine.close()


def _data_parallel() -> None:
    """Two ranks, three micro-batches each, of unequally many rows and labels."""
    from transformers import BatchEncoding

    for name in ("llama", "bert", "t5", "vit"):
        architecture = BY_NAME[name]
        batch = batch_of(architecture.kind, 0)
        rows = [slice(0, 1), slice(1, 2), slice(2, 4), slice(4, 5), slice(5, ROWS), slice(ROWS, ROWS)]
        expected_loss, expected = gradients_of_one_process(name, batch)
        with in_double(), engine_of(architecture.build(), gradient_accumulation=3) as engine:
            assert engine.criterion is None
            rank = engine.context.get_global_rank()
            total = torch.zeros(2, dtype=torch.float64)
            for at in range(3):
                piece = num_rows(batch, rows[rank * 3 + at])
                if len(piece["labels"]) == 0:  # a rank that has nothing to learn from gives labels that do not count
                    piece = {**num_rows(batch, slice(0, 1))}
                    piece["labels"] = torch.full_like(piece["labels"], -100)
                engine.zero_grad()
                if at == 0:  # by hand, with the batch as a collator gives it
                    loss = engine(BatchEncoding(piece)).loss
                    total += torch.tensor([float(x.detach()) for x in split_loss(loss)])
                    engine.backward(loss)
                else:
                    loss = engine.execute_schedule(iter([BatchEncoding(piece)]))[2]
                    count = float(engine.loss_count)
                    total += torch.tensor([float(loss) * count if count else 0.0, count])
                engine.step()
            torch.distributed.all_reduce(total)
            torch.testing.assert_close(total[0] / total[1], expected_loss, rtol=RTOL, atol=0)
            compare(expected, gather_gradients(engine.model, engine.context), RTOL)


def _pipeline() -> None:
    """The labels of a collator's batch go to the last stage, whose loss is the model's own."""
    config = {"parallel": {"pipeline": 2}, "schedule": {"type": "OneFOneB", "num_microbatches": 3}, "flat_step": False}
    for name in ("llama", "bert", "t5"):
        architecture = BY_NAME[name]
        batch = batch_of(architecture.kind, 0)
        expected_loss, expected = gradients_of_one_process(name, batch)
        with in_double(), launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = colonnade.parallelize(architecture.build(), context=gpc)
            engine, *_ = initialize(model, lambda p: torch.optim.SGD(p, lr=0.0), context=gpc)
            loss = engine.execute_schedule(iter([batch]))[2]
            engine.step()
            torch.testing.assert_close(loss, expected_loss, rtol=RTOL, atol=0)
            compare(expected, gather_gradients(engine.model, engine.context), RTOL)
            if name == "llama":
                trainer = Trainer(engine)
                assert trainer.evaluate([batch]) == {"Loss": pytest.approx(expected_loss.item(), rel=RTOL)}
                assert trainer.predict([batch]).shape == (ROWS, 12, 96)
            engine.close()


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "bart"])
def test_micro_batches_of_a_pipeline_schedule_count_their_labels(name):
    architecture = BY_NAME[name]
    batch = batch_of(architecture.kind, 0)
    expected_loss, expected = gradients_of_one_process(name, batch)
    config = {"schedule": {"type": "GPipe", "num_microbatches": 4}}
    with in_double(), engine_of(architecture.build(), **config) as engine:
        evaluated = engine.execute_schedule(iter([batch]), forward_only=True)[2]
        output, label, loss = engine.execute_schedule(iter([batch]))
        engine.step()
        for found in (evaluated, loss):
            torch.testing.assert_close(found, expected_loss, rtol=RTOL, atol=0)
        assert torch.equal(label, batch["labels"])
        assert len(output["logits"]) == ROWS
        compare(expected, gather_gradients(engine.model, engine.context), RTOL)


def test_labels_make_the_decoders_inputs_at_the_start_of_a_pipeline():
    model = BY_NAME["t5"].build()
    batch = batch_of("seq2seq", 0)
    del batch["decoder_input_ids"]
    with in_double():
        expected = model(**batch).loss
        with engine_of(model, schedule={"type": "GPipe", "num_microbatches": 3}) as engine:
            found = engine.execute_schedule(iter([batch]))[2]
    torch.testing.assert_close(found, expected.detach(), rtol=RTOL, atol=0)


def test_what_a_pipelines_last_stage_cannot_know_is_refused():
    config = {"schedule": {"type": "GPipe", "num_microbatches": 2}}
    with (
        pytest.raises(ConfigError, match=r"BertForQuestionAnswering.*Pass criterion="),
        engine_of(bert("BertForQuestionAnswering"), **config),
    ):
        pass
    router = BY_NAME["mixtral"].build()
    router.config.output_router_logits = True
    with pytest.raises(ConfigError, match=r"output_router_logits = False"), engine_of(router, **config):
        pass


def test_a_router_loss_counts_with_the_labels_of_its_pass():
    """The mean of labels and the auxiliary loss of a batch weigh as much as the batch has labels."""
    model, batch = BY_NAME["mixtral"].build(), batch_of("causal", 0)
    model.config.output_router_logits = True
    with in_double(), engine_of(model, gradient_accumulation=2) as engine:
        weighted, counts = 0.0, 0.0
        for rows in (slice(0, 2), slice(2, ROWS)):
            engine.zero_grad()
            loss = engine(**num_rows(batch, rows)).loss
            count = split_loss(loss)[1]
            assert count == (batch["labels"][rows, 1:] != -100).sum()
            weighted, counts = weighted + loss.detach() * count, counts + count
            engine.backward(loss)
            engine.step()
        found = gather_gradients(engine.model, engine.context)
    one = BY_NAME["mixtral"].build()
    one.config.output_router_logits = True
    with in_double():
        losses = [one(**num_rows(batch, rows)).loss for rows in (slice(0, 2), slice(2, ROWS))]
        parts = [(batch["labels"][rows, 1:] != -100).sum() for rows in (slice(0, 2), slice(2, ROWS))]
        (sum(loss * part for loss, part in zip(losses, parts, strict=True)) / counts).backward()
    compare(gradients(one), found, RTOL)


# -- the trainer ------------------------------------------------------------------------------------------


def _trainer() -> None:
    """Batches of collators, padded to unequal lengths: loss, accuracy and predictions over all ranks."""
    from transformers import BatchEncoding

    batch = batch_of("causal", 0)
    mine = (
        [
            BatchEncoding(num_rows(batch, slice(0, 2))),
            BatchEncoding({key: value[2:3, : 12 - 3] for key, value in batch.items()}),
        ],
        [BatchEncoding(num_rows(batch, slice(3, 4))), BatchEncoding(num_rows(batch, slice(4, ROWS)))],
    )
    expected_loss, _ = gradients_of_one_process("llama", batch)
    with in_double():
        one = BY_NAME["llama"].build()
        logits = one(**{key: value for key, value in batch.items() if key != "labels"}).logits.detach()
        kept = batch["labels"][:, 1:] != -100
        right = (logits[:, :-1].argmax(-1) == batch["labels"][:, 1:])[kept].double().mean().item()
        with engine_of(BY_NAME["llama"].build(), gradient_accumulation=2) as engine:
            trainer, loader = Trainer(engine), mine[engine.context.get_global_rank()]
            assert trainer.evaluate(loader) == {"Loss": pytest.approx(expected_loss.item(), rel=RTOL)}
            predicted = trainer.predict(loader)
            seen = batch["attention_mask"].bool()
            torch.testing.assert_close(predicted[seen], logits[seen], rtol=RTOL, atol=0)
            assert (predicted[2, 9:] == -100).all()
            trainer.fit(loader, epochs=1, hooks=[hooks.LossHook(), hooks.AccuracyHook()])
            assert trainer.metric_values("train") == {
                "Loss": pytest.approx(expected_loss.item(), rel=RTOL),
                "Accuracy": pytest.approx(right),
            }


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_batches_of_collators_without_a_criterion_on_two_ranks_are_those_of_one_process():
    _data_parallel()
    _pipeline()
    _trainer()


def test_a_batch_without_labels_is_said_to_have_no_loss():
    from colonnade.errors import ScheduleError

    model, batch = BY_NAME["llama"].build(), batch_of("causal", 0)
    del batch["labels"]
    with world_of_one() as gpc, in_double():
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), context=gpc)
        with pytest.raises(ScheduleError, match="labels"):
            engine.execute_schedule(iter([batch]))

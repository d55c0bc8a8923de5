"""Sequences of transformers' models on several ranks: which models can, what a batch may have, and beside one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ColonnadeError, ConfigError, LayoutError
from colonnade.hf.attention_patch import SplitSequence, check_model, find_documents, label_kind
from colonnade.nn.sequence import Parts, gather_sequence
from colonnade.testing import run_world
from tests.hf.runs import TENSOR, Layout, run_all, truth_file
from tests.hf.table import QUIET
from tests.hf.zoo import BY_NAME, batch_of, reference

pytest.importorskip("transformers", reason="needs transformers")


# -- which models -----------------------------------------------------------------------------------------

REFUSED = {
    "gemma2": "no attention kernel here supports attn_logit_softcapping=50.0",
    "falcon": "not behind transformers' attention interface",
    "bloom": "takes no position_ids",
    "vit": "takes pixel_values",
    "t5": "an encoder and a decoder",
}


def test_models_that_cannot_are_refused_by_name() -> None:
    context = ParallelContext()
    for name, reason in REFUSED.items():
        with pytest.raises(LayoutError, match=reason) as caught:
            check_model(BY_NAME[name].build(), 2, "ring", context)
        assert BY_NAME[name].model in str(caught.value)
    model: Any = BY_NAME["mixtral"].build()
    check_model(model, 2, "ulysses", context)
    with pytest.raises(LayoutError, match=r"'ulysses' needs .* 1 tensor ranks have 2 heads"):
        check_model(model, 4, "ulysses", context)
    check_model(model, 4, "ring", context)
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(LayoutError, match="layers of the kinds linear_attention"):
        check_model(model, 2, "ring", context)


def test_labels_are_of_the_next_token_or_of_each() -> None:
    assert {name: label_kind(BY_NAME[name].build()) for name in ("llama", "gpt2", "bert", "vit")} == {
        "llama": "next",
        "gpt2": "next",
        "bert": "each",
        "vit": None,
    }


# -- what a batch has -------------------------------------------------------------------------------------


def test_padding_and_documents_are_read_from_the_batch() -> None:
    rows = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    assert find_documents({"attention_mask": rows}) == ((((0, 2, 3), (0, 6)), ((1,), (0, 4, 6))), True)
    assert find_documents({"attention_mask": rows[:1]}) == ((), True)
    assert find_documents({"attention_mask": torch.tensor([[0, 1, 1, 0]])}) == ((((0,), (0, 1, 3, 4)),), False)
    with pytest.raises(LayoutError, match="the attention_mask of row 0 has some"):
        find_documents({"attention_mask": torch.tensor([[1, 0, 1]])})
    with pytest.raises(LayoutError, match="row 1 has 2 labels that would be predicted from padding"):
        find_documents({"attention_mask": rows[:2], "labels": torch.ones(2, 6, dtype=torch.int64)})
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    assert find_documents({"position_ids": positions}) == ((((0,), (0, 3, 6)), ((1,), (0, 6))), False)
    assert find_documents({"position_ids": positions[1:] + 7}) == ((), False)
    assert find_documents({}) == ((), False)


def test_a_part_has_the_tokens_of_its_runs() -> None:
    whole = torch.arange(10).reshape(1, 10)
    split = SplitSequence(Parts.of(10, 2, balanced=True), 1, "ring", ParallelContext())
    assert split.take_local(whole).tolist() == [[3, 4, 5, 6, 7]]
    split = SplitSequence(Parts.of(10, 2, balanced=True), 0, "ring", ParallelContext())
    assert split.take_local(whole).tolist() == [[0, 1, 2, 8, 9]]


# -- ranks ------------------------------------------------------------------------------------------------

BY_TENSOR = Layout("sequence 2 x tensor 2", 4, {"sequence": 2, **TENSOR})
ULYSSES = Layout("ulysses", 4, {"sequence": {"size": 2, "attention": "ulysses"}})
CELLS = ((BY_TENSOR, ["mistral", "gpt_oss"]), (ULYSSES, ["gemma3_text", "roberta"]))


def on_ranks(folder: str) -> None:
    for layout, names in CELLS:
        run_all(layout, names, folder)
    for attention in ("ring", "ulysses"):
        _on_two(attention)
    config = {"parallel": {"sequence": {"size": 2, "attention": "flash"}}}
    with (
        colonnade.launch(config, context=ParallelContext(), verbose=False) as gpc,
        pytest.raises(ConfigError, match=r"parallel\.sequence\.attention is 'flash'"),
    ):
        colonnade.parallelize(BY_NAME["llama"].build(), context=gpc)


def _on_two(attention: str) -> None:
    config = {"parallel": {"sequence": {"size": 2, "attention": attention}}}
    with colonnade.launch(config, context=ParallelContext(), verbose=False) as gpc:
        _outputs_of_the_model(gpc, attention)


def _outputs_of_the_model(gpc: ParallelContext, attention: str) -> None:
    """Documents that are packed, other ones in each row; activation checkpointing; odd lengths; and what is refused.

    With what the model rounds to float32, since what is computed again in backward is not in_double().
    """
    near = {"rtol": 1e-5, "atol": 1e-6}
    # `build` makes weights on the CPU on a GPU too: in_double stands between its calls and those of the test.
    plain: Any = BY_NAME["mistral"].build().to(gpc.device)
    model: Any = colonnade.parallelize(BY_NAME["mistral"].build().to(gpc.device), context=gpc)
    model.gradient_checkpointing_enable()
    whole = batch_of("causal", 0)
    tokens, labels = whole["input_ids"][:2, :11], whole["labels"][:2, :11]
    packed = torch.tensor([[*range(5), *range(6)], [*range(2), *range(9)]])
    given = {"input_ids": tokens, "position_ids": packed}
    balanced = attention == "ring"
    found = gather_sequence(model(**given).logits, balanced=balanced, context=gpc)
    torch.testing.assert_close(found, plain(**given, use_cache=False).logits, **near)
    loss = model(**given, labels=labels).loss
    loss.sum_and_count[0].backward()
    wanted = plain(**given, labels=labels, use_cache=False).loss
    total = torch.stack([number.detach().double() for number in loss.sum_and_count])
    torch.distributed.all_reduce(total, group=gpc.get_group(ParallelMode.SEQUENCE))
    torch.testing.assert_close(total[0] / total[1], wanted.double(), **near)
    wanted.backward()
    for name, parameter in plain.named_parameters():
        gradient = model.get_parameter(name).grad / total[1]
        torch.distributed.all_reduce(gradient, group=gpc.get_group(ParallelMode.SEQUENCE))
        torch.testing.assert_close(gradient, parameter.grad, **near)
    for wrong, message in (
        ({"input_ids": tokens[:, :1]}, "is too short for 2 ranks"),
        ({"labels": labels}, "context parallelism splits input_ids"),
        ({"input_ids": tokens, "logits_to_keep": 3}, "'logits_to_keep'"),
        ({"input_ids": tokens, "attention_mask": torch.ones(2, 1, 11, 11)}, "'attention_mask'"),
        ({"input_ids": tokens, "cache_position": torch.arange(11)}, "'cache_position'"),
    ):
        with pytest.raises(ColonnadeError, match=message):
            model(**wrong)
    with pytest.raises(LayoutError, match="Call the model that was passed to parallelize"):
        model.model(input_ids=tokens)


@pytest.mark.slow
def test_attention_over_parts_equals_one_process(tmp_path: Path) -> None:
    """Windows, sinks, padding of rows and of positions, beside tensor and data ranks; fp64, 1e-9, three clipped steps."""
    for _, names in CELLS:
        for name in names:
            torch.save(reference(BY_NAME[name]), truth_file(str(tmp_path), name, None))
    run_world(4, on_ranks, str(tmp_path), timeout=110, env=QUIET)
    for layout, names in CELLS:
        lines = Path(tmp_path, f"{layout.name}.jsonl").read_text().splitlines()
        assert lines == [f'["{name}", "ok"]' for name in names]

"""Pipeline stages of models of transformers, by their own forward pass: beside the model, in one process and in several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers")

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ScheduleError
from colonnade.parallel.split import split, take_stages
from colonnade.testing import in_double, run_world
from tests.hf.runs import Layout, run_one
from tests.hf.zoo import BY_NAME, LENGTH, Architecture, batch_of, reference
from tests.parallel.own_forward.models import run_all

FAMILIES = ["llama", "gemma2", "gpt_oss", "gpt2", "opt", "bloom", "bert", "vit", "t5", "bart", "mixtral"]
"""Rotary positions, scales and kinds of layers, learnt positions, alibi, encoders, both; experts."""


def varied(name: str, **options: Any) -> Architecture:
    return replace(BY_NAME[name], options={**BY_NAME[name].options, **options})


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, stages: Any, **batch: Any) -> None:
    with in_double():
        torch.manual_seed(0)
        # With a cache of keys and values transformers does not look for packed sequences.
        expected = model(**batch, **({"use_cache": False} if hasattr(model.config, "use_cache") else {})).logits
        truth = gradients(model, expected)
        torch.manual_seed(0)
        found = run_all(stages.stages, **batch)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradients(model, found), truth, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_give_what_the_model_gives(name: str) -> None:
    model = BY_NAME[name].build()
    batch = batch_of(BY_NAME[name].kind, 0)
    del batch["labels"]
    stages = split(model, num_stages=3)
    keys = [set(stage.state_dict()) for stage in stages]
    assert set().union(*keys) == set(model.state_dict())
    assert_same(model, stages, **batch)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_masks_and_positions_of_any_kind(name: str) -> None:
    model = BY_NAME[name].build()
    stages = split(model, num_stages=3)
    tokens = batch_of("causal", 0)["input_ids"][:4]
    seen = torch.ones_like(tokens)
    left_padded = seen.clone()
    left_padded[1, :4] = 0
    packed = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(4, -1)
    later = torch.arange(3, 3 + LENGTH).expand(4, -1)
    for batch in (
        {},
        {"attention_mask": seen},
        {"attention_mask": left_padded},
        {"position_ids": later},
        {"position_ids": packed},
        {"attention_mask": left_padded, "position_ids": later},
    ):
        assert_same(model, stages, input_ids=tokens, **batch)


def test_dropout_and_gradient_checkpointing_of_transformers() -> None:
    model = varied("gpt2", resid_pdrop=0.1, embd_pdrop=0.3, attn_pdrop=0.2).build()
    stages = split(model, num_stages=3)
    tokens = batch_of("causal", 0)["input_ids"]
    assert_same(model, stages, input_ids=tokens)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    assert_same(model, stages, input_ids=tokens)


def test_labels_in_the_batch_make_the_last_stage_give_the_loss() -> None:
    model, batch = BY_NAME["llama"].build(), batch_of("causal", 0)
    with in_double():
        expected, found = model(**batch), run_all(split(model, num_stages=2).stages, **batch)
    assert set(found) == {"loss", "logits"}
    torch.testing.assert_close(found["loss"], expected.loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "t5"])
def test_models_on_the_meta_device(name: str) -> None:
    real = BY_NAME[name].build(tied=True)
    with torch.device("meta"):
        model = type(real)(real.config)
        inside = split(type(real)(real.config), num_stages=3)
    stages, same = split(model, num_stages=3), split(real, num_stages=3)
    assert stages.ties == inside.ties == same.ties
    assert stages.ties
    names = [[name for name, _ in stage.named_parameters()] for stage in (*stages, *same)]
    assert names[:3] == names[3:]


def test_what_a_pipeline_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(
        ScheduleError, match=r"MixtralForCausalLM has config\.output_router_logits=True, which adds a loss"
    ):
        split(varied("mixtral", output_router_logits=True).build(), num_stages=2)
    with pytest.raises(
        ScheduleError,
        match=r"BartForConditionalGeneration has config\.decoder_layerdrop=0\.5, but layer dropout is not",
    ):
        split(varied("bart", decoder_layerdrop=0.5).build(), num_stages=2)
    with pytest.raises(
        ScheduleError, match=r"calls 'model\.layers\.0' where 'model\.embed_tokens' was expected.*split\(sample=\)"
    ):
        run_all(split(BY_NAME["llama"].build(), num_stages=2).stages, inputs_embeds=torch.randn(2, 3, 32))
    embedded = {"inputs_embeds": torch.randn(2, 3, 32, dtype=torch.float64)}
    model = BY_NAME["llama"].build()
    with in_double():
        stages = split(model, num_stages=2, sample=embedded)
    assert_same(model, stages, **embedded)


# -- in several processes ---------------------------------------------------------------------------------

SCHEDULES = {
    "OneFOneB": {},
    "GPipe": {},
    "Interleaved1F1B": {"num_chunks": 2},
    "BreadthFirst": {"num_chunks": 2},
    "InterleavedZeroBubble": {"num_chunks": 2},
    "ZBV": {},
    "DualPipeV": {},
}


def layout(schedule: str, **settings: Any) -> Layout:
    passes = {"type": schedule, "num_microbatches": 4, **SCHEDULES[schedule]}
    return Layout(f"{schedule} {settings}", 2, {"pipeline": 2}, {"schedule": passes, **settings}, tied=True)


def compare_all(cases: list[tuple[str, Layout]], truths: dict[str, Any]) -> None:
    """On each rank: every case beside one process."""
    for name, case in cases:
        with colonnade.launch(case.config, context=ParallelContext(), verbose=False) as gpc:
            result = run_one(BY_NAME[name], case, gpc, truths[name])
            assert result == "ok", (name, case.name, result)


def compare_in_world(cases: list[tuple[str, Layout]]) -> None:
    truths = {name: reference(BY_NAME[name], True) for name in {name for name, _ in cases}}
    run_world(2, compare_all, cases, truths, timeout=60 + 15 * len(cases))


@pytest.mark.slow
def test_schedules_beside_one_process() -> None:
    """Tied embeddings on two ranks, and on one (ZBV): losses, gradients, norms and weights of three clipped steps."""
    compare_in_world([("gemma2", layout("OneFOneB")), ("t5", layout("Interleaved1F1B")), ("gemma2", layout("ZBV"))])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bert", "t5"])
def test_every_schedule_beside_one_process(name: str) -> None:
    compare_in_world([(name, layout(schedule)) for schedule in SCHEDULES])


def vision_language_model() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(hidden_size=16, image_size=8, patch_size=4, projection_dim=16, **sizes)
    text = LlamaConfig(vocab_size=96, hidden_size=32, pad_token_id=0, **{**sizes, "num_hidden_layers": 4})
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=95, image_seq_length=4)
    with in_double():
        return LlavaForConditionalGeneration(config).double().eval()


def test_a_model_with_other_inputs_beside_tokens_needs_a_sample() -> None:
    """Its pass calls other layers with images than without them: which, only a batch of the run can say."""
    model, tokens = vision_language_model(), batch_of("causal", 0)["input_ids"][:2] % 90
    with pytest.raises(
        ScheduleError, match=r"LlavaForConditionalGeneration takes 'pixel_values' in addition to 'input_ids'.*sample="
    ):
        split(model, num_stages=2)
    assert_same(model, split(model, num_stages=2, sample={"input_ids": tokens}), input_ids=tokens)
    tokens[:, 1:5] = 95
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with pytest.raises(
        ScheduleError, match=r"LlavaForConditionalGeneration, called in order, do not give the same result"
    ):
        split(model, num_stages=2, sample={"input_ids": tokens, "pixel_values": images})


def test_a_stage_cannot_generate_and_says_what_can() -> None:
    stages = split(BY_NAME["llama"].build(), num_stages=3)
    tokens = batch_of("causal", 0)["input_ids"][:2]
    for each in (*stages, stages, take_stages(stages, [0, 1, 0], 0)):
        with pytest.raises(
            ScheduleError, match=r"generate\(\) needs all stages.*engine\.save_pretrained\(folder\).*one process"
        ):
            each.generate(input_ids=tokens, max_new_tokens=2)  # type: ignore[union-attr, operator]
    assert not hasattr(split(torch.nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), num_stages=2)[0], "generate")

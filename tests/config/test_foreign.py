"""Other frameworks' words for keys of ours are errors in any case, unless they are helper variables."""

from __future__ import annotations

from typing import Any

import pytest

from colonnade.config import load_config
from colonnade.errors import ConfigError

WORDS = {
    "clip_grad_norm": "gradient_clipping max_grad_norm grad_clip clip_grad clip_norm gradient_clip_val",
    "gradient_accumulation": "grad_accum gradient_accumulation_steps accumulate_grad_batches",
    "zero": "zero_optimization zero_stage zero3 fsdp",
    "parallel.tensor": "tensor_parallel tensor_model_parallel_size tp_size",
    "parallel.pipeline": "pipeline_model_parallel_size pipeline_parallel",
    "parallel.expert": "expert_model_parallel_size",
    "parallel.sequence": "context_parallel_size sequence_parallel",
    "parallel.data": "data_parallel_size",
    "fp16": "precision mixed_precision amp use_fp16",
    "bf16": "use_bf16 bf16_enabled",
    "NUM_MICRO_BATCHES": "num_microbatches num_micro_batches",
    "sync.bucket_mb": "bucket_cap_mb",
    "gradient_handler": "grad_handler grad_handlers",
}
PAIRS = [(word, key) for key, words in WORDS.items() for word in words.split()]


@pytest.mark.parametrize(("word", "key"), PAIRS)
def test_a_foreign_word_is_an_error_in_any_case(word: str, key: str) -> None:
    camel = word.title().replace("_", "")
    for spelling in {word, word.upper(), word.title(), camel, camel[0].lower() + camel[1:]} - {key}:
        with pytest.raises(ConfigError, match=f"{spelling} = 2 .*another framework's word for `{key}`"):
            load_config({spelling: 2})


def test_the_message_gives_the_line_to_write() -> None:
    with pytest.raises(ConfigError, match=r"Write clip_grad_norm = 2\.0$"):
        load_config({"gradient_clipping": 2.0})
    with pytest.raises(ConfigError, match=r"Write gradient_accumulation = 4$"):
        load_config({"grad_accum": 4})


def test_a_typo_of_a_foreign_word_is_left_to_the_user() -> None:
    assert load_config({"gradient_chipping": 2.0}).gradient_chipping == 2.0


@pytest.mark.parametrize(
    "values",
    [
        {"MAX_GRAD_NORM": 1.0, "clip_grad_norm": 1.0},
        {"MAX_GRAD_NORM": 1.0, "clip_grad_norm": {"max_norm": 1.0}},
        {"TENSOR_PARALLEL_SIZE": 2, "parallel": {"tensor": {"size": 2, "mode": "1d"}}},
        {"tp": 2, "pp": 4, "parallel": {"tensor": 2, "pipeline": 4}},
        {"zero_stage": 1, "zero": {"stage": 1}},
    ],
)
def test_a_helper_variable_of_our_key_passes(values: dict[str, Any]) -> None:
    assert load_config(values) == values


@pytest.mark.parametrize(
    "values",
    [
        {"max_grad_norm": 2.0, "clip_grad_norm": 1.0},
        {"tp": 2, "parallel": {"tensor": 4}},
        {"tp": True, "parallel": {"tensor": 1}},
        {"amp": True, "parallel": {"tensor": 1}},
    ],
)
def test_a_foreign_word_with_another_value_than_our_key_is_an_error(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="another framework's word"):
        load_config(values)

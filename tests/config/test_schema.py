"""The table of keys: complete, and the only place that knows them."""

from __future__ import annotations

import pytest

from colonnade.config import load_config
from colonnade.config.rules import Rule
from colonnade.config.schema import KEYS
from colonnade.errors import ConfigError

TOP_LEVEL = (
    "parallel gradient_handler gradient_handlers clip_grad_norm gradient_accumulation fp16 bf16 zero "
    "schedule sync flat_step seed compile cudnn_benchmark cudnn_deterministic compare_weights model log max_ep_size "
    "num_microbatches TENSOR_SHAPE SEQ_LENGTH GLOBAL_BATCH_SIZE HIDDEN_SIZE"
)


def test_every_promised_key_is_there() -> None:
    assert set(KEYS) == set(TOP_LEVEL.split())


def test_a_key_added_to_the_table_is_checked_and_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEYS, "replay_buffer", Rule("a string", lambda value: isinstance(value, str)))
    assert load_config({"replay_buffer": "yes"}).replay_buffer == "yes"
    for wrong in ({"replay_buffer": 3}, {"replay_bufer": "yes"}):
        with pytest.raises(ConfigError, match="replay_buffer"):
            load_config(wrong)

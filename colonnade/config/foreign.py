"""Other frameworks' words for keys of ours, as data.

Each is an error that names our key, in any case and with or without underscores: a clipping value under
a name that nobody reads trains without clipping and says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colonnade.config.names import squeezed
from colonnade.config.problems import KeyPath
from colonnade.config.text import shortened


@dataclass(frozen=True)
class Foreign:
    """Words for the key at `target`, and what to write instead (`{}` is the value that was met)."""

    target: KeyPath
    write: str
    words: str


_FOREIGN = (
    Foreign(
        ("clip_grad_norm",),
        "clip_grad_norm = {}",
        "gradient_clipping gradient_clip gradient_clip_val gradient_clip_value gradient_clip_norm grad_clip "
        "grad_clip_norm grad_clip_val grad_clipping grad_norm_clip grad_norm_clipping gradient_norm_clipping "
        "clip_grad clip_grads clip_norm clip_gradient clip_gradients clip_gradient_norm clip_gradients_norm "
        "max_grad_norm max_gradient_norm gradient_max_norm grad_max_norm",
    ),
    Foreign(
        ("gradient_accumulation",),
        "gradient_accumulation = {}",
        "grad_accum grad_accum_steps grad_acc grad_acc_steps grad_accumulation grad_accumulation_steps "
        "gradient_accumulation_steps gradient_accumulation_step gradient_accumulate "
        "gradient_accumulate_steps gradient_accumulate_every gradient_accum gradient_accum_steps "
        "accumulate_grad accumulate_grads accumulate_grad_batches accumulate_gradient accumulate_gradients "
        "accumulate_steps accumulate_size "
        "accumulation_steps accum_steps num_accumulation_steps",
    ),
    Foreign(("gradient_handler",), "gradient_handler = [dict(type='...')]", "grad_handler grad_handlers"),
    Foreign(
        ("zero",),
        "zero = 1, 2 or 3, or zero = dict(stage=...)",
        "zero_optimization zero_optimisation zero_optimizer zero_stage zero_level zero_config use_zero "
        "zero1 zero2 zero3 fsdp fsdp_config fully_shard",
    ),
    Foreign(
        ("parallel", "tensor"),
        "parallel = dict(tensor=dict(size=..., mode=...))",
        "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel "
        "tensor_model_parallel_size model_parallel model_parallel_size tp tp_size tp_degree",
    ),
    Foreign(
        ("parallel", "pipeline"),
        "parallel = dict(pipeline=...)",
        "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel "
        "pipeline_model_parallel_size pipeline_size pp pp_size pp_degree",
    ),
    Foreign(
        ("parallel", "data"),
        "parallel = dict(data=...)",
        "data_parallel data_parallel_size data_parallel_degree dp_size dp_degree",
    ),
    Foreign(
        ("parallel", "sequence"),
        "parallel = dict(sequence=...)",
        "sequence_parallel sequence_parallel_size sequence_parallel_degree context_parallel "
        "context_parallel_size context_parallel_degree sp_size cp_size",
    ),
    Foreign(
        ("parallel", "expert"),
        "parallel = dict(expert=...)",
        "expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size",
    ),
    Foreign(
        ("fp16",),
        "fp16 = dict(...) or bf16 = True",
        "precision mixed_precision mixed_precision_training amp use_amp amp_backend amp_level autocast "
        "half_precision use_fp16 fp16_enabled enable_fp16",
    ),
    Foreign(("bf16",), "bf16 = True", "use_bf16 bf16_enabled enable_bf16 use_bfloat16"),
    Foreign(("schedule",), "schedule = dict(type='...')", "pipeline_schedule"),
    Foreign(
        ("NUM_MICRO_BATCHES",),
        "NUM_MICRO_BATCHES = {}",
        "num_microbatches n_microbatches n_micro_batches micro_batches microbatches",
    ),
    Foreign(
        ("model", "num_chunks"),
        "model = dict(num_chunks=...)",
        "num_model_chunks virtual_pipeline_size virtual_pipeline_model_parallel_size",
    ),
    Foreign(
        ("sync", "bucket_mb"),
        "sync = dict(bucket_mb=...)",
        "bucket_cap_mb reduce_bucket_size ddp_bucket_size",
    ),
    Foreign(("sync", "overlap"), "sync = dict(overlap=...)", "overlap_comm overlap_grad_reduce"),
)
_BY_WORD = {squeezed(word): entry for entry in _FOREIGN for word in entry.words.split()}


def foreign_word(name: str, value: Any, config: Mapping[str, Any]) -> str | None:
    """Say what to write instead of `name`, or None when it is not another framework's word for a key.

    A word that holds the same value as our key in the same config is a helper variable
    (`TP_SIZE = 2` above `parallel = dict(tensor=dict(size=TP_SIZE))`) and may stay.
    """
    entry = _BY_WORD.get(squeezed(name))
    if entry is None or name.startswith("_") or name in entry.target or _holds(config, entry.target, value):
        return None
    write = entry.write.format(shortened(value))
    return f"is not read: it is another framework's word for `{'.'.join(entry.target)}`. Write {write}"


def _holds(config: Mapping[str, Any], target: KeyPath, value: Any) -> bool:
    """Whether our key at `target` has this value, directly or as the main entry of its dict."""
    found: Any = config
    for key in target:
        if not isinstance(found, Mapping) or key not in found:
            return False
        found = found[key]
    if isinstance(found, Mapping):
        found = next((found[key] for key in ("size", "max_norm", "stage") if key in found), None)
    return found is not None and type(found) is type(value) and bool(found == value)

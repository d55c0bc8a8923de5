"""The table of keys that Colonnade reads from a config: what each may hold, and what it is for.

A new key is one more entry here; checking and suggestions follow from it.
"""

from __future__ import annotations

from colonnade.config.rules import (
    ANYTHING,
    BOOL,
    COLLECTION,
    COUNT,
    DTYPE,
    FRACTION,
    INT,
    LEVEL,
    MEMBER,
    NONE,
    POSITIVE,
    SHAPE,
    TEXT,
    TEXTS,
    Key,
    Rule,
    Section,
    any_of,
    choice,
    int_from,
    number_above,
    number_from,
    only_dict,
    with_dict,
)


def _words(**by_key: str) -> dict[str, str]:
    """Turn key="word word" into {word: key}."""
    return {word: key for key, words in by_key.items() for word in words.split()}


_SPEC = Section({"type": Key(TEXT, "registered name of the class")}, required=("type",), is_open=True)
_NAMED = with_dict(Rule("a registered name", TEXT.accepts), _SPEC, "dict(type='Name', ...)")
_HANDLERS = Rule("a list: [dict(type='Name', ...), ...]", items=_NAMED)

_SIZE = Key(COUNT, "ranks on this axis")
_AXIS = {"size": _SIZE, "mode": Key(any_of(TEXT, NONE), "a key of INITIALIZER_MAPPING")}
_REST = any_of(COUNT, NONE, choice(-1), choice("auto"))
_OWN_AXIS = Section(_AXIS, required=("size",), is_open=True)
_EXPERT = Section(
    {**_AXIS, "over": Key(any_of(TEXT, TEXTS, NONE), "the axes that experts lie on")},
    required=("size",),
    is_open=True,
)
_PARALLEL = Section(
    {
        "data": Key(
            with_dict(_REST, Section({"size": Key(_REST, "ranks on this axis")}, ("size",)), "dict(size=...)"),
            "data-parallel size; None, -1 or 'auto': what the other axes leave",
        ),
        "pipeline": Key(
            with_dict(any_of(COUNT, NONE), Section({"size": _SIZE}, ("size",)), "dict(size=...)"),
            "number of pipeline stages",
        ),
        "tensor": Key(
            with_dict(any_of(COUNT, NONE), _OWN_AXIS, "dict(size=..., mode=..., ...)"),
            "tensor parallelism; further keys go to the mode's initializer",
        ),
        "expert": Key(with_dict(any_of(COUNT, NONE), _EXPERT, "dict(size=..., over=..., ...)"), "expert parallelism"),
        "sequence": Key(
            with_dict(any_of(COUNT, NONE), _OWN_AXIS, "dict(size=..., mode=..., ...)"),
            "sequence parallelism",
        ),
    },
    others=only_dict(_OWN_AXIS, "dict(size=..., mode=..., ...)"),
    renamed=_words(
        data="dp ddp data_parallel data_parallel_size dp_size",
        pipeline="pp pipe pipeline_parallel pipeline_parallel_size pp_size",
        tensor="tp model tensor_parallel tensor_parallel_size tp_size",
        expert="ep moe expert_parallel expert_parallel_size ep_size",
        sequence="sp cp context sequence_parallel sequence_parallel_size context_parallel",
    ),
    refused={
        word: f"belongs to an axis: parallel = dict(tensor=dict(size=..., {word}=...))" for word in ("mode", "depth")
    },
)

_CLIP = Section(
    {
        "max_norm": Key(any_of(number_from(0), NONE), "largest global norm; 0: off, inf: only measure"),
        "norm_type": Key(any_of(number_above(0), choice("inf")), "p of the norm"),
        "groups": Key(any_of(COLLECTION, NONE), "parameters that are clipped apart"),
        "nonfinite": Key(any_of(choice("skip", "raise", "propagate"), NONE), "what to do when the norm is nan or inf"),
        "method": Key(with_dict(any_of(TEXT, NONE), _SPEC, "dict(type='Name', ...)"), "how the threshold is found"),
        "per": Key(choice("group", "layer", "parameter"), "what gets a norm of its own"),
    },
    renamed=_words(
        max_norm="max_grad_norm clip_grad_norm clip_norm norm value max",
        norm_type="p",
        nonfinite="error_if_nonfinite",
    ),
)

_FP16 = Section(
    {
        "mode": Key(any_of(TEXT, MEMBER, NONE), "kind of mixed precision"),
        "init_scale": Key(POSITIVE, "loss scale to start from"),
        "growth_factor": Key(number_above(1), "the scale grows by this factor"),
        "backoff_factor": Key(FRACTION, "the scale shrinks by this factor after an overflow"),
        "growth_interval": Key(COUNT, "steps without overflow before the scale grows"),
        "min_scale": Key(any_of(POSITIVE, NONE), "smallest loss scale"),
        "max_scale": Key(any_of(POSITIVE, NONE), "largest loss scale"),
        "hysteresis": Key(COUNT, "overflows before the scale shrinks"),
        "enabled": Key(BOOL, "False: as if fp16 were left out"),
        "dynamic_grad_scale": Key(BOOL, "whether the scale moves at all"),
        "verbose": Key(BOOL, "log changes of the scale"),
    },
    renamed=_words(
        init_scale="initial_scale loss_scale initial_scale_power scale",
        growth_interval="loss_scale_window",
        min_scale="min_loss_scale",
        max_scale="max_loss_scale",
        mode="opt_level type",
    ),
)
_BF16 = Section({"master_weights": Key(BOOL, "keep fp32 weights for the optimizer")})

_OLD_ZERO = (
    "is an older form. Write zero = dict(stage=3, offload='cpu'); settings of the loss scale go to fp16 = dict(...)"
)
_STAGE = choice(0, 1, 2, 3)
_ZERO = Section(
    {
        "stage": Key(_STAGE, "1: optimizer state is sharded, 2: and gradients, 3: and parameters"),
        "reduce_scatter": Key(BOOL, "reduce-scatter gradients instead of all-reduce"),
        "offload": Key(any_of(BOOL, TEXT, NONE), "device that keeps the shards between steps"),
        "bucket_mb": Key(POSITIVE, "bucket size in MB"),
        "gather_ahead": Key(any_of(BOOL, NONE), "stages 1, 2: gather parameters while the next forward pass runs"),
        "prefetch": Key(int_from(0), "stage 3: how many modules are gathered ahead"),
        "master_weights": Key(BOOL, "stages 1, 2: half-precision parameters have fp32 copies, sharded too"),
        "replicate": Key(any_of(TEXT, NONE), "stage 3: the axis on which shards are replicas (HSDP)"),
        "wrap": Key(any_of(TEXT, TEXTS, NONE), "stage 3: names of the modules that are gathered one by one"),
        "reshard": Key(BOOL, "stage 3: give parameters back after their forward pass"),
    },
    required=("stage",),
    renamed=_words(
        stage="zero_stage level",
        offload="cpu_offload offload_optimizer offload_param",
        bucket_mb="reduce_bucket_size bucket_cap_mb reduce_scatter_bucket_size_mb",
    ),
    refused={"model_config": _OLD_ZERO, "optimizer_config": _OLD_ZERO},
)

_SYNC = Section(
    {
        "bucket_mb": Key(POSITIVE, "bucket size in MB"),
        "first_bucket_mb": Key(POSITIVE, "size of the bucket that is ready first"),
        "overlap": Key(any_of(BOOL, choice("auto")), "reduce while backward runs"),
        "reduce_dtype": Key(any_of(DTYPE, TEXT, NONE), "dtype of the reduction"),
        "compress": Key(any_of(choice("bf16", "fp16"), NONE), "dtype in which gradients are sent"),
        "fixed_order": Key(BOOL, "the same order of sums in every run"),
        "shared_memory": Key(any_of(BOOL, choice("auto"), NONE), "reduce in shared memory on one host"),
        "automatic": Key(BOOL, "attach handlers for what no named handler does"),
        "waive": Key(any_of(TEXT, TEXTS, NONE), "parameters that nobody need synchronise, by name"),
    },
    renamed=_words(
        bucket_mb="bucket_cap_mb bucket_size_mb bucket_size bucket",
        overlap="overlap_comm overlap_grad_reduce",
        compress="comm_hook",
        reduce_dtype="dtype",
        fixed_order="deterministic",
    ),
)

_MODEL = Section({"num_chunks": Key(COUNT, "model chunks per pipeline stage")}, is_open=True)
_LOG = Section({"level": Key(LEVEL, "least level shown")}, is_open=True)

KEYS: dict[str, Key] = {
    "parallel": Key(
        only_dict(_PARALLEL, "a dict of data, pipeline, tensor, expert, sequence and axes of your own"),
        "how the ranks are divided into axes",
    ),
    "gradient_handler": Key(_HANDLERS, "gradient handlers to add to what the placements demand"),
    "gradient_handlers": Key(_HANDLERS, "another name of gradient_handler"),
    "clip_grad_norm": Key(with_dict(number_from(0), _CLIP), "clip to this global norm; 0: off"),
    "gradient_accumulation": Key(COUNT, "batches per optimizer step"),
    "fp16": Key(with_dict(BOOL, _FP16), "fp16 mixed precision with a loss scale"),
    "bf16": Key(with_dict(BOOL, _BF16), "bf16 mixed precision"),
    "zero": Key(with_dict(_STAGE, _ZERO), "sharding over the data axis"),
    "schedule": Key(_NAMED, "how one step's passes run; further keys go to the schedule"),
    "sync": Key(only_dict(_SYNC), "how gradients are reduced"),
    "flat_step": Key(BOOL, "run the optimizer on flat buffers"),
    "compile": Key(
        with_dict(BOOL, Section({}, is_open=True), "dict of torch.compile's options"), "torch.compile the model"
    ),
    "seed": Key(INT, "seed of every random stream"),
    "cudnn_benchmark": Key(BOOL, "let cuDNN search for the fastest algorithm"),
    "cudnn_deterministic": Key(BOOL, "let cuDNN use deterministic algorithms only"),
    "model": Key(Rule("anything", ANYTHING.accepts, _MODEL), "your own, but for num_chunks"),
    "log": Key(with_dict(LEVEL, _LOG, "dict(level=..., ...)"), "what is logged"),
    "max_ep_size": Key(COUNT, "largest expert-parallel size"),
    "num_microbatches": Key(COUNT, "micro-batches per step of a pipeline"),
    "TENSOR_SHAPE": Key(SHAPE, "shape sent between stages; left out, the stages ask each other"),
    "SEQ_LENGTH": Key(COUNT, "sequence length; with the next two, gives the shape sent between stages"),
    "GLOBAL_BATCH_SIZE": Key(COUNT, "samples per step on all ranks"),
    "HIDDEN_SIZE": Key(COUNT, "width of the model"),
}
"""Every top-level key that is ours. Under each of them None stands for "not set"."""

REFUSED: dict[str, str] = {
    "torch_ddp": "is not read: torch DDP is never wrapped around a model. "
    "Write sync = dict(bucket_mb=..., overlap=...)",
}
"""Keys that mean something elsewhere and nothing here, with what to write instead."""

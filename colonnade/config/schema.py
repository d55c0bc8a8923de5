"""The table of keys that Colonnade reads from a config: what each may hold, and what it means.

A new key is one more entry here; checking, suggestions and the list of all keys follow from it. All ranks must have the same values, which is
compared at launch, but for keys in `differing(...)`.
"""

from __future__ import annotations

from colonnade.config.rules import (
    AMP_MODE,
    ANYTHING,
    BOOL,
    COUNT,
    DTYPE,
    FRACTION,
    INT,
    LOSS_SCALE,
    NONE,
    ORDER,
    POSITIVE,
    SHAPE,
    SOME_TEXTS,
    TEXT,
    TEXTS,
    Rule,
    Section,
    any_of,
    choice,
    differing,
    int_from,
    int_within,
    number_above,
    number_from,
    only_dict,
    with_dict,
)


def _words(**by_key: str) -> dict[str, str]:
    """Turn key="word word" into {word: key}."""
    return {word: key for key, words in by_key.items() for word in words.split()}


_SPEC = Section({"type": TEXT.means("its registered name")}, required=("type",), is_open=True)
_NAMED = with_dict(Rule("a registered name", TEXT.accepts), _SPEC, "dict(type='Name', ...)")
_HANDLERS = Rule("a list: [dict(type='Name', ...), ...]", items=_NAMED)

_AXIS = {
    "size": COUNT.means("how many ranks a group of it has"),
    "mode": any_of(TEXT, NONE).means("which initializer makes the groups: a key of INITIALIZER_MAPPING"),
}
_REST = any_of(COUNT, NONE, choice(-1), choice("auto"))
_OWN_AXIS = Section(_AXIS, required=("size",), is_open=True)
_OVER = any_of(TEXT, TEXTS, NONE).means("the axes that experts lie on")
_EXPERT = Section({**_AXIS, "over": _OVER}, required=("size",), is_open=True)
_PARALLEL = Section(
    {
        "data": with_dict(_REST, Section({"size": _REST.means("how many ranks")}, ("size",)), "dict(size=...)").means(
            "data-parallel size; None, -1 or 'auto': what the other axes leave"
        ),
        "pipeline": with_dict(
            any_of(COUNT, NONE), Section({"size": COUNT.means("how many stages")}, ("size",)), "dict(size=...)"
        ).means("number of pipeline stages"),
        "tensor": with_dict(any_of(COUNT, NONE), _OWN_AXIS, "dict(size=..., mode=..., ...)").means(
            "tensor parallelism; further keys go to the mode's initializer"
        ),
        "expert": with_dict(any_of(COUNT, NONE), _EXPERT, "dict(size=..., over=..., ...)").means("expert parallelism"),
        "sequence": with_dict(any_of(COUNT, NONE), _OWN_AXIS, "dict(size=..., mode=..., ...)").means(
            "sequence parallelism"
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

_GROUP = Section(
    {
        "params": any_of(TEXT, SOME_TEXTS).means("names of its parameters, as patterns"),
        "max_norm": any_of(POSITIVE, NONE).means("a limit of its own; None: clipped with the rest"),
        "counted": BOOL.means("whether it is part of the total norm"),
        "clipped": BOOL.means("whether it is clipped at all"),
    },
    required=("params",),
    renamed=_words(max_norm="max"),
)
_GROUP_FORM = "dict(params=<name patterns>, max_norm=..., counted=..., clipped=...)"
_CLIP = Section(
    {
        "max_norm": any_of(number_from(0), NONE).means("largest global norm; 0: off, inf: only measure"),
        "norm_type": ORDER.means("p of the norm"),
        "groups": Rule(
            f"a dict of {_GROUP_FORM} by name or None", NONE.accepts, Section({}, others=only_dict(_GROUP, _GROUP_FORM))
        ).means("parameters that are clipped apart"),
        "nonfinite": any_of(choice("skip", "raise", "propagate"), NONE).means("what to do when the norm is nan or inf"),
        "method": with_dict(any_of(TEXT, NONE), _SPEC, "dict(type='Name', ...)").means("how the threshold is found"),
        "per": choice("group", "layer", "parameter").means(
            "what is clipped by its own norm; group: the whole, and groups with a max_norm"
        ),
        "report": choice("group", "layer", "parameter").means(
            "what engine.grad_norms() tells apart; the same as `per` by itself"
        ),
    },
    renamed=_words(
        max_norm="max_grad_norm clip_grad_norm clip_norm norm value max",
        norm_type="p",
        nonfinite="error_if_nonfinite",
    ),
)

_FP16 = Section(
    {
        "mode": any_of(choice("torch", "apex", "naive"), AMP_MODE, NONE).means("kind of mixed precision"),
        "init_scale": LOSS_SCALE.means("loss scale to start from"),
        "growth_factor": number_above(1).means("the scale grows by this factor"),
        "backoff_factor": FRACTION.means("the scale shrinks by this factor after an overflow"),
        "growth_interval": COUNT.means("steps without overflow before the scale grows"),
        "min_scale": any_of(LOSS_SCALE, NONE).means("smallest loss scale"),
        "max_scale": any_of(LOSS_SCALE, NONE).means("largest loss scale"),
        "hysteresis": COUNT.means("overflows before the scale shrinks"),
        "enabled": BOOL.means("False: as if fp16 were left out"),
        "dynamic_grad_scale": BOOL.means("whether the scale moves at all"),
    },
    renamed=_words(
        init_scale="initial_scale loss_scale initial_scale_power scale",
        growth_interval="loss_scale_window",
        min_scale="min_loss_scale",
        max_scale="max_loss_scale",
        mode="opt_level type",
    ),
    refused={"verbose": "is not read: changes of the scale are not logged. Leave it out"},
)
_BF16 = Section({"master_weights": BOOL.means("the optimizer steps on fp32 weights")})
_FLOAT8 = Section(
    {
        "recipe": choice("tensorwise", "rowwise", "rowwise_with_gw_hp").means("how torchao scales values"),
        "skip": any_of(TEXT, TEXTS, NONE).means("layers that keep their dtype, by name"),
        "emulate": BOOL.means("try it out where there is no float8 hardware"),
    }
)

_OLD_ZERO = (
    "is an older form. Write zero = dict(stage=3, offload='cpu'); settings of the loss scale go to fp16 = dict(...)"
)
_STAGE = choice(0, 1, 2, 3)
_ZERO = Section(
    {
        "stage": _STAGE.means("1: optimizer state is sharded, 2: and gradients, 3: and parameters"),
        "reduce_scatter": BOOL.means("reduce-scatter gradients instead of all-reduce"),
        "offload": any_of(BOOL, TEXT, NONE).means("device that keeps the shards between steps"),
        "bucket_mb": POSITIVE.means("bucket size in MiB"),
        "gather_ahead": BOOL.means("stages 1, 2: gather parameters while the next forward pass runs"),
        "prefetch": int_from(0).means("stage 3: how many modules are gathered ahead"),
        "master_weights": BOOL.means("the optimizer steps on fp32 weights"),
        "replicate": any_of(TEXT, NONE).means("stage 3: the axis on which shards are replicas (HSDP)"),
        "wrap": any_of(TEXT, TEXTS, NONE).means("stage 3: names of the modules that are gathered one by one"),
        "reshard": BOOL.means("stage 3: give parameters back after their forward pass"),
    },
    required=("stage",),
    renamed=_words(
        stage="zero_stage level",
        offload="cpu_offload offload_optimizer offload_param",
        bucket_mb="reduce_bucket_size bucket_cap_mb reduce_scatter_bucket_size_mb",
    ),
    refused={"model_config": _OLD_ZERO, "optimizer_config": _OLD_ZERO},
)

_MODES = choice("none", "full", "selective")
_ACTIVATIONS = Section(
    {
        "mode": _MODES.means("what a block computes again in backward: nothing, everything, all but the ops of `keep`"),
        "every": COUNT.means("of the blocks, every n-th one"),
        "blocks": any_of(TEXT, TEXTS, NONE).means(
            "their classes, or patterns of module names; left out, they are looked for"
        ),
        "keep": any_of(TEXTS, NONE).means("mode 'selective': ops whose results are kept, such as 'aten.mm'"),
        "offload": BOOL.means("what is kept for backward lies in the host's memory"),
    },
    renamed=_words(
        mode="type policy granularity", blocks="modules layers wrap", every="every_n interval", offload="cpu_offload"
    ),
)

_SYNC = Section(
    {
        "bucket_mb": POSITIVE.means("bucket size in MiB"),
        "first_bucket_mb": POSITIVE.means("size of the bucket that is ready first"),
        "overlap": any_of(BOOL, choice("auto")).means("reduce while backward runs"),
        "reduce_dtype": any_of(DTYPE, TEXT, NONE).means("dtype of the reduction, at every stage of zero"),
        "compress": any_of(choice("bf16", "fp16"), NONE).means("dtype in which gradients are sent"),
        "fixed_order": BOOL.means("the same order of sums in every run"),
        "shared_memory": any_of(BOOL, choice("auto"), NONE).means("reduce in shared memory on one host"),
        "automatic": BOOL.means("attach handlers for what no named handler does"),
        "waive": any_of(TEXT, TEXTS, NONE).means("parameters that nobody need synchronise, by name"),
    },
    renamed=_words(
        bucket_mb="bucket_cap_mb bucket_size_mb bucket_size bucket",
        overlap="overlap_comm overlap_grad_reduce",
        compress="comm_hook",
        reduce_dtype="dtype",
        fixed_order="deterministic",
    ),
)

_GUARD = Section(
    {"every": COUNT.means("steps between two comparisons")}, renamed=_words(every="interval every_n steps")
)

_MODEL = Section({"num_chunks": COUNT.means("model chunks per pipeline rank")}, is_open=True)

_COMPILE = Section({"blocks": BOOL.means("False: the model in one piece")}, is_open=True)

KEYS: dict[str, Rule] = {
    "parallel": only_dict(_PARALLEL, "a dict of data, pipeline, tensor, expert, sequence and axes of your own").means(
        "how the ranks are divided into axes"
    ),
    "gradient_handler": _HANDLERS.means("gradient handlers to add to what the placements demand"),
    "gradient_handlers": _HANDLERS.means("another name of gradient_handler"),
    "clip_grad_norm": with_dict(number_from(0), _CLIP).means("clip to this global norm; 0: off"),
    "gradient_accumulation": COUNT.means("batches per optimizer step"),
    "fp16": with_dict(BOOL, _FP16).means("fp16 mixed precision with a loss scale"),
    "bf16": with_dict(BOOL, _BF16).means("bf16 mixed precision"),
    "float8": with_dict(BOOL, _FLOAT8).means("linear layers in float8, by torchao"),
    "zero": with_dict(_STAGE, _ZERO).means("sharding over the data axis"),
    "schedule": _NAMED.means("how one step's passes run; further keys go to the schedule"),
    "sync": only_dict(_SYNC).means("how gradients are reduced"),
    "compare_stages": BOOL.means(
        "False: pipeline stages that `split` has not made may be alike in names, shapes and values of their parameters"
    ),
    "guard": with_dict(BOOL, _GUARD).means(
        "compare replicas and the calls of handlers between ranks every so many steps"
    ),
    "compare_batches": BOOL.means("compare the first batches of ranks that see the same data; on unless False"),
    "activation_checkpoint": with_dict(any_of(BOOL, _MODES), _ACTIVATIONS).means(
        "which activations are computed again in backward, or kept on the host; True: 'full'"
    ),
    "flat_step": BOOL.means("run the optimizer on flat buffers"),
    "graph_step": BOOL.means("run the flat step and the clipping as CUDA graphs"),
    "compile": with_dict(BOOL, _COMPILE, "dict of torch.compile's options").means(
        "torch.compile the model, block by block"
    ),
    "seed": INT.means("seed of every random stream"),
    "cudnn_benchmark": BOOL.means("let cuDNN search for the fastest algorithm"),
    "cudnn_deterministic": BOOL.means("let cuDNN use deterministic algorithms only"),
    "compare_weights": BOOL.means(
        "False: ranks that have the same seed may start with other weights; the first's are taken"
    ),
    "model": differing(Rule("anything", ANYTHING.accepts, _MODEL)).means("your own, but for num_chunks"),
    "num_microbatches": int_within(1, 1 << 16).means("micro-batches per step of a pipeline"),
    "TENSOR_SHAPE": SHAPE.means("shape sent between stages; left out, the stages ask each other"),
}
"""Every top-level key that is ours. Under each of them None stands for "not set"."""

REFUSED: dict[str, str] = {
    "torch_ddp": "is not read: torch DDP is never wrapped around a model. "
    "Write sync = dict(bucket_mb=..., overlap=...)",
    "max_ep_size": "is not read. Write parallel = dict(expert=...), the number of ranks that experts are divided over",
}
"""Keys that mean something elsewhere and nothing here, with what to write instead."""

"""The check of a whole config: a table of wrong configs and what is said about each."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from colonnade.config import Config, load_config
from colonnade.errors import ConfigError

HANDLER_LIST = "must be a list: [dict(type='Name', ...), ...]"
CLIP_KEYS = "max_norm, norm_type, groups, nonfinite, method, per, report"
SYNC_KEYS = "bucket_mb, first_bucket_mb, overlap, reduce_dtype, compress, fixed_order, shared_memory, automatic, waive"
ORDER = "must be a number > 0 and <= 32, or inf or 'inf'"
GROUP = "must be dict(params=<name patterns>, max_norm=..., counted=..., clipped=...)"
GROUPS = "must be a dict of dict(params=<name patterns>, max_norm=..., counted=..., clipped=...) by name or None"
AXES = "data, pipeline, tensor, expert, sequence"

# A config with one problem -> the line that tells it.
BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"config": {"zero": 1, "lr": 0.1, "parallel": {"tensor": 2}}, "steps": 100},
        "config = {'zero': 1, 'lr': 0.1, 'parallel': {'tensor': 2}}   is not read: the keys of a config file are variables at its "
        "top level. Write zero = ..., parallel = ... without the dict around them",
    ),
    ({"parallel": 2}, f"parallel = 2   must be a dict of {AXES} and your own axes"),
    ({"parallel": {"tensro": 2}}, "parallel.tensro = 2   unknown key. Did you mean `tensor`?"),
    ({"parallel": {"tensro": {"size": 2}}}, "parallel.tensro = {'size': 2}   unknown key. Did you mean `tensor`?"),
    ({"parallel": {"tp": 2}}, "parallel.tp = 2   unknown key. Did you mean `tensor`?"),
    (
        {"parallel": {"mine": 2}},
        f"parallel.mine = 2   unknown key; allowed: {AXES}, or a name of your own with dict(size=..., mode=..., ...)",
    ),
    (
        {"parallel": {"mode": "3d"}},
        "parallel.mode = '3d'   belongs to an axis: parallel = dict(tensor=dict(size=..., mode=...))",
    ),
    ({"parallel": {1: 2}}, "parallel[1] = 2   is no valid key: a key is a non-empty string"),
    ({"parallel": {"tensor": {"mode": "1d"}}}, "parallel.tensor.size   is missing; it must be an int >= 1"),
    ({"parallel": {"tensor": {"siez": 2}}}, "parallel.tensor.siez = 2   unknown key. Did you mean `size`?"),
    ({"parallel": {"tensor": {"size": 0}}}, "parallel.tensor.size = 0   must be an int >= 1"),
    ({"parallel": {"tensor": {"size": 2.0}}}, "parallel.tensor.size = 2.0   must be an int >= 1"),
    ({"parallel": {"tensor": {"size": True}}}, "parallel.tensor.size = True   must be an int >= 1"),
    ({"parallel": {"tensor": {"size": 2, "mode": 1}}}, "parallel.tensor.mode = 1   must be a non-empty string or None"),
    (
        {"parallel": {"tensor": True}},
        "parallel.tensor = True   must be an int >= 1 or None, or dict(size=..., mode=..., ...)",
    ),
    ({"parallel": {"pipeline": "auto"}}, "parallel.pipeline = 'auto'   must be an int >= 1 or None, or dict(size=...)"),
    ({"parallel": {"pipeline": {"size": 2, "mode": "x"}}}, "parallel.pipeline.mode = 'x'   unknown key; allowed: size"),
    ({"parallel": {"data": 0}}, "parallel.data = 0   must be an int >= 1, None, -1 or 'auto', or dict(size=...)"),
    (
        {"parallel": {"expert": {"size": 2, "over": 3}}},
        "parallel.expert.over = 3   must be a non-empty string, a list of strings or None",
    ),
    ({"parallel": {"mine": {"mode": "x"}}}, "parallel.mine.size   is missing; it must be an int >= 1"),
    ({"gradient_handler": "A"}, f"gradient_handler = 'A'   {HANDLER_LIST}"),
    ({"gradient_handlers": {"type": "A"}}, "gradient_handlers = {'type': 'A'}   " + HANDLER_LIST),
    ({"gradient_handler": ["A", 3]}, "gradient_handler[1] = 3   must be a registered name, or dict(type='Name', ...)"),
    ({"gradient_handler": [{"type": 3}]}, "gradient_handler[0].type = 3   must be a non-empty string"),
    ({"gradient_handler": [{"bucket": 3}]}, "gradient_handler[0].type   is missing; it must be a non-empty string"),
    (
        {"gradient_handler": ["A"], "gradient_handlers": ["A"]},
        "gradient_handlers   is an alias of gradient_handler, which is set too: remove one",
    ),
    ({"clip_grad_norm": -1.0}, f"clip_grad_norm = -1.0   must be a number >= 0, or a dict of {CLIP_KEYS}"),
    ({"clip_grad_norm": float("nan")}, f"clip_grad_norm = nan   must be a number >= 0, or a dict of {CLIP_KEYS}"),
    ({"clip_grad_norm": True}, f"clip_grad_norm = True   must be a number >= 0, or a dict of {CLIP_KEYS}"),
    (
        {"clip_grad_norm": {"max_norm": 1, "foreach": True}},
        f"clip_grad_norm.foreach = True   unknown key; allowed: {CLIP_KEYS}",
    ),
    ({"clip_grad_norm": {"max_nrom": 1}}, "clip_grad_norm.max_nrom = 1   unknown key. Did you mean `max_norm`?"),
    (
        {"clip_grad_norm": {"norm_type": 2}},
        "clip_grad_norm.max_norm   is missing: a number >= 0, or give groups or a method",
    ),
    ({"clip_grad_norm": {"max_norm": 1, "norm_type": 0}}, f"clip_grad_norm.norm_type = 0   {ORDER}"),
    ({"clip_grad_norm": {"max_norm": 1, "norm_type": 64}}, f"clip_grad_norm.norm_type = 64   {ORDER}"),
    (
        {"clip_grad_norm": 10**400},
        f"clip_grad_norm = {str(10**400)[:57]}...   is too large: the largest allowed number is 2**63 - 1",
    ),
    (
        {"clip_grad_norm": {"method": ""}},
        "clip_grad_norm.method = ''   must be a non-empty string or None, or dict(type='Name', ...)",
    ),
    ({"clip_grad_norm": {"groups": [{"max_norm": 1.0}]}}, f"clip_grad_norm.groups = [{{'max_norm': 1.0}}]   {GROUPS}"),
    ({"clip_grad_norm": {"groups": {"a": "head.*"}}}, f"clip_grad_norm.groups.a = 'head.*'   {GROUP}"),
    (
        {"clip_grad_norm": {"groups": {"a": {"max_norm": 1}}}},
        "clip_grad_norm.groups.a.params   is missing; it must be a non-empty string or a non-empty list of strings",
    ),
    (
        {"clip_grad_norm": {"groups": {"a": {"params": [None]}}}},
        "clip_grad_norm.groups.a.params = [None]   must be a non-empty string or a non-empty list of strings",
    ),
    (
        {"clip_grad_norm": {"groups": {"a": {"params": "*", "clipped": 1000}}}},
        "clip_grad_norm.groups.a.clipped = 1000   must be True or False",
    ),
    (
        {"clip_grad_norm": {"groups": {"a": {"params": "*", "counted": {}}}}},
        "clip_grad_norm.groups.a.counted = {}   must be True or False",
    ),
    (
        {"clip_grad_norm": {"groups": {"a": {"params": "*", "max_norm": 0}}}},
        "clip_grad_norm.groups.a.max_norm = 0   must be a number > 0 or None",
    ),
    (
        {"clip_grad_norm": {"groups": {"a": {"params": "*", "max": 1}}}},
        "clip_grad_norm.groups.a.max = 1   unknown key. Did you mean `max_norm`?",
    ),
    ({"gradient_accumulation": 0}, "gradient_accumulation = 0   must be an int >= 1"),
    ({"gradient_accumulation": 1.5}, "gradient_accumulation = 1.5   must be an int >= 1"),
    ({"fp16": {"mdoe": "naive"}}, "fp16.mdoe = 'naive'   unknown key. Did you mean `mode`?"),
    ({"fp16": {"loss_scale": 2}}, "fp16.loss_scale = 2   unknown key. Did you mean `init_scale`?"),
    ({"fp16": {"backoff_factor": 2}}, "fp16.backoff_factor = 2   must be a number between 0 and 1"),
    ({"fp16": {"initial_scale": 2}}, "fp16.initial_scale = 2   unknown key. Did you mean `init_scale`?"),
    ({"fp16": {"min_scale": 4, "max_scale": 2}}, "fp16.min_scale = 4   must not be above max_scale = 2"),
    (
        {"fp16": {"max_scale": 1024}},
        "fp16.max_scale = 1024   must not be below init_scale = 65536: give a smaller init_scale too",
    ),
    (
        {"fp16": {"init_scale": 4, "min_scale": 8}},
        "fp16.min_scale = 8   must not be above init_scale = 4: give a larger init_scale too",
    ),
    ({"fp16": {"mode": "O2"}}, "fp16.mode = 'O2'   must be 'torch', 'apex' or 'naive', a member of AMP_TYPE or None"),
    (
        {"fp16": {"verbose": True}},
        "fp16.verbose = True   is not read: changes of the scale are not logged. Leave it out",
    ),
    (
        {"fp16": {"growth_interval": 2**63}},
        f"fp16.growth_interval = {2**63}   is too large: the largest allowed number is 2**63 - 1",
    ),
    ({"fp16": {"max_scale": 1e300}}, "fp16.max_scale = 1e+300   must be a number from 2**-126 to 2**127 or None"),
    ({"fp16": {"init_scale": 0}}, "fp16.init_scale = 0   must be a number from 2**-126 to 2**127"),
    (
        {"clip_grad_norm": {"groups": {"a": {"params": []}}}},
        "clip_grad_norm.groups.a.params = []   must be a non-empty string or a non-empty list of strings",
    ),
    ({"fp16": True, "bf16": True}, "bf16   is on together with fp16: remove one"),
    ({"fp16": {}, "bf16": {}}, "bf16   is on together with fp16: remove one"),
    ({"bf16": "yes"}, "bf16 = 'yes'   must be True or False, or a dict of master_weights"),
    ({"bf16": {"master_weight": True}}, "bf16.master_weight = True   unknown key. Did you mean `master_weights`?"),
    (
        {"zero": 4},
        "zero = 4   must be 0, 1, 2 or 3, or a dict of stage, reduce_scatter, offload, bucket_mb, gather_ahead, prefetch, master_weights, replicate, wrap, reshard",
    ),
    (
        {"zero": True},
        "zero = True   must be 0, 1, 2 or 3, or a dict of stage, reduce_scatter, offload, bucket_mb, gather_ahead, prefetch, master_weights, replicate, wrap, reshard",
    ),
    ({"zero": {"offload": True}}, "zero.stage   is missing; it must be 0, 1, 2 or 3"),
    ({"zero": {"level": 2}}, "zero.level = 2   unknown key. Did you mean `stage`?"),
    (
        {"zero": {"model_config": {}}},
        "zero.model_config = {}   is an obsolete form. Write zero = dict(stage=3, "
        "offload='cpu'); loss scale settings belong to fp16 = dict(...)",
    ),
    ({"schedule": 3}, "schedule = 3   must be a registered name, or dict(type='Name', ...)"),
    ({"schedule": {"tpye": "A"}}, "schedule.tpye = 'A'   unknown key. Did you mean `type`?"),
    ({"sync": True}, f"sync = True   must be a dict of {SYNC_KEYS}"),
    ({"sync": {"bucket_md": 1}}, "sync.bucket_md = 1   unknown key. Did you mean `bucket_mb`?"),
    ({"sync": {"static_graph": 1}}, f"sync.static_graph = 1   unknown key; allowed: {SYNC_KEYS}"),
    ({"sync": {"waive": [1]}}, "sync.waive = [1]   must be a non-empty string, a list of strings or None"),
    ({"sync": {"overlap": 1}}, "sync.overlap = 1   must be True or False or 'auto'"),
    ({"flat_step": 1}, "flat_step = 1   must be True or False"),
    ({"seed": 1.0}, "seed = 1.0   must be an int"),
    ({"cudnn_benchmark": "on"}, "cudnn_benchmark = 'on'   must be True or False"),
    (
        {"torch_ddp": {"find_unused_parameters": True}},
        "torch_ddp = {'find_unused_parameters': True}   is not read: models are not wrapped in torch DDP. "
        "Write sync = dict(bucket_mb=..., overlap=...)",
    ),
    ({"model": {"num_chunks": 0}}, "model.num_chunks = 0   must be an int >= 1"),
    ({"num_microbatches": 0}, "num_microbatches = 0   must be an int from 1 to 65536"),
    ({"TENSOR_SHAPE": [2, "x"]}, "TENSOR_SHAPE = [2, 'x']   must be a list or tuple of ints >= 1"),
    (
        {"max_ep_size": 2},
        "max_ep_size = 2   is not read. Write parallel = dict(expert=...), the number of ranks over which experts are sharded",
    ),
    ({"num_microbatches": 10**6}, "num_microbatches = 1000000   must be an int from 1 to 65536"),
    ({"seed": 10**5000}, "seed = <int>   is too large: the largest allowed number is 2**63 - 1"),
    ({"": 1}, "'' = 1   is no valid key: a key is a non-empty string"),
    ({"parallel": {"": {"size": 2}}}, "parallel.'' = {'size': 2}   is no valid key: a key is a non-empty string"),
    ({"compile": {"": 2}}, "compile.'' = 2   is no valid key: a key is a non-empty string"),
    ({"sync": {"callback": "print"}}, f"sync.callback = 'print'   unknown key; allowed: {SYNC_KEYS}"),
    (
        {"sync": {"reduce_dtype": numpy.dtype("float32")}},
        "sync.reduce_dtype = dtype('float32')   must be a torch dtype, a non-empty string or None",
    ),
    (
        {"clip_grad_nrom": 1.0},
        "clip_grad_nrom = 1.0   unknown key. Did you mean `clip_grad_norm`? To use it as your own key, rename it",
    ),
    ({3: 4}, "[3] = 4   is no valid key: a key is a non-empty string"),  # type: ignore[dict-item]
]

GOOD: list[dict[str, Any]] = [
    {},
    {"zero": 1, "config": {"seed": 3}},  # a dict of the user's own, in a file whose keys are read
    {"config": {"hidden_size": 64}},
    {"parallel": {"pipeline": {"size": 1}, "tensor": {"size": 2, "mode": "new_mode"}}},
    {"parallel": {"data": -1, "pipeline": 2, "tensor": {"size": 8, "mode": "2.5d", "depth": 2}}},
    {"parallel": {"data": "auto", "tensor": None, "expert": 2, "sequence": {"size": 2}}},
    {"parallel": {"data": {"size": None}, "expert": {"size": 2, "over": ("data", "tensor")}}},
    {"parallel": {"mine": {"size": 2, "mode": "new_mode", "arg1": 1, "model": "x"}, "tensor2": {"size": 1}}},
    {"gradient_handler": [{"type": "MyGradientHandler"}]},
    {"gradient_handlers": [{"type": "A", "bucket_mb": 3}, "B"]},
    {"gradient_handler": ("A",), "gradient_handlers": None},
    {"clip_grad_norm": 1.0},
    {"clip_grad_norm": 0},
    {"clip_grad_norm": float("inf")},
    {"clip_grad_norm": {"max_norm": 1, "norm_type": "inf", "groups": {}, "nonfinite": "skip", "method": None}},
    {"clip_grad_norm": {"groups": {"head": {"params": ["head.*"], "max_norm": 1.0, "counted": False}}}},
    {"fp16": {"mode": None, "init_scale": 2**16, "growth_factor": 2, "hysteresis": 2}},
    {"fp16": {"enabled": False}, "bf16": {"master_weights": True}},
    {"fp16": None, "bf16": True},
    {"zero": None},
    {"zero": {"stage": 3, "reduce_scatter": True, "offload": "cpu", "bucket_mb": 25, "prefetch": 2}},
    {"schedule": "PipelineSchedule"},
    {"schedule": {"type": "Mine", "anything": 1, "types": 2}},
    {"sync": {"bucket_mb": 25, "overlap": True, "reduce_dtype": "float32", "compress": "bf16"}},
    {"sync": {"shared_memory": "auto", "waive": ["head.*"], "fixed_order": True}},
    {"model": {"num_chunks": 2, "num_layers": 12}, "log": {"level": "info", "dir": "runs"}},
    {"model": "gpt2", "log": 10, "seed": 0, "flat_step": True, "gradient_accumulation": 4},
    {"num_microbatches": 4, "TENSOR_SHAPE": (2, 8, 16), "SEQ_LENGTH": 8, "GLOBAL_BATCH_SIZE": 4, "HIDDEN_SIZE": 16},
    {"TENSOR_SHAPE": [(2, 8), (2,)]},
    dict.fromkeys(("parallel", "gradient_handler", "clip_grad_norm", "sync", "seed", "log", "schedule")),
]


@pytest.mark.parametrize(("values", "line"), BAD, ids=[line[:50] for _, line in BAD])
def test_wrong_config(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(values)
    assert str(caught.value) == f"colonnade: 1 problem in the config\n  {line} [C001]"


@pytest.mark.parametrize("values", GOOD, ids=[str(Config(values))[:50] for values in GOOD])
def test_right_config(values: dict[str, Any]) -> None:
    assert load_config(values) == values
    assert load_config(load_config(values).freeze()) == values


def test_every_problem_is_told_at_once() -> None:
    single = [(values, line) for values, line in BAD if len(values) == 1]
    chosen = {next(iter(values)): line for values, line in single}
    joined = {key: value for values, _ in single for key, value in values.items()}
    joined.pop("gradient_handlers")  # with its twin it would be one problem more
    chosen.pop("gradient_handlers")
    joined.pop("fp16")
    chosen.pop("fp16")
    assert len(chosen) > 15
    with pytest.raises(ConfigError) as caught:
        load_config(joined)
    head, *lines = str(caught.value).removesuffix(" [C001]").splitlines()
    assert head == f"colonnade: {len(chosen)} problems in the config"
    assert lines == [f"  {chosen[key]}" for key in joined]


def test_functions_are_never_mistaken_for_settings() -> None:
    def gradient_clipping() -> None: ...

    config = load_config({"gradient_clipping": gradient_clipping, "clip_grad_norms": max, "zeroo": len})
    assert config.gradient_clipping is gradient_clipping


def _holds_itself(container: Any) -> Any:
    container["deeper"] = [container]
    return container


@pytest.mark.parametrize("make", [lambda: _holds_itself({}), lambda: {"mine": _holds_itself({"a": 1})}])
def test_a_dict_that_holds_itself(make: Any) -> None:
    with pytest.raises(ConfigError, match="'deeper' contains itself or is nested too deeply"):
        load_config(make())

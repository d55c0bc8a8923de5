"""`parallelize`: shard the layers of an unmodified model by a TP plan, and split it into pipeline stages.

Each step has a file: `plans.py` finds the TP plan and the modules that its patterns match, `plan_checks.py` checks it,
`styles.py` applies a style to a layer. `model_loss.py`, `attention_patch.py` and `lora.py` have the additions for
transformers models.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from colonnade.context.parallel_context import ParallelContext
from colonnade.core import given_or_global
from colonnade.engine.model import is_parallelized, mark_parallelized
from colonnade.errors import ConfigError, ContextError, PlacementError
from colonnade.hf.attention_patch import prepare_sequence
from colonnade.hf.lora import Adapters
from colonnade.hf.model_loss import base_model, join_router_loss
from colonnade.hf.plan_checks import check_entries, check_mode, record_unsharded, with_ties
from colonnade.hf.plans import ParallelizePlan, Target, place_of, plan_of, resolve
from colonnade.hf.styles import style_of
from colonnade.nn.layer.spread import size_of
from colonnade.parallel.split import Split, build_schedule, split


def parallelize(
    model: nn.Module,
    parallelize_plan: ParallelizePlan | None = None,
    *,
    sample: Any = None,
    context: ParallelContext | None = None,
    plan: ParallelizePlan | None = None,
) -> nn.Module | Split:
    """Shard the layers of a model by a TP plan, and split the model into stages if the config has a pipeline.

    The model is changed in place. Without tensor or expert parallelism in the launched config no layer is sharded, so the
    call may stay in a script. With `parallel.sequence` (context parallelism), a transformers model then takes full batches
    and computes on this rank's tokens.

    Args:
        model: The full model, built identically on every rank; it may be on the meta device.
        parallelize_plan: The style of each layer by name pattern, as in
            `{"blocks.*.fc1": "colwise", "blocks.*.fc2": "rowwise"}`; values may be styles of torch's `parallelize_module`.
            Defaults to the model's own TP plan (Hugging Face models ship one).
        sample: The data of one batch. A pipeline needs it for models that are not from Hugging Face, as `colonnade.split`
            does. If layers are sharded, a forward pass before and one after are compared as well.
        context: The launched context; defaults to the global one.
        plan: Deprecated name of `parallelize_plan`.

    Returns:
        The same model, or its pipeline stages; pass it to `initialize`.

    Raises:
        PlacementError: The TP plan does not fit the model. The model is left as it was, unless the error is a mismatch
            with the forward pass of `sample`, which is found after sharding.

    Collective over the world if `sample` is given.

    Example::

        gpc = colonnade.launch(dict(parallel=dict(tensor=dict(size=2, mode="1d"))))
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        model = colonnade.parallelize(model, {"0": "colwise", "2": "rowwise"})
    """
    context = given_or_global(context)
    parallelize_plan = renamed_plan("parallelize", parallelize_plan, plan)
    if not context.is_launched:
        raise ContextError("parallelize() needs a launched context: call colonnade.launch(config) first", code="C013")
    given: Any = model
    if not isinstance(given, nn.Module):
        raise PlacementError(
            f"parallelize() takes the full model, an nn.Module, but got a {type(given).__name__}. Pass the full "
            "model; parallelize() makes the pipeline stages.",
            code="C060",
        )
    base = base_model(model)
    if is_parallelized(base):
        raise PlacementError(
            f"{type(base).__name__} was already passed to parallelize(), and a model can be sharded only once. "
            "from_pretrained() also calls parallelize(). Pass the result of that call to initialize, or build the "
            "model again.",
            code="C060",
        )
    check_mode(context)

    # LoRA adapters are taken off first: styles then see the plain layers that the patterns name.
    adapters = Adapters(model, context)
    base = adapters.base
    try:
        if parallelize_plan is None:
            parallelize_plan = plan_of(base, context)
            if not parallelize_plan and context.tensor_parallel_size > 1:
                raise PlacementError(
                    f"{type(base).__name__} has no TP plan. Pass a plan, such as parallelize(model, "
                    "{'blocks.*.fc1': 'colwise', 'blocks.*.fc2': 'rowwise'}).",
                    code="C060",
                )
        entries = resolve(parallelize_plan, base)
        if context.tensor_parallel_size > 1:
            entries = with_ties(entries, base)

        # All checks come before the first change, so that a rejected TP plan leaves the model as it was.
        check_entries(entries, base, context)
        compare = record_unsharded(base, entries, sample, context)

        # The forward pass of the full model is replaced before stages are made, because stages run this forward pass.
        join_router_loss(base, context)
        prepare_sequence(base, context)
        stages: Split | None = None
        if context.pipeline_parallel_size > 1:
            schedule = build_schedule(context)
            if not hasattr(schedule, "stage_ranks"):
                raise ConfigError(
                    f"{type(schedule).__name__} does not run a pipeline, but the config has "
                    f"parallel.pipeline={context.pipeline_parallel_size}. Choose a pipeline schedule, such as "
                    "schedule=dict(type='OneFOneB', num_microbatches=8)."
                )
            num_stages = len(schedule.stage_ranks(context.pipeline_parallel_size))
            stages = split(base, num_stages=num_stages, sample=sample)

        # Stages may share layers, and a layer may have several names: `done` keeps each from being sharded twice, and
        # `shards` gives two layers that share a parameter the same shard of it.
        shards, done = WeakIdKeyDictionary(), set[Any]()
        mark_parallelized(base)
        modules = [base] if stages is None else list(stages)
        for stage in modules:
            mark_parallelized(stage)
            named = (*stage.named_modules(remove_duplicate=False), *stage.named_parameters(remove_duplicate=False))
            names = {name for name, _ in named}
            for name, entry in entries.items():
                if name not in names or (place := place_of(name, stage)) in done:
                    continue
                done.add(place)
                target = Target(name, *place, stage, context, entry.options, shards)
                if entry.style is not None:
                    apply_style, mode = style_of(entry.style, name)
                    if size_of(mode, context) > 1:
                        apply_style(target)
                # Sizes that forward passes read from attributes (a number of heads) become those of one rank.
                for attribute in entry.options.get("divide", ()):
                    local = getattr(target.module, attribute) // context.tensor_parallel_size
                    setattr(target.module, attribute, local)
        compare(modules)
        for stage in modules:
            adapters.put_back(stage, entries, shards)
    except BaseException:
        adapters.undo()
        raise
    return model if stages is None else stages


def renamed_plan(function: str, parallelize_plan: Any, plan: Any) -> Any:
    """Return the TP plan of a call that may use the deprecated keyword `plan`."""
    if plan is None:
        return parallelize_plan
    if parallelize_plan is not None:
        raise PlacementError(
            f"{function}() got parallelize_plan= and its old name plan=. Pass only parallelize_plan=.", code="C060"
        )
    warnings.warn(f"{function}(plan=...) is deprecated; write parallelize_plan=...", DeprecationWarning, stacklevel=3)
    return plan

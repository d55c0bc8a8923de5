"""parallelize: a model as it is, and a plan, to a model of which each rank holds its parts.

`_cut` tells the whole way. Each step of it has a file: whose plan (`model_plans.py`), which modules its patterns name (`match.py`),
whether it can be right (`plan_checks.py`, `plan_comparison.py`), what a style does to a layer (`styles.py`, `expert_styles.py`),
and what transformers' models need beside (`model_loss.py`, `attention_patch.py`, `lora.py`).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from colonnade.context.parallel_context import ParallelContext
from colonnade.core import given_or_global
from colonnade.engine.model import has_plan, note_plan
from colonnade.errors import ConfigError, ContextError, PlacementError
from colonnade.hf import expert_styles as _experts  # noqa: F401  registers the styles for experts
from colonnade.hf.attention_patch import prepare_sequence
from colonnade.hf.lora import Adapters
from colonnade.hf.match import Plan, PlanEntry, Target, place_of, resolve
from colonnade.hf.model_loss import base_model, join_router_loss
from colonnade.hf.model_plans import plan_of
from colonnade.hf.plan_checks import check_entries, check_mode, with_ties
from colonnade.hf.plan_comparison import compared
from colonnade.hf.styles import style_of
from colonnade.nn.layer.spread import size_of
from colonnade.parallel.split import Split, build_schedule, split


def parallelize(
    model: nn.Module, plan: Plan | None = None, *, sample: Any = None, context: ParallelContext | None = None
) -> nn.Module | Split:
    """Cut the layers of a model by a plan, for tensor parallelism, and into stages where there is a pipeline.

    `plan` says how each layer is cut, by its name: {"blocks.*.fc1": "colwise", "blocks.*.fc2": "rowwise"}. Left out, it
    is the one that the model brings along, as those of Hugging Face do. The model is changed in place, and is the
    same, built alike, on every rank; it may be on the meta device. Without tensor parallelism in the launched
    config nothing is cut. With sequence parallelism a model of Hugging Face's takes its part of each batch. Give what is
    returned to `initialize`.

    `sample`, the data of a batch, is needed in a pipeline by models that are not Hugging Face's, as for `colonnade.split`. Where
    it is given and layers are cut, one pass of the model before and one after are compared, and a layer that gives something
    else is named; then this is collective over the world.
    """
    context = given_or_global(context)
    if not context.is_launched:
        raise ContextError("parallelize() needs a launched context: call colonnade.launch(config) first", code="C013")
    _check_model(model)
    check_mode(context)
    adapters = Adapters(model, context)
    try:
        stages = _cut(adapters.base, plan, context, adapters, sample)
    except BaseException:
        adapters.undo()
        raise
    return model if stages is None else stages


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise PlacementError(
            f"parallelize() takes the whole model, an nn.Module, not a {type(model).__name__}; it makes the stages of a "
            f"pipeline itself",
            code="C060",
        )
    base = base_model(model)
    if has_plan(base):
        raise PlacementError(
            f"{type(base).__name__} was given to parallelize already (from_pretrained does that too), and a model is cut once: "
            f"give what it returned to initialize, or build the model again",
            code="C060",
        )


def _cut(
    model: nn.Module, plan: Plan | None, context: ParallelContext, adapters: Adapters, sample: Any
) -> Split | None:
    """Cut the layers, and the adapters that sit on them; the stages, if there is a pipeline."""
    # Which modules and parameters the plan names, and what it says of each.
    if plan is None:
        plan = plan_of(model, context)
        if not plan and context.tensor_parallel_size > 1:
            raise PlacementError(
                f"{type(model).__name__} brings no plan along; give one, as in "
                f"parallelize(model, {{'blocks.*.fc1': 'colwise', 'blocks.*.fc2': 'rowwise'}})",
                code="C060",
            )
    entries = resolve(plan, model)
    entries = with_ties(entries, model) if context.tensor_parallel_size > 1 else entries
    # All errors are told while the model is still whole: a plan that is refused leaves it as it was.
    check_entries(entries, model, context)
    compare = compared(model, entries, sample, context)
    # Forward passes of the whole model are replaced before its stages are made of them.
    join_router_loss(model, context)
    prepare_sequence(model, context)
    stages = _stages(model, context, sample) if context.pipeline_parallel_size > 1 else None
    # Stages may share layers, and layers may have several names: each is cut once, and `parts` knows what became of a parameter.
    parts, done = WeakIdKeyDictionary(), set[Any]()
    note_plan(model)
    all_stages = [model] if stages is None else list(stages)
    for stage in all_stages:
        note_plan(stage)
        _apply(stage, entries, context, parts, done)
    compare(all_stages)
    # Adapters were taken off their layers, which are cut as those of any model, and get their parts now.
    for stage in all_stages:
        adapters.put_back(stage, entries, parts)
    return stages


def _stages(model: nn.Module, context: ParallelContext, sample: Any) -> Split:
    """The model as stages, as many as the schedule of the config has. `sample`: as of `colonnade.split`."""
    schedule = build_schedule(context)
    if not hasattr(schedule, "stage_ranks"):
        raise ConfigError(
            f"{type(schedule).__name__} runs no pipeline, and the config has parallel.pipeline={context.pipeline_parallel_size}; "
            f"choose one, as in schedule=dict(type='OneFOneB', num_microbatches=8)"
        )
    return split(model, num_stages=len(schedule.stage_ranks(context.pipeline_parallel_size)), sample=sample)


def _apply(
    stage: nn.Module, entries: dict[str, PlanEntry], context: ParallelContext, parts: Any, done: set[Any]
) -> None:
    """Give every module and parameter of the stage the style that the plan has for it, once, whatever names it has."""
    held = (*stage.named_modules(remove_duplicate=False), *stage.named_parameters(remove_duplicate=False))
    here = {name for name, _ in held}
    for name, entry in ((name, entry) for name, entry in entries.items() if name in here):
        place = place_of(name, stage)
        if place in done:
            continue
        done.add(place)
        target = Target(name, *place, stage, context, entry.options, parts)
        if entry.style is not None:
            style, mode = style_of(entry.style, name)
            if size_of(mode, context) > 1:
                style(target)
        # Attributes of the module that hold sizes, as they are on one rank.
        for attribute in entry.options.get("divide", ()):
            setattr(target.module, attribute, getattr(target.module, attribute) // context.tensor_parallel_size)

"""Context parallelism for transformers models: ring and Ulysses attention behind transformers' attention interface.

The forward pass takes full batches, the same on every rank of a sequence group. It selects this rank's tokens, their
positions, and the labels that they predict, and runs on these. Only attention communicates with the other ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError, LayoutError, listed
from colonnade.hf.model_loss import IGNORED
from colonnade.nn.sequence.parts import Parts, sequence_rank
from colonnade.nn.sequence.ring import ring_attention
from colonnade.nn.sequence.ulysses import ulysses_attention
from colonnade.parallel.forward import override_forward

Method = Literal["ring", "ulysses"]

_BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "attention_mask", "labels", "shift_labels")
"""The entries of a batch with a value for every token, (batch, length, ...)."""


@dataclass(frozen=True)
class SplitSequence:
    """The split of a batch's sequences over the ranks, and the documents in them. Layers receive it in place of a mask."""

    parts: Parts
    at: int
    method: Method
    context: ParallelContext
    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    """(rows of the batch, cumulative lengths of their documents); empty if every row is one document."""
    padded: bool = False
    """Whether the groups only separate tokens from padding after them, which a causal mask hides anyway."""

    def take_local(self, x: Tensor) -> Tensor:
        """Select this rank's tokens from a tensor with all tokens, (batch, length, ...)."""
        return torch.cat([x.narrow(1, run.start, run.length) for run in self.parts.segments[self.at]], 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, causal: bool, **options: Any) -> Tensor:
        """Compute the attention of this rank's queries to the keys of all ranks."""
        options |= {"causal": causal, "sinks": sinks, "lengths": self.parts.lengths, "context": self.context}
        run: Callable[..., Tensor] = partial(ulysses_attention, **options)
        if self.method == "ring":
            run = partial(ring_attention, balanced=self.parts.balanced, **options)
        if not self.groups or (causal and self.padded):
            return run(q, k, v)
        if len(self.groups) == 1:
            return run(q, k, v, documents=self.groups[0][1])
        # The kernels take one list of documents for all rows, so rows with other documents need a call of their own.
        out = torch.empty_like(q[..., : v.size(-1)])
        for rows, documents in self.groups:
            index = torch.tensor(rows, device=q.device)
            out = out.index_copy(0, index, run(q[index], k[index], v[index], documents=documents))
        return out


@dataclass(frozen=True)
class _Splitting:
    """How the batches of a model are split."""

    method: Method
    balanced: bool
    context: ParallelContext
    argument_names: tuple[str, ...]
    """The argument names of the model's original forward pass."""
    labels: Literal["next", "each"] | None

    def __deepcopy__(self, memo: Any) -> _Splitting:
        """The same object: a copy of a model has the same process groups."""
        return self


class _Current:
    """Stores the batch of the running forward pass, because transformers' mask functions do not get it as an argument."""

    batch: SplitSequence | None = None


def prepare_sequence(model: nn.Module, context: ParallelContext) -> None:
    """Make a transformers model run on this rank's tokens of each sequence. The model is changed in place.

    The attention is ring attention, or that of `parallel = dict(sequence=dict(size=2, attention="ulysses"))`. Without a
    sequence group, and for a model that is not from transformers, nothing is changed. Raises for models that cannot be
    split (`check_model`).
    """
    size, _ = sequence_rank(context)
    if size == 1 or not hasattr(model, "set_attn_implementation"):
        return
    sections: Any = (context.config.get("parallel") or {}).values()
    methods = [section["attention"] for section in sections if hasattr(section, "get") and "attention" in section]
    method: Any = methods[0] if methods else "ring"
    if method not in ("ring", "ulysses"):
        raise ConfigError(f"parallel.sequence.attention is {method!r}; allowed are 'ring' and 'ulysses'", code="C061")
    check_model(model, size, method, context)

    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in ("colonnade_ring", "colonnade_ulysses"):
        ALL_ATTENTION_FUNCTIONS.register(name, _attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask)
    transformers_model: Any = model
    transformers_model.set_attn_implementation(f"colonnade_{method}")
    # Under a causal mask later tokens have more keys: balanced parts give every rank an early and a late segment.
    is_causal = {module.is_causal for module in model.modules() if hasattr(module, "is_causal")} == {True}
    balanced = method == "ring" and is_causal
    splitting = _Splitting(method, balanced, context, tuple(parameters_of(model)), label_kind(model))
    model.split_sequences = splitting  # type: ignore[assignment]
    override_forward(model, _forward)


def _mask(*_: Any, use_vmap: bool = False, **__: Any) -> SplitSequence:
    """Return the current batch in place of a mask.

    Windows and causality follow from the arguments of each layer's attention call.
    """
    if use_vmap:
        raise LayoutError(
            "context parallelism does not support custom mask functions, but the model adds one. Train the model "
            "without parallel.sequence.",
            code="C061",
        )
    if _Current.batch is None:
        raise LayoutError(
            "context parallelism got a call of a module inside the model. Call the model that was passed to "
            "parallelize().",
            code="C061",
        )
    return _Current.batch


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function with the signature of transformers' attention interface."""
    if not isinstance(attention_mask, SplitSequence):
        raise LayoutError(
            f"context parallelism does not support the mask {attention_mask!r:.60} of {type(module).__name__}. "
            "Custom masks and models without transformers' masking_utils are not supported. Train the model without "
            "parallel.sequence.",
            code="C061",
        )
    for name in ("softcap", "position_bias"):
        if others.get(name) is not None:
            raise LayoutError(
                f"context parallelism does not support {name}={others[name]!r:.60} of {type(module).__name__}. Train "
                "the model without parallel.sequence.",
                code="C061",
            )
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    width = value.size(-1)
    # Transformers counts a query's own key in the window, the kernels here do not.
    window = None if sliding_window is None else sliding_window - 1
    out = attention_mask.attend(
        query,
        key,
        F.pad(value, (0, key.size(-1) - width)),
        others.get("s_aux"),
        causal,
        window=window,
        scale=scaling,
        dropout=dropout,
    )
    return out[..., :width].transpose(1, 2).contiguous(), None


def _forward(self: Any, before: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward pass on this rank's tokens; the loss gets `sum_and_count` over the labels of these tokens."""
    named = dict(zip(self.split_sequences.argument_names, args, strict=False))
    batch, split = split_batch(self, {**named, **kwargs})
    _Current.batch, outer = split, _Current.batch
    try:
        output = before(self, **batch)
    finally:
        _Current.batch = outer
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    labels = batch.get("shift_labels", batch.get("labels"))
    if labels is not None and isinstance(loss, Tensor):
        count = (labels != IGNORED).sum()
        loss.sum_and_count = torch.where(count > 0, loss * count, 0.0), count  # type: ignore[attr-defined]
    return output


def split_batch(model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Any], SplitSequence]:
    """Split a batch that every rank of the sequence group has in full; returns (this rank's batch, the split).

    Tokens keep their positions in the full sequence. Labels that the loss would shift by one are shifted before the
    split, because a rank does not have the label after its last token: `shift_labels` has the label that each token
    predicts.
    """
    splitting: _Splitting = model.split_sequences  # type: ignore[assignment]
    batch = {name: value for name, value in batch.items() if value is not None}
    if not {"input_ids", "inputs_embeds"} & batch.keys():
        raise LayoutError(
            f"context parallelism splits input_ids, but the batch contains only {listed(batch)}. Add input_ids to "
            "the batch.",
            code="C061",
        )
    unsupported = [
        *(name for name, value in batch.items() if isinstance(value, Tensor) and name not in _BY_TOKEN),
        *(
            name
            for name in ("attention_mask", "position_ids")
            if name in batch and (not isinstance(batch[name], Tensor) or batch[name].dim() != 2)
        ),
        *(name for name in ("logits_to_keep", "past_key_values", "output_attentions") if batch.get(name)),
    ]
    if unsupported:
        raise LayoutError(
            f"context parallelism does not support {', '.join(map(repr, unsupported))} in the batch. Supported are "
            f"{', '.join(_BY_TOKEN)}, each of shape (batch, length). Remove inputs that refer to the full sequence.",
            code="C061",
        )

    tokens: Tensor = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]
    rows, total = tokens.shape[:2]
    size, at = sequence_rank(splitting.context)
    parts = Parts.of(total, size, splitting.balanced)
    if min(run.length for runs in parts.segments for run in runs) == 0:
        raise LayoutError(
            f"a batch of {total} tokens per row is too short for {size} ranks of parallel.sequence. Pad rows to at "
            f"least {2 * size if parts.balanced else size} tokens.",
            code="C061",
        )
    if splitting.labels == "next" and "labels" in batch:
        following = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
        batch["shift_labels"] = batch.get("shift_labels", following)
    groups, padded = find_documents(batch)
    split = SplitSequence(parts, at, splitting.method, splitting.context, groups, padded)

    if "position_ids" not in batch:
        # As the model would compute them for the full row: RoBERTa counts from its padding index on, and skips padding.
        by_model: list[Any] = [
            module for module in model.modules() if hasattr(module, "create_position_ids_from_input_ids")
        ]
        if by_model and "input_ids" in batch:
            positions = by_model[0].create_position_ids_from_input_ids(tokens, by_model[0].padding_idx)
        else:
            positions = torch.arange(total, device=tokens.device).unsqueeze(0)
        batch["position_ids"] = positions.expand(rows, -1)
    # Set even without padding: otherwise transformers would look for documents in the positions of this rank's tokens.
    batch.setdefault("attention_mask", torch.ones(rows, total, dtype=torch.bool, device=tokens.device))
    local = {name: split.take_local(value) if name in _BY_TOKEN else value for name, value in batch.items()}
    if "use_cache" in splitting.argument_names:
        local["use_cache"] = False
    return local, split


def find_documents(batch: Mapping[str, Any]) -> tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], bool]:
    """Find the documents in each row of a batch, by the rules of transformers.

    A mask marks padding; without a mask, a document starts where positions do not continue. The host reads the mask or
    the positions, once for all layers.

    Returns:
        (groups, padded). Each group is (rows with the same documents, cumulative lengths of these); there are no groups if
        every row is one document. `padded`: whether the documents only separate tokens from padding after them.
    """
    padded = False
    if "attention_mask" in batch:
        is_token = batch["attention_mask"].bool()
        labels = batch.get("shift_labels", batch.get("labels"))
        total = is_token.size(1)
        places = torch.arange(total, device=is_token.device)
        first = torch.where(is_token, places, total).amin(1)
        behind = torch.where(is_token, places + 1, 0).amax(1)
        from_padding = torch.zeros_like(first) if labels is None else ((labels != IGNORED) & ~is_token).sum(1)
        rows = torch.stack([first, behind, is_token.sum(1), from_padding], 1).tolist()
        for row, (start, stop, count, wrong) in enumerate(rows):
            if count and stop - start != count:
                raise LayoutError(
                    "context parallelism does not support masked positions between tokens, but the attention_mask of "
                    f"row {row} has some. Put all padding after the tokens.",
                    code="C061",
                )
            if wrong:
                # Padding attends to padding here, so these predictions would differ from a single process.
                raise LayoutError(
                    f"row {row} has {wrong} labels that would be predicted from padding, so the result would differ "
                    f"from a single process. Set these labels to {IGNORED}. If padding comes before the tokens, also "
                    f"set the label of the first token to {IGNORED}.",
                    code="C061",
                )
        ends = [[0, start, stop, total] if count else [0, total] for start, stop, count, _ in rows]
        padded = all(start == 0 or not count for start, _, count, _ in rows)
    elif "position_ids" in batch:
        positions = batch["position_ids"]
        breaks = (positions[:, 1:] != positions[:, :-1] + 1).tolist()
        ends = [[0, *(at + 1 for at, is_new in enumerate(row) if is_new), len(row) + 1] for row in breaks]
    else:
        return (), False

    groups: dict[tuple[int, ...], list[int]] = {}
    for row, limits in enumerate(ends):
        documents = (limits[0], *(stop for start, stop in pairwise(limits) if stop > start))
        groups.setdefault(documents, []).append(row)
    if all(len(documents) == 2 for documents in groups):
        return (), padded
    return tuple((tuple(rows), documents) for documents, rows in groups.items()), padded


# --- Which models can run on split sequences ---

_LAYERS = {"full_attention", "sliding_attention"}


def parameters_of(model: nn.Module) -> list[str]:
    """Return the argument names of the model's original forward pass."""
    return list(inspect.signature(inspect.unwrap(type(model).forward)).parameters)[1:]


def label_kind(model: Any) -> Literal["next", "each"] | None:
    """Return how labels belong to tokens; None for a model without such labels.

    "next": a token predicts the label of the next token; "each": it predicts its own label.
    """
    if "labels" not in parameters_of(model):
        return None
    code = inspect.unwrap(type(model).forward).__code__
    name = getattr(model.loss_function, "__name__", "")
    if name == "ForCausalLMLoss":
        return "next" if "loss_function" in code.co_names else None if "shift_labels" in code.co_varnames else "each"
    return "each" if name in ("ForMaskedLMLoss", "ForTokenClassification") else None


def check_model(model: Any, size: int, method: str, context: ParallelContext) -> None:
    """Raise for a model in which tokens interact outside attention, or with attention that no kernel here supports."""
    config, arguments = model.config, parameters_of(model)
    kinds = {*(getattr(config, "layer_types", None) or ())} - _LAYERS
    heads = getattr(config, "num_attention_heads", None) or 0
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    tensor = context.tensor_parallel_size
    uneven = [count for count in (heads, kv_heads) if count // tensor % size]
    problems = [
        (context.pipeline_parallel_size > 1, "the config has a pipeline as well; use one of the two"),
        (getattr(config, "is_encoder_decoder", False), "it has an encoder and a decoder, which attend to each other"),
        (bool(getattr(config, "sub_configs", None)), f"it is made of several models ({listed(config.sub_configs)})"),
        (model.main_input_name != "input_ids", f"it takes {model.main_input_name}, not tokens"),
        ("position_ids" not in arguments, "its forward pass takes no position_ids"),
        (bool(kinds), f"it has layers of the kinds {listed(sorted(kinds))}; supported are {listed(sorted(_LAYERS))}"),
        (
            not (model._supports_flash_attn and model._can_set_attn_implementation()),
            "its attention is not behind transformers' attention interface",
        ),
        (
            any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()),
            "it has convolutions, which need neighbouring tokens",
        ),
        (
            getattr(config, "attn_logit_softcapping", None) is not None,
            f"no attention kernel here supports attn_logit_softcapping={getattr(config, 'attn_logit_softcapping', None)}",
        ),
        (
            "labels" in arguments and label_kind(model) is None,
            f"its loss ({getattr(model, 'loss_type', None)}) is not a mean over tokens",
        ),
        (
            method == "ulysses" and bool(uneven),
            (
                f"attention='ulysses' needs a number of heads that the ranks divide, but {tensor} tensor ranks have "
                f"{listed(uneven)} heads; use 'ring'"
            ),
        ),
    ]
    for wrong, reason in problems:
        if wrong:
            raise LayoutError(
                f"{type(model).__name__} cannot run on {size} ranks of parallel.sequence, because {reason}. Train "
                "the model without parallel.sequence.",
                code="C061",
            )

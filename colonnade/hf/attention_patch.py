"""Sequence parallelism for models of transformers: ring and Ulysses attention by the names that its interface knows.

The model's forward pass is given whole batches, the same on every rank of a sequence group. It runs on this rank's
tokens, with their positions and with the labels that they predict; only attention sees the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
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
from colonnade.nn.sequence.parts import Parts, sequence_place
from colonnade.nn.sequence.ring import ring_attention
from colonnade.nn.sequence.ulysses import ulysses_attention
from colonnade.parallel.forward import override_forward

Over = Literal["ring", "ulysses"]

_BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "attention_mask", "labels", "shift_labels")
"""What a batch has for every token, (batch, length, ...)."""


@dataclass(frozen=True)
class SplitSequence:
    """How the sequences of one batch lie on the ranks, and what is apart in them. Layers are handed it as their mask."""

    parts: Parts
    at: int
    over: Over
    context: ParallelContext
    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    """(rows of the batch, cumulative lengths of their documents); none where every row is one document."""
    padded: bool = False
    """Whether the groups are of padding behind the tokens, which a causal mask hides by itself."""

    def cut(self, x: Tensor) -> Tensor:
        """This rank's tokens of what has all of them, (batch, length, ...)."""
        return torch.cat([x.narrow(1, run.start, run.length) for run in self.parts.segments[self.at]], 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, causal: bool, **options: Any) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks."""
        options |= {"causal": causal, "sinks": sinks, "lengths": self.parts.lengths, "context": self.context}
        run: Callable[..., Tensor] = partial(ulysses_attention, **options)
        if self.over == "ring":
            run = partial(ring_attention, balanced=self.parts.balanced, **options)
        if not self.groups or (causal and self.padded):
            return run(q, k, v)
        if len(self.groups) == 1:
            return run(q, k, v, documents=self.groups[0][1])
        out = torch.empty_like(q[..., : v.size(-1)])
        for rows, documents in self.groups:
            chosen = torch.tensor(rows, device=q.device)
            out = out.index_copy(0, chosen, run(q[chosen], k[chosen], v[chosen], documents=documents))
        return out


@dataclass(frozen=True)
class _How:
    """How a model's batches are cut."""

    over: Over
    balanced: bool
    context: ParallelContext
    takes: tuple[str, ...]
    """The names that the model's own forward pass takes."""
    labels: Literal["next", "each"] | None

    def __deepcopy__(self, memo: Any) -> _How:
        """The same: a copy of a model is in the same world."""
        return self


class _Running:
    """The batch of the forward pass that is under way: the functions that make masks are not told of it."""

    now: SplitSequence | None = None


def prepare_sequence(model: nn.Module, context: ParallelContext) -> None:
    """Let a model of transformers run on this rank's part of each sequence; in place. Refuses those that cannot.

    By ring attention, or as `parallel = dict(sequence=dict(size=2, attention="ulysses"))` says. Does nothing without a
    sequence group, and to a model that is not of transformers.
    """
    size, _ = sequence_place(context)
    if size == 1 or not hasattr(model, "set_attn_implementation"):
        return
    chosen: Any = model
    over = _over(context)
    check_model(model, size, over, context)
    _register()
    chosen.set_attn_implementation(f"colonnade_{over}")
    causal = {module.is_causal for module in model.modules() if hasattr(module, "is_causal")} == {True}
    how = _How(over, over == "ring" and causal, context, tuple(parameters_of(model)), label_kind(model))
    model.split_sequences = how  # type: ignore[assignment]
    override_forward(model, _forward)


def _over(context: ParallelContext) -> Over:
    sections: Any = (context.config.get("parallel") or {}).values()
    found = [section["attention"] for section in sections if hasattr(section, "get") and "attention" in section]
    over: Any = found[0] if found else "ring"
    if over not in ("ring", "ulysses"):
        raise ConfigError(f"parallel.sequence.attention={over!r}: allowed are 'ring' and 'ulysses'", code="C061")
    chosen: Over = over
    return chosen


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in ("colonnade_ring", "colonnade_ulysses"):
        ALL_ATTENTION_FUNCTIONS.register(name, _attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask)


def _mask(*_: Any, use_vmap: bool = False, **__: Any) -> SplitSequence:
    """Instead of a mask: what is known of the batch. What a layer sees of it is said when it attends."""
    if use_vmap:
        raise LayoutError(
            "attention over a split sequence: the model adds a mask function of its own, which no kernel here knows; train it "
            "without parallel.sequence",
            code="C061",
        )
    if _Running.now is None:
        raise LayoutError(
            "attention over a split sequence: the model that parallelize() was given has to be called, not one inside it",
            code="C061",
        )
    return _Running.now


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
    """As transformers calls it, with the names that it gives."""
    if not isinstance(attention_mask, SplitSequence):
        raise LayoutError(
            f"attention over a split sequence: {type(module).__name__} was given the mask {attention_mask!r:.60}; masks of one's "
            f"own cannot be used, and models that make theirs in another way than transformers' masking_utils neither",
            code="C061",
        )
    for name in ("softcap", "position_bias"):
        if others.get(name) is not None:
            raise LayoutError(
                f"attention over a split sequence: {type(module).__name__} has {name}={others[name]!r:.60}, which no kernel here "
                f"knows; train it without parallel.sequence",
                code="C061",
            )
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    width = value.size(-1)
    # Transformers counts a query's own key among those of its window.
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
    """The forward pass of the model on this rank's part of the batch. A loss says its sum and the labels it counts."""
    named = dict(zip(self.split_sequences.takes, args, strict=False))
    batch, split = split_batch(self, {**named, **kwargs})
    _Running.now, outer = split, _Running.now
    try:
        output = before(self, **batch)
    finally:
        _Running.now = outer
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    labels = batch.get("shift_labels", batch.get("labels"))
    if labels is not None and isinstance(loss, Tensor):
        count = (labels != IGNORED).sum()
        loss.sum_and_count = torch.where(count > 0, loss * count, 0.0), count  # type: ignore[attr-defined]
    return output


def split_batch(model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Any], SplitSequence]:
    """This rank's part of a batch that every rank of the sequence group has whole, and how it lies on the ranks.

    Tokens get the positions that they have in the whole sequence. Labels that the loss would shift by one are shifted
    before they are cut: `shift_labels` has the label that each token here predicts.
    """
    how: _How = model.split_sequences  # type: ignore[assignment]
    batch = {name: value for name, value in batch.items() if value is not None}
    _check_batch(batch)
    tokens = _tokens(batch)
    rows, total = tokens.shape[:2]
    size, at = sequence_place(how.context)
    parts = Parts.of(total, size, how.balanced)
    if min(run.length for runs in parts.segments for run in runs) == 0:
        raise LayoutError(
            f"a batch of {total} tokens a row has too few for {size} ranks of parallel.sequence; pad rows to "
            f"{2 * size if parts.balanced else size} tokens or more",
            code="C061",
        )
    if how.labels == "next" and "labels" in batch:
        following = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
        batch["shift_labels"] = batch.get("shift_labels", following)
    groups, padded = _documents(batch)
    split = SplitSequence(parts, at, how.over, how.context, groups, padded)
    if "position_ids" not in batch:
        batch["position_ids"] = _positions(model, batch, total).expand(rows, -1)
    # Given even where there is no padding: without it transformers looks for documents in the positions here.
    batch.setdefault("attention_mask", torch.ones(rows, total, dtype=torch.bool, device=tokens.device))
    cut = {name: split.cut(value) if name in _BY_TOKEN else value for name, value in batch.items()}
    if "use_cache" in how.takes:
        cut["use_cache"] = False
    return cut, split


def _tokens(batch: Mapping[str, Any]) -> Tensor:
    tokens: Tensor = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]
    return tokens


def _positions(model: nn.Module, batch: Mapping[str, Any], total: int) -> Tensor:
    """Where the tokens of each row stand, as the model itself would say it of the whole row."""
    tokens = _tokens(batch)
    for module in model.modules():
        if (
            hasattr(module, "create_position_ids_from_input_ids") and "input_ids" in batch
        ):  # they begin behind the padding's
            made: Any = module
            found: Tensor = made.create_position_ids_from_input_ids(tokens, made.padding_idx)
            return found
    return torch.arange(total, device=tokens.device).unsqueeze(0)


def _check_batch(batch: Mapping[str, Any]) -> None:
    if not {"input_ids", "inputs_embeds"} & batch.keys():
        raise LayoutError(
            f"a sequence that lies on several ranks: the batch has {listed(batch)}, and no input_ids to be cut",
            code="C061",
        )
    unknown = [name for name, value in batch.items() if isinstance(value, Tensor) and name not in _BY_TOKEN]
    wrong = {
        name: tuple(batch[name].shape)
        for name in ("attention_mask", "position_ids")
        if name in batch and (not isinstance(batch[name], Tensor) or batch[name].dim() != 2)
    }
    if (
        unknown
        or wrong
        or batch.get("logits_to_keep")
        or batch.get("past_key_values")
        or batch.get("output_attentions")
    ):
        names = [
            *unknown,
            *wrong,
            *(n for n in ("logits_to_keep", "past_key_values", "output_attentions") if batch.get(n)),
        ]
        raise LayoutError(
            f"a sequence that lies on several ranks: the batch has {', '.join(map(repr, names))}; it may have "
            f"{', '.join(_BY_TOKEN)}, each (batch, length), and nothing that is of the whole sequence",
            code="C061",
        )


def _documents(batch: Mapping[str, Any]) -> tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], bool]:
    """(rows of the batch by the documents in them, whether they are padding behind the tokens alone).

    As transformers sees it: padding by the mask, and without a mask, documents by positions that do not go on. A mask, or
    positions that are given, are read by the host: once for all layers.
    """
    if "attention_mask" in batch:
        return _padding(batch["attention_mask"].bool(), batch.get("shift_labels", batch.get("labels")))
    if "position_ids" not in batch:
        return (), False
    positions = batch["position_ids"]
    breaks = (positions[:, 1:] != positions[:, :-1] + 1).tolist()
    return _grouped([[0, *(at + 1 for at, new in enumerate(row) if new), len(row) + 1] for row in breaks]), False


def _padding(seen: Tensor, labels: Tensor | None) -> tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], bool]:
    total = seen.size(1)
    places = torch.arange(total, device=seen.device)
    first = torch.where(seen, places, total).amin(1)
    behind = torch.where(seen, places + 1, 0).amax(1)
    told = torch.zeros_like(first) if labels is None else ((labels != IGNORED) & ~seen).sum(1)
    read = torch.stack([first, behind, seen.sum(1), told], 1).tolist()
    for row, (start, stop, count, wrong) in enumerate(read):
        if count and stop - start != count:
            raise LayoutError(
                f"a sequence that lies on several ranks: the attention_mask of row {row} has holes between tokens, which no kernel "
                f"here knows; pad behind the tokens",
                code="C061",
            )
        if wrong:
            raise LayoutError(
                f"a sequence that lies on several ranks: row {row} has {wrong} labels to be predicted from padding, where "
                f"attention sees what it would not in one process; set these labels to {IGNORED} (and where padding lies before "
                f"the tokens, the label of the first of them)",
                code="C061",
            )
    ends = [[0, start, stop, total] if count else [0, total] for start, stop, count, _ in read]
    return _grouped(ends), all(start == 0 or not count for start, _, count, _ in read)


def _grouped(ends: Sequence[Sequence[int]]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Rows with the same documents together; none where every row is one document."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, each in enumerate(ends):
        kept = (each[0], *(b for a, b in pairwise(each) if b > a))
        groups.setdefault(kept, []).append(row)
    if all(len(each) == 2 for each in groups):
        return ()
    return tuple((tuple(rows), each) for each, rows in groups.items())


# --- Which models can run on parts of sequences, and why the others cannot ---

_LAYERS = {"full_attention", "sliding_attention"}


def parameters_of(model: nn.Module) -> list[str]:
    """The names that the model's own forward pass takes."""
    return list(inspect.signature(inspect.unwrap(type(model).forward)).parameters)[1:]


def label_kind(model: Any) -> Literal["next", "each"] | None:
    """Whether a token's label is that of the next one, its own, or there is no such label."""
    if "labels" not in parameters_of(model):
        return None
    code = inspect.unwrap(type(model).forward).__code__
    name = getattr(model.loss_function, "__name__", "")
    if name == "ForCausalLMLoss":
        return "next" if "loss_function" in code.co_names else None if "shift_labels" in code.co_varnames else "each"
    return "each" if name in ("ForMaskedLMLoss", "ForTokenClassification") else None


def check_model(model: Any, size: int, over: str, context: ParallelContext) -> None:
    """Refuse a model whose tokens need each other elsewhere than in attention, or in one that no kernel here knows."""
    config, takes = model.config, parameters_of(model)
    kinds = {*(getattr(config, "layer_types", None) or ())} - _LAYERS
    heads = getattr(config, "num_attention_heads", None) or 0
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    tensor = context.tensor_parallel_size
    uneven = [count for count in (heads, kv_heads) if count // tensor % size]
    problems = [
        (context.pipeline_parallel_size > 1, "it would lie on the stages of a pipeline as well; use one of the two"),
        (getattr(config, "is_encoder_decoder", False), "it has an encoder and a decoder, which attend to each other"),
        (bool(getattr(config, "sub_configs", None)), f"it is made of several models ({listed(config.sub_configs)})"),
        (model.main_input_name != "input_ids", f"it takes {model.main_input_name}, not tokens"),
        ("position_ids" not in takes, "its forward pass takes no position_ids"),
        (bool(kinds), f"it has layers of the kinds {listed(sorted(kinds))}; known are {listed(sorted(_LAYERS))}"),
        (
            not (model._supports_flash_attn and model._can_set_attn_implementation()),
            "its attention is not behind transformers' attention interface",
        ),
        (
            any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()),
            "it has convolutions, which see their neighbours",
        ),
        (
            getattr(config, "attn_logit_softcapping", None) is not None,
            f"attn_logit_softcapping={getattr(config, 'attn_logit_softcapping', None)} is known to no kernel here",
        ),
        (
            "labels" in takes and label_kind(model) is None,
            f"its loss ({getattr(model, 'loss_type', None)}) is not a mean over tokens",
        ),
        (
            over == "ulysses" and bool(uneven),
            f"{listed(uneven)} heads on {tensor} tensor ranks cannot be shared evenly, as attention='ulysses' has to; use 'ring'",
        ),
    ]
    for wrong, reason in problems:
        if wrong:
            raise LayoutError(
                f"{type(model).__name__} cannot run on {size} ranks of parallel.sequence: {reason}. Train it without "
                f"parallel.sequence",
                code="C061",
            )

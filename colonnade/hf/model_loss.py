"""The loss that a model of transformers makes of the labels in its batch, as (sum, count).

A mean over the labels of one rank cannot be averaged over ranks that have unequally many. What the mean is over is known
from the labels and from the kind of loss (`loss_type`, `loss_function`). Reading these needs no import of transformers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.nn.moe.dispatch import Scope
from colonnade.parallel.forward import override_forward

IGNORED = -100
"""The label of what is not learnt from, in all of transformers."""

_BY_FUNCTION = {
    "ForCausalLMLoss": "next",
    "ForMaskedLMLoss": "each",
    "ForTokenClassification": "each",
    "ForSequenceClassificationLoss": "problem",
    "ForQuestionAnsweringLoss": "positions",
}
"""What the functions of transformers are a mean over: labels of the next token, labels as they stand, by the config's
`problem_type`, or start and end positions."""


class ModelLoss:
    """The loss of one model. `run` is its forward pass with a loss that knows its count; as a criterion, (output, labels)
    -> (sum, count), it is the same loss at the end of a pipeline."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inner = _inner(model)
        self._config: Any = self._inner.config
        forward = inspect.unwrap(type(self._inner).forward)
        names = inspect.signature(forward).parameters
        open_ended = any(one.kind is one.VAR_KEYWORD for one in names.values())
        self._may_cache = bool(getattr(self._config, "use_cache", False)) and (open_ended or "use_cache" in names)
        self._by_function = "loss_function" in forward.__code__.co_names
        self.over = self._what_it_is_over(forward.__code__.co_varnames)
        """"next", "each", "problem" or "positions"; None where it is not known."""

    def _what_it_is_over(self, variables: tuple[str, ...]) -> str | None:
        kind = getattr(self._inner, "loss_type", None)
        if kind is None and not self._by_function:
            return None
        over = _BY_FUNCTION.get(getattr(self._inner.loss_function, "__name__", ""))
        # A model that calls no loss function has the loss in its own forward pass; some shift there, most do not.
        return "each" if over == "next" and not self._by_function and "shift_labels" not in variables else over

    # -- without a pipeline -------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass; takes a batch as one argument too. The loss of its output says its sum and count."""
        if len(args) == 1 and isinstance(args[0], Mapping):
            return self.run(**args[0], **kwargs)
        if not any(kwargs.get(name) is not None for name in ("labels", "start_positions")):
            return self._model(*args, **kwargs)
        kwargs = self.prepare(kwargs)
        output: Any = self._model(*args, **kwargs)
        loss = output[0] if isinstance(output, tuple) else _entry(output, "loss")
        count = self.count(kwargs)
        # Where a sequence lies on several ranks, the forward pass knows how many of its labels are here.
        if isinstance(loss, Tensor) and count is not None and not hasattr(loss, "sum_and_count"):
            loss.sum_and_count = _times(loss, count), count  # type: ignore[attr-defined]
        return output

    def count(self, batch: Mapping[str, Any]) -> Tensor | None:
        """How many labels of a batch the loss is a mean over, where that is known."""
        if self.over == "positions":
            length = next(
                batch[name].shape[1] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None
            )
            inside = [(batch[name] < length).sum() for name in ("start_positions", "end_positions")]
            return (inside[0] + inside[1]) / 2
        labels = batch.get("labels")
        if self.over is None or not isinstance(labels, Tensor):
            return None
        if batch.get("shift_labels") is not None:
            return (batch["shift_labels"] != IGNORED).sum()
        return self._count(labels[..., 1:] if self.over == "next" else labels)

    def _count(self, labels: Tensor) -> Tensor:
        if self.over == "problem" and (labels.is_floating_point() or self._config.problem_type == "regression"):
            return torch.full((), float(labels.numel()), device=labels.device)
        return (labels != IGNORED).sum()

    # -- at the end of a pipeline -------------------------------------------------------------------------

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch as training wants it: no cache of keys and values, and the count is ours."""
        batch = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
        return {"use_cache": False, **batch} if self._may_cache else batch

    def take_apart(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """(what goes into the first stage, labels for the last one)."""
        data = self.prepare(batch)
        labels, shifted = data.pop("labels", None), data.pop("shift_labels", None)
        has_decoder = labels is not None and getattr(self._config, "is_encoder_decoder", False)
        if has_decoder and not any(
            data.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds")
        ):
            data["decoder_input_ids"] = self._inner.prepare_decoder_input_ids_from_labels(labels=labels)
        return data, labels if shifted is None else F.pad(shifted, (1, 0), value=IGNORED)

    def __call__(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, count) of the loss of these logits, or of an output that has them."""
        logits = self.logits(output)
        if self.over == "problem":
            mean = self._inner.loss_function(labels=labels, pooled_logits=logits, config=self._config)
            count = self._count(labels)
            return _times(mean, count), count
        labels = self._aligned(logits, labels)
        if self._by_function:
            also = {"shift_labels": labels} if self.over == "next" else {}
            total = self._inner.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=logits.shape[-1],
                config=self._config,
                num_items_in_batch=1,  # the sum
                **also,
            )
        else:
            flat = logits.reshape(-1, logits.shape[-1])
            total = F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")
        return total, (labels != IGNORED).sum()

    def require_pipeline(self) -> None:
        """Raise where the loss cannot be made of the last stage's logits alone."""
        name = type(self._inner).__name__
        if self.over is None or self.over == "positions":
            raise ConfigError(
                f"the loss of {name} (loss_type {getattr(self._inner, 'loss_type', None)!r}) is not known at the end of a "
                f"pipeline, where only logits and labels are; pass criterion= to initialize, a function (output, labels) -> "
                f"(sum, count), or use no pipeline",
                code="C061",
            )
        if getattr(self._config, "output_router_logits", False):
            raise ConfigError(
                f"{name} has output_router_logits=True: its auxiliary loss needs the router logits of all stages, and the "
                f"last one has only its own. Set model.config.output_router_logits = False, or use no pipeline",
                code="C061",
            )

    # -- what it was asked to predict ---------------------------------------------------------------------

    @staticmethod
    def logits(output: Any) -> Tensor:
        """The logits of an output; a tensor, or the first of a tuple, is taken for them."""
        found = _entry(output, "logits")
        return found if found is not None else output[0] if isinstance(output, (tuple, list)) else output

    def predictions(self, output: Any) -> Any:
        """What an output predicts: all its tensors but the loss and those that the config ignores at inference."""
        if not isinstance(output, Mapping):
            return output
        ignored = {"loss", "past_key_values", *getattr(self._config, "keys_to_ignore_at_inference", ())}
        kept = {name: value for name, value in output.items() if name not in ignored and value is not None}
        return next(iter(kept.values())) if len(kept) == 1 else kept

    def compared(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, label) of each prediction that has a label, one a row."""
        logits = self.logits(output)
        labels = self._aligned(logits, labels)
        kept = labels != IGNORED
        return logits[kept], labels[kept]

    def _aligned(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The label that each of the logits is compared with."""
        if self.over != "next":
            return labels
        following = labels[..., 1:]
        return F.pad(following, (0, logits.shape[-2] - following.shape[-1]), value=IGNORED).contiguous()


def criterion_of(model: nn.Module) -> ModelLoss | None:
    """The loss that a model makes of its labels; None for a model that is not of transformers, or makes none.

    A stage of a pipeline keeps the config and the loss function of its model, so it is asked just as well.
    """
    inner = _inner(model)
    if not hasattr(type(inner), "loss_function") or not hasattr(inner, "config"):
        return None
    names = inspect.signature(inspect.unwrap(type(inner).forward)).parameters
    return ModelLoss(model) if "labels" in names or "start_positions" in names else None


def _inner(model: nn.Module) -> Any:
    """The model inside what a wrapper of peft, or a list of pipeline stages, has around it."""
    return base_model(model[-1] if isinstance(model, nn.ModuleList) and len(model) else model)


def base_model(model: Any) -> nn.Module:
    """The model inside a wrapper of peft; any other as it is."""
    inside = getattr(model, "get_base_model", None)
    found: nn.Module = inside() if callable(inside) else model
    return found


def _times(mean: Tensor, count: Tensor) -> Tensor:
    """The sum; the mean over nothing is NaN, but no gradient comes from it."""
    return torch.where(count > 0, mean * count, 0.0)


def _entry(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


# --- The auxiliary loss of routers, of the joined batch: transformers makes it of each rank's tokens, and it is not linear in them ---


def join_router_loss(model: nn.Module, context: ParallelContext) -> None:
    """Let the auxiliary loss that a model of transformers adds to its loss be that of all ranks' tokens; in place.

    Each rank has the same then, and adds it to its mean loss. Does nothing where no rank has tokens of its own, and to a
    model that has no such loss. One that is made in another way than most is refused.
    """
    config, scope = getattr(model, "config", None), Scope.of(context)
    if not hasattr(config, "output_router_logits") or not scope.distinct:
        return
    source = sys.modules[type(model).__module__]
    if not hasattr(source, "load_balancing_loss_func") or not hasattr(model, "router_aux_loss_coef"):
        if config is not None and config.output_router_logits:
            raise ConfigError(
                f"{type(model).__name__} has output_router_logits=True, and its auxiliary loss is not known to be that of the joined "
                f"batch; set model.config.output_router_logits = False, or leave no ranks for data parallelism",
                code="C061",
            )
        return

    def forward(self: Any, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = before(self, *args, **kwargs)
        own, loss = getattr(output, "aux_loss", None), getattr(output, "loss", None)
        if isinstance(own, Tensor) and loss is not None:
            choices = getattr(self, "num_experts_per_tok", None) or self.config.num_experts_per_tok
            output.aux_loss = _loss_of(scope.summed(_sums(output.router_logits, kwargs.get("attention_mask"), choices)))
            output.loss = loss + self.router_aux_loss_coef * (output.aux_loss - own)
        return output

    override_forward(model, forward)


def _sums(logits: tuple[Tensor, ...], mask: Tensor | None, choices: int) -> Tensor:
    """(3, experts): how many assignments chose each, its probabilities, and how many tokens; over all layers."""
    every = torch.cat([layer.to(logits[0].device) for layer in logits])
    scores = every.softmax(-1, dtype=torch.promote_types(every.dtype, torch.float32))
    weights = scores.new_ones(len(scores)) if mask is None else mask.reshape(-1).to(scores).repeat(len(logits))
    chosen = F.one_hot(scores.topk(choices).indices, scores.size(-1)).sum(1).to(scores)
    tokens = weights.sum().expand(scores.size(-1))
    return torch.stack([weights @ chosen, weights @ scores, tokens])


def _loss_of(sums: Tensor) -> Tensor:
    chosen, scores, tokens = sums
    return len(chosen) * (chosen * scores / tokens.clamp(min=1).square()).sum()

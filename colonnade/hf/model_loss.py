"""The loss that a transformers model computes from the labels in its batch, as (sum, count).

Means over the labels of each rank cannot be averaged over ranks with different numbers of labels. The number of terms of a
mean follows from the labels and from the type of the loss (`loss_type`, `loss_function`); transformers is not imported.
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
"""The label that losses ignore, in all of transformers."""

_BY_FUNCTION = {
    "ForCausalLMLoss": "next",
    "ForMaskedLMLoss": "each",
    "ForTokenClassification": "each",
    "ForSequenceClassificationLoss": "problem",
    "ForQuestionAnsweringLoss": "positions",
}
"""The terms of the mean for each loss function of transformers: labels of the next token, labels as given, by the config's
`problem_type`, or start and end positions."""


class ModelLoss:
    """The loss of one transformers model as (sum, count).

    `run` runs the model's forward pass and adds an attribute `sum_and_count` to the loss. The object is also a
    criterion, (output, labels) -> (sum, count), for the last stage of a pipeline.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inner = _inner(model)
        self._config: Any = self._inner.config
        forward = inspect.unwrap(type(self._inner).forward)
        parameters = inspect.signature(forward).parameters
        has_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._may_cache = bool(getattr(self._config, "use_cache", False)) and (has_kwargs or "use_cache" in parameters)
        self._by_function = "loss_function" in forward.__code__.co_names
        self.over: str | None = None
        """"next", "each", "problem" or "positions"; None if unknown."""
        if getattr(self._inner, "loss_type", None) is not None or self._by_function:
            self.over = _BY_FUNCTION.get(getattr(self._inner.loss_function, "__name__", ""))
            # A forward pass that calls no loss function computes the loss itself; few of these shift the labels.
            shifts = self._by_function or "shift_labels" in forward.__code__.co_varnames
            if self.over == "next" and not shifts:
                self.over = "each"

    # -- without a pipeline -------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass, and set `sum_and_count` on the loss.

        The batch may be passed as one mapping, too.
        """
        if len(args) == 1 and isinstance(args[0], Mapping):
            return self.run(**args[0], **kwargs)
        if not any(kwargs.get(name) is not None for name in ("labels", "start_positions")):
            return self._model(*args, **kwargs)
        kwargs = self.prepare(kwargs)
        output: Any = self._model(*args, **kwargs)
        loss = output[0] if isinstance(output, tuple) else _entry(output, "loss")
        count = self.count(kwargs)
        # Under context parallelism the forward pass has set this already, from the labels of this rank.
        if isinstance(loss, Tensor) and count is not None and not hasattr(loss, "sum_and_count"):
            loss.sum_and_count = _times(loss, count), count  # type: ignore[attr-defined]
        return output

    def count(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the number of terms in the mean loss of a batch; None if the number is unknown."""
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
        """Return the batch for training: without a key-value cache, and without transformers' own count of labels."""
        batch = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
        return {"use_cache": False, **batch} if self._may_cache else batch

    def unpack_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return (inputs of the first stage, labels for the last stage)."""
        data = self.prepare(batch)
        labels, shifted = data.pop("labels", None), data.pop("shift_labels", None)
        has_decoder = labels is not None and getattr(self._config, "is_encoder_decoder", False)
        if has_decoder and not any(
            data.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds")
        ):
            data["decoder_input_ids"] = self._inner.prepare_decoder_input_ids_from_labels(labels=labels)
        return data, labels if shifted is None else F.pad(shifted, (1, 0), value=IGNORED)

    def __call__(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of logits, or of an output with logits, as (sum, count)."""
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
                num_items_in_batch=1,  # divides the sum by 1
                **also,
            )
        else:
            flat = logits.reshape(-1, logits.shape[-1])
            total = F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")
        return total, (labels != IGNORED).sum()

    def require_pipeline(self) -> None:
        """Raise if the loss cannot be computed from the last stage's logits and labels."""
        name = type(self._inner).__name__
        if self.over is None or self.over == "positions":
            raise ConfigError(
                f"the loss of {name} (loss_type {getattr(self._inner, 'loss_type', None)!r}) cannot be computed from "
                "logits and labels at the last pipeline stage. Pass criterion= to initialize: a function (output, "
                "labels) -> (sum, count). Or leave the pipeline out.",
                code="C061",
            )
        if getattr(self._config, "output_router_logits", False):
            raise ConfigError(
                f"{name} has output_router_logits=True, but the auxiliary loss needs the router logits of all "
                "stages, and the last stage has only its own. Set model.config.output_router_logits = False, or "
                "leave the pipeline out.",
                code="C061",
            )

    # -- predictions --------------------------------------------------------------------------------------

    @staticmethod
    def logits(output: Any) -> Tensor:
        """Return the logits of an output, which may also be a tensor, or a tuple with the logits first."""
        found = _entry(output, "logits")
        return found if found is not None else output[0] if isinstance(output, (tuple, list)) else output

    def predictions(self, output: Any) -> Any:
        """Return the predictions in an output: all tensors except the loss and those that the config ignores at inference."""
        if not isinstance(output, Mapping):
            return output
        ignored = {"loss", "past_key_values", *getattr(self._config, "keys_to_ignore_at_inference", ())}
        kept = {name: value for name, value in output.items() if name not in ignored and value is not None}
        return next(iter(kept.values())) if len(kept) == 1 else kept

    def compared(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits, labels) of the predictions with a label, one per row, for the accuracy."""
        logits = self.logits(output)
        labels = self._aligned(logits, labels)
        kept = labels != IGNORED
        return logits[kept], labels[kept]

    def _aligned(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The label that each position of the logits predicts."""
        if self.over != "next":
            return labels
        following = labels[..., 1:]
        return F.pad(following, (0, logits.shape[-2] - following.shape[-1]), value=IGNORED).contiguous()


def criterion_of(model: nn.Module) -> ModelLoss | None:
    """Return the loss that a transformers model computes from its labels; None for a model without such a loss.

    A pipeline stage keeps the config and the loss function of its model, so `model` may be a stage.
    """
    inner = _inner(model)
    if not hasattr(type(inner), "loss_function") or not hasattr(inner, "config"):
        return None
    names = inspect.signature(inspect.unwrap(type(inner).forward)).parameters
    return ModelLoss(model) if "labels" in names or "start_positions" in names else None


def _inner(model: nn.Module) -> Any:
    """The model inside a peft wrapper, or the last of a list of pipeline stages."""
    return base_model(model[-1] if isinstance(model, nn.ModuleList) and len(model) else model)


def base_model(model: Any) -> nn.Module:
    """Return the model inside a peft wrapper; any other model unchanged."""
    get_base = getattr(model, "get_base_model", None)
    found: nn.Module = get_base() if callable(get_base) else model
    return found


def _times(mean: Tensor, count: Tensor) -> Tensor:
    """Convert a mean to the sum. A mean over no terms is NaN; its sum is 0, without a gradient."""
    return torch.where(count > 0, mean * count, 0.0)


def _entry(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


# --- The router's auxiliary loss over the global batch: not linear in the tokens, so not the mean of the ranks' own losses ---


def join_router_loss(model: nn.Module, context: ParallelContext) -> None:
    """Make a transformers model compute its auxiliary (router) loss from the tokens of all ranks.

    The model is changed in place.

    Every rank then adds the same value to its mean loss. Does nothing if all ranks have the same tokens, or if the
    model has no such loss; raises if the auxiliary loss has an unknown form.
    """
    config, scope = getattr(model, "config", None), Scope.of(context)
    if not hasattr(config, "output_router_logits") or not scope.distinct:
        return
    source = sys.modules[type(model).__module__]
    if not hasattr(source, "load_balancing_loss_func") or not hasattr(model, "router_aux_loss_coef"):
        if config is not None and config.output_router_logits:
            raise ConfigError(
                f"{type(model).__name__} has output_router_logits=True, but the auxiliary loss cannot be computed "
                "for the global batch. Set model.config.output_router_logits = False, or leave data parallelism out.",
                code="C061",
            )
        return

    def forward(self: Any, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = before(self, *args, **kwargs)
        local, loss = getattr(output, "aux_loss", None), getattr(output, "loss", None)
        if isinstance(local, Tensor) and loss is not None:
            choices = getattr(self, "num_experts_per_tok", None) or self.config.num_experts_per_tok
            sums = _router_sums(output.router_logits, kwargs.get("attention_mask"), choices)
            chosen, scores, tokens = scope.summed(sums)
            output.aux_loss = len(chosen) * (chosen * scores / tokens.clamp(min=1).square()).sum()
            # The output's loss has the local auxiliary loss in it; the difference exchanges it for the global one.
            output.loss = loss + self.router_aux_loss_coef * (output.aux_loss - local)
        return output

    override_forward(model, forward)


def _router_sums(logits: tuple[Tensor, ...], mask: Tensor | None, choices: int) -> Tensor:
    """A tensor (3, experts), summed over all layers: assignments, probabilities, and the number of tokens (equal for all
    experts).
    """
    joined = torch.cat([layer.to(logits[0].device) for layer in logits])
    scores = joined.softmax(-1, dtype=torch.promote_types(joined.dtype, torch.float32))
    weights = scores.new_ones(len(scores)) if mask is None else mask.reshape(-1).to(scores).repeat(len(logits))
    chosen = F.one_hot(scores.topk(choices).indices, scores.size(-1)).sum(1).to(scores)
    tokens = weights.sum().expand(scores.size(-1))
    return torch.stack([weights @ chosen, weights @ scores, tokens])

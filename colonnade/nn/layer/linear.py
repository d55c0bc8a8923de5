"""Linear, Classifier, MLP and embeddings, with weights sharded by the context's tensor mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError
from colonnade.nn.layer.arrangement import Arrangement, Side, Split, Whole, arrange
from colonnade.nn.layer.spread import Width, check_input, mark_output, respread, shard_sizes
from colonnade.parallel.placement import Spec, note_source, place

Own = TypeVar("Own", bound="Linear")


class Linear(nn.Module):
    """y = x A^T + b like torch.nn.Linear, with this rank's block of A.

    Every rank draws the same full weights and keeps its block, so initial weights do not depend on the tensor mode.

    Args:
        in_features: Input features of the full layer.
        out_features: Output features of the full layer, per part.
        bias: Whether there is a bias.
        split: "column" maps the outer spread to the inner one, "row" the inner one to the outer one.
        gather_output: For "column": all-gather the output into the outer spread.
        input_is_parallel: For "row": whether the input is in the inner spread; if False, it is converted from the outer one.
        parts: The number of weights in one, [parts, out, in], sharded alike; their outputs are concatenated.
        unit: The inner dimension is sharded in multiples of `unit`, for example the head size.
        arrangement: The sharding scheme; defaults to that of the global context.
        device: As in torch.nn.Linear.
        dtype: As in torch.nn.Linear.
        source: A full layer to take the weights from; see `from_module`.

    Example::

        from colonnade.nn import Linear

        gpc = colonnade.launch(dict(parallel=dict(tensor=dict(size=2, mode="1d"))))
        up, down = Linear(4, 8), Linear(8, 2, split="row")
        output = down(torch.relu(up(torch.ones(3, 4))))
    """

    layer_kind = "linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        split: Split = "column",
        gather_output: bool = False,
        input_is_parallel: bool = True,
        parts: int = 1,
        unit: int = 1,
        arrangement: Arrangement | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        source: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        if split not in ("column", "row"):
            raise ConfigError(f"Linear got split={split!r}; allowed are 'column' and 'row'")
        if split == "row" and gather_output:
            raise ConfigError(
                "Linear(split='row') does not support gather_output=True, because its output is already full. Leave "
                "gather_output out."
            )
        if split == "column" and not input_is_parallel:
            raise ConfigError(
                "Linear(split='column') does not support input_is_parallel=False, because a column weight always "
                "takes a full input. Leave input_is_parallel out."
            )
        if parts > 1 and (split == "row" or gather_output):
            raise ConfigError(
                f"Linear got parts={parts}, but several weights in one tensor require split='column' and "
                "gather_output=False"
            )
        here = self.arrangement = arrangement or arrange()
        self.in_features, self.out_features, self.parts, self.unit = in_features, out_features, parts, unit
        self.split, self.gather_output, self.input_is_parallel = split, gather_output, input_is_parallel

        full = source or nn.Linear(in_features, parts * out_features, bias, device, dtype)
        shape = (parts, out_features, in_features) if parts > 1 else tuple(full.weight.shape)
        block = here.take_weight(full.weight.detach().view(shape), split, unit)
        self.weight = own(block, here.weight_placement(split, parts), shape, full.weight)
        self.bias: nn.Parameter | None = None
        if full.bias is not None:
            shape = (parts, out_features) if parts > 1 else tuple(full.bias.shape)
            side: Side = "inner" if split == "column" else "outer"
            shard = here.take_along_hidden(full.bias.detach().view(shape), side, unit if split == "column" else 1)
            self.bias = own(shard, here.target(split).along_hidden(), shape, full.bias)

    @classmethod
    def from_module(cls: type[Own], module: nn.Linear, *, parts: int = 1, **options: Any) -> Own:
        """Make this rank's block of a torch.nn.Linear with the same weights on every rank; options as for the class.

        A tie with another layer is kept only if its weight is passed: Classifier.from_module(head,
        weight=embedding.weight). `initialize` raises for a model in which such a tie was lost.
        """
        if module.out_features % parts:
            raise ConfigError(
                f"out_features is {module.out_features}, which cannot be divided into {parts} equal parts. Choose "
                "another number of parts."
            )
        if parts > 1:
            options["parts"] = parts
        features = module.in_features, module.out_features // parts
        return cls(*features, source=module, **options)

    def forward(self, x: Tensor, each: bool = False) -> Tensor | Sequence[Tensor]:
        """Return the output; with `each=True`, the outputs of the `parts` weights as a sequence."""
        here = self.arrangement
        if each and isinstance(here, Whole):
            # A product per part: its backward does not concatenate the gradients of the parts.
            check_input(self, here, x, "outer", self.in_features, self.unit)
            biases = [None] * self.parts if self.bias is None else self.bias.unbind()
            products = zip(self.weight.unbind(), biases, strict=True)
            return [mark_output(self, here, here.multiply(x, weight, bias), here.inner) for weight, bias in products]
        is_inner = self.split == "row" and self.input_is_parallel
        check_input(self, here, x, "inner" if is_inner else "outer", self.in_features, self.unit)
        if self.split == "row" and not is_inner:
            x = respread(x, here.outer, here.inner, here.context, Width(self.in_features, self.unit, here.uneven))
        y = here.linear(x, self.weight, None if self.bias is None else self.bias.flatten(), self.split)
        if self.gather_output:
            y = respread(y, here.inner, here.outer, here.context, Width(self.out_features, self.unit, here.uneven))
        y = mark_output(self, here, y, here.outer if self.gather_output else here.target(self.split))
        return y.chunk(self.parts, -1) if each else y

    def extra_repr(self) -> str:
        parts = f"{self.parts} x " if self.parts > 1 else ""
        return f"{self.in_features}, {parts}{self.out_features}, split={self.split!r}, {self.arrangement}"


class Classifier(Linear):
    """The last layer: maps hidden activations to sharded logits of classes or of a vocabulary.

    `CrossEntropyLoss` takes sharded logits; `gather_output(logits, side="inner")` makes them full. Pass the `weight` of
    an `Embedding` to tie the two layers: their weights are sharded alike in every mode.
    """

    layer_kind = "classifier"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        weight: nn.Parameter | None = None,
        arrangement: Arrangement | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        source: nn.Linear | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, arrangement=arrangement, device=device, dtype=dtype, source=source
        )
        if weight is not None:
            if weight.shape != self.weight.shape:
                raise ConfigError(
                    f"a weight of shape {tuple(weight.shape)} cannot be tied to a classifier with a weight of shape "
                    f"{tuple(self.weight.shape)}. Pass the weight of Embedding({out_features}, {in_features})."
                )
            self.weight = weight


class MLP(nn.Module):
    """Computes down(activation(up(x))) from outer to outer spread, with a sharded activation in between.

    With `gated`: down(activation(gate(x)) * up(x)); `up.weight` is then [2, inner, hidden], the gate first.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        gated: bool = False,
        bias: bool = True,
        arrangement: Arrangement | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        source: tuple[nn.Linear, nn.Linear] | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"arrangement": arrangement or arrange(), "device": device, "dtype": dtype}
        up, down = source or (None, None)
        self.activation, self.gated = activation, gated
        self.up = Linear(hidden, inner, bias, parts=2 if gated else 1, source=up, **options)
        self.down = Linear(inner, hidden, bias, split="row", source=down, **options)

    @classmethod
    def from_module(cls, module: nn.Sequential, *, arrangement: Arrangement | None = None) -> MLP:
        """Make this rank's shard of an nn.Sequential(Linear, activation, Linear) with the same weights on every rank."""
        layers: tuple[Any, ...] = tuple(module)
        if [isinstance(layer, nn.Linear) for layer in layers] != [True, False, True]:
            raise ConfigError(f"MLP.from_module takes nn.Sequential(Linear, activation, Linear), but got {module}")
        up, activation, down = layers
        return cls(up.in_features, up.out_features, activation=activation, arrangement=arrangement, source=(up, down))

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, up = self.up(x, each=True)
            return self.down(self.activation(gate) * up)
        return self.down(self.activation(self.up(x)))


def own(block: Tensor, placed: dict[ParallelMode, Spec], shape: tuple[int, ...], full: Tensor) -> nn.Parameter:
    """Make this rank's parameter from a copy of a block of `full`.

    `placed` is its placement in a tensor of the shape `shape`.
    """
    requires_grad = full.requires_grad or not isinstance(full, nn.Parameter)
    parameter = nn.Parameter(block.clone(memory_format=torch.contiguous_format), requires_grad=requires_grad)
    if placed:
        place(parameter, placed, shape)
    note_source(parameter, full)
    return parameter


# --- Embeddings: of tokens, with a sharded vocabulary; of positions; and any parameter along the hidden dimension ---


class Embedding(nn.Module):
    """torch.nn.Embedding with this rank's block of the weight, which is sharded like the weight of a `Classifier`.

    Takes replicated tokens, the same on every rank of the tensor group, and returns vectors in the outer spread.
    """

    layer_kind = "embedding"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        arrangement: Arrangement | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        source: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        self.arrangement = arrangement or arrange()
        full = source or nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, full.padding_idx
        block = self.arrangement.take_weight(full.weight.detach(), "column")
        placed = self.arrangement.weight_placement("column")
        self.weight = own(block, placed, tuple(full.weight.shape), full.weight)

    @classmethod
    def from_module(cls, module: nn.Embedding, *, arrangement: Arrangement | None = None) -> Embedding:
        """Make this rank's block of a torch.nn.Embedding with the same weights on every rank.

        Pass its weight to the layer that shares the weight: Classifier.from_module(head, weight=embedding.weight).
        """
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ConfigError(
                "an Embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be sharded. Turn these "
                "options off, or replicate the embedding."
            )
        return cls(module.num_embeddings, module.embedding_dim, arrangement=arrangement, source=module)

    def forward(self, tokens: Tensor) -> Tensor:
        here = self.arrangement
        x = here.embed(tokens, self.weight, self.num_embeddings, self.padding_idx)
        return mark_output(self, here, x, here.outer)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.arrangement}"


class HiddenParameter(nn.Module):
    """This rank's shard of a parameter whose last dimension is the hidden dimension, such as a class token.

    A call returns the shard, to be added to or concatenated with activations of the outer spread.
    """

    def __init__(self, whole: Tensor, *, arrangement: Arrangement | None = None) -> None:
        super().__init__()
        self.arrangement = arrangement or arrange()
        shard = self.arrangement.take_along_hidden(whole.detach(), "outer")
        self.weight = own(shard, self.arrangement.outer.along_hidden(), tuple(whole.shape), whole)

    def forward(self) -> Tensor:
        return self.weight


class PositionEmbedding(HiddenParameter):
    """A learned vector per position, initialized like torch.nn.Embedding.

    A call with a length returns that many vectors.

    With `sequence_split` each rank gets the vectors of its own tokens.
    """

    def __init__(
        self,
        length: int,
        embedding_dim: int,
        *,
        arrangement: Arrangement | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        source: nn.Embedding | None = None,
    ) -> None:
        full = source or nn.Embedding(length, embedding_dim, device=device, dtype=dtype)
        super().__init__(full.weight, arrangement=arrangement)
        self.length = length

    @classmethod
    def from_module(cls, module: nn.Embedding, *, arrangement: Arrangement | None = None) -> PositionEmbedding:
        """Make this rank's shard of a torch.nn.Embedding of positions, with the same weights on every rank."""
        return cls(module.num_embeddings, module.embedding_dim, arrangement=arrangement, source=module)

    def forward(self, length: int | None = None) -> Tensor:
        length = self.length if length is None else length
        if length > self.length:
            raise ConfigError(
                f"a sequence of length {length} is longer than PositionEmbedding(length={self.length}). Choose a "
                "larger length."
            )
        here = self.arrangement
        mode = here.outer.sequence
        if mode is None:
            return self.weight[:length]
        sizes, at = shard_sizes(length, mode, here.context, "sequence"), here.context.get_local_rank(mode)
        return self.weight.narrow(0, sum(sizes[:at]), sizes[at])

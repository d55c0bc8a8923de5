"""Linear, Classifier, MLP and embeddings: layers whose weight is split as the context's tensor mode has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError
from colonnade.nn.layer.arrangement import Arrangement, Split, Whole, arrange
from colonnade.nn.layer.spread import Width, cut, gives, respread, takes
from colonnade.parallel.dtensor import note_source
from colonnade.parallel.placement import Spec, place

Own = TypeVar("Own", bound="Linear")


class Linear(nn.Module):
    """y = x A^T + b, as torch.nn.Linear, with this rank's block of A.

    `split="column"` takes the outer spread to the inner one (and to the outer one with `gather_output=True`),
    `split="row"` the inner one to the outer one (the outer one to the outer one with `input_is_parallel=False`).
    `parts` weights in one, [parts, out, in], are split alike; the output is theirs one after another. The side
    that is inside a block is cut in multiples of `unit` (a head, say). Every rank draws the same whole weights
    and keeps its block: the weights do not depend on the mode.
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
        _check(split, gather_output, input_is_parallel, parts)
        self.arrangement = arrangement or arrange()
        self.in_features, self.out_features, self.parts, self.unit = in_features, out_features, parts, unit
        self.split, self.gather_output, self.input_is_parallel = split, gather_output, input_is_parallel
        whole = source or nn.Linear(in_features, parts * out_features, bias, device, dtype)
        self.weight = self._own_weight(whole.weight)
        self.bias = self._own_bias(whole.bias) if whole.bias is not None else None

    @classmethod
    def from_module(cls: type[Own], module: nn.Linear, *, parts: int = 1, **options: Any) -> Own:
        """This rank's block of a whole torch.nn.Linear, the same on every rank; options as for the class.

        A weight that another layer shares comes out shared only if you give it: Classifier.from_module(head,
        weight=embedding.weight). `initialize` refuses a model in which such a tie was lost.
        """
        if module.out_features % parts:
            raise ConfigError(f"out_features={module.out_features} cannot be {parts} equal parts")
        if parts > 1:
            options["parts"] = parts
        features = module.in_features, module.out_features // parts
        return cls(*features, source=module, **options)

    def forward(self, x: Tensor, each: bool = False) -> Tensor | Sequence[Tensor]:
        """`each`: what the parts give, one by one."""
        if each:
            return self._each(x)
        here = self.arrangement
        inside = self.split == "row" and self.input_is_parallel
        takes(self, here, x, "inner" if inside else "outer", self.in_features, self.unit)
        if self.split == "row" and not inside:
            x = respread(x, here.outer, here.inner, here.context, Width(self.in_features, self.unit, here.uneven))
        y = here.linear(x, self.weight, None if self.bias is None else self.bias.flatten(), self.split)
        if self.gather_output:
            y = respread(y, here.inner, here.outer, here.context, Width(self.out_features, self.unit, here.uneven))
        return gives(self, here, y, here.outer if self.gather_output else here.target(self.split))

    def _each(self, x: Tensor) -> Sequence[Tensor]:
        """On whole weights each part is a product of its own: their backward passes need no gradients joined."""
        here = self.arrangement
        if not isinstance(here, Whole):
            y: Tensor = self.forward(x)  # type: ignore[assignment]
            return y.chunk(self.parts, -1)
        takes(self, here, x, "outer", self.in_features, self.unit)
        biases = [None] * self.parts if self.bias is None else self.bias.unbind()
        products = zip(self.weight.unbind(), biases, strict=True)
        return [gives(self, here, here.multiply(x, weight, bias), here.inner) for weight, bias in products]

    def extra_repr(self) -> str:
        parts = f"{self.parts} x " if self.parts > 1 else ""
        return f"{self.in_features}, {parts}{self.out_features}, split={self.split!r}, {self.arrangement}"

    def _own_weight(self, whole: Tensor) -> nn.Parameter:
        shape = (self.parts, self.out_features, self.in_features) if self.parts > 1 else tuple(whole.shape)
        block = self.arrangement.take_weight(whole.detach().view(shape), self.split, self.unit)
        return own(block, self.arrangement.weight_placement(self.split, self.parts), shape, whole)

    def _own_bias(self, whole: Tensor) -> nn.Parameter:
        shape = (self.parts, self.out_features) if self.parts > 1 else tuple(whole.shape)
        side, unit = ("inner", self.unit) if self.split == "column" else ("outer", 1)
        part = self.arrangement.take_along_hidden(whole.detach().view(shape), side, unit)  # type: ignore[arg-type]
        placed = self.arrangement.target(self.split).along_hidden()
        return own(part, placed, shape, whole)


class Classifier(Linear):
    """The last layer: from hidden to the logits of classes or of a vocabulary, which stay split.

    `CrossEntropyLoss` takes them so; `gather_output(logits, side="inner")` gives whole ones. `weight` of an
    `Embedding` may be given to tie the two: in every mode they lie in the same way.
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
                    f"a weight of shape {tuple(weight.shape)} cannot be tied to a classifier whose own has the shape "
                    f"{tuple(self.weight.shape)}; give the weight of Embedding({out_features}, {in_features})"
                )
            self.weight = weight


class MLP(nn.Module):
    """down(activation(up(x))), in the outer spread to the same; the wide activation in between is split.

    `gated`: down(activation(gate(x)) * up(x)); `up.weight` is then [2, inner, hidden], the gate first.
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
        """This rank's part of a whole nn.Sequential(Linear, activation, Linear), the same on every rank."""
        layers: tuple[Any, ...] = tuple(module)
        if [isinstance(layer, nn.Linear) for layer in layers] != [True, False, True]:
            raise ConfigError(f"an MLP is taken from nn.Sequential(Linear, activation, Linear), not from {module}")
        up, activation, down = layers
        return cls(up.in_features, up.out_features, activation=activation, arrangement=arrangement, source=(up, down))

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, up = self.up(x, each=True)
            return self.down(self.activation(gate) * up)
        return self.down(self.activation(self.up(x)))


def own(block: Tensor, placed: dict[ParallelMode, Spec], shape: tuple[int, ...], whole: Tensor) -> nn.Parameter:
    """A parameter of this rank: a block of `whole`, taken as of this shape, with its placement."""
    trained = whole.requires_grad or not isinstance(whole, nn.Parameter)
    parameter = nn.Parameter(block.clone(memory_format=torch.contiguous_format), requires_grad=trained)
    if placed:
        place(parameter, placed, shape)
    note_source(parameter, whole)
    return parameter


def _check(split: str, gather_output: bool, input_is_parallel: bool, parts: int) -> None:
    if split not in ("column", "row"):
        raise ConfigError(f"Linear(split={split!r}): allowed are 'column' and 'row'")
    if split == "row" and gather_output:
        raise ConfigError("Linear(split='row', gather_output=True): a row weight gives whole results already")
    if split == "column" and not input_is_parallel:
        raise ConfigError("Linear(split='column', input_is_parallel=False): a column weight takes whole inputs already")
    if parts > 1 and (split == "row" or gather_output):
        raise ConfigError(f"Linear(parts={parts}): several weights in one are for split='column', gather_output=False")


# --- Embeddings: of tokens, with the vocabulary split; of positions; and any parameter that lies along the hidden dimension ---


class Embedding(nn.Module):
    """torch.nn.Embedding with this rank's block of the weight, which lies as a `Classifier`'s does.

    Takes whole tokens, the same on every rank of the tensor group, and gives vectors in the outer spread.
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
        whole = source or nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, whole.padding_idx
        block = self.arrangement.take_weight(whole.weight.detach(), "column")
        placed = self.arrangement.weight_placement("column")
        self.weight = own(block, placed, tuple(whole.weight.shape), whole.weight)

    @classmethod
    def from_module(cls, module: nn.Embedding, *, arrangement: Arrangement | None = None) -> Embedding:
        """This rank's block of a whole torch.nn.Embedding, the same on every rank.

        Give it on to the layer that shares the weight: Classifier.from_module(head, weight=embedding.weight).
        """
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ConfigError("an Embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be split")
        return cls(module.num_embeddings, module.embedding_dim, arrangement=arrangement, source=module)

    def forward(self, tokens: Tensor) -> Tensor:
        here = self.arrangement
        return gives(self, here, here.embed(tokens, self.weight, self.num_embeddings, self.padding_idx), here.outer)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.arrangement}"


class HiddenParameter(nn.Module):
    """A parameter whose last dimension is the hidden one, such as a class token: this rank's part of `whole`.

    Calling it gives that part, to be added to or joined with activations of the outer spread.
    """

    def __init__(self, whole: Tensor, *, arrangement: Arrangement | None = None) -> None:
        super().__init__()
        self.arrangement = arrangement or arrange()
        part = self.arrangement.take_along_hidden(whole.detach(), "outer")
        self.weight = own(part, self.arrangement.outer.along_hidden(), tuple(whole.shape), whole)

    def forward(self) -> Tensor:
        return self.weight


class PositionEmbedding(HiddenParameter):
    """A learned vector per position, drawn as torch.nn.Embedding's. `position(length)`: the vectors of a sequence.

    With `sequence_split` each rank gets those of its part of the sequence.
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
        whole = source or nn.Embedding(length, embedding_dim, device=device, dtype=dtype)
        super().__init__(whole.weight, arrangement=arrangement)
        self.length = length

    @classmethod
    def from_module(cls, module: nn.Embedding, *, arrangement: Arrangement | None = None) -> PositionEmbedding:
        """This rank's part of a whole torch.nn.Embedding of positions, the same on every rank."""
        return cls(module.num_embeddings, module.embedding_dim, arrangement=arrangement, source=module)

    def forward(self, length: int | None = None) -> Tensor:
        wanted = self.length if length is None else length
        if wanted > self.length:
            raise ConfigError(f"a sequence of length {wanted} has positions beyond the {self.length} that there are")
        here = self.arrangement
        mode = here.outer.sequence
        if mode is None:
            return self.weight[:wanted]
        sizes, at = cut(wanted, mode, here.context, "sequence"), here.context.get_local_rank(mode)
        return self.weight.narrow(0, sum(sizes[:at]), sizes[at])

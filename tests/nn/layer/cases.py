"""Layers beside their torch originals: what each takes, what it gives, and how the names of parameters compare."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.nn import layer as L
from colonnade.nn.layer import Arrangement, gather_output, partition_input

BATCH, LENGTH, HIDDEN, HEADS, INNER, WORDS = 8, 8, 16, 8, 32, 24
IGNORED = -100


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def words(seed: int) -> Tensor:
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def labels() -> Tensor:
    """As many are ignored in every row, so that a mean over data ranks is the mean of all."""
    return words(9).index_fill(1, torch.tensor([2]), IGNORED)


@dataclass
class Case:
    """A plain module and ours built from it; both take x and give what is compared, or a loss."""

    plain: Callable[[], nn.Module]
    ours: Callable[[nn.Module, Arrangement], nn.Module]
    x: Callable[[], Tensor] = lambda: numbers(BATCH, LENGTH, HIDDEN, seed=1)
    labels: Callable[[], Tensor] | None = None


class Box(nn.Module):
    """One layer, called `layer`, with what leads to it and what follows it."""

    def __init__(self, module: nn.Module, before: Any = None, after: Any = None) -> None:
        super().__init__()
        self.layer, self.before, self.after = module, before, after

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        x = x if self.before is None else self.before(x)
        y = self.layer(x)
        return y if self.after is None else self.after(y, *more)


class Attention(nn.MultiheadAttention):
    """torch's, causal, on one argument."""

    def __init__(self, hidden: int = HIDDEN, heads: int = HEADS) -> None:
        super().__init__(hidden, heads, batch_first=True)
        nn.init.normal_(self.in_proj_bias)
        nn.init.normal_(self.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return super().forward(x, x, x, attn_mask=mask, need_weights=False)[0]


def feed_forward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))


class PlainModel(nn.Module):
    """A transformer block between an embedding and a classifier that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.position = nn.Embedding(LENGTH, HIDDEN)
        self.norm1 = nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.mlp = feed_forward()
        self.norm3 = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return F.cross_entropy(self.head(self.norm3(x)).flatten(0, 1), labels.flatten())


class OurModel(nn.Module):
    """The same; not one word of a mode."""

    def __init__(self, plain: PlainModel, here: Arrangement) -> None:
        super().__init__()
        self.embedding = L.Embedding.from_module(plain.embedding, arrangement=here)
        self.position = L.PositionEmbedding.from_module(plain.position, arrangement=here)
        self.norm1 = L.LayerNorm.from_module(plain.norm1, arrangement=here)
        self.attention = L.SelfAttention.from_module(plain.attention, causal=True, arrangement=here)
        self.norm2 = L.RMSNorm.from_module(plain.norm2, arrangement=here)
        self.mlp = L.MLP.from_module(plain.mlp, arrangement=here)
        self.norm3 = L.LayerNorm.from_module(plain.norm3, arrangement=here)
        self.head = L.Classifier(HIDDEN, WORDS, weight=self.embedding.weight, arrangement=here)
        self.loss = L.CrossEntropyLoss(arrangement=here)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(tokens.shape[1])
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.loss(self.head(self.norm3(x)), labels)


def _between(build: Callable[..., nn.Module], source: str = "outer", target: str = "outer") -> Any:
    """Ours on a part of x that lies as `source`, its result made whole from `target`."""

    def ours(plain: nn.Module, here: Arrangement) -> nn.Module:
        return Box(
            build(plain.layer, arrangement=here),
            lambda x: partition_input(x, side=source, arrangement=here),
            lambda y: gather_output(y, side=target, features=plain.out, arrangement=here),
        )

    return ours


def _plain(build: Callable[[], nn.Module], out: int = HIDDEN, **more: Any) -> Callable[[], nn.Module]:
    def plain() -> nn.Module:
        box = Box(build(), **more)
        box.out = out
        return box

    return plain


def _linear(build: Callable[[], nn.Module], out: int, source: str, target: str, x: Any = None, **options: Any) -> Case:
    def ours(module: nn.Module, arrangement: Arrangement) -> nn.Module:
        return L.Linear.from_module(module, arrangement=arrangement, **options)

    case = Case(_plain(build, out), _between(ours, source, target))
    return case if x is None else Case(case.plain, case.ours, x)


def _norm(build: Callable[[], nn.Module], ours: Any) -> Case:
    def shaken() -> nn.Module:
        module = build()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        return module

    return Case(_plain(shaken), _between(ours.from_module))


def _classified(smoothing: float, classes: int = WORDS) -> Case:
    loss = nn.CrossEntropyLoss(label_smoothing=smoothing)

    def ours(plain: nn.Module, here: Arrangement) -> nn.Module:
        return Box(
            L.Classifier.from_module(plain.layer, arrangement=here),
            lambda x: partition_input(x, arrangement=here),
            L.CrossEntropyLoss.from_module(loss, arrangement=here),
        )

    plain = _plain(lambda: nn.Linear(HIDDEN, classes), after=lambda y, at: loss(y.flatten(0, 1), at.flatten()))
    return Case(plain, ours, labels=lambda: labels().where(labels() < 0, labels() % classes))


def _embedded(rows: int = WORDS) -> Case:
    def ours(plain: nn.Module, here: Arrangement) -> nn.Module:
        return Box(
            L.Embedding.from_module(plain.layer, arrangement=here), None, lambda y: gather_output(y, arrangement=here)
        )

    return Case(_plain(lambda: nn.Embedding(rows, HIDDEN, padding_idx=5)), ours, lambda: words(3) % rows)


def wide() -> Tensor:
    return numbers(BATCH, LENGTH, INNER, seed=2)


def _attention(hidden: int, heads: int) -> Case:
    def ours(module: nn.Module, arrangement: Arrangement) -> nn.Module:
        return L.SelfAttention.from_module(module, causal=True, arrangement=arrangement)

    return Case(
        _plain(lambda: Attention(hidden, heads), hidden), _between(ours), lambda: numbers(BATCH, LENGTH, hidden, seed=1)
    )


CASES: dict[str, Case] = {
    "column": _linear(lambda: nn.Linear(HIDDEN, INNER), INNER, "outer", "inner"),
    "column gathered": _linear(lambda: nn.Linear(HIDDEN, INNER), INNER, "outer", "outer", gather_output=True),
    "row": _linear(lambda: nn.Linear(INNER, HIDDEN), HIDDEN, "inner", "outer", wide, split="row"),
    "row of whole": _linear(
        lambda: nn.Linear(INNER, HIDDEN, bias=False),
        HIDDEN,
        "outer",
        "outer",
        wide,
        split="row",
        input_is_parallel=False,
    ),
    "layer norm": _norm(lambda: nn.LayerNorm(HIDDEN), L.LayerNorm),
    "layer norm, no bias": _norm(lambda: nn.LayerNorm(HIDDEN, bias=False), L.LayerNorm),
    "rms norm": _norm(lambda: nn.RMSNorm(HIDDEN), L.RMSNorm),
    "embedding": _embedded(),
    "attention": _attention(HIDDEN, HEADS),
    "mlp": Case(_plain(feed_forward), _between(L.MLP.from_module)),
    "classifier and loss": _classified(0.0),
    "smoothed loss": _classified(0.2),
    "model": Case(PlainModel, OurModel, lambda: words(4), labels),
}

UNEVEN: dict[str, Case] = {
    "column 16 to 7": _linear(lambda: nn.Linear(HIDDEN, 7), 7, "outer", "inner"),
    "column 16 to 1": _linear(lambda: nn.Linear(HIDDEN, 1), 1, "outer", "inner"),
    "column 16 to 7 gathered": _linear(lambda: nn.Linear(HIDDEN, 7), 7, "outer", "outer", gather_output=True),
    "row 7 to 16": _linear(
        lambda: nn.Linear(7, HIDDEN), HIDDEN, "inner", "outer", lambda: numbers(BATCH, LENGTH, 7, seed=2), split="row"
    ),
    "attention with 3 heads": _attention(12, 3),
    "embedding of 7": _embedded(7),
    "classifier of 7, smoothed": _classified(0.1, 7),
    "classifier of 1": _classified(0.0, 1),
}
"""Sizes that 2 does not divide; 1 leaves a rank with nothing."""


_RENAMED = (
    ("in_proj_", "qkv."),
    ("out_proj.", "out."),
    (r"(mlp|layer)\.0\.", r"\1.up."),
    (r"(mlp|layer)\.2\.", r"\1.down."),
)


def as_ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The plain module's tensors by our names, in our shapes."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in _RENAMED:
            name = re.sub(old, new, name)
        found[name] = tensor.unflatten(0, (3, -1)) if "qkv." in name else tensor
    return found


def build_plain(case: Case) -> nn.Module:
    torch.manual_seed(7)
    return case.plain().double()


def build_ours(case: Case, here: Arrangement) -> nn.Module:
    return case.ours(copy.deepcopy(build_plain(case)), here)

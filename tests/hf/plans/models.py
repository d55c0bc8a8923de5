"""Plain torch models that know nothing of parallelism, and plans for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, HEADS, INNER, WORDS, LENGTH = 16, 4, 32, 27, 6
"""27 words: the vocabulary is cut unevenly."""

HEAD = HIDDEN // HEADS
IGNORED = -100


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Of [batch, length, heads x HEAD], causal, as many heads as there are."""
    q, k, v = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) / HEAD**0.5).masked_fill(
        torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), float("-inf")
    )
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)], -1)
    weights = scores.softmax(-1)[..., : q.shape[2]]
    return (weights @ v).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HEAD
        self.q_proj, self.v_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)  # softmax takes no notice of a bias here
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class PackedAttention(nn.Module):
    """Query, key and value in one, fewer heads of the latter two; a norm of each head; a number for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.widths = (HIDDEN, HIDDEN // 2, HIDDEN // 2)
        self.qkv, self.o_proj = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.q_norm, self.sinks = nn.LayerNorm(HEAD), nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x)
        q, k, v = packed.split([width * packed.shape[-1] // (2 * HIDDEN) for width in self.widths], -1)
        q = self.q_norm(q.unflatten(-1, (-1, HEAD))).flatten(-2)
        return self.o_proj(attend(q, k, v, self.sinks))


class Conv1D(nn.Module):
    """A linear layer whose weight lies the other way round, as some of Hugging Face's do."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 5), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class ConvAttention(nn.Module):
    """As GPT-2 has it: sizes are attributes, which the forward pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.split_size, self.head_dim = HEADS, HIDDEN, HEAD
        self.c_attn, self.c_proj = Conv1D(3 * HIDDEN, HIDDEN), Conv1D(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(self.split_size, dim=-1)
        mixed = attend(q, k, v).view(*x.shape[:-1], self.num_heads * self.head_dim)
        return self.c_proj(mixed)


class LatentAttention(nn.Module):
    """Keys and values out of a few features; a part of the keys is the same for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qk_rope_head_dim = HEADS, 2
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.kv_a, self.norm = nn.Linear(HIDDEN, 8 + 2, bias=False), nn.LayerNorm(8)
        self.kv_b = nn.Linear(8, HEADS * (2 + HEAD), bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        few, rotary = self.kv_a(x).split([8, 2], -1)
        both = self.kv_b(self.norm(few)).unflatten(-1, (-1, 2 + HEAD))
        k, v = both.split([2, HEAD], -1)
        k = torch.cat([k, rotary.unsqueeze(-2).expand(*k.shape[:-1], 2)], -1)
        return self.o_proj(attend(self.q_proj(x), k.flatten(-2), v.flatten(-2)))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class BareMLP(nn.Module):
    """Computes with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(HIDDEN, 2 * INNER) / 4)
        self.down = nn.Parameter(torch.randn(INNER, HIDDEN) / 4)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (x @ self.gate_up).chunk(2, -1)
        return (F.silu(gate) * up) @ self.down


class Scaled(nn.Embedding):
    """An embedding with a forward pass of its own."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 2.0


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Tokens to logits, as a language model."""

    def __init__(
        self,
        attention: Callable[[], nn.Module] = Attention,
        mlp: Callable[[], nn.Module] = MLP,
        layers: int = 1,
        tied: bool = False,
        embedding: type[nn.Embedding] = nn.Embedding,
    ) -> None:
        super().__init__()
        self.embedding = embedding(WORDS, HIDDEN, padding_idx=3)
        self.blocks = nn.ModuleList(Block(attention(), mlp()) for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


_ATTENTION = {f"blocks.*.attention.{name}_proj": "colwise" for name in "qkv"} | {"blocks.*.attention.o_proj": "rowwise"}
_MLP = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
PLAN: dict[str, Any] = {**_ATTENTION, **_MLP}
PACKED: dict[str, Any] = {
    "blocks.*.attention.qkv": {"style": "packed_colwise", "sections": (HIDDEN, HIDDEN // 2, HIDDEN // 2)},
    "blocks.*.attention.q_norm": "replicated_with_grad_allreduce",
    "blocks.*.attention.sinks": "colwise",
    "blocks.*.attention.o_proj": "rowwise",
    "blocks.*.mlp.gate_up": "packed_colwise",
    "blocks.*.mlp.down": "rowwise",
}


def packed_model() -> Model:
    return Model(PackedAttention, GatedMLP)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (Model, PLAN),
    "tied, the embedding left out": (lambda: Model(tied=True), {**PLAN, "head": "colwise_gather_output"}),
    "tied, the head left out": (lambda: Model(tied=True, embedding=Scaled), {**PLAN, "embedding": "embedding_rowwise"}),
    "tied, along the features": (lambda: Model(tied=True), {**PLAN, "head": "rowwise_split_input"}),
    "packed": (packed_model, PACKED),
    "gathered": (
        packed_model,
        {
            "blocks.*.attention.qkv": "colwise_rep",
            "blocks.*.attention.o_proj": "rowwise_rep",
            "blocks.*.mlp.gate_up": "colwise_gather_output",
            "blocks.*.mlp.down": "rowwise_split_input",
            "embedding": "embedding_colwise",
            "norm": "replicate",
        },
    ),
    "transposed": (
        lambda: Model(ConvAttention, BareMLP),
        {
            "blocks.*.attention.c_attn": {"style": "packed_colwise", "sections": 3},
            "blocks.*.attention.c_proj": "rowwise",
            "blocks.*.attention": {"divide": ("num_heads", "split_size")},
            "blocks.*.mlp.gate_up": "packed_rowwise",
            "blocks.*.mlp.down": "colwise",
            "blocks.*.mlp": "all_reduce",
        },
    ),
    "latent": (
        lambda: Model(LatentAttention),
        {
            "blocks.*.attention.q_proj": "colwise",
            "blocks.*.attention.kv_a": "mla_kv_a_proj",
            "blocks.*.attention.kv_b": "colwise",
            "blocks.*.attention.o_proj": "rowwise",
            **_MLP,
        },
    ),
}
SEQUENCE_SPLIT: dict[str, Any] = {
    **PLAN,
    "embedding": "embedding_rowwise",
    "blocks.*.norm?": "sequence_parallel",
    "norm": "sequence_parallel",
    "head": "colwise_gather_output",
}


def torch_plan(sequence: bool) -> dict[str, Any]:
    """In the words of torch's parallelize_module; with `sequence`, as models are split along it there."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    columns = {f"blocks.*.{name}": ColwiseParallel() for name in ("attention.[qkv]_proj", "mlp.up")}
    if not sequence:
        rows = {f"blocks.*.{name}": RowwiseParallel() for name in ("attention.o_proj", "mlp.down")}
        ends = {
            "embedding": ColwiseParallel(output_layouts=Replicate()),
            "head": RowwiseParallel(input_layouts=Replicate()),
        }
        return {**columns, **rows, **ends}
    split, whole = (Shard(1),), (Replicate(),)
    return {
        **columns,
        **{f"blocks.*.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o_proj", "mlp.down")},
        "blocks.*.norm?": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(input_layouts=split, desired_input_layouts=whole),
        "blocks.*.mlp": PrepareModuleInput(input_layouts=split, desired_input_layouts=whole),
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def build(made: Callable[[], nn.Module] = Model, seed: int = 0) -> nn.Module:
    """The same on every rank, in fp64, with biases and norms that are not at their start."""
    torch.manual_seed(seed)
    model = made().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) / 5)
    return model


def tokens(batch: int, seed: int = 1) -> Tensor:
    return torch.randint(0, WORDS, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def labels(batch: int) -> Tensor:
    """Rows count unequally many tokens."""
    found = tokens(batch, seed=2)
    for row in range(batch):
        found[row, : row % 4] = IGNORED
    return found


def summed_loss(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count): a criterion that says how many tokens it counted."""
    total = F.cross_entropy(logits.flatten(0, -2), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (wanted != IGNORED).sum()

"""The models themselves: against torch's own layers, their losses on parts of sequences, their cut into stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.errors import ConfigError
from colonnade.models import GPT, LanguageModelLoss, Llama, MoEGPT, ViT
from colonnade.models.gpt import TransformerBlock
from colonnade.nn.layer import Rotary
from colonnade.nn.moe import MoE, auxiliary_loss
from colonnade.nn.sequence import split_sequence
from colonnade.parallel.placement import placement_of
from colonnade.parallel.split import split
from colonnade.testing import compare, gather_weights, run_world
from tests.models.grid import MODELS, batch
from tests.nn.sequence.training import close, give_weights, numbers, train
from tests.ranks import on_ranks


@pytest.mark.parametrize("causal", [False, True])
def test_in_one_process_a_block_is_torchs_own_transformer_layer(causal):
    model = (
        GPT(16, 8, 16, 4, 1, context=ParallelContext()) if causal else ViT(8, 2, 16, 4, 1, 8, context=ParallelContext())
    ).double()
    give_weights(model)
    block = next(module for module in model.modules() if isinstance(module, TransformerBlock))
    theirs = nn.TransformerEncoderLayer(
        16, 4, 64, dropout=0.0, activation=F.gelu, batch_first=True, norm_first=True, dtype=torch.float64
    )
    ours = {
        "self_attn.in_proj_weight": block.attention.qkv.weight.flatten(0, 1),
        "self_attn.in_proj_bias": block.attention.qkv.bias.flatten(),
        "self_attn.out_proj.weight": block.attention.out.weight,
        "self_attn.out_proj.bias": block.attention.out.bias,
        "linear1.weight": block.feed_forward.up.weight,
        "linear1.bias": block.feed_forward.up.bias,
        "linear2.weight": block.feed_forward.down.weight,
        "linear2.bias": block.feed_forward.down.bias,
        "norm1.weight": block.first_norm.weight,
        "norm1.bias": block.first_norm.bias,
        "norm2.weight": block.second_norm.weight,
        "norm2.bias": block.second_norm.bias,
    }
    theirs.load_state_dict({name: weight.detach() for name, weight in ours.items()})
    x = numbers(2, 8, 16, seed=1)
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1) if causal else None
    close(block(x), theirs(x, src_mask=mask), 1e-12)


def test_a_tied_gpt_has_one_table_and_layers_in_one_row():
    tied, free = (GPT(16, 8, 16, 4, 2, tied=tied, context=ParallelContext()) for tied in (True, False))
    assert tied.head.classifier.weight is tied.embedding.tokens.weight
    assert len(list(free.parameters())) == len(list(tied.parameters())) + 1
    assert [name for name, _ in tied.named_children()] == ["embedding", "blocks", "head"]


def test_what_does_not_divide_is_told():
    with pytest.raises(ConfigError, match="hidden is 16, heads is 3"):
        GPT(16, 8, 16, 3, 1, context=ParallelContext())
    with pytest.raises(ConfigError, match="patches of 3"):
        ViT(8, 3, 16, 4, 1, 8, context=ParallelContext())


def test_llama_in_one_process_is_a_model_of_torchs_own_layers():
    """GQA, rotary positions, RMSNorm and SwiGLU, each by hand; a longer sequence than `length` works too."""
    model = Llama(16, 4, 16, 4, 1, kv_heads=2, head_size=6, inner=24, theta=100.0, context=ParallelContext()).double()
    give_weights(model)
    block = model.blocks[0]
    x = numbers(2, 8, 16, seed=1)

    def heads(weight: Tensor) -> Tensor:
        return (
            F.linear(F.rms_norm(x, (16,), block.first_norm.weight, 1e-5), weight).unflatten(-1, (-1, 6)).transpose(1, 2)
        )

    q, k, v = (heads(weight) for weight in (block.attention.q.weight, *block.attention.kv.weight))
    q, k = Rotary(6, 100.0)(q, k)
    k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
    y = x + F.linear(mixed, block.attention.out.weight)
    normed = F.rms_norm(y, (16,), block.second_norm.weight, 1e-5)
    gate, up = (F.linear(normed, weight) for weight in block.feed_forward.up.weight)
    close(block(x), y + F.linear(F.silu(gate) * up, block.feed_forward.down.weight), 1e-12)


def test_a_llama_has_its_options():
    tied = Llama(16, 8, 16, 4, 2, tied=True, qk_norm=True, context=ParallelContext())
    assert tied.head.classifier.weight is tied.embedding.tokens.weight
    names = [name for name, _ in tied.named_parameters()]
    assert "blocks.0.attention.q_norm" in names
    assert not any("bias" in name or "positions" in name for name in names)
    assert tied.blocks[0].feed_forward.up.weight.shape == (2, 64, 16)  # 8/3 of 16, in multiples of 64
    mixed = Llama(16, 8, 16, 4, 2, experts=4, every=2, moe={"inner": 8}, context=ParallelContext())
    assert [isinstance(block.feed_forward, MoE) for block in mixed.blocks] == [False, True]
    logits, loss = mixed(torch.zeros(1, 3, dtype=torch.int64))
    assert logits.shape == (1, 3, 16)
    assert loss.item() > 0


def _too_few_heads() -> str:
    with launch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, context=ParallelContext(), verbose=False) as gpc:
        with pytest.raises(ConfigError) as error:
            Llama(16, 8, 16, 4, 1, kv_heads=1, context=gpc)
        return str(error.value)


def _losses(over: str) -> float:
    with launch({"parallel": {"sequence": 2}}, context=ParallelContext(), verbose=False) as gpc:
        logits, labels = numbers(3, 7, 5, seed=1), torch.arange(21).reshape(3, 7) % 5
        labels[0, 2:] = -100  # most of what is ignored lies in one part
        places = torch.arange(7).expand(3, 7)
        mine = split_sequence(places, balanced=over == "ring", context=gpc)[0]
        loss = LanguageModelLoss(over=over, context=gpc)(logits[:, mine], labels) / 2
        dist.all_reduce(loss)
        truth = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        assert abs(loss.item() - truth.item()) < 1e-14
        return loss.item()


@pytest.mark.parametrize("over", ["ring", "ulysses"])
def test_the_mean_of_the_parts_losses_is_the_mean_over_tokens(over):
    """Parts of 3 and 4 tokens, with other numbers of labels that count."""
    run_world(2, _losses, over)


def test_fewer_key_heads_than_ranks_are_refused():
    assert "kv_heads=1 leaves some ranks of" in run_world(2, _too_few_heads).values[0]


def _interleaved() -> dict[str, Any]:
    config = {
        "parallel": {"pipeline": 2},
        "clip_grad_norm": 1.0,
        "schedule": {"type": "Interleaved1F1B", "num_microbatches": 2, "num_chunks": 2},
    }
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = MODELS["GPT, tied"](context=gpc).double()
        stages = initialize(split(model, num_stages=4), lambda p: torch.optim.SGD(p), context=gpc)[0].model
        tie = placement_of(model.embedding.tokens.weight).tied
        return {"stages": [list(stage.layer_names) for stage in stages], "tied": tie.stages}


def test_two_stages_on_each_rank_with_the_ends_tied():
    first, last = run_world(2, _interleaved).values
    assert first == {"stages": [["embedding"], ["blocks.1"]], "tied": (0, 1)}
    assert last == {"stages": [["blocks.0"], ["head"]], "tied": (0, 1)}


@pytest.mark.slow
@on_ranks(2)
def test_auxiliary_losses_of_early_stages_reach_the_loss():
    """The balance loss is most of the loss: a stage that lost it would not be equal to one process."""
    config = {
        "parallel": {"pipeline": 2},
        "clip_grad_norm": 1.0,
        "schedule": {"type": "OneFOneB", "num_microbatches": 2},
    }
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        router = {"balance_loss": 10.0, "z_loss": 1.0, "capacity": 0.8}
        model, plain = (
            MoEGPT(16, 8, 16, 4, 2, 4, every=1, router=router, context=context).double()
            for context in (gpc, ParallelContext())
        )

        def run(engine: Any, step: int) -> None:
            engine.execute_schedule(iter([batch("MoE-GPT", 0, step)]), return_output_label=False)

        def loss_of(plain: Any, step: int) -> Tensor:
            x, y = batch("MoE-GPT", 0, step)
            return sum(plain.criterion()(*plain(x[rows]), y[rows]) for rows in (slice(0, 2), slice(2, 4))) / 2

        stages = split(model, num_stages=2)
        assert any("router" in name for name, _ in stages[0].named_parameters())
        train(gpc, stages, plain, run, loss_of, criterion=model.criterion())


def test_the_auxiliary_losses_are_those_of_the_layers():
    tokens, _ = batch("MoE-GPT", 0, 0)
    torch.manual_seed(0)
    model = MoEGPT(16, 8, 16, 4, 2, 4, every=1, router={"balance_loss": 1.0}, context=ParallelContext())
    made: list[Tensor] = []
    for block in model.blocks:
        block.feed_forward.router.register_forward_hook(lambda router, args, routing: made.append(router.sums(routing)))
    _, loss = model(tokens)
    assert len(made) == 2
    torch.testing.assert_close(loss, sum(auxiliary_loss(sums) for sums in made))
    assert loss.item() > 1.9  # each is 1 where all is even
    model.eval()
    assert model(tokens)[1].item() == 0.0


def _ignored(part: int) -> tuple[Tensor, Tensor]:
    """A batch of which another number of labels counts in every part, and in every micro-batch."""
    tokens, labels = (column.clone() for column in batch("GPT", part, 0))
    labels[:, : 1 + 3 * part], labels[0, 3:] = -100, -100
    return tokens, labels


_PIPED: Any = {"pipeline": 2}, {"schedule": {"type": "OneFOneB", "num_microbatches": 4}}
_IGNORING: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("GPT", {}, {"gradient_accumulation": 1}),
    ("GPT", {"sequence": 2}, {"gradient_accumulation": 2}),
    ("GPT", *_PIPED),
]
_IGNORING_TOO: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("GPT", {"tensor": {"size": 2, "mode": "1d"}}, {"compile": {"backend": "eager"}}),
    ("MoE-GPT", *_PIPED),
]
"""One is compiled: what it sends to other ranks must not be lost in the compiled code."""


@pytest.mark.parametrize(
    "cases", [_IGNORING, pytest.param(_IGNORING_TOO, marks=pytest.mark.slow)], ids=["fast", "slow"]
)
@on_ranks(2)
def test_ignored_labels_weigh_nothing_wherever_they_lie_compiled_or_not(
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]],
):
    for model, parallel, options in cases:
        config = {"parallel": parallel, "clip_grad_norm": 1.0, **options}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            made, plain = (MODELS[model](context=context).double() for context in (gpc, ParallelContext()))
            passes = gpc.config.get("gradient_accumulation") or 1
            parts = [_ignored(part) for part in range(passes * gpc.data_parallel_size)]

            def run(engine: Any, step: int, gpc: Any = gpc, passes: int = passes, parts: Any = parts) -> None:
                for at in range(passes):
                    mine = parts[at * gpc.data_parallel_size + gpc.get_local_rank(ParallelMode.DATA)]
                    engine.execute_schedule(iter([mine]), return_output_label=False)
                    if at + 1 < passes:
                        engine.step()

            def loss_of(plain: Any, step: int, model: str = model, parts: Any = parts) -> Tensor:
                x, y = (torch.cat(columns) for columns in zip(*parts, strict=True))
                if model == "GPT":
                    return F.cross_entropy(plain(x).flatten(0, 1), y.flatten())
                rows = [(plain(x[at : at + 1]), y[at : at + 1]) for at in range(len(x))]  # as the micro-batches
                counts = [(label != -100).sum() for _, label in rows]
                sums = [
                    F.cross_entropy(out.flatten(0, 1), label.flatten(), reduction="sum") + loss * count
                    for ((out, loss), label), count in zip(rows, counts, strict=True)
                ]
                return sum(sums) / sum(counts)

            stages = split(made, num_stages=2) if parallel.get("pipeline") else made
            train(gpc, stages, plain, run, loss_of, criterion=made.criterion())


# -- checkpoints ------------------------------------------------------------------------------------------


def _continued(model: str, parallel: dict[str, Any], folder: Path, resume: bool) -> dict[str, Tensor]:
    """Two steps, saved; or loaded, and one more step."""
    with (
        launch({"parallel": parallel}, context=ParallelContext(), verbose=False) as gpc,
        CheckpointManager(folder, gpc) as manager,
    ):
        torch.manual_seed(0)
        built = MODELS[model](context=gpc).double()
        optimizer = torch.optim.AdamW(built.parameters(), lr=0.01, eps=1e-6)
        engine = initialize(built, optimizer, built.criterion(), context=gpc)[0]
        if resume:
            manager.load(engine.model, engine.optimizer)
        parts = gpc.data_parallel_size
        for step in (2,) if resume else (0, 1):
            # Four rows in all, however many ranks share them.
            x, y = (column.chunk(parts)[gpc.get_local_rank(ParallelMode.DATA)] for column in batch(model, 0, step))
            engine.zero_grad()
            engine.execute_schedule(iter([(x, y)]), return_output_label=False)
            engine.step()
        if not resume:
            manager.save(2, engine.model, engine.optimizer)
        weights = gather_weights(engine.model, gpc)
        engine.close()
        return weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("MoE-GPT", {"expert": 2}, {"tensor": {"size": 2, "mode": "1d"}}),
        ("MoE-GPT", {"tensor": {"size": 2, "mode": "1d"}}, {"expert": {"size": 2}, "data": 2}),
        ("GPT, tied", {"sequence": 2}, {"tensor": {"size": 2, "mode": "1d"}}),
        ("GPT", {"tensor": {"size": 4, "mode": "2d"}}, {"sequence": 2, "data": 2}),
    ],
    ids=str,
)
def test_a_run_goes_on_in_another_layout(tmp_path, model, before, after):
    """Weights and optimizer state are found again by their placements: the next step is that of the old layout."""
    ranks = 4 if "data" in after and "sequence" in after else 2
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        run_world(ranks, _continued, model, before, folder, False, timeout=100)
    stayed = run_world(ranks, _continued, model, before, folders[0], True, timeout=100).values[0]
    moved = run_world(ranks, _continued, model, after, folders[1], True, timeout=100).values[0]
    compare(stayed, moved, 1e-10)

"""Architectures of transformers with small random configs, a batch for each, and what one process makes of it.

A step is on the same twelve rows however many ranks share them, so each architecture has one truth for all layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.testing import in_double

ROWS, LENGTH, VOCABULARY, STEPS, EPS, MAX_NORM = 12, 12, 96, 3, 1e-6, 0.05
"""EPS is Adam's: gradients that are zero but for rounding (a bias on keys) must not become steps of full size."""

Kind = Literal["causal", "masked", "image", "seq2seq"]
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """A class of transformers with a small config."""

    name: str
    model: str
    options: dict[str, Any]
    kind: Kind = "causal"
    experts: bool = False
    tie: str = "tie_word_embeddings"
    """The config's key that ties the embedding to the head; "" where there is nothing to tie."""

    def build(self, tied: bool | None = None) -> nn.Module:
        """The model in fp64, in training mode, with weights that are the same in every process."""
        import transformers

        options = dict(self.options)
        if tied is not None and self.tie:
            options[self.tie] = tied
        cls = getattr(transformers, self.model)
        torch.manual_seed(0)
        config = cls.config_class(**options)
        config._experts_implementation = "eager"  # the other ways multiply in float32 and below alone
        with in_double():
            model: nn.Module = cls(config).train()
        give_weights(model)
        return model


def _decoder(name: str, model: str, layers: int = 2, experts: bool = False, **options: Any) -> Architecture:
    """One of those whose config speaks of hidden_size, num_key_value_heads and intermediate_size."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    kept = {key: value for key, value in {**common, **options}.items() if value is not None}
    return Architecture(name, f"{model}ForCausalLM", kept, experts=experts)


_GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
_MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
_FOUR = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

ARCHITECTURES: tuple[Architecture, ...] = (
    _decoder("llama", "Llama", layers=4),
    _decoder("mistral", "Mistral", sliding_window=4),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3", head_dim=8),
    _decoder("gemma", "Gemma", head_dim=8),
    _decoder("gemma2", "Gemma2", head_dim=8, sliding_window=4, layers=4, query_pre_attn_scalar=8),
    _decoder(
        "gemma3_text", "Gemma3", head_dim=8, sliding_window=4, layers=4, layer_types=_FOUR, query_pre_attn_scalar=8
    ),
    _decoder("phi", "Phi"),
    _decoder("phi, qk_layernorm", "Phi", qk_layernorm=True),
    _decoder("phi3 (phi4)", "Phi3"),
    _decoder("olmo", "Olmo"),
    _decoder("olmo2", "Olmo2"),
    _decoder("olmo3", "Olmo3", layers=4, sliding_window=4, layer_types=_FOUR),
    _decoder("glm", "Glm", head_dim=8),
    _decoder("glm4", "Glm4", head_dim=8),
    _decoder("granite", "Granite"),
    _decoder("cohere", "Cohere"),
    _decoder("cohere, use_qk_norm", "Cohere", use_qk_norm=True),
    _decoder("cohere2", "Cohere2", layers=4, sliding_window=4, layer_types=_FOUR),
    _decoder("starcoder2", "Starcoder2", residual_dropout=0.0, embedding_dropout=0.0),
    _decoder("stablelm", "StableLm", use_qkv_bias=True),
    _decoder("stablelm, qk_layernorm", "StableLm", qk_layernorm=True),
    _decoder("smollm3", "SmolLM3", layers=4, no_rope_layer_interval=2),
    _decoder("helium", "Helium", head_dim=8),
    _decoder("exaone4", "Exaone4", layers=4, sliding_window=4, layer_types=_FOUR),
    _decoder("ernie4_5", "Ernie4_5", head_dim=8),
    _decoder("seed_oss", "SeedOss", head_dim=8, residual_dropout=0.0, attention_dropout=0.0),
    _decoder("arcee", "Arcee"),
    _decoder("nemotron", "Nemotron"),
    _decoder("doge", "Doge", keep_window_size=64),
    _decoder("hunyuan_v1_dense", "HunYuanDenseV1", head_dim=8),
    _decoder(
        "qwen2_moe",
        "Qwen2Moe",
        experts=True,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
    ),
    _decoder(
        "qwen3_moe",
        "Qwen3Moe",
        experts=True,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    _decoder("mixtral", "Mixtral", experts=True, num_local_experts=4, num_experts_per_tok=2),
    _decoder("olmoe", "Olmoe", experts=True, num_experts=4, num_experts_per_tok=2),
    _decoder(
        "phimoe",
        "Phimoe",
        experts=True,
        num_local_experts=4,
        num_experts_per_tok=2,
        input_jitter_noise=0.0,
        router_jitter_noise=0.0,
    ),
    _decoder(
        "deepseek_v2",
        "DeepseekV2",
        layers=4,
        experts=True,
        **_MLA,
        q_lora_rank=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    _decoder(
        "deepseek_v3",
        "DeepseekV3",
        layers=4,
        experts=True,
        **_MLA,
        q_lora_rank=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
    ),
    _decoder(
        "glm4_moe",
        "Glm4Moe",
        layers=4,
        experts=True,
        head_dim=8,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        use_qk_norm=True,
    ),
    _decoder(
        "gpt_oss",
        "GptOss",
        layers=4,
        experts=True,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
    ),
    _decoder("granitemoe", "GraniteMoe", experts=True, num_local_experts=4, num_experts_per_tok=2),
    Architecture("gpt2", "GPT2LMHeadModel", {**_GPT, **_NO_DROPOUT}),
    Architecture("gptj", "GPTJForCausalLM", {**_GPT, **_NO_DROPOUT, "rotary_dim": 4}),
    Architecture(
        "gpt_neo",
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    _decoder("gpt_neox", "GPTNeoX", num_key_value_heads=None, hidden_dropout=0.0),
    Architecture(
        "opt",
        "OPTForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "pad_token_id": 0,
        },
    ),
    Architecture("bloom", "BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    Architecture(
        "falcon",
        "FalconForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
        },
    ),
    Architecture(
        "falcon, multi_query",
        "FalconForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    Architecture("codegen", "CodeGenForCausalLM", {**_GPT, **_NO_DROPOUT, "rotary_dim": 4}),
    Architecture("bert", "BertForMaskedLM", _BERT, "masked"),
    Architecture("roberta", "RobertaForMaskedLM", _BERT, "masked"),
    Architecture("electra", "ElectraForMaskedLM", {**_BERT, "embedding_size": 32}, "masked"),
    Architecture(
        "distilbert",
        "DistilBertForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "masked",
    ),
    Architecture(
        "vit",
        "ViTForImageClassification",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 8,
            "patch_size": 4,
            "num_labels": 8,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "image",
        tie="",
    ),
    Architecture(
        "t5",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        "seq2seq",
    ),
    Architecture(
        "bart",
        "BartForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "pad_token_id": 0,
            "decoder_start_token_id": 2,
        },
        "seq2seq",
    ),
)
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def give_weights(model: nn.Module) -> None:
    """Move every weight away from where it starts: biases and norms that are 0 and 1 would hide what is done to them."""
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.add_(0.1 * drawn.to(parameter.device))


def batch_of(kind: Kind, step: int) -> Batch:
    """The whole batch of a step: rows of several lengths, labels that are left out here and there."""
    draw = torch.Generator().manual_seed(100 + step)
    if kind == "image":
        pixels = torch.randn(ROWS, 3, 8, 8, generator=draw, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.randint(0, 8, (ROWS,), generator=draw)}
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=draw)
    lengths = LENGTH - torch.tensor([0, 0, 3, 0, 5, 1, 0, 2, 0, 7, 0, 0])
    shares = torch.tensor([0.9, 0.5, 0.9, 0.3, 0.9, 0.6, 1.0, 0.2, 0.8, 0.9, 0.4, 0.7])
    seen = torch.arange(LENGTH) < lengths[:, None]
    told = torch.rand(ROWS, LENGTH, generator=draw, dtype=torch.float64) < shares[:, None]
    labels = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=draw) if kind == "masked" else tokens
    batch = {
        "input_ids": tokens.where(seen, 0),
        "attention_mask": seen.long(),
        "labels": labels.where(seen & told, -100),
    }
    if kind == "seq2seq":
        # The decoder's inputs are made from the labels, and -100 among them would be taken for padding.
        batch["decoder_input_ids"] = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=draw)
    return batch


def num_rows(batch: Batch, rows: slice) -> Batch:
    return {name: value[rows].contiguous() for name, value in batch.items()}


def loss_of(kind: Kind, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count), written by hand: the truth does not come from the code that is tested."""
    if kind == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=-100)
    return total, (labels != -100).sum()


Truth = dict[str, Any]
"""losses, norms and gradients (by name) of each step; weights at the end."""


def reference(architecture: Architecture, tied: bool | None = None) -> Truth:
    """One process: three steps of AdamW, clipped, in fp64."""
    model = architecture.build(tied)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, eps=EPS)
    truth: Truth = {"losses": [], "norms": [], "gradients": []}
    for step in range(STEPS):
        batch = batch_of(architecture.kind, step)
        labels = batch.pop("labels")
        adamw.zero_grad()
        with in_double():
            total, count = loss_of(architecture.kind, model(**batch).logits, labels)
            (total / count).backward()
        truth["losses"].append((total / count).item())
        truth["gradients"].append(
            {
                name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                for name, parameter in model.named_parameters()
            }
        )
        truth["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        adamw.step()
    truth["weights"] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return truth

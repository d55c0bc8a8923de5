"""Small configs of transformers architectures, and text that is part of Python, as bytes."""

import difflib
from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset

VOCABULARY = 256
SIZES = dict(
    # most architectures
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    # experts
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1,
    topk_group=1, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    # attention with latent vectors
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    # older names
    n_embd=64, n_inner=128, n_layer=4, n_head=4, n_positions=256, rotary_dim=8, ffn_dim=128, word_embed_proj_dim=64,
    # encoder and decoder
    d_model=64, d_ff=128, d_kv=16, num_layers=4, num_decoder_layers=4, num_heads=4, encoder_layers=4, decoder_layers=4,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
    decoder_start_token_id=0,
)  # fmt: skip


def small_config(name):
    """Return a config of this architecture; the sizes above are used for the keys that it has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        near = difflib.get_close_matches(name, CONFIG_MAPPING.keys(), n=4)
        raise SystemExit(f"--model {name}: transformers has no such architecture; near are {', '.join(near) or 'none'}")
    kind = CONFIG_MAPPING[name]
    default = kind()
    computed = {key for key in SIZES if isinstance(getattr(kind, key, None), property)}
    latent = {"head_dim"} if hasattr(default, "kv_lora_rank") else set()  # those add theirs up
    asked = {key: size for key, size in SIZES.items() if hasattr(default, key) and key not in computed | latent}
    if default.is_encoder_decoder:
        asked["decoder_start_token_id"] = SIZES["decoder_start_token_id"]
    try:
        return kind(**asked)
    except Exception as error:
        raise SystemExit(
            f"--model {name}: its config cannot be as small as {asked}: {error}. Give a folder by --from"
        ) from error


class Bytes(Dataset):
    """The language reference that `help("if")` prints, in samples of `length` bytes, each in the format of a collated
    row.

    A decoder learns to predict the next byte; an encoder-decoder learns the second half of a sample from the first.
    """

    def __init__(self, length, halves):
        text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
        self.pieces = torch.tensor(list(text[: len(text) // length * length])).view(-1, length)
        self.halves = halves

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, at):
        piece = self.pieces[at]
        inputs, labels = piece.chunk(2) if self.halves else (piece, piece)
        return {"input_ids": inputs, "labels": labels}

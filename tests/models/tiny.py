"""Tiny configurations of transformers' architectures: one table of small sizes, whatever an architecture calls them."""

from typing import Any

import transformers

VOCAB = 512
HIDDEN = 64
LAYERS = 3
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
CONTEXT = 256
WINDOW = 16
EXPERTS = 4

# Every name under which configurations ask for a size. An architecture takes the ones it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "emb_dim"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "dim_ff", "dff"), 96
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), KV_HEADS),
    **dict.fromkeys(("head_dim", "kv_channels", "rotary_dim"), HEAD_DIM),
    "d_kv": 24,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), CONTEXT),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_selected_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "qk_head_dim": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# What tells an encoder from its decoder.
SIZES_WITH_ENCODER = {
    "num_decoder_layers": LAYERS - 1,
    "encoder_layers": LAYERS - 1,
    "encoder_attention_heads": 2 * HEADS,
}


def tiny_config(model_type: str, changes: dict[str, Any], with_encoder: bool = False) -> Any:
    """The configuration of `model_type` with small sizes, then `changes`. `with_encoder`: it is not its decoder's alone."""
    cls = transformers.CONFIG_MAPPING[model_type]
    known = cls().to_dict()
    wanted = SIZES | SIZES_WITH_ENCODER if with_encoder else SIZES
    sizes = {name: size for name, size in wanted.items() if name in known}
    if "kv_lora_rank" in known:  # latent attention: a key for every head, and widths of its own
        sizes["num_key_value_heads"] = HEADS
        sizes.pop("head_dim", None)
    if "is_decoder" in known and not with_encoder:
        sizes["is_decoder"] = True
    return cls(**{**sizes, **changes})

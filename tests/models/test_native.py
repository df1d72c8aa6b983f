"""The native families against transformers in float32: one row a variant."""

import pytest

from tests.models.harness import check_against_transformers, random_checkpoint

ROPE = {"rope_theta": 10000.0}
LLAMA3 = {**ROPE, "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [2.0 + 0.3 * i for i in range(8)]
LONGROPE = {**ROPE, "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
SIGMOID = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
GROUPS = {"n_group": 4, "topk_group": 2}

CASES = {
    "llama": ("llama", {}),
    "llama biases, own head size, llama3 rope": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 24,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32},
        },
    ),
    "llama linear rope": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    "llama dynamic rope": ("llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0}}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn, mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8}}),
    "llama longrope, long context": (
        "llama",
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 32}, "max_position_embeddings": 60},
    ),
    "llama tied, one KV head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral sliding": ("mistral", {"sliding_window": 16, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2 sliding in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe, every other layer": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "decoder_sparse_step": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral sliding": ("mixtral", {"num_local_experts": 8, "sliding_window": 16, "num_experts_per_tok": 3}),
    "deepseek_v2, lite": (
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": YARN},
    ),
    "deepseek_v2, groups": ("deepseek_v2", {**LATENT, **GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": (
        "deepseek_v3",
        {**LATENT, **GROUPS, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "attention_bias": True},
    ),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "residual_multiplier": 0.5, "attention_multiplier": 0.3}),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32, "moe_layer_end_index": 2},
    ),
    "glm4_moe": ("glm4_moe", {**SIGMOID, **GROUPS, "head_dim": 16, "attention_bias": True}),
    "glm4_moe, head norms": ("glm4_moe", {**SIGMOID, "head_dim": 16, "use_qk_norm": True, "n_group": 1}),
    "dots1": ("dots1", {**SIGMOID, "head_dim": 16, "attention_bias": True, "norm_topk_prob": True}),
    "gemma": ("gemma", {"head_dim": 24}),
    "gemma2": ("gemma2", {"head_dim": 24, "sliding_window": 16, "query_pre_attn_scalar": 40}),
    "gemma3": ("gemma3_text", {"head_dim": 24, "sliding_window": 16, "final_logit_softcapping": 2.0}),
    "phi3": ("phi3", {"sliding_window": 16, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_bias": True, "attention_out_bias": False}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_native_equals_transformers(name, tmp_path):
    model_type, changes = CASES[name]
    oracle = random_checkpoint(model_type, changes, tmp_path)
    check_against_transformers(tmp_path, oracle, "octavo")

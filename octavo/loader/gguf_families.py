"""GGUF architectures we can read: what they are called elsewhere, and how their tensors map to checkpoint names.

One row a family in `FAMILIES`. A name table maps module names as GGUF has them to those of the family's checkpoints;
`{}` stands for the layer number, and the ending (`.weight`, `.bias`) is kept. The converter that wrote the file changed
some tensors; the flags of a row say which, so that reading can undo it:

- `permuted`: rows of q and k were put from half-split into interleaved rotary order. Families whose rotary embedding is
  interleaved anyway, or that were converted as they are, are not.
- `norm_plus_one`: norm weights were stored as 1 + weight.
- `transposed`: matrices stored [out, in] that the checkpoint has as [in, out].
"""

import re
from dataclasses import dataclass, field

from octavo.errors import LoadError

# Tensors that carry settings rather than weights; gguf_metadata.py turns them into rope settings.
ROPE_FACTORS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
# The same in files that repeat them in every layer; only those of the first layer are used.
_HELPER = re.compile(r"^(blk\.\d+\.)?(rope_freqs|rope_factors_long|rope_factors_short)\.weight$")
_LAYER_NAME = re.compile(r"^blk\.(\d+)\.(.+)$")
_EXPERTS = "_exps"


@dataclass(frozen=True)
class Family:
    """One GGUF architecture."""

    model_type: str
    architecture: str
    names: dict[str, str] = field(repr=False)
    permuted: bool = False
    norm_plus_one: bool = False
    transposed: tuple[str, ...] = ()  # module names as GGUF has them, without the layer

    def checkpoint_name(self, gguf_name: str) -> str | None:
        """The checkpoint's name of a tensor, None when it is unknown. Stacked experts keep `{expert}` in theirs."""
        module, _, ending = gguf_name.rpartition(".")
        match = _LAYER_NAME.match(module)
        if not match:
            target = self.names.get(module)
            return f"{target}.{ending}" if target else None
        target = self.names.get("blk.{}." + match[2])
        return f"{target.replace('{}', match[1])}.{ending}" if target else None


def is_helper(gguf_name: str) -> bool:
    """Whether a tensor carries rope settings, not weights."""
    return _HELPER.match(gguf_name) is not None


def family_of(gguf_architecture: str, *, num_experts: int = 0) -> Family:
    """The row of an architecture; LoadError when there is none. `llama` with experts is Mixtral."""
    if gguf_architecture == "llama" and num_experts:
        return MIXTRAL
    if gguf_architecture not in FAMILIES:
        raise LoadError(
            f"GGUF architecture {gguf_architecture!r} is not supported; supported: {', '.join(sorted(FAMILIES))}. "
            "Use the model's safetensors checkpoint instead."
        )
    return FAMILIES[gguf_architecture]


def module_part(gguf_name: str) -> str:
    """The module name without layer and ending: `attn_q` of `blk.3.attn_q.weight`."""
    module = gguf_name.rpartition(".")[0]
    match = _LAYER_NAME.match(module)
    return match[2] if match else module


def is_stacked_experts(gguf_name: str) -> bool:
    """Whether a tensor holds one matrix for each expert."""
    return module_part(gguf_name).endswith(_EXPERTS)


def _layers(prefix: str, **modules: str) -> dict[str, str]:
    return {f"blk.{{}}.{gguf}": f"{prefix}.{{}}.{name}" for gguf, name in modules.items()}


_HEADS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = _layers(
    "model.layers",
    attn_q="self_attn.q_proj",
    attn_k="self_attn.k_proj",
    attn_v="self_attn.v_proj",
    attn_output="self_attn.o_proj",
)
_FUSED_ATTENTION = _layers("model.layers", attn_qkv="self_attn.qkv_proj", attn_output="self_attn.o_proj")
_QK_NORMS = _layers("model.layers", attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
_MLP = _layers("model.layers", ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
_FUSED_MLP = _layers("model.layers", ffn_up="mlp.gate_up_proj", ffn_down="mlp.down_proj")
_NORMS = _layers("model.layers", attn_norm="input_layernorm", ffn_norm="post_attention_layernorm")
_EXPERT_MLP = _layers(
    "model.layers",
    ffn_gate_inp="mlp.gate",
    ffn_gate_exps="mlp.experts.{expert}.gate_proj",
    ffn_up_exps="mlp.experts.{expert}.up_proj",
    ffn_down_exps="mlp.experts.{expert}.down_proj",
)
_SHARED_EXPERT = _layers(
    "model.layers",
    ffn_gate_inp_shexp="mlp.shared_expert_gate",
    ffn_gate_shexp="mlp.shared_expert.gate_proj",
    ffn_up_shexp="mlp.shared_expert.up_proj",
    ffn_down_shexp="mlp.shared_expert.down_proj",
)
_FOUR_NORMS = _layers(  # Gemma 2 and 3: a norm before and after each of attention and MLP
    "model.layers",
    attn_norm="input_layernorm",
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)

_LLAMA = _HEADS | _ATTENTION | _MLP | _NORMS
_GEMMA = _HEADS | _ATTENTION | _MLP | _FOUR_NORMS

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _HEADS
    | _ATTENTION
    | _NORMS
    | _layers(
        "model.layers",
        ffn_gate_inp="block_sparse_moe.gate",
        ffn_gate_exps="block_sparse_moe.experts.{expert}.w1",
        ffn_up_exps="block_sparse_moe.experts.{expert}.w3",
        ffn_down_exps="block_sparse_moe.experts.{expert}.w2",
    ),
    permuted=True,
)

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", _LLAMA, permuted=True),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", _LLAMA, permuted=True),
    "granite": Family("granite", "GraniteForCausalLM", _LLAMA, permuted=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", _LLAMA),
    "qwen2moe": Family("qwen2_moe", "Qwen2MoeForCausalLM", _HEADS | _ATTENTION | _NORMS | _EXPERT_MLP | _SHARED_EXPERT),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _LLAMA | _QK_NORMS),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", _HEADS | _ATTENTION | _NORMS | _QK_NORMS | _EXPERT_MLP),
    "gemma": Family("gemma", "GemmaForCausalLM", _LLAMA, norm_plus_one=True),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", _GEMMA, norm_plus_one=True),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", _GEMMA | _QK_NORMS, norm_plus_one=True),
    "phi2": Family(
        "phi",
        "PhiForCausalLM",
        {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}
        | _ATTENTION
        | _layers(
            "model.layers",
            attn_norm="input_layernorm",
            attn_output="self_attn.dense",
            ffn_up="mlp.fc1",
            ffn_down="mlp.fc2",
        ),
    ),
    "phi3": Family("phi3", "Phi3ForCausalLM", _HEADS | _FUSED_ATTENTION | _FUSED_MLP | _NORMS),
    "starcoder2": Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        _HEADS | _ATTENTION | _NORMS | _layers("model.layers", ffn_up="mlp.c_fc", ffn_down="mlp.c_proj"),
    ),
    "stablelm": Family("stablelm", "StableLmForCausalLM", _LLAMA),
    "nemotron": Family("nemotron", "NemotronForCausalLM", _LLAMA, norm_plus_one=True),
    "olmo2": Family(
        "olmo2",
        "Olmo2ForCausalLM",
        _HEADS
        | _ATTENTION
        | _MLP
        | _QK_NORMS
        | _layers(
            "model.layers",
            post_attention_norm="post_attention_layernorm",
            post_ffw_norm="post_feedforward_layernorm",
        ),
    ),
    "command-r": Family("cohere", "CohereForCausalLM", _LLAMA),
    "cohere2": Family("cohere2", "Cohere2ForCausalLM", _LLAMA),
    "glm4": Family(
        "glm4",
        "Glm4ForCausalLM",
        _HEADS
        | _ATTENTION
        | _FUSED_MLP
        | _NORMS
        | _layers("model.layers", post_attention_norm="post_self_attn_layernorm", post_ffw_norm="post_mlp_layernorm"),
    ),
    "gpt2": Family(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        }
        | _layers(
            "transformer.h",
            attn_norm="ln_1",
            attn_qkv="attn.c_attn",
            attn_output="attn.c_proj",
            ffn_norm="ln_2",
            ffn_up="mlp.c_fc",
            ffn_down="mlp.c_proj",
        ),
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
}

"""Gemma 1, 2 and 3 (text): Llama with wide heads, a scaled embedding and norms that multiply by 1 + weight.

Gemma 2     also normalises what attention and MLP give, before it is added; bounds scores and logits by soft caps; every
            other layer sees a window
VaultGemma  normalises what they read alone, as Gemma 1
Gemma 3     normalises query and key heads in place of the caps; windowed layers rotate by a base of their own
"""

from collections.abc import Iterable

import torch

from octavo.config.hf import HFConfig
from octavo.layers.causal_lm import keep_output_rows
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope
from octavo.models.llama import LlamaForCausalLM, LlamaLayer
from octavo.models.qwen3 import Qwen3Attention


class SandwichLayer(LlamaLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), with Gemma 2's names of the norms."""

    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        self.pre_feedforward_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, positions, x):
        attended = self.self_attn(positions, x, self.input_layernorm, None, 1.0)
        if self.is_last:
            x, attended = keep_output_rows(x), keep_output_rows(attended)
        return self.feed_forward(self.post_attention_layernorm(attended, x))

    def feed_forward(self, x):
        return self.post_feedforward_layernorm(self.mlp(x, self.pre_feedforward_layernorm), x)


class Gemma3Layer(SandwichLayer):
    attention_class = Qwen3Attention


class GemmaForCausalLM(LlamaForCausalLM):
    layer_class: type[LlamaLayer] = LlamaLayer

    def __init__(self, cfg: HFConfig):
        super().__init__(self.read(cfg))
        self.given_embeds_scale = 1.0  # the table of transformers multiplies, too

    @staticmethod
    def read(cfg: HFConfig) -> HFConfig:
        """A Gemma configuration in Llama's words."""
        cfg.choose("use_bidirectional_attention", [False], False)
        # The factor has the model's precision, as it had in training.
        embedding_scale = float(torch.tensor(cfg.hidden_size**0.5, dtype=torch.get_default_dtype()))
        words = {
            "hidden_act": cfg.get("hidden_activation", "gelu_pytorch_tanh"),
            "embedding_multiplier": embedding_scale,
            "attention_multiplier": cfg.get("query_pre_attn_scalar", cfg.head_dim) ** -0.5,
            "tie_word_embeddings": cfg.get("tie_word_embeddings", True),
        }
        if cfg.get("rope_local_base_freq") and not cfg.get("rope_parameters"):  # Gemma 3 as transformers 4 wrote it
            local = {"rope_type": "default", "rope_theta": cfg.get("rope_local_base_freq")}
            words["rope_parameters"] = {"full_attention": cfg.rope_parameters, "sliding_attention": local}
        return HFConfig({**cfg.data, **words})

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Norms multiply by 1 + weight."""
        yield name, tensor + 1 if name.endswith("norm.weight") else tensor


class Gemma2ForCausalLM(GemmaForCausalLM):
    layer_class: type[LlamaLayer] = SandwichLayer

    @staticmethod
    def read(cfg: HFConfig) -> HFConfig:
        pattern = ["sliding_attention", "full_attention"] * cfg.num_layers
        kinds = cfg.get("layer_types", pattern[: cfg.num_layers])
        return HFConfig({**GemmaForCausalLM.read(cfg).data, "layer_types": kinds})


class VaultGemmaForCausalLM(Gemma2ForCausalLM):
    layer_class = LlamaLayer
    renames = {r"\.pre_feedforward_layernorm\.": ".post_attention_layernorm."}


class Gemma3ForCausalLM(GemmaForCausalLM):
    layer_class = Gemma3Layer

    @staticmethod
    def read(cfg: HFConfig) -> HFConfig:
        every = int(cfg.get("sliding_window_pattern", 6))
        pattern = ["full_attention" if i % every == 0 else "sliding_attention" for i in range(1, cfg.num_layers + 1)]
        return HFConfig({**GemmaForCausalLM.read(cfg).data, "layer_types": cfg.get("layer_types", pattern)})

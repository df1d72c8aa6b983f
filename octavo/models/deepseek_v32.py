"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose attention sees the tokens that an indexer chooses.

index_topk       how many; up to that length, everything is attended to as V3 does
rotation         the indexer's heads rotate by halves in V3.2, by neighbours in GLM-5, whatever the attention's do
indexer_types    GLM-5: a "shared" layer sees what the last "full" one before it chose
"""

from collections.abc import Sequence
from typing import Any

from octavo.config.hf import HFConfig
from octavo.errors import ConfigError
from octavo.layers.attention.mla import LatentAttention
from octavo.layers.attention.sparse import Indexer, SparseLatentAttention
from octavo.layers.rope import Rope
from octavo.models.deepseek import DeepseekAttention, DeepseekLayer, DeepseekV3ForCausalLM
from octavo.models.llama import LlamaLayer


class SparseAttention(DeepseekAttention):
    interleaved_index = False

    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        q_rank, heads, dim = (int(cfg.require(key)) for key in ("q_lora_rank", "index_n_heads", "index_head_dim"))
        has_own = self.index_kinds(cfg)[index] == "full"
        self.indexer = Indexer(cfg.hidden_size, q_rank, heads, dim, self.interleaved_index) if has_own else None

    @staticmethod
    def index_kinds(cfg: HFConfig) -> Sequence[str]:
        """Of each layer, "full": it has an indexer, or "shared"."""
        return ["full"] * cfg.num_layers

    @staticmethod
    def make_attn(cfg: HFConfig, sizes: tuple[int, int, int, int, int], scale: float) -> LatentAttention:
        return SparseLatentAttention(sizes, scale, int(cfg.require("index_head_dim")), int(cfg.require("index_topk")))

    def forward(self, positions, hidden_states, norm, residual, scale):
        assert self.q_a_layernorm is not None and self.q_b_proj is not None
        hidden = norm(hidden_states)
        q, latent = self.q_kv_a_proj(hidden).tensor_split([-self.latent_width], dim=-1)
        q = self.q_a_layernorm(q.contiguous())
        index = None if self.indexer is None else self.indexer(hidden, q, positions, self.rope)
        attended = self.attn(self.q_b_proj(q), latent, positions, self.rope, index)
        return self.o_proj(attended, residual=residual, scale=scale)


class GlmSparseAttention(SparseAttention):
    interleaved_index = True

    @staticmethod
    def index_kinds(cfg: HFConfig) -> Sequence[str]:
        kinds, pattern = cfg.get("indexer_types"), cfg.get("index_topk_pattern")
        if kinds is None and pattern is not None:
            kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
        if kinds is None:
            period, start = max(int(cfg.get("index_topk_freq", 1)), 1), int(cfg.get("index_skip_topk_offset", 2)) - 1
            kinds = ["shared" if max(i - start, 0) % period else "full" for i in range(cfg.num_layers)]
        if len(kinds) < cfg.num_layers or kinds[0] != "full" or not set(kinds) <= {"full", "shared"}:
            raise ConfigError(f"indexer_types={kinds}: each layer is 'full' or 'shared', the first one 'full'.")
        return kinds


class SparseLayer(DeepseekLayer):
    attention_class = SparseAttention


class GlmSparseLayer(DeepseekLayer):
    attention_class = GlmSparseAttention


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    layer_class: type[LlamaLayer] = SparseLayer

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        attentions: list[Any] = [layer.self_attn for layer in self.model.layers]
        for attention, before in zip(attentions[1:], attentions, strict=False):
            if attention.indexer is None:
                attention.attn.source = before.attn.source or (before.attn,)


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    layer_class = GlmSparseLayer

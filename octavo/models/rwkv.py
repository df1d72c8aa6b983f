"""RWKV-4: a recurrence in attention's place, and an MLP that looks one token back.

Hidden states are halved every `rescale_every` layers, which keeps them within float16; norms take the factor out again.
"""

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.causal_lm import CausalLM, keep_output_rows
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.norm import LayerNorm
from octavo.layers.ssm.rwkv import ChannelMix, TimeMix


class RwkvLayer(nn.Module):
    def __init__(self, cfg: HFConfig, index: int):
        super().__init__()
        size, eps = cfg.hidden_size, float(cfg.get("layer_norm_epsilon", 1e-5))
        self.pre_ln = LayerNorm(size, eps) if index == 0 else None
        self.ln1, self.ln2 = LayerNorm(size, eps), LayerNorm(size, eps)
        self.attention = TimeMix(size, int(cfg.get("attention_hidden_size", size)))
        self.feed_forward = ChannelMix(size, int(cfg.get("intermediate_size", 4 * size)))
        period = int(cfg.get("rescale_every", 6))
        self.scale = 0.5 ** (index // period) if period > 0 else 1.0
        self.halves = period > 0 and (index + 1) % period == 0
        self.is_last = index == cfg.num_layers - 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pre_ln is not None:
            x = self.pre_ln(x)
        x = self.attention(self.ln1(x), x, self.scale)
        key, receptance = self.feed_forward.mix(self.ln2(x))
        if self.is_last:
            x, key, receptance = (keep_output_rows(t) for t in (x, key, receptance))
        x = self.feed_forward(key, receptance, x, self.scale)
        return x / 2 if self.halves else x


class RwkvModel(nn.Module):
    def __init__(self, cfg: HFConfig):
        super().__init__()
        self.embed_tokens = Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(RwkvLayer(cfg, i) for i in range(cfg.num_layers))
        self.norm = LayerNorm(cfg.hidden_size)

    def forward(self, input_ids, inputs_embeds):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x)
        return x


class RwkvForCausalLM(CausalLM):
    renames = {
        r"^rwkv\.": "model.",
        r"^model\.embeddings\.": "model.embed_tokens.",
        r"^model\.blocks\.": "model.layers.",
        r"^model\.ln_out\.": "model.norm.",
        r"^head\.": "lm_head.",
    }

    def __init__(self, cfg: HFConfig):
        super().__init__()
        self.model = RwkvModel(cfg)
        self.lm_head = LMHead(cfg.hidden_size, cfg.vocab_size)
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if cfg.tie_word_embeddings else {}

    def forward(self, input_ids, positions, inputs_embeds=None):
        return self.model(input_ids, inputs_embeds)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model.norm(hidden_states))

"""Mamba, Falcon-Mamba and Mamba 2: nothing but recurrent mixers, each behind a norm.

Falcon-Mamba    normalises dt, b and c before the scan, without weights
"""

import math
from typing import Any

from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.causal_lm import keep_output_rows
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope
from octavo.layers.ssm.mixers import Mamba
from octavo.models.hybrid import WithoutPositions, mamba2_mixer


class MixerLayer(nn.Module):
    """x + mixer(norm(x))."""

    def __init__(self, cfg: HFConfig, index: int, rope: Rope | None):
        super().__init__()
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mixer = self.make_mixer(cfg, index)
        self.is_last = index == cfg.num_layers - 1

    def make_mixer(self, cfg: HFConfig, index: int) -> nn.Module:
        """What layer `index` has."""
        cfg.choose("hidden_act", ["silu"], "silu")
        return Mamba(cfg.hidden_size, *mamba_sizes(cfg))

    def forward(self, positions, x):
        x = self.mix(positions, x)
        return keep_output_rows(x) if self.is_last else x

    def mix(self, positions, x):
        return self.mixer(positions, x, self.norm, x, 1.0)


def mamba_sizes(cfg: HFConfig) -> tuple[int, int, int, int, bool, bool]:
    """inner, state_size, dt_rank, conv_width, bias, conv_bias."""
    rank = cfg.get("time_step_rank", "auto")
    return (
        int(cfg.get("intermediate_size", cfg.get("expand", 2) * cfg.hidden_size)),
        int(cfg.require("state_size")),
        math.ceil(cfg.hidden_size / 16) if rank == "auto" else int(rank),
        int(cfg.get("conv_kernel", 4)),
        bool(cfg.get("use_bias", False)),
        bool(cfg.get("use_conv_bias", True)),
    )


class NormedMamba(Mamba):
    """Falcon-Mamba's."""

    eps: float

    def normalise(self, *parts):
        return [nn.functional.rms_norm(part, part.shape[-1:], eps=self.eps) for part in parts]


class FalconMambaLayer(MixerLayer):
    def make_mixer(self, cfg: HFConfig, index: int) -> nn.Module:
        mixer = NormedMamba(cfg.hidden_size, *mamba_sizes(cfg))
        mixer.eps = float(cfg.get("mixer_rms_eps", 1e-6))
        return mixer


class Mamba2Layer(MixerLayer):
    def make_mixer(self, cfg: HFConfig, index: int) -> nn.Module:
        return mamba2_mixer(cfg)


def mamba2_words(cfg: HFConfig, heads: str, head_dim: str, state_size: str) -> dict[str, Any]:
    """Mamba 2's sizes, of which three are under the given keys, in the words of hybrid models."""
    num_heads = int(cfg.require(heads))
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_ssm": num_heads * int(cfg.require(head_dim)),
        "mamba_d_state": cfg.require(state_size),
        "mamba_n_groups": cfg.get("n_groups", 8),
        "mamba_d_conv": cfg.get("conv_kernel", 4),
        "mamba_proj_bias": cfg.get("use_bias", False),
        "mamba_conv_bias": cfg.get("use_conv_bias", True),
        "rms_norm_eps": cfg.get("layer_norm_epsilon", 1e-5),
    }


class MambaForCausalLM(WithoutPositions):
    layer_class = MixerLayer
    packing: dict[str, tuple[str, ...]] = {}
    renames = {
        r"^backbone\.": "model.",
        r"^model\.embeddings?\.": "model.embed_tokens.",
        r"^model\.norm_f\.": "model.norm.",
        r"\.dt_proj\.bias$": ".dt_bias",
    }

    @staticmethod
    def words(cfg: HFConfig) -> dict[str, Any]:
        return {
            "rms_norm_eps": cfg.get("layer_norm_epsilon", 1e-5),
            "tie_word_embeddings": cfg.get("tie_word_embeddings", True),
        }


class FalconMambaForCausalLM(MambaForCausalLM):
    layer_class = FalconMambaLayer


class Mamba2ForCausalLM(MambaForCausalLM):
    layer_class = Mamba2Layer

    @staticmethod
    def words(cfg: HFConfig) -> dict[str, Any]:
        return mamba2_words(cfg, "num_heads", "head_dim", "state_size")

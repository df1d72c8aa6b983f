"""What hybrid families share: some layers attend, the others have a recurrent mixer in attention's place."""

from typing import Any

from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.rope import Rope
from octavo.layers.ssm.mixers import Mamba2
from octavo.models.llama import LlamaForCausalLM, LlamaLayer

ATTENTION = ("full_attention", "attention")

# Names in checkpoints, in Llama's words.
HYBRID_RENAMES = {
    r"\.mamba\.": ".self_attn.",
    r"\.feed_forward\.": ".mlp.",
    r"\.pre_ff_layernorm\.": ".post_attention_layernorm.",
    r"\.final_layernorm\.": ".norm.",
}


def mamba2_mixer(cfg: HFConfig) -> Mamba2:
    """Mamba 2 as configurations with `mamba_…` keys describe it."""
    cfg.choose("hidden_act", ["silu"], "silu")
    heads = int(cfg.require("mamba_n_heads"))
    inner = int(cfg.get("mamba_d_ssm", int(cfg.get("mamba_expand", 2)) * cfg.hidden_size))
    return Mamba2(
        cfg.hidden_size,
        heads,
        inner // heads,
        int(cfg.require("mamba_d_state")),
        int(cfg.get("mamba_n_groups", 1)),
        int(cfg.get("mamba_d_conv", 4)),
        bias=bool(cfg.get("mamba_proj_bias", False)),
        conv_bias=bool(cfg.get("mamba_conv_bias", True)),
        out_bias=cfg.get("projectors_bias"),
        norm_eps=cfg.rms_norm_eps if cfg.get("mamba_rms_norm", True) else None,
        gate_first=not cfg.get("mamba_norm_before_gate", False),
        dt_limit=cfg.get("time_step_limit", (0.0, float("inf"))),
    )


class HybridLayer(LlamaLayer):
    """Llama's layer with what `layer_types` names."""

    def make_attention(self, cfg: HFConfig, index: int, rope: Rope) -> nn.Module:
        is_attention = cfg.require("layer_types")[index] in ATTENTION
        return super().make_attention(cfg, index, rope) if is_attention else self.make_recurrent(cfg)

    def make_recurrent(self, cfg: HFConfig) -> nn.Module:
        """The mixer of the layers that do not attend."""
        return mamba2_mixer(cfg)


class HybridForCausalLM(LlamaForCausalLM):
    layer_class: type[nn.Module] = HybridLayer
    renames = HYBRID_RENAMES

    def __init__(self, cfg: HFConfig):
        self.cfg = HFConfig({**cfg.data, **self.words(cfg)})
        super().__init__(self.cfg)

    @staticmethod
    def words(cfg: HFConfig) -> dict[str, Any]:
        """What the configuration says, in Llama's words."""
        return {}


class WithoutPositions(HybridForCausalLM):
    """Attention does not rotate: the recurrent layers know the order."""

    @classmethod
    def layer_ropes(cls, cfg: HFConfig) -> list[Rope | None]:
        return [None] * cfg.num_layers

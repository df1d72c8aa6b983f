"""GPT-OSS: attention sinks, every other layer windowed, experts with biases and a clamped gate, stored in MXFP4.

MXFP4 (OCP microscaling formats): 32 numbers of 4 bits (E2M1) share a power of two. They are decoded while they load.
"""

from collections.abc import Iterable

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.layers.moe.layer import MoE, Routing
from octavo.layers.rope import Rope
from octavo.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """blocks [..., groups, 16] uint8, the first of two numbers in the lower half; scales [..., groups] uint8: exponent + 127.

    Returns [..., groups * 32] in `dtype`.
    """
    values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=dtype, device=blocks.device)
    numbers = values[torch.stack((blocks & 15, blocks >> 4), -1).int()].flatten(-2)
    return torch.ldexp(numbers, scales.int()[..., None] - 127).to(dtype).flatten(-2)


class GptOssAttention(LlamaAttention):
    def __init__(self, cfg: HFConfig, index: int, rope: Rope):
        super().__init__(cfg, index, rope)
        self.attn.sinks = nn.Parameter(torch.empty(cfg.num_heads), requires_grad=False)


class GptOssLayer(LlamaLayer):
    attention_class = GptOssAttention

    def make_mlp(self, cfg: HFConfig, index: int) -> nn.Module:
        cfg.choose("swiglu_alpha", [1.702], 1.702)
        cfg.choose("swiglu_limit", [7.0], 7.0)
        routing = Routing(cfg.num_experts_per_token, renormalize=True)
        return MoE(cfg.hidden_size, cfg.intermediate_size, cfg.num_experts, "clamped_swiglu", routing, bias=True)


class GptOssForCausalLM(LlamaForCausalLM):
    layer_class = GptOssLayer
    renames = {
        r"\.self_attn\.sinks$": ".self_attn.attn.sinks",
        r"\.mlp\.router\.": ".mlp.gate.",
        r"\.experts\.(gate_up_proj|down_proj)_bias$": r".experts.\1.bias",
    }

    def __init__(self, cfg: HFConfig):
        super().__init__(cfg)
        self._halves: dict[str, torch.Tensor] = {}

    def remap(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Experts as we keep them: output rows first, the gates' before the gated ones, where checkpoints interleave them."""
        stem, _, kind = name.rpartition("_")
        if kind in ("blocks", "scales"):
            other = self._halves.pop(stem, None)
            if other is None:
                self._halves[stem] = tensor.clone()
                return
            blocks, scales = (tensor, other) if kind == "blocks" else (other, tensor)
            name, tensor = f"{stem}.weight", decode_mxfp4(blocks, scales, self.model.norm.weight.dtype)
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            name, tensor = f"{name}.weight", tensor.transpose(1, 2)
        if ".experts.gate_up_proj." in name:
            tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), 1)
        yield name, tensor

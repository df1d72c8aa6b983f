"""A model that obeys the loader's contract, as small as one can be."""

import torch
from torch import nn

from octavo.errors import LoadError

HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 128, 512, 4, 2, 16, 2


class Packed(nn.Module):
    """Rows of several checkpoint matrices under each other."""

    def __init__(self, in_features: int, sizes: tuple[int, ...], bias: bool = False):
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.empty(sum(sizes), in_features), requires_grad=False)
        self.weight.weight_loader = self.load_rows
        if bias:
            self.bias = nn.Parameter(torch.empty(sum(sizes)), requires_grad=False)
            self.bias.weight_loader = self.load_rows

    def load_rows(self, param, tensor, shard):
        rows = param if shard is None else param.narrow(0, sum(self.sizes[:shard]), self.sizes[shard])
        if rows.shape != tensor.shape:
            raise LoadError(f"expected {tuple(rows.shape)}, got {tuple(tensor.shape)}")
        rows.copy_(tensor)


class Weight(nn.Module):
    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape), requires_grad=False)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj = Packed(HIDDEN, (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM))
        self.o_proj = Weight(HIDDEN, HEADS * HEAD_DIM)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = Packed(HIDDEN, (FFN, FFN))
        self.down_proj = Weight(HIDDEN, FFN)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Weight(HIDDEN), Weight(HIDDEN)
        self.self_attn, self.mlp = Attention(), MLP()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = Weight(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Weight(HIDDEN)


class TinyLlama(nn.Module):
    """The shape of RAND (tests/fixtures/checkpoints.py)."""

    packing = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    ignored = (r"rotary_emb\.inv_freq$",)

    def __init__(self, *, tied: bool = False, same_object: bool = False):
        super().__init__()
        self.model = Decoder()
        self.lm_head = Weight(VOCAB, HIDDEN)
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        if same_object:
            self.lm_head.weight = self.model.embed_tokens.weight


def expected_state(checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What TinyLlama's state must be after loading a checkpoint of RAND's names."""
    state = {}
    for name, tensor in checkpoint.items():
        if "q_proj" in name:
            parts = [checkpoint[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            state[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in name:
            parts = [tensor, checkpoint[name.replace("gate_proj", "up_proj")]]
            state[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            state[name] = tensor
    return state

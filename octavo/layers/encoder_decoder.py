"""What an encoder-decoder model offers the runner, beyond a causal one."""

import torch

from octavo.layers.attention.cross import CrossAttention
from octavo.layers.causal_lm import CausalLM


class EncoderDecoder(CausalLM):
    """Base of these models: `forward` and `logits` are the decoder's, which reads the encoder's output from the cache."""

    def encode(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids [tokens], positions [tokens] of whole inputs → the encoder's output [positions, hidden]."""
        raise NotImplementedError

    def keep(self, encoder_states: torch.Tensor, slot_mappings: dict[int, torch.Tensor]) -> None:
        """Fill the cache of every layer that reads the encoder's output; the slots of each position, by KV group."""
        for layer in self.modules():
            if isinstance(layer, CrossAttention):
                layer.fill(encoder_states, slot_mappings[layer.group])

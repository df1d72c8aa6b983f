"""Phi-3 and Phi-4: Llama whose checkpoints keep q, k, v in one tensor, and gate and up in another."""

from octavo.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    packing = {}

"""`--batch-invariant`: which providers make a request's numbers independent of whatever else the engine does.

Promised, bit for bit: the same logits, log probabilities and samples for a request whatever runs beside it, in steps of any
size, its prompt cut into any chunks, from the prefix cache or computed again after a preemption. That takes providers that
compute every token by itself, in an order that follows from the shapes of the model and the token's own position alone.
"""

from octavo.config.args import EngineArgs
from octavo.config.hf import HFConfig
from octavo.errors import ConfigError
from octavo.platforms.base import Platform

_GPU = {
    "linear": "triton_invariant",
    "paged_attention": "triton_invariant",
    "decode_attention": "triton_invariant",
    "qkv_rope_write": "triton",
    "rms_norm": "triton",
    "gated_activation": "triton",
    "sample": "triton",
    "top_logprobs": "by_row",
}
_CPU = {
    "linear": "by_row",
    "paged_attention": "by_row",
    "decode_attention": "composed",
    "qkv_rope_write": "by_row",
    "rms_norm": "by_row",
    "sample": "numpy",
    "top_logprobs": "by_row",
}


def invariant_providers(
    args: EngineArgs,
    text: HFConfig,
    platform: Platform,
    quantization: str | None,
    model_impl: str,
    compiles_blocks: bool,
    notes: list[str],
) -> dict[str, str]:
    """The provider of each operator that could depend on the batch; ConfigError for what has none."""
    for refused, why in (
        (args.op_providers, "op_providers chooses others; leave one of them out"),
        (args.attention_backend, f"attention_backend={args.attention_backend} chooses another; leave one of them out"),
        (
            quantization == "gguf",
            "products of quantised blocks are grouped by tokens; use dtype=float32 to decode them",
        ),
        (quantization, f"products in {quantization} are chosen by the number of tokens; use floating point weights"),
        (model_impl == "transformers", f"{text.architecture} is run by transformers' modules, which promise nothing"),
        (text.num_experts > 0, "experts are computed for all their tokens at once"),
        (text.get("kv_lora_rank"), "latent attention has no such operators yet"),
        (_is_recurrent(text), "recurrent layers compute in chunks, which follow how prompts are cut"),
        (compiles_blocks, "compiled blocks choose their own kernels; leave compile out"),
    ):
        if refused:
            raise ConfigError(f"batch_invariant is not supported here: {why}.", param="batch_invariant")
    chosen = _GPU if platform.supports_graphs else _CPU
    notes.append("batch_invariant: " + ", ".join(f"{name}={provider}" for name, provider in chosen.items()))
    return dict(chosen)


def _is_recurrent(text: HFConfig) -> bool:
    """Whether some layers are recurrent, by what configurations say of them."""
    sizes = ("state_size", "ssm_state_size", "mamba_d_state", "conv_L_cache", "linear_conv_kernel_dim")
    return any(text.get(size) for size in sizes) or "linear_attention" in text.get("layer_types", ())

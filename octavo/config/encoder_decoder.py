"""What a model with an encoder before its decoder needs decided: how its answers begin, and how much it keeps."""

from collections.abc import Collection, Mapping
from typing import Any

from octavo.config.args import EngineArgs
from octavo.config.engine import EncoderDecoderConfig
from octavo.config.hf import HFConfig
from octavo.config.pooling import CONVERSIONS
from octavo.errors import ConfigError


def resolve_encoder_decoder(
    args: EngineArgs, hf: HFConfig, generation: Mapping[str, Any], architectures: Collection[str], notes: list[str]
) -> EncoderDecoderConfig | None:
    """None for a model without an encoder before its decoder; `architectures` are those with a model file."""
    if hf.architecture not in architectures and not hf.get("is_encoder_decoder"):
        return None
    if hf.architecture not in architectures:
        raise ConfigError(
            f"{hf.architecture} is an encoder-decoder model for which Octavo has no model file; it has those of "
            f"{', '.join(sorted(architectures))}.",
            param="model",
        )
    _refuse_options(args, hf)

    def stated(key: str) -> int | None:
        found = generation[key] if generation.get(key) is not None else hf.get(key)
        return found[0] if isinstance(found, list) else found

    start = stated("decoder_start_token_id")
    if start is None:
        start = stated("bos_token_id")
    if start is None:
        raise ConfigError(
            f"neither generation_config.json nor config.json has a decoder_start_token_id, with which {hf.architecture}'s "
            "answers begin; give one with --hf-overrides.",
            param="hf_overrides",
        )
    forced = stated("forced_bos_token_id")
    begin = [start] if forced is None else [start, forced]
    notes.append(f"prompts go to the encoder, and answers begin after the tokens {begin}")
    never = generation.get("bad_words_ids") or hf.get("bad_words_ids") or []
    return EncoderDecoderConfig(begin, [list(ids) for ids in never])


def _refuse_options(args: EngineArgs, hf: HFConfig) -> None:
    for name, is_asked, why in (
        ("runner", args.runner == "pooling", "makes text"),
        ("convert", args.convert in CONVERSIONS, "makes text"),
        ("model_impl", args.model_impl == "transformers", "runs by Octavo's own model file alone"),
        ("batch_invariant", args.batch_invariant, "has no batch-invariant form of its encoder"),
        ("enable_prompt_embeds", args.enable_prompt_embeds, "takes tokens"),
        ("enable_chunked_prefill", args.enable_chunked_prefill is False, "needs room for prompts beside the encoder"),
    ):
        if is_asked:
            raise ConfigError(
                f"{name}={getattr(args, name)} is not supported for {hf.architecture}, an encoder-decoder model that {why}.",
                param=name,
            )


def check_dtype(hf: HFConfig, dtype: str) -> None:
    """Refuse what a model's numbers do not fit."""
    if dtype == "float16" and hf.model_type in ("t5", "mt5", "umt5"):
        raise ConfigError(
            f"dtype=float16 is not supported for {hf.architecture}, whose hidden states overflow it; use bfloat16 or float32.",
            param="dtype",
        )


def decoder_of(hf: HFConfig) -> HFConfig:
    """The configuration of a decoder that keeps what this model does: its own tokens, and as many of its encoder."""
    num_layers = int(hf.get("num_decoder_layers") or hf.get("decoder_layers") or hf.num_layers)
    num_heads = int(hf.get("decoder_attention_heads") or hf.num_heads)
    shape = {
        "num_hidden_layers": 2 * num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": int(hf.get("d_kv", hf.hidden_size // num_heads)),
    }
    return HFConfig({**hf.data, **shape})

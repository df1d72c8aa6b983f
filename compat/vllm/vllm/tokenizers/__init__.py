"""Tokenizers of transformers'."""

from typing import Any


def get_tokenizer(
    tokenizer_name: str,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **kwargs: Any,
) -> Any:
    """The transformers tokenizer of a folder or hub id."""
    if tokenizer_mode not in ("auto", "hf", "slow"):
        raise NotImplementedError(f"tokenizer_mode={tokenizer_mode!r} is not supported; use auto.")
    from transformers import AutoTokenizer

    if tokenizer_mode == "slow":
        kwargs["use_fast"] = False
    return AutoTokenizer.from_pretrained(
        tokenizer_name,
        *args,
        trust_remote_code=trust_remote_code,
        revision=revision,
        cache_dir=download_dir,
        **kwargs,
    )

"""Prompts of encoder-decoder models: what goes to the encoder, and what the decoder begins with."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from octavo.config.engine import EncoderDecoderConfig
from octavo.engine.pooling_inputs import Prompt
from octavo.errors import ClientError, ContextLengthError

PROMPT_KEYS = frozenset({"encoder_prompt", "decoder_prompt"})
Read = Callable[[Any, bool], Prompt]  # (a plain prompt in any spelling, whether its text gets special tokens)


class EncoderInputs:
    """Reads prompts for one model. `max_len`: positions of the longest encoder input."""

    def __init__(self, config: EncoderDecoderConfig, max_len: int):
        self._config = config
        self._max_len = max_len

    def read(self, prompt: Any, add_special_tokens: bool, read: Read) -> Prompt:
        """The decoder's prompt, with the encoder's in it. A prompt in one piece is the encoder's."""
        parts = prompt if isinstance(prompt, Mapping) and PROMPT_KEYS & prompt.keys() else {"encoder_prompt": prompt}
        if unknown := parts.keys() - PROMPT_KEYS:
            raise ClientError(
                f"prompt keys {sorted(unknown)} do not go with {sorted(PROMPT_KEYS)}; put them inside.", param="prompt"
            )
        if parts.get("encoder_prompt") is None:
            raise ClientError("the prompt has a decoder_prompt and no encoder_prompt.", param="prompt")
        encoder = read(parts["encoder_prompt"], add_special_tokens)
        begin = self._config.decoder_begin
        if parts.get("decoder_prompt") is None:
            return Prompt(None, begin, encoder.cache_salt, encoder=encoder)
        given = parts["decoder_prompt"]
        decoder = read(given, False)
        is_text = isinstance(given, str) or (isinstance(given, Mapping) and "prompt_token_ids" not in given)
        if is_text:
            token_ids = begin + decoder.token_ids
        else:  # ids say all but, often, the token that every answer begins with
            token_ids = decoder.token_ids if decoder.token_ids[0] == begin[0] else begin[:1] + decoder.token_ids
        return Prompt(decoder.text, token_ids, encoder.cache_salt, encoder=encoder)

    def fit(self, prompt: Prompt, truncate: int | None) -> Prompt:
        """Cut the encoder's prompt to its last `truncate` tokens (-1: as many as it reads); refuse one that is too long."""
        encoder, limit = prompt.encoder, self._max_len
        assert encoder is not None
        if truncate is not None and truncate > limit:
            raise ClientError(
                f"truncate_prompt_tokens={truncate} is more than the {limit} tokens the encoder reads.",
                param="truncate_prompt_tokens",
            )
        if truncate is not None:
            encoder = replace(encoder, token_ids=encoder.token_ids[-(limit if truncate == -1 else truncate) :])
        if len(encoder.token_ids) > limit:
            raise ContextLengthError(
                f"This model's encoder reads at most {limit} tokens. However, your prompt contains "
                f"{len(encoder.token_ids)} input tokens. Please shorten the prompt.",
                param="input_tokens",
            )
        return replace(prompt, encoder=encoder)

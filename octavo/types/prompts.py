"""What a caller may pass as a prompt: a string, token ids, or one of the dictionaries below."""

from typing import Any, Required, TypedDict

import msgspec

EMBEDS_DIGEST_BYTES = 16


class PromptEmbeds(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A prompt as input embeddings, checked and plain: what enters the first layer in the place of looked-up tokens."""

    num_tokens: int
    data: bytes  # [num_tokens, hidden_size] in the model's data type
    digests: bytes  # [num_tokens, EMBEDS_DIGEST_BYTES]: one a row, so that equal beginnings are known to be equal


class _PromptOptions(TypedDict, total=False):
    cache_salt: str  # prompts share cached prefixes with equal salts only


class TextPrompt(_PromptOptions):
    """A prompt as text."""

    prompt: str


class _TokensPromptText(_PromptOptions, total=False):
    prompt: str  # the text behind the ids, echoed in the output and not used otherwise


class TokensPrompt(_TokensPromptText):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


class EmbedsPrompt(_PromptOptions):
    """A prompt as input embeddings; needs an engine with `enable_prompt_embeds`."""

    prompt_embeds: Any  # a torch tensor [tokens, hidden_size], or `PromptEmbeds`


class PairPrompt(TypedDict):
    """Two texts that a cross-encoder reads together."""

    first: str
    second: str


class ExplicitEncoderDecoderPrompt(TypedDict, total=False):
    """For encoder-decoder models: what the encoder reads, and what the answer begins with."""

    encoder_prompt: Required[str | list[int] | TextPrompt | TokensPrompt]
    decoder_prompt: str | list[int] | TextPrompt | TokensPrompt | None  # None: what the model's configuration says


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt | ExplicitEncoderDecoderPrompt

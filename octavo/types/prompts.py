"""What a caller may pass as a prompt: a string, token ids, or one of the dictionaries below."""

from typing import TypedDict


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


class PairPrompt(TypedDict):
    """Two texts that a cross-encoder reads together."""

    first: str
    second: str


PromptType = str | list[int] | TextPrompt | TokensPrompt

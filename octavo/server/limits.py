"""What one call may ask for in all, where every field for itself is within its range.

`n`, `max_tokens` and `top_logprobs` multiply: each at its cap would fill the memory of the front with one answer.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.errors import ClientError
from octavo.types.sampling_params import SamplingParams

MAX_ANSWERS = 4096  # prompts × n
MAX_SCORES = 1 << 22  # log probabilities in one call, about 100 bytes each in the front
MAX_EXTRA_ARGS_BYTES = 64 << 10


def check_size(params: SamplingParams, num_prompts: int, num_prompt_tokens: int, max_model_len: int) -> None:
    """Refuse a call whose products are too large; `num_prompt_tokens` of all its prompts.

    A server whose operator lifts the cap on log probabilities (`--max-logprobs -1`) bounds them by its own choice.
    """
    num_answers = num_prompts * params.n
    if num_answers > MAX_ANSWERS:
        raise ClientError(
            f"{num_prompts} prompts × n={params.n} are {num_answers} answers; at most {MAX_ANSWERS} fit in one call.",
            param="n",
        )
    scores = 0
    if params.logprobs is not None and params.logprobs >= 0:
        max_tokens = max_model_len if params.max_tokens is None else min(params.max_tokens, max_model_len)
        scores += num_answers * max_tokens * (1 + params.logprobs)
    if params.prompt_logprobs is not None and params.prompt_logprobs >= 0:
        scores += num_prompt_tokens * (1 + params.prompt_logprobs)
    if scores > MAX_SCORES:
        raise ClientError(
            f"the call asks for up to {scores} log probabilities (answers × max_tokens × (1 + logprobs)); at most "
            f"{MAX_SCORES} fit. Ask for fewer of them, or lower max_tokens or n.",
            param="logprobs",
        )


def check_extra_args(extra_args: Mapping[str, Any] | None) -> None:
    """Refuse arguments of logits processors that are large or cannot cross to the core (integers beyond 64 bits)."""
    if not extra_args:
        return
    try:
        size = len(msgspec.msgpack.encode(extra_args))
    except (TypeError, OverflowError) as error:
        raise ClientError(f"vllm_xargs holds what cannot be passed on: {error}.", param="vllm_xargs") from None
    if size > MAX_EXTRA_ARGS_BYTES:
        raise ClientError(f"vllm_xargs has {size} bytes; at most {MAX_EXTRA_ARGS_BYTES} fit.", param="vllm_xargs")

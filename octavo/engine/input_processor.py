"""From what a caller passes to what the core computes: tokens, lengths, parameters. The last place to say no politely.

Everything a client can get wrong ends here with a `ClientError`; an `EngineRequest` that leaves is sound.
"""

import random
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from octavo.config.engine import ModelConfig, PoolingConfig, SchedulerConfig
from octavo.engine.encoder_inputs import EncoderInputs
from octavo.engine.pooling_inputs import NOTHING_TO_SAMPLE, PoolingInputs, Prompt
from octavo.engine.prompt_embeds import check_sampling, read_embeds
from octavo.errors import ClientError, ContextLengthError
from octavo.structured_output.constraint import make_constraint
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.types.pooling_params import PoolingParams
from octavo.types.prompts import PairPrompt, PromptEmbeds, PromptType
from octavo.types.request import EncoderInput, EngineRequest
from octavo.types.sampling_params import SamplingParams
from octavo.types.structured_outputs import StructuredOutputsParams

MAX_CACHE_SALT = 128
MAX_BAD_WORDS_TOKENS = 1024
MAX_PRIORITY = 2**31 - 1  # in either direction
PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt"})
TOKENIZATION_KEYS = frozenset({"add_special_tokens", "truncate_prompt_tokens"})


class InputProcessor:
    """Makes `EngineRequest`s for one model. Safe to use from several threads."""

    def __init__(
        self,
        model_config: ModelConfig,
        scheduler_config: SchedulerConfig,
        tokenizer: Tokenizer | None,
        pooling_config: PoolingConfig | None = None,
    ):
        self._model = model_config
        self._pooling = PoolingInputs(pooling_config, model_config, self)
        encoder_decoder, max_len = model_config.encoder_decoder, scheduler_config.max_encoder_len
        self._encoder = None if encoder_decoder is None else EncoderInputs(encoder_decoder, max_len)
        self._has_priorities = scheduler_config.policy == "priority"
        self._tokenizer = tokenizer
        if model_config.enable_prompt_embeds:
            import torch  # noqa: F401  now: a front without other use for it would stand still at the first such request
        self._seeds = random.Random(model_config.seed)
        self._serial = count()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ClientError when the engine runs without one."""
        if self._tokenizer is None:
            raise ClientError("this engine runs without a tokenizer (skip_tokenizer_init): prompts are token ids.")
        return self._tokenizer

    def process(
        self,
        request_id: str,
        prompt: PromptType | PairPrompt,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        arrival_time: float | None = None,
    ) -> tuple[Prompt, list[EngineRequest]]:
        """Read a prompt and check everything about the request; one `EngineRequest` for each of its n answers."""
        pooling_params = None
        if isinstance(params, PoolingParams):
            pooling_params, params = params, NOTHING_TO_SAMPLE
        else:
            self._pooling.check_generates()
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        options = dict(tokenization_kwargs or {})
        unknown = options.keys() - TOKENIZATION_KEYS
        if unknown:
            raise ClientError(f"tokenization_kwargs={sorted(unknown)} are not known; use {sorted(TOKENIZATION_KEYS)}.")
        self._check_params(params, priority)
        if pooling_params is not None:
            read, pooling_params = self._pooling.read(prompt, pooling_params, options)
            return read, self._fan_out(request_id, read, params, priority, arrival_time, pooling_params)
        truncate = options.get("truncate_prompt_tokens", params.truncate_prompt_tokens)
        read = self.read_prompt(prompt, add_special_tokens=options.get("add_special_tokens", True))  # type: ignore[arg-type]
        if read.embeds is not None:
            check_sampling(read.embeds, params, truncate)
        read = self._fit(read, params, truncate)
        params = self._complete(params, len(read.token_ids))
        return read, self._fan_out(request_id, read, params, priority, arrival_time)

    # Prompts

    def read_prompt(self, prompt: PromptType, *, add_special_tokens: bool = True) -> Prompt:
        """Turn any spelling of a prompt into tokens."""
        if self._encoder is not None:
            return self._encoder.read(prompt, add_special_tokens, self._read_one)
        return self._read_one(prompt, add_special_tokens)

    def _read_one(self, prompt: PromptType, add_special_tokens: bool) -> Prompt:
        if isinstance(prompt, str):
            return self._read_text(prompt, add_special_tokens, None)
        if isinstance(prompt, Mapping):
            return self._read_mapping(prompt, add_special_tokens)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            return Prompt(None, self._check_ids(prompt))
        raise ClientError(
            f"a prompt of type {type(prompt).__name__} is not supported; pass a string, a list of token ids, "
            "{'prompt': ...} or {'prompt_token_ids': ...}.",
            param="prompt",
        )

    def _read_mapping(self, prompt: Mapping[str, Any], add_special_tokens: bool) -> Prompt:
        unknown = prompt.keys() - PROMPT_KEYS
        if unknown:
            raise ClientError(
                f"prompt keys {sorted(unknown)} are not supported; use {sorted(PROMPT_KEYS)}.", param="prompt"
            )
        salt = _check_cache_salt(prompt.get("cache_salt"))
        if "prompt_embeds" in prompt:
            return self._read_embeds(prompt, salt)
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise ClientError(f"prompt={text!r} is not a string.", param="prompt")
        if "prompt_token_ids" in prompt:
            return Prompt(text, self._check_ids(prompt["prompt_token_ids"]), salt)
        if text is None:
            raise ClientError("the prompt has neither 'prompt' nor 'prompt_token_ids'.", param="prompt")
        return self._read_text(text, add_special_tokens, salt)

    def _read_embeds(self, prompt: Mapping[str, Any], cache_salt: str | None) -> Prompt:
        if others := prompt.keys() & {"prompt", "prompt_token_ids"}:
            raise ClientError(
                f"prompt_embeds is a prompt by itself; leave out {sorted(others)}.", param="prompt_embeds"
            )
        embeds = prompt["prompt_embeds"]
        if not isinstance(embeds, PromptEmbeds):
            embeds = read_embeds(embeds, self._model)
        return Prompt(None, [0] * embeds.num_tokens, cache_salt, embeds)

    def _read_text(self, text: str, add_special_tokens: bool, cache_salt: str | None) -> Prompt:
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return Prompt(text, self._check_ids(token_ids), cache_salt)

    def _check_ids(self, token_ids: Any) -> list[int]:
        """A list of ids that the model has rows for; never the caller's own list."""
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)):
            raise ClientError(f"prompt_token_ids={token_ids!r} is not a list of token ids.", param="prompt")
        if not token_ids:
            raise ClientError("the prompt is empty; it must have at least one token.", param="prompt")
        limit = self._model.vocab_size
        # Two walks in C instead of one in Python: prompts are long.
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < limit:
            return list(token_ids)
        bad = next(i for i in token_ids if type(i) is not int or not 0 <= i < limit)
        raise ClientError(
            f"prompt token id {bad!r} is not allowed; ids are integers from 0 to {limit - 1}.", param="prompt"
        )

    def _fit(self, prompt: Prompt, params: SamplingParams, truncate: int | None) -> Prompt:
        """Cut the prompt as asked, then refuse it when it leaves no room for an answer."""
        limit = self._model.max_model_len
        if params.max_tokens is not None and params.max_tokens > limit:
            raise ContextLengthError(
                f"max_tokens={params.max_tokens} is more than the model's maximum context length of {limit} tokens.",
                param="max_tokens",
            )
        if self._encoder is not None:
            prompt, truncate = self._encoder.fit(prompt, truncate), None
        # Nothing is generated when max_tokens is 0: the prompt may fill the context.
        longest = limit - (params.max_tokens != 0)
        if truncate is not None:
            prompt = self._truncate(prompt, params, truncate, longest)
        num_tokens = len(prompt.token_ids)
        if num_tokens > longest:
            wants = "" if params.max_tokens == 0 else ", and the answer needs at least one"
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains {num_tokens} "
                f"input tokens{wants}. Please shorten the prompt.",
                param="input_tokens",
            )
        return prompt

    def _truncate(self, prompt: Prompt, params: SamplingParams, truncate: int, longest: int) -> Prompt:
        """Keep the last `truncate` tokens; -1 keeps as many as leave room for `max_tokens`."""
        limit = self._model.max_model_len
        if truncate > limit:
            raise ClientError(
                f"truncate_prompt_tokens={truncate} is more than the model's maximum context length of {limit} tokens.",
                param="truncate_prompt_tokens",
            )
        keep = truncate
        if truncate == -1:
            room = limit - (params.max_tokens or 0)
            keep = room if 0 < room <= longest else longest
        return (
            prompt
            if len(prompt.token_ids) <= keep
            else Prompt(prompt.text, prompt.token_ids[-keep:], prompt.cache_salt)
        )

    # Parameters

    def _check_params(self, params: SamplingParams, priority: int) -> None:
        params.check_vocab(self._model.vocab_size, self._model.max_logprobs)
        if params.structured_outputs is not None:
            self._check_constraint(params.structured_outputs)
        if params.extra_args and not self._model.logits_processors:
            raise ClientError(
                f"extra_args={sorted(params.extra_args)} has no taker: no logits processor or connector is loaded.",
                param="extra_args",
            )
        if params.thinking_token_budget is not None and params.thinking_token_budget >= 0 and params.reasoning is None:
            raise ClientError(
                f"thinking_token_budget={params.thinking_token_budget} needs a model whose reasoning format is known; "
                "start the server with --reasoning-parser, or leave it out.",
                param="thinking_token_budget",
            )
        if params.detokenize and self._tokenizer is None:
            raise ClientError(
                "this engine runs without a tokenizer (skip_tokenizer_init); set detokenize=False.", param="detokenize"
            )
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise ClientError(
                f"priority={priority} is not allowed; it must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}.",
                param="priority",
            )
        if priority and not self._has_priorities:
            raise ClientError(
                f"priority={priority} needs an engine started with scheduling_policy='priority'.", param="priority"
            )

    def _check_constraint(self, constraint: StructuredOutputsParams) -> None:
        """What can be known to be wrong without the vocabulary; the rest comes back from the core."""
        if self._tokenizer is None:
            raise ClientError(
                "structured_outputs needs a tokenizer, and this engine runs without one (skip_tokenizer_init).",
                param="structured_outputs",
            )
        make_constraint(constraint)

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """A copy in which nothing is left to decide: `max_tokens` that fits, a seed, bad words as tokens."""
        room = self._model.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return msgspec.structs.replace(
            params,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            bad_words_token_ids=self._bad_words(params.bad_words or []) or None,
        )

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        model = self._model.encoder_decoder
        return self._spell_bad_words(words) + (model.bad_words_token_ids if model is not None else [])

    def _spell_bad_words(self, words: list[str]) -> list[list[int]]:
        """The token sequences of each word, at the start of a text and after a space."""
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            for text in (bare, f" {bare}"):
                token_ids = self.tokenizer.encode(text, add_special_tokens=False)
                if token_ids:
                    spellings[tuple(token_ids)] = None
        num_tokens = sum(map(len, spellings))
        if num_tokens > MAX_BAD_WORDS_TOKENS:
            raise ClientError(
                f"bad_words come to {num_tokens} tokens; at most {MAX_BAD_WORDS_TOKENS} are allowed.", param="bad_words"
            )
        return [list(spelling) for spelling in spellings]

    # Fan-out

    def _fan_out(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        arrival_time: float,
        pooling_params: PoolingParams | None = None,
    ) -> list[EngineRequest]:
        """One request for each answer. The serial number keeps callers' ids apart when they use one twice."""
        unique_id = f"{request_id}-{next(self._serial)}"
        eos_token_ids = [] if params.ignore_eos else self._model.eos_token_ids
        encoder_input = None if prompt.encoder is None else EncoderInput(prompt.encoder.token_ids)
        requests = []
        for index in range(params.n):
            own = params
            if index > 0:
                assert params.seed is not None
                # Every answer has the same prompt: its scores are computed once.
                own = msgspec.structs.replace(params, seed=mix_seed(params.seed, index), prompt_logprobs=None)
            requests.append(
                EngineRequest(
                    request_id=unique_id if params.n == 1 else f"{index}_{unique_id}",
                    prompt_token_ids=prompt.token_ids,
                    sampling_params=own,
                    eos_token_ids=eos_token_ids,
                    arrival_time=arrival_time,
                    priority=priority,
                    cache_salt=prompt.cache_salt,
                    index=index,
                    pooling_params=pooling_params,
                    prompt_embeds=prompt.embeds,
                    encoder_input=encoder_input,
                )
            )
        return requests


def mix_seed(seed: int, index: int) -> int:
    """The seed of answer `index`: the request's own for the first, unrelated ones (splitmix64) for the others."""
    if index == 0:
        return seed
    mask = (1 << 64) - 1
    mixed = (seed + index * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    mixed ^= mixed >> 31
    return mixed - (1 << 64) if mixed >= 1 << 63 else mixed


def _check_cache_salt(salt: Any) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT or any(c in salt for c in "@/\\\0"):
        raise ClientError(
            f"cache_salt={salt!r} is not allowed; it must be a string of 1 to {MAX_CACHE_SALT} characters without '@', "
            "'/', '\\' and NUL.",
            param="cache_salt",
        )
    return salt

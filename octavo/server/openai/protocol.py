"""The requests of the OpenAI routes: declared fields, their meaning as `SamplingParams`, and what is refused by name.

Types are checked strictly where the body is converted, ranges in `SamplingParams`; what needs two fields (top_logprobs
without logprobs) in the `check` methods here. A field this server knows but cannot honour stands in `NOT_YET`: any
value but a neutral one is refused. A field nobody knows is ignored with a debug line, as clients expect.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from octavo.errors import ClientError
from octavo.server.constraints import read_constraint
from octavo.server.tools import read_tool_use
from octavo.types.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
REQUEST_ID = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)
DEFAULT_COMPLETION_TOKENS = 16

# Field -> values that ask for nothing. null is neutral everywhere.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_decoding_backend": (),
    "prompt_embeds": (),
    "suffix": ("",),
    "best_of": (1,),
    "logprob_token_ids": ([],),
    "prompt_logprob_token_ids": ([],),
    "prompt_logprob_start": (0,),
    "truncation_side": ("left",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "repetition_detection": ({},),
    "watermarking": (False,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "moderation": (),
    "mm_payload": (),
    "routed_experts_prompt_start": (0,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
}

# Request fields that are SamplingParams fields of the same name and meaning.
_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "stream_interval",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
)


# Fields that say nothing to beam search -> the value that asks for nothing.
_NOT_WITH_BEAMS: dict[str, Any] = {
    "stream": False,
    "echo": False,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": [],
    "stop_token_ids": [],
    "min_tokens": 0,
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "logit_bias": {},
    "response_format": {"type": "text"},
    "structured_outputs": {},
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "vllm_xargs": {},
}


def refuse_unsupported(
    fields: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]] = NOT_YET, known: Collection[str] = ()
) -> None:
    """Raise for a field of `table` that asks for something; those in `known` are this route's own."""
    for name, neutral in table.items():
        value = fields.get(name)
        if value is not None and name not in known and not any(_same(value, harmless) for harmless in neutral):
            allowed = ", ".join(["null", *(msgspec.json.encode(v).decode() for v in neutral)])
            raise ClientError(
                f"{name} is not supported by this server yet; leave it out or send {allowed}.",
                param=name,
                code="unsupported_parameter",
            )


def _same(value: Any, other: Any) -> bool:
    """Equality in which true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chat and plain completions have in common. null means "not sent" for every field."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    stream_interval: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None  # of beam search
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    vllm_xargs: dict[str, Any] | None = None  # for custom logits processors
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def check(self) -> None:
        """Refuse contradictions between fields."""
        if self.stream_options is not None and not self.stream:
            raise ClientError("stream_options needs stream: true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ClientError("prompt_logprobs cannot be streamed; send stream: false.", param="prompt_logprobs")
        if self.request_id is not None and not REQUEST_ID.fullmatch(self.request_id):
            raise ClientError("request_id must be 1 to 128 letters, digits or -_.:@/+=.", param="request_id")

        if self.use_beam_search:
            self._check_beam_search()
        elif self.length_penalty is not None and self.length_penalty != 1.0:
            raise ClientError("length_penalty needs use_beam_search: true.", param="length_penalty")

    def _check_beam_search(self) -> None:
        """Refuse what beam search has no use for: it chooses tokens by their probability alone."""
        for name, neutral in _NOT_WITH_BEAMS.items():
            value = getattr(self, name)
            if value is not None and not _same(value, neutral):
                raise ClientError(f"{name} has no meaning with use_beam_search; leave it out.", param=name)

    def beam_search_params(self, defaults: Mapping[str, Any], max_model_len: int) -> BeamSearchParams | None:
        """The parameters of the search that was asked for; `n` is its width."""
        if not self.use_beam_search:
            return None
        limit = self._limit(defaults)
        return BeamSearchParams(
            beam_width=self.n or 1,
            max_tokens=max_model_len if limit is None else limit,
            ignore_eos=bool(self.ignore_eos),
            temperature=self.temperature or 0.0,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
        )

    def sampling_params(self, defaults: Mapping[str, Any], max_logprobs: int) -> SamplingParams:
        """The engine's parameters: the request's values, else the model's `defaults`, else the built-in ones."""
        self.check()
        values: dict[str, Any] = {}
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is None:
                value = defaults.get(name)
            if value is not None:
                values[name] = value
        if self.logit_bias:
            values["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        if self.vllm_xargs:
            values["extra_args"] = self.vllm_xargs
        values["structured_outputs"] = read_constraint(self)
        values["max_tokens"] = self._limit(defaults)
        values["logprobs"] = self._logprobs(max_logprobs)
        values["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**values)

    def _limit(self, defaults: Mapping[str, Any]) -> int | None:
        raise NotImplementedError

    def _logprobs(self, max_logprobs: int) -> int | None:
        """How many of the likeliest tokens to report besides the chosen one; None for no logprobs."""
        raise NotImplementedError


def _token_id(key: str) -> int:
    """A key of `logit_bias`: JSON has string keys only, so the token id comes as one."""
    try:
        return int(key)
    except ValueError:
        raise ClientError(f"logit_bias has the key {key!r}; keys must be token ids.", param="logit_bias") from None


def check_count(name: str, value: int, maximum: int) -> None:
    """Refuse a negative number of logprobs, or more than the operator allows (`maximum` -1: any, and -1 means all)."""
    if maximum >= 0 and not 0 <= value <= maximum:
        raise ClientError(
            f"{name}={value} is not allowed; ask for 0 to {maximum}, or start the server with a larger --max-logprobs.",
            param=name,
        )


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: Any = None  # str, list of str, token ids or list of token ids: msgspec cannot tell the lists apart
    logprobs: int | None = None
    prompt_embeds: str | list[str] | None = None  # base64 of torch.save: prompts that come before `prompt`

    def check(self) -> None:
        super().check()
        if self.prompt_embeds is not None and (self.echo or self.use_beam_search):
            name = "echo" if self.echo else "use_beam_search"
            raise ClientError(f"{name} needs the tokens of the prompt, and prompt_embeds has none.", param=name)
        if self.max_tokens == 0 and not self.echo:
            raise ClientError(
                "max_tokens=0 generates nothing; it needs echo: true to score the prompt.", param="max_tokens"
            )

    def sampling_params(self, defaults: Mapping[str, Any], max_logprobs: int) -> SamplingParams:
        params = super().sampling_params(defaults, max_logprobs)
        if self.echo and params.logprobs is not None and params.prompt_logprobs is None:
            params.prompt_logprobs = params.logprobs
        return params

    def _limit(self, defaults: Mapping[str, Any]) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def _logprobs(self, max_logprobs: int) -> int | None:
        if self.logprobs is not None:
            check_count("logprobs", self.logprobs, max_logprobs)
        return self.logprobs


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        super().check()
        check_messages(self.messages)
        read_tool_use(self.tools, self.tool_choice)
        if self.top_logprobs is not None and not self.logprobs:
            raise ClientError("top_logprobs needs logprobs: true.", param="top_logprobs")
        check_turn(self.add_generation_prompt, self.continue_final_message)
        if self.reasoning_effort not in (None, *REASONING_EFFORTS):
            raise ClientError(
                f"reasoning_effort={self.reasoning_effort!r:.140} is not known; use one of {', '.join(REASONING_EFFORTS)}.",
                param="reasoning_effort",
            )
        for name in ("max_completion_tokens", "max_tokens"):
            if getattr(self, name) == 0:
                raise ClientError(f"{name}=0 is not allowed; {name} must be at least 1.", param=name)

    def _limit(self, defaults: Mapping[str, Any]) -> int | None:
        for limit in (self.max_completion_tokens, self.max_tokens, defaults.get("max_tokens")):
            if limit is not None:
                return limit
        return None

    def _logprobs(self, max_logprobs: int) -> int | None:
        if not self.logprobs:
            return None
        top = self.top_logprobs or 0
        check_count("top_logprobs", top, max_logprobs)
        return top


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Refuse an empty or endless conversation."""
    if not messages:
        raise ClientError("messages must hold at least one message.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise ClientError(f"messages holds {len(messages)} messages; at most {MAX_MESSAGES} fit.", param="messages")


def check_turn(add_generation_prompt: bool | None, continue_final_message: bool | None) -> None:
    """A new turn and a continued one exclude each other."""
    if add_generation_prompt and continue_final_message:
        raise ClientError(
            "add_generation_prompt and continue_final_message exclude each other; send one of them.",
            param="continue_final_message",
        )


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None

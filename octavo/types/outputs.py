"""What the engine says back: `EngineOutput` crosses the process border, `RequestOutput` is what users get."""

import enum
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.types.stats import SchedulerStats


class FinishReason(enum.IntEnum):
    """Why a request ended. `str(reason)` is the word clients see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log probabilities at one position: the chosen token first, then the top k in falling order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the chosen token, 1 = most likely


class Pooled(msgspec.Struct, array_like=True, gc=False):
    """The result of a request that makes no text: float32 numbers in the byte order of little-endian machines, row by row."""

    shape: list[int]  # [width], or [tokens, width]
    data: bytes


class EngineOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request's share of one step, from core to front."""

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one entry a new token
    # One entry a prompt position from the second on; arrives in pieces when the prefill is chunked.
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that fired; None for EOS or length
    error: str | None = None  # with FinishReason.ERROR
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queued_time: float = 0.0  # time.monotonic() of the first scheduling, set on the first output only
    error_kind: str | None = None  # the class in octavo.errors that `error` becomes; None: RequestFailedError
    pooled: Pooled | None = None


class EngineOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """Everything one step produced, one message."""

    outputs: list[EngineOutput] = []
    stats: SchedulerStats | None = None
    timestamp: float = 0.0  # time.monotonic() at the end of the step


@dataclass(slots=True)
class Logprob:
    """Log probability of one token at one position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` answers."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: the prompt's tokens and what was added to them."""

    tokens: list[int]
    logprobs: list[PositionLogprobs]  # of the positions added
    cum_logprob: float = 0.0
    text: str | None = None  # of all `tokens`
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, seconds on the monotonic clock of the front process."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_generation_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The state of one request as its user sees it (cumulative, delta or final by `output_kind`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    num_cached_tokens: int = 0
    error: str | None = None
    encoder_prompt: str | None = None  # of encoder-decoder models; `prompt` is what the decoder began with
    encoder_prompt_token_ids: list[int] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the model read before it wrote."""
        return len(self.prompt_token_ids) + len(self.encoder_prompt_token_ids or ())

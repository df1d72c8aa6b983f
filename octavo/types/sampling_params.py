"""How to choose tokens and when to stop: vLLM's `SamplingParams`, checked where it is made."""

import enum
import math
from typing import Any

import msgspec

from octavo.errors import ClientError
from octavo.types.structured_outputs import StructuredOutputsParams

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS = 1024
MAX_CHARACTERS = 1024  # of one stop string or bad word
INT32_MAX = 2**31 - 1  # of every count: what a device's row can hold
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
# Below this temperature the softmax is one-hot in float32 anyway; treating it as greedy avoids dividing by almost nothing.
GREEDY_TEMPERATURE = 1e-5
MAX_SHOWN = 100  # characters of a wrong value that its error repeats


class RequestOutputKind(enum.IntEnum):
    """What each `RequestOutput` of a stream holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one output at the end


class ReasoningSection(msgspec.Struct, array_like=True, omit_defaults=True):
    """Where an answer's reasoning ends, in terms of text and tokens. Whoever knows the model's format fills it in.

    The section is open from the first token on, or opened by `start`; the first `end` behind that closes it for good. A
    mark that is no token of its own may run into its neighbours (`>` and a newline can be one token): to find one, look at
    the text of the tokens; `end_token_ids` are for writing it. `closing_token_ids` may stand for the last of them: tokens
    that begin with its text.
    """

    is_open: bool  # the answer begins inside the section
    start: str
    end: str
    start_token_ids: list[int]
    end_token_ids: list[int]
    closing_token_ids: list[int] = []


def _bad(name: str, value: Any, want: str) -> ClientError:
    shown = repr(value)
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
    return ClientError(f"{name}={shown} is not allowed; {name} must be {want}.", param=name)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """Beam search: keep the `beam_width` likeliest continuations, one token at a time.

    A sequence's score is its cumulative log probability divided by length ** length_penalty, EOS not counted.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if not _is_int(self.beam_width) or not 1 <= self.beam_width <= MAX_N:
            raise _bad("beam_width", self.beam_width, f"an integer from 1 to {MAX_N}")
        if not _is_int(self.max_tokens) or not 1 <= self.max_tokens <= INT32_MAX:
            raise _bad("max_tokens", self.max_tokens, f"an integer from 1 to {INT32_MAX}")
        for name, low, high in (("temperature", 0.0, 2.0), ("length_penalty", -100.0, 100.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise _bad(name, value, f"a number from {low} to {high}")


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True, dict=False):
    """Sampling and stopping of one request. Wrong values raise `ClientError` (a `ValueError`) naming the field.

    `stop` may be given as one string; `logprobs` and `prompt_logprobs` of k report the k most likely tokens besides the
    chosen one, -1 the whole vocabulary. `seed=None` draws a seed when the request arrives, so that every request's random
    numbers depend on (seed, position) alone.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as fit
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # keep the last k prompt tokens; -1: as many as the context holds
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None  # tokens of reasoning before its end is forced; -1: no limit
    reasoning: ReasoningSection | None = None  # filled in by the server when it knows the model's format
    shown_special_token_ids: list[int] | None = None  # text although `skip_special_tokens`: marks that the server reads
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None  # filled by the input processor from `bad_words`
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self._check_counts()
        self._check_floats()
        self._check_lists()
        if self.temperature < GREEDY_TEMPERATURE:
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        if self.top_k == -1:
            self.top_k = 0

    def _check_counts(self) -> None:
        for name, low, high in (
            ("n", 1, MAX_N),
            ("top_k", -1, INT32_MAX),
            ("min_tokens", 0, INT32_MAX),
            ("max_tokens", 0, INT32_MAX),
            ("logprobs", -1, INT32_MAX),
            ("prompt_logprobs", -1, INT32_MAX),
            ("truncate_prompt_tokens", -1, INT32_MAX),
            ("stream_interval", 1, INT32_MAX),
            ("thinking_token_budget", -1, INT32_MAX),
            ("seed", INT64_MIN, INT64_MAX),
        ):
            value = getattr(self, name)
            if value is None and name not in ("n", "top_k", "min_tokens"):
                continue
            if not _is_int(value) or not low <= value <= high:
                raise _bad(name, value, f"an integer from {low} to {high}")
        if self.truncate_prompt_tokens == 0:
            raise _bad("truncate_prompt_tokens", 0, "-1 or at least 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ClientError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower the one or raise the other.",
                param="min_tokens",
            )

    def _check_floats(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 2.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.0, 100.0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise _bad(name, value, f"a finite number from {low} to {high}")
            if not low <= value <= high or (value == 0 and name in ("top_p", "repetition_penalty")):
                bracket = "(" if name in ("top_p", "repetition_penalty") else "["
                raise _bad(name, value, f"in {bracket}{low}, {high}]")
            setattr(self, name, float(value))

    def _check_lists(self) -> None:
        if self.stop:
            if len(self.stop) > MAX_STOP_STRINGS:
                raise _bad("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
            if not all(isinstance(s, str) and 1 <= len(s) <= MAX_CHARACTERS for s in self.stop):
                raise _bad("stop", self.stop, f"strings of 1 to {MAX_CHARACTERS} characters")
            if not self.detokenize:
                raise ClientError("stop strings need detokenize=True; use stop_token_ids instead.", param="stop")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids is not None and not all(_is_int(i) and i >= 0 for i in ids):
                raise _bad(name, ids, "a list of token ids (integers of at least 0)")
        if self.stop_token_ids is not None and len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _bad("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _bad("allowed_token_ids", [], "a non-empty list; leave it out to allow every token")
        if self.bad_words is not None:
            if len(self.bad_words) > MAX_BAD_WORDS:
                raise _bad("bad_words", f"{len(self.bad_words)} words", f"at most {MAX_BAD_WORDS} words")
            if not all(isinstance(w, str) and 1 <= len(w) <= MAX_CHARACTERS for w in self.bad_words):
                raise _bad("bad_words", self.bad_words, f"strings of 1 to {MAX_CHARACTERS} characters")
        if self.logit_bias is not None:
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise _bad("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS} entries")
            for token_id, bias in self.logit_bias.items():
                if not _is_int(token_id) or token_id < 0:
                    raise _bad("logit_bias", token_id, "keyed by token ids")
                if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                    raise _bad("logit_bias", {token_id: bias}, "between -100 and 100")

    def check_vocab(self, vocab_size: int, max_logprobs: int) -> None:
        """Check every token id against the vocabulary and the logprob counts against the operator's cap.

        Raises ClientError naming the id and the legal range. `max_logprobs=-1` lifts the cap.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise ClientError(
                        f"{name} has token id {token_id}, but the vocabulary holds 0 to {vocab_size - 1}.", param=name
                    )
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) > vocab_size:
            raise _bad("allowed_token_ids", f"{len(self.allowed_token_ids)} ids", f"at most {vocab_size} ids")
        if max_logprobs < 0:
            return
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(self, name)
            if k is not None and (k > max_logprobs or k == -1):
                raise ClientError(
                    f"{name}={k} is more than max_logprobs={max_logprobs}; ask for at most {max_logprobs}, or start the "
                    "engine with a larger --max-logprobs.",
                    param=name,
                )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """Like the constructor; None means the default."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    def clone(self) -> "SamplingParams":
        """A copy that may be changed without touching this one (its lists are shared)."""
        return msgspec.structs.replace(self)

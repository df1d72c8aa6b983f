"""Token ids in, token ids out: the bodies of /inference/v1/generate and of the routes that render for it."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, convert, to_builtins
from msgspec import ValidationError as MsgspecValidationError

from octavo.errors import ClientError
from octavo.server.openai.protocol import REQUEST_ID, StreamOptions
from octavo.server.openai.responses import ChatLogprobs, PromptLogprobs, Usage
from octavo.types.sampling_params import RequestOutputKind, SamplingParams

# Fields of SamplingParams that the server itself fills in; nobody sends them.
INTERNAL = frozenset(
    {
        "output_kind",
        "detokenize",
        "reasoning",
        "shown_special_token_ids",
        "bad_words_token_ids",
        "thinking_token_budget",
    }
)
_PUBLIC = frozenset(SamplingParams.__struct_fields__) - INTERNAL


class GenerateRequest(Struct, kw_only=True):
    """POST /inference/v1/generate. null means "not sent" for every field that has a default."""

    token_ids: list[int]
    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text"] | None = None
    cache_salt: str | None = None
    priority: int | None = None

    def check(self) -> None:
        """Refuse contradictions between fields."""
        if not self.token_ids:
            raise ClientError("token_ids is empty; it must hold at least one token.", param="token_ids")
        if self.stream_options is not None and not self.stream:
            raise ClientError("stream_options needs stream: true.", param="stream_options")
        if self.request_id is not None and not REQUEST_ID.fullmatch(self.request_id):
            raise ClientError("request_id must be 1 to 128 letters, digits or -_.:@/+=.", param="request_id")

    @property
    def wants_text(self) -> bool:
        return self.output_mode == "text"

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        """The engine's parameters: what was sent, else the model's `defaults`, else the built-in ones."""
        sent = {name: value for name, value in (self.sampling_params or {}).items() if value is not None}
        for name in sent:
            if name not in _PUBLIC:
                raise ClientError(f"sampling_params has no field {name!r}.", param=f"sampling_params.{name}")
        values = {**defaults, "max_tokens": None, **sent}
        values["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        values["detokenize"] = self.wants_text or bool(values.get("stop"))
        try:
            # JSON has keys of text only, which is what token ids in logit_bias are.
            params = convert(values, SamplingParams, str_keys=True)
        except MsgspecValidationError as error:
            if isinstance(error.__cause__, ClientError):
                raise error.__cause__ from None
            raise ClientError(f"sampling_params: {error}.", param="sampling_params") from None
        if params.prompt_logprobs is not None and self.stream:
            raise ClientError("prompt_logprobs cannot be streamed; send stream: false.", param="sampling_params")
        return params


class RenderedRequest(Struct, omit_defaults=True, kw_only=True):
    """What /inference/v1/generate takes: a prompt that is rendered and parameters with their defaults filled in."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0


def rendered_params(params: SamplingParams) -> dict[str, Any]:
    """Parameters as they are sent: those that differ from their defaults, and max_tokens, which has another one here."""
    if params.thinking_token_budget is not None:
        raise ClientError(
            "thinking_token_budget cannot be rendered: it needs the format that this server reads.",
            param="thinking_token_budget",
        )
    fields = to_builtins(params, str_keys=True)
    return {"max_tokens": params.max_tokens, **{name: value for name, value in fields.items() if name in _PUBLIC}}


class GenerateChoice(Struct):
    """An answer, or what one chunk adds to it."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | UnsetType = UNSET
    text: str | UnsetType = UNSET


class GenerateResponse(Struct):
    """A whole answer, or one chunk of a stream."""

    request_id: str
    model: str
    choices: list[GenerateChoice]
    output_mode: str
    usage: Usage | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET

"""The body of the Responses route, and the response object with its items."""

from typing import Any, Literal

from msgspec import Struct

from octavo.server.openai.responses import TokenLogprob

JsonObject = dict[str, Any]

# Field -> values that ask for nothing.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "image": (),
    "background_options": (),
    "access_programs": ([], {}),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    "stream_options": ({}, {"include_obfuscation": False}),
    "enable_response_messages": (False,),
    "previous_input_messages": ([],),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": ({},),
}

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED = "reasoning.encrypted_content"


class Reasoning(Struct):
    effort: str | None = None
    summary: Literal["auto"] | None = None  # the reasoning itself is told; there is nothing shorter


class TextFormat(Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(Struct, kw_only=True):
    """POST /v1/responses. null means "not sent" for every field."""

    input: str | list[JsonObject]
    model: str | None = None
    instructions: str | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
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
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    include_reasoning: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    vllm_xargs: JsonObject | None = None

    def includes(self, what: str) -> bool:
        return what in (self.include or ())


class OutputText(Struct, tag="output_text", tag_field="type"):
    text: str = ""
    annotations: list[JsonObject] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, tag="reasoning_text", tag_field="type"):
    text: str = ""


class OutputMessage(Struct, tag="message", tag_field="type"):
    id: str
    content: list[OutputText] = []
    role: str = "assistant"
    status: str = "in_progress"


class ReasoningItem(Struct, tag="reasoning", tag_field="type"):
    id: str
    content: list[ReasoningText] = []
    summary: list[JsonObject] = []
    encrypted_content: str | None = None
    status: str = "in_progress"


class FunctionCall(Struct, tag="function_call", tag_field="type"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


Item = OutputMessage | ReasoningItem | FunctionCall


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    reason: str


class ResponseError(Struct):
    code: str
    message: str


class Response(Struct, tag="response", tag_field="object", kw_only=True):
    """What was asked and what came of it; it fills while the model answers."""

    id: str
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: Usage | None = None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItems(Struct):
    data: list[JsonObject]
    first_id: str | None
    last_id: str | None
    object: str = "list"
    has_more: bool = False

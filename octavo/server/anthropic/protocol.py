"""The bodies of the Anthropic routes, as they come in, and the events that an answer is made of.

A content block stays a plain object until `conversation.py` reads it by its type, so that an error can name its place.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

MIN_THINKING_BUDGET = 1024  # tokens


# --- requests --------------------------------------------------------------------------------------------------------


class InputMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Tool(Struct):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: str | None = None  # "custom"; every other type is a tool that the provider runs itself


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Struct, kw_only=True):
    """POST /v1/messages/count_tokens: a conversation. null means "not sent" for every field that has a default."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages: a conversation and how to go on with it."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    vllm_xargs: dict[str, Any] | None = None


# --- answers ---------------------------------------------------------------------------------------------------------


class OutputTokensDetails(Struct):
    thinking_tokens: int


class Usage(Struct):
    """`input_tokens` are those that were computed; what the prefix cache held is counted by itself."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET  # where thinking is told apart


class TextBlock(Struct, tag="text", tag_field="type"):
    text: str = ""


class ThinkingBlock(Struct, tag="thinking", tag_field="type"):
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class Message(Struct, tag="message", tag_field="type", kw_only=True):
    id: str
    role: str = "assistant"
    content: list[Block]
    model: str
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: Usage


class TextDelta(Struct, tag="text_delta", tag_field="type"):
    text: str


class ThinkingDelta(Struct, tag="thinking_delta", tag_field="type"):
    thinking: str


class SignatureDelta(Struct, tag="signature_delta", tag_field="type"):
    signature: str


class InputJsonDelta(Struct, tag="input_json_delta", tag_field="type"):
    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(Struct, tag="message_start", tag_field="type"):
    message: Message


class ContentBlockStart(Struct, tag="content_block_start", tag_field="type"):
    index: int
    content_block: Block


class Ping(Struct, tag="ping", tag_field="type"):
    pass


class ContentBlockDelta(Struct, tag="content_block_delta", tag_field="type"):
    index: int
    delta: Delta


class ContentBlockStop(Struct, tag="content_block_stop", tag_field="type"):
    index: int


class StopDelta(Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta", tag_field="type"):
    delta: StopDelta
    usage: Usage


class MessageStop(Struct, tag="message_stop", tag_field="type"):
    pass


StreamEvent = MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop


class TokenCount(Struct):
    input_tokens: int

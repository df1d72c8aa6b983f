"""Items of the Responses API in the form of chat messages.

What the model said in one go (reasoning, message, function calls) is one assistant message to a chat template, however
many items it is here. An item or part of another type is refused by name: nothing a client sent is left out.
"""

import base64
from collections.abc import Sequence
from typing import Any

from octavo.errors import ClientError
from octavo.server.responses.protocol import INCLUDE_LOGPROBS, JsonObject, ResponsesRequest, TextFormat

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal", "text": "text"}
# Marks reasoning that was packed here. It is encoded, not encrypted: the item's content tells the same.
_PACKED = "octavo"

# Fields that a chat completion calls the same.
_SAME = (
    *(
        "model",
        "tool_choice",
        "parallel_tool_calls",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
    ),
    *("frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias"),
    *("structured_outputs", "chat_template_kwargs", "include_reasoning", "priority", "cache_salt", "vllm_xargs"),
)


def chat_fields(body: ResponsesRequest, messages: Sequence[JsonObject]) -> JsonObject:
    """The body of the same chat completion; `messages` are the conversation without its instructions."""
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    fields: JsonObject = {name: getattr(body, name) for name in _SAME}
    fields |= {"messages": [*instructions, *messages], "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    if body.top_logprobs is not None and not body.includes(INCLUDE_LOGPROBS):
        raise ClientError(f'top_logprobs needs include: ["{INCLUDE_LOGPROBS}"].', param="top_logprobs")
    if body.includes(INCLUDE_LOGPROBS):
        # Token by token also for a whole answer, so that each has its place.
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs, "stream": True}
    return fields


def input_items(body: ResponsesRequest) -> list[JsonObject]:
    """The input as items; a string is a message of the user."""
    if isinstance(body.input, list):
        return body.input
    return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]


def listed_item(item: JsonObject, number: int) -> JsonObject:
    """An input item as it is listed: with an id and a status, a message's text as a part."""
    listed = {"type": "message", "status": "completed", **item, "id": f"item_{number}"}
    if listed["type"] == "message" and isinstance(listed["content"], str):
        part: JsonObject = {"type": "input_text", "text": listed["content"]}
        if listed["role"] == "assistant":
            part |= {"type": "output_text", "annotations": []}
        listed["content"] = [part]
    return listed


def _tool(tool: JsonObject, place: str) -> JsonObject:
    if tool.get("type") != "function":
        raise ClientError(
            f"{place} has type {tool.get('type')!r}, a tool that this server does not run; send functions.",
            param=f"{place}.type",
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _response_format(wanted: TextFormat) -> JsonObject:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    names = ("name", "schema", "strict", "description")
    schema = {name: value for name in names if (value := getattr(wanted, name)) is not None}
    return {"type": "json_schema", "json_schema": schema}


# --- items to messages -----------------------------------------------------------------------------------------------


def to_messages(items: Sequence[Any]) -> list[JsonObject]:
    """Chat messages of input items. ClientError names the item that is wrong."""
    conversation = _Conversation()
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if not isinstance(item, dict):
            raise ClientError(f"{place} must be an object.", param=place)
        conversation.add(item, place)
    return conversation.messages


class _Conversation:
    """Messages so far. The last one is open while items of the same assistant's turn may still join it."""

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self._open: JsonObject | None = None

    def add(self, item: JsonObject, place: str) -> None:
        match item.get("type", "message"):
            case "message":
                self._add_message(item, place)
            case "reasoning":
                self._assistant(["content", "tool_calls"])["reasoning_content"] = _reasoning(item, place)
            case "function_call":
                function = {name: _string(item, name, place) for name in ("name", "arguments")}
                call = {"id": _string(item, "call_id", place), "type": "function", "function": function}
                self._assistant([]).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                self._open = None
                call_id, output = _string(item, "call_id", place), _text(item.get("output"), f"{place}.output")
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case other:
                raise ClientError(
                    f"{place} has type {other!r}, which is not supported here; send message, reasoning, "
                    "function_call or function_call_output.",
                    param=place,
                )

    def _add_message(self, item: JsonObject, place: str) -> None:
        role = _string(item, "role", place)
        if role not in ("user", "assistant", "system", "developer"):
            raise ClientError(f"{place}.role={role!r} must be user, assistant, system or developer.", param=place)
        content = _text(item.get("content"), f"{place}.content")
        if role == "assistant":
            self._assistant(["content", "tool_calls"])["content"] = content
        else:
            self._open = None
            self.messages.append({"role": role, "content": content})

    def _assistant(self, taken: list[str]) -> JsonObject:
        """The open message of the assistant, or a new one when the open one has one of the fields `taken`."""
        if self._open is None or any(self._open.get(name) is not None for name in taken):
            self._open = {"role": "assistant", "content": None}
            self.messages.append(self._open)
        return self._open


def _string(item: JsonObject, name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ClientError(f"{place}.{name} must be a string.", param=f"{place}.{name}")
    return value


def _text(content: Any, place: str) -> str:
    """The text of a content, its parts joined by newlines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ClientError(f"{place} must be a string or a list of parts.", param=place)
    return "\n".join(_text_of_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _text_of_part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise ClientError(f"{place} has type {kind!r}, which is not supported here; send text.", param=place)
    return _string(part, _TEXT_PARTS[kind], place)


def _reasoning(item: JsonObject, place: str) -> str:
    """The reasoning of an item: its content, or what `pack_reasoning` made of it."""
    parts = item.get("content")
    if isinstance(parts, list) and parts:
        return "\n".join(_string(part, "text", f"{place}.content") for part in parts if isinstance(part, dict))
    packed = item.get("encrypted_content")
    if packed is None:
        return ""
    try:
        mark, _, text = _string(item, "encrypted_content", place).partition(":")
        if mark == _PACKED:
            return base64.b64decode(text, validate=True).decode()
    except ValueError:
        pass
    raise ClientError(
        f"{place}.encrypted_content was not made by this server; leave the item out.",
        param=f"{place}.encrypted_content",
    )


def pack_reasoning(text: str) -> str:
    """Reasoning as the opaque text that clients send back with the next call."""
    return f"{_PACKED}:" + base64.b64encode(text.encode("utf-8", "replace")).decode()

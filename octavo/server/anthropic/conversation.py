"""An Anthropic conversation in the form of a chat completion's body, for the way that all conversations go.

What each part becomes:

    system, and messages of role system   one system message in front, joined by newlines
    text                                  content; neighbours of one role are one message, as the API says
    thinking                              `reasoning_content` of its message
    tool_use                              a tool call of its message
    tool_result                           a message of role tool; "Error: " stands before the text of a failed call
    a last message of the assistant       the beginning of the answer, which the model continues

A block of another type is refused by name: nothing a client sent is left out of the prompt.
"""

import json
from typing import Any

from octavo.errors import ClientError
from octavo.server.anthropic.protocol import (
    MIN_THINKING_BUDGET,
    CountTokensRequest,
    MessagesRequest,
    Thinking,
    Tool,
    ToolChoice,
)

# Field -> values that ask for nothing.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "service_tier": ("auto", "standard_only"),
    "inference_geo": (),
    "speed": ("standard",),
}

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

JsonObject = dict[str, Any]


def chat_fields(body: CountTokensRequest) -> JsonObject:
    """The body of the same chat completion. ClientError names the block that is wrong."""
    turns, system = _turns(body)
    messages = [{"role": "system", "content": system}] if system else []
    for role, blocks in turns:
        messages += [_assistant_message(blocks)] if role == "assistant" else _user_messages(blocks)
    fields: JsonObject = {"model": body.model, "messages": messages}
    if turns and turns[-1][0] == "assistant":
        if "tool_calls" in messages[-1]:
            raise ClientError(
                "the last message is the assistant's with tool_use; send the tool_result as the user's.",
                param="messages",
            )
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    variables = _thinking_variables(body.thinking) | (body.chat_template_kwargs or {})
    if variables:
        fields["chat_template_kwargs"] = variables
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
        if (wanted := body.output_config.format) is not None:
            schema = {"name": "output", "schema": wanted.schema, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        fields |= _sampling_fields(body)
    return fields


def _sampling_fields(body: MessagesRequest) -> JsonObject:
    fields: JsonObject = {"stop": body.stop_sequences}
    for name in ("max_tokens", "stream", "temperature", "top_p", "top_k", "priority", "cache_salt", "vllm_xargs"):
        fields[name] = getattr(body, name)
    thinking = body.thinking
    if thinking is not None and thinking.type == "enabled":
        budget = thinking.budget_tokens
        if budget is None or not MIN_THINKING_BUDGET <= budget < body.max_tokens:
            raise ClientError(
                f"thinking.budget_tokens={budget} must be at least {MIN_THINKING_BUDGET} and less than "
                f"max_tokens={body.max_tokens}.",
                param="thinking.budget_tokens",
            )
        fields["thinking_token_budget"] = budget
    return fields


def _thinking_variables(thinking: Thinking | None) -> JsonObject:
    """What templates read to open or close the thinking section; without `thinking` they decide themselves."""
    if thinking is None:
        return {}
    wanted = thinking.type != "disabled"
    return {"enable_thinking": wanted, "thinking": wanted}


# --- tools -----------------------------------------------------------------------------------------------------------


def _tool(tool: Tool, place: str) -> JsonObject:
    if tool.type not in (None, "custom"):
        raise ClientError(
            f"{place} has type {tool.type!r}, a tool that this server does not run; define it with an input_schema.",
            param=f"{place}.type",
        )
    if tool.input_schema is None:
        raise ClientError(f"{place}.input_schema is required.", param=f"{place}.input_schema")
    function = {"name": tool.name, "parameters": tool.input_schema}
    function |= {name: value for name in ("description", "strict") if (value := getattr(tool, name)) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> JsonObject:
    fields: JsonObject = {}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type == "tool":
        if choice.name is None:
            raise ClientError("tool_choice.name is required with type 'tool'.", param="tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = _TOOL_CHOICES[choice.type]
    return fields


# --- messages --------------------------------------------------------------------------------------------------------


class _Block:
    """A content block and where it stands, to read fields of it with errors that say so."""

    def __init__(self, value: Any, place: str):
        self.value, self.place = value, place
        self.type = value.get("type") if isinstance(value, dict) else None
        if not isinstance(self.type, str):
            raise ClientError(f"{place} must be an object with a type.", param=place)

    def text(self, name: str) -> str:
        value = self.value.get(name)
        if not isinstance(value, str):
            raise ClientError(f"{self.place}.{name} must be a string.", param=f"{self.place}.{name}")
        return value

    def refuse(self, allowed: str) -> ClientError:
        return ClientError(
            f"{self.place} has type {self.type!r}, which is not supported here; send {allowed}.", param=self.place
        )


def _blocks(content: Any, place: str) -> list[_Block]:
    """The blocks of a content; a string is one block of text."""
    if isinstance(content, str):
        return [_Block({"type": "text", "text": content}, place)]
    if not isinstance(content, list):
        raise ClientError(f"{place} must be a string or a list of blocks.", param=place)
    return [_Block(value, f"{place}[{index}]") for index, value in enumerate(content)]


def _turns(body: CountTokensRequest) -> tuple[list[tuple[str, list[_Block]]], str]:
    """The blocks of each turn, neighbours of one role joined, and the system text from wherever it stands."""
    system = [] if body.system is None else [_only_text(_blocks(body.system, "system"))]
    turns: list[tuple[str, list[_Block]]] = []
    for index, message in enumerate(body.messages):
        blocks = _blocks(message.content, f"messages[{index}].content")
        if message.role == "system":
            system.append(_only_text(blocks))
        elif turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    return turns, "\n".join(text for text in system if text)


def _only_text(blocks: list[_Block]) -> str:
    for block in blocks:
        if block.type != "text":
            raise block.refuse("text")
    return "\n".join(block.text("text") for block in blocks)


def _assistant_message(blocks: list[_Block]) -> JsonObject:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        if block.type == "text":
            texts.append(block.text("text"))
        elif block.type == "thinking":
            thoughts.append(block.text("thinking"))
        elif block.type == "tool_use":
            arguments = json.dumps(_input(block), ensure_ascii=False)
            function = {"name": block.text("name"), "arguments": arguments}
            calls.append({"id": block.text("id"), "type": "function", "function": function})
        else:
            raise block.refuse("text, thinking or tool_use")
    message: JsonObject = {"role": "assistant", "content": _content(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _input(block: _Block) -> JsonObject:
    value = block.value.get("input")
    if not isinstance(value, dict):
        raise ClientError(f"{block.place}.input must be an object.", param=f"{block.place}.input")
    return value


def _user_messages(blocks: list[_Block]) -> list[JsonObject]:
    """Results and texts in the order in which they stand; texts next to each other are one message."""
    messages: list[JsonObject] = []
    texts: list[str] = []

    def close_text() -> None:
        if texts:
            messages.append({"role": "user", "content": _content(texts)})
            texts.clear()

    for block in blocks:
        if block.type == "text":
            texts.append(block.text("text"))
        elif block.type == "tool_result":
            close_text()
            messages.append(_tool_message(block))
        else:
            raise block.refuse("text or tool_result")
    close_text()
    return messages


def _tool_message(block: _Block) -> JsonObject:
    content = block.value.get("content")
    text = "" if content is None else _only_text(_blocks(content, f"{block.place}.content"))
    if block.value.get("is_error"):
        text = f"Error: {text}" if text else "Error"
    return {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": text}


def _content(texts: list[str]) -> str | list[JsonObject] | None:
    """One text as it is, so that the prompt is the one of a plain string; several as parts."""
    if len(texts) <= 1:
        return texts[0] if texts else None
    return [{"type": "text", "text": text} for text in texts]

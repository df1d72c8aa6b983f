"""Messages as clients send them, made into what a chat template can take."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from octavo.errors import ClientError
from octavo.tokenizer.template_traits import TemplateTraits

ContentFormat = Literal["auto", "string", "openai"]

# Part type -> the key of its text. Responses and Anthropic style names are taken as text too.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MAX_DEPTH = 64


def to_plain(value: Any, depth: int = 0) -> Any:
    """A copy made of JSON types only: templates must not get hold of objects with methods of their own."""
    if depth > _MAX_DEPTH:
        raise ClientError(f"the request is nested more than {_MAX_DEPTH} levels deep.", param="messages")
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value) if type(value) is not kind else value
    if hasattr(value, "model_dump"):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple) or (hasattr(value, "__iter__") and not isinstance(value, bytes)):
        return [to_plain(item, depth + 1) for item in value]
    raise ClientError(f"a {type(value).__name__} cannot be part of a message.", param="messages")


def prepare_messages(messages: Any, traits: TemplateTraits, content_format: ContentFormat) -> list[dict[str, Any]]:
    """Check the shape of messages and bring each into the form the template expects.

    Roles and their order are left to the template. ClientError names the message that is wrong.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ClientError("messages must be a non-empty list.", param="messages")
    as_parts = traits.loops_over_content if content_format == "auto" else content_format == "openai"
    return [_prepare(message, f"messages[{i}]", traits, as_parts) for i, message in enumerate(to_plain(messages))]


def _prepare(message: Any, where: str, traits: TemplateTraits, as_parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ClientError(f"{where} is a {type(message).__name__}, not an object.", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ClientError(f"{where} has role={role!r}; it must be a non-empty string.", param=f"{where}.role")
    # A null key is an absent one: many templates ask for the key alone. The same goes for an empty list of calls.
    result = {key: value for key, value in message.items() if value is not None and (key, value) != ("tool_calls", [])}
    if role == "developer" and not traits.knows_developer:
        result["role"] = "system"
    result["content"] = _content(message.get("content"), f"{where}.content", traits, as_parts)
    reasoning = next((result[key] for key in _REASONING_KEYS if isinstance(result.get(key), str)), None)
    if reasoning is not None:
        for key in _REASONING_KEYS:
            result.setdefault(key, reasoning)
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"{where}.tool_calls", traits)
    return result


def _content(content: Any, where: str, traits: TemplateTraits, as_parts: bool) -> Any:
    if content is None:
        return None if traits.tests_null_content else ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if as_parts and not traits.tests_string_content else content
    if not isinstance(content, list):
        raise ClientError(f"{where} must be a string, null or a list of parts.", param=where)
    texts = [_text_of_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    # Templates that know strings only get the parts as lines.
    return [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise ClientError(
            f"{where} has type {kind!r}, which this model cannot take; use parts of type 'text'.", param=where
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ClientError(f"{where} needs a string under {_TEXT_PARTS[kind]!r}.", param=where)
    return text


def _tool_calls(calls: Any, where: str, traits: TemplateTraits) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ClientError(f"{where} must be a list of objects.", param=where)
    result = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict):
            arguments = _arguments(function.get("arguments"), traits.arguments_as_text)
            call = {**call, "function": {**function, "arguments": arguments}}
        result.append(call)
    return result


def _arguments(arguments: Any, as_text: bool) -> Any:
    """Tool-call arguments in the template's form.

    Clients send JSON text, templates mostly want the mapping in it. Text that holds no mapping (a model may have
    written anything) goes through as it is.
    """
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            mapping = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        if not isinstance(mapping, dict):
            return arguments
        return arguments if as_text else mapping
    return json.dumps(arguments, ensure_ascii=False) if as_text else arguments

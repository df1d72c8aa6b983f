"""Tools for chat templates that say nothing of them: explained in the system message, in the format that the model writes.

Where such a template would leave them out, calls of earlier turns become the text that the model wrote, and results
become turns of the user.
"""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from octavo.errors import ClientError
from octavo.server.tool_formats import ToolFormat, find_tool_format
from octavo.tokenizer.template_traits import TemplateTraits

_EXPLANATION = """You can call tools. They are, as JSON, each with its name, its purpose and the schema of its arguments:

{tools}

To call one, write this, with its name for NAME and {arguments}:

{call}

Call a tool when it helps to answer; its result comes with the next message. Else answer in words."""
_ARGUMENTS = {
    "ARGUMENTS": "a JSON object of its arguments for ARGUMENTS",
    "KEYWORDS": "its arguments for KEYWORDS, as in Python (key='text', other=1)",
}


def explain_tools(
    messages: Sequence[Any], tools: Sequence[Any] | None, row: ToolFormat | None, traits: TemplateTraits
) -> list[Any]:
    """The conversation as a template with these traits can write it; `tools` are what the model is told of."""
    row = row or find_tool_format("hermes")
    names = _call_names(messages)
    told = list(messages)
    if not traits.shows_calls:
        told = [_with_calls_as_text(message, row) for message in told]
    if not traits.shows_any_role:
        told = [_with_result_of_user(message, names) for message in told]
    if not tools:
        return told
    if not row.can_be_written:
        raise ClientError(
            f"the model's chat template says nothing about tools, and the format {row.names[0]} is known to templates "
            "only; start the server with a --chat-template that does.",
            param="tools",
        )
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    (arguments,) = (words for placeholder, words in _ARGUMENTS.items() if placeholder in row.written)
    explanation = _EXPLANATION.format(tools=functions, arguments=arguments, call=row.written)
    first = told[0] if told else None
    if (
        isinstance(first, dict)
        and first.get("role") in ("system", "developer")
        and isinstance(first.get("content"), str)
    ):
        return [{**first, "content": f"{first['content']}\n\n{explanation}"}, *told[1:]]
    return [{"role": "system", "content": explanation}, *told]


def _call_names(messages: Sequence[Any]) -> dict[str, str]:
    """The names of the conversation's calls by their ids."""
    calls = [call for message in messages for call in _calls_of(message)]
    return {call["id"]: str(call["function"].get("name")) for call in calls if isinstance(call.get("id"), str)}


def _calls_of(message: Any) -> list[dict[str, Any]]:
    """The calls of a message; none when they are not what calls should be, which is refused where messages are read."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list):
        return []
    are_calls = all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls)
    return calls if are_calls else []


def _with_calls_as_text(message: Any, row: ToolFormat) -> Any:
    calls = _calls_of(message)
    if not calls:
        return message
    texts = [_write(row, call["function"]) for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    content = message.get("content")
    return {**rest, "content": "\n".join([content, *texts] if isinstance(content, str) and content else texts)}


def _with_result_of_user(message: Any, names: dict[str, str]) -> Any:
    if not isinstance(message, dict) or message.get("role") != "tool":
        return message
    call_id = message.get("tool_call_id")
    name = names.get(call_id) if isinstance(call_id, str) else None
    name = name or message.get("name") or "the tool"
    return {"role": "user", "content": _before(f"Result of {name}:", message.get("content"))}


def _write(row: ToolFormat, function: dict[str, Any]) -> str:
    name, arguments = str(function.get("name")), function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # what a model wrote need not be JSON
            arguments = json.loads(arguments)
    written = row.write(name, arguments) if isinstance(arguments, dict) else None
    return written or json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _before(line: str, content: Any) -> Any:
    """Content, whatever its form, behind a line."""
    if isinstance(content, list):
        return [{"type": "text", "text": line}, *content]
    return f"{line}\n{content or ''}"

"""The tools of a request, and which of them its answer may or must call: checked before anything is rendered.

What a request demands of its answer (`tool_choice` required or one tool) is a JSON schema for all of it; what it demands
of calls that are free to be made (`strict`), a structural tag.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ClientError
from octavo.server.parsers.calls import Tool

MAX_TOOLS = 512
TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer may do with tools."""

    tools: Mapping[str, Tool] = field(default_factory=dict)  # those that it may call
    mode: str = "none"  # none, auto, required, named

    @property
    def is_strict(self) -> bool:
        """Whether calls that are free to be made must follow their schemas."""
        return self.mode == "auto" and any(tool.strict for tool in self.tools.values())

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.mode in ("required", "named")


def read_tool_use(tools: Any, choice: Any) -> ToolUse:
    """The fields `tools` and `tool_choice` of a request; ClientError says what is wrong with them."""
    offered = read_tools(tools)
    if choice is None:
        choice = "auto" if offered else "none"
    if choice == "none" or (choice == "auto" and not offered):
        return ToolUse()
    if choice in ("auto", "required"):
        mode = choice
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)  # Responses has its fields one level up
        mode, listed = (
            (allowed.get("mode", "auto"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
        )
        names = [_name_of(tool) for tool in listed] if isinstance(listed, list) else []
        if mode not in ("auto", "required") or not names:
            raise ClientError(
                'tool_choice allowed_tools needs mode "auto" or "required" and at least one tool.', param="tool_choice"
            )
        offered = {name: _find(offered, name) for name in names}
    elif isinstance(choice, dict) and choice.get("type") == "function":
        name = _name_of(choice)
        mode, offered = "named", {name: _find(offered, name)}
    else:
        raise ClientError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}.',
            param="tool_choice",
        )
    if not offered:
        raise ClientError(f"tool_choice={mode!r} needs tools; the request has none.", param="tool_choice")
    return ToolUse(offered, mode)


def read_tools(tools: Any) -> dict[str, Tool]:
    """The field `tools`, by name; ClientError says what is wrong with it."""
    if tools is None:
        return {}
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise ClientError(f"tools must be a list of at most {MAX_TOOLS} tools.", param="tools")
    found: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        read = _read_tool(tool, f"tools[{index}]")
        if read.name in found:
            raise ClientError(f"tools has two tools named {read.name!r}.", param=f"tools[{index}].function.name")
        found[read.name] = read
    return found


def _read_tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        kind = repr(tool.get("type")) if isinstance(tool, dict) else type(tool).__name__
        raise ClientError(
            f'{where} is {kind}; a tool is {{"type": "function", "function": {{"name": …}}}}.', param=where
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ClientError(f"{where} needs an object under 'function'.", param=f"{where}.function")
    name, where = function.get("name"), f"{where}.function"
    if not isinstance(name, str) or TOOL_NAME.fullmatch(name) is None:
        raise ClientError(
            f"{where}.name must be 1 to 128 letters, digits or _ - . : /, not {name!r:.140}.", param=f"{where}.name"
        )
    for key, expected, says in (
        ("description", str, "a string"),
        ("parameters", dict, "a JSON schema (an object)"),
        ("strict", bool, "true or false"),
    ):
        if function.get(key) is not None and not isinstance(function[key], expected):
            raise ClientError(f"{where}.{key} must be {says}.", param=f"{where}.{key}")
    return Tool(name, function.get("parameters") or {}, bool(function.get("strict")))


def _name_of(choice: Any) -> Any:
    """The name in `{"type": "function", "function": {"name": …}}`, or in Responses' flat form of it."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _find(offered: Mapping[str, Tool], name: Any) -> Tool:
    tool = offered.get(name) if isinstance(name, str) else None
    if tool is None:
        known = ", ".join(offered) or "none"
        raise ClientError(f"tool_choice names {name!r:.140}; the request's tools are: {known}.", param="tool_choice")
    return tool


def answer_schema(use: ToolUse, max_calls: int | None) -> dict[str, Any]:
    """The JSON schema of an answer that must be a call: one tool's arguments, or an array of names and arguments."""
    tools = list(use.tools.values())
    if use.mode == "named":
        return _arguments_schema(tools[0], "#")
    at = "#/items" if len(tools) == 1 else "#/items/anyOf/{}"
    items = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": _arguments_schema(tool, at.format(index) + "/properties/parameters"),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    schema = {"type": "array", "minItems": 1, "items": items[0] if len(items) == 1 else {"anyOf": items}}
    return schema if max_calls is None else {**schema, "maxItems": max_calls}


def strict_tag(use: ToolUse, written: str, trigger: str) -> dict[str, Any]:
    """A structural tag under which calls, free in number, follow the schemas of those tools that are strict.

    `written` is a call with NAME and ARGUMENTS in their places, and begins with the mark `trigger`.
    """
    tags = []
    for tool in use.tools.values():
        begin, _, end = written.replace("NAME", tool.name, 1).partition("ARGUMENTS")
        schema = _arguments_schema(tool, "#") if tool.strict else {"type": "object"}
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": [trigger], "tags": tags},
    }


def _arguments_schema(tool: Tool, where: str) -> dict[str, Any]:
    """The schema of a tool's arguments as part of a larger one, at the JSON pointer `where`."""
    if not tool.parameters:
        return _NO_PARAMETERS
    schema = {"type": "object", **tool.parameters}
    return schema if where == "#" else _move_references(schema, where)


def _move_references(schema: Any, where: str) -> Any:
    """References to the schema's own root, made to point to where that root is now."""
    if isinstance(schema, list):
        return [_move_references(item, where) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _move_references(value, where) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = where + target[1:]
    return moved

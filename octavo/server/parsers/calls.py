"""Tool calls while they are read: what a parser of call bodies writes to."""

import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.server.parsers.reader import MalformedError, Reader
from octavo.server.text_machine import Event, ToolCallArguments, ToolCallEnd, ToolCallStart

MAX_NAME = 256  # characters; nothing longer is taken for a name


def random_call_id(name: str, index: int) -> str:
    """An id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


def short_call_id(name: str, index: int) -> str:
    """Nine letters and digits: the only ids that Mistral's templates take."""
    return uuid.uuid4().hex[:9]


def whole_characters(text: str) -> str:
    """The text with halves of surrogate pairs, which JSON can spell and no encoding can carry, as U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


MakeId = Callable[[str, int], str]


class EnoughCalls(Exception):
    """As many calls as the request allows are complete."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a request offers."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema
    strict: bool = False

    def schema_of(self, parameter: str) -> Any:
        """The JSON schema of one parameter; {} when nothing is said about it."""
        properties = self.parameters.get("properties")
        return properties.get(parameter, {}) if isinstance(properties, Mapping) else {}


@dataclass
class Calls:
    """All calls of one answer, in order."""

    tools: Mapping[str, Tool]
    emit: Callable[[Event], None]
    reader: Reader
    make_id: MakeId = random_call_id
    used_ids: set[str] = field(default_factory=set)  # ids of the conversation so far
    max_calls: int | None = None
    num_started: int = 0
    num_complete: int = 0
    current: "Call | None" = None  # the one being read

    def begin(self) -> "Call":
        self.current = Call(self)
        return self.current

    def take_id(self, name: str, index: int, wanted: str | None) -> str:
        call_id = wanted if wanted and wanted not in self.used_ids else self.make_id(name, index)
        self.used_ids.add(call_id)
        return call_id


class Call:
    """One call. Nothing of it is told until it is committed and its name is known to be a tool's.

    Parsers commit as soon as the arguments look right so far, so that long ones stream; before that, a call that turns
    out to be none leaves no trace.
    """

    def __init__(self, calls: Calls):
        self._calls = calls
        self._pending: list[str] = []  # arguments that wait to be told
        self._is_committed = False
        self._wanted_id: str | None = None
        self._index = -1
        self.tool: Tool | None = None
        self.has_arguments = False  # all of them, though more of the call may come

    @property
    def is_told(self) -> bool:
        """Whether the client knows of the call."""
        return self._index >= 0

    def name(self, name: str) -> Tool:
        """Say which tool is called; an unknown one is an error."""
        tool = self._calls.tools.get(name)
        if tool is None or self.tool is not None:
            raise MalformedError
        self.tool = tool
        self._tell()
        return tool

    def id(self, call_id: str) -> None:
        """The id that the model gave the call."""
        self._wanted_id = call_id

    def arguments(self, text: str) -> None:
        """Add to the arguments, JSON text."""
        self._pending.append(text)
        if self.is_told:
            self._flush()

    def commit(self) -> None:
        """From now on the call stands, whatever follows."""
        if not self._is_committed:
            self._is_committed = True
            self._tell()

    def end(self) -> None:
        """The call is complete; without a tool's name it is none."""
        if self.tool is None:
            raise MalformedError
        self.commit()
        calls = self._calls
        calls.emit(ToolCallEnd(self._index))
        calls.num_complete += 1
        calls.current = None
        if calls.num_complete == calls.max_calls:
            raise EnoughCalls
        calls.reader.keep()  # what was read of it is not needed again

    def _tell(self) -> None:
        if self.tool is None or not self._is_committed or self.is_told:
            return
        calls = self._calls
        self._index = calls.num_started
        calls.num_started += 1
        calls.emit(
            ToolCallStart(self._index, calls.take_id(self.tool.name, self._index, self._wanted_id), self.tool.name)
        )
        self._flush()

    def _flush(self) -> None:
        text = "".join(self._pending)
        self._pending.clear()
        if text:
            self._calls.emit(ToolCallArguments(self._index, text))


Body = Callable[[Reader, Calls], Generator[None, None, None]]
"""Reads what follows an opening mark: one call or a section of them, with its closing mark."""

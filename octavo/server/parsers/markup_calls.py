"""Calls written as markup: a tag that names the tool, a tag for each parameter, and the values as plain text in between.

What a value is depends on the tool's schema: text for a string, else JSON where it reads as such. Strings stream.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.server.parsers.calls import MAX_NAME, Body, Call, Calls, whole_characters
from octavo.server.parsers.literal_calls import python_to_json
from octavo.server.parsers.reader import Emit, EndOfText, MalformedError, Marks, Parse, Reader

_NAME = re.compile(r"""\s*["']?([^"'<>]*[^"'<>\s])""")
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_KINDS: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class Markup:
    """The tags of one format, as fixed strings.

    `call` opens a call and `name_end` ends its name (None: a parameter or `call_end` does); `parameter` and `key_end`
    enclose a key, perhaps with attributes (`string="true"`); `value_end` ends its value, and so do `also_value_ends`
    where models forget the end tag. A value that begins with a newline loses it and one at its end, as layout, unless
    `is_verbatim`.
    """

    def __init__(
        self,
        *,
        call: str,
        name_end: str | None,
        call_end: str,
        parameter: str,
        key_end: str,
        value_end: str,
        also_value_ends: Iterable[str] = (),
        is_verbatim: bool = False,
    ):
        self.call = call
        self.call_end = call_end
        self.parameter = parameter
        self.is_verbatim = is_verbatim
        self._has_name_end = name_end is not None
        self._name_ends = Marks([name_end] if name_end is not None else [parameter, call_end])
        self._key_ends = Marks([key_end])
        self._value_ends = Marks([value_end, *also_value_ends])

    def section(self, end: str, fillers: Iterable[str] = ()) -> Body:
        """Calls up to the mark `end`; `fillers` may stand between them."""
        marks = (self.call, end, *fillers)

        def body(reader: Reader, calls: Calls) -> Parse[None]:
            while True:
                yield from reader.skip_space()
                mark = yield from _any_literal(reader, marks)
                if mark is None:
                    raise MalformedError
                if mark == self.call:
                    yield from self.read_call(reader, calls)
                elif mark == end:
                    return

        return body

    def read_call(self, reader: Reader, calls: Calls) -> Parse[None]:
        """One call, behind its opening tag."""
        call = calls.begin()
        header, mark = yield from reader.until_after(self._name_ends, MAX_NAME)
        tool = call.name(_name_in(header))
        call.arguments("{")
        item = None if self._has_name_end else mark
        separator = ""
        while True:
            if item is None:
                item = yield from self._read_item(reader, call)
            if item != self.parameter:
                break
            header, _ = yield from reader.until_after(self._key_ends, MAX_NAME)
            key = _name_in(header)
            kinds = _kinds(tool.schema_of(key), tool.parameters, set())
            if 'string="true"' in header:
                kinds = {"string"}
            elif 'string="false"' in header:
                kinds -= {"string"}
            start = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
            separator = ", "
            call.commit()
            item = yield from self._read_value(reader, call, start, kinds)
        call.arguments("}")
        call.end()

    def _read_item(self, reader: Reader, call: Call) -> Parse[str | None]:
        """The opening of the next parameter or the end of the call; None when neither follows, which ends it as well."""
        try:
            yield from reader.skip_space()
            item = yield from _any_literal(reader, (self.parameter, self.call_end))
        except EndOfText:
            if call.is_told and not reader.is_cut:
                return None
            raise
        if item is None and not call.is_told:
            raise MalformedError
        return item

    def _read_value(self, reader: Reader, call: Call, start: str, kinds: set[str]) -> Parse[str | None]:
        """Read a value; the item behind it when its end tag was forgotten."""
        text = _Text(self.is_verbatim)
        if kinds == {"string"}:
            call.arguments(start + '"')
            mark = yield from self._until_end(reader, lambda piece: call.arguments(_inside(text.add(piece))))
            call.arguments('"')
        else:
            pieces: list[str] = []
            mark = yield from self._until_end(reader, lambda piece: pieces.append(text.add(piece)))
            call.arguments(start + typed_value("".join(pieces), kinds))
        return mark if mark in (self.parameter, self.call_end) else None

    def _until_end(self, reader: Reader, emit: Emit) -> Parse[str | None]:
        """Read up to the end of a value, which the end of an answer that is not cut is as well."""
        try:
            return (yield from reader.until(self._value_ends, emit))
        except EndOfText:
            if reader.is_cut:
                raise
            emit(reader.rest())
            return None


class _Text:
    """Plain text in pieces, less a pair of newlines around it."""

    def __init__(self, is_verbatim: bool):
        self._at_start = not is_verbatim
        self._has_layout = False
        self._held = ""

    def add(self, piece: str) -> str:
        if self._at_start and piece:
            self._at_start = False
            self._has_layout = piece.startswith("\n")
            piece = piece.removeprefix("\n")
        if not self._has_layout:
            return piece
        piece = self._held + piece
        kept = piece.removesuffix("\n")
        self._held = piece[len(kept) :]
        return kept


def _any_literal(reader: Reader, words: Iterable[str]) -> Parse[str | None]:
    """Read the first of `words` that the text goes on with."""
    for word in words:
        if (yield from reader.literal(word)):
            return word
    return None


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _name_in(header: str) -> str:
    found = _NAME.match(header)
    if found is None:
        raise MalformedError
    return found[1]


def _kinds(schema: Any, root: Any, followed: set[str]) -> set[str]:
    """The JSON types that a schema allows; empty when it does not say.

    References point into `root`, and each is followed once.
    """
    if not isinstance(schema, dict):
        return set()
    kind, reference = schema.get("type"), schema.get("$ref")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(one) for one in kind}
    if isinstance(reference, str) and reference not in followed:
        followed.add(reference)
        return _kinds(_referenced(reference, root), root, followed)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            return set().union(*(_kinds(one, root, followed) for one in schema[name]))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return {"string"} if values and all(isinstance(value, str) for value in values) else set()


def _referenced(reference: str, root: Any) -> Any:
    """What a reference such as `#/$defs/name` points to; None when that is nothing."""
    for name in reference.removeprefix("#/").split("/"):
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def typed_value(text: str, kinds: set[str]) -> str:
    """A value as JSON: of one of the types `kinds` if the text can be read so, else a string."""
    if kinds != {"string"}:
        try:
            value = _parse(text.strip())
            if not kinds or any(_is_kind(value, kind) for kind in kinds):
                return whole_characters(json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (ValueError, RecursionError, MalformedError):
            pass  # it is text after all
    return json.dumps(text, ensure_ascii=False)


def _parse(text: str) -> Any:
    """A value in JSON or, as some models have it, in Python's notation."""
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        return json.loads(text, strict=False)
    except ValueError:
        if text[:1] not in ("[", "{"):
            raise
        return json.loads(python_to_json(text))


def _is_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, float) and value.is_integer():
        return kind in ("integer", "number")
    return isinstance(value, _KINDS.get(kind, ()))

"""Calls written as JSON: `{"name": …, "arguments": {…}}` in the spellings of many models, or a header and an object.

Arguments are copied as the model writes them, while it does. The only change is that control characters inside strings
(a newline, mostly) are escaped, since models write them and JSON forbids them.
"""

import json
import re
from collections.abc import Callable, Mapping
from string import hexdigits

from octavo.server.parsers.calls import MAX_NAME, Body, Call, Calls, whole_characters
from octavo.server.parsers.reader import Emit, EndOfText, MalformedError, Marks, Parse, Reader

MAX_DEPTH = 128
MAX_SCALAR = 512  # characters of a number
MAX_HEADER = 512  # characters between an opening mark and the arguments
NAME_KEYS = frozenset({"name", "tool_name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters", "args"})
OTHER_KEYS = frozenset({"type", "id", "index", "tool_call_id", "call_id"})  # of calls that may lack arguments

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_RUN = re.compile(r"[-+.\w]*", re.ASCII)
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)


def copy_string(reader: Reader, emit: Emit, limit: int | None = None) -> Parse[None]:
    """Copy a JSON string, quotes included. More than `limit` characters, an escape being one, are an error."""
    yield from reader.expect('"')
    emit('"')
    size = 0
    while True:
        run = reader.run(_STRING_RUN, None if limit is None else limit - size)
        size += len(run)
        if run:
            emit(run)
        character = yield from reader.peek()
        if character == '"':
            reader.at += 1
            emit('"')
            return
        if character == "\\":
            yield from _copy_escape(reader, emit)
            size += 1
        elif character < " ":
            reader.at += 1
            emit(json.dumps(character)[1:-1])
            size += 1


def _copy_escape(reader: Reader, emit: Emit) -> Parse[None]:
    reader.at += 1
    emit("\\")
    kind = yield from reader.peek()
    if kind not in '"\\/bfnrtu':
        raise MalformedError
    reader.at += 1
    emit(kind)
    for _ in range(4 if kind == "u" else 0):
        digit = yield from reader.peek()
        if digit not in hexdigits:
            raise MalformedError
        reader.at += 1
        emit(digit)


def _copy_scalar(reader: Reader, emit: Emit) -> Parse[None]:
    text = ""
    while len(text) <= MAX_SCALAR:
        run = reader.run(_SCALAR_RUN)
        emit(run)
        text += run
        if reader.at < len(reader.text):
            break
        yield from reader.more()
    if len(text) > MAX_SCALAR or _SCALAR.fullmatch(text) is None:
        raise MalformedError


def copy_value(reader: Reader, emit: Emit, on_member: Callable[[], None] = lambda: None) -> Parse[None]:
    """Copy one JSON value. `on_member` is called when a value inside it is sure to be one (a string: when it begins)."""
    closers: list[str] = []
    wants_value, is_first = True, True  # else a comma or closer; `is_first`: the container is empty so far
    while True:
        yield from _copy_space(reader, emit)
        character = yield from reader.peek()
        if closers and character == closers[-1] and (is_first or not wants_value):
            reader.at += 1
            emit(closers.pop())
            on_member()
            wants_value = is_first = False
        elif not wants_value:
            yield from _copy_character(reader, emit, ",")
            wants_value = True
        else:
            if closers and closers[-1] == "}":
                yield from copy_string(reader, emit)
                yield from _copy_space(reader, emit)
                yield from _copy_character(reader, emit, ":")
                yield from _copy_space(reader, emit)
                character = yield from reader.peek()
            wants_value = is_first = False
            if character in "{[":
                reader.at += 1
                emit(character)
                closers.append("}" if character == "{" else "]")
                if len(closers) > MAX_DEPTH:
                    raise MalformedError
                wants_value = is_first = True
                if len(closers) > 1:
                    on_member()
            elif character == '"':
                on_member()
                yield from copy_string(reader, emit)
            else:
                yield from _copy_scalar(reader, emit)
                on_member()
        if not closers and not wants_value:
            return


def _copy_space(reader: Reader, emit: Emit) -> Parse[None]:
    while True:
        space = reader.run(_SPACE)
        if space:
            emit(space)
        if reader.at < len(reader.text):
            return
        yield from reader.more()


def _copy_character(reader: Reader, emit: Emit, character: str) -> Parse[None]:
    yield from reader.expect(character)
    emit(character)


def read_string(reader: Reader, limit: int | None = MAX_NAME) -> Parse[str]:
    """The text of a JSON string of at most `limit` characters."""
    pieces: list[str] = []
    yield from copy_string(reader, pieces.append, limit)
    return whole_characters(json.loads("".join(pieces)))


def read_arguments(reader: Reader, call: Call) -> Parse[None]:
    """The arguments: an object, such an object as JSON text in a string, or null for none."""
    character = yield from reader.skip_space()
    if character == "{":
        yield from copy_value(reader, call.arguments, call.commit)
    elif character == '"':
        text = yield from read_string(reader, limit=None)
        try:
            is_object = isinstance(json.loads(text or "{}"), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise MalformedError
        call.arguments(text or "{}")
    elif (yield from reader.literal("null")):
        call.arguments("{}")
    else:
        raise MalformedError
    call.has_arguments = True


def read_call(reader: Reader, call: Call) -> Parse[None]:
    """One object that names a tool and its arguments, in any order.

    Only with arguments may it have members of other meaning: they tell a call from other JSON.
    """
    has_other_members = yield from _read_members(reader, call)
    if not call.has_arguments:
        if has_other_members:
            raise MalformedError
        call.arguments("{}")
    call.end()


def _read_members(reader: Reader, call: Call, is_inner: bool = False) -> Parse[bool]:
    """Read the object, or the one under its key "function"; whether it had members that no call has."""
    yield from reader.expect("{")
    has_other_members = False
    while (yield from reader.skip_space()) != "}":
        key = yield from read_string(reader)
        yield from reader.skip_space()
        yield from reader.expect(":")
        character = yield from reader.skip_space()
        if key in NAME_KEYS or (key == "function" and character == '"'):
            call.name((yield from read_string(reader)))
        elif key in ARGUMENT_KEYS and not call.has_arguments:
            yield from read_arguments(reader, call)
        elif key == "function" and character == "{" and not is_inner:
            has_other_members |= yield from _read_members(reader, call, is_inner=True)
        else:
            has_other_members |= key not in OTHER_KEYS
            yield from copy_value(reader, lambda text: None)
        if (yield from reader.skip_space()) != "}":
            yield from reader.expect(",")
    reader.at += 1
    return has_other_members


def read_keyed_call(reader: Reader, call: Call) -> Parse[None]:
    """`{"tool": {arguments}}`"""
    yield from reader.expect("{")
    yield from reader.skip_space()
    call.name((yield from read_string(reader)))
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from read_arguments(reader, call)
    yield from reader.skip_space()
    yield from reader.expect("}")
    call.end()


def json_calls(end: str | None = None, read: Callable[[Reader, Call], Parse[None]] = read_call) -> Body:
    """Objects in a row or in an array, between whitespace, commas or semicolons, up to the mark `end`.

    Without an end mark they end where the array closes, or where no further object follows. With one, a bracket too many
    behind a call does no harm: models that nest deeply miscount.
    """

    def body(reader: Reader, calls: Calls) -> Parse[None]:
        in_array = False
        num_before = calls.num_complete
        while True:
            character = yield from reader.skip_space()
            if character == "{":
                yield from read(reader, calls.begin())
                if not in_array and end is None and not (yield from _goes_on(reader)):
                    return
            elif character == "[" and not in_array:
                reader.at += 1
                in_array = True
            elif character == "]" and in_array:
                reader.at += 1
                in_array = False
                if end is None:
                    return
            elif character in ",;" or (end is not None and character in "]}" and calls.num_complete > num_before):
                reader.at += 1
            elif end is not None and character == end[0] and (yield from reader.literal(end)):
                return
            else:
                raise MalformedError

    return body


def _goes_on(reader: Reader) -> Parse[bool]:
    """Whether another object follows, behind a separator."""
    return (yield from reader.skip_space()) in ",;{"


def headed_call(header: str, tails: tuple[str, ...] = (), names: str = r"[\w.:/-]+") -> Body:
    """What a regular expression `header` matches up to the arguments' brace, then the arguments.

    `{name}` and `{id}` in `header` stand for groups. Any of `tails` are read behind the arguments, in their order.
    """
    pattern = re.compile(header.replace("{name}", f"(?P<name>{names})").replace("{id}", r"(?P<id>[\w.:-]+)"))
    brace = Marks("{")

    def body(reader: Reader, calls: Calls) -> Parse[None]:
        call = calls.begin()
        text, _ = yield from reader.until_after(brace, MAX_HEADER)
        reader.at -= 1
        found = pattern.fullmatch(text.strip())
        if found is None:
            raise MalformedError
        if found.groupdict().get("id"):
            call.id(found["id"])
        call.name(found["name"])
        yield from copy_value(reader, call.arguments, call.commit)
        call.end()
        for tail in tails:
            yield from reader.skip_space()
            yield from reader.literal(tail)

    return body


def named_call(name: str) -> Body:
    """The arguments of the tool `name`, nothing else; with nothing at all, up to a mark or the end, there are none."""

    def body(reader: Reader, calls: Calls) -> Parse[None]:
        call = calls.begin()
        call.name(name)
        try:
            is_empty = (yield from reader.skip_space()) == "<"
        except EndOfText:
            if reader.is_cut:
                raise
            is_empty = True
        if is_empty:
            call.arguments("{}")
        else:
            yield from copy_value(reader, call.arguments, call.commit)
        call.end()

    return body


def from_mark(mark: str, call: Body) -> Body:
    """A body that begins with its opening mark, which was read."""

    def body(reader: Reader, calls: Calls) -> Parse[None]:
        reader.at -= len(mark)
        yield from call(reader, calls)

    return body


def section(call_mark: str, call: Body, end: str) -> Body:
    """Calls, each behind a mark of its own, up to the mark `end`."""

    def body(reader: Reader, calls: Calls) -> Parse[None]:
        while True:
            yield from reader.skip_space()
            if (yield from reader.literal(call_mark)):
                yield from call(reader, calls)
            elif (yield from reader.literal(end)):
                return
            else:
                raise MalformedError

    return body


def first_of(by_character: Mapping[str, Body], otherwise: Body) -> Body:
    """The body that the next character decides for."""

    def body(reader: Reader, calls: Calls) -> Parse[None]:
        character = yield from reader.skip_space()
        yield from by_character.get(character, otherwise)(reader, calls)

    return body

"""Calls written as literals of a programming language: Python's `f(a=1, b="x")`, or Gemma's `call:f{a:1,b:<escape>x<escape>}`.

Their arguments are turned into JSON. A call is told when it is complete: only then is it sure to be one.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.server.parsers.calls import MAX_NAME, Body, Call, Calls
from octavo.server.parsers.reader import Emit, EndOfText, MalformedError, Parse, Reader

MAX_DEPTH = 32  # a parser of deep literals walks all its frames for each piece of text
MAX_SCALAR = 512

_NAME_RUN = re.compile(r"[\w.:/-]*")
_KEY_RUN = re.compile(r"\w*")
_SCALAR_RUN = re.compile(r"[-+.\w]*", re.ASCII)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Style:
    """How a language writes values."""

    quotes: tuple[str, ...]  # a string stands between two of one kind; longer ones first
    has_escapes: bool  # backslash escapes inside strings
    bare_keys: bool  # {key: value} without quotes around the key
    strings: Mapping[str, re.Pattern[str]]  # first character of a quote -> what certainly does not end or escape


def _style(quotes: tuple[str, ...], has_escapes: bool, bare_keys: bool) -> Style:
    escape = "\\\\" if has_escapes else ""
    runs = {quote[0]: re.compile(f"[^{re.escape(quote[0])}{escape}]*") for quote in quotes}
    return Style(quotes, has_escapes, bare_keys, runs)


PYTHON = _style(('"""', "'''", '"', "'"), has_escapes=True, bare_keys=False)
GEMMA = _style(("<escape>", '<|"|>', '"'), has_escapes=False, bare_keys=True)


def convert_value(reader: Reader, emit: Emit, style: Style, depth: int = 0) -> Parse[None]:
    """Read one value and emit it as JSON."""
    if depth > MAX_DEPTH:
        raise MalformedError
    character = yield from reader.skip_space()
    if character == "{":
        yield from convert_mapping(reader, emit, style, depth)
    elif character in "[(":
        reader.at += 1
        emit("[")
        closer = "]" if character == "[" else ")"
        is_first = True
        while (yield from reader.skip_space()) != closer:
            if not is_first:
                emit(", ")
            is_first = False
            yield from convert_value(reader, emit, style, depth + 1)
            yield from _read_comma(reader, closer)
        reader.at += 1
        emit("]")
    elif character in style.strings:
        yield from _convert_string(reader, emit, style)
    else:
        emit(_scalar((yield from reader.word(_SCALAR_RUN, MAX_SCALAR))))


def convert_mapping(reader: Reader, emit: Emit, style: Style, depth: int = 0) -> Parse[None]:
    """Read `{key: value, …}` and emit it as JSON."""
    yield from reader.expect("{")
    emit("{")
    is_first = True
    while (character := (yield from reader.skip_space())) != "}":
        if not is_first:
            emit(", ")
        is_first = False
        if character in style.strings:
            yield from _convert_string(reader, emit, style)
        elif style.bare_keys:
            emit(json.dumps((yield from _read_word(reader, _KEY_RUN)), ensure_ascii=False))
        else:
            raise MalformedError
        yield from reader.skip_space()
        yield from reader.expect(":")
        emit(": ")
        yield from convert_value(reader, emit, style, depth + 1)
        yield from _read_comma(reader, "}")
    reader.at += 1
    emit("}")


def _read_comma(reader: Reader, closer: str) -> Parse[None]:
    if (yield from reader.skip_space()) != closer:
        yield from reader.expect(",")


def _read_word(reader: Reader, pattern: re.Pattern[str]) -> Parse[str]:
    word = yield from reader.word(pattern, MAX_NAME)
    if not word:
        raise MalformedError
    return word


def _scalar(text: str) -> str:
    """A number or word as JSON."""
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if math.isfinite(number):
            return json.dumps(number)
    raise MalformedError


def _convert_string(reader: Reader, emit: Emit, style: Style) -> Parse[None]:
    for quote in style.quotes:
        if (yield from reader.literal(quote)):
            break
    else:
        raise MalformedError
    run = style.strings[quote[0]]
    emit('"')
    while True:
        emit(_inside(reader.run(run)))
        character = yield from reader.peek()
        if character == "\\" and style.has_escapes:
            emit(_inside((yield from _read_escape(reader))))
        elif (yield from reader.literal(quote)):
            break
        else:
            reader.at += 1
            emit(_inside(character))
    emit('"')


def _inside(text: str) -> str:
    """Text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read_escape(reader: Reader) -> Parse[str]:
    reader.at += 1
    kind = yield from reader.peek()
    reader.at += 1
    if kind in _SIMPLE_ESCAPES:
        return _SIMPLE_ESCAPES[kind]
    if kind not in _CODE_LENGTHS:
        return kind if kind in "\\'\"" else "\\" + kind
    digits = ""
    while len(digits) < _CODE_LENGTHS[kind]:
        digits += yield from reader.peek()
        reader.at += 1
    try:
        return chr(int(digits, 16)).encode("utf-8").decode("utf-8")
    except (ValueError, OverflowError):
        raise MalformedError from None


def python_to_json(text: str) -> str:
    """A whole list, tuple or dictionary in Python's notation as JSON; MalformedError if it is none."""
    reader = Reader()
    reader.push(text)
    reader.ended = True
    pieces: list[str] = []
    try:
        for _ in convert_value(reader, pieces.append, PYTHON):
            pass
    except EndOfText:
        raise MalformedError from None
    if reader.rest():
        raise MalformedError
    return "".join(pieces)


def read_python_call(reader: Reader, call: Call) -> Parse[None]:
    """`name(key=value, …)`"""
    name = yield from _read_word(reader, _NAME_RUN)
    yield from reader.expect("(")
    call.name(name)
    call.arguments("{")
    is_first = True
    while (yield from reader.skip_space()) != ")":
        key = yield from _read_word(reader, _KEY_RUN)
        yield from reader.skip_space()
        yield from reader.expect("=")
        call.arguments(("" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        is_first = False
        yield from convert_value(reader, call.arguments, PYTHON)
        yield from _read_comma(reader, ")")
    reader.at += 1
    call.arguments("}")
    call.end()


def read_gemma_call(reader: Reader, call: Call) -> Parse[None]:
    """`call:name{key:value, …}`"""
    if not (yield from reader.literal("call:")):
        raise MalformedError
    call.name((yield from _read_word(reader, _NAME_RUN)))
    yield from convert_mapping(reader, call.arguments, GEMMA)
    call.end()


def literal_calls(read: Callable[[Reader, Call], Parse[None]], end: str | None = None) -> Body:
    """Calls between whitespace and commas, in brackets or not, up to the mark `end` (without one, the bracket)."""

    def body(reader: Reader, calls: Calls) -> Parse[None]:
        in_list = False
        while True:
            character = yield from reader.skip_space()
            if character == "[" and not in_list:
                reader.at += 1
                in_list = True
            elif character == "]" and in_list:
                reader.at += 1
                if end is None:
                    return
                in_list = False
            elif character == ",":
                reader.at += 1
            elif end is not None and character == end[0] and (yield from reader.literal(end)):
                return
            else:
                yield from read(reader, calls.begin())

    return body

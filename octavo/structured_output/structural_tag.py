"""Structural tags: free text in which given pieces follow schemas, such as `<call>{"x": 1}</call>`.

Both spellings are read: `{"structures": [{"begin", "schema", "end"}], "triggers": […]}` and xgrammar's tree of formats
(`{"type": "structural_tag", "format": {…}}`). `read_structural_tag` checks a tag and brings it into the second;
`LarkWriter` turns that into a Lark grammar for llguidance, as far as one can say it.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import ClientError
from octavo.structured_output.json_schema import MAX_DEPTH, clean_schema

MAX_REPEAT = 1000
_ANY_TEXT = r"/(.|\n)*/"
# Type of format -> the fields that hold formats, each one or a list.
_INNER = {
    "sequence": "elements", "or": "elements", "tag": "content", "triggered_tags": "tags", "tags_with_separator": "tags",
    "optional": "content", "plus": "content", "star": "content", "repeat": "content",
}  # fmt: skip


def read_structural_tag(tag: Any) -> dict[str, Any]:
    """A checked structural tag in xgrammar's form. Raises ClientError with the path of what is wrong."""
    if isinstance(tag, str):
        try:
            tag = json.loads(tag)
        except (ValueError, RecursionError) as error:
            raise _bad("$", f"is not JSON: {error}") from None
    if not isinstance(tag, dict):
        raise _bad("$", "must be an object")
    if "structures" in tag:
        return {"type": "structural_tag", "format": _clean(_from_structures(tag), "$.structures", 0)}
    if not isinstance(tag.get("format"), dict):
        raise _bad("$", 'needs "format", or "structures" and "triggers"')
    return {"type": "structural_tag", "format": _clean(tag["format"], "$.format", 0)}


def _from_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise _bad("$.structures", "must be a list, not empty")
    tags = []
    for i, structure in enumerate(structures):
        if not isinstance(structure, dict) or not {"begin", "end"} <= structure.keys():
            raise _bad(f"$.structures[{i}]", 'must be an object with "begin", "schema" and "end"')
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append({"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _clean(given: Any, path: str, depth: int) -> dict[str, Any]:
    """A format with every schema in it cleaned and every string checked."""
    if depth > MAX_DEPTH:
        raise _bad(path, f"is nested deeper than {MAX_DEPTH} levels")
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        raise _bad(path, 'must be an object with "type"')
    kind, cleaned = given["type"], dict(given)
    if kind == "json_schema":
        try:
            cleaned["json_schema"] = clean_schema(given.get("json_schema", {}))
        except ClientError as error:
            raise ClientError(f"structural tag: {path}.json_schema: {error}", param="structured_outputs") from None
    inner = _INNER.get(kind)
    if inner is not None:
        value = given.get(inner)
        if isinstance(value, list) and value:
            cleaned[inner] = [_clean(part, f"{path}.{inner}[{i}]", depth + 1) for i, part in enumerate(value)]
        else:
            cleaned[inner] = _clean(value, f"{path}.{inner}", depth + 1)
    if kind == "triggered_tags":
        triggers = given.get("triggers")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            raise _bad(f"{path}.triggers", "must be a list of texts, not empty")
    return cleaned


class LarkWriter:
    """Writes one structural tag as Lark. `special`: tokens that stand for no text; where a tag names one, it is the token."""

    def __init__(self, special: Mapping[str, int], to_lark: Callable[[str], str], regex_to_lark: Callable[[str], str]):
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if special else None
        self._to_lark, self._regex_to_lark = to_lark, regex_to_lark
        self._rules: list[str] = []
        self._grammars: list[dict[str, str]] = []  # named ones, beside the main one

    def write(self, tag: Mapping[str, Any], whitespace: Mapping[str, Any]) -> str:
        """The grammar in llguidance's JSON form; `whitespace` are its options for schemas."""
        self._whitespace = whitespace
        start = self._format(tag["format"])
        main = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"name": "tag", "lark_grammar": main}, *self._grammars]})

    def _format(self, given: Mapping[str, Any]) -> str:
        write = getattr(self, f"_{given['type']}", None)
        known = _WRITTEN.get(given["type"])
        if write is None or known is None:
            raise _bad(given["type"], f"is not supported by llguidance; use {', '.join(sorted(_WRITTEN))}")
        for name, value in given.items():
            if name not in known and name != "type" and value not in (None, [], False, "json"):
                raise _bad(f"{given['type']}.{name}", "is not supported by llguidance")
        try:
            return write(given)
        except (KeyError, TypeError, AttributeError):
            raise _bad(given["type"], f"needs {', '.join(known)}, each of its type") from None

    def _rule(self, body: str, attribute: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """A fixed text, special tokens in it as such."""
        pieces = [text] if self._marks is None else self._marks.split(text)  # every second one is a special token
        return " ".join(
            f"<[{self._special[piece]}]>" if i % 2 else json.dumps(piece, ensure_ascii=False)
            for i, piece in enumerate(pieces)
            if piece
        )

    def _text_until(self, end: str) -> str:
        """Any text up to the first `end`, which is part of it."""
        head = None if self._marks is None else self._marks.search(end)
        if head is None:
            return self._rule(f"{_ANY_TEXT} {json.dumps(end, ensure_ascii=False)}", "[lazy]")
        if head.start() == 0:
            return f"{_ANY_TEXT} {self._literal(end)}"
        return f"{self._text_until(end[: head.start()])} {self._literal(end[head.start() :])}"

    def _const_string(self, given: Mapping[str, Any]) -> str:
        return self._literal(given["value"])

    def _json_schema(self, given: Mapping[str, Any]) -> str:
        schema = given["json_schema"]
        schema = {} if schema is True else schema
        return f"%json {json.dumps(schema | {'x-guidance': self._whitespace}, ensure_ascii=False)}"

    def _regex(self, given: Mapping[str, Any]) -> str:
        return self._rule(f"/{self._regex_to_lark(given['pattern'])}/")

    def _grammar(self, given: Mapping[str, Any]) -> str:
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": self._to_lark(given["grammar"])})
        return f"@{name}"

    def _any_text(self, given: Mapping[str, Any]) -> str:
        return _ANY_TEXT

    def _sequence(self, given: Mapping[str, Any]) -> str:
        return " ".join(self._format(part) for part in given["elements"])

    def _or(self, given: Mapping[str, Any]) -> str:
        return self._rule(" | ".join(self._format(part) for part in given["elements"]))

    def _tag(self, given: Mapping[str, Any], begun: str = "") -> str:
        """`begun`: as much of the beginning as is out already."""
        ends = [given["end"]] if isinstance(given["end"], str) else given["end"]
        begin = self._literal(given["begin"].removeprefix(begun))
        if given["content"]["type"] == "any_text" and all(ends):
            return f"{begin} {self._rule(' | '.join(self._text_until(end) for end in ends))}"
        end = self._rule(" | ".join(self._literal(end) or '""' for end in ends)) if any(ends) else ""
        return f"{begin} {self._format(given['content'])} {end}"

    def _triggered_tags(self, given: Mapping[str, Any]) -> str:
        groups: dict[str, list[str]] = {trigger: [] for trigger in given["triggers"]}
        for tag in given["tags"]:
            trigger = next((t for t in given["triggers"] if tag["begin"].startswith(t)), None)
            if trigger is None:
                raise _bad("triggered_tags", f"has a tag that begins with none of its triggers: {tag['begin']!r}")
            groups[trigger].append(self._tag(tag, begun=trigger))
        parts = [
            f"{self._text_until(trigger)} {self._rule(' | '.join(tags))}" for trigger, tags in groups.items() if tags
        ]
        one = self._rule(" | ".join(parts))
        more = "" if given.get("stop_after_first") else f"{one}* {_ANY_TEXT}"
        if given.get("at_least_one"):  # at once: no text before it
            return f"{self._rule(' | '.join(map(self._tag, given['tags'])))} {more}"
        return more or f"({one} | {_ANY_TEXT})"

    def _tags_with_separator(self, given: Mapping[str, Any]) -> str:
        one = self._rule(" | ".join(self._format(tag) for tag in given["tags"]))
        several = one if given.get("stop_after_first") else f"{one} ({self._literal(given['separator'])} {one})*"
        return several if given.get("at_least_one") else f"({several})?"

    def _optional(self, given: Mapping[str, Any]) -> str:
        return f"({self._format(given['content'])})?"

    def _plus(self, given: Mapping[str, Any]) -> str:
        return f"({self._format(given['content'])})+"

    def _star(self, given: Mapping[str, Any]) -> str:
        return f"({self._format(given['content'])})*"

    def _repeat(self, given: Mapping[str, Any]) -> str:
        low, high = given["min"], given["max"]
        if not 0 <= low <= high <= MAX_REPEAT:
            raise _bad("repeat", f"needs 0 <= min <= max <= {MAX_REPEAT}")
        return f"({self._format(given['content'])}){{{low},{high}}}"


# Type of format -> its fields that are written.
_WRITTEN = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "any_text": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("content", "min", "max"),
}


def _bad(path: str, problem: str) -> ClientError:
    return ClientError(f"structural tag: {path} {problem}.", param="structured_outputs")

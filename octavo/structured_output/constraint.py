"""`Constraint`: what a client asked for, checked and in one canonical form. Equal constraints share a compiled grammar."""

import json
import re
import warnings
from dataclasses import dataclass
from typing import Any, Literal

from octavo.config.engine import StructuredOutputsConfig
from octavo.errors import ClientError
from octavo.structured_output.json_schema import clean_schema, parse_schema
from octavo.structured_output.structural_tag import read_structural_tag
from octavo.types.structured_outputs import MAX_CONSTRAINT_BYTES, StructuredOutputsParams

# Between the tokens of JSON: nothing, a space, or a line break and its indentation. Bounded, so that a model that likes
# spaces gets to the end of its object.
WHITESPACE = r"( |\n[ \t]{0,16})?"
NO_WHITESPACE = ""
# Deeper nesting than anybody writes by hand; the engines' parsers are recursive.
MAX_BRACKETS = 200

_DEFAULTS = StructuredOutputsConfig()

Kind = Literal["json", "regex", "choice", "gbnf", "lark", "structural_tag"]


@dataclass(frozen=True)
class Constraint:
    """`text` is a cleaned schema, a list of choices or a structural tag as JSON; or a pattern; or a grammar."""

    kind: Kind
    text: str
    whitespace: str = WHITESPACE  # a pattern: what may stand between the tokens of JSON


def make_constraint(params: StructuredOutputsParams, config: StructuredOutputsConfig = _DEFAULTS) -> Constraint:
    """Check what a client asked for, as far as that needs no engine; `config` says what holds for all. Raises ClientError."""
    constraint = _read(params, config)
    try:
        (constraint.text + constraint.whitespace).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise _bad(f"the constraint is no text: {error}.") from None
    return constraint


def _read(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> Constraint:
    if params.whitespace_pattern is not None:
        whitespace = params.whitespace_pattern
    elif params.disable_any_whitespace or config.disable_any_whitespace:
        whitespace = NO_WHITESPACE
    else:
        whitespace = WHITESPACE
    if params.json_object:
        return Constraint("json", '{"type":"object"}', whitespace)
    if params.json is not None:
        schema = parse_schema(params.json) if isinstance(params.json, str) else params.json
        is_closed = params.disable_additional_properties or config.disable_additional_properties
        cleaned = clean_schema(schema, is_closed=is_closed)
        return Constraint("json", _to_json(cleaned), whitespace)
    if params.choice is not None:
        return Constraint("choice", _to_json(list(dict.fromkeys(params.choice))))
    if params.regex is not None:
        _check_brackets(params.regex, "regex")
        _check_repeats(params.regex)
        return Constraint("regex", params.regex)
    if params.grammar is not None:
        _check_brackets(params.grammar, "grammar")
        return Constraint("gbnf" if "::=" in params.grammar else "lark", params.grammar)
    return Constraint("structural_tag", _to_json(read_structural_tag(params.structural_tag)), whitespace)


def _to_json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise _bad(f"the constraint is not JSON: {error}.") from None
    if len(text) > MAX_CONSTRAINT_BYTES:
        raise _bad(f"the constraint has {len(text)} characters; at most {MAX_CONSTRAINT_BYTES} are allowed.")
    return text


def _check_brackets(text: str, kind: str) -> None:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_BRACKETS:
            raise _bad(f"{kind} opens more than {MAX_BRACKETS} brackets inside each other.")


def _check_repeats(pattern: str) -> None:
    """Refuse `a**`, which no dialect means and some engines read as `(a*)*`."""
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(pattern)
    except re.error as error:  # of another dialect, perhaps: the engine decides
        if "multiple repeat" in error.msg:
            raise _bad(f"regex has a {error}.") from None
    except (OverflowError, RecursionError):
        pass


def _bad(message: str) -> ClientError:
    return ClientError(f"structured_outputs: {message}", param="structured_outputs")

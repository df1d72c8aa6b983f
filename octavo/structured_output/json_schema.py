"""Which JSON schemas can be enforced. What cannot be is refused with the place it stands at, never passed over.

An engine sees a schema only after `clean_schema` has walked it: every keyword known, every value of the right type, every
reference found, annotations gone. `docs/structured-output.md` lists what is supported; tests hold the list to this file.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import ClientError

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 5000
MAX_PARTS_TRIED = 64  # of one schema, when a fault is looked for
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_DRAFTS = tuple(f"json-schema.org/{draft}/schema" for draft in ("draft-07", "draft/2019-09", "draft/2020-12"))

# What says nothing about which texts are valid.
ANNOTATIONS = frozenset(
    (
        "$comment", "$id", "default", "deprecated", "description", "discriminator", "example", "examples", "readOnly",
        "title", "writeOnly",
    )
)  # fmt: skip

_NUMBER, _STRING, _ARRAY, _OBJECT = ("number", "integer"), ("string",), ("array",), ("object",)
# Keyword -> (what its value must be, types it concerns; none: any value).
KEYWORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "type": ("type", ()),
    "enum": ("values", ()),
    "const": ("any", ()),
    "$ref": ("reference", ()),
    "$defs": ("definitions", ()),
    "definitions": ("definitions", ()),
    "anyOf": ("schemas", ()),
    "oneOf": ("schemas", ()),
    "allOf": ("schemas", ()),
    "minimum": ("number", _NUMBER),
    "maximum": ("number", _NUMBER),
    "exclusiveMinimum": ("number", _NUMBER),
    "exclusiveMaximum": ("number", _NUMBER),
    "multipleOf": ("number", _NUMBER),
    "minLength": ("count", _STRING),
    "maxLength": ("count", _STRING),
    "pattern": ("string", _STRING),
    "format": ("format", _STRING),
    "items": ("items", _ARRAY),
    "prefixItems": ("schemas", _ARRAY),
    "additionalItems": ("schema", _ARRAY),
    "minItems": ("count", _ARRAY),
    "maxItems": ("count", _ARRAY),
    "properties": ("named schemas", _OBJECT),
    "patternProperties": ("named schemas", _OBJECT),
    "additionalProperties": ("schema", _OBJECT),
    "required": ("names", _OBJECT),
    "minProperties": ("count", _OBJECT),
    "maxProperties": ("count", _OBJECT),
}
# Keywords that change nothing when they have this value.
_NEUTRAL: dict[str, Any] = {"uniqueItems": False, "nullable": False, "unevaluatedProperties": True}

Path = tuple[str | int, ...]


def show_path(path: Path) -> str:
    """`$.properties.a.items[0]`."""
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def schema_error(path: Path, message: str) -> ClientError:
    """A schema is wrong, or more than can be enforced, at `path`."""
    return ClientError(f"JSON schema: {show_path(path)} {message}", param="structured_outputs")


def clean_schema(
    schema: Any, *, is_closed: bool = False, check: Callable[[Mapping[str, Any], Path], None] | None = None
) -> Any:
    """The schema without annotations; ClientError where it cannot be enforced.

    `is_closed`: objects hold no properties but those named, unless the schema says otherwise. `check` may refuse more: it
    is shown each subschema.
    """
    return _Walk(schema, is_closed, check).run()


def parse_schema(text: str) -> Any:
    """A schema from its JSON text."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise schema_error((), f"is not JSON: {error}.") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


class _Walk:
    def __init__(self, root: Any, is_closed: bool, check: Callable[[Mapping[str, Any], Path], None] | None):
        self._root = root
        self._is_closed = is_closed
        self._check = check
        self._num_subschemas = 0
        self._resolved: dict[str, Any] = {}  # reference -> cleaned schema; filled once it has been walked
        self._pending: dict[str, tuple[Any, Path]] = {}

    def run(self) -> Any:
        cleaned = self._schema(self._root, (), 0)
        while self._pending:
            reference, (schema, path) = self._pending.popitem()
            self._resolved[reference] = self._schema(schema, path, 0)
        self._refuse_empty_cycles(cleaned, ())
        # Definitions go back where references look for them, inner ones first: an outer one holds its inner ones.
        for reference in sorted(self._resolved, key=lambda reference: -reference.count("/")):
            steps = _steps(reference)
            if steps and steps[0] in ("$defs", "definitions"):
                place = cleaned
                for step in steps[:-1]:
                    place = place.setdefault(step, {})
                place[steps[-1]] = self._resolved[reference]
        return cleaned

    def _schema(self, schema: Any, path: Path, depth: int) -> Any:
        self._num_subschemas += 1
        if depth > MAX_DEPTH:
            raise schema_error(path, f"is nested deeper than {MAX_DEPTH} levels.")
        if self._num_subschemas > MAX_SUBSCHEMAS:
            raise schema_error(path, f"is one of more than {MAX_SUBSCHEMAS} subschemas; make the schema smaller.")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise schema_error(path, f"is {_shown(schema)}; a schema is an object, true or false.")
        if self._check is not None:
            self._check(schema, path)
        cleaned: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in ANNOTATIONS or keyword.startswith("x-"):
                continue
            if keyword in _NEUTRAL and value is _NEUTRAL[keyword]:
                continue
            if keyword == "$schema" and not path:
                _check_draft(value)
                continue
            known = KEYWORDS.get(keyword)
            if known is None:
                raise schema_error((*path, keyword), "is not supported; leave it out and check the answer yourself.")
            if known[0] != "definitions":  # those that are used are met by their references
                cleaned[keyword] = self._value(known[0], value, (*path, keyword), depth)
        concerns_objects = "properties" in cleaned or "object" in _types(cleaned)
        if self._is_closed and concerns_objects and not {"additionalProperties", "patternProperties"} & cleaned.keys():
            cleaned["additionalProperties"] = False
        return cleaned

    def _value(self, kind: str, value: Any, path: Path, depth: int) -> Any:
        if kind == "schema":
            return self._schema(value, path, depth + 1)
        if kind == "schemas" or (kind == "items" and isinstance(value, list)):
            if not isinstance(value, list) or not value:
                raise schema_error(path, f"is {_shown(value)}; it must be a list of schemas, not empty.")
            return [self._schema(schema, (*path, i), depth + 1) for i, schema in enumerate(value)]
        if kind == "items":
            return self._schema(value, path, depth + 1)
        if kind == "named schemas":
            if not isinstance(value, dict):
                raise schema_error(path, f"is {_shown(value)}; it must be an object of schemas.")
            return {name: self._schema(schema, (*path, name), depth + 1) for name, schema in value.items()}
        if kind == "reference":
            self._follow(value, path)
            return value
        if not _CHECKS[kind](value):
            raise schema_error(path, f"is {_shown(value)}; it must be {_WANTED[kind]}.")
        return value

    def _follow(self, reference: Any, path: Path) -> None:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise schema_error(
                path, f"is {_shown(reference)}; only references into the schema itself (#/…) are followed."
            )
        if reference in self._resolved or reference in self._pending:
            return
        target = self._root
        for step in _steps(reference):
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                raise schema_error(path, f"is {_shown(reference)}, which leads nowhere.")
        if reference == "#":
            self._resolved[reference] = None  # the root is being walked
        else:
            self._pending[reference] = target, tuple(_steps(reference))

    def _refuse_empty_cycles(self, cleaned: Any, path: Path) -> None:
        """Refuse references that lead back to themselves without any text in between: they say nothing."""
        self._resolved["#"] = cleaned
        finished: set[int] = set()

        def visit(schema: Any, path: Path, open_ids: tuple[int, ...]) -> None:
            if not isinstance(schema, dict) or id(schema) in finished:
                return
            if id(schema) in open_ids:
                raise schema_error(path, "refers to itself without anything in between; no text can follow it.")
            open_ids = (*open_ids, id(schema))
            if "$ref" in schema:
                visit(self._resolved[schema["$ref"]], (*path, "$ref"), open_ids)
            for keyword in ("anyOf", "oneOf", "allOf"):
                for i, part in enumerate(schema.get(keyword, ())):
                    visit(part, (*path, keyword, i), open_ids)
            finished.add(id(schema))

        def visit_all(schema: Any, path: Path) -> None:
            visit(schema, path, ())
            for step, part in _children(schema):
                visit_all(part, (*path, *step))

        for reference, schema in list(self._resolved.items()):
            visit_all(schema, tuple(_steps(reference)))
        del self._resolved["#"]


def find_fault(schema: Any, complaint: Callable[[Any], str | None]) -> tuple[Path, str]:
    """The subschema of a cleaned schema that an engine cannot enforce, and why; `complaint` is what it says to a schema.

    Each subschema is shown alone with the definitions. What the whole schema fails for is preferred to other faults.
    """
    message = complaint(schema)
    assert message is not None
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    path: Path = ()
    for _ in range(MAX_DEPTH):
        found: tuple[Path, Any, str] | None = None
        for step, part in _children(schema)[:MAX_PARTS_TRIED]:
            said = complaint(definitions | part) if isinstance(part, dict) else None
            if said is not None and "does not exist" not in said and (found is None or said == message):
                found = step, part, said
        if found is None:
            break
        step, schema, message = found
        path = (*path, *step)
    return path, message


def _children(schema: Any) -> list[tuple[Path, Any]]:
    """The subschemas directly inside a cleaned schema, with the way to each."""
    found: list[tuple[Path, Any]] = []
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        kind = KEYWORDS[keyword][0]
        if kind == "named schemas":
            found += [((keyword, name), part) for name, part in value.items()]
        elif kind in ("schemas", "items") and isinstance(value, list):
            found += [((keyword, i), part) for i, part in enumerate(value)]
        elif kind in ("schema", "items"):
            found.append(((keyword,), value))
    return found


def _steps(reference: str) -> list[str]:
    """A JSON pointer's steps."""
    return [step.replace("~1", "/").replace("~0", "~") for step in reference.split("/")[1:]]


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    types = schema.get("type", ())
    return (types,) if isinstance(types, str) else tuple(types)


def _check_draft(value: Any) -> None:
    if not isinstance(value, str) or not any(draft in value for draft in _DRAFTS):
        raise schema_error(("$schema",), f"is {_shown(value)}; drafts 7, 2019-09 and 2020-12 are understood.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_types(value: Any) -> bool:
    types = [value] if isinstance(value, str) else value
    return isinstance(types, list) and bool(types) and all(isinstance(t, str) and t in TYPES for t in types)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "type": _is_types,
    "values": lambda value: isinstance(value, list) and bool(value),
    "number": _is_number,
    "count": _is_count,
    "string": lambda value: isinstance(value, str),
    "format": lambda value: value in FORMATS,
    "names": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
}
_WANTED = {
    "type": f"one or several of {', '.join(TYPES)}",
    "values": "a list of values, not empty",
    "number": "a number",
    "count": "an integer of at least 0",
    "string": "a string",
    "format": f"one of {', '.join(FORMATS)}",
    "names": "a list of strings",
}


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else f"{text[:80]}…"

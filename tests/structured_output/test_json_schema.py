"""What a schema means, by `jsonschema`, is what the grammar takes; what cannot be enforced is refused with its path."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from octavo.errors import ClientError
from octavo.structured_output.json_schema import ANNOTATIONS, FORMATS, KEYWORDS, clean_schema, parse_schema
from octavo.structured_output.llguidance_backend import LLGuidance
from tests.structured_output.bytes_vocabulary import bytes_vocabulary, compile_with, takes

CASES = json.loads(Path(__file__).parent.parent.joinpath("data", "json_schema_cases.json").read_text())


@pytest.fixture(scope="module")
def backend():
    return LLGuidance(bytes_vocabulary())


@pytest.fixture(scope="module")
def xgrammar_backend():
    module = pytest.importorskip("octavo.structured_output.xgrammar_backend")
    return module.XGrammar(bytes_vocabulary())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["what"])
def test_the_grammar_takes_what_is_valid(backend, case):
    schema = case["schema"]
    compiled = compile_with(backend, json=schema)
    draft = jsonschema.Draft7Validator if case.get("draft") == 7 else jsonschema.Draft202012Validator
    validator = draft(schema)
    for values, is_valid in ((case["valid"], True), (case["invalid"], False)):
        for value in values:
            if case.get("python", True) and "format" not in case["what"]:
                assert validator.is_valid(value) == is_valid, f"the case is wrong: {value}"
            for separators in ((", ", ": "), (",", ":")):
                text = json.dumps(value, ensure_ascii=False, separators=separators)
                assert takes(backend, compiled, text) == is_valid, text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["what"])
def test_xgrammar_refuses_what_it_would_not_enforce(xgrammar_backend, case):
    try:
        compiled = compile_with(xgrammar_backend, json=case["schema"])
    except ClientError as refusal:
        assert "xgrammar" in str(refusal) or "not supported" in str(refusal)
        return
    for value in case["invalid"]:
        assert not takes(xgrammar_backend, compiled, json.dumps(value, ensure_ascii=False)), value


def test_every_supported_keyword_and_format_has_a_case():
    seen = set(re.findall(r'"([$\w]+)":', json.dumps([case["schema"] for case in CASES])))
    assert set(KEYWORDS) <= seen
    assert {case["schema"]["format"] for case in CASES if case["what"] == "format"} == set(FORMATS)


def test_the_documentation_lists_what_is_supported():
    page = Path(__file__).parent.parent.parent.joinpath("docs", "structured-output.md").read_text()
    section = page[page.index("## JSON schema") : page.index("## Engines")]
    table, _, ignored = section.partition("\nIgnored,")
    listed = {word for row in table.splitlines() if row.startswith("| `") for word in re.findall(r"`([^`]+)`", row)}
    assert listed >= set(KEYWORDS) | set(FORMATS)
    assert listed - set(FORMATS) - set(KEYWORDS) == {"#", "#/…"}
    assert set(re.findall(r"`([$\w]+)`", ignored)) == ANNOTATIONS


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "strnig"}, "$.type"),
        ({"type": []}, "$.type"),
        ({"type": "object", "properties": 5}, "$.properties"),
        ({"type": "object", "properties": {"a": 5}}, "$.properties.a"),
        ({"$ref": "#/nowhere"}, "$.$ref"),
        ({"$ref": "https://example.org/schema"}, "$.$ref"),
        ({"items": {"$ref": 3}}, "$.items.$ref"),
        ({"$ref": "#"}, "$.$ref"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "$.anyOf[1].$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$ref"),
        ({"properties": {"a": {"items": {"not": {}}}}}, "$.properties.a.items.not"),
        ({"anyOf": [{"type": "string"}, {"contains": {}}]}, "$.anyOf[1].contains"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"uniqueItems": True}}}, "$.$defs.x.uniqueItems"),
        ({"if": {}, "then": {}}, "$.if"),
        ({"dependentRequired": {"a": ["b"]}}, "$.dependentRequired"),
        ({"propertyNames": {"pattern": "a"}}, "$.propertyNames"),
        ({"unevaluatedProperties": False}, "$.unevaluatedProperties"),
        ({"minLenght": 3}, "$.minLenght"),
        ({"type": "string", "nullable": True}, "$.nullable"),
        ({"type": "string", "format": "color"}, "$.format"),
        ({"minItems": -1}, "$.minItems"),
        ({"maxLength": "3"}, "$.maxLength"),
        ({"required": "a"}, "$.required"),
        ({"enum": []}, "$.enum"),
        ({"anyOf": []}, "$.anyOf"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "$.$schema"),
        ([], "$"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_path(schema, path):
    """FC-057, FC-058: malformed and bare recursive schemas are the client's mistake, named by their place."""
    with pytest.raises(ClientError, match=re.escape(path)) as caught:
        clean_schema(schema)
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "["},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "array", "minItems": 3, "maxItems": 1},
        {"type": "object", "required": ["x"], "additionalProperties": False},
        {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
        {"type": "object", "properties": {"a": {}}, "maxProperties": 3},
    ],
)
def test_what_only_the_engine_sees_is_refused_with_the_subschema(backend, schema):
    some = {"type": "array", "items": schema, "minItems": 1}
    wrapped = {"type": "object", "properties": {"p": some}, "required": ["p"]}
    with pytest.raises(ClientError, match=r"\$\.properties\.p\.items"):
        compile_with(backend, json=wrapped)


def test_limits():
    deep: dict = {}
    for _ in range(70):
        deep = {"items": deep}
    with pytest.raises(ClientError, match="deeper than 64"):
        clean_schema(deep)
    with pytest.raises(ClientError, match="more than 5000 subschemas"):
        clean_schema({"properties": {str(i): {} for i in range(6000)}})
    with pytest.raises(ClientError, match="is not JSON"):
        parse_schema('{"type": NaN}')
    with pytest.raises(ClientError, match="is not JSON"):
        parse_schema("[" * 100_000)


def test_closed_objects():
    schema = {"type": "object", "properties": {"a": {"type": "object"}, "b": {"additionalProperties": {}}}}
    closed = clean_schema(schema, is_closed=True)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["b"]["additionalProperties"] == {}


def test_whitespace_is_bounded(backend):
    """FC-061: a model that likes spaces or line breaks gets to the end."""
    compiled = compile_with(
        backend, json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    )
    assert takes(backend, compiled, '{\n    "a": 1\n}')
    assert not takes(backend, compiled, '{  "a": 1}')
    assert not takes(backend, compiled, '{\n\n"a": 1}')
    assert not takes(backend, compiled, '{"a": 1} ') and not takes(backend, compiled, ' {"a": 1}')
    compact = compile_with(backend, json_object=True, disable_any_whitespace=True)
    assert takes(backend, compact, '{"a":[1,{}]}') and not takes(backend, compact, '{"a": 1}')
    custom = compile_with(backend, json_object=True, whitespace_pattern="_?")
    assert takes(backend, custom, '{_"a"_:_1}')

import pytest

from octavo.errors import ClientError
from octavo.types.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "exactly one"),
        ({"json": {}, "regex": "a"}, "json and regex"),
        ({"json": 5}, "json of type int"),
        ({"regex": ""}, "regex is empty"),
        ({"regex": "a\0"}, "NUL"),
        ({"regex": "a" * (1 << 19)}, "at most"),
        ({"choice": []}, "choice holds 0 texts"),
        ({"choice": [""]}, "empty text"),
        ({"choice": ["a", 1]}, "list of strings"),
        ({"choice": "ab"}, "list of strings"),
        ({"grammar": ""}, "grammar is empty"),
        ({"grammar": {"a": 1}}, "a string"),
        ({"json_object": False}, "json_object=False"),
        ({"structural_tag": {}}, "structural_tag is empty"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern has no meaning with regex"),
        ({"json_object": True, "disable_additional_properties": True}, "no meaning with json_object"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "exclude each other"),
    ],
)
def test_wrong_constraints_are_refused(fields, word):
    with pytest.raises(ClientError, match=word) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.param == "structured_outputs"


def test_the_kind_is_the_field_given():
    assert StructuredOutputsParams(json={}).kind == "json"
    assert StructuredOutputsParams(choice=["a", "a"]).kind == "choice"
    assert StructuredOutputsParams(json_object=True, disable_any_whitespace=True).kind == "json_object"

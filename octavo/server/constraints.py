"""What the fields of a request say about the form of its answer: `response_format`, `structured_outputs`, and older ones.

One request, one constraint: two fields that both ask for something are refused.
"""

from typing import Any, Protocol

import msgspec

from octavo.errors import ClientError
from octavo.types.structured_outputs import StructuredOutputsParams

RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
# vLLM's older fields -> the parameter each gives.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class Constrained(Protocol):
    """The fields read here."""

    response_format: dict[str, Any] | None
    structured_outputs: dict[str, Any] | None
    guided_json: str | dict[str, Any] | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    guided_whitespace_pattern: str | None


def read_constraint(body: Constrained) -> StructuredOutputsParams | None:
    """The constraint on the answer, if there is one."""
    found: dict[str, StructuredOutputsParams] = {}
    if body.response_format is not None:
        constraint = _from_response_format(body.response_format)
        if constraint is not None:
            found["response_format"] = constraint
    if body.structured_outputs:
        found["structured_outputs"] = _make(body.structured_outputs, "structured_outputs")
    for name, kind in GUIDED.items():
        value = getattr(body, name)
        if value is not None:
            fields = {kind: value}
            if body.guided_whitespace_pattern is not None:
                fields["whitespace_pattern"] = body.guided_whitespace_pattern
            found[name] = _make(fields, name)
    if len(found) > 1:
        raise ClientError(f"{' and '.join(found)} exclude each other; send one of them.", param=list(found)[1])
    return next(iter(found.values()), None)


def _from_response_format(response_format: dict[str, Any]) -> StructuredOutputsParams | None:
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            # With `strict` and without it, the answer follows the schema.
            wrapper = response_format.get("json_schema")
            if not isinstance(wrapper, dict):
                raise ClientError(
                    'response_format.json_schema is missing; send {"name": …, "schema": …} in it.',
                    param="response_format.json_schema",
                )
            schema = wrapper.get("schema")
            if not isinstance(schema, dict):
                raise ClientError(
                    "response_format.json_schema.schema is missing; send the JSON schema in it.",
                    param="response_format.json_schema.schema",
                )
            return _make({"json": schema}, "response_format")
        case "structural_tag":
            return _make({"structural_tag": response_format}, "response_format")
        case other:
            raise ClientError(
                f"response_format.type={other!r} is not known; use one of {', '.join(RESPONSE_FORMATS)}.",
                param="response_format.type",
            )


def _make(fields: dict[str, Any], param: str) -> StructuredOutputsParams:
    unknown = fields.keys() - set(StructuredOutputsParams.__struct_fields__)
    if unknown:
        raise ClientError(
            f"{param} has {', '.join(sorted(unknown))}; it may have {', '.join(StructuredOutputsParams.__struct_fields__)}.",
            param=param,
        )
    try:
        return msgspec.convert(fields, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        message = str(cause) if isinstance(cause, ClientError) else f"{param}: {error}"
        raise ClientError(message, param=param) from None

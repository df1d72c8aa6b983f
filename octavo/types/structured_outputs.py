"""`StructuredOutputsParams`: what an answer's text must look like."""

from typing import Any

import msgspec

from octavo.errors import ClientError

MAX_CHOICES = 1024
MAX_CONSTRAINT_BYTES = 1 << 18  # of a schema, pattern or grammar

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Options -> the kinds they mean something to.
_OPTION_KINDS = {
    "disable_any_whitespace": ("json", "json_object", "structural_tag"),
    "whitespace_pattern": ("json", "json_object", "structural_tag"),
    "disable_additional_properties": ("json",),
}


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """A constraint on the text: exactly one of the first six fields. Wrong values raise `ClientError` (a `ValueError`).

    What a schema, pattern or grammar itself says is checked by `structured_output`, which knows what can be enforced.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None  # of the whole text
    choice: list[str] | None = None
    grammar: str | None = None  # GBNF (`::=`) or Lark
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False  # compact JSON
    disable_additional_properties: bool = False  # where the schema does not speak of them
    whitespace_pattern: str | None = None  # between the tokens of JSON, instead of a bounded default

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise _bad(
                f"has {' and '.join(given) if given else 'no constraint'}; give exactly one of {', '.join(KINDS)}."
            )
        kind = given[0]
        if kind == "choice":
            self._check_choice()
        elif kind == "json_object":
            if self.json_object is not True:
                raise _bad(f"json_object={self.json_object!r} asks for nothing; leave it out or set it to true.")
        else:
            self._check_text(kind)
        for option, kinds in _OPTION_KINDS.items():
            if getattr(self, option) and kind not in kinds:
                raise _bad(f"{option} has no meaning with {kind}; it goes with {' or '.join(kinds)}.")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _bad("disable_any_whitespace and whitespace_pattern exclude each other; keep one of them.")

    @property
    def kind(self) -> str:
        """Which of the six kinds of constraint this is."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def _check_text(self, kind: str) -> None:
        value = getattr(self, kind)
        is_object = kind in ("json", "structural_tag")
        if not isinstance(value, (str, dict) if is_object else str):
            wanted = "an object or its JSON text" if is_object else "a string"
            raise _bad(f"{kind} of type {type(value).__name__} is not allowed; it must be {wanted}.")
        if not value and kind != "json":  # {} is a schema
            raise _bad(f"{kind} is empty; leave it out to ask for nothing.")
        if isinstance(value, str):
            if len(value) > MAX_CONSTRAINT_BYTES:
                raise _bad(f"{kind} has {len(value)} characters; at most {MAX_CONSTRAINT_BYTES} are allowed.")
            if "\0" in value:
                raise _bad(f"{kind} holds the character NUL, which no text can be matched with.")

    def _check_choice(self) -> None:
        choice = self.choice
        if not isinstance(choice, list) or not all(isinstance(text, str) for text in choice):
            raise _bad("choice must be a list of strings.")
        if not 1 <= len(choice) <= MAX_CHOICES:
            raise _bad(f"choice holds {len(choice)} texts; give 1 to {MAX_CHOICES}.")
        if "" in choice:
            raise _bad("choice holds an empty text, which cannot be an answer; leave it out.")
        if sum(map(len, choice)) > MAX_CONSTRAINT_BYTES:
            raise _bad(f"choice has more than {MAX_CONSTRAINT_BYTES} characters.")


def _bad(message: str) -> ClientError:
    return ClientError(f"structured_outputs: {message}", param="structured_outputs")

"""How an option is declared: one dataclass field with its type, default, one sentence of help, group and range.

    max_num_seqs: int | None = option(None, "Most requests in one step.", group="Scheduler", low=1)

The command line (`config/parser.py`), its help and the checks of values given from Python all derive from the fields,
so that an option is written once.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from octavo.errors import ConfigError

Kind = Literal["bool", "int", "size", "float", "str", "list", "json", "flag_or_str"]

_METADATA_KEY = "option"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmMgGtT]?)")
_SIZE_FACTORS = {"": 1} | {
    suffix: base**power
    for base, suffixes in ((1000, "kmgt"), (1024, "KMGT"))
    for power, suffix in enumerate(suffixes, start=1)
}


@dataclass(frozen=True)
class Option:
    """What a field says about itself besides its type and default."""

    help: str
    group: str
    short: str | None = None  # "-tp"
    choices: tuple[Any, ...] | None = None
    low: float | None = None
    above: float | None = None  # like `low`, the value itself excluded
    high: float | None = None
    size: bool = False  # an integer that may be written 4k (4000) or 4K (4096)
    words: tuple[str, ...] = ()  # words an integer option takes besides numbers, such as "auto"
    metavar: str | None = None


@dataclass(frozen=True)
class OptionField:
    """A field of an options dataclass, with its type reduced to what parsing needs."""

    name: str
    kind: Kind
    nullable: bool
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def option(
    default: Any,
    help: str,
    *,
    group: str,
    short: str | None = None,
    choices: Sequence[Any] | None = None,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    size: bool = False,
    words: Sequence[str] = (),
    metavar: str | None = None,
) -> Any:
    """Declare a dataclass field as an option. A list or dict default is copied for each instance."""
    info = Option(
        help, group, short, None if choices is None else tuple(choices), low, above, high, size, tuple(words), metavar
    )
    metadata = {_METADATA_KEY: info}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def option_fields(cls: type) -> tuple[OptionField, ...]:
    """The options a dataclass declares, in order."""
    hints = typing.get_type_hints(cls)
    return tuple(
        OptionField(
            name=field.name,
            kind=_kind_of(hints[field.name], field.metadata[_METADATA_KEY], field.name),
            nullable=type(None) in _members(hints[field.name]),
            default=_default_of(field),
            option=field.metadata[_METADATA_KEY],
        )
        for field in dataclasses.fields(cls)
        if _METADATA_KEY in field.metadata
    )


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _kind_of(hint: Any, info: Option, name: str) -> Kind:
    bases = {get_origin(member) or member for member in _members(hint)} - {type(None)}
    if bases == {bool}:
        return "bool"
    if bases == {bool, str}:
        return "flag_or_str"
    if dict in bases:
        return "json"
    if list in bases:
        return "list"
    if int in bases:
        return "size" if info.size else "int"
    if bases == {float}:
        return "float"
    if bases == {str}:
        return "str"
    raise TypeError(f"option {name} has a type the command line cannot carry: {hint}")


def parse_size(text: str) -> int:
    """Read an integer with an optional suffix: 4k = 4000, 4K = 4096, 1.5g = 1500000000. ValueError otherwise."""
    text = text.strip()
    if re.fullmatch(r"-[0-9]+", text):
        return int(text)
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a size; write an integer, or one with a suffix such as 4k (4000) or 4K (4096)"
        )
    number = float(match[1]) * _SIZE_FACTORS[match[2]]
    if number != int(number):
        raise ValueError(f"{text!r} is not a whole number")
    return int(number)


def check_options(instance: Any) -> None:
    """Check every option of a dataclass instance: type, choices and range; sizes given as text become integers.

    Raises ConfigError naming the option, the value and what is allowed.
    """
    for field in option_fields(type(instance)):
        value = getattr(instance, field.name)
        if value is None and field.nullable:
            continue
        setattr(instance, field.name, _checked(field, value))


def _checked(field: OptionField, value: Any) -> Any:
    info = field.option
    if field.kind in ("size", "int") and isinstance(value, str):
        if value in info.words:
            return value
        if field.kind == "size":
            try:
                value = parse_size(value)
            except ValueError as error:
                raise ConfigError(f"{field.name}: {error}.", param=field.name) from None
    if field.kind == "list" and isinstance(value, str):
        value = [value]
    if field.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not _has_kind(field.kind, value) or not _in_range(info, value):
        raise ConfigError(
            f"{field.name}={value!r} is not allowed; {field.name} must be {_wanted(field)}.", param=field.name
        )
    return value


def _has_kind(kind: Kind, value: Any) -> bool:
    match kind:
        case "bool":
            return isinstance(value, bool)
        case "flag_or_str":
            return isinstance(value, (bool, str))
        case "int" | "size":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, float) and math.isfinite(value)
        case "list":
            return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
        case "json":
            return isinstance(value, dict)
        case "str":
            return isinstance(value, str)


def _in_range(info: Option, value: Any) -> bool:
    if info.choices is not None and value not in info.choices:
        return False
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (
            (info.low is None or value >= info.low)
            and (info.above is None or value > info.above)
            and (info.high is None or value <= info.high)
        )
    return True


def _wanted(field: OptionField) -> str:
    info = field.option
    if info.choices is not None:
        return "one of " + ", ".join(str(choice) for choice in info.choices)
    names = {
        "bool": "True or False",
        "flag_or_str": "True, False or a string",
        "int": "an integer",
        "size": "an integer (4k and 4K may be written for 4000 and 4096)",
        "float": "a finite number",
        "str": "a string",
        "list": "a list of strings",
        "json": "a dictionary",
    }
    text = names[field.kind] + "".join(f" or {word!r}" for word in info.words)
    bounds = list(_bounds(info))
    return f"{text}, {' and '.join(bounds)}" if bounds else text


def _bounds(info: Option) -> Iterator[str]:
    if info.low is not None:
        yield f"at least {info.low}"
    if info.above is not None:
        yield f"above {info.above}"
    if info.high is not None:
        yield f"at most {info.high}"

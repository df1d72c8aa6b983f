"""The command line, made of option dataclasses.

Help is grouped and searchable, `_` and `-` are alike, JSON values take dotted keys, and a YAML file may hold flags.

Parsing returns only what was given, as {name: value}; defaults stay in the dataclasses.
"""

import argparse
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from octavo.config.options import OptionField, option_fields, parse_size
from octavo.config.unsupported import explain_unknown

_HELP_EPILOG = (
    "--help=WORD shows the options whose name, group or text holds WORD. Flags may be written with _ or -. "
    "JSON options also take dotted keys: --hf-overrides.max_position_embeddings 4096."
)


class OptionParser(argparse.ArgumentParser):
    """A parser whose flags come from the fields of `option_classes`.

    `positional` names an option that may also be given without its flag, first (`octavo serve MODEL`). Options of
    `skip_groups` are left out.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        option_classes: Sequence[type],
        *,
        positional: str | None = None,
        skip_groups: Collection[str] = (),
    ):
        super().__init__(
            prog=prog,
            usage=f"{prog} [{positional.upper()}] [options]" if positional else f"{prog} [options]",
            description=description,
            epilog=_HELP_EPILOG,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
        )
        self._fields: dict[str, OptionField] = {}
        self._groups: dict[str, Any] = {}
        self._positional = positional
        if positional is not None:
            self.add_argument("_positional", nargs="?", metavar=positional, help="Same as --" + positional + ".")
        general = self._group("General")
        general.add_argument("-h", "--help", action="store_true", help="Show this text; --help=WORD searches it.")
        general.add_argument("--config", metavar="FILE", help="YAML file of options; the command line wins over it.")
        for cls in option_classes:
            for field in option_fields(cls):
                if field.option.group in skip_groups:
                    continue
                self._fields[field.name] = field
                _add_flag(self._group(field.option.group), field)

    def _group(self, title: str) -> Any:
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    def parse_options(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Parse flags into {option name: value}, what was given only. Mistakes end the process with exit code 2."""
        words = [_normalise(word) for word in arguments]
        self._answer_help(words)
        given = self._parse(words)
        config_file = given.pop("config", None)
        if config_file is not None:
            given = self._read_file(config_file) | given
        return given

    def _parse(self, words: list[str]) -> dict[str, Any]:
        plain, dotted = self._take_dotted(words)
        namespace, unknown = self.parse_known_args(plain)
        for word in unknown:
            self._refuse(word)
        given = vars(namespace)
        model = given.pop("_positional", None)
        if self._positional is not None and model is not None:
            if given.get(self._positional, model) != model:
                self.error(f"{self._positional} is given twice: {model} and {given[self._positional]}; give it once.")
            given[self._positional] = model
        for name, path, value in dotted:
            _put(given.setdefault(name, {}), path, value, lambda message: self.error(message))
        return given

    def _take_dotted(self, words: list[str]) -> tuple[list[str], list[tuple[str, list[str], Any]]]:
        """Split off `--flag.key value` and `--flag.key=value` of JSON options: (option, path of keys, value)."""
        shorts = {field.option.short: name for name, field in self._fields.items() if field.option.short}
        plain: list[str] = []
        dotted: list[tuple[str, list[str], Any]] = []
        queue = iter(words)
        for word in queue:
            flag, equals, text = word.partition("=")
            head, dot, rest = flag.partition(".")
            name = shorts.get(head, head.removeprefix("--").replace("-", "_"))
            if not dot or not head.startswith("-") or name not in self._fields or self._fields[name].kind != "json":
                plain.append(word)
                continue
            if not equals:
                following = next(queue, None)
                if following is None:
                    self.error(f"{flag} needs a value.")
                text = following
            dotted.append((name, rest.split("."), _json_or_text(text)))
        return plain, dotted

    def _read_file(self, file: str) -> dict[str, Any]:
        """The options in a YAML file, checked as flags are."""
        import yaml

        try:
            content = yaml.safe_load(Path(file).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            self.error(f"--config {file} cannot be read: {' '.join(str(error).split())}")
        if content is None:
            return {}
        if not isinstance(content, dict):
            self.error(f"--config {file} must hold a mapping of options to values, not a {type(content).__name__}.")
        words: list[str] = []
        for key, value in content.items():
            name = str(key).replace("-", "_")
            if name in ("config", "help"):
                self.error(f"--config {file}: {key} cannot stand in a file.")
            field = self._fields.get(name)
            if field is None:
                self._refuse("--" + name, value)
            elif value is not None:
                words += _as_words(field, value)
        return self._parse(words)

    def _refuse(self, word: str, value: Any = True) -> None:
        """End with what is known about an unknown argument; return when it asks for nothing."""
        if not word.startswith("--"):
            self.error(f"unexpected argument {word!r}; see --help.")
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        is_off = name.startswith("no_")
        problem = explain_unknown(name.removeprefix("no_"), self._fields, False if is_off else value)
        if problem is not None:
            self.error(problem)

    def error(self, message: str) -> NoReturn:
        """One line and where to look, without repeating a hundred flags."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _answer_help(self, words: list[str]) -> None:
        for word in words:
            if word in ("-h", "--help", "--help=all"):
                self.print_help()
                self.exit(0)
            if word.startswith("--help="):
                self._print_matching(word.removeprefix("--help="))
                self.exit(0)

    def _print_matching(self, word: str) -> None:
        """Print the group called `word`, or every option that mentions it."""
        wanted = word.lower().replace("_", "-").lstrip("-")
        formatter = self._get_formatter()
        for title, group in self._groups.items():
            matching = [
                action
                for action in group._group_actions
                if title.lower() == wanted
                or any(wanted in flag for flag in action.option_strings)
                or wanted in (action.help or "").lower()
            ]
            if matching:
                formatter.start_section(title)
                formatter.add_arguments(matching)
                formatter.end_section()
        text = formatter.format_help()
        print(text.rstrip() if text.strip() else f"No option mentions {word!r}; groups are: {', '.join(self._groups)}.")


def add_option_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add a flag for each option of a dataclass to any parser; what is not given has the option's default."""
    for field in option_fields(cls):
        _add_flag(parser, field)
    parser.set_defaults(**{field.name: field.default for field in option_fields(cls)})


def _add_flag(group: Any, field: OptionField) -> None:
    info = field.option
    names = [info.short, field.flag] if info.short else [field.flag]
    keywords: dict[str, Any] = {"dest": field.name, "help": _help_text(field)}
    match field.kind:
        case "bool":
            keywords["action"] = argparse.BooleanOptionalAction
        case "flag_or_str":
            keywords |= {"nargs": "?", "const": True, "metavar": "TEXT"}
        case "int" | "size":
            keywords |= {"type": _integer(field), "metavar": info.metavar or "N"}
        case "float":
            keywords |= {"type": float, "metavar": info.metavar or "X"}
        case "list":
            keywords |= {"nargs": "+", "metavar": info.metavar or "TEXT"}
        case "json":
            keywords |= {"type": _json_object, "metavar": "JSON"}
        case "str":
            keywords["metavar"] = info.metavar or "TEXT"
    if info.choices is not None:
        keywords["choices"] = info.choices
        keywords.pop("metavar", None)
    group.add_argument(*names, **keywords)


def _help_text(field: OptionField) -> str:
    text = field.option.help.replace("%", "%%")
    if field.default is None or field.default in ([], {}) or "Default:" in text:
        return text
    return f"{text} (default: {field.default})"


def _integer(field: OptionField) -> Any:
    def convert(text: str) -> int | str:
        if text in field.option.words:
            return text
        try:
            return parse_size(text) if field.option.size else int(text)
        except ValueError as error:
            message = str(error) if field.option.size else f"{text!r} is not an integer"
            raise argparse.ArgumentTypeError(message) from None

    return convert


def _json_object(text: str) -> dict[str, Any]:
    """A JSON object, or `key=value,key=value`."""
    stripped = text.strip()
    if not stripped.startswith("{") and "=" in stripped:
        pairs = (item.partition("=") for item in stripped.split(",") if item.strip())
        return {key.strip(): _json_or_text(value.strip()) for key, _, value in pairs}
    try:
        value = json.loads(stripped)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is a JSON {type(value).__name__}; an object is needed")
    return value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _put(target: dict[str, Any], path: list[str], value: Any, fail: Any) -> None:
    """Set target[path[0]][path[1]]… = value, making the dictionaries in between."""
    for key in path[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            fail(f"{'.'.join(path)} goes through {key!r}, which is set to a plain value.")
    target[path[-1]] = value


def _normalise(word: str) -> str:
    """`--max_model_len=4k` -> `--max-model-len=4k`; keys behind a dot and values stay as they are."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    head, dot, keys = flag.partition(".")
    return head.replace("_", "-") + dot + keys + equals + value


def _as_words(field: OptionField, value: Any) -> Iterable[str]:
    """The command-line spelling of a value from a YAML file."""
    if isinstance(value, bool):
        if field.kind == "flag_or_str":
            return [field.flag] if value else []
        return [field.flag if value else "--no-" + field.flag.removeprefix("--")]
    if isinstance(value, dict):
        return [f"{field.flag}={json.dumps(value)}"]
    if isinstance(value, list):
        return [field.flag, *map(str, value)]
    return [f"{field.flag}={value}"]

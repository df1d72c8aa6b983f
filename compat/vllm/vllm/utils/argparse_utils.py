"""A parser that takes flags with _ or -, and a YAML file."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """`--max_model_len` and `--max-model-len` are one flag; `--config FILE` reads flags from YAML."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = [_dashed(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(_with_config(words), namespace)


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _with_config(words: list[str]) -> list[str]:
    """Flags of the file first, so that the command line wins."""
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag != "--config":
            continue
        file = value if equals else words[index + 1]
        rest = words[:index] + words[index + (1 if equals else 2) :]
        return _flags(Path(file)) + rest
    return words


def _flags(file: Path) -> list[str]:
    import yaml

    flags: list[str] = []
    for key, value in (yaml.safe_load(file.read_text()) or {}).items():
        flag = _dashed(f"--{key}")
        if value is True:
            flags.append(flag)
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        elif value is not False and value is not None:
            flags += [flag, str(value)]
    return flags

"""What benchmarks print and write."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ClientError

WIDTH = 50


def write_json(path: str | Path, content: Mapping[str, Any], *, append: bool = False) -> None:
    """Write a result as JSON, as a file of its own or as one more line of a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=None if append else 2, allow_nan=False)
    with open(path, "a" if append else "w", encoding="utf-8") as file:
        file.write(text + "\n")


def title(text: str, fill: str = "=") -> str:
    """A heading as wide as the table under it."""
    return f" {text} ".center(WIDTH, fill) if text else fill * WIDTH


def row(label: str, value: float | str | None) -> str:
    """One line of a table; None is shown as "-"."""
    if value is None:
        text = "-"
    elif isinstance(value, float):
        text = f"{value:.2f}"
    else:
        text = str(value)
    return f"{label:<40} {text:<9}"


def parse_pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """`["a=1", "b=2"]` as a dictionary."""
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            raise ClientError(f"{option}={word!r} is not allowed; write NAME=VALUE.", param=option)
        pairs[name.strip()] = value.strip()
    return pairs


def parse_percentiles(text: str) -> list[float]:
    """`"50,99.9"` as numbers from 0 to 100."""
    try:
        percentiles = [float(part) for part in text.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise ClientError(
            f"metric_percentiles={text!r} is not allowed; write numbers from 0 to 100 with commas between.",
            param="metric_percentiles",
        )
    return percentiles

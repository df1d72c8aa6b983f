"""Writes the pages that follow from tables in the code: `python docs/generate.py`. A test holds them current."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo import envs
from octavo.config.args import EngineArgs
from octavo.config.engine import CacheConfig
from octavo.config.options import OptionField, option_fields
from octavo.config.server_args import ServerArgs
from octavo.config.unsupported import UNSUPPORTED
from octavo.metrics import HttpCollector, StatCollector

FOLDER = Path(__file__).parent
_NOTE = "<!-- Written by docs/generate.py; change the tables in the code instead. -->"


def configuration() -> str:
    """docs/configuration.md"""
    lines = [
        "# Configuration",
        "",
        _NOTE,
        "",
        "Every option is a flag of `octavo serve` (`--max-num-seqs 64`, with `_` or `-`), a keyword of `LLM` and `EngineArgs`",
        "(`max_num_seqs=64`; the server's options aside) and a key of a YAML file given with `--config`. The command line wins",
        "over the file. Switches also have a `--no-` form. Sizes may be written 4k (4000) or 4K (4096). JSON options take",
        "dotted keys too: `--hf-overrides.rope_theta 10000`. What is left out is decided at the start, and the log says how.",
        "",
        "## Engine",
        *_option_tables(EngineArgs),
        "",
        "## Server",
        *_option_tables(ServerArgs),
        "",
        "## Environment",
        "",
        "| variable | default | |",
        "|---|---|---|",
    ]
    for name, (default, _, sentence) in envs.VARIABLES.items():
        lines.append(f"| `{name}` | {_shown(default)} | {_cell(sentence)} |")
    lines += [
        "",
        "Variables of the Hugging Face hub (`HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE`) hold as usual.",
        "",
        "## Options of vLLM that are refused",
        "",
        "| options | reason |",
        "|---|---|",
    ]
    by_reason: dict[str, list[str]] = {}
    for name, reason in UNSUPPORTED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    lines += [f"| {', '.join(names)} | {_cell(reason)} |" for reason, names in by_reason.items()]
    return "\n".join(lines) + "\n"


def _option_tables(cls: type) -> Iterator[str]:
    groups: dict[str, list[OptionField]] = {}
    for field in option_fields(cls):
        groups.setdefault(field.option.group, []).append(field)
    for title, fields in groups.items():
        yield from ("", f"### {title}", "", "| option | values | default | |", "|---|---|---|---|")
        for field in fields:
            flags = f"`{field.flag}`" + (f", `{field.option.short}`" if field.option.short else "")
            yield f"| {flags} | {_values(field)} | {_shown(field.default)} | {_cell(field.option.help)} |"


def _values(field: OptionField) -> str:
    info = field.option
    if info.choices is not None:
        return ", ".join(f"`{choice}`" for choice in info.choices)
    kinds = {"bool": "switch", "flag_or_str": "switch or text", "int": "integer", "size": "size", "float": "number"}
    kinds |= {"str": "text", "list": "list of texts", "json": "JSON object"}
    bounds = []
    if info.low is not None:
        bounds.append(f"≥ {_number(info.low)}")
    if info.above is not None:
        bounds.append(f"> {_number(info.above)}")
    if info.high is not None:
        bounds.append(f"≤ {_number(info.high)}")
    return " ".join([kinds[field.kind], *bounds, *(f"or `{word}`" for word in info.words)])


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else str(value)


def _shown(default: Any) -> str:
    if default is None or default in ([], {}, ""):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{' '.join(default) if isinstance(default, list) else default}`"


def metrics() -> str:
    """docs/metrics.md"""
    stats = StatCollector("model", 4096)
    stats.set_cache_config(CacheConfig(16, "float32", 0.9), 1)
    lines = [
        "# Metrics",
        "",
        _NOTE,
        "",
        "`GET /metrics` answers in Prometheus' text format. The names are vLLM's, `vllm:` included, so that dashboards and",
        "alerts go on working; `octavo:` marks what vLLM does not have. Counters end in `_total` on the wire. In Python,",
        "`LLM(..., disable_log_stats=False).get_metrics()` gives the same. The usual `process_*` families are there too.",
        "",
        "| name | type | labels | |",
        "|---|---|---|---|",
    ]
    for family in [*stats.collect(), *_http_families()]:
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        shown = "every cache setting" if family.name.endswith("_info") else ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{family.name}` | {family.type} | {shown} | {_cell(family.documentation)} |")
    return "\n".join(lines) + "\n"


def _http_families() -> Iterator[Any]:
    http = HttpCollector()
    http.observe("POST", "/v1/completions", 200, 0.1)
    yield from http.collect()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


PAGES = {"configuration.md": configuration, "metrics.md": metrics}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())

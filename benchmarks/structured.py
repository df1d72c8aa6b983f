"""Structured output on a real model: are the answers right, and what do they cost?

    python benchmarks/structured.py validate     # 200 requests with 20 schemas at temperature 1, checked by jsonschema
    python benchmarks/structured.py cost --url http://127.0.0.1:8000    # bench serve with and without a schema

Every answer that ends with reason "stop" must be valid; one that is cut by its length is only counted. For the cost,
both runs produce the same number of tokens: plain answers ignore the end, and the schema asks for a list that is longer.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema

from octavo import LLM, SamplingParams, StructuredOutputsParams


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    } | more  # fmt: skip


TEXT, COUNT = {"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0, "maximum": 999}
_PERSON = _object({"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 150}})
_NODE = _object(
    {"value": COUNT, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": _PERSON,
    "nested": _object(
        {"person": _PERSON, "home": _object({"city": TEXT, "zip": {"type": "string", "pattern": "^\\d{5}$"}})}
    ),
    "array bounds": {"type": "array", "items": COUNT, "minItems": 2, "maxItems": 6},
    "matrix": {
        "type": "array",
        "items": {"type": "array", "items": COUNT, "minItems": 3, "maxItems": 3},
        "maxItems": 4,
    },
    "enum": _object({"color": {"enum": ["red", "green", "blue"]}, "size": {"enum": [1, 2, 3, None]}}),
    "unicode enum": _object({"greeting": {"enum": ["héllo", "こんにちは", "привет", "🌶️"]}}),
    "unicode keys": _object({"größe": COUNT, "名前": TEXT, 'é"\\': {"type": "boolean"}}),
    "pattern": _object(
        {"id": {"type": "string", "pattern": "^[A-Z]{2}-\\d{4}$"}, "tag": {"type": "string", "pattern": "^#\\w{1,12}$"}}
    ),
    "formats": _object({"day": {"type": "string", "format": "date"}, "mail": {"type": "string", "format": "email"}}),
    "uuid": _object({"id": {"type": "string", "format": "uuid"}, "host": {"type": "string", "format": "ipv4"}}),
    "numbers": _object(
        {"p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "n": {"type": "integer", "multipleOf": 5}}
    ),
    "linked list": {"$ref": "#/$defs/node", "$defs": {"node": _NODE}},
    "tree": _object({"label": TEXT, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}}),
    "any of": _object(
        {"answer": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "string", "maxLength": 8}, {"type": "null"}]}}
    ),
    "one of": {
        "oneOf": [
            _object({"kind": {"const": "circle"}, "radius": COUNT}),
            _object({"kind": {"const": "box"}, "width": COUNT, "height": COUNT}),
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": COUNT}, "required": ["a"]},
            _object({"a": {"maximum": 99}, "b": TEXT}),
        ]
    },
    "optional": {
        "type": "object",
        "properties": {"a": COUNT, "b": TEXT, "c": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "more properties": {
        "type": "object",
        "properties": {"id": COUNT},
        "required": ["id"],
        "additionalProperties": COUNT,
        "maxProperties": 4,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^k_[a-z]{1,6}$": COUNT},
        "additionalProperties": False,
    },
    "tuple": {"type": "array", "prefixItems": [TEXT, COUNT, {"type": "boolean"}], "items": False, "minItems": 3},
}
LONG_LIST = {"type": "array", "items": _PERSON, "minItems": 500}


def validate(model: str, num_requests: int, max_tokens: int) -> bool:
    """Whether every answer that came to its end is valid."""
    llm = LLM(model, max_model_len=2048, max_num_seqs=32)
    names = [list(SCHEMAS)[i % len(SCHEMAS)] for i in range(num_requests)]
    prompts = [[{"role": "user", "content": f"Write a JSON example for: {name}."}] for name in names]
    params = [
        SamplingParams(
            temperature=1.0, seed=i, max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(json=SCHEMAS[name])
        )
        for i, name in enumerate(names)
    ]  # fmt: skip
    reasons: Counter[str] = Counter()
    num_wrong = 0
    for name, output in zip(names, llm.chat(prompts, params), strict=True):
        choice = output.outputs[0]
        reasons[str(choice.finish_reason)] += 1
        if choice.finish_reason == "stop":
            try:
                jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(choice.text))
            except (ValueError, jsonschema.ValidationError) as error:
                num_wrong += 1
                print(f"{name}: {choice.text!r} is not valid: {error}")
    print(f"{num_requests} requests with {len(SCHEMAS)} schemas: {dict(reasons)}, {num_wrong} not valid")
    return num_wrong == 0 and reasons["stop"] > 0


def cost(url: str, concurrency: int, num_prompts: int, num_tokens: int) -> None:
    """Print the output throughput without and with a schema, one after the other, twice."""
    constraint = {"structured_outputs": {"json": LONG_LIST}}
    rates: dict[str, list[float]] = {"plain": [], "json schema": []}
    for _ in range(2):
        for name, extra in (("plain", {}), ("json schema", constraint)):
            rates[name].append(_bench(url, concurrency, num_prompts, num_tokens, extra))
    plain, constrained = (max(values) for values in rates.values())
    for name, values in rates.items():
        print(f"{name:12s} {' '.join(f'{value:9.1f}' for value in values)} output tokens/s")
    print(f"loss at concurrency {concurrency}: {100 * (1 - constrained / plain):.1f} %")


def _bench(url: str, concurrency: int, num_prompts: int, num_tokens: int, extra: dict[str, Any]) -> float:
    with TemporaryDirectory() as folder:
        words = [
            sys.executable, "-m", "octavo", "bench", "serve", "--base-url", url, "--dataset-name", "random",
            "--random-input-len", "32", "--random-output-len", str(num_tokens), "--num-prompts", str(num_prompts),
            "--max-concurrency", str(concurrency), "--num-warmups", str(concurrency), "--temperature", "1",
            "--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", folder, "--result-filename", "result.json",
            "--extra-body", json.dumps(extra),
        ]  # fmt: skip
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(Path(folder, "result.json").read_text())
    if result["total_output_tokens"] != num_prompts * num_tokens:
        raise SystemExit(f"answers are shorter than asked: {result['total_output_tokens']} tokens")
    return float(result["output_throughput"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("validate", "cost"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-requests", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--concurrency", type=int, default=32)
    args = parser.parse_args()
    if args.what == "validate":
        return 0 if validate(args.model, args.num_requests, args.max_tokens) else 1
    cost(args.url, args.concurrency, 4 * args.concurrency, args.max_tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())

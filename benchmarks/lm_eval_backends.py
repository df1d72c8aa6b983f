"""Score one model through three backends of lm-eval and compare: transformers, Octavo over HTTP, Octavo as vLLM.

    pip install "octavo[lm-eval]"
    python benchmarks/lm_eval_backends.py                       # a tiny random model
    python benchmarks/lm_eval_backends.py --model smollm2       # the demo model, unpacked to float32

Tasks are small and local, written to a folder for the run: choices (loglikelihood), continuations (generate_until) and
perplexity (loglikelihood_rolling). All three backends run in float32 from the same folder, so every log-likelihood must
be equal to 1e-3 and every generated text to the letter, special tokens aside: lm-eval's transformers backend leaves them out
of texts, its vLLM backend asks for them. Exits with 1 when one is not.
"""

import argparse
import asyncio
import json
import os
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from live_server import running_server, tiny_model, unpack_gguf

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-3
MAX_LENGTH = 200
CHOICES = [
    ("One, two, three,", [" four", " dog", " blue"], 0),
    ("The capital of France is", [" Rome", " Paris", " bread"], 1),
    ("Monday, Tuesday,", [" June", " seven", " Wednesday"], 2),
    ("Water freezes into", [" ice", " fire", " stone"], 0),
    ("The opposite of up is", [" cat", " down", " over there"], 1),
    ("Two plus two is", [" eleven", " green", " four"], 2),
    ("A, B, C,", [" D", " Z", " 9"], 0),
    ("The sun rises in the", [" cellar", " east", " soup"], 1),
]
CONTINUATIONS = [
    ("One, two, three, four,", " five, six, seven, eight, nine, ten"),
    ("Monday, Tuesday, Wednesday,", " Thursday, Friday, Saturday, Sunday"),
    ("The capital of Italy is", " Rome."),
    ("10, 20, 30, 40,", " 50, 60, 70, 80"),
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and nobody minds. " * 4,
    "It was a bright cold day in April, and the clocks were all a little late.",
]


def write_tasks(folder: Path) -> list[str]:
    """Tasks and their data as files; the names of the tasks."""
    rows = {
        "choices": [{"question": q, "choices": c, "answer": a} for q, c, a in CHOICES],
        "continuations": [{"prompt": p, "target": t} for p, t in CONTINUATIONS],
        "perplexity": [{"text": text} for text in TEXTS],
    }
    generation = {"until": ["\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0}
    tasks: dict[str, dict[str, Any]] = {
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "continuations": {
            "output_type": "generate_until",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{target}}",
            "target_delimiter": "",
            "generation_kwargs": generation,
            "metric_list": [{"metric": "exact_match"}],
        },
        "perplexity": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    }
    for name, task in tasks.items():
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, rows[name])) + "\n")
        common = {"task": f"local_{name}", "dataset_path": "json", "test_split": "test"}
        task |= common | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return [task["task"] for task in tasks.values()]


def install_stand_in(folder: Path) -> None:
    """compat/vllm as if it were installed, unless a `vllm` is."""
    project = tomllib.loads((ROOT / "compat" / "vllm" / "pyproject.toml").read_text())["project"]
    info = folder / f"vllm-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {project['version']}\n")
    sys.path[:0] = [str(ROOT / "compat" / "vllm"), str(folder)]


def unpacked(name: str, folder: Path) -> str:
    """An alias or a GGUF file as a float32 folder that transformers reads."""
    from octavo.config.args import EngineArgs
    from octavo.engine.find_model import find_model

    return unpack_gguf(find_model(EngineArgs(model=name)), folder, "float32")


def evaluate(backend: str, arguments: dict[str, Any], folder: Path, tasks: list[str]) -> dict[str, Any]:
    """lm-eval's results and samples of one backend."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate(backend, arguments, tasks=tasks, task_manager=manager, log_samples=True, bootstrap_iters=0)


def scores(found: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task.removeprefix('local_')} {metric.removesuffix(',none')}": value
        for task, metrics in sorted(found["results"].items())
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    }


def differences(want: dict[str, Any], got: dict[str, Any], special: list[str]) -> list[str]:
    """Every answer that is not the other's, apart from the texts `special`."""
    found = []
    for task, samples in want["samples"].items():
        others = {sample["doc_id"]: sample for sample in got["samples"][task]}
        for sample in samples:
            pairs = zip(_flat(sample["resps"]), _flat(others[sample["doc_id"]]["resps"]), strict=True)
            for one, other in pairs:
                if isinstance(one, str):
                    same = _without(one, special) == _without(other, special)
                else:
                    same = abs(one - other) < TOLERANCE * max(1, abs(one))  # True and False are numbers here
                if not same:
                    found.append(f"{task} {sample['doc_id']}: {one!r} and {other!r}")
    return found


def _without(text: str, parts: list[str]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return text


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [item for inner in value for item in _flat(inner)]
    return [value]


async def run(args: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    with TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model(folder) if args.model is None else unpacked(args.model, folder / "model")
        special = AutoTokenizer.from_pretrained(model).all_special_tokens
        tasks = write_tasks(folder)
        install_stand_in(folder)
        common = {"pretrained": model, "dtype": "float32", "max_length": MAX_LENGTH}
        results = {"hf": evaluate("hf", {**common, "device": "cpu", "batch_size": 1}, folder, tasks)}
        options = ("--dtype", "float32", "--max-model-len", str(MAX_LENGTH + 50), "--served-model-name", model)
        async with running_server(None, model, options) as server:
            over_http = {"model": model, "base_url": f"{server.url}/v1/completions", "max_length": MAX_LENGTH}
            over_http |= {"tokenizer_backend": "huggingface", "num_concurrent": 1}
            results["local-completions"] = await asyncio.to_thread(
                evaluate, "local-completions", over_http, folder, tasks
            )
        results["vllm"] = evaluate("vllm", {**common, "max_gen_toks": 24}, folder, tasks)
    names = list(scores(results["hf"]))
    print("| backend | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    for backend, found in results.items():
        values = scores(found)
        print(f"| {backend} | " + " | ".join(f"{values[name]:.4f}" for name in names) + " |")
    wrong = [f"{b}: {line}" for b, got in results.items() for line in differences(results["hf"], got, special)]
    print("\n".join([*wrong, f"{len(wrong)} answers differ from the transformers backend's"]))
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="an alias or a GGUF file; default: a tiny random model")
    args = parser.parse_args(argv)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return asyncio.run(run(args))


if __name__ == "__main__":
    sys.exit(main())

"""What one decode step costs the host beside the model: scheduler, worker and output handling, microseconds.

    python benchmarks/host_cost.py [--batches 1 32 256] [--steps 200]

The model's forward pass, its head and the choice of a token from the logits are replaced by tensors that are already there;
everything else is the real engine in one thread, in lock step. Times are thread CPU time, so that a busy machine counts less;
medians over the steps. On a GPU most of the worker's share is one graph replay instead, and steps overlap.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, SamplingParams
from octavo.scheduler.scheduler import Scheduler
from octavo.worker.model_runner import ModelRunner, StepHandle
from octavo.worker.sampler import Sampler

VOCAB_SIZE, HIDDEN = 32000, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "float32",
}


class Clock:
    """Thread CPU time of wrapped functions, by part, for each step."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(list)

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count every call of `owner.name` towards `part`."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time_ns()
            result = function(*args, **kwargs)
            self.parts[part].append((time.thread_time_ns() - started) / 1e3)
            return result

        setattr(owner, name, timed)


def measure(folder: str, batch: int, steps: int) -> dict[str, float]:
    """Median microseconds a step by part."""
    clock = Clock()
    with LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=batch,
        max_model_len=1024,
        async_scheduling=False,
        enable_prefix_caching=False,
    ) as llm:
        model = llm.apply_model(lambda model: model)[0]
        hidden_states, logits = torch.zeros(4096, HIDDEN), torch.randn(4096, VOCAB_SIZE)
        model.forward = lambda input_ids, positions, inputs_embeds=None: hidden_states[: positions.shape[0]]
        model.logits = lambda rows: logits[: rows.shape[0]]
        chosen, is_bad = torch.full((batch,), 7, dtype=torch.int32), torch.zeros(batch, dtype=torch.bool)
        Sampler.sample_plain = lambda self, logits, *args: (chosen[: len(logits)], is_bad[: len(logits)])  # type: ignore
        originals = [(o, n, getattr(o, n)) for o, n in _places(llm)]
        for (owner, name), part in zip(
            _places(llm), ("schedule", "update", "execute", "result", "output"), strict=True
        ):
            clock.wrap(owner, name, part)
        params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [5] * (8 + i % 16)} for i in range(batch)]
        llm.generate(prompts, params, use_tqdm=False)
        for owner, name, function in originals:
            setattr(owner, name, function)
    # The first steps admit and prefill; the rest are steady decodes.
    return {part: statistics.median(values[len(values) // 4 :]) for part, values in clock.parts.items()}


def _places(llm: LLM) -> list[tuple[Any, str]]:
    return [
        (Scheduler, "schedule"),
        (Scheduler, "update"),
        (ModelRunner, "execute"),
        (StepHandle, "result"),
        (llm.llm_engine._outputs, "process"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        for batch in args.batches:
            parts = measure(folder, batch, args.steps)
            shown = "  ".join(f"{part} {value:7.1f}" for part, value in parts.items())
            print(f"batch {batch:4d}: {shown}  total {sum(parts.values()):8.1f} µs", flush=True)


if __name__ == "__main__":
    main()

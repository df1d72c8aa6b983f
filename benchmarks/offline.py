"""Decode, prefill and offline throughput of one model shape with random weights, in this process.

    python benchmarks/offline.py --model benchmarks/configs/llama-3.1-8b --decode 1 8 32 128 256 --prefill 1x1024 64x1024
        --throughput 1000x1024x128 --json result.json

Prompts are random token ids, fresh for each repeat; answers ignore the end token and are greedy unless --temperature is
given. One decode step = (T(256 out) - T(1 out)) / 255, wall clock around `generate`. Figures are medians.
"""

import argparse
import json
import random
import statistics
import sys
import time

from octavo import LLM, SamplingParams


def prompts(rng: random.Random, lengths: list[int], vocab_size: int) -> list[dict]:
    """Token-id prompts of the given lengths."""
    return [{"prompt_token_ids": [rng.randrange(vocab_size - 1000) for _ in range(n)]} for n in lengths]


class Bench:
    def __init__(self, args: argparse.Namespace):
        started = time.perf_counter()
        options = json.loads(args.engine)
        self.llm = LLM(
            args.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=args.max_model_len,
            enable_prefix_caching=False,
            seed=0,
            **options,
        )
        self.vocab_size = self.llm.llm_engine.config.model.vocab_size
        self.rng = random.Random(0)
        self.args = args
        self.results: dict[str, object] = {"start_seconds": time.perf_counter() - started}

    def timed(self, lengths: list[int], outputs: list[int]) -> float:
        """Seconds of one `generate`."""
        batch = prompts(self.rng, lengths, self.vocab_size)
        params = [
            SamplingParams(temperature=self.args.temperature, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in outputs
        ]
        started = time.perf_counter()
        self.llm.generate(batch, params, use_tqdm=False)
        return time.perf_counter() - started

    def decode(self, batch: int) -> None:
        """Milliseconds a step at a context of --context tokens growing by 256."""
        prompts = [self.args.context] * batch
        self.timed(prompts, [8] * batch)
        steps = []
        for _ in range(self.args.repeats):
            short = self.timed(prompts, [1] * batch)
            steps.append((self.timed(prompts, [256] * batch) - short) / 255 * 1e3)
        self.say(f"decode batch {batch} after {self.args.context}", "ms/step", steps)

    def prefill(self, batch: int, length: int) -> None:
        """Time to the first token of `batch` prompts at once."""
        self.timed([length] * batch, [1] * batch)
        seconds = [self.timed([length] * batch, [1] * batch) for _ in range(self.args.repeats)]
        self.say(f"prefill {batch}x{length}", "ms", [s * 1e3 for s in seconds])
        self.say(f"prefill {batch}x{length}", "tok/s", [batch * length / s for s in seconds])

    def throughput(self, lengths: list[int], outputs: list[int], name: str) -> None:
        """Output tokens a second, everything given at once."""
        seconds = [self.timed(lengths, outputs) for _ in range(max(1, self.args.repeats - 2))]
        self.say(f"throughput {name}", "out tok/s", [sum(outputs) / s for s in seconds])

    def say(self, what: str, unit: str, values: list[float]) -> None:
        self.results[f"{what}, {unit}"] = statistics.median(values)
        spread = ", ".join(f"{v:.2f}" for v in values)
        print(f"{what:<28} {statistics.median(values):10.2f} {unit}   ({spread})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--decode", type=int, nargs="*", default=[], help="batch sizes")
    parser.add_argument("--context", type=int, default=128, help="prompt tokens before --decode")
    parser.add_argument("--prefill", nargs="*", default=[], help="BATCHxLENGTH")
    parser.add_argument(
        "--throughput", nargs="*", default=[], help="REQUESTSxINxOUT, or REQUESTSxragged (100-1024 each)"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", default="{}", help="more engine arguments, JSON")
    parser.add_argument("--json", help="write the results here")
    args = parser.parse_args()
    bench = Bench(args)
    print(f"start {bench.results['start_seconds']:.2f} s", flush=True)
    for batch in args.decode:
        bench.decode(batch)
    for text in args.prefill:
        bench.prefill(*map(int, text.split("x")))
    for text in args.throughput:
        count, *rest = text.split("x")
        if rest == ["ragged"]:
            rng = random.Random(0)
            pairs = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(int(count))]
            bench.throughput([i for i, _ in pairs], [o for _, o in pairs], text)
        else:
            bench.throughput([int(rest[0])] * int(count), [int(rest[1])] * int(count), text)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(bench.results, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())

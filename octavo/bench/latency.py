"""`octavo bench latency`: one batch of equal requests, again and again."""

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from octavo.bench.report import write_json
from octavo.config.args import EngineArgs
from octavo.config.options import check_options, option
from octavo.errors import ServerError
from octavo.llm import LLM
from octavo.types.prompts import TokensPrompt
from octavo.types.sampling_params import SamplingParams

_GROUP = "Benchmark"
PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(kw_only=True)
class LatencyArgs:
    """Options of `octavo bench latency` besides the engine's."""

    input_len: int = option(32, "Prompt tokens of each request.", group=_GROUP, low=1)
    output_len: int = option(128, "Answer tokens of each request.", group=_GROUP, low=1)
    batch_size: int = option(8, "Requests at once.", group=_GROUP, low=1)
    n: int = option(1, "Answers to each request.", group=_GROUP, low=1)
    num_iters_warmup: int = option(10, "Rounds before the measurement.", group=_GROUP, low=0)
    num_iters: int = option(30, "Measured rounds.", group=_GROUP, low=1)
    output_json: str | None = option(None, "File to write the result to.", group=_GROUP)
    disable_detokenize: bool = option(False, "Measure tokens only, without making text of them.", group=_GROUP)

    def __post_init__(self) -> None:
        check_options(self)


def run_latency(engine_options: Mapping[str, Any], args: LatencyArgs) -> int:
    """Measure, print, write. Prefix caching is off unless asked for: rounds must not spare each other's work."""
    engine_args = EngineArgs(**({"enable_prefix_caching": False, "disable_log_stats": True} | dict(engine_options)))
    with LLM.from_engine_args(engine_args) as llm:
        result = measure_latency(llm, args)
    print(f"Avg latency: {result['avg_latency']} seconds")
    for percentile, seconds in result["percentiles"].items():
        print(f"{percentile}% percentile latency: {seconds} seconds")
    print(f"Median time to first token: {np.median(result['first_token_latencies']) * 1e3:.2f} ms")
    if args.output_len > 1:
        print(f"Median decode step: {np.median(result['decode_step_latencies']) * 1e3:.3f} ms")
    if args.output_json is not None:
        write_json(args.output_json, result)
    return 0


def measure_latency(llm: LLM, args: LatencyArgs) -> dict[str, Any]:
    """Seconds of each round, from the first request handed over to the last answer complete.

    `first_token_latencies` is when the last of the batch had its first token, `decode_step_latencies` the time from there
    to the end over the output_len - 1 steps that remain.
    """
    config = llm.llm_engine.model_config
    rng = np.random.default_rng(config.seed)
    params = SamplingParams(
        n=args.n,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=args.output_len,
        detokenize=not args.disable_detokenize and llm.llm_engine.config.tokenizer.path is not None,
    )
    rounds = [_one_round(llm, args, params, rng) for _ in range(args.num_iters_warmup + args.num_iters)]
    measured = rounds[args.num_iters_warmup :]
    latencies = [total for total, _ in measured]
    return {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES},
        "first_token_latencies": [first for _, first in measured],
        "decode_step_latencies": [
            (total - first) / (args.output_len - 1) for total, first in measured if args.output_len > 1
        ],
    }


def _one_round(llm: LLM, args: LatencyArgs, params: SamplingParams, rng: np.random.Generator) -> tuple[float, float]:
    """(seconds of the round, seconds until every request had its first token)."""
    vocab_size = llm.llm_engine.model_config.vocab_size
    batch = rng.integers(vocab_size, size=(args.batch_size, args.input_len)).tolist()
    started = perf_counter()
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in batch], params, use_tqdm=False)
    total = perf_counter() - started
    first = 0.0
    for output in outputs:
        if output.error is not None:
            raise ServerError(f"a request of the benchmark failed: {output.error}")
        metrics = output.metrics
        assert metrics is not None and metrics.first_token_time is not None and metrics.last_token_time is not None
        # Times of the metrics are on another clock; what lies between them is not.
        first = max(first, total - (metrics.last_token_time - metrics.first_token_time))
    return total, first

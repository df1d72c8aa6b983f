"""From the results of single requests to the numbers of a run.

TTFT: from sending to the first text. TPOT: (latency - TTFT) / (tokens - 1), one value a request. ITL: between
neighbouring pieces of a stream, one value a gap, however many tokens a piece carries. E2EL: from sending to the end of the
answer. All in milliseconds; requests that failed count as failed and in nothing else.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.bench.backends import RequestResult
from octavo.errors import ClientError

METRICS = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)"}
METRICS |= {"itl": "Inter-token Latency", "e2el": "End-to-end Latency"}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def tpot(result: RequestResult) -> float | None:
    """Seconds a token after the first; None when there is no second one or the first one's time is unknown."""
    if result.ttft is None or result.latency is None or result.output_len < 2:
        return None
    return (result.latency - result.ttft) / (result.output_len - 1)


def summarize(
    results: Sequence[RequestResult], duration: float, percentiles: Sequence[float], goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Every number of the run. `duration` in seconds; `goodput` maps a metric to the most milliseconds it may take."""
    good = [result for result in results if result.success]
    num_input, num_output = sum(r.prompt_len for r in good), sum(r.output_len for r in good)
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(_is_good(r, goodput) for r in good) / duration if goodput else None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": peak_output_rate(good),
        "max_concurrent_requests": peak_concurrency(good),
    }
    for name, values in samples_of(good).items():
        milliseconds = [value * 1e3 for value in values]
        summary |= {f"{key}_{name}_ms": value for key, value in statistics_of(milliseconds, percentiles).items()}
    return summary


def samples_of(results: Sequence[RequestResult]) -> dict[str, list[float]]:
    """Seconds of every latency metric, of the results that have it."""
    return {
        "ttft": [r.ttft for r in results if r.ttft is not None],
        "tpot": [value for r in results if (value := tpot(r)) is not None],
        "itl": [gap for r in results for gap in r.itls],
        "e2el": [r.latency for r in results if r.latency is not None],
    }


def statistics_of(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """mean, median, std and the percentiles as pNN; None without values."""
    names = ["mean", "median", "std", *(f"p{percentile:g}" for percentile in percentiles)]
    if not values:
        return dict.fromkeys(names)
    found = [np.mean(values), np.median(values), np.std(values), *np.percentile(values, list(percentiles))]
    return {name: float(value) for name, value in zip(names, found, strict=True)}


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """`["ttft:200", "e2el:5000"]` as numbers."""
    goodput = {}
    for word in words:
        name, _, text = word.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = -1.0
        if name not in GOODPUT_METRICS or not limit >= 0:
            raise ClientError(
                f"goodput={word!r} is not allowed; write METRIC:MILLISECONDS with one of {', '.join(GOODPUT_METRICS)}.",
                param="goodput",
            )
        goodput[name] = limit
    return goodput


def _is_good(result: RequestResult, goodput: Mapping[str, float]) -> bool:
    """Whether a request kept every limit. An answer of one token has no TPOT, and so keeps any."""
    values = {"ttft": result.ttft, "tpot": tpot(result) or 0.0, "e2el": result.latency}
    return all((value := values[name]) is not None and value * 1e3 <= limit for name, limit in goodput.items())


def piece_times(result: RequestResult) -> list[float]:
    """When each piece of a streamed answer came, on the clock of `start`."""
    if result.ttft is None:
        return []
    return (result.start + result.ttft + np.cumsum([0.0, *result.itls])).tolist()


def peak_output_rate(results: Sequence[RequestResult]) -> float:
    """Most tokens in one second of the run, seconds counted from its first request.

    A request's tokens are spread evenly over its pieces; without a stream they all come at its end.
    """
    if not results:
        return 0.0
    first = min(r.start for r in results)
    seconds: dict[int, float] = {}
    for result in results:
        times = piece_times(result) or [result.start + (result.latency or 0.0)]
        for time in times:
            second = math.floor(time - first)
            seconds[second] = seconds.get(second, 0.0) + result.output_len / len(times)
    return max(seconds.values())


def peak_concurrency(results: Sequence[RequestResult]) -> int:
    """Most requests that were open at one moment."""
    changes = [(r.start, 1) for r in results] + [(r.start + (r.latency or 0.0), -1) for r in results]
    changes.sort()  # at one moment, what ends goes before what begins
    return int(max(np.cumsum([change for _, change in changes]), default=0))

"""Numbers of a run from scripted results."""

import asyncio
import math
import statistics

import numpy as np
import pytest

from octavo.bench import load
from octavo.bench.arrivals import arrival_times, ramp_times
from octavo.bench.backends import RequestResult
from octavo.bench.load import run_load
from octavo.bench.serving_metrics import parse_goodput, peak_concurrency, peak_output_rate, summarize
from octavo.errors import ClientError
from tests.bench.scripted import Clock


def result(start: float, ttft: float, itls: list[float], tokens: int | None = None, **fields) -> RequestResult:
    latency = ttft + sum(itls)
    tokens = len(itls) + 1 if tokens is None else tokens
    return RequestResult(10, start, True, latency, ttft, itls, tokens, **fields)


RESULTS = [
    result(0.0, 0.1, [0.02, 0.04]),
    result(0.5, 0.3, [0.1], tokens=5),  # several tokens in a piece
    result(1.2, 0.2, []),  # one token: no TPOT
    RequestResult(10, 1.3, False, error="status 500: no", output_len=3),
]


def test_summary_of_scripted_results():
    summary = summarize(RESULTS, duration=2.0, percentiles=[50.0, 99.9], goodput={"ttft": 250.0, "tpot": 40.0})
    assert (summary["completed"], summary["failed"]) == (3, 1)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (30, 3 + 5 + 1)
    assert summary["request_throughput"] == 1.5
    assert summary["output_throughput"] == 4.5
    assert summary["total_token_throughput"] == 19.5
    assert summary["request_goodput"] == 1.0  # the second has a TTFT of 300 ms; one token keeps any TPOT
    ttfts = [100.0, 300.0, 200.0]
    assert summary["mean_ttft_ms"] == pytest.approx(200.0)
    assert summary["median_ttft_ms"] == pytest.approx(200.0)
    assert summary["std_ttft_ms"] == pytest.approx(statistics.pstdev(ttfts))
    assert summary["p99.9_ttft_ms"] == pytest.approx(200 + 100 * (0.999 - 0.5) / 0.5)
    # (latency - TTFT) / (tokens - 1): 60 / 2 and 100 / 4
    assert summary["mean_tpot_ms"] == pytest.approx((30 + 25) / 2)
    assert summary["mean_itl_ms"] == pytest.approx((20 + 40 + 100) / 3)
    assert summary["p50_itl_ms"] == pytest.approx(40)
    assert summary["mean_e2el_ms"] == pytest.approx((160 + 400 + 200) / 3)


def test_a_run_without_success_has_no_latencies():
    summary = summarize(RESULTS[3:], 1.0, [99.0], {})
    assert (summary["completed"], summary["failed"], summary["request_goodput"]) == (0, 1, None)
    assert summary["mean_ttft_ms"] is None and summary["p99_e2el_ms"] is None
    assert (summary["max_output_tokens_per_s"], summary["max_concurrent_requests"]) == (0.0, 0)


def test_peaks():
    # Tokens at 0.1, 0.9, 1.7 and at 0.8, 1.6: three in the first second.
    assert peak_output_rate([result(5.0, 0.1, [0.8, 0.8]), result(5.5, 0.3, [0.8])]) == 3.0
    # Without a stream the tokens come at the end.
    assert peak_output_rate([RequestResult(1, 0.0, True, 2.5, None, [], 40)]) == 40.0
    # 0–1, 0.5–1.5, 1–2: what ends at 1 is gone when the third begins.
    assert peak_concurrency([result(0.0, 1.0, []), result(0.5, 1.0, []), result(1.0, 1.0, [])]) == 2


def test_goodput_is_read_or_refused():
    assert parse_goodput(["ttft:200", "e2el:5000.5"]) == {"ttft": 200.0, "e2el": 5000.5}
    for word in ("itl:5", "ttft", "ttft:fast", "tpot:-1", "tpot:nan"):
        with pytest.raises(ClientError, match="goodput="):
            parse_goodput([word])


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 50.0])
def test_arrivals_end_at_n_over_rate(burstiness: float):
    times = arrival_times(400, 8.0, burstiness, np.random.default_rng(0))
    assert times[-1] == pytest.approx(400 / 8.0)
    gaps = np.diff([0.0, *times])
    assert (gaps >= 0).all()
    # A gamma distribution's standard deviation is its mean / sqrt(shape).
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.3)
    assert times == arrival_times(400, 8.0, burstiness, np.random.default_rng(0))


def test_an_infinite_rate_sends_at_once():
    assert arrival_times(3, math.inf, 1.0, np.random.default_rng(0)) == [0.0, 0.0, 0.0]


def test_ramps():
    linear = np.diff(ramp_times(2000, 1, 9, "linear", 1e6, np.random.default_rng(0)))  # almost even gaps
    assert (1 / linear[0], 1 / linear[999], 1 / linear[-1]) == pytest.approx((1, 5, 9), rel=0.02)
    exponential = np.diff(ramp_times(2000, 1, 16, "exponential", 1e6, np.random.default_rng(0)))
    assert (1 / exponential[0], 1 / exponential[999], 1 / exponential[-1]) == pytest.approx((1, 4, 16), rel=0.02)
    with pytest.raises(ClientError, match="above 0"):
        ramp_times(5, 0, 9, "linear", 1.0, np.random.default_rng(0))


async def test_load_is_sent_on_time_and_no_more_than_allowed_at_once(monkeypatch: pytest.MonkeyPatch):
    sleep = asyncio.sleep
    clock = Clock(monkeypatch, load)

    async def virtual_sleep(seconds: float) -> None:
        for _ in range(3):
            await sleep(0)  # let what was started run first
        clock.now += seconds

    monkeypatch.setattr(load.asyncio, "sleep", virtual_sleep)
    sent: list[tuple[int, float]] = []
    release = asyncio.Event()
    open_now, most_open = 0, 0

    async def send(index: int) -> RequestResult:
        nonlocal open_now, most_open
        sent.append((index, clock.now - 100.0))
        open_now += 1
        most_open = max(most_open, open_now)
        if index == 4:
            release.set()
        if index >= 2:
            await release.wait()
        open_now -= 1
        return RequestResult(index, success=True)

    done: list[int] = []
    results, duration = await run_load(send, [0.0, 1.5, 2.0, 2.5, 4.0], 3, lambda r: done.append(r.prompt_len))
    assert sent == [(0, 0.0), (1, 1.5), (2, 2.0), (3, 2.5), (4, 4.0)]
    assert (most_open, duration) == (3, 4.0)
    assert [r.prompt_len for r in results] == sorted(done) == [0, 1, 2, 3, 4]

    release.clear()
    most_open = 0
    task = asyncio.ensure_future(run_load(send, [0.0] * 8, 2))
    for _ in range(20):
        await sleep(0)
    assert most_open == 2 and not task.done()  # 2 and 3 hold both places, 4 cannot free them
    release.set()
    results, _ = await task
    assert len(results) == 8

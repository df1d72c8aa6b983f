"""Prometheus families, the log line and the offline reader."""

import logging

from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.stats import FinishedRequest, IterationStats
from octavo.metrics import (
    Counter,
    Gauge,
    Histogram,
    StatCollector,
    StatLine,
    make_registry,
    read_metrics,
    token_buckets,
)
from octavo.types.stats import SchedulerStats
from tests.server.fake_engine import FakeEngine, make_config
from tests.server.http import client_of, make_app

# What dashboards ask for.
VLLM_NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prompt_tokens",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "cache_config_info",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
    "iteration_tokens_total",
]


def finished(reason: str = "stop", **fields) -> FinishedRequest:
    known = {"index": 0, "n": 1, "max_tokens": 16, "num_prompt_tokens": 50, "num_generation_tokens": 5}
    return FinishedRequest(reason, **{**known, **fields})


def by_name(collector: StatCollector) -> dict:
    return {
        (metric.name, metric.labels.get("finished_reason")): metric for metric in read_metrics(make_registry(collector))
    }


def test_token_buckets():
    assert token_buckets(120) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(1) == (1,)


def test_counting_a_step():
    stats = StatCollector("tiny", 128)
    scheduler = SchedulerStats(num_running=3, num_waiting=2, kv_cache_usage=0.25, prefix_cache_queries=50)
    scheduler.prefix_cache_hits, scheduler.num_preemptions = 32, 1
    scheduler.num_prompt_tokens, scheduler.num_generation_tokens = 18, 2
    iteration = IterationStats(num_prompt_tokens=50, num_cached_tokens=32, num_generation_tokens=2)
    iteration.time_to_first_token, iteration.inter_token_latency = [0.03], [0.012, 100.0]
    iteration.finished = [finished(num_cached_tokens=32, decode_seconds=0.4), finished("length", index=1, n=2)]
    stats.record(scheduler, iteration)
    stats.record(scheduler, None)
    found = by_name(stats)

    def value(name: str, reason: str | None = None):
        return found["vllm:" + name, reason].value

    assert (value("num_requests_running"), value("num_requests_waiting"), value("kv_cache_usage_perc")) == (3, 2, 0.25)
    assert (value("prefix_cache_queries"), value("prefix_cache_hits"), value("num_preemptions")) == (100, 64, 2)
    assert (value("prompt_tokens"), value("prompt_tokens_cached"), value("generation_tokens")) == (50, 32, 2)
    assert [value("request_success", r) for r in ("stop", "length", "abort", "error")] == [1, 1, 0, 0]
    latency = found["vllm:inter_token_latency_seconds", None]
    assert isinstance(latency, Histogram)
    assert (latency.count, latency.buckets["0.01"], latency.buckets["0.025"], latency.buckets["+Inf"]) == (2, 0, 1, 2)
    assert abs(latency.sum - 100.012) < 1e-9
    assert found["vllm:request_time_per_output_token_seconds", None].sum == 0.1
    # The prompt belongs to the request, the tokens to each answer.
    assert found["vllm:request_prompt_tokens", None].count == 1
    assert found["vllm:request_prefill_kv_computed_tokens", None].sum == 18
    assert found["vllm:request_generation_tokens", None].count == 2
    assert found["vllm:iteration_tokens_total", None].sum == 40
    assert all(metric.labels["model_name"] == "tiny" for metric in found.values())


def test_aborts_are_counted_and_gauges_fall_to_zero():
    """FC-156, FC-157."""
    stats = StatCollector("tiny", 128)
    stats.record(SchedulerStats(num_running=5), IterationStats(num_generation_tokens=10))
    ends = [finished("abort", num_generation_tokens=2) for _ in range(5)]
    stats.record(None, IterationStats(finished=ends))
    stats.record(SchedulerStats(), None)
    found = by_name(stats)
    assert found["vllm:request_success", "abort"].value == 5
    assert found["vllm:request_generation_tokens", None].sum == found["vllm:generation_tokens", None].value == 10
    assert found["vllm:num_requests_running", None].value == 0


def test_kinds_of_the_reader():
    found = by_name(StatCollector("tiny", 128))
    assert isinstance(found["vllm:num_requests_running", None], Gauge)
    assert isinstance(found["vllm:prompt_tokens", None], Counter)
    assert isinstance(found["vllm:e2e_request_latency_seconds", None], Histogram)
    assert not any(name.startswith("process_") for name, _ in found)


async def test_exposition():
    """The page parses, holds vLLM's names, and is the same however often it is read."""
    stats = StatCollector("tiny", 128)
    config = make_config()
    stats.set_cache_config(config.cache, 77)
    stats.record(SchedulerStats(num_running=1), IterationStats(num_generation_tokens=3, finished=[finished()]))
    async with client_of(app=make_app(FakeEngine(), stats)) as client:
        await client.get("/v1/models")
        await client.get("/made/up/path")
        await client.request("MADEUP", "/v1/models")
        pages = [await client.get("/metrics") for _ in range(3)]
        openmetrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert pages[0].headers["content-type"].startswith("text/plain")
    assert openmetrics.text.rstrip().endswith("# EOF")
    families = {family.name: family for family in text_string_to_metric_families(pages[0].text)}
    assert {"vllm:" + name for name in VLLM_NAMES} <= set(families)
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 3.0' in pages[0].text
    (info,) = families["vllm:cache_config_info"].samples
    assert (info.labels["num_gpu_blocks"], info.labels["block_size"], info.value) == ("77", "16", 1)
    lines = [[line for line in page.text.splitlines() if line.startswith("vllm:")] for page in pages]
    assert lines[0] == lines[1] == lines[2]
    # Paths that clients make up must not become labels.
    handlers = {sample.labels["handler"] for sample in families["http_requests"].samples}
    assert handlers == {"/v1/models", "none"}
    assert {sample.labels["method"] for sample in families["http_requests"].samples} == {"GET", "other"}


def test_log_line(caplog):
    line = StatLine()
    line.log()
    assert not caplog.records
    step = SchedulerStats(num_running=2, num_waiting=1, kv_cache_usage=0.5, prefix_cache_queries=10)
    step.prefix_cache_hits, step.num_prompt_tokens = 4, 10
    line.record(step, IterationStats(num_generation_tokens=4))
    with caplog.at_level(logging.INFO):
        line.log()
    (record,) = caplog.records
    message = record.getMessage()
    assert "running 2, waiting 1" in message and "KV cache 50.0%" in message and "prefix cache hits 40.0%" in message
    line.record(SchedulerStats(), None)
    line.log()
    assert len(caplog.records) == 1

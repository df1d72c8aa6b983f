"""What operators watch: Prometheus families under vLLM's names and meanings, the log line, and an offline reader.

The names start with `vllm:` on purpose: dashboards and alerts people already have go on working.

Counting happens on the event loop after every step, so it must cost next to nothing: plain Python numbers, turned into
Prometheus families only when somebody scrapes (`StatCollector.collect`). One collector and one registry an application;
nothing global.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from octavo.config.engine import CacheConfig
from octavo.engine.stats import FinishedRequest, IterationStats
from octavo.logger import get_logger
from octavo.types.outputs import FinishReason
from octavo.types.stats import SchedulerStats

logger = get_logger(__name__)

PREFIX = "vllm:"

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)
HTTP_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


def token_buckets(max_value: int) -> tuple[float, ...]:
    """The series 1, 2, 5, 10, 20, 50 … up to `max_value`."""
    bounds: list[float] = []
    power = 1
    while power <= max_value:
        bounds += [float(power * digit) for digit in (1, 2, 5) if power * digit <= max_value]
        power *= 10
    return tuple(bounds)


class BucketCounts:
    """A histogram's numbers: how many values fell under each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one counts what is above every bound
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        for value in values:
            self.observe(value)

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' form: for each upper bound, how many values are at most that."""
        total = 0
        buckets = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append((str(bound) if bound != float("inf") else "+Inf", float(total)))
        return buckets


# Gauges and counters by attribute name of `StatCollector`: (family, sentence).
_GAUGES = {
    "num_running": ("num_requests_running", "Requests in the running batch."),
    "num_waiting": ("num_requests_waiting", "Requests waiting to be scheduled."),
    "kv_cache_usage": ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1."),
}
_COUNTERS = {
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "num_preemptions": ("num_preemptions", "Requests preempted."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that got their first token."),
    "prompt_tokens_cached": ("prompt_tokens_cached", "Of the prompt tokens, those found in a cache."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
}
# vLLM's names for what is in memory.
SLEEP_STATES = {"awake": None, "weights_offloaded": 1, "discard_all": 2}
RESTARTS = ("octavo:engine_restarts", "Restarts of the engine core after it died or hung.")


class StatCollector(Collector):
    """The engine's statistics as Prometheus families; a `StatLogger` for the engine, a collector for the registry."""

    def __init__(self, model_name: str, max_model_len: int, engine_index: int = 0):
        self.labels = {"model_name": model_name, "engine": str(engine_index)}
        self.num_running = 0
        self.num_waiting = 0
        self.kv_cache_usage = 0.0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.engine_restarts = 0
        self.sleep_level: int | None = None
        self.finished = {str(reason): 0 for reason in FinishReason}
        self.cache_config: dict[str, str] = {}
        tokens = token_buckets(max_model_len)
        self.time_to_first_token = BucketCounts(FIRST_TOKEN_SECONDS)
        self.inter_token_latency = BucketCounts(TOKEN_SECONDS)
        self.time_per_output_token = BucketCounts(TOKEN_SECONDS)
        self.e2e = BucketCounts(REQUEST_SECONDS)
        self.queue = BucketCounts(REQUEST_SECONDS)
        self.prefill = BucketCounts(REQUEST_SECONDS)
        self.decode = BucketCounts(REQUEST_SECONDS)
        self.inference = BucketCounts(REQUEST_SECONDS)
        self.request_prompt_tokens = BucketCounts(tokens)
        self.request_generation_tokens = BucketCounts(tokens)
        self.request_max_tokens = BucketCounts(tokens)
        self.request_computed_tokens = BucketCounts(tokens)
        self.request_n = BucketCounts(ANSWERS)
        self.request_preemptions = BucketCounts(ANSWERS)
        self.step_tokens = BucketCounts(STEP_TOKENS)
        self._histograms = {
            "time_to_first_token_seconds": (self.time_to_first_token, "Arrival to first token."),
            "inter_token_latency_seconds": (self.inter_token_latency, "Between one output and the next."),
            "request_time_per_output_token_seconds": (self.time_per_output_token, "Mean time per token of a request."),
            "e2e_request_latency_seconds": (self.e2e, "Arrival to end."),
            "request_queue_time_seconds": (self.queue, "Arrival to first scheduling."),
            "request_prefill_time_seconds": (self.prefill, "First scheduling to first token."),
            "request_decode_time_seconds": (self.decode, "First token to last token."),
            "request_inference_time_seconds": (self.inference, "First scheduling to last token."),
            "request_prompt_tokens": (self.request_prompt_tokens, "Prompt tokens of a request."),
            "request_generation_tokens": (self.request_generation_tokens, "Tokens generated for an answer."),
            "request_params_max_tokens": (self.request_max_tokens, "max_tokens of a request."),
            "request_prefill_kv_computed_tokens": (self.request_computed_tokens, "Prompt tokens not found in a cache."),
            "request_params_n": (self.request_n, "n of a request."),
            "request_num_preemptions": (self.request_preemptions, "How often an answer was preempted."),
            "iteration_tokens_total": (self.step_tokens, "Tokens computed in a step."),
        }

    def set_cache_config(self, cache: CacheConfig, num_blocks: int) -> None:
        """Publish the cache settings as labels of `cache_config_info`."""
        settings = {name: str(value) for name, value in asdict(cache).items()}
        self.cache_config = {**settings, "num_gpu_blocks": str(num_blocks)}

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        """Take in one step."""
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats)
        if iteration_stats is not None:
            self._record_iteration(iteration_stats)

    def log(self) -> None:
        """Nothing to say: scrapes ask."""

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        self.num_running = stats.num_running
        self.num_waiting = stats.num_waiting
        self.kv_cache_usage = stats.kv_cache_usage
        self.sleep_level = stats.sleep_level
        self.prefix_cache_queries += stats.prefix_cache_queries
        self.prefix_cache_hits += stats.prefix_cache_hits
        self.num_preemptions += stats.num_preemptions
        tokens = stats.num_prompt_tokens + stats.num_generation_tokens
        if tokens:
            self.step_tokens.observe(tokens)

    def _record_iteration(self, stats: IterationStats) -> None:
        self.prompt_tokens += stats.num_prompt_tokens
        self.prompt_tokens_cached += stats.num_cached_tokens
        self.generation_tokens += stats.num_generation_tokens
        self.engine_restarts += stats.num_engine_restarts
        self.time_to_first_token.observe_all(stats.time_to_first_token)
        self.inter_token_latency.observe_all(stats.inter_token_latency)
        for request in stats.finished:
            self._record_finished(request)

    def _record_finished(self, request: FinishedRequest) -> None:
        self.finished[request.finish_reason] += 1
        self.e2e.observe(request.e2e_seconds)
        self.queue.observe(request.queue_seconds)
        self.prefill.observe(request.prefill_seconds)
        self.decode.observe(request.decode_seconds)
        self.inference.observe(request.inference_seconds)
        self.request_generation_tokens.observe(request.num_generation_tokens)
        self.request_preemptions.observe(request.num_preemptions)
        if request.num_generation_tokens > 1:
            self.time_per_output_token.observe(request.seconds_per_output_token)
        if request.index == 0:
            self.request_prompt_tokens.observe(request.num_prompt_tokens)
            self.request_computed_tokens.observe(request.num_prompt_tokens - request.num_cached_tokens)
            self.request_n.observe(request.n)
            if request.max_tokens is not None:
                self.request_max_tokens.observe(request.max_tokens)

    def collect(self) -> Iterator[MetricFamily]:
        """Everything counted so far; called by a scrape."""
        names, values = list(self.labels), list(self.labels.values())
        for attribute, (name, sentence) in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, sentence, labels=names)
            gauge.add_metric(values, getattr(self, attribute))
            yield gauge
        for attribute, (name, sentence) in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, sentence, labels=names)
            counter.add_metric(values, getattr(self, attribute))
            yield counter
        sleep = GaugeMetricFamily(
            PREFIX + "engine_sleep_state", "1 for what the engine is, asleep or not.", labels=[*names, "sleep_state"]
        )
        for state, level in SLEEP_STATES.items():
            sleep.add_metric([*values, state], self.sleep_level == level)
        yield sleep
        restarts = CounterMetricFamily(*RESTARTS, labels=names)
        restarts.add_metric(values, self.engine_restarts)
        yield restarts
        sources = CounterMetricFamily(
            PREFIX + "prompt_tokens_by_source", "Prompt tokens by where their KV came from.", labels=[*names, "source"]
        )
        sources.add_metric([*values, "local_compute"], self.prompt_tokens - self.prompt_tokens_cached)
        sources.add_metric([*values, "local_cache_hit"], self.prompt_tokens_cached)
        yield sources
        success = CounterMetricFamily(
            PREFIX + "request_success", "Answers that ended, by reason.", labels=[*names, "finished_reason"]
        )
        for reason, count in self.finished.items():
            success.add_metric([*values, reason], count)
        yield success
        for name, (histogram, sentence) in self._histograms.items():
            family = HistogramMetricFamily(PREFIX + name, sentence, labels=names)
            family.add_metric(values, histogram.cumulative(), histogram.sum)
            yield family
        if self.cache_config:
            info = GaugeMetricFamily(
                PREFIX + "cache_config_info", "Settings of the KV cache.", labels=["engine", *self.cache_config]
            )
            info.add_metric([self.labels["engine"], *self.cache_config.values()], 1)
            yield info


class HttpCollector(Collector):
    """Counts of answered HTTP requests, under the names of the usual ASGI instrumentation."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, str], int] = {}  # (route, method, "2xx") -> count
        self.seconds: dict[tuple[str, str], BucketCounts] = {}  # (route, method)
        self.rejections = 0  # answered 429: the queue was full

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        key = (route, method, f"{status // 100}xx")
        self.requests[key] = self.requests.get(key, 0) + 1
        self.seconds.setdefault((route, method), BucketCounts(HTTP_SECONDS)).observe(seconds)
        self.rejections += status == 429

    def collect(self) -> Iterator[MetricFamily]:
        total = CounterMetricFamily("http_requests", "Requests answered.", labels=["handler", "method", "status"])
        for key, count in self.requests.items():
            total.add_metric(key, count)
        yield total
        duration = HistogramMetricFamily(
            "http_request_duration_seconds", "Time to the end of the answer.", labels=["handler", "method"]
        )
        for labels, histogram in self.seconds.items():
            duration.add_metric(labels, histogram.cumulative(), histogram.sum)
        yield duration
        rejected = CounterMetricFamily(
            PREFIX + "admission_rejections", "Requests refused at the door.", labels=["reason"]
        )
        rejected.add_metric(["queue_full"], self.rejections)
        yield rejected


def make_registry(*collectors: Collector) -> CollectorRegistry:
    """A registry of its own for one application, with the process' memory, CPU and file counts."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for collector in collectors:
        registry.register(collector)
    return registry


class StatLine:
    """A `StatLogger` that sums up each interval in one log line, and is silent while nothing happens."""

    def __init__(self, engine_index: int = 0) -> None:
        self.engine_index = engine_index
        self._latest = SchedulerStats()
        self._hit_rate = 0.0  # of the last interval that looked anything up
        self._reset()

    def _reset(self) -> None:
        self._since = time.monotonic()
        self._prompt_tokens = self._generation_tokens = self._queries = self._hits = 0

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        if scheduler_stats is not None:
            self._latest = scheduler_stats
            self._prompt_tokens += scheduler_stats.num_prompt_tokens
            self._queries += scheduler_stats.prefix_cache_queries
            self._hits += scheduler_stats.prefix_cache_hits
        if iteration_stats is not None:
            self._generation_tokens += iteration_stats.num_generation_tokens

    def log(self) -> None:
        stats, seconds = self._latest, max(time.monotonic() - self._since, 1e-9)
        if self._queries:
            self._hit_rate = self._hits / self._queries
        if self._prompt_tokens or self._generation_tokens or stats.num_running or stats.num_waiting:
            logger.info(
                "engine %d: prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, "
                "KV cache %.1f%%, prefix cache hits %.1f%%",
                self.engine_index,
                self._prompt_tokens / seconds,
                self._generation_tokens / seconds,
                stats.num_running,
                stats.num_waiting,
                100 * stats.kv_cache_usage,
                100 * self._hit_rate,
            )
        self._reset()


@dataclass
class Metric:
    """One time series as `LLM.get_metrics` returns it."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only rises; the name has no `_total`."""

    value: int


@dataclass
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass
class Histogram(Metric):
    """`buckets` maps each upper bound, as text, to how many values were at most that."""

    count: int
    sum: float
    buckets: dict[str, int] = field(default_factory=dict)


@dataclass
class Vector(Metric):
    """Counters that differ in one position label, in order."""

    values: list[int]


def read_metrics(registry: CollectorRegistry) -> list[Metric]:
    """A snapshot of every `vllm:` family in `registry`, one entry a combination of labels."""
    found: list[Metric] = []
    for family in registry.collect():
        if not family.name.startswith(PREFIX):
            continue
        if family.type == "histogram":
            found += _read_histograms(family)
            continue
        for sample in family.samples:
            if family.type == "counter":
                found.append(Counter(family.name, dict(sample.labels), int(sample.value)))
            else:
                found.append(Gauge(family.name, dict(sample.labels), float(sample.value)))
    return found


def _read_histograms(family: MetricFamily) -> list[Histogram]:
    by_labels: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        histogram = by_labels.setdefault(tuple(labels.items()), Histogram(family.name, labels, 0, 0.0))
        if sample.name.endswith("_bucket"):
            histogram.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            histogram.count = int(sample.value)
        else:
            histogram.sum = float(sample.value)
    return list(by_labels.values())
